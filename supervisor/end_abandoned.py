"""Ends a job's own Ray head and Redis after its orphans.

`python -m supervisor.end_abandoned RUN_DIR SLOT`, started by the last slot that leaves,
since no daemon is there to do it. Where one is by now, they are that one's, and nothing is
touched.
"""

import os
import sys
import time
from pathlib import Path

from supervisor.cluster.own_servers import EmbeddedRay, EmbeddedRedis
from supervisor.console.control import ADDRESS_FILE
from supervisor.daemon.lock import acquire
from supervisor.disk.run_directory import end_strays
from supervisor.errors import AlreadyRunning
from trainer.host.private_directories import remove_sockets

_SLOT_LIMIT_S = 30.0
_PAUSE_S = 0.1


def end_leftovers(run_dir: Path) -> None:
    """End what `embedded.json` names. Raises DiskError, ClusterUnusable or AlreadyRunning.

    Where the directory itself is gone, whatever bears its name.
    """
    if not run_dir.is_dir():
        end_strays(run_dir)
        return
    with acquire(run_dir):
        (run_dir / ADDRESS_FILE).unlink(missing_ok=True)  # nobody listens there
        EmbeddedRay(run_dir).stop()
        remove_sockets(run_dir)
        EmbeddedRedis(run_dir).stop()


def main() -> None:
    """Wait until the slot that has started us is gone: what is below the head ends with it."""
    slot, deadline = int(sys.argv[2]), time.monotonic() + _SLOT_LIMIT_S
    while os.getppid() == slot and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    try:
        end_leftovers(Path(sys.argv[1]))
    except AlreadyRunning:
        return


if __name__ == "__main__":
    main()
