"""The slot: the Ray actor of one rank, which owns the JAX process of each generation as its child.

It starts, signals, kills and reaps its children and passes on what they report. It decides
nothing, holds no JAX, imports no Ray, and lets only JSON text, strings and numbers cross Ray.
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from trainer.host.environment import UNIX, worker_environment
from trainer.host.private_directories import private_directory, socket_path
from trainer.host.processes import Identity, look, raise_file_limit
from trainer.slot import orphans
from trainer.slot.child import (
    Child,
    ChildError,
    Launch,
    Report,
    Spare,
    end_generation,
    end_orphans,
    log_tail,
    machine,
)
from trainer.slot.stacks import collect
from trainer.state.snapshot import SnapshotError, discard, list_snapshots, sweep
from trainer.state.snapshot import directory_of as snapshot_directory
from trainer.wire.heartbeat import HeartbeatError, read_beat_file, read_canary

GROUPS = {"orders": 4, "watch": 4, "evidence": 4}
"""Ray's concurrency groups of the actor: a long poll never holds up an order."""

STATES = frozenset(
    {
        "disk",
        "phase",
        "standing_by",
        "ready",
        "stepped",
        "snapshot_interval",
        "checkpoint_interval",
        "numbers_diverged",
        "replicas_diverged",
        "saved",
        "completed",
        "restore_rejected",
        "raised",
        "exit",
    }
)
"""Reports of where a child stands. The last of each is kept as long as the child is known.

All other reports are news: `watch` tells those that were kept, and none of them is needed to know
what a generation has reached.
"""

COMMAND = (sys.executable, "-P", "-m", "trainer.process")
"""Without the working directory in its path: a `queue.py` there would be taken for Python's."""

RECORDS_KEPT = 4096
CHILDREN_KEPT = 16
POLL_S = 10.0
_MARK_PATIENCE_S, _MARK_PAUSE_S = 3.0, 0.1
_RECORDS_AT_ONCE = 512
_START_LIMIT_S = 10.0
_ORPHAN_END_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Refused(Exception):
    """An order that this slot does not carry out; the text is the answer."""


class Stale(Refused):
    """An order of a daemon whose epoch is over; the answer says `stale` too."""


P = ParamSpec("P")


