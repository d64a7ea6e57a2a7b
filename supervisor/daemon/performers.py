"""Effects into deeds: each order becomes calls to Ray, Redis or the disk, and ends in one event.

Performers decide nothing. What fails becomes an event with its text; what should never happen is
handed to `on_bug` and ends the daemon.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import structlog

from supervisor.cluster.slots import (
    Cluster,
    ClusterError,
    Exit,
    PlacementTimedOut,
    Slot,
    SlotsSetAside,
    Snapshot,
    StartFailed,
)
from supervisor.daemon.roster import Roster
from supervisor.daemon.timers import Timers
from supervisor.disk.restore_points import RestorePoint
from supervisor.errors import EverstepError
from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Job
from supervisor.fsm.states import State
from supervisor.health.store import HeartbeatMonitor, HeartbeatStore, RankView, StoreUnavailable
from trainer.wire.heartbeat import beat_key

log = structlog.get_logger(__name__)

CAPACITY_POLL_S = 1.0
EVIDENCE_LIMIT_S = 4.0
# What nothing waits for: its success is an action record, its failure an event.
HOUSEKEEPING = (x.PruneCheckpoints, x.RecordIncident, x.NotifyOperator, x.SetDeadline)
_WATCHED = (State.INITIALIZING, State.RUNNING, State.RESTORING)
# What an order to end a generation calls off.
_CALLED_OFF = (
    x.PlaceSlots,
    x.StartWorkers,  # and RestoreWorkers and PromoteStandby
    x.PrepareStandby,
    x.SaveWorkers,
    x.SelectRestorePoint,
    x.KeepSnapshot,
)


def _some(generation: int | None) -> tuple[int, ...]:
    return () if generation is None else (generation,)


def start_of(effect: x.StartWorkers | x.PrepareStandby) -> dict[str, Any]:
    """What a worker is told of where to start, and of what to leave out; a standby not yet."""
    if isinstance(effect, x.PrepareStandby):
        return {"restore_point": None, "skips": ()}
    point = {
        "kind": effect.kind,
        "path": effect.path,
        "step": effect.step,
        "generation": effect.saved_by,
    }
    return {"restore_point": None if effect.kind == "seed" else point, "skips": effect.skips}


def _key(kind: str, point: RestorePoint | Snapshot) -> tuple[str, int, int]:
    return kind, point.generation, point.step


class Disk(Protocol):
    """The files of a run; two of them: real, and the one of the tests."""

    async def restore_points(self, accepted: Sequence[int]) -> list[RestorePoint]:
        """What can be restored of the accepted generations, the newest first."""
        ...

    async def flaw(self, generation: int, step: int) -> str:
        """Why a checkpoint is no restore point. Raises OSError."""
        ...

    async def keep_snapshot(self, generation: int, step: int) -> str:
        """Write a snapshot of this machine to the disk as a checkpoint, verified; its path.

        Raises OSError, DiskError.
        """
        ...

    async def quarantine(self, path: str, why: str) -> None:
        """Move a checkpoint to where nothing picks it again. Raises OSError, DiskError."""
        ...

    async def quarantine_above(self, step: int, why: str) -> None:
        """The same for all above a step, finished or not. Raises OSError, DiskError."""
        ...

    async def prune(
        self,
        keep: int,
        verified: Sequence[tuple[int, int]],
        spared: Sequence[tuple[int, int]],
    ) -> None:
        """Delete all but `keep` verified (generation, step) and the spared ones.

        Raises OSError, DiskError.
        """
        ...

    async def write_evidence(
        self, incident: int, generation: int, evidence: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Write what the slots found. Raises OSError, DiskError."""
        ...

    async def write_summary(self, incident: int, summary: Mapping[str, Any]) -> None:
        """Write the incident's summary. Raises OSError, DiskError."""
        ...

    async def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json. Raises OSError, DiskError."""
        ...


class Performers:
    """Carries out effects as tasks, one an effect, and tells their outcomes.

    `on_outcome` gets the events, `on_action` a record for the journal each time a task ends,
    `on_bug` an exception that nobody foresaw; `on_change` is called when one has ended, and
    `on_connected` each time the cluster is reached. `spec_of(effect, rank)` makes what a worker is
    told, `faults_of(rank)` what drills of it are to come. `fence` raises Superseded once a newer
    daemon has the job: then nothing is begun.
    """

    def __init__(
        self,
        *,
        workers: int,
        drain_s: float,
        placement_timeout_s: float,
        capacity_wait_s: float,
        job: str,
        cluster: Cluster,
        store: HeartbeatStore | None = None,
        monitor: HeartbeatMonitor,
        disk: Disk,
        timers: Timers,
        clock: Callable[[], float],
        spec_of: Callable[[x.StartWorkers | x.PrepareStandby, int], dict[str, Any]],
        faults_of: Callable[[int], list[dict[str, Any]]] = lambda rank: [],
        result_of: Callable[[x.WriteResult], Awaitable[dict[str, Any]]],
        on_outcome: Callable[[e.Event], None],
        on_action: Callable[[dict[str, Any]], None],
        on_bug: Callable[[BaseException], None],
        on_change: Callable[[], None],
        on_connected: Callable[[], None] = lambda: None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers, self.drain_s, self.job = workers, drain_s, job
        self.placement_timeout_s, self.capacity_wait_s = placement_timeout_s, capacity_wait_s
        self.cluster, self.store, self.monitor, self.disk = cluster, store, monitor, disk
        self.timers, self.clock = timers, clock
        self.spec_of, self.faults_of, self.result_of = spec_of, faults_of, result_of
        self.on_outcome, self.on_action, self.on_bug = on_outcome, on_action, on_bug
        self.on_change, self.on_connected = on_change, on_connected
        self.fence = fence
        self.save_s = 0.0  # the longest that a checkpoint took
        self.rosters: dict[int, Roster] = {}
        self.pids: dict[int, dict[int, int]] = {}
        self._tasks: dict[asyncio.Task[None], x.Effect] = {}
        self._reached = False

    async def reach_cluster(self) -> None:
        """Connect, once, and end what an earlier daemon left there. Raises ClusterError."""
        if not self._reached:
            await self.connect()
            await self.sweep()

    async def connect(self) -> None:
        """Connect, and leave what is there alone. Raises ClusterError."""
        await self.cluster.connect()
        self.on_connected()
        self._reached = True

    async def sweep(self) -> None:
        """End what an earlier daemon left, proven. Raises ClusterError."""
        for leftover in await self.cluster.sweep():
            log.warning("leftover_swept", what=leftover)

    def inherit(self, job: Job) -> None:
        """Listen to the generations that an earlier daemon started, before they are adopted."""
        for generation in (job.active, *_some(job.standby), *job.leaving):
            roster = Roster(
                generation=generation,
                world_size=self.workers,
                restoring=job.state is not State.INITIALIZING,
                standby=generation == job.standby,
            )
            roster.ending = generation in job.leaving
            self.rosters[generation] = roster

    def watch_over(self, job: Job, children: Mapping[int, Mapping[int, int]]) -> None:
        """Arm the monitor for the adopted: (generation → rank → pid); leases start afresh."""
        now = asyncio.get_running_loop().time()
        self.pids = {generation: dict(pids) for generation, pids in children.items()}
        watched = (job.active,) if job.state in _WATCHED else ()
        for generation in (*watched, *_some(job.standby)):
            if generation in children:
                self.monitor.arm(generation, range(self.workers), now)

    def forget_cluster(self) -> None:
        """The cluster is lost: the next placement connects anew."""
        self._reached = False

    def note_save(self, seconds: float) -> None:
        """Remember how long a checkpoint took: the last one of a drain may take as long."""
        if self.save_s <= self.drain_s < seconds:
            log.warning("save_exceeds_drain", save_s=seconds, drain_s=self.drain_s)
        self.save_s = max(self.save_s, seconds)
        self.monitor.learn_save(seconds)

    def launch(self, effect: x.Effect) -> None:
        """Begin an effect; returns at once."""
        task = asyncio.create_task(self._run(effect), name=type(effect).__name__)
        self._tasks[task] = effect
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self.on_change()

    def views(self, generation: int) -> tuple[RankView, ...]:
        """What the monitor knows of the ranks of a generation."""
        return self.monitor.view(generation, asyncio.get_running_loop().time())

    @property
    def busy(self) -> bool:
        """Whether any effect is still being carried out."""
        return bool(self._tasks)

    async def call_off(
        self, kinds: tuple[type[x.Effect], ...] = (x.Effect,), generation: int | None = None
    ) -> None:
        """Cancel what is under way (for one generation) and wait until it has let go."""
        me = asyncio.current_task()
        tasks = [
            task
            for task, doing in self._tasks.items()
            if isinstance(doing, kinds)
            and task is not me
            and generation in (None, getattr(doing, "generation", None))
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, effect: x.Effect) -> None:
        began = asyncio.get_running_loop().time()
        action: dict[str, Any] = {"action": type(effect).__name__, "outcome": "finished"}
        if generation := getattr(effect, "generation", None):
            action["generation"] = generation
        outcome: e.Event | None = None
        try:
            self.fence()
            outcome = await self._perform(effect)
        except asyncio.CancelledError:
            action["outcome"] = "called_off"
        except (OSError, EverstepError, ClusterError, StoreUnavailable) as error:
            text = str(error) or repr(error)
            action |= {"outcome": "failed", "error": text}
            # At the end of a run no event of it is heard any more: a person has to be told here.
            log.error("action_failed", action=action["action"], why=text)
            outcome = self._failure_of(effect, text)
        except Exception as error:
            self.on_bug(error)
            return
        if not isinstance(effect, x.SetDeadline):
            took_s = asyncio.get_running_loop().time() - began
            self.on_action({**action, "at": self.clock(), "duration_s": round(took_s, 4)})
        if outcome is not None:
            self.on_outcome(outcome)

    def _failure_of(self, effect: x.Effect, error: str) -> e.Event:
        """What ends an effect that failed: the event of its own that the core waits for, if any."""
        at = self.clock()
        match effect:
            case x.SelectRestorePoint(generation=generation):
                return e.RestorePointsUnreadable(at=at, generation=generation, error=error)
            case x.PlaceSlots(generation=generation):
                return e.PlacementFailed(at=at, generation=generation, error=error)
            case x.PreloadStandby():
                return e.HousekeepingFailed(at=at, action="PreloadStandby", error=error)
            case x.StartWorkers(generation=generation):  # and RestoreWorkers and PromoteStandby
                ranks = tuple(range(self.workers))
                return e.InitializationFailed(
                    at=at, generation=generation, ranks=ranks, error=error
                )
            case x.PrepareStandby(generation=generation):
                return e.StandbyLost(at=at, generation=generation, ranks=(), why=error)
            case x.SaveWorkers(generation=generation):
                return e.LastSaveFailed(at=at, generation=generation, error=error)
            case x.CollectEvidence(generation=generation):
                ranks = tuple(range(self.workers))
                return e.EvidenceCollected(at=at, generation=generation, missing=ranks)
            case x.KeepSnapshot(generation=generation):
                return e.SnapshotNotKept(at=at, generation=generation, error=error)
            case x.KillWorkers(generation=generation):
                return e.ExitUnproven(at=at, generation=generation, unproven=(error,), exits=())
        return e.HousekeepingFailed(at=at, action=type(effect).__name__, error=error)

    async def _perform(self, effect: x.Effect) -> e.Event | None:
        match effect:
            case x.SelectRestorePoint():
                return await self._select_restore_point(effect)
            case x.QuarantineRestorePoint():
                if effect.kind == "snapshot":
                    await self.cluster.discard_snapshot(effect.saved_by, effect.step)
                else:
                    await self.disk.quarantine(effect.path, effect.why)
                return e.RestorePointQuarantined(at=self.clock(), path=effect.path)
            case x.KeepSnapshot():
                return await self._keep_snapshot(effect)
            case x.PlaceSlots():
                return await self._place_slots(effect)
            case x.PreloadStandby():
                await self._preload_standby(effect)
            case x.PromoteStandby():
                return await self._promote_standby(effect)
            case x.StartWorkers():  # and RestoreWorkers
                return await self._start_workers(effect)
            case x.PrepareStandby():
                return await self._prepare_standby(effect)
            case x.PrepareSpares():
                await self.cluster.prepare_spares()
            case x.SaveWorkers():
                return await self._save_workers(effect)
            case x.CollectEvidence():
                return await self._collect_evidence(effect)
            case x.KillWorkers():
                return await self._kill_workers(effect)
            case x.RecordIncident():
                await self.disk.write_summary(effect.incident, effect.summary)
            case x.PruneCheckpoints():
                await self.disk.prune(effect.keep, effect.verified, effect.spared)
            case x.SetDeadline():
                self.timers.set(effect)
            case x.NotifyOperator():
                log.warning("notice", message=effect.message)
            case x.ReleaseSlots():
                await self.call_off(_CALLED_OFF)
                try:
                    await self.cluster.release()
                finally:
                    for generation in tuple(self.rosters):  # one that stood by ends with its slots
                        self._forget(generation)
            case x.WriteResult():
                await self.disk.write_result(await self.result_of(effect))
            case _:
                raise TypeError(f"no performer for {effect}")
        return None

    async def _select_restore_point(self, effect: x.SelectRestorePoint) -> e.Event:
        common: dict[str, Any] = {"generation": effect.generation}
        accepted = range(1, effect.generation)
        looks = self.disk.restore_points(accepted), self.cluster.snapshots()
        points, snapshots = await asyncio.gather(*looks, return_exceptions=True)
        if isinstance(points, OSError):
            return e.RestorePointsUnreadable(at=self.clock(), **common, error=str(points))
        if isinstance(points, BaseException):
            raise points
        if isinstance(snapshots, ClusterError):
            log.warning("snapshots_unknown", why=str(snapshots))
            snapshots = []
        if isinstance(snapshots, BaseException):
            raise snapshots
        await self._report_skipped(effect, points)
        rejected = set(effect.rejected)
        snapshots = [one for one in snapshots if _key("snapshot", one) not in rejected]
        points = [point for point in points if _key(point.kind, point) not in rejected]
        if effect.step_max >= 0:
            points, snapshots = await self._roll_back(effect, points, snapshots)
        common["at"] = self.clock()
        newest = max(
            (point for point in snapshots if point.generation in accepted),
            key=lambda point: (point.step, point.generation),
            default=None,
        )
        if newest is not None and (not points or newest.step >= points[0].step):
            return e.RestorePointSelected(
                **common,
                kind="snapshot",
                step=newest.step,
                path=newest.path,
                saved_by=newest.generation,
            )
        if points:
            return e.RestorePointSelected(
                **common,
                kind=points[0].kind,
                step=points[0].step,
                path=str(points[0].path),
                saved_by=points[0].generation,
            )
        if effect.seed_allowed:
            return e.RestorePointSelected(**common, kind="seed", step=0, path="", saved_by=0)
        why = "the journal records a committed checkpoint, and none that can be loaded is left"
        if effect.step_max >= 0:
            why += f" of step {effect.step_max} or before, to which the job has to go back"
        return e.RestorePointsExhausted(**common, why=why)

    async def _keep_snapshot(self, effect: x.KeepSnapshot) -> e.Event:
        began = asyncio.get_running_loop().time()
        common: dict[str, Any] = {"generation": effect.generation}
        rejected = set(effect.rejected)
        newest = max(
            (
                point
                for point in await self.cluster.snapshots()
                if effect.above < point.step
                and point.generation <= effect.generation
                and _key("snapshot", point) not in rejected
            ),
            key=lambda point: (point.step, point.generation),
            default=None,
        )
        if newest is None:
            return e.SnapshotNotKept(at=self.clock(), **common, error="")
        try:
            async with asyncio.timeout(self.drain_s):
                path = await self.disk.keep_snapshot(newest.generation, newest.step)
        except TimeoutError:
            error = f"step {newest.step} was not written within drain_s = {self.drain_s:g} s"
            return e.SnapshotNotKept(at=self.clock(), **common, error=error)
        took_s = round(asyncio.get_running_loop().time() - began, 3)
        return e.SnapshotKept(
            at=self.clock(),
            **common,
            saved_by=newest.generation,
            step=newest.step,
            path=path,
            duration_s=took_s,
        )

    async def _report_skipped(
        self, effect: x.SelectRestorePoint, points: Sequence[RestorePoint]
    ) -> None:
        """Each checkpoint that was committed and is no restore point any more is an event."""
        usable = {(point.generation, point.step) for point in points}
        for saved_by, step in effect.committed:
            if (saved_by, step) in usable:
                continue
            if why := await self.disk.flaw(saved_by, step):
                common: dict[str, Any] = {"at": self.clock(), "generation": effect.generation}
                skipped = e.CheckpointSkipped(**common, saved_by=saved_by, step=step, why=why)
                self.on_outcome(skipped)

    async def _roll_back(
        self,
        effect: x.SelectRestorePoint,
        points: list[RestorePoint],
        snapshots: list[Snapshot],
    ) -> tuple[list[RestorePoint], list[Snapshot]]:
        """What is left to choose from; all above the target is set aside, for good.

        Raises OSError, DiskError or ClusterError while that is not done, so that it is tried again.
        """
        points = [point for point in points if point.step <= effect.step_max]
        newest = -1 if effect.checkpoints_only else effect.step_max
        kept = [snapshot for snapshot in snapshots if snapshot.step <= newest]
        steps = [*(point.step for point in points), *(snapshot.step for snapshot in kept)]
        if not steps and not effect.seed_allowed:
            return [], []  # what lies above is all that is left: it stays where it is
        target = max(steps, default=0)
        await self.disk.quarantine_above(target, f"rolled back to step {target}")
        await self.cluster.discard_snapshots_above(newest)
        return points, kept

    async def _place_where_it_fits(
        self, effect: x.PlaceSlots
    ) -> tuple[Slot, ...] | e.CapacityMissing:
        """Each try that fails by what is left on a node takes that node out of the count."""
        is_told = False
        while True:
            while why := await self.cluster.shortage():
                missing = e.CapacityMissing(at=self.clock(), generation=effect.generation, why=why)
                if self.capacity_wait_s <= 0:
                    return missing
                if not is_told:
                    self.on_outcome(missing)
                    is_told = True
                await asyncio.sleep(CAPACITY_POLL_S)
            if is_told:
                self.on_outcome(e.CapacityFound(at=self.clock(), generation=effect.generation))
                is_told = False
            try:
                return await self.cluster.place(effect.placement, self.placement_timeout_s)
            except SlotsSetAside as error:
                log.warning("node_set_aside", why=str(error))

    async def _place_slots(self, effect: x.PlaceSlots) -> e.Event | None:
        generation = effect.generation
        began = self.clock()
        try:
            await self.reach_cluster()
            slots = await self._place_where_it_fits(effect)
            if isinstance(slots, e.CapacityMissing):
                return slots
        except PlacementTimedOut as error:
            waited_s = round(self.clock() - began, 1)
            return e.PlacementTimedOut(
                at=self.clock(), generation=generation, waited_s=waited_s, why=str(error)
            )
        except (ClusterError, EverstepError, OSError) as error:
            return e.PlacementFailed(at=self.clock(), generation=generation, error=str(error))
        await self._report_proofs()  # slots may be where nobody could look before
        named = {slot.node_id: (slot.node_id, slot.host, slot.address) for slot in slots}
        return e.SlotsPlaced(
            at=self.clock(),
            generation=generation,
            placement=effect.placement,
            slots=tuple((slot.rank, slot.node_id, slot.pid) for slot in slots),
            hosts=tuple(named.values()),
        )

    async def _start_workers(self, effect: x.StartWorkers) -> e.Event:
        generation = effect.generation
        self._roster(generation).restoring = isinstance(effect, x.RestoreWorkers)
        try:
            pids = await self._start(effect)
        except StartFailed as error:
            return e.InitializationFailed(
                at=self.clock(), generation=generation, ranks=error.ranks, error=str(error)
            )
        except (ClusterError, OSError) as error:
            ranks = tuple(range(self.workers))
            return e.InitializationFailed(
                at=self.clock(), generation=generation, ranks=ranks, error=str(error)
            )
        return e.WorkersStarted(
            at=self.clock(), generation=generation, pids=tuple(sorted(pids.items()))
        )

    async def _prepare_standby(self, effect: x.PrepareStandby) -> e.Event | None:
        """Its start ends in `standby_ready` or `standby_lost`, which the slots tell."""
        generation = effect.generation
        self._roster(generation, standby=True)
        try:
            await self._start(effect)
        except (ClusterError, OSError) as error:
            ranks = error.ranks if isinstance(error, StartFailed) else ()
            return e.StandbyLost(
                at=self.clock(), generation=generation, ranks=ranks, why=str(error)
            )
        return None

    def _roster(self, generation: int, *, standby: bool = False) -> Roster:
        """The generation's roster. One that exists stays, with all that was said and promoted."""
        if generation not in self.rosters:
            self.rosters[generation] = Roster(
                generation=generation, world_size=self.workers, restoring=True, standby=standby
            )
        return self.rosters[generation]

    async def _start(self, effect: x.StartWorkers | x.PrepareStandby) -> dict[int, int]:
        specs = [self.spec_of(effect, rank) for rank in range(self.workers)]
        pids = await self.cluster.start(effect.generation, specs)
        self.pids[effect.generation] = dict(pids)
        now = asyncio.get_running_loop().time()
        self.monitor.arm(effect.generation, range(self.workers), now)
        return pids

    async def _preload_standby(self, effect: x.PreloadStandby) -> None:
        """A help, not a duty: who cannot load ahead loads when it is promoted."""
        order = {"order": "preload", **start_of(effect)}
        ranks = range(self.workers)
        orders = (self.cluster.order(effect.generation, rank, order) for rank in ranks)
        for outcome in await asyncio.gather(*orders, return_exceptions=True):
            if isinstance(outcome, ClusterError):
                log.info("not_preloaded", generation=effect.generation, why=str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _promote_standby(self, effect: x.PromoteStandby) -> e.Event | None:
        """Ends in `workers_restored`, or in what the workers say instead."""
        generation = effect.generation
        roster = self.rosters[generation]
        roster.promote()
        starting = [
            task
            for task, doing in self._tasks.items()
            if isinstance(doing, x.PrepareStandby) and doing.generation == generation
        ]
        if starting:
            await asyncio.wait(starting)
        self.monitor.promote(generation, range(self.workers), asyncio.get_running_loop().time())
        order = {"order": "promote", **start_of(effect)}
        # Drills may have struck, or been ordered, since it was started.
        try:
            await asyncio.gather(
                *(
                    self.cluster.order(generation, rank, {**order, "faults": self.faults_of(rank)})
                    for rank in range(self.workers)
                )
            )
        except ClusterError as error:
            ranks = tuple(range(self.workers))
            return e.InitializationFailed(
                at=self.clock(), generation=generation, ranks=ranks, error=str(error)
            )
        return None

    async def save_stray(self, generation: int) -> e.Event:
        """Have adopted workers of another run of the machine save and stop, if they still can."""
        self.rosters[generation] = Roster(
            generation=generation, world_size=self.workers, restoring=True
        )
        try:
            return await self._save_workers(x.SaveWorkers(generation=generation))
        finally:
            del self.rosters[generation]

    async def _save_workers(self, effect: x.SaveWorkers) -> e.Event:
        """Agree on a last step: rank 0 names it and waits until all the others know."""
        generation = effect.generation
        roster = self.rosters[generation]
        others = range(1, self.workers)
        self.monitor.promise_save(generation, self.drain_s)
        try:
            async with asyncio.timeout(self.drain_s):
                await self.cluster.order(generation, 0, {"order": "stop"})
                await roster.until(
                    lambda r: bool(r.said.get("stopping")) or bool(r.said.get("saved"))
                )
                if 0 in roster.said.get("stopping", {}):
                    step = int(roster.said["stopping"][0]["after_step"])
                    order = {"order": "stop_after", "step": step}
                    await asyncio.gather(
                        *(self.cluster.order(generation, rank, order) for rank in others)
                    )
                    await roster.until(lambda r: len(r.said.get("acknowledged", {})) >= len(others))
                    await self.cluster.order(generation, 0, {"order": "go"})
                else:  # It had finished before it was asked.
                    step = int(roster.said["saved"][0]["step"])
                await roster.until(lambda r: 0 in r.said.get("saved", {}))
        except TimeoutError:
            error = f"the workers did not save within {self.drain_s:g} s"
            return e.LastSaveFailed(at=self.clock(), generation=generation, error=error)
        except ClusterError as error:
            return e.LastSaveFailed(at=self.clock(), generation=generation, error=str(error))
        step = int(roster.said["saved"][0]["step"])
        return e.WorkersSaved(at=self.clock(), generation=generation, step=step)

    async def _collect_evidence(self, effect: x.CollectEvidence) -> e.Event:
        """Never raises: a drain does not wait for what cannot be learned."""
        generation = effect.generation
        found: Mapping[int, Mapping[str, Any]] = {}
        try:
            async with asyncio.timeout(EVIDENCE_LIMIT_S):
                found = await self.cluster.evidence(generation)
                await self.disk.write_evidence(effect.incident, generation, found)
        except (TimeoutError, OSError, ClusterError, EverstepError) as error:
            log.warning("evidence_incomplete", generation=generation, why=str(error))
        missing = tuple(rank for rank in range(self.workers) if rank not in found)
        return e.EvidenceCollected(at=self.clock(), generation=generation, missing=missing)

    async def _kill_workers(self, effect: x.KillWorkers) -> e.Event:
        generation = effect.generation
        self.monitor.disarm(generation)
        if roster := self.rosters.get(generation):
            roster.ending = True
        await self.call_off(_CALLED_OFF, generation)
        unproven: tuple[str, ...] = ()
        exits: tuple[tuple[int, int | None, str | None], ...] = ()
        if roster is not None:
            try:
                (ended, unproven), _ = await asyncio.gather(
                    self.cluster.kill(generation, self.drain_s, last_words=effect.incident > 0),
                    self._report_proofs(),
                )
                if effect.incident:
                    self._spawn(self._write_last_words(effect, ended))
                exits = tuple((one.rank, one.status, one.signal) for one in ended)
            except ClusterError as error:
                unproven = (f"generation {generation}: {error}",)
            self._forget(generation)
        if unproven:
            return e.ExitUnproven(
                at=self.clock(), generation=generation, unproven=unproven, exits=exits
            )
        return e.WorkersGone(at=self.clock(), generation=generation, exits=exits)

    async def _report_proofs(self) -> None:
        """Report what could not be proven gone before and is proven now."""
        if proven := await self.cluster.prove():
            self.on_outcome(e.ExitProven(at=self.clock(), proven=proven))

    async def _write_last_words(self, effect: x.KillWorkers, ended: Sequence[Exit]) -> None:
        """Nothing on the path of recovery waits for it."""
        found = {
            one.rank: {"stacks": one.stacks, "log_tail": one.log_tail, "signal": one.signal}
            for one in ended
        }
        try:
            await self.disk.write_evidence(effect.incident, effect.generation, found)
        except (OSError, EverstepError) as error:
            log.warning("evidence_not_written", incident=effect.incident, why=str(error))

    def _forget(self, generation: int) -> None:
        """The keys of a dead generation are rubbish; nothing on the path of recovery waits."""
        self.rosters.pop(generation, None)
        self.pids.pop(generation, None)
        keys = [beat_key(self.job, generation, rank) for rank in range(self.workers)]
        self._spawn(self._delete_beats(keys))

    async def _delete_beats(self, keys: Sequence[str]) -> None:
        assert self.store is not None
        try:
            await self.store.delete(keys)
        except StoreUnavailable:
            log.info("heartbeats_not_deleted", why="the store is away; they expire")

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks[task] = x.NotifyOperator(message="")
        task.add_done_callback(self._done)
