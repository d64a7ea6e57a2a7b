"""The fakes: a cluster whose workers follow a script, a store, a disk; all in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from supervisor.cluster.slots import (
    ClusterError,
    Exit,
    PlacementTimedOut,
    Slot,
    Snapshot,
    StartFailed,
)
from supervisor.disk.restore_points import RestorePoint
from supervisor.health.store import StoreUnavailable
from trainer.slot.actor import RECORDS_KEPT, STATES
from trainer.wire.heartbeat import BeatMessage, beat_key

Record = dict[str, Any]
FOREVER = 1e9


@dataclass(kw_only=True)
class Fault:
    """What happens to one rank when it enters `phase` (at `step`) of `generation`; once.

    Kinds: kill, abort, sigterm, segv_late, exit0, raise, stop (SIGSTOP), stuck (the loop alone),
    sleep (`seconds`), port_taken, reject, reject_hard (load fails, point intact).
    """

    kind: str
    rank: int = 1
    generation: int = 1
    phase: str = "step"
    step: int | None = None
    seconds: float = FOREVER
    error: str = "ValueError"
    user: bool = True
    times: int = 1

    def strikes(self, generation: int, rank: int, phase: str, step: int) -> bool:
        """Whether now is the moment; counts down."""
        here = (self.generation in (0, generation), self.rank == rank, self.phase == phase)
        hit = all(here) and self.times > 0 and self.step in (None, step)
        self.times -= hit
        return hit


@dataclass(kw_only=True)
class Script:
    """How the world behaves."""

    workers: int = 2
    steps: int = 40
    step_s: float = 0.1
    start_s: float = 1.0
    compile_s: float = 2.0
    restore_s: float = 0.5
    save_s: float = 0.05
    evaluate_every: int = 0
    evaluate_s: float = 0.5
    checkpoint_every: int = 10
    snapshot_every: int = 0
    snapshots_unknown: bool = False
    snapshot_fails_at: int = -1
    placement_s: float = 5.0
    faults: list[Fault] = field(default_factory=list)
    shortage: str | None = None
    shortage_until: float = FOREVER
    placement_fails: list[str] = field(default_factory=list)
    start_fails: list[tuple[int, ...]] = field(default_factory=list)
    unkillable: set[tuple[int, int]] = field(default_factory=set)
    unkillable_until: float = FOREVER
    save_fails_at: set[int] = field(default_factory=set)
    store_away: tuple[float, float] = (FOREVER, FOREVER)
    disk_unreadable: tuple[float, float] = (FOREVER, FOREVER)
    last_save_hangs: bool = False
    # Saves run beside the training and take so long; only the last one is waited for.
    beside_s: float = 0.0
    orphans_ended: Record | None = None  # how, while no daemon was there
    quarantine_fails: bool = False
    prune_fails: bool = False
    keep_s: float = 3.0
    keep_fails: bool = False
    bad_batches: dict[int, str] = field(default_factory=dict)  # the policy by the batch
    replicas_diverge_at: int = -1  # a step of generation 1
    agreed_every: int = 10


class Worker:
    """One rank of one generation, as its slot and Redis see it."""

    def __init__(self, generation: int, rank: int) -> None:
        self.generation, self.rank = generation, rank
        self.seq = self.step = self.beats_frozen = 0
        self.phase = "initialize"
        self.exit: Record | None = None
        self.stopped = False
        self.stuck = False
        self.born = asyncio.get_running_loop().time()
        self.frozen_at: float | None = None
        self.durations: dict[str, tuple[float, float]] = {}

    @property
    def well(self) -> bool:
        """Whether it can take part in a collective."""
        return self.exit is None and not self.stopped and not self.stuck

    def beats(self, now: float) -> int:
        """How many its thread has sent by now."""
        until = self.frozen_at if self.frozen_at is not None else now
        return 1 + int((until - self.born) / 0.25)

    def enter(self, phase: str, step: int) -> None:
        self.phase, self.step, self.seq = phase, step, self.seq + 1


class SimCluster:
    """A `Cluster` of scripted workers.

    To a new daemon each slot reports what its children have reached, and the last `window` records.
    """

    window = RECORDS_KEPT

    def __init__(self, script: Script, disk: SimDisk) -> None:
        self.script, self.disk = script, disk
        self.on_record: Callable[[Record], None] = lambda record: None
        self.on_slot_lost: Callable[[tuple[int, ...], str, bool], None] = lambda *_: None
        self.workers: dict[tuple[int, int], Worker] = {}
        self.calls: list[str] = []
        self.ever_two_alive = False
        self.held: list[Snapshot] = []
        self.history: list[Record] = []
        self.reached: dict[tuple[int, int, str], Record] = {}
        self.doubts: list[str] = []
        self._counting: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._orders: dict[int, asyncio.Queue[tuple[int, Record]]] = {}
        self.skips: dict[int, list[list[int]]] = {}
        self.placed: tuple[Slot, ...] = ()
        self.trained: dict[int, int] = {}  # batch by step

    def say(self, worker: Worker, report: str, **facts: Any) -> None:
        """A report of a worker, as its slot passes it on."""
        if worker.exit is None or report == "exit":
            who = {"generation": worker.generation, "rank": worker.rank}
            record = {"report": report, **who, **facts, "seq": len(self.history) + 1}
            self.history.append(record)
            if report in STATES:
                self.reached[worker.generation, worker.rank, report] = record
            self.on_record(record)

    def end(self, worker: Worker, status: int | None, signal: str | None, log: str = "") -> None:
        """A process ends, for whatever reason."""
        if worker.exit is not None:
            return
        facts = {"status": status, "signal": signal, "log_tail": [log] if log else []}
        worker.exit = facts
        self.say(worker, "exit", **facts, phase=worker.phase, step=worker.step)

    async def connect(self) -> None:
        self.calls.append("connect")
        await asyncio.sleep(1.0)

    async def sweep(self) -> list[str]:
        return []

    async def shortage(self) -> str | None:
        if asyncio.get_running_loop().time() >= self.script.shortage_until:
            return None
        return self.script.shortage

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.placed

    async def place(self, placement: int, timeout_s: float) -> tuple[Slot, ...]:
        self.calls.append(f"place {placement}")
        await asyncio.sleep(self.script.placement_s)
        if self.script.placement_fails:
            kind = self.script.placement_fails.pop(0)
            raise PlacementTimedOut("no slots") if kind == "timeout" else ClusterError(kind)
        self.placed = tuple(
            Slot(
                rank=rank,
                node_id="node",
                host="node-a",
                address="10.0.0.1",
                pid=1000 + rank,
                started_at=0.0,
                local_rank=rank,
                node_rank=0,
            )
            for rank in range(self.script.workers)
        )
        return self.placed

    async def adopt(self, placement: int) -> dict[int, dict[int, int]] | None:
        if self.script.orphans_ended is not None:
            await self.end_all()
            return None
        news: dict[int, list[Record]] = {}
        for record in self.history:
            news.setdefault(record["rank"], []).append(record)
        dropped = {rank: max(0, len(records) - self.window) for rank, records in news.items()}
        kept = [record for rank, records in news.items() for record in records[dropped[rank] :]]
        kept.sort(key=lambda record: record["seq"])
        for record in [*self.reached.values(), *kept]:
            asyncio.get_running_loop().call_soon(self.on_record, record)
        children: dict[int, dict[int, int]] = {}
        for generation, rank in self.workers:
            children.setdefault(generation, {})[rank] = generation * 100 + rank
        return children

    async def start(self, generation: int, specs: Sequence[dict[str, Any]]) -> dict[int, int]:
        self.calls.append(f"start {generation}")
        standby = specs[0]["role"] == "standby"
        if not standby:
            self._count(generation)
        if self.script.start_fails:
            raise StartFailed(self.script.start_fails.pop(0), "the slot did not answer")
        ranks = range(self.script.workers)
        if (generation, 0) in self.workers:  # ordered by a daemon that vanished
            return {rank: generation * 100 + rank for rank in ranks}
        for rank in ranks:
            self.workers[(generation, rank)] = Worker(generation, rank)
        point = specs[0]["restore_point"]
        self.skips[generation] = specs[0].get("skips", [])
        self._orders[generation] = asyncio.Queue()
        self._tasks[generation] = asyncio.create_task(self._live(generation, point, standby))
        return {rank: generation * 100 + rank for rank in ranks}

    def _count(self, generation: int) -> None:
        """From now on it trains, or means to: no other that does may be alive."""
        self._counting.add(generation)
        alive = {one.generation for one in self.workers.values() if one.exit is None}
        self.ever_two_alive |= bool(alive & self._counting - {generation})

    async def snapshots(self) -> list[Snapshot]:
        if self.script.snapshots_unknown:
            raise ClusterError("no slot answers")
        return list(self.held)

    async def discard_snapshot(self, generation: int, step: int) -> None:
        self.held = [one for one in self.held if (one.generation, one.step) != (generation, step)]

    async def discard_snapshots_above(self, step: int) -> None:
        for snapshot in list(self.held):
            if snapshot.step > step:
                await self.discard_snapshot(snapshot.generation, snapshot.step)

    async def prepare_spares(self) -> None:
        self.calls.append("spares")

    async def order(self, generation: int, rank: int, order: dict[str, Any]) -> None:
        if order["order"] == "promote" and rank == 0:
            self._count(generation)
        if self.workers[(generation, rank)].exit is not None:
            raise ClusterError(f"rank {rank} has ended")
        if not self.script.last_save_hangs:
            self._orders[generation].put_nowait((rank, order))

    async def signal(self, generation: int, rank: int, name: str) -> None:
        self.end(self.workers[(generation, rank)], None, name)

    async def kill(
        self, generation: int, timeout_s: float, *, last_words: bool = False
    ) -> tuple[tuple[Exit, ...], tuple[str, ...]]:
        self.calls.append(f"kill {generation}")
        if task := self._tasks.pop(generation, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.01)
        exits, unproven = [], []
        for (of, rank), worker in self.workers.items():
            if of != generation:
                continue
            if (of, rank) in self.script.unkillable:
                unproven.append(f"pid {of * 100 + rank} on 127.0.0.1")
                worker.exit = {}
                continue
            self.end(worker, None, "SIGKILL")
            assert worker.exit is not None
            exits.append(
                Exit(
                    rank=rank,
                    status=worker.exit["status"],
                    signal=worker.exit["signal"],
                    log_tail=(),
                    stacks="a stack" if last_words else "",
                )
            )
        self.doubts += unproven
        return tuple(exits), tuple(unproven)

    async def prove(self) -> tuple[str, ...]:
        if asyncio.get_running_loop().time() < self.script.unkillable_until:
            return ()
        proven, self.doubts = tuple(self.doubts), []
        return proven

    async def evidence(self, generation: int) -> dict[int, dict[str, Any]]:
        await asyncio.sleep(0.02)
        return {
            rank: {"stacks": f"stack of {rank}", "log_tail": []}
            for of, rank in self.workers
            if of == generation
        }

    async def witness(self, generation: int, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
        await asyncio.sleep(0.001)
        found = {}
        for rank in ranks:
            worker = self.workers[(generation, rank)]
            found[rank] = {
                "alive": worker.exit is None,
                "state": "T" if worker.stopped else "S",
                "seq": worker.seq,
                "phase": worker.phase,
                "step": worker.step,
                "beats": worker.beats(asyncio.get_running_loop().time()),
            }
        return found

    async def release(self, *, forget: bool = True) -> None:
        """As the real one does: no child outlives its slot."""
        self.calls.append("release")
        await self.end_all()

    async def end_all(self) -> None:
        """Nothing of the fake world goes on."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for worker in self.workers.values():
            if worker.exit is None:
                worker.exit = {"status": None, "signal": "SIGKILL", "log_tail": []}

    async def disconnect(self, stop_head: bool) -> None:
        self.calls.append("disconnect")

    # The life of a generation

    async def _live(self, generation: int, point: dict[str, Any] | None, standby: bool) -> None:
        script = self.script
        crew = [self.workers[(generation, rank)] for rank in range(script.workers)]
        await self._phase(crew, "initialize", -1, script.start_s, point)
        await self._phase(crew, "compile", -1, script.compile_s, point)
        if standby:
            await self._phase(crew, "wait", -1, 0.0, None)
            for worker in crew:
                self.say(worker, "standing_by", seconds=3.0, rss_bytes=400e6)
            point = await self._promoted(generation)
        at = point["step"] if point else 0
        await self._phase(crew, "restore", -1, script.restore_s, point)
        for worker in crew:
            worker.enter("step", at)
            self.say(worker, "ready", step=at, environment={}, differences=[])
        first = at
        stop_after = script.steps - 1
        while at < script.steps:
            stop_after = await self._orders_between(generation, crew, at, stop_after)
            await self._phase(crew, "step", at, script.step_s, point)
            await self._look_at_the_numbers(generation, crew, at)
            typical = {"step": (script.step_s, script.step_s)}
            if script.beside_s and at >= script.checkpoint_every:
                typical["checkpoint"] = (script.save_s, script.save_s)
            for worker in crew:
                worker.durations = typical
                if at == first:
                    self.say(worker, "stepped", step=at)
            at += 1
            if script.snapshot_every and at % script.snapshot_every == 0:
                here = Snapshot(generation=generation, step=at, path="/dev/shm/sim")
                self.held = [*self.held[-1:], here]
            if at == script.snapshot_fails_at:
                self.say(crew[0], "snapshot_failed", step=at, error="the disk is full")
            if script.evaluate_every and at % script.evaluate_every == 0:
                await self._phase(crew, "evaluate", at, script.evaluate_s, point)
            if at % script.checkpoint_every == 0 or at == script.steps or at > stop_after:
                await self._save(crew, generation, at)
            if at > stop_after and at < script.steps:
                for worker in crew:
                    worker.enter("wait", at)
                    self.say(worker, "saved", step=at)
                await asyncio.sleep(FOREVER)
        for worker in crew:
            worker.enter("wait", at)
            self.say(
                worker,
                "completed",
                step=at,
                params_digest="d" * 64,
                loss=1.0,
                held_out_loss=1.1,
                unigram_entropy=3.0,
            )
        await asyncio.sleep(FOREVER)

    async def _look_at_the_numbers(self, generation: int, crew: list[Worker], at: int) -> None:
        script, shift = self.script, 0
        for first, count in self.skips[generation]:
            shift = count if at >= first else shift
        self.trained[at] = at + shift
        said = None
        if policy := script.bad_batches.get(at + shift):
            told: Record = {
                "metric": "loss",
                "value": "nan",
                "policy": policy,
                "why": "loss is nan",
            }
            said = ("numbers_diverged", {"step": at, "batch": at + shift, **told})
        elif at == script.replicas_diverge_at and generation == 1:
            agreed = at // script.agreed_every * script.agreed_every
            told = {"why": "rank 1 differs", "ranks": [1], "agreed_step": agreed}
            said = ("replicas_diverged", {"step": at, **told})
        if said is not None:
            for worker in crew:
                worker.enter("wait", at)
                self.say(worker, said[0], **said[1])
            await asyncio.sleep(FOREVER)

    async def _promoted(self, generation: int) -> dict[str, Any] | None:
        while True:
            _, order = await self._orders[generation].get()
            if order["order"] == "promote":
                point: dict[str, Any] | None = order["restore_point"]
                self.skips[generation] = order["skips"]
                return point

    async def _orders_between(
        self, generation: int, crew: list[Worker], at: int, stop_after: int
    ) -> int:
        queue = self._orders[generation]
        while not queue.empty():
            rank, order = queue.get_nowait()
            if order["order"] == "stop":
                self.say(crew[0], "stopping", after_step=at)
                while True:
                    rank, other = await queue.get()
                    if other["order"] == "go":
                        break
                    self.say(crew[rank], "acknowledged", order="stop_after")
                return at
        return stop_after

    async def _save(self, crew: list[Worker], generation: int, at: int) -> None:
        is_last = at == self.script.steps or at % self.script.checkpoint_every > 0
        waits_s = self.script.beside_s if is_last and self.script.beside_s else self.script.save_s
        await self._phase(crew, "checkpoint", at, waits_s, None)
        if at in self.script.save_fails_at:
            self.say(crew[0], "checkpoint_failed", step=at, error="the disk is full")
            return
        path = self.disk.commit(generation, at)
        agreed = at // self.script.agreed_every * self.script.agreed_every
        facts = {
            "path": path,
            "seconds": self.script.beside_s or 0.05,
            "bytes": 1,
            "agreed_step": agreed,
        }
        self.say(crew[0], "checkpoint_committed", step=at, **facts)

    async def _phase(
        self,
        crew: list[Worker],
        phase: str,
        step: int,
        seconds: float,
        point: dict[str, Any] | None,
    ) -> None:
        extra_s = 0.0
        for worker in crew:
            worker.enter(phase, step)
            if phase in ("initialize", "compile", "restore"):
                self.say(worker, "phase", phase=phase)
        for worker in crew:
            for fault in self.script.faults:
                if fault.strikes(worker.generation, worker.rank, phase, step):
                    extra_s = max(extra_s, await self._strike(fault, worker, crew, step, point))
        if not all(worker.well for worker in crew):
            await self._mourn(crew, phase, step)
        await asyncio.sleep(seconds + extra_s)

    async def _strike(
        self,
        fault: Fault,
        worker: Worker,
        crew: list[Worker],
        step: int,
        point: dict[str, Any] | None,
    ) -> float:
        await asyncio.sleep(0.01)
        now = asyncio.get_running_loop().time()
        error: Record = {"type": fault.error, "message": "boom", "frame": "task.py:7 in f"}
        error |= {"traceback": "…", "user": fault.user}
        match fault.kind:
            case "sleep":
                if fault.seconds < FOREVER:
                    return fault.seconds
                worker.stuck = True
            case "stuck":
                worker.stuck = True
            case "stop":
                worker.stopped, worker.frozen_at = True, now
            case "raise" | "reject_hard":
                facts: Record = {"collective": False, "startup": False, "step": step}
                self.say(worker, "raised", error=error, phase=worker.phase, **facts)
                self.end(worker, 1, None)
            case "port_taken":
                facts = {"collective": False, "startup": True, "step": None}
                self.say(worker, "raised", error=error, phase=worker.phase, **facts)
                self.end(worker, 1, None)
            case "reject":
                assert point is not None
                for one in crew:
                    path, why = point["path"], "a digest differs"
                    self.say(one, "restore_rejected", path=path, reason=why)
                    self.end(one, 1, None)
            case "segv_late":  # The victims' words overtake the word of the death.
                worker.exit = {"status": None, "signal": "SIGSEGV", "log_tail": []}
                late = functools.partial(self.say, worker, "exit", **worker.exit)
                asyncio.get_running_loop().call_later(0.1, late)
            case "exit0":
                self.end(worker, 0, None)
            case kind:
                names = {"kill": "SIGKILL", "abort": "SIGABRT", "sigterm": "SIGTERM"}
                self.end(worker, None, names[kind])
        return 0.0

    async def _mourn(self, crew: list[Worker], phase: str, step: int) -> None:
        """The survivors of a death see their collective fail; those of a hang wait."""
        await asyncio.sleep(0.005)
        if any(worker.exit is not None for worker in crew):
            for worker in crew:
                if worker.well:
                    error: Record = {"type": "ValueError", "message": "Connection closed by peer"}
                    error |= {"frame": "step.py:1 in f", "traceback": "…", "user": False}
                    facts = {"collective": True, "startup": False, "step": step}
                    self.say(worker, "raised", error=error, phase=phase, **facts)
                    self.end(worker, 1, None)
        await asyncio.sleep(FOREVER)


