"""One daemon per job: a lock on the run directory, and the epoch each holder of it takes.

The lock is the kernel's (`flock`): it ends with its holder, however that dies, and is never broken.
"""

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from supervisor.errors import AlreadyRunning, DiskError

LOCK_FILE = "lock"
EPOCH_FILE = "epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds the lock. `started_at`: seconds since the epoch, the process's own start."""

    pid: int
    host: str
    started_at: float
    epoch: int


class Lock:
    """A held lock. Every order and every line of the journal carries its `epoch`."""

    def __init__(self, descriptor: int, holder: Holder) -> None:
        self._descriptor = descriptor
        self.holder = holder
        self.epoch = holder.epoch

    def release(self) -> None:
        """Let the next daemon in. Harmless when done twice."""
        if self._descriptor >= 0:
            # Unlocked, not only closed: a child between fork and exec still has a copy.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def acquire(run_dir: Path) -> Lock:
    """Lock `run_dir` (`<run_dir>/<job>`, made if missing) and take the next epoch.

    Raises AlreadyRunning, naming pid, host and since when, or DiskError.
    """
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskError(
            f"{path} cannot be made ({error.strerror}); name a directory that can be written "
            "with job.run_dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        last = _last_epoch(run_dir, read_holder(run_dir))
        holder = Holder(
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=psutil.Process().create_time(),
            epoch=last + 1,
        )
        # The epoch first: one that was promised to anybody is never given out again.
        _replace(run_dir / EPOCH_FILE, f"{holder.epoch}\n")
        text = json.dumps({name: getattr(holder, name) for name in Holder.__slots__}) + "\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except BlockingIOError:
        os.close(descriptor)
        raise AlreadyRunning(_describe(path, read_holder(run_dir))) from None
    except OSError as error:
        os.close(descriptor)
        raise DiskError(f"{path} cannot be written: {error.strerror}") from error
    except BaseException:
        os.close(descriptor)
        raise
    return Lock(descriptor, holder)


def read_holder(run_dir: Path) -> Holder | None:
    """Who holds the lock, or held it last; None when nobody ever did, or it is being written."""
    try:
        return Holder(**json.loads((run_dir / LOCK_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def is_held(run_dir: Path) -> bool:
    """Whether a daemon runs the job now."""
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who ask at once do not see each other as a daemon.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last_epoch(run_dir: Path, last_holder: Holder | None) -> int:
    path = run_dir / EPOCH_FILE
    try:
        recorded = int(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        recorded = 0
    except ValueError:
        raise DiskError(
            f"{path} is damaged; write into it the highest epoch in journal.jsonl, or more"
        ) from None
    return max(recorded, last_holder.epoch if last_holder else 0)


def _describe(path: Path, holder: Holder | None) -> str:
    if holder is None:
        return f"another daemon is just taking this job ({path} is locked)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started_at))
    return (
        f"another daemon runs this job: pid {holder.pid} on {holder.host}, since {since} "
        f"(epoch {holder.epoch}, {path}); look at it with `status`, end it with `stop`"
    )


def _replace(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves either the old text or the new."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
