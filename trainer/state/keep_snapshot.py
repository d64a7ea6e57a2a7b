"""Writes a snapshot to the disk as a checkpoint.

`python -m trainer.state.keep_snapshot RUN_DIR GENERATION STEP`, started by the daemon. For a job
that fails, before its shared memory is given back. It needs neither the task nor its code, joins
no world and touches no accelerator. It prints the path, or why there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainer.host.processes import die_with_parent
from trainer.state import snapshot


def keep(run_dir: Path, generation: int, step: int) -> Path:
    """Verify every byte of the snapshot and commit it; its path.

    Raises `SnapshotRejected`, or what the disk raises, with nothing left of it there.
    """
    from trainer.state import checkpoint

    directory = snapshot.directory_of(run_dir)
    held, meta = snapshot.load_pieces(directory, generation, step, run=str(run_dir))
    return checkpoint.commit(run_dir, generation, step, list(held.leaves()), meta)


def main() -> None:
    """Keep one snapshot; the last line of standard error says why that was not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.state.keep_snapshot", description=__doc__
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("generation", type=int)
    parser.add_argument("step", type=int)
    given = parser.parse_args()
    die_with_parent()
    os.umask(0o077)
    try:
        path = keep(given.run_dir, given.generation, given.step)
    except Exception as error:  # whatever it is, the daemon is told in one line
        text = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {text}")
    print(path)


if __name__ == "__main__":
    main()
