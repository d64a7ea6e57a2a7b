"""One daemon per job: a lock on the run directory, and the epoch each holder of it takes.

The lock is the kernel's (`flock`): it ends with its holder, however that dies, and is never broken.
`--take-over` ends the holder, proven, and takes the lock like anybody else.
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
import structlog

from supervisor.disk.run_directory import open_directory
from supervisor.errors import AlreadyRunning, DiskError, Superseded
from trainer.host.atomic_write import write_whole
from trainer.host.processes import Identity, Row, end, look
from trainer.slot.child import machine

LOCK_FILE = "lock"
EPOCH_FILE = "epoch"

log = structlog.get_logger(__name__)

_LOOK_S = 0.2  # whoever looks whether the lock is held holds it for a moment
_NAME_LIMIT_S = 2.0  # for a holder to write its name into the lock
_END_LIMIT_S = 10.0
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds the lock. `started_at`: seconds since the epoch, the process's own start.

    `machine` and `after_boot_s` tell it from any other process that ever had its pid; they are
    empty where an older version wrote the record. `lock` is the device and inode of the file that
    it wrote its name into: in a copy of that nobody holds anything.
    """

    pid: int
    host: str
    started_at: float
    epoch: int
    machine: str = ""
    after_boot_s: float = 0.0
    lock: tuple[int, int] = (0, 0)

    @property
    def identity(self) -> Identity:
        """The process, to be signalled only on its own machine."""
        return Identity(pid=self.pid, started_at=self.after_boot_s)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_at))
        return f"pid {self.pid} on {self.host}, since {since} (epoch {self.epoch})"


class Lock:
    """A held lock. Every order and every line of the journal carries its `epoch`."""

    def __init__(self, run_dir: Path, descriptor: int, holder: Holder) -> None:
        self._run_dir = run_dir
        self._descriptor = descriptor
        self.holder = holder
        self.epoch = holder.epoch

    def check(self) -> None:
        """Raise Superseded where a later daemon has taken an epoch of its own.

        The lock may have been stolen: its file removed, or a file system that forgot it. A disk
        that cannot be read proves nothing.
        """
        try:
            newest = int((self._run_dir / EPOCH_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if newest > self.epoch:
            holder = read_holder(self._run_dir)
            known = holder is not None and holder.epoch == newest
            raise Superseded(
                f"epoch {self.epoch} is over: "
                f"{holder if known else f'a daemon of epoch {newest}'} runs this job now; this "
                "daemon ends without touching anything"
            )

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


def acquire(run_dir: Path, *, take_over: bool = False) -> Lock:
    """Lock `run_dir` (`<run_dir>/<job>`, made if missing) and take the next epoch.

    With `take_over` a living or frozen holder on this machine is ended first. Raises
    AlreadyRunning, naming pid, host and since when, or DiskError.
    """
    path = run_dir / LOCK_FILE
    open_directory(run_dir)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DiskError(
            f"{path} cannot be made ({error.strerror}); name a directory that can be written "
            "with job.run_dir"
        ) from error
    try:
        if not _try_lock(descriptor, _LOOK_S):
            if take_over:
                _end_holder(run_dir, descriptor)
            if not take_over or not _try_lock(descriptor, _NAME_LIMIT_S):
                raise AlreadyRunning(_describe(path, read_holder(run_dir)))
        return Lock(run_dir, descriptor, _take_epoch(run_dir, descriptor))
    except OSError as error:
        os.close(descriptor)
        raise DiskError(f"{path} cannot be written: {error.strerror}") from error
    except BaseException:
        os.close(descriptor)
        raise


def _try_lock(descriptor: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _take_epoch(run_dir: Path, descriptor: int) -> Holder:
    row = look(os.getpid())
    assert row is not None
    holder = Holder(
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=psutil.Process().create_time(),
        epoch=_last_epoch(run_dir, read_holder(run_dir)) + 1,
        machine=machine(),
        after_boot_s=row.identity.started_at,
        lock=_identity_of(descriptor),
    )
    # The epoch first: one that was promised to anybody is never given out again.
    write_whole(run_dir / EPOCH_FILE, f"{holder.epoch}\n")
    text = json.dumps({name: getattr(holder, name) for name in Holder.__slots__}) + "\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    return holder


def _end_holder(run_dir: Path, descriptor: int) -> None:
    """End whoever holds the lock, proven; return at once where nobody does any more.

    By SIGKILL: a frozen process heeds nothing else, and a living one must not drain the job. Its
    workers live on. Raises AlreadyRunning where the holder cannot or must not be ended from here.
    """
    path = run_dir / LOCK_FILE
    deadline = time.monotonic() + _NAME_LIMIT_S
    while True:
        holder = read_holder(run_dir)
        if holder is not None and holder.lock != _identity_of(descriptor):
            holder = None
        row = None if holder is None else look(holder.pid)
        if holder is not None and holder.machine != machine():
            raise AlreadyRunning(
                f"{_describe(path, holder)}; --take-over ends a daemon on its own host only, and "
                f"this is another one, or another container: use it on {holder.host}"
            )
        if holder is not None and row is not None and row.identity == holder.identity:
            break
        # Whoever has just taken the lock may not have written its name yet.
        if _try_lock(descriptor, 0.0):
            return
        if time.monotonic() >= deadline:
            raise AlreadyRunning(_stranger(path, holder, row))
        time.sleep(_PAUSE_S)
    was = "frozen" if row.state in "Tt" else "alive"
    try:
        left = end([holder.identity], _END_LIMIT_S)
    except PermissionError:
        raise AlreadyRunning(f"{_describe(path, holder)}; it belongs to another user") from None
    if left:
        raise AlreadyRunning(
            f"{_describe(path, holder)}; it is still there {_END_LIMIT_S:g} s after SIGKILL"
        )
    log.warning("holder_ended", pid=holder.pid, epoch=holder.epoch, was=was, by="--take-over")


def _stranger(path: Path, holder: Holder | None, row: Row | None) -> str:
    """The lock is held, and not by the process whose name stands in it."""
    reused = " and its pid is another process's now" if row is not None else ""
    named = (
        f"{holder}, whose name stands there, has ended{reused}"
        if holder
        else "nobody's name stands there"
    )
    return (
        f"{path} is locked, but {named}: nothing is ended on a guess; find who holds the file with "
        f"`fuser -v {path}`, and end that"
    )


def read_holder(run_dir: Path) -> Holder | None:
    """Who holds the lock, or held it last; None when nobody ever did, or it is being written."""
    try:
        found = json.loads((run_dir / LOCK_FILE).read_text(encoding="utf-8"))
        return Holder(**{**found, "lock": tuple(found.get("lock", ()))})
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _identity_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def is_held(run_dir: Path) -> bool:
    """Whether a daemon runs the job now."""
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
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
    return (
        f"another daemon runs this job: {holder}, by {path}; look at it with `status`, end the job "
        "with `stop`; where the daemon is frozen, --take-over ends it and goes on with its workers"
    )