class SimStore:
    """A `HeartbeatStore` that reads the workers themselves."""

    def __init__(self, job: str, cluster: SimCluster) -> None:
        self.job, self.cluster = job, cluster
        self.deleted: list[str] = []

    async def poll(self, keys: Sequence[str]) -> list[str | None]:
        await asyncio.sleep(0.001)
        now = asyncio.get_running_loop().time()
        start, end = self.cluster.script.store_away
        if start <= now < end:
            raise StoreUnavailable("ConnectionError: refused")
        known = {beat_key(self.job, *member): one for member, one in self.cluster.workers.items()}
        return [self._message(known[key], now) if key in known else None for key in keys]

    def _message(self, worker: Worker, now: float) -> str | None:
        if worker.exit is not None:
            now = worker.frozen_at or worker.born
        return BeatMessage(
            generation=worker.generation,
            rank=worker.rank,
            pid=1,
            seq=worker.seq,
            beats=worker.beats(now),
            phase=worker.phase,
            step=worker.step,
            durations=worker.durations,
        ).to_json()

    async def delete(self, keys: Sequence[str]) -> None:
        self.deleted += keys


class SimDisk:
    """A `Disk` in memory."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.points: list[RestorePoint] = []
        self.quarantined: list[str] = []
        self.evidence: dict[int, Any] = {}
        self.summaries: dict[int, Mapping[str, Any]] = {}
        self.result: Mapping[str, Any] | None = None

    def commit(self, generation: int, step: int) -> str:
        """A finished save."""
        from pathlib import Path

        path = Path(f"checkpoints/generation-{generation}/{step}")
        self.points.append(RestorePoint(step=step, generation=generation, path=path))
        return str(path)

    async def restore_points(self, accepted: Sequence[int]) -> list[RestorePoint]:
        await asyncio.sleep(0.001)
        start, end = self.script.disk_unreadable
        if start <= asyncio.get_running_loop().time() < end:
            raise OSError(5, "Input/output error")
        good = [point for point in self.points if point.generation in accepted]
        return sorted(good, key=lambda point: (point.step, point.generation), reverse=True)

    async def flaw(self, generation: int, step: int) -> str:
        return "its metadata is damaged"

    async def keep_snapshot(self, generation: int, step: int) -> str:
        await asyncio.sleep(self.script.keep_s)
        if self.script.keep_fails:
            raise OSError(28, "No space left on device")
        return self.commit(generation, step)

    async def quarantine(self, path: str, why: str) -> None:
        if self.script.quarantine_fails:
            raise OSError(30, "Read-only file system")
        self.points = [point for point in self.points if str(point.path) != path]
        self.quarantined.append(path)

    async def quarantine_above(self, step: int, why: str) -> None:
        await asyncio.sleep(0.001)
        self.quarantined += [str(point.path) for point in self.points if point.step > step]
        self.points = [point for point in self.points if point.step <= step]

    async def prune(
        self,
        keep: int,
        verified: Sequence[tuple[int, int]],
        spared: Sequence[tuple[int, int]],
    ) -> None:
        """As `restore_points.prune` does."""
        if self.script.prune_fails:
            raise OSError(30, "Read-only file system")
        steps = sorted(
            point.step for point in self.points if (point.generation, point.step) in verified
        )
        if len(steps) >= keep:
            self.points = [
                point
                for point in self.points
                if point.step >= steps[-keep] or (point.generation, point.step) in spared
            ]

    async def write_evidence(
        self, incident: int, generation: int, evidence: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self.evidence[incident] = dict(evidence)

    async def write_summary(self, incident: int, summary: Mapping[str, Any]) -> None:
        self.summaries[incident] = summary

    async def write_result(self, result: Mapping[str, Any]) -> None:
        self.result = result
