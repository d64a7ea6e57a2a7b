"""Random walks over the pure core.

Orders end in any sequence, late, twice, or never before an order to end; failures, stops and losses
come in any state. Then it is calm: all that is under way ends well, and the job must end.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Job, Limits
from supervisor.fsm.machine import JobMachine, Move, OutcomeOfNothing, table_digest
from supervisor.fsm.states import TERMINAL, State
from supervisor.record.replay import replay
from tests.fuzz import Violation, main

S = State
STEPS = 60
CALM_MAX = 600
ERROR = {"type": "KeyError", "message": "m", "frame": "task.py:7 in f", "traceback": "t"}
# What nothing waits for: such an order may stay under way for ever.
ASIDE = (
    x.NotifyOperator,
    x.RecordIncident,
    x.PruneCheckpoints,
    x.PrepareSpares,
    x.PrepareStandby,
    x.PreloadStandby,
)
CALLED_OFF = (
    x.PlaceSlots,
    x.StartWorkers,
    x.PrepareStandby,
    x.SaveWorkers,
    x.SelectRestorePoint,
    x.KeepSnapshot,
)
OUTCOMES = (e.SlotsPlaced, e.WorkersGone)


@dataclass(frozen=True)
class Ready:
    """The processes of a generation run, and will hold their state at some time."""

    generation: int
    restoring: bool


def limits_of(chance: random.Random, seed: int) -> Limits:
    """Settings, the odd ones more often than in life."""
    pick = chance.choice
    return Limits(
        failures_max=pick([10, 3, 0, -1]),
        startup_failures_max=pick([3, 0, -1]),
        node_failures_max=pick([3, -1]),
        rollbacks_max=pick([3, 0]),
        no_progress_max=pick([10, 1, 3]),
        same_error_max=pick([3, 1]),
        backoff_base_s=pick([1.0, 0.0]),
        last_call_s=pick([1.0, 0.0]),
        capacity_wait_s=pick([0.0, 60.0]),
        standby=pick(["generation", "generation", "none", "spares"]),
        standby_failures_max=pick([3, 1]),
        checkpoints_kept=pick([2, 3]),
        seed=seed,
    )


class Walk:
    """One job, what it has ordered, and what the world would know."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.machine = JobMachine(Job(limits=limits_of(self.chance, seed)))
        header = {"kind": "header", "seq": 1, "table": table_digest(), "schema": 1}
        self.records: list[dict[str, Any]] = [header, self._record()]
        self.pending: list[x.Effect | Ready] = []
        self.charges: Counter[int] = Counter()
        self.saved: list[tuple[str, int, int]] = []  # kind, step, generation
        self.killed: set[int] = set()
        self.gone: set[int] = set()
        self.trains: set[int] = set()
        self.begun: set[int] = set()
        self.backoff: str = ""  # the owner of the backoff that has to pass
        self.put(e.JobStarted(at=self.at(), after=""))

    @property
    def job(self) -> Job:
        return self.machine.job

    def at(self) -> float:
        self.now += self.chance.random() * self.chance.choice([0.01, 0.1, 5.0])
        return round(self.now, 6)

    def _record(self) -> dict[str, Any]:
        return {"kind": "job", "seq": 0, "job": json.loads(json.dumps(self.job.to_dict()))}

    def put(self, event: e.Event) -> None:
        """Hand an event to the machine and hold its orders against the promises."""
        if self.chance.random() < 0.05:
            self._survive_a_restart()
        again = e.Event.from_dict(json.loads(json.dumps(event.to_dict())))
        if again != event:
            raise Violation(f"{event} does not survive its record")
        if isinstance(event, e.DeadlinePassed) and event.id == "backoff":
            self.backoff = ""
        before = self.job
        for move in self.machine.handle(event):
            self.records.append(
                {"kind": "move", "seq": 0, **json.loads(json.dumps(move.to_dict()))}
            )
            self._check(move, before)
        self.pending = [
            order
            for order in self.pending
            if not isinstance(order, x.SetDeadline) or order.owner == self.job.owner
        ]
        if self.job.standby is not None and self.job.leaving:
            raise Violation(f"standby {self.job.standby} beside {self.job.leaving} that may live")
        if self.job.no_progress > before.no_progress + 1:
            raise Violation("one generation counted twice towards no_progress_max")
        if self.job.state not in TERMINAL:
            self._must_go_on()

    def _survive_a_restart(self) -> None:
        record = self._record()["job"]
        again = Job.from_dict(record)
        if json.loads(json.dumps(again.to_dict())) != record:
            raise Violation("the job does not survive its record")
        self.machine = JobMachine(again)

    def _check(self, move: Move, before: Job) -> None:
        event = move.event
        if isinstance(event, e.RetryGranted):
            assert self.job.incident is not None
            number = self.job.incident.number
            self.charges[number] += event.budget != "none"
            if self.charges[number] > 1:
                raise Violation(f"incident {number} is charged twice")
            self.backoff = f"generation {self.job.active}" if event.backoff_s else ""
        elif move.target is not S.RESTORING:
            self.backoff = ""
        for effect in move.effects:
            self._check_order(effect, before)
            self.pending.append(effect)
            if isinstance(effect, x.KillWorkers):
                self._call_off(effect)

    def _call_off(self, kill: x.KillWorkers) -> None:
        self.killed.add(kill.generation)
        self.pending = [
            order
            for order in self.pending
            if not isinstance(order, CALLED_OFF) or order.generation != kill.generation
        ]

    def _check_order(self, effect: x.Effect, before: Job) -> None:
        job = self.job
        if isinstance(effect, x.SelectRestorePoint):
            if effect.seed_allowed and job.committed_step >= 0:
                raise Violation("the seed is allowed although something is committed")
            if self.backoff and effect.generation == job.active:
                raise Violation(f"{effect} within the backoff")
        if isinstance(effect, x.PrepareStandby) and effect.generation in self.killed:
            raise Violation(f"{effect} after the order to end it")
        if not isinstance(effect, x.StartWorkers) or isinstance(effect, x.PreloadStandby):
            return
        others = self.trains - self.gone - {effect.generation}
        if others:
            raise Violation(f"{effect} while {others} are not proven gone")
        if effect.generation in self.killed:
            raise Violation(f"{effect} after the order to end it")
        if effect.generation in self.trains:
            raise Violation(f"{effect} a second time")
        if self.backoff:
            raise Violation(f"{effect} within the backoff")
        if job.quarantined or not job.slots_placed:
            raise Violation(f"{effect} without slots")
        if 0 <= job.step_max < effect.step:
            raise Violation(f"{effect} above the target of the rollback, {job.step_max}")
        self.trains.add(effect.generation)

    def _must_go_on(self) -> None:
        """What is under way, or a worker that is monitored, must lead out of the state."""
        job = self.job
        waits = [order for order in self.pending if not isinstance(order, ASIDE)]
        if job.state is S.RUNNING:
            return
        if job.state is S.INITIALIZING:
            going = any(isinstance(order, x.StartWorkers) for order in waits)
            if going or job.active in self.begun:
                return
        kinds: dict[State, tuple[type, ...]] = {
            S.DRAINING: (
                x.KillWorkers, x.CollectEvidence, x.SaveWorkers, x.QuarantineRestorePoint,
                x.KeepSnapshot, x.SetDeadline,
            ),
            S.RESTORING: (x.SelectRestorePoint, x.RestoreWorkers, x.PromoteStandby, x.SetDeadline),
            S.PROVISIONING: (x.SelectRestorePoint, x.PlaceSlots, x.SetDeadline),
        }  # fmt: skip
        if job.state is S.RESTORING and job.stage == "starting" and job.active in self.begun:
            return
        for order in waits:
            mine = getattr(order, "generation", job.active) == job.active
            if mine and isinstance(order, kinds.get(job.state, ())):
                return
        raise Violation(f"{job.state.name}, stage {job.stage!r}: nothing leads out; {self.pending}")

    # What comes of an order

    def finish(self, order: x.Effect | Ready, *, calm: bool) -> e.Event | None:
        """The outcome of an order, in calm the good one; None if it has none."""
        if order in self.pending:
            self.pending.remove(order)
        luck = 1.0 if calm else self.chance.random()
        match order:
            case x.SelectRestorePoint():
                return self._selected(order, luck)
            case x.PlaceSlots():
                return self._placed(order, luck)
            case x.PreloadStandby():
                return None
            case x.StartWorkers() | x.PrepareStandby() | Ready():
                return self._started(order, luck)
            case x.KillWorkers() | x.SaveWorkers() | x.CollectEvidence():
                return self._drained(order, luck)
            case x.QuarantineRestorePoint():
                if luck < 0.1:
                    return self._failed(order)
                bad = (order.kind, order.step, order.saved_by)
                self.saved = [point for point in self.saved if point != bad]
                return e.RestorePointQuarantined(at=self.at(), path=order.path)
            case x.KeepSnapshot():
                return self._kept(order, luck)
            case x.SetDeadline():
                return e.DeadlinePassed(at=self.at(), id=order.id, owner=order.owner)
            case x.PruneCheckpoints() | x.RecordIncident() | x.PrepareSpares():
                return self._failed(order) if luck < 0.2 else None
        return None

    def _failed(self, order: x.Effect) -> e.Event:
        return e.HousekeepingFailed(at=self.at(), action=type(order).__name__, error="EROFS")

    def _kept(self, order: x.KeepSnapshot, luck: float) -> e.Event:
        common: dict[str, Any] = {"at": self.at(), "generation": order.generation}
        fit = [(step, by) for kind, step, by in self.saved if kind == "snapshot"]
        newer = [(step, by) for step, by in fit if step > order.above and by <= order.generation]
        if not newer or luck < 0.2:
            return e.SnapshotNotKept(**common, error="EIO" if newer else "")
        step, by = max(newer)
        return e.SnapshotKept(**common, saved_by=by, step=step, path="p", duration_s=1.0)

    def _selected(self, order: x.SelectRestorePoint, luck: float) -> e.Event:
        common: dict[str, Any] = {"at": self.at(), "generation": order.generation}
        if luck < 0.12:
            return e.RestorePointsUnreadable(**common, error="EIO")
        fit = [
            (step, by, kind)
            for kind, step, by in self.saved
            if by < order.generation
            and (order.step_max < 0 or step <= order.step_max)
            and (kind == "checkpoint" or not order.checkpoints_only)
        ]
        if fit:
            step, by, kind = max(fit)
            point: dict[str, Any] = {
                "kind": kind,
                "step": step,
                "path": f"{by}/{step}",
                "saved_by": by,
            }
            return e.RestorePointSelected(**common, **point)
        if order.seed_allowed:
            return e.RestorePointSelected(**common, kind="seed", step=0, path="", saved_by=0)
        return e.RestorePointsExhausted(**common, why="nothing can be loaded")

    def _placed(self, order: x.PlaceSlots, luck: float) -> e.Event:
        common: dict[str, Any] = {"at": self.at(), "generation": order.generation}
        if luck < 0.1:
            return e.PlacementTimedOut(**common, waited_s=1.0, why="w")
        if luck < 0.2:
            return e.PlacementFailed(**common, error="boom")
        if luck < 0.3:
            if self.job.limits.capacity_wait_s:
                self.pending.append(order)
            return e.CapacityMissing(**common, why="small")
        if luck < 0.4:
            self.pending.append(order)
            return e.CapacityFound(**common)
        slots = ((0, "n", 1), (1, "n", 2))
        return e.SlotsPlaced(**common, placement=order.placement, slots=slots)

    def _started(
        self, order: x.StartWorkers | x.PrepareStandby | Ready, luck: float
    ) -> e.Event | None:
        common: dict[str, Any] = {"at": self.at(), "generation": order.generation}
        if isinstance(order, Ready):
            if order.generation in self.killed:
                return None
            kind = e.WorkersRestored if order.restoring else e.WorkersInitialized
            return kind(**common, step=self.job.restore_step)
        if isinstance(order, x.PrepareStandby):
            if luck < 0.3:
                return e.StandbyLost(**common, ranks=(0,), why="w")
            return e.StandbyReady(**common, start_s=3.0, memory_mb=1.0)
        if luck < 0.1:
            return e.InitializationFailed(**common, ranks=(0,), error="silent")
        self.begun.add(order.generation)
        restoring = isinstance(order, x.RestoreWorkers | x.PromoteStandby)
        self.pending.append(Ready(order.generation, restoring))
        if isinstance(order, x.PromoteStandby):
            return None
        return e.WorkersStarted(**common, pids=((0, 1), (1, 2)))

    def _drained(
        self, order: x.KillWorkers | x.SaveWorkers | x.CollectEvidence, luck: float
    ) -> e.Event:
        common: dict[str, Any] = {"at": self.at(), "generation": order.generation}
        if isinstance(order, x.CollectEvidence):
            return e.EvidenceCollected(**common, missing=())
        if isinstance(order, x.SaveWorkers):
            if luck < 0.3:
                return e.LastSaveFailed(**common, error="e")
            return e.WorkersSaved(**common, step=5)
        self.gone.add(order.generation)
        if luck < 0.08:
            return e.ExitUnproven(**common, unproven=("pid 7 on n",), exits=())
        return e.WorkersGone(**common, exits=((0, None, "SIGKILL"),))

    # What anybody may report at any time

    def report(self) -> e.Event | None:
        """A report of some generation, or of the host; None now and then."""
        job, pick = self.job, self.chance.choice
        roles = [job.active] * 6 + [job.standby or job.active] * 2 + list(job.leaving)
        generation = pick([*roles, self.chance.randint(1, job.generation)])
        step = self.chance.randrange(-1, STEPS)
        common: dict[str, Any] = {"at": self.at(), "generation": generation}
        kinds = pick([self._failure, self._failure, self._news, self._news, self._outside])
        return kinds(common, generation, step)

    def _failure(self, common: dict[str, Any], generation: int, step: int) -> e.Event | None:
        primary = self.chance.random() < 0.5
        rank = (self.chance.randrange(2),)
        signal = self.chance.choice(["SIGKILL", "SIGTERM", "SIGABRT"])
        error = {**ERROR, "type": self.chance.choice(["KeyError", "OSError"]), "user": primary}
        silent: dict[str, Any] = {"phase": "step", "step": step, "silence_s": 4.0, "why": "w"}
        of_active = {**common, "generation": self.job.active}
        path = self.job.restore_path
        made: list[Callable[[], e.Event]] = [
            lambda: e.WorkerCrashed(
                **common, ranks=rank, status=None, signal=signal, phase="step", step=step,
                primary=primary, detail="",
            ),
            lambda: e.WorkerRaised(
                **common, ranks=rank, error=error, phase="step", step=step, primary=primary
            ),
            lambda: e.HeartbeatLost(**common, ranks=(1,), **silent, lease_s=3.0),
            lambda: e.ProgressStalled(
                **common, ranks=(1,), stalled=(0, 1), **silent, deadline_s=3.0
            ),
            lambda: e.SlotLost(**of_active, ranks=(1,), why="w"),
            lambda: e.NodeLost(**of_active, ranks=(1,), why="w"),
            lambda: e.WorkersOrphaned(**common, step=3, why="w"),
            lambda: e.InitializationFailed(**common, ranks=(0,), error="port"),
            lambda: e.RestoreFailed(**common, ranks=(0,), error={**ERROR, "user": False}),
            lambda: e.RestorePointRejected(**common, ranks=(0,), path=path, why="digest"),
            lambda: e.StandbyLost(**common, ranks=(0,), why="w"),
        ]  # fmt: skip
        return self.chance.choice(made)()

    def _news(self, common: dict[str, Any], generation: int, step: int) -> e.Event | None:
        step = max(step, 0)
        policy = self.chance.choice(["rollback", "rollback", "stop"])
        done: dict[str, Any] = {
            "step": STEPS,
            "params_digest": "d",
            "loss": 1.0,
            "held_out_loss": None,
        }
        rarely = self.chance.random() < 0.1
        made: list[Callable[[], e.Event | None]] = [
            lambda: e.FirstStepTaken(**common, step=step),
            lambda: self._commit(common, generation, step),
            lambda: self._commit(common, generation, step),
            lambda: self._snapshot(generation, step),
            lambda: e.CheckpointFailed(**common, step=step, error="e"),
            lambda: e.SnapshotFailed(**common, step=step, error="e"),
            lambda: e.BatchSkipped(**common, step=step, metric="loss", value="nan"),
            lambda: e.NumbersDiverged(
                **common, step=step, batch=step, metric="loss", value="nan", policy=policy, why="w"
            ),
            lambda: e.ReplicasDiverged(
                **common, step=step, ranks=(1,), agreed_step=max(0, step - 5), why="w"
            ),
            lambda: e.StandbyReady(**common, start_s=1.0, memory_mb=1.0),
            lambda: e.TrainingCompleted(**common, **done) if rarely else None,
            lambda: e.WorkersRestored(**common, step=1) if rarely else None,
            lambda: e.WorkersInitialized(**common, step=1) if rarely else None,
        ]
        return self.chance.choice(made)()

    def _outside(self, common: dict[str, Any], generation: int, step: int) -> e.Event | None:
        at, rarely = common["at"], self.chance.random() < 0.1
        by, now = self.chance.choice(["operator", "signal"]), self.chance.random() < 0.5
        action = self.chance.choice(["PruneCheckpoints", "to write the log of rank 1"])
        made: list[Callable[[], e.Event | None]] = [
            lambda: e.ClusterLost(at=at, why="w"),
            lambda: e.StandstillEnded(at=at, seconds=40.0),
            lambda: e.ExitProven(at=at, proven=self.job.unproven[:1]),
            lambda: e.HeartbeatStoreLost(at=at, why="w"),
            lambda: e.HeartbeatStoreRecovered(at=at, blind_s=1.0),
            lambda: e.HousekeepingFailed(at=at, action=action, error="e"),
            lambda: e.SupervisorRestarted(at=at, epoch=2, adopted=(), slots=True),
            lambda: e.StopRequested(at=at, by=by, now=now) if rarely else None,
        ]
        return self.chance.choice(made)()

    def _commit(self, common: dict[str, Any], generation: int, step: int) -> e.Event:
        agreed = step - step % 7
        self.saved.append(("checkpoint", step, generation))
        path = f"{generation}/{step}"
        return e.CheckpointCommitted(
            **common, step=step, path=path, duration_s=0.1, agreed_step=agreed
        )

    def _snapshot(self, generation: int, step: int) -> None:
        self.saved.append(("snapshot", step, generation))

    # The walk

    def storm(self, moves: int) -> None:
        """Anything, in any order; some outcomes are delivered twice."""
        late: list[e.Event] = []
        for _ in range(moves):
            if self.job.state in TERMINAL:
                return
            luck, event = self.chance.random(), None
            if luck < 0.55 and self.pending:
                event = self.finish(self.chance.choice(self.pending), calm=False)
                if event is not None and self.chance.random() < 0.05:
                    late.append(event)
            elif luck < 0.62 and late:
                event = late.pop()
            elif luck < 0.64:
                self._claim_what_was_not_ordered()
            elif luck > 0.7:
                event = self.report()
            if event is not None:
                self.put(event)

    def _claim_what_was_not_ordered(self) -> None:
        """The door refuses it by name, and nothing changes."""
        job = self.job
        common: dict[str, Any] = {"at": self.now, "generation": job.active}
        placing = job.state is not S.PROVISIONING or job.stage in ("placing", "capacity")
        if not placing:
            event: e.Event = e.SlotsPlaced(**common, placement=job.placement, slots=())
        elif job.stage not in ("killing", "keeping"):
            event = e.WorkersGone(**common, exits=())
        else:
            return
        try:
            self.machine.handle(event)
        except OutcomeOfNothing:
            return
        raise Violation(f"{event} in {job.state.name} was let in, although it was never ordered")

    def calm(self) -> None:
        """All that is under way ends well; then the job has to end."""
        for _ in range(CALM_MAX):
            if self.job.state in TERMINAL:
                return
            event = self._next_in_calm()
            if event is not None:
                self.put(event)
        raise Violation(f"no end although it is calm: {self.job.state.name}, {self.job.stage!r}")

    def _next_in_calm(self) -> e.Event | None:
        job = self.job
        orders = [order for order in self.pending if not isinstance(order, x.SetDeadline)]
        if orders:
            return self.finish(orders[0], calm=True)
        common: dict[str, Any] = {"at": self.at(), "generation": job.active}
        if job.state is S.RUNNING:
            done: dict[str, Any] = {
                "step": STEPS,
                "params_digest": "d",
                "loss": 1.0,
                "held_out_loss": None,
            }
            return e.TrainingCompleted(**common, **done)
        if self.pending:
            return self.finish(self.pending[0], calm=True)
        # Workers that never get ready are noticed by the monitor.
        silent: dict[str, Any] = {"phase": "restore", "step": -1, "silence_s": 4.0, "why": "w"}
        return e.ProgressStalled(**common, ranks=(1,), stalled=(0, 1), **silent, deadline_s=3.0)


def walk(seed: int) -> str:
    """Walk over the pure core from one seed; raises Violation."""
    one = Walk(seed)
    one.storm(one.chance.choice([10, 40, 120]))
    one.calm()
    if one.job.exit_status < 0:
        raise Violation(f"{one.job.state.name} without an exit status")
    if difference := replay(one.records).difference:
        raise Violation(f"the replay differs: {difference}")
    return one.job.state.name


if __name__ == "__main__":
    sys.exit(main("tests.fuzz.core", walk))
