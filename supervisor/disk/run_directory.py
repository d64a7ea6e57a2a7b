"""The run directory: that it is ours alone, which one it is, and what was left of it.

It has an identity: device, inode and owner. Records of servers and processes count only with it,
so that nothing of the original is used or ended by a copy. `identity.json` also holds a random
name, by which other users cannot guess where a run keeps its snapshots and sockets.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from supervisor.errors import DiskError, OperatorError, RunDirectoryLost
from trainer.host.atomic_write import try_to_write, write_whole
from trainer.host.private_directories import (
    IDENTITY_FILE,
    is_usable,
    remove_sockets,
    run_name,
    short_directory,
    tmp_directory,
)
from trainer.host.processes import (
    Identity,
    descendants,
    end,
    environment,
    has_open_below,
    is_in_our_world,
    look_at_all,
)
from trainer.slot.child import RUN, machine
from trainer.state.snapshot import directories_of, named_directory, sweep

log = structlog.get_logger(__name__)

EMBEDDED_MARK = "EVERSTEP_EMBEDDED"
"""Names a server that the job has started, in its environment and in that of its children."""
SESSION = re.compile(r"[0-9a-f]{8}")  # what a mark begins with names the files of Ray's session
_END_LIMIT_S = 10.0
_RAY_COPIES = "working_dir_files"  # what Ray names the folder of its copies
_MAY_BE_LINKS = ("checkpoints", "executables", "incidents", "logs", "tensorboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryIdentity:
    """One directory and no other, as long as it exists. `owner`: a user id."""

    device: int
    inode: int
    owner: int


def identify(run_dir: Path) -> DirectoryIdentity:
    """Raises OSError."""
    found = run_dir.stat()
    return DirectoryIdentity(device=found.st_dev, inode=found.st_ino, owner=found.st_uid)


def identity_record(run_dir: Path) -> dict[str, Any]:
    """What a record names the directory by, on this machine until its next boot."""
    return {**asdict(identify(run_dir)), "machine": machine()}


def open_directory(run_dir: Path) -> None:
    """Make the directory, or check that nobody else has a hand in it, before anything is opened.

    Raises DiskError that says what is wrong, and what to do.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = _why_not_ours(run_dir)
        if not why and stat.S_IMODE(run_dir.stat().st_mode) & 0o077:
            run_dir.chmod(0o700)
    except OSError as error:
        why = _cannot_be_used(run_dir, error)
    if why:
        raise DiskError(why)


def why_unusable(run_dir: Path) -> str:
    """Return why `open_directory` would fail, or the first write would; "" if neither.

    Nothing is made: where the directory is not there yet, its nearest parent is tried.
    """
    try:
        if os.path.exists(run_dir) and (why := _why_not_ours(run_dir)):  # noqa: PTH110
            return why
        try_to_write(run_dir)
    except OSError as error:
        return _cannot_be_used(run_dir, error)
    return ""


def why_short_lived(run_dir: Path) -> str:
    """Return why the directory will not be there for a next run; "" if nothing speaks for that."""
    if _RAY_COPIES not in run_dir.parts:
        return ""
    return (
        f"{run_dir} lies in Ray's own copy of the submitted working directory: Ray deletes it, and "
        "another submission does not find its checkpoints; set job.run_dir to an absolute path "
        "that all nodes share"
    )


def _cannot_be_used(run_dir: Path, error: OSError) -> str:
    remedy = "name a directory that can be written with job.run_dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space, or name a directory on another disk with job.run_dir"
    return f"{run_dir} cannot be used ({error.strerror}); {remedy}"


def _why_not_ours(run_dir: Path) -> str:
    us = os.getuid()
    owner = run_dir.stat().st_uid
    if owner != us:
        us = _owner_of_new_files(run_dir)  # a file system may map owners
    if owner != us:
        return (
            f"{run_dir} belongs to user {owner}, and a job runs what lies in it; name a "
            "directory of your own with job.run_dir"
        )
    with os.scandir(run_dir) as entries:
        for entry in entries:
            owner = entry.stat(follow_symlinks=False).st_uid
            if owner != us:
                return f"{entry.path} belongs to user {owner}; remove it"
            if entry.is_symlink() and not (entry.name in _MAY_BE_LINKS and entry.is_dir()):
                return f"{entry.path} is a symbolic link; put the file itself there"
    return ""


