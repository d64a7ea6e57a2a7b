"""Random faults over the real daemon, core, performers, monitor and journal, in virtual time.

Workers crash, hang and are rejected; slots, nodes, store and disk fail or are slow; the daemon dies
before, after and in the midst of lines of its journal. At some time all is well: the job must end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

import tests.sim.run
from supervisor.cluster.slots import ClusterError, Slot, Snapshot, StartFailed
from supervisor.daemon.adoption import inherit
from supervisor.daemon.loop import Daemon
from supervisor.disk.restore_points import RestorePoint
from supervisor.fsm import events as e
from supervisor.fsm.job import Limits
from supervisor.fsm.states import TERMINAL
from supervisor.record.journal import ROLL_BYTES, Journal, Record, encode, read_history
from supervisor.record.previous_run import past_of
from supervisor.record.replay import replay_file
from tests.fuzz import Violation, main
from tests.sim.run import SAFE_STATES, Killed, Meddling, MortalJournal, Sim, life
from tests.sim.world import FOREVER, Fault, Script, SimCluster, SimDisk
from tests.supervisor.virtual import VirtualLoop

LIMIT_S = 6000.0
"""Virtual seconds: all is well after two minutes at most, but each phase that a worker is stuck in
costs its first deadline, five minutes, and a seed may have several."""
LIVES_MAX = 12
KINDS = (
    "kill", "kill", "kill", "abort", "sigterm", "segv_late", "exit0", "raise", "stop", "stuck",
    "sleep", "port_taken", "reject", "reject_hard",
)  # fmt: skip
PHASES = (
    "step", "step", "step", "initialize", "compile", "restore", "checkpoint", "wait", "evaluate",
)  # fmt: skip
MEDDLINGS = (
    "slot", "slot", "node", "cluster", "stop", "stop_now", "signal", "kill_standby",
    "slots_staggered", "kill_all", "reports_twice",
)  # fmt: skip
Death = tuple[int, str]
"""A line of the journal, and whether the daemon dies before it, after it or in its midst."""


@dataclass
class Plan:
    """What a seed leads to. `odds` are probabilities, `lags` seconds at most, until `calm_at`."""

    chance: random.Random
    script: Script
    limits: Limits
    calm_at: float
    odds: dict[str, float] = field(default_factory=dict)
    lags: dict[str, float] = field(default_factory=dict)
    meddlings: list[tuple[float, str, int]] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    dead_s: float = 2.0
    renews: bool = False
    roll_bytes: int = ROLL_BYTES

    def luck(self, what: str) -> bool:
        """Whether it goes wrong now."""
        now = asyncio.get_running_loop().time()
        return now < self.calm_at and self.chance.random() < self.odds.get(what, 0.0)

    async def lag(self, what: str) -> None:
        if longest_s := self.lags.get(what):
            await asyncio.sleep(self.chance.random() * longest_s)


def plan_of(seed: int) -> Plan:
    """All that is drawn before the run begins."""
    chance = random.Random(seed)
    pick = chance.choice
    script = _script(chance)
    plan = Plan(
        chance=chance, script=script, limits=_limits(chance, seed), calm_at=pick([20, 60, 120])
    )
    odds = {
        "start_fails": 0.1, "order_fails": 0.05, "snapshots_unknown": 0.1, "witness_fails": 0.2,
        "disk_unreadable": 0.1, "slots_gone": 0.1,
    }  # fmt: skip
    rare = {"discard_fails": 0.5, "quarantine_fails": 0.5, "rollback_fails": 0.5}
    plan.odds = {what: odd * pick([1, 3]) for what, odd in odds.items() if chance.random() < 0.25}
    plan.odds |= {what: odd for what, odd in rare.items() if chance.random() < 0.1}
    lags = {"start": 2.0, "order": 0.5, "snapshots": 1.0, "kill": 2.0, "evidence": 3.0, "disk": 3.0}
    plan.lags = {
        what: longest_s * pick([0.01, 0.1, 1])
        for what, longest_s in lags.items()
        if chance.random() < 0.3
    }
    plan.meddlings = [
        (round(chance.uniform(0.2, 40), 3), pick(MEDDLINGS), chance.randrange(script.workers))
        for _ in range(pick([0, 0, 0, 1, 1, 2, 3]))
    ]
    if chance.random() < 0.5:
        how = ["after", "before", "torn"]
        deaths = [(chance.randrange(2, 70), pick(how)) for _ in range(pick([1, 1, 2, 3]))]
        plan.deaths = sorted(deaths)
    plan.dead_s = pick([0.1, 2.0, 2.0, 10.0, 60.0])
    plan.renews = chance.random() < 0.15
    plan.roll_bytes = pick([ROLL_BYTES, ROLL_BYTES, 3000])
    return plan


def _script(chance: random.Random) -> Script:
    pick = chance.choice
    script = Script(
        workers=pick([1, 2, 2, 2, 3]),
        steps=pick([20, 40, 60, 100]),
        checkpoint_every=pick([5, 10, 10, 20, 500]),
        snapshot_every=pick([0, 1, 1, 3]),
        placement_s=pick([0.05, 1.0, 5.0]),
        evaluate_every=pick([0, 0, 20]),
        agreed_every=pick([1, 10, 30]),
    )
    script.faults = [_fault(chance, script) for _ in range(pick([0, 1, 1, 2, 3, 4, 6]))]
    # A load can only be rejected where there is something to load.
    script.faults = [one for one in script.faults if one.kind != "reject" or one.generation != 1]
    steps, spells = range(script.steps), [1.0, 5.0, 30.0]
    if chance.random() < 0.15:
        policies = ["rollback", "rollback", "stop"]
        script.bad_batches = {pick(steps): pick(policies) for _ in range(pick([1, 2]))}
    if chance.random() < 0.1:
        script.replicas_diverge_at = pick(steps)
    if chance.random() < 0.1:
        script.placement_fails = [pick(["timeout", "boom"]) for _ in range(pick([1, 2]))]
    if chance.random() < 0.1:
        script.shortage, script.shortage_until = "needs 4 CPUs", pick([5.0, 30.0, 58.0])
    if chance.random() < 0.15:
        began = chance.uniform(0, 30)
        script.store_away = (began, began + pick(spells))
    if chance.random() < 0.1:
        began = chance.uniform(0, 30)
        script.disk_unreadable = (began, began + pick(spells))
    if chance.random() < 0.05:
        script.last_save_hangs = True
    if chance.random() < 0.1:
        script.save_fails_at = {chance.randrange(0, script.steps, script.checkpoint_every)}
    if chance.random() < 0.05:
        script.unkillable = {(pick([1, 2, 3]), chance.randrange(script.workers))}
    return script


def _fault(chance: random.Random, script: Script) -> Fault:
    pick = chance.choice
    kind, phase = pick(KINDS), pick(PHASES)
    if kind in ("reject", "reject_hard"):
        phase = "restore"
    if kind == "port_taken":
        phase = "initialize"
    return Fault(
        kind=kind,
        rank=chance.randrange(script.workers),
        generation=pick([0, 1, 1, 2, 2, 3, 4]),
        phase=phase,
        step=pick([None, chance.randrange(script.steps)]) if phase == "step" else None,
        error=pick(["KeyError", "OSError", "ValueError"]),
        user=chance.random() < 0.5,
        times=pick([1, 1, 1, 2, 3]),
        seconds=FOREVER,
    )


def _limits(chance: random.Random, seed: int) -> Limits:
    pick = chance.choice
    return Limits(
        failures_max=pick([10, 10, 3, 0, -1]),
        startup_failures_max=pick([3, 3, 0]),
        node_failures_max=pick([3, 3, -1, 1]),
        rollbacks_max=pick([3, 0]),
        no_progress_max=pick([10, 2, 4]),
        same_error_max=pick([3, 1]),
        backoff_base_s=pick([1.0, 1.0, 0.0, 5.0]),
        last_call_s=pick([1.0, 0.05, 0.0]),
        drain_s=pick([30.0, 5.0]),
        capacity_wait_s=pick([0.0, 60.0]),
        standby=pick(["generation", "generation", "none", "spares"]),
        seed=seed,
    )


class PlannedJournal(MortalJournal):
    """A journal whose daemon dies before, after or in the midst of the planned lines."""

    deaths: list[Death] = []  # noqa: RUF012  (of the run that goes on; there is one at a time)

    def append(self, records: Iterable[Record], *, durable: bool = True) -> None:
        records = list(records)
        until = self._seq + len(records)
        due = [death for death in self.deaths if self._seq < death[0] <= until]
        if not due:
            Journal.append(self, records, durable=durable)
            return
        line, how = due[0]
        PlannedJournal.deaths = [death for death in self.deaths if death[0] > line]
        if how == "after":
            Journal.append(self, records, durable=durable)
        elif how == "torn":
            torn = encode({"seq": self._seq + 1, "epoch": self.epoch, **records[0]})
            os.pwrite(self._descriptor, torn[: len(torn) // 2], self._end)
        raise Killed


class ChaosCluster(SimCluster):
    """The scripted cluster, of which parts are slow, fail and are lost."""

    def __init__(self, plan: Plan, disk: SimDisk) -> None:
        super().__init__(plan.script, disk)
        self.plan = plan
        self.dead_slots: set[int] = set()
        self.gone = False
        self.hangs, plan.script.last_save_hangs = plan.script.last_save_hangs, False

    async def place(self, placement: int, timeout_s: float) -> tuple[Slot, ...]:
        slots = await super().place(placement, timeout_s)
        self.dead_slots, self.gone = set(), False
        return slots

    async def adopt(self, placement: int) -> dict[int, dict[int, int]] | None:
        placed = any(call.startswith("place") for call in self.calls)
        if self.dead_slots or self.gone or not placed or self.plan.luck("slots_gone"):
            await self.end_all()
            return None
        return await super().adopt(placement)

    async def sweep(self) -> list[str]:
        await self.end_all()
        return []

    async def start(self, generation: int, specs: Sequence[dict[str, Any]]) -> dict[int, int]:
        await self.plan.lag("start")
        if self.dead_slots:
            raise StartFailed(tuple(self.dead_slots), "the slot died")
        if self.plan.luck("start_fails"):
            raise StartFailed((0,), "the slot did not answer")
        pids = await super().start(generation, specs)
        await self.plan.lag("start")
        return pids

    async def order(self, generation: int, rank: int, order: dict[str, Any]) -> None:
        await self.plan.lag("order")
        if (generation, rank) not in self.workers:
            raise ClusterError("never started here")
        if rank in self.dead_slots:
            raise ClusterError("the slot died")
        if self.plan.luck("order_fails"):
            raise ClusterError("the slot did not answer")
        if not self.hangs or order["order"] not in ("stop", "stop_after", "go"):
            await super().order(generation, rank, order)

    async def snapshots(self) -> list[Snapshot]:
        await self.plan.lag("snapshots")
        if self.plan.luck("snapshots_unknown"):
            raise ClusterError("no slot answers")
        return await super().snapshots()

    async def discard_snapshot(self, generation: int, step: int) -> None:
        if self.plan.luck("discard_fails"):
            raise ClusterError("the slot did not answer")
        await super().discard_snapshot(generation, step)

    async def kill(self, generation: int, timeout_s: float, *, last_words: bool = False) -> Any:
        await self.plan.lag("kill")
        return await super().kill(generation, timeout_s, last_words=last_words)

    async def evidence(self, generation: int) -> dict[int, dict[str, Any]]:
        await self.plan.lag("evidence")
        return await super().evidence(generation)

    async def witness(self, generation: int, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
        if self.plan.luck("witness_fails"):
            return {}
        there = [rank for rank in ranks if (generation, rank) in self.workers]
        return await super().witness(generation, there)

    def kill_slot(self, rank: int, node_lost: bool) -> None:
        """The actor dies, and its children with it; the report of it comes a moment later."""
        self.dead_slots.add(rank)
        for (_, of), worker in self.workers.items():
            if of == rank and worker.exit is None:
                worker.exit = {"status": None, "signal": "SIGKILL", "log_tail": []}
        late_s = self.plan.chance.choice([0.02, 0.02, 1.0, 4.0])
        asyncio.get_running_loop().call_later(
            late_s, lambda: self.on_slot_lost((rank,), "the actor died", node_lost)
        )

    def lose_all(self) -> None:
        """The head of the cluster dies, and all processes with it."""
        self.gone = True
        for worker in self.workers.values():
            if worker.exit is None:
                worker.exit = {"status": None, "signal": "SIGKILL", "log_tail": []}


class ChaosDisk(SimDisk):
    """The disk in memory, slow and with errors that pass."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.script)
        self.plan = plan

    async def restore_points(self, accepted: Sequence[int]) -> list[RestorePoint]:
        await self.plan.lag("disk")
        if self.plan.luck("disk_unreadable"):
            raise OSError(5, "Input/output error")
        return await super().restore_points(accepted)

    async def quarantine_above(self, step: int, why: str) -> None:
        if self.plan.luck("rollback_fails"):
            raise OSError(5, "Input/output error")
        await super().quarantine_above(step, why)

    async def quarantine(self, path: str, why: str) -> None:
        if self.plan.luck("quarantine_fails"):
            raise OSError(30, "Read-only file system")
        await super().quarantine(path, why)


