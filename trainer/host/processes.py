"""Which process is which, and the proof that one has ended: by pid with start time, from /proc.

Nothing here goes by a process's name, and nothing here knows of Ray, JAX or jobs.
"""

import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()
_PR_SET_PDEATHSIG = 1
FILES_ENOUGH = 1 << 20  # some programs look at every number up to the limit
_SIGNAL_NAMES = {one.value: one.name for one in signal.Signals}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process and no other. `started_at`: seconds after the boot of its machine."""

    pid: int
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What /proc says about a process. `state` is its letter there, such as R, S, D, T, Z."""

    identity: Identity
    parent: int
    session: int
    state: str
    threads: int

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything. A zombie holds no memory, lock or port: it is dead."""
        # Where only the first thread has ended, the whole reads Z while the others run on.
        return self.state not in "ZX" or self.threads > 1


def look(pid: int) -> Row | None:
    """The process that has this pid now, dead ones that nobody has reaped included."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    identity = Identity(pid=pid, started_at=int(fields[19]) / _TICKS_PER_S)
    return Row(
        identity=identity,
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        threads=int(fields[17]),
    )


def look_at_all() -> dict[int, Row]:
    """Every process of this machine, or of this container."""
    names = (path.name for path in Path("/proc").iterdir())
    rows = (look(int(name)) for name in names if name.isdecimal())
    return {row.identity.pid: row for row in rows if row is not None}


def look_below(pid: int) -> dict[int, Row]:
    """Every process below `pid`, which adopts orphans (PR_SET_CHILD_SUBREAPER) or misses them.

    Many times faster than a look at all, where the kernel lists the children of a thread.
    """
    if not _LISTS_CHILDREN:
        return look_at_all()
    rows: dict[int, Row] = {}
    ahead = [pid]
    while ahead:
        for child in _children(ahead.pop()):
            row = look(child)
            if row is not None and child not in rows:
                rows[child] = row
                ahead.append(child)
    return rows


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    row = look(identity.pid)
    return row is not None and row.identity == identity and row.is_alive


def descendants(roots: Collection[int], rows: dict[int, Row]) -> list[Row]:
    """The processes below `roots`, without them."""
    children: dict[int, list[Row]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row)
    found: list[Row] = []
    ahead = list(roots)
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += [row.identity.pid for row in below]
    return found


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; empty for one that is gone, dead, or not ours to read.

    One that gives itself a title has overwritten the beginning, as Ray's agents do, or all of it.
    """
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def has_open_below(pid: int, directory: Path) -> bool:
    """Whether it has a file below this directory open; one that was deleted counts."""
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # gone, not ours to read, or closing files just now
        return False
    return any(link.startswith(f"{directory}/") for link in links)


def is_in_our_world(pid: int) -> bool:
    """Whether it belongs to our user, and neither to a container nor to a jail beside us."""
    place = Path(f"/proc/{pid}")
    try:
        return (
            place.stat().st_uid == os.geteuid()
            and (place / "ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
            and (place / "root").samefile("/")
        )
    except OSError:
        return False


def send(identity: Identity, number: int) -> bool:
    """Signal exactly this process; False where it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        # Looked at after the pidfd is held: from here on the pid cannot become another's.
        if not is_alive(identity):
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


def end(identities: Iterable[Identity], timeout_s: float) -> tuple[Identity, ...]:
    """SIGKILL these processes and wait until they are dead; returns those that are not."""
    left = {one for one in identities if send(one, signal.SIGKILL)}
    return await_end(left, timeout_s)


def await_end(identities: Iterable[Identity], timeout_s: float) -> tuple[Identity, ...]:
    """Wait at most `timeout_s` until these processes are dead; returns those that are not."""
    deadline = time.monotonic() + timeout_s
    left = {one for one in identities if is_alive(one)}
    while left and time.monotonic() < deadline:
        _await_one(next(iter(left)), min(0.05, deadline - time.monotonic()))
        left = {one for one in left if is_alive(one)}
    return tuple(sorted(left, key=lambda one: one.pid))


def die_with_parent() -> None:
    """Have the kernel end this process with the thread that started it."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def raise_file_limit() -> None:
    """Allow this process, and what it starts, as many open files as it may allow itself.

    1,024 idle connections, of anybody on the machine, would fill the usual soft limit. A descriptor
    is still the lowest free number: `select` works on it as long as fewer than 1,024 are open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = FILES_ENOUGH if hard == resource.RLIM_INFINITY else min(hard, FILES_ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def signal_name(number: int) -> str:
    """The name of a signal (SIGKILL for 9); a real-time one goes by its number."""
    return _SIGNAL_NAMES.get(number, f"signal {number}")


def _await_one(identity: Identity, timeout_s: float) -> None:
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
    finally:
        os.close(descriptor)