def answers(
    method: Callable[Concatenate["ResilientWorker", P], dict[str, Any]],
) -> Callable[Concatenate["ResilientWorker", P], str]:
    """Make a method answer in JSON text, `{"error": text}` included: no exception crosses Ray."""

    @functools.wraps(method)
    def wrapped(self: "ResilientWorker", /, *args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return json.dumps(method(self, *args, **kwargs))
        except Stale as error:
            return json.dumps({"error": str(error), "stale": True})
        except (Refused, ChildError) as error:
            return json.dumps({"error": str(error)})
        except Exception as error:  # what it was is for the daemon to read, not for Ray to pickle
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    return wrapped


class ResilientWorker:
    """One slot. Every method answers in JSON text: what it promises, or `{"error": text}`.

    `epoch` is the daemon's: an order of a lower one than the highest seen is refused. `cpus` and
    `gpus` are what the slot holds, and what its children are told to use. Where no daemon is heard
    of for `orphan_after_s` (0: however long), it has its child save, and ends; `leave` is how, and
    `afterwards` what the last one of them starts.
    """

    def __init__(
        self,
        job: str,
        run_dir: str,
        cpus: float,
        gpus: int,
        command: Sequence[str] = COMMAND,
        orphan_after_s: float = 0.0,
        afterwards: Sequence[str] = (),
        leave: Callable[[Sequence[str]], None] = orphans.leave_cluster,
    ) -> None:
        self._job = job
        self._run_dir = Path(run_dir)
        self._cpus = cpus
        self._variables: Mapping[str, str] = {}
        self._gpus = gpus
        self._command = tuple(command)
        self._changed = threading.Condition()
        self._epoch = 0
        self._last = 0
        self._records: deque[Report] = deque(maxlen=RECORDS_KEPT)
        self._children: dict[int, Child] = {}
        self._spare: Spare | None = None
        self._reserved: dict[int, socket.socket] = {}
        self._sockets: dict[int, Path] = {}
        # Its one thread lives as long as the slot, and so do, at most, the children it forks.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
        raise_file_limit()
        # What a child leaves behind becomes ours, to be ended and reaped by us.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._orphans = end_orphans(self._run_dir, 5.0)
        self._reached: dict[int, dict[tuple[str, str], Report]] = {}  # STATES by generation
        self._is_leaving = False
        self._vigil = orphans.Vigil(orphan_after_s, self._canary)
        if orphan_after_s > 0:
            ending = functools.partial(leave, tuple(afterwards))
            threading.Thread(target=self._keep_vigil, args=(ending,), daemon=True).start()

    @answers
    def describe(self) -> dict[str, Any]:
        """Who and where it is, and its children, running or ended, with what each has reached."""
        row = look(os.getpid())
        assert row is not None
        with self._changed:
            children = [self._children[generation] for generation in sorted(self._children)]
            return {
                "job": self._job,
                "run_dir": str(self._run_dir),
                "pid": os.getpid(),
                "started_at": row.identity.started_at,
                "host": socket.gethostname(),
                "machine": machine(),
                "gpus": _gpus(),
                "epoch": self._epoch,
                "last": self._last,
                "leaving": self._is_leaving,
                "orphans": [one.pid for one in self._orphans],
                "children": [self._describe_child(child) for child in children],
            }

    def _describe_child(self, child: Child) -> dict[str, Any]:
        launch = child.launch
        reached = self._reached.get(launch.generation, {}).values()
        return {
            "generation": launch.generation,
            "rank": launch.rank,
            "pid": child.identity.pid,
            "started_at": child.identity.started_at,
            "exit": child.exit,
            "reached": sorted(reached, key=lambda record: record["seq"]),
        }

    @answers
    def read_mark(self, epoch: int, name: str) -> dict[str, Any]:
        """What a file of the run directory holds, as seen from here; `why` it cannot be read.

        Waits a moment for one that is not there: on some file systems news takes seconds.
        """
        self._admit(epoch)
        deadline = time.monotonic() + _MARK_PATIENCE_S
        while True:
            try:
                return {"text": (self._run_dir / Path(name).name).read_text(encoding="utf-8")}
            except (OSError, ValueError) as error:
                if time.monotonic() >= deadline:
                    return {"text": None, "why": str(error)}
            time.sleep(_MARK_PAUSE_S)

    @answers
    def reserve_address(self, epoch: int, generation: int, host: str) -> dict[str, Any]:
        """Keep an `address` for the coordinator of a generation until that has ended.

        Without a `host` all ranks are on this one: a Unix socket, which only our user can reach.
        Elsewhere a free port: the socket that holds it never listens. JAX's coordinator can bind
        the port beside it, as both set SO_REUSEPORT and belong to one user; the kernel gives it to
        no other user meanwhile.
        """
        self._admit(epoch)
        self._release(generation)
        if not host:
            path = socket_path(self._run_dir, f"-g{generation}")
            private_directory(path.parent)
            path.unlink(missing_ok=True)
            with self._changed:
                self._sockets[generation] = path
            return {"address": f"{UNIX}{path}"}
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, 0))
        with self._changed:
            self._reserved[generation] = held
        name = f"[{host}]" if ":" in host else host
        return {"address": f"{name}:{held.getsockname()[1]}"}

    @answers
    def start(self, epoch: int, spec: str) -> dict[str, Any]:
        """Start the child of a generation; answers with its `pid` and `started_at`."""
        self._admit(epoch)
        launch = Launch.from_json(spec)
        if launch.run_dir != self._run_dir:
            raise Refused(f"spec.run_dir is {launch.run_dir}, this slot serves {self._run_dir}")
        publish = functools.partial(self._publish, launch.generation, launch.rank)
        self._variables = launch.variables
        base = self._environment()
        child = self._starter.submit(self._start, epoch, launch, base, publish).result(
            _START_LIMIT_S
        )
        return {"pid": child.identity.pid, "started_at": child.identity.started_at}

    @answers
    def watch(self, epoch: int, after: int) -> dict[str, Any]:
        """What the children reported after record `after`; waits for it at most 10 s.

        Every record bears `seq`, `generation` and `rank`. `lost` counts those that were dropped
        before they were asked for.
        """
        self._admit(epoch)
        with self._changed:
            self._changed.wait_for(lambda: self._last > after or self._epoch > epoch, POLL_S)
            self._refuse_stale(epoch)
            records = [one for one in self._records if one["seq"] > after][:_RECORDS_AT_ONCE]
            last = records[-1]["seq"] if records else max(after, self._last)
            lost = records[0]["seq"] - after - 1 if records else 0
        return {"records": records, "last": last, "lost": lost}

    @answers
    def order(self, epoch: int, generation: int, order: str) -> dict[str, Any]:
        """Pass an order on to a child."""
        self._admit(epoch)
        self._child(generation).order(order)
        return {"pid": self._child(generation).identity.pid}

    @answers
    def signal(self, epoch: int, generation: int, name: str) -> dict[str, Any]:
        """Send a signal, by name, to the child alone."""
        self._admit(epoch)
        self._child(generation).signal(signal.Signals[name])
        return {"pid": self._child(generation).identity.pid}

    @answers
    def kill(
        self, epoch: int, generation: int, timeout_s: float, last_words: bool
    ) -> dict[str, Any]:
        """End a child and all that it started; with `last_words` its `stacks` come along.

        Answers with its `exit` (None for a child that never was) and the pids of `survivors`: what
        could not be proven gone in time.
        """
        self._admit(epoch)
        # In the starter's turn: a child that is being started now is found, not missed.
        self._starter.submit(int).result(timeout_s)
        child = self._children.get(generation)
        stacks = child.last_words() if child and last_words else ""
        survivors = [] if child is None or child.kill(timeout_s) else _survivors(child)
        if not survivors:
            self._release(generation)
        exit = child.exit if child else None
        return {"exit": exit, "survivors": survivors, "stacks": stacks}

    @answers
    def probe(
        self,
        epoch: int,
        generation: int,
        slot_pid: int,
        slot_started_at: float,
        pid: int,
        started_at: float,
    ) -> dict[str, Any]:
        """End what a slot that was lost may have left here; the pids of `survivors`.

        `pid` is its child; one that never was is given as the slot itself.
        """
        self._admit(epoch)
        slot = Identity(pid=slot_pid, started_at=slot_started_at)
        child = Identity(pid=pid, started_at=started_at)
        left = end_generation(self._run_dir, generation, slot, child, 0.0)
        return {"survivors": [process.pid for process in left]}

    @answers
    def snapshots(self, epoch: int) -> dict[str, Any]:
        """What snapshots lie on this node, whoever wrote them; structure only."""
        self._admit(epoch)
        found = list_snapshots(snapshot_directory(self._run_dir))
        return {
            "snapshots": [
                {
                    "generation": one.generation,
                    "step": one.step,
                    "replica": one.replica,
                    "part": one.part,
                    "parts": one.parts,
                    "path": str(snapshot_directory(self._run_dir)),
                }
                for one in found
            ]
        }

    @answers
    def discard_snapshot(self, epoch: int, generation: int, step: int) -> dict[str, Any]:
        """Remove a snapshot from this node; fine if it is not there."""
        self._admit(epoch)
        discard(snapshot_directory(self._run_dir), generation, step)
        return {}

    @answers
    def prepare_spare(self, epoch: int) -> dict[str, Any]:
        """Have a process with everything imported wait here for the next start."""
        self._admit(epoch)
        self._starter.submit(self._start_spare).result(_START_LIMIT_S)
        return {}

    @answers
    def end(self, epoch: int, timeout_s: float, forget: bool) -> dict[str, Any]:
        """End all children, before the slot is given up; answers with the pids of `survivors`.

        With `forget` the job is over: its snapshots on this node go too.
        """
        self._admit(epoch)
        deadline = time.monotonic() + timeout_s
        survivors = []
        for generation, child in list(self._children.items()):
            if child.kill(max(0.0, deadline - time.monotonic())):
                self._release(generation)
            else:
                survivors += _survivors(child)
        self._starter.submit(self._end_spare).result(_START_LIMIT_S)
        if forget and not survivors:
            sweep(snapshot_directory(self._run_dir))
        return {"survivors": survivors}

    @answers
    def evidence(self, epoch: int, generation: int) -> dict[str, Any]:
        """What is known of a child that is about to be killed: `stacks`, `log_tail` and more."""
        self._admit(epoch)
        child = self._child(generation)
        witness = self._witness(generation)
        stacks = collect(child.identity, child.launch.log_path)
        tail = log_tail(child.launch.log_path, lines=200)
        beat = {key: witness.get(key) for key in ("seq", "phase", "step")}
        return {"stacks": stacks, "log_tail": tail, "state": witness["state"], "beat": beat}

    @answers
    def witness(self, generation: int) -> dict[str, Any]:
        """A second opinion on a child, without its help: `alive`, `state`, and its beat file.

        `seq`, `phase`, `step` and `beats` are None as long as its loop has written nothing.
        """
        return self._witness(generation)

    def _witness(self, generation: int) -> dict[str, Any]:
        child = self._child(generation)
        state = child.state()
        alive = state is not None and state not in "ZX"
        seen: dict[str, Any] = {"alive": alive, "state": state}
        try:
            beat = read_beat_file(child.launch.beat_file)
        except (OSError, HeartbeatError):
            return {**seen, "seq": None, "phase": None, "step": None, "beats": None}
        told = {"seq": beat.seq, "phase": beat.phase, "step": beat.step, "beats": beat.beats}
        return {**seen, **told}

    def _start(
        self,
        epoch: int,
        launch: Launch,
        base_environment: dict[str, str],
        publish: Callable[[Report], None],
    ) -> Child:
        with self._changed:
            self._refuse_stale(epoch)  # it may have waited for its turn
            if (before := self._children.get(launch.generation)) is not None:
                return before  # a daemon that vanished gave the order already
        spare, self._spare = self._spare, None
        if spare is not None and (not spare.is_alive() or spare.environment != base_environment):
            spare.end()
            spare = None
        child = Child(launch, self._command, base_environment, publish, spare)
        with self._changed:
            self._children[launch.generation] = child
            ended = [one for one in self._children.values() if one.exit and not one.survivors]
            for old in ended[:-CHILDREN_KEPT]:
                del self._children[old.launch.generation]
                self._reached.pop(old.launch.generation, None)
        return child

    def _start_spare(self) -> None:
        if self._spare is not None and self._spare.is_alive():
            return
        self._end_spare()
        self._spare = Spare(self._command, self._run_dir, self._environment())

    def _environment(self) -> dict[str, str]:
        """What a process of this slot starts with; the variables are those of the last launch."""
        return worker_environment(self._cpus, self._gpus, {**os.environ, **self._variables})

    def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    def _publish(self, generation: int, rank: int, report: Report) -> None:
        with self._changed:
            self._last += 1
            record = {**report, "seq": self._last, "generation": generation, "rank": rank}
            self._records.append(record)
            if (kind := report["report"]) in STATES:
                reached = self._reached.setdefault(generation, {})
                reached[kind, str(report.get("what", ""))] = record
            self._changed.notify_all()

    def _admit(self, epoch: int) -> None:
        with self._changed:
            self._refuse_stale(epoch)
            self._vigil.heard()
            if epoch > self._epoch:
                self._epoch = epoch
                self._changed.notify_all()  # the polls of an earlier daemon end

    def _refuse_stale(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise Stale(f"stale epoch {epoch}: this slot serves epoch {self._epoch}")

    # Without a daemon

    def _keep_vigil(self, leave: Callable[[], None]) -> None:
        """Until no daemon has been heard of for too long; then end as orphans do, and leave."""
        saved = None
        while saved is None:
            time.sleep(orphans.TICK_S)
            if self._vigil.is_over():
                saved = self._save_if_orphan(self._trainee())
        try:
            self._end_as_orphan(saved)
        finally:
            leave()

    def _save_if_orphan(self, child: Child | None) -> bool | None:
        """Whether the state is on the disk; None where a daemon was heard of after all."""
        if child is None:
            return False
        crew, trainee = _crew_of(child), _Trainee(self, child)
        try:
            if not orphans.gather(crew, trainee, self._vigil):
                return None
            self._is_leaving = True
            return self._save_as_orphan(crew, trainee)
        except OSError as error:  # the disk may be away; what lies in memory stays there
            print(f"orphans could not save: {error}", file=sys.stderr, flush=True)
            return False

    def _trainee(self) -> Child | None:
        """The living child that holds a state; one that stands by holds none."""
        with self._changed:
            living = [one for one in self._children.values() if one.exit is None]
            return next(
                (child for child in living if self._has_reached(child.launch.generation, "ready")),
                None,
            )

    def _has_reached(self, generation: int, kind: str) -> Report | None:
        return self._reached.get(generation, {}).get((kind, ""))

    def _save_as_orphan(self, crew: orphans.Crew, trainee: "_Trainee") -> bool:
        last = orphans.save(crew, trainee)
        if crew.rank != 0:
            return bool(last and last.get("saved"))
        step = int(last["step"]) if last is not None else -1
        crew.tell(
            "ended",
            after_s=self._vigil.after_s,
            at=time.time(),
            step=step,
            saved=step >= 0,
            completed=trainee.completed(),
        )
        return step >= 0

    def _end_as_orphan(self, saved: bool) -> None:
        """End the children. Snapshots stay where they may be all that there is."""
        self._is_leaving = True
        for child in list(self._children.values()):
            child.kill(_ORPHAN_END_S)
        self._starter.submit(self._end_spare).result(_START_LIMIT_S)
        if saved:
            # The other slots of this node do the same.
            with contextlib.suppress(OSError, SnapshotError):
                sweep(snapshot_directory(self._run_dir))

    def _canary(self) -> str | None:
        """What the daemon last wrote to the store; None where that cannot be read."""
        with self._changed:
            specs = [json.loads(child.launch.text) for child in self._children.values()]
        spec = specs[-1] if specs else {}
        if not spec.get("heartbeat"):
            return None
        return read_canary(spec["job"], spec["heartbeat"])

    def _child(self, generation: int) -> Child:
        child = self._children.get(generation)
        if child is None:
            raise Refused(f"generation {generation} was never started here")
        return child

    def _release(self, generation: int) -> None:
        with self._changed:
            held = self._reserved.pop(generation, None)
            path = self._sockets.pop(generation, None)
        if held is not None:
            held.close()
        if path is not None:
            path.unlink(missing_ok=True)


class _Trainee:
    """A child as `trainer.slot.orphans` sees it; what it said before it became an orphan is old."""

    def __init__(self, slot: ResilientWorker, child: Child) -> None:
        self._slot, self._its = slot, child
        self._since = slot._last

    def is_alive(self) -> bool:
        """Whether its exit is not known yet."""
        return self._its.exit is None

    def order(self, **order: Any) -> None:
        """Pass an order on; one that has ended takes none."""
        with contextlib.suppress(ChildError):
            self._its.order(json.dumps(order))

    def completed(self) -> Report | None:
        """What it said when it had finished the job, if it has."""
        with self._slot._changed:
            return self._slot._has_reached(self._its.launch.generation, "completed")

    def report(self, *kinds: str) -> Report | None:
        """Its last report of these kinds since it is an orphan."""
        with self._slot._changed:
            for record in reversed(self._slot._records):
                if record["seq"] <= self._since:
                    return None
                if (
                    record["generation"] == self._its.launch.generation
                    and record["report"] in kinds
                ):
                    return record
        return None


def _crew_of(child: Child) -> orphans.Crew:
    launch = child.launch
    world_size = int(json.loads(launch.text)["world_size"])
    return orphans.crew_of(launch.run_dir, launch.generation, launch.rank, world_size)


def _survivors(child: Child) -> list[int]:
    return [one.pid for one in child.survivors] or [child.identity.pid]


def _gpus() -> list[str]:
    """The devices that Ray gave this slot, in order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [one for one in visible.split(",") if one]