def meddling(what: str, rank: int, plan: Plan) -> Meddling:
    """What is done to a daemon and its cluster at some time."""

    def stop(daemon: Daemon, now: bool) -> None:
        daemon.post(e.StopRequested(at=daemon.clock(), by="operator", now=now))

    def lose_cluster(daemon: Daemon, cluster: ChaosCluster) -> None:
        cluster.lose_all()
        daemon.performers.forget_cluster()
        daemon.post(e.ClusterLost(at=daemon.clock(), why="the head died"))

    def lose_one_by_one(_: Daemon, cluster: ChaosCluster) -> None:
        apart_s = plan.chance.choice([0.3, 2.0, 6.0])
        for one in range(plan.script.workers):
            loop = asyncio.get_running_loop()
            loop.call_later(one * apart_s, cluster.kill_slot, one, False)

    def lose_node(_: Daemon, cluster: ChaosCluster) -> None:
        for one in range(plan.script.workers):
            cluster.kill_slot(one, True)

    def kill(cluster: ChaosCluster, generation: int | None = None) -> None:
        for (of, _), worker in list(cluster.workers.items()):
            if generation is None or (of == generation and worker.exit is None):
                cluster.end(worker, None, "SIGKILL")
                if generation is not None:
                    return

    def report_twice(_: Daemon, cluster: ChaosCluster) -> None:
        for record in list(cluster.history)[-8:]:
            cluster.on_record(record)

    made: dict[str, Callable[[Daemon, Any], Any]] = {
        "slot": lambda _, cluster: cluster.kill_slot(rank, False),
        "node": lose_node,
        "slots_staggered": lose_one_by_one,
        "cluster": lose_cluster,
        "stop": lambda daemon, _: stop(daemon, False),
        "stop_now": lambda daemon, _: stop(daemon, True),
        "signal": lambda daemon, _: daemon.interrupt(15),
        "kill_standby": lambda daemon, cluster: kill(cluster, daemon.job.standby or -1),
        "kill_all": lambda _, cluster: kill(cluster),
        "reports_twice": report_twice,
    }
    return made[what]


