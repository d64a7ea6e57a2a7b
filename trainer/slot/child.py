"""One child of a slot: the JAX process of one rank and generation, from its start to proof of exit.

It knows pipes, signals and /proc; it does not judge what the child reports. A child ends by
SIGKILL only, which a stopped one, and one that ignores SIGTERM, cannot refuse.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainer.host.cgroups import MemoryGroup
from trainer.host.processes import (
    Identity,
    Row,
    await_end,
    descendants,
    end,
    environment,
    is_alive,
    look,
    look_at_all,
    look_below,
    send,
    signal_name,
)
from trainer.slot.stacks import ask_briefly
from trainer.wire.heartbeat import HeartbeatError, read_beat_file

Report = dict[str, Any]

RUN = "EVERSTEP_RUN"
SLOT = "EVERSTEP_SLOT"
GENERATION = "EVERSTEP_GENERATION"
"""Whose process it is, in its environment: its run directory, its slot, its generation."""

REPORT_LIMIT = 1 << 18  # bytes a line
SPEC_LIMIT = 1 << 16  # bytes: what a fresh pipe takes at once
ORDER_LIMIT = 4096  # bytes, newline included: what a pipe takes whole or not at all (PIPE_BUF)
_PIPE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14
_GROUP_LIMIT_S = 5.0
_LOADING_LOOKS = 20
_TRACKER_LIMIT_S = 1.0
_MEMORY_LOOK_MS = 2000  # how old the count may be of processes that were ended for memory


class ChildError(Exception):
    """A child cannot be started, or cannot take an order. The text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the slot itself reads in a spec; the rest of it is for the child."""

    generation: int
    rank: int
    run_dir: Path
    config_dir: Path
    beat_file: Path
    variables: Mapping[str, str]
    text: str

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a spec. Raises ChildError that names the key.

        The copy of the user's code stands in for a directory of settings that this node lacks.
        """
        spec = json.loads(text)
        kinds = {"generation": int, "rank": int, "run_dir": str, "config_dir": str}
        for key, kind in {**kinds, "beat_file": str}.items():
            if type(spec.get(key)) is not kind:
                raise ChildError(f"spec.{key} is {spec.get(key)!r}, expected {kind.__name__}")
        if len(text) >= SPEC_LIMIT:
            raise ChildError(f"a spec of {len(text)} bytes is above the limit of {SPEC_LIMIT}")
        if spec.get("code_dir") and not Path(spec["config_dir"]).is_dir():
            spec["config_dir"] = spec["code_dir"]
        if not Path(spec["config_dir"]).is_dir():
            raise ChildError(f"spec.config_dir {spec['config_dir']} is no directory on this node")
        log = log_path(Path(spec["run_dir"]), spec["generation"], spec["rank"])
        spec = {**spec, "log_file": str(log)}  # for a spare, which was started with another one
        return cls(
            generation=spec["generation"],
            rank=spec["rank"],
            run_dir=Path(spec["run_dir"]),
            config_dir=Path(spec["config_dir"]),
            beat_file=Path(spec["beat_file"]),
            variables=dict(spec.get("trainer", {}).get("env", {})),
            text=json.dumps(spec),  # one line, whatever the layout it came in
        )

    @property
    def log_path(self) -> Path:
        """Where the child's output goes: one file a rank and generation."""
        return log_path(self.run_dir, self.generation, self.rank)