def require_plain_files(run_dir: Path) -> None:
    """Check, before a command reads a directory, that nothing in it blocks or never ends.

    It may be another user's: a pipe named like the journal held `status` for ever, a link to
    /dev/zero took all memory. Raises OperatorError that names the entry.
    """
    try:
        incidents = [path for path in (run_dir / "incidents").iterdir() if path.is_dir()]
    except OSError:
        incidents = []
    for folder in (run_dir, *incidents):
        with (
            suppress(FileNotFoundError, NotADirectoryError, PermissionError),
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                _require_plain(Path(entry.path))


def _require_plain(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # a link to nothing, for one: whatever reads it says so
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OperatorError(f"{path} is neither a file nor a directory; nothing here was read")


def _owner_of_new_files(run_dir: Path) -> int:
    path = run_dir / f".owner-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        return -1
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def settle(run_dir: Path) -> None:
    """Give the directory its identity and name; end what an earlier one at this path has left.

    Only for the holder of its lock. Raises DiskError.
    """
    try:
        before = _read(run_dir)
        same = _is_same(run_dir, before)
        if not same:
            if before:
                log.warning(
                    "run_directory_copied",
                    of=before.get("path"),
                    consequence="what it records of servers and processes is not used",
                )
            end_strays(run_dir)
        name = str(before.get("name", "")) if same else ""
        if not name or _is_squatted(run_dir, name):
            name = secrets.token_hex(4)
        found = identity_record(run_dir)
        now = {**found, "host": socket.gethostname(), "path": str(run_dir), "name": name}
        if now != before:
            write_whole(run_dir / IDENTITY_FILE, json.dumps(now, indent=2) + "\n")
    except OSError as error:
        raise DiskError(f"{run_dir} cannot be written: {error.strerror}") from error
    if not same:
        for directory in directories_of(run_dir):
            sweep(directory)


def _is_squatted(run_dir: Path, name: str) -> bool:
    """Whether another user holds what is named so: names in /tmp and /dev/shm can be read by all.

    What living workers use is ours, and nobody else can remove it: they keep their name.
    """
    in_tmp = is_usable(tmp_directory()) or is_usable(tmp_directory(name))
    return not (in_tmp and is_usable(named_directory(run_dir, name)))


def store_name(run_dir: Path) -> str:
    """Return what the keys of a run begin with, such as "first:1f0c9a6b2d3e4f50".

    Two people may name a job "first", and two hosts may both have a directory "/data/runs": the
    name holds a digest of the path and of the random name that the run was given.
    """
    own = f"{run_dir.resolve()}\0{run_name(run_dir)}"
    return f"{run_dir.name}:{hashlib.sha256(os.fsencode(own)).hexdigest()[:16]}"


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_same(run_dir: Path, before: dict[str, Any]) -> bool:
    """On another machine, or after a boot, the device may have another number."""
    now = identity_record(run_dir)
    keys = ["inode", "owner"]
    if before.get("machine") == now["machine"]:
        keys.append("device")
    return all(before.get(key) == now[key] for key in keys)


def end_strays(run_dir: Path) -> None:
    """End what bears the name of this path and cannot be this directory's: an earlier one's.

    Raises DiskError naming what could not be ended.
    """
    rows = {pid: row for pid, row in look_at_all().items() if row.is_alive and pid != os.getpid()}
    found = {row.identity for row in rows.values() if _is_stray(row.identity, run_dir)}
    if not found:
        return
    marks = {environment(one.pid).get(EMBEDDED_MARK, "") for one in found}
    sessions = [
        short_directory(run_dir) / name
        for name in filter(SESSION.fullmatch, {mark[:8] for mark in marks})
    ]
    found |= {row.identity for row in descendants([one.pid for one in found], rows)}
    found |= {row.identity for row in rows.values() if _uses(row.identity.pid, sessions)}
    log.warning("leftovers_ended", pids=sorted(one.pid for one in found), of=str(run_dir))
    if left := end(found, _END_LIMIT_S):
        pids = ", ".join(str(one.pid) for one in left)
        raise DiskError(f"processes of an earlier run in {run_dir} cannot be ended: pid {pids}")
    for session in sessions:
        shutil.rmtree(session, ignore_errors=True)
    remove_sockets(run_dir)


def _is_stray(process: Identity, run_dir: Path) -> bool:
    if not is_in_our_world(process.pid):
        return False
    if environment(process.pid).get(RUN) == str(run_dir):
        return True
    # A redis-server overwrites its environment; its log is its standard output.
    with suppress(OSError):
        output = str(Path(f"/proc/{process.pid}/fd/1").readlink())
        return output.removesuffix(" (deleted)") == str(run_dir / "redis.log")
    return False


def _uses(pid: int, sessions: list[Path]) -> bool:
    """Ray's agents overwrite the environment that they could be known by."""
    return is_in_our_world(pid) and any(has_open_below(pid, session) for session in sessions)


class Watch:
    """Notices that the directory was moved, deleted, replaced or emptied under a running job."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._inode = identify(run_dir).inode
        self._had_files = self._has_files()
        self._missed = 0

    def look(self) -> RunDirectoryLost | None:
        """Blocks as long as the disk does; what cannot be read proves nothing."""
        what = ""
        try:
            if identify(self._run_dir).inode != self._inode:
                what = "is another directory now"
            elif self._had_files and not self._has_files():
                # A deletion that meets a file written meanwhile leaves the directory itself.
                what = "has lost its files"
        except (FileNotFoundError, NotADirectoryError):
            what = "is gone"
        except OSError:
            return None
        self._missed = self._missed + 1 if what else 0
        if self._missed < 2:  # a file system over a network may err once
            return None
        return RunDirectoryLost(
            f"{self._run_dir} {what}: it was moved or deleted while the job ran, so the job was "
            "stopped without a save; move it back, and the same command goes on from its newest "
            "checkpoint"
        )

    def _has_files(self) -> bool:
        """Whether one is left of those that are there as long as a daemon runs."""
        return any((self._run_dir / name).exists() for name in (IDENTITY_FILE, "journal.jsonl"))