async def _lives(path: Path, plan: Plan, cluster: ChaosCluster, disk: ChaosDisk) -> Sim | None:
    """One daemon after another, until one ends the job; None if nothing was left to do."""
    at = {seconds: meddling(what, rank, plan) for seconds, what, rank in plan.meddlings}
    renews = anew = False
    for epoch in range(1, LIVES_MAX + len(plan.deaths)):
        now = asyncio.get_running_loop().time()
        later = {seconds - now: what for seconds, what in at.items() if seconds > now}
        given = (path, plan.script, plan.limits, cluster, disk, later, epoch)
        try:
            sim = await life(
                *given, roll_bytes=plan.roll_bytes, fence=lambda: None, renews=renews, anew=anew
            )
        except Killed:
            await asyncio.sleep(plan.dead_s)
            records = Journal(path, epoch=0).records
            if inherit(records) is None and past_of(records).state in SAFE_STATES:
                return None
            renews, anew = plan.renews, False
        except ClusterError:  # the daemon ends; a scheduler starts it again
            await asyncio.sleep(1.0)
            anew = False
        else:
            if sim.status is not None:
                return sim
            renews, anew = False, True
    raise Violation("one daemon after another ended without an end of the job")


def walk(seed: int) -> str:
    """Run the daemon through the random faults of one seed; raises Violation."""
    plan = plan_of(seed)
    folder = Path(tempfile.mkdtemp(prefix="everstep-fuzz-"))
    path, loop, odd = folder / "journal.jsonl", VirtualLoop(), list[str]()
    loop.set_exception_handler(lambda _, context: odd.append(str(context)))
    disk = ChaosDisk(plan)
    cluster = ChaosCluster(plan, disk)
    PlannedJournal.deaths = plan.deaths
    former = tests.sim.run.MortalJournal
    tests.sim.run.MortalJournal = PlannedJournal  # type: ignore[misc]
    try:
        try:
            lives = _lives(path, plan, cluster, disk)
            sim = loop.run_until_complete(asyncio.wait_for(lives, LIMIT_S))
        except TimeoutError:
            raise Violation(f"no end within {LIMIT_S:g} virtual seconds") from None
        finally:
            loop.run_until_complete(cluster.end_all())
        if odd:
            raise Violation(f"left to the loop: {odd[:3]}")
        _check_journal(path, cluster)
        return _check_end(sim, plan, cluster) if sim is not None else "nothing left to do"
    finally:
        tests.sim.run.MortalJournal = former  # type: ignore[misc]
        loop.close()
        shutil.rmtree(folder)