class Child:
    """A running or ended child. Construct it in a thread that lives as long as the slot.

    The child asks the kernel to be killed with its parent, and for the kernel that is the thread
    which forked. `publish` gets each report, then the exit, in order, from a thread of this child.
    """

    def __init__(
        self,
        launch: Launch,
        command: Sequence[str],
        base_environment: Mapping[str, str],
        publish: Callable[[Report], None],
        spare: "Spare | None" = None,
    ) -> None:
        self.launch = launch
        self.exit: Report | None = None
        self.survivors: tuple[Identity, ...] = ()
        self._publish = publish
        self._gone = threading.Event()
        self._has_ended = False
        self._orders_lock = threading.Lock()
        self._memory: MemoryGroup | None = None
        if spare is not None:
            self._spawned = spare.spawned
        else:
            self._spawned = _spawn(
                command,
                log_file=launch.log_path,
                run_dir=launch.run_dir,
                generation=str(launch.generation),
                directory=launch.config_dir,
                base_environment=base_environment,
            )
        row = look(self._spawned.process.pid)
        assert row is not None, "a child that is not reaped has a line in /proc"
        self.identity = row.identity
        self._attendant = threading.Thread(
            target=self._attend, name=f"child-{self.identity.pid}", daemon=True
        )
        if spare is None and (no_log := self._spawned.no_log):
            self._publish({"report": "disk", "at": time.time(), "what": "log", "why": no_log})
        self._attendant.start()
        with contextlib.suppress(OSError):  # it says so itself
            launch.beat_file.parent.mkdir(mode=0o700, exist_ok=True)
        # After the attendant: a child that dies while it is told has an exit to report.
        with contextlib.suppress(ChildError):
            self._write(launch.text)

    def order(self, text: str) -> None:
        """Pass on one order. Raises ChildError if the child has ended or does not read."""
        line = json.dumps(json.loads(text))
        if len(line) >= ORDER_LIMIT:
            raise ChildError(f"an order of {len(line)} bytes is above the limit of {ORDER_LIMIT}")
        self._write(line)

    def signal(self, number: int) -> None:
        """Send a signal to the child alone. Raises ChildError if it has ended."""
        if not send(self.identity, number):
            raise ChildError(f"pid {self.identity.pid} has ended")

    def state(self) -> str | None:
        """Its letter in /proc (T: stopped), None once it is gone."""
        row = look(self.identity.pid)
        return row.state if row is not None and row.identity == self.identity else None

    def last_words(self) -> str:
        """Where its threads stand, if it can say so within milliseconds."""
        return ask_briefly(self.identity, self.launch.log_path)

    def kill(self, timeout_s: float) -> bool:
        """SIGKILL it and all that it started; whether all of it is proven gone in time."""
        deadline = time.monotonic() + timeout_s
        send(self.identity, signal.SIGKILL)
        if not self._gone.wait(timeout_s):
            return False
        if self.survivors:
            self.survivors = self._end_group(max(0.0, deadline - time.monotonic()))
        return not self.survivors

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        with self._orders_lock:
            if self._has_ended:
                raise ChildError(f"pid {self.identity.pid} has ended")
            try:
                written = os.write(self._spawned.orders, data)
            except BlockingIOError:
                written = 0
            except BrokenPipeError:
                raise ChildError(f"pid {self.identity.pid} reads no orders any more") from None
        if written != len(data):
            raise ChildError(f"pid {self.identity.pid} does not read its orders")

    def _attend(self) -> None:
        """Read reports until the process ends, reap it, report that, end what it has left."""
        self._memory = MemoryGroup.of(self.identity.pid)
        killed_before = self._killed_for_memory()
        lines = _Lines(self._publish)
        ended = os.pidfd_open(self.identity.pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._spawned.reports, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_MEMORY_LOOK_MS)}
            if not ready:
                killed_before = self._killed_for_memory()
            if self._spawned.reports in ready and not lines.read(self._spawned.reports):
                poll.unregister(self._spawned.reports)
            if ended in ready:
                break
        # What it wrote before its end comes before its end. A pipe holds 1 MiB at most, so that
        # a grandchild which goes on writing cannot keep us here.
        for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
            if not lines.read(self._spawned.reports):
                break
        status = self._spawned.process.wait()
        os.close(ended)
        os.close(self._spawned.reports)
        with self._orders_lock:
            self._has_ended = True
            os.close(self._spawned.orders)
        self.exit = {
            "report": "exit",
            "at": time.time(),
            "pid": self.identity.pid,
            "status": status if status >= 0 else None,
            "signal": signal_name(-status) if status < 0 else None,
            "memory": self._shortage(status, killed_before),
            # Long enough for the cause to be in it though stacks were asked for in the meantime.
            "log_tail": log_tail(self.launch.log_path, lines=200),
            **_last_beat(self.launch.beat_file),
        }
        self._publish(self.exit)
        self.survivors = self._end_group(_GROUP_LIMIT_S)
        with contextlib.suppress(OSError):  # a read-only disk is no reason to doubt its end
            self.launch.beat_file.unlink(missing_ok=True)
        self._gone.set()

    def _killed_for_memory(self) -> int:
        return (self._memory.kills() if self._memory else None) or 0

    def _shortage(self, status: int, killed_before: int) -> dict[str, int] | None:
        """If the kernel ended it for want of memory: `used` of `limit` bytes, if there is one."""
        if status != -signal.SIGKILL or self._killed_for_memory() <= killed_before:
            return None
        assert self._memory is not None
        found = self._memory.limit()
        return {"used": found[0], "limit": found[1]} if found else {}

    def _end_group(self, timeout_s: float) -> tuple[Identity, ...]:
        """End all that the child started and left behind; what could not be ended."""
        deadline = time.monotonic() + timeout_s
        pid, rows = self.identity.pid, look_below(os.getpid())
        seen = {row.identity.pid for row in rows.values() if row.session == pid}
        left: tuple[Identity, ...] = ()
        # Again and again, since what is being killed may just have started something.
        while members := self._group(rows):
            seen |= {row.identity.pid for row in members}
            pids = {row.identity for row in members}
            trackers = {one for one in pids if _is_resource_tracker(one.pid)}
            end(pids - trackers, max(0.0, deadline - time.monotonic()))
            # It ends by itself with the last process that it serves, and takes their shared memory
            # along, which nothing else knows of.
            await_end(trackers, _TRACKER_LIMIT_S)
            left = end(pids, max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                break
            rows = look_below(os.getpid())
        _reap(seen)
        return left

    def _group(self, rows: dict[int, Row]) -> list[Row]:
        """The living of its session, below it, and those whose parents died (we adopt them)."""
        pid = self.identity.pid
        mark = str(self.launch.generation)
        session = [row for row in rows.values() if row.session == pid]
        adopted = [
            row
            for row in rows.values()
            if row.parent == os.getpid() and _generation_of(row) == mark
        ]
        roots = {row.identity.pid: row for row in session + adopted}
        below = {row.identity.pid: row for row in descendants(roots, rows)}
        return [row for row in (roots | below).values() if row.is_alive and row.identity.pid != pid]


def _is_resource_tracker(pid: int) -> bool:
    """Whether it is a helper of multiprocessing (or of a library made from it)."""
    try:
        return b"resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _generation_of(row: Row) -> str | None:
    """The mark in its environment, which is empty for a moment while a program is being loaded."""
    for _ in range(_LOADING_LOOKS):
        if marks := environment(row.identity.pid):
            return marks.get(GENERATION)
        if not is_alive(row.identity):
            break
        time.sleep(0.001)
    return None


class _Lines:
    """Cuts what comes through a pipe into reports; a line that is none becomes a report too."""

    def __init__(self, publish: Callable[[Report], None]) -> None:
        self._publish = publish
        self._rest = b""

    def read(self, descriptor: int) -> bool:
        """Take what is there, 64 KiB at most; False at the end, or where there is nothing."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._publish(_parse(line))
        if len(self._rest) > REPORT_LIMIT:
            self._publish(_parse(self._rest))
            self._rest = b""
        return bool(chunk)


def _parse(line: bytes) -> Report:
    try:
        report = json.loads(line) if len(line) <= REPORT_LIMIT else None
    except (ValueError, RecursionError):
        report = None
    if isinstance(report, dict) and isinstance(report.get("report"), str):
        return report
    text = line[:200].decode(errors="replace")
    return {"report": "unreadable", "at": time.time(), "text": text}


def _last_beat(path: Path) -> dict[str, Any]:
    """What the child was doing when it ended, as far as its beat file tells."""
    try:
        beat = read_beat_file(path)
    except (OSError, HeartbeatError):
        return {}
    return {"phase": beat.phase, "step": beat.step}


class Spare:
    """A process that has imported what it needs and waits to be told which rank it is.

    Construct it in the thread that lives as long as the slot. Whoever takes it makes a `Child`.
    """

    def __init__(
        self, command: Sequence[str], run_dir: Path, base_environment: Mapping[str, str]
    ) -> None:
        self.environment = dict(base_environment)
        self.spawned = _spawn(
            [*command, "--spare"],
            log_file=run_dir / "logs" / "spares" / f"slot-{os.getpid()}.log",
            run_dir=run_dir,
            generation="spare",
            directory=Path("/"),
            base_environment=base_environment,
        )

    def is_alive(self) -> bool:
        """Whether it still waits."""
        return self.spawned.process.poll() is None

    def end(self) -> None:
        """Kill and reap it; harmless for one that is gone."""
        self.spawned.process.kill()
        self.spawned.process.wait()
        for descriptor in (self.spawned.reports, self.spawned.orders):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spawned:
    """A process with our ends of its two pipes. `no_log`: why it has no log, "" if it has one."""

    process: subprocess.Popen[bytes]
    reports: int
    orders: int
    no_log: str


def _spawn(
    command: Sequence[str],
    *,
    log_file: Path,
    run_dir: Path,
    generation: str,
    directory: Path,
    base_environment: Mapping[str, str],
) -> _Spawned:
    """Start a process that takes orders and sends reports through pipes of their own.

    Its standard input is empty, so that whatever the task starts or forks can neither read an order
    nor lose one.
    """
    log, no_log = open_log(log_file)
    reports, child_reports = os.pipe()
    child_orders, orders = os.pipe()
    marks = {RUN: str(run_dir), SLOT: slot_mark(), GENERATION: generation}
    try:
        with contextlib.suppress(PermissionError):  # a user has a limit; less will do
            fcntl.fcntl(child_reports, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        process = subprocess.Popen(
            [*command, "--reports", str(child_reports), "--orders", str(child_orders)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**base_environment, **marks},
            pass_fds=(child_reports, child_orders),
            start_new_session=True,
        )
    except OSError as error:
        os.close(reports)
        os.close(orders)
        raise ChildError(f"{command[0]} cannot be started: {error}") from error
    finally:
        os.close(child_reports)
        os.close(child_orders)
        os.close(log)
    # A child that is stopped must never stop its slot.
    os.set_blocking(orders, False)
    os.set_blocking(reports, False)
    return _Spawned(process=process, reports=reports, orders=orders, no_log=no_log)


def open_log(path: Path) -> tuple[int, str]:
    """A descriptor to append with, and why it is not the file's; that costs the log alone."""
    try:
        # Without the run directory: one that was deleted under the job stays so.
        path.parent.parent.mkdir(mode=0o700, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), ""
    except OSError as error:
        return os.open(os.devnull, os.O_WRONLY), f"{path}: {error.strerror}"


def log_path(run_dir: Path, generation: int, rank: int) -> Path:
    """Where the output of a rank goes."""
    return run_dir / "logs" / f"generation-{generation}" / f"rank-{rank}.log"


def machine() -> str:
    """Names the one place where our pids mean what they mean here: a boot, a pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def slot_mark() -> str:
    """Names this process, as the owner of its children, to any process of the same machine."""
    row = look(os.getpid())
    assert row is not None
    return _mark_of(row.identity)


def end_orphans(run_dir: Path, timeout_s: float) -> tuple[Identity, ...]:
    """End what slots of this run that are dead have left on this machine; what could not be.

    A child dies with its slot, but a process that the child started may not.
    """
    found = [
        row.identity
        for row in look_at_all().values()
        if row.is_alive and _is_orphan(environment(row.identity.pid), run_dir)
    ]
    return end(found, timeout_s)


def end_generation(
    run_dir: Path, generation: int, slot: Identity, child: Identity | None, timeout_s: float
) -> tuple[Identity, ...]:
    """End a generation of a slot on this machine without the slot's help; what could not be.

    `child` is its process, where it is known: one that was a spare bears no generation's mark.
    """
    marks = {RUN: str(run_dir), GENERATION: str(generation), SLOT: _mark_of(slot)}
    deadline = time.monotonic() + timeout_s
    while True:
        found = [
            row.identity
            for row in look_at_all().values()
            if row.is_alive
            and (row.identity == child or marks.items() <= environment(row.identity.pid).items())
        ]
        left = end(found, max(0.0, deadline - time.monotonic()))
        if not found or time.monotonic() >= deadline:
            return left


def _mark_of(slot: Identity) -> str:
    return f"{machine()} {slot.pid} {slot.started_at}"


def _is_orphan(marks: Mapping[str, str], run_dir: Path) -> bool:
    if marks.get(RUN) != str(run_dir) or SLOT not in marks:
        return False
    place, pid, started_at = marks[SLOT].split(" ")
    if place != machine():
        return False  # a container's own pids say nothing here
    return not is_alive(Identity(pid=int(pid), started_at=float(started_at)))


def log_tail(path: Path, *, lines: int) -> list[str]:
    """The last lines of a log, 16 KiB at most; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def _reap(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