def _check_end(sim: Sim, plan: Plan, cluster: ChaosCluster) -> str:
    job = sim.daemon.job
    if job.state not in TERMINAL:
        raise Violation(f"the run ended in {job.state.name}")
    untrained = [step for step in range(plan.script.steps) if step not in cluster.trained]
    if job.state.name == "COMPLETED" and untrained:
        raise Violation(f"steps {untrained[:5]} were never trained")
    if sim.disk.result is None:
        raise Violation("no result")
    charges = sum(
        move["event"]["budget"] != "none"
        for move in sim.moves
        if move["event"]["event"] == "retry_granted"
    )
    if charges > job.incidents:
        raise Violation(f"{charges} charges for {job.incidents} incidents")
    return f"{job.state.name} {sim.status}"


def _check_journal(path: Path, cluster: ChaosCluster) -> None:
    if cluster.ever_two_alive:
        raise Violation("two generations that train were alive")
    if difference := replay_file(path).difference:
        raise Violation(f"the replay differs: {difference}")
    moves = [record for record in read_history(path) if record["kind"] == "move"]
    starts = Counter[tuple[str, int]]()
    committed, may_fall = -1, False
    for move in moves:
        event = move["event"]
        if event["event"] == "supervisor_restarted":
            starts.clear()
        for effect in move["effects"]:
            if effect["effect"] in ("PromoteStandby", "StartWorkers", "RestoreWorkers"):
                starts[effect["effect"], effect["generation"]] += 1
        if event["event"] == "checkpoint_committed" and move["effects"]:
            committed = max(committed, event["step"])
        if event["event"] in ("numbers_diverged", "replicas_diverged", "restore_point_rejected"):
            may_fall = True
        if event["event"] == "restore_point_selected" and move["effects"]:
            if committed >= 0 and event["kind"] == "seed":
                raise Violation("from the seed, although something was committed")
            if event["step"] < committed and not may_fall:
                raise Violation(f"from step {event['step']}, below the committed {committed}")
            if may_fall:  # snapshots are no promise: they may be gone the next time
                committed = min(committed, event["step"])
            may_fall = False
    if twice := {start: times for start, times in starts.items() if times > 1}:
        raise Violation(f"started twice: {twice}")


if __name__ == "__main__":
    # Ten thousand runs would print millions of lines.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    sys.exit(main("tests.fuzz.sim", walk))
