"""The facts the machine keeps, the questions it asks of them, and what it does about them.

Methods named as questions are guards: they return a bool and change nothing. Methods named as
orders are actions: they change facts and ask for effects. Nested values are replaced, never
mutated, so that a shallow copy of a job is a whole one.
"""

import zlib
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from .effects import (
    CollectEvidence,
    Effect,
    KeepSnapshot,
    KillWorkers,
    NotifyOperator,
    PlaceSlots,
    PreloadStandby,
    PrepareSpares,
    PrepareStandby,
    PromoteStandby,
    PruneCheckpoints,
    QuarantineRestorePoint,
    RecordIncident,
    ReleaseSlots,
    RestoreWorkers,
    SaveWorkers,
    SelectRestorePoint,
    SetDeadline,
    StartWorkers,
    WriteResult,
)
from .events import (
    BatchSkipped,
    CapacityFound,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    DeadlinePassed,
    DifferencesFound,
    Event,
    ExitProven,
    ExitUnproven,
    GenerationEvent,
    HousekeepingFailed,
    NodeLost,
    NumbersDiverged,
    RaisedEvent,
    ReplicasDiverged,
    RestorePointRejected,
    RestorePointSelected,
    RestorePointsUnreadable,
    RetryBudgetExhausted,
    RetryGranted,
    RetryRuledOut,
    SlotLost,
    SlotsPlaced,
    SnapshotFailed,
    SnapshotKept,
    SnapshotNotKept,
    StandbyDisabled,
    StandbyLost,
    StandbyReady,
    StandstillEnded,
    StopRequested,
    TrainingCompleted,
    WorkerCrashed,
    WorkerRaised,
    WorkersGone,
    tuples,
)
from .incident import (
    KILLED_FOR_MEMORY,
    REMEDY_FOR_MEMORY,
    UNSTARTED,
    Incident,
    incident_of,
    remedy_for,
    remedy_of,
    why_of,
)
from .states import State

# A stronger purpose of a drain replaces a weaker one, never the other way round.
PURPOSES = ("", "recover", "stop", "fail", "complete")

DIFFERENCES_KEPT = 20  # lines
SELECT_AGAIN_S = 5.0
REJECTIONS_MORE_MAX = 20  # than checkpoints are kept: snapshots, and what a crash left
SAVES_FAILED_MAX = 3  # in a row, if none has ever worked
REJECTED_KEPT = 64  # more restore points than there ever are at once
# Between starts of a standby that failed `standby_failures_max` times running: from, doubled, to.
STANDBY_PAUSE_MIN_S = 60.0
STANDBY_PAUSE_MAX_S = 3600.0

STANDSTILL_GRACE_S = 15.0  # JAX's own time-out between hosts, and a moment to tell of it

EXIT_STATUSES = {"COMPLETED": 0, "budget": 3, "pointless": 4, "operator": 5, "signal": 75}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The parameters of the machine. They stand in the journal's header; -1 means no limit."""

    failures_max: int = 10
    startup_failures_max: int = 3
    node_failures_max: int = 3
    preemptions_max: int = -1
    rollbacks_max: int = 3
    window_s: float = 3600.0
    no_progress_max: int = 10
    same_error_max: int = 3
    backoff_base_s: float = 1.0
    backoff_max_s: float = 60.0
    last_call_s: float = 1.0
    drain_s: float = 30.0
    capacity_wait_s: float = 0.0
    checkpoints_kept: int = 2
    standby: str = "none"
    standby_failures_max: int = 3
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Job:
    """All that decides. What is measured (steps, losses, beats) is not here."""

    limits: Limits = field(default_factory=Limits)
    state: State = State.PROVISIONING
    entry: int = 1
    generation: int = 0  # The last one issued; numbers only grow.
    active: int = 0
    standby: int | None = None
    standby_ready: bool = False
    standby_start_s: float = 0.0  # What the last one cost: seconds to start, MB of memory.
    standby_memory_mb: float = 0.0
    standby_failures: int = 0
    standby_off: bool = False  # Several failed in a row: it is tried again after long pauses.
    leaving: tuple[int, ...] = ()
    placement: int = 0
    slots_placed: bool = False
    quarantined: bool = False  # A process of a lost standby may live in the slots that are there.
    rung: str = ""  # How the active generation came to be: "standby" or "slots".
    ahead: str = ""  # A restore point for the standby, before it is needed: looking, or found.
    restore_kind: str = ""
    restore_step: int = 0
    restore_path: str = ""
    restore_saved_by: int = 0
    step_max: int = -1  # A rollback is under way, to this step or below.
    checkpoints_only: bool = False
    skip_through: int = -1  # The last batch that the rollback leaves out.
    skips: tuple[tuple[int, int], ...] = ()  # (from this step on, batches left out before it)
    committed_step: int = -1
    saves_failed: int = 0  # In a row, on a disk that is fine.
    rejections: int = 0  # Of restore points, since a step was finished.
    verified: tuple[tuple[int, int], ...] = ()  # (generation, step) of the newest checkpoints
    rejected: tuple[tuple[str, int, int], ...] = ()  # (kind, generation, step), found damaged
    stepped: bool = False  # Some generation finished a step: the user's code can work.
    purpose: str = ""
    stage: str = ""  # What the state waits for: every order that starts something sets it.
    stop_by: str = ""
    reason: str = ""
    remedy: str = ""  # What a person should do about a job that has FAILED.
    exit_status: int = -1
    result: dict[str, Any] = field(default_factory=dict)
    incident: Incident | None = None
    incidents: int = 0
    free: bool = False  # What ended the generation belongs to an incident already charged.
    spent: dict[str, tuple[float, ...]] = field(default_factory=dict)
    streak: int = 0
    no_progress: int = 0
    progress_mark: int = -1
    last_error: str = ""
    same_error: int = 0
    unsaved: bool = False  # The last save that a stop asked for failed.
    unproven: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()  # What was found not to be as it was, in this run.
    blind_since: float | None = None
    thawed_at: float | None = None  # when a standstill of everything ended,
    thawed_generation: int = 0  # and which generation was the last to be in it
    effects: list[Effect] = field(default_factory=list)
    raised: list[RaisedEvent] = field(default_factory=list)
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The job as JSON-ready data, without what lives only inside one move."""
        record = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("effects", "raised", "why", "limits", "incident", "state")
        }
        record["state"] = self.state.name
        record["limits"] = asdict(self.limits)
        record["incident"] = asdict(self.incident) if self.incident else None
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """The job of a record; raises KeyError, TypeError or ValueError on a foreign one."""
        given = {key: tuples(value) for key, value in record.items()}
        given["state"] = State[given["state"]]
        given["limits"] = Limits(**given["limits"])
        if given["incident"]:
            given["incident"] = Incident(**given["incident"])
        return cls(**given)

    # Guards

    def slots_intact(self, event: Event) -> bool:
        return self.slots_placed and not self.quarantined

    def slots_missing(self, event: Event) -> bool:
        return not self.slots_placed

    def is_news(self, event: CheckpointCommitted) -> bool:
        """To a daemon that came back, slots tell all that they know again."""
        return not any(
            generation == event.generation and step >= event.step
            for generation, step in self.verified
        )

    def wants_standby(self, event: Event) -> bool:
        """A lost one must have ended before: two beside the active generation are one too many."""
        missing = self.standby is None and not self.leaving and self.slots_intact(event)
        return missing and self.limits.standby == "generation"

    def standby_failed_often(self, event: Event) -> bool:
        return self.standby_failures >= self.limits.standby_failures_max

    def standby_is_due(self, event: DeadlinePassed) -> bool:
        return event.id == "standby" and self.wants_standby(event)

    def wants_spares(self, event: Event) -> bool:
        return self.limits.standby == "spares" and self.slots_intact(event)

    def is_standby(self, event: StandbyReady | StandbyLost) -> bool:
        return event.generation == self.standby

    def is_leaving(self, event: WorkersGone | ExitUnproven) -> bool:
        return event.generation in self.leaving

    def was_promoted(self, event: Event) -> bool:
        """The workers that are being restored are those of a standby: a rung, not the last."""
        return self.rung == "standby"

    def looks_ahead(self, event: GenerationEvent) -> bool:
        return event.generation == self.standby and self.ahead == "looking"

    def is_ahead(self, event: RetryGranted) -> bool:
        """The standby has its restore point already."""
        return self.ahead == "found" and self.standby is not None and event.backoff_s == 0

    def may_promote(self, event: Event) -> bool:
        return self.rung == "standby" and self.slots_intact(event)

    def is_selecting(self, event: GenerationEvent) -> bool:
        return self.stage == "selecting"

    def is_starting(self, event: GenerationEvent) -> bool:
        return self.stage == "starting"

    def restores_in_vain(self, event: RestorePointRejected) -> bool:
        """Each rejected one is set aside: more than are ever kept means that new ones appear."""
        may_end = self.state is State.INITIALIZING or self.stage == "starting"
        return may_end and self.rejections >= self.limits.checkpoints_kept + REJECTIONS_MORE_MAX

    def awaits_capacity(self, event: CapacityFound) -> bool:
        return self.stage == "capacity"

    def may_roll_back(self, event: NumbersDiverged) -> bool:
        return event.policy == "rollback"

    def waits_for_capacity(self, event: Event) -> bool:
        return self.limits.capacity_wait_s > 0

    def is_primary(self, event: WorkerCrashed | WorkerRaised) -> bool:
        return event.primary

    def wants_last_save(self, event: StopRequested) -> bool:
        return not event.now

    def names_culprit(self, event: Event) -> bool:
        return self.stage == "last_call" and bool(getattr(event, "primary", True))

    def is_saving(self, event: Event) -> bool:
        return self.stage == "saving"

    def collects_evidence(self, event: Event) -> bool:
        return self.stage == "evidence"

    def is_quarantining(self, event: Event) -> bool:
        return self.stage == "quarantine"

    def quarantine_failed(self, event: HousekeepingFailed) -> bool:
        return self.stage == "quarantine" and event.action == "QuarantineRestorePoint"

    def last_call_ended(self, event: DeadlinePassed) -> bool:
        return self.stage == "last_call" and event.id == "last_call"

    def last_save_overdue(self, event: DeadlinePassed) -> bool:
        return self.stage == "saving" and event.id == "drain"

    def pause_ended(self, event: DeadlinePassed) -> bool:
        return event.id in ("backoff", "select") and self.stage in ("backoff", "unreadable")

    def capacity_overdue(self, event: DeadlinePassed) -> bool:
        return event.id == "capacity" and self.stage == "capacity"

    def stop_hurries(self, event: StopRequested) -> bool:
        return event.now and self.purpose in ("recover", "stop") and self.stage != "killing"

    def stop_prevails(self, event: StopRequested) -> bool:
        return self.purpose == "recover"

    def holds_newer_state(self, event: Event) -> bool:
        """What went wrong with the numbers themselves must not be where the next run starts."""
        numbers = self.incident is not None and self.incident.cause == "numbers"
        return self.stepped and self.step_max < 0 and not numbers

    def lost_last_save(self, event: Event) -> bool:
        return self.unsaved

    def is_keeping(self, event: Event) -> bool:
        return self.stage == "keeping"

    def hurries(self, event: StopRequested) -> bool:
        return event.now

    def drains_to_complete(self, event: Event) -> bool:
        return self.purpose == "complete"

    def drains_to_fail(self, event: Event) -> bool:
        return self.purpose == "fail"

    def drains_to_stop(self, event: Event) -> bool:
        return self.purpose == "stop"

    # Actions of starting and restoring

    def begin_entry(self, event: Event) -> None:
        """Every change of state ends the deadlines of the state that was left."""
        self.entry += 1

    def look_ahead(self, event: Event) -> None:
        """While the processes end, the standby may load what it will need."""
        if self.standby is not None:
            self.ahead = "looking"
            self.effects.append(
                SelectRestorePoint(
                    generation=self.standby,
                    seed_allowed=self.committed_step < 0,
                    rejected=self.rejected,
                    committed=self.verified,
                )
            )

    def preload_standby(self, event: RestorePointSelected) -> None:
        assert self.standby is not None
        self.ahead = "found"
        self.effects.append(PreloadStandby(**self._start(self.standby)))

    def forget_ahead(self, event: Event) -> None:
        self.ahead = ""

    def issue_generation(self, event: Event) -> None:
        self.generation += 1
        self.active = self.generation
        self.rung = "slots"

    def advance_generation(self, event: Event) -> None:
        """The generation that stands by, ready or half-built, is the next one."""
        if self.standby is None:
            self.issue_generation(event)
            return
        self.active, self.standby, self.standby_ready = self.standby, None, False
        self.rung = "standby"

    def take_what_is_ahead(self, event: Event) -> None:
        """The restore point was found while the processes ended."""
        self.ahead = ""
        self._count_progress()

    def select_restore_point(self, event: Event) -> None:
        self.stage = "selecting"
        self.effects.append(
            SelectRestorePoint(
                generation=self.active,
                seed_allowed=self.committed_step < 0,
                step_max=self.step_max,
                checkpoints_only=self.checkpoints_only,
                rejected=self.rejected,
                committed=self.verified,
            )
        )

    def select_again_later(self, event: RestorePointsUnreadable) -> None:
        self.stage = "unreadable"
        self._set_deadline("select", SELECT_AGAIN_S)
        self.effects.append(NotifyOperator(message=f"no restore point yet: {event.error}"))

    def note_skipped_checkpoint(self, event: CheckpointSkipped) -> None:
        skipped = (event.saved_by, event.step)
        self.verified = tuple(each for each in self.verified if each != skipped)
        message = f"the checkpoint of step {event.step} cannot be used: {event.why}"
        self.effects.append(NotifyOperator(message=message))

    def accept_restore_point(self, event: RestorePointSelected) -> None:
        self.note_restore_point(event)
        self._count_progress()

    def note_restore_point(self, event: RestorePointSelected) -> None:
        self.restore_kind, self.restore_step = event.kind, event.step
        self.restore_path, self.restore_saved_by = event.path, event.saved_by
        if event.kind == "checkpoint":
            self.committed_step = event.step
        self.saves_failed = 0
        if self.step_max >= 0:
            self._go_back(event.step)

    def _count_progress(self) -> None:
        """Once per generation, when its restore point is final."""
        if self.restore_step > self.progress_mark:
            self.progress_mark, self.no_progress, self.streak = self.restore_step, 0, 0
        else:
            self.no_progress += 1

    def _go_back(self, step: int) -> None:
        """What lies above is set aside, and the batches that led astray are left out."""
        self.committed_step = min(self.committed_step, step)
        self.verified = tuple(each for each in self.verified if each[1] <= step)
        if self.skip_through >= step:
            before = tuple(skip for skip in self.skips if skip[0] < step)
            self.skips = (*before, (step, self.skip_through + 1 - step))

    def place_slots(self, event: Event) -> None:
        self.stage = "placing"
        self.slots_placed = self.quarantined = False
        self.placement += 1
        self.effects.append(PlaceSlots(generation=self.active, placement=self.placement))

    def accept_slots(self, event: SlotsPlaced) -> None:
        self.slots_placed = True

    def start_workers(self, event: Event) -> None:
        self.stage = "starting"
        self.effects.append(StartWorkers(**self._start(self.active)))

    def restore_workers(self, event: Event) -> None:
        self.stage = "starting"
        self.effects.append(RestoreWorkers(**self._start(self.active)))

    def promote_standby(self, event: Event) -> None:
        self.stage = "starting"
        self.effects.append(PromoteStandby(**self._start(self.active)))

    def prepare_standby(self, event: Event) -> None:
        self.generation += 1
        self.standby, self.standby_ready = self.generation, False
        self.effects.append(PrepareStandby(generation=self.standby))

    def prepare_spares(self, event: Event) -> None:
        self.effects.append(PrepareSpares())

    def note_standby(self, event: StandbyReady) -> None:
        self.standby_ready, self.standby_failures, self.standby_off = True, 0, False
        self.standby_start_s, self.standby_memory_mb = event.start_s, event.memory_mb

    def lose_standby(self, event: StandbyLost) -> None:
        """Never the job's budget: it is prepared again when it is gone and the pause is over."""
        self._discard_standby()
        if self._is_cut_off(event.generation, event.at):
            return
        self.standby_failures += 1
        if self.standby_failures == self.limits.standby_failures_max:
            self.standby_off = True
            self.raised.append(
                StandbyDisabled(at=event.at, generation=self.active, failures=self.standby_failures)
            )

    def report_standby_disabled(self, event: StandbyDisabled) -> None:
        message = (
            f"{event.failures} standbys in a row failed: recoveries are slower; it is tried again "
            f"after {STANDBY_PAUSE_MIN_S:g} s, then at growing intervals"
        )
        self.effects.append(NotifyOperator(message=message))

    def note_departure(self, event: WorkersGone | ExitUnproven) -> None:
        self.leaving = tuple(each for each in self.leaving if each != event.generation)
        if self.state is State.RUNNING and self.wants_standby(event):
            self.pause_standby(event)

    def pause_standby(self, event: Event) -> None:
        """The pause doubles with each failure; several in a row make it a long one."""
        often = self.standby_failures - self.limits.standby_failures_max
        if often >= 0:
            pause_s = min(STANDBY_PAUSE_MIN_S * 2.0 ** min(often, 30), STANDBY_PAUSE_MAX_S)
        else:
            doubled_s = self.limits.backoff_base_s * 2.0 ** max(0, self.standby_failures - 1)
            pause_s = min(doubled_s, self.limits.backoff_max_s)
        self._set_deadline("standby", pause_s)

    def quarantine_slots_later(self, event: ExitUnproven) -> None:
        """The active generation trains in these slots: they are placed anew when it has ended."""
        self.quarantined = self.slots_placed
        self._note_unproven(event)

    def _discard_standby(self) -> None:
        if self.standby is not None:
            self.leaving = (*self.leaving, self.standby)
            self.effects.append(KillWorkers(generation=self.standby, incident=0))
            self.standby, self.standby_ready, self.ahead = None, False, ""

    def _start(self, generation: int) -> dict[str, Any]:
        return {
            "generation": generation,
            "kind": self.restore_kind,
            "step": self.restore_step,
            "path": self.restore_path,
            "saved_by": self.restore_saved_by,
            "skips": self.skips,
        }

    def wait_for_capacity(self, event: Event) -> None:
        self.stage = "capacity"
        self.reason = why_of(event)
        self._set_deadline("capacity", self.limits.capacity_wait_s)
        self.effects.append(NotifyOperator(message=f"waiting for capacity: {why_of(event)}"))

    def end_capacity_wait(self, event: Event) -> None:
        """From here on the limit of the placement counts."""
        self.stage = "placing"

    # Actions of running

    def close_incident(self, event: Event) -> None:
        self.purpose = self.stage = ""
        self.step_max = self.skip_through = -1
        self.checkpoints_only = False

    def note_first_step(self, event: Event) -> None:
        self.stepped = True
        self.rejections = 0

    def note_checkpoint(self, event: CheckpointCommitted) -> None:
        self.committed_step = event.step
        if event.step > self.progress_mark:
            self.streak = self.no_progress = 0
        keep, saved = self.limits.checkpoints_kept, (event.generation, event.step)
        known = (*(each for each in self.verified if each != saved), saved)
        newest = known[-keep:]
        spared = self._last_agreed(known[:-keep], newest, event.agreed_step)
        self.verified = (*spared, *newest)
        self.effects.append(PruneCheckpoints(keep=keep, verified=newest, spared=spared))

    @staticmethod
    def _last_agreed(
        older: tuple[tuple[int, int], ...], newest: tuple[tuple[int, int], ...], agreed_step: int
    ) -> tuple[tuple[int, int], ...]:
        """Kept beyond the newest: the job goes back to it if replicas turn out to differ."""
        if any(step <= agreed_step for _, step in newest):
            return ()
        agreed = [each for each in older if each[1] <= agreed_step]
        return (max(agreed, key=lambda each: each[1]),) if agreed else ()

    def can_never_save(self, event: CheckpointFailed) -> bool:
        """A disk without room may get some; whatever else fails each time fails at the end too."""
        failed = self.saves_failed + event.disk_is_fine
        return self.committed_step < 0 and failed >= SAVES_FAILED_MAX

    def report_failed_checkpoint(self, event: CheckpointFailed) -> None:
        self.saves_failed += event.disk_is_fine
        text = f"the checkpoint of step {event.step} failed: {event.error}"
        if self.committed_step < 0:
            text = f"NOTHING IS SAVED so far: {text}"
        self.effects.append(NotifyOperator(message=text))

    def report_failed_snapshot(self, event: SnapshotFailed) -> None:
        self.effects.append(NotifyOperator(message=f"no snapshots for now: {event.error}"))

    def report_skipped_batch(self, event: BatchSkipped) -> None:
        message = f"step {event.step} was not applied: {event.metric} was {event.value}"
        self.effects.append(NotifyOperator(message=message))

    def report_housekeeping(self, event: HousekeepingFailed) -> None:
        self.effects.append(NotifyOperator(message=f"{event.action} failed: {event.error}"))

    def note_differences(self, event: DifferencesFound) -> None:
        news = tuple(line for line in event.differences if line not in self.differences)
        if news:
            self.differences = (*self.differences, *news)[-DIFFERENCES_KEPT:]
            self.effects.append(NotifyOperator(message=f"not as it was: {'; '.join(news)}"))

    def note_blindness(self, event: Event) -> None:
        if self.blind_since is None:
            self.blind_since = event.at

    def note_standstill(self, event: StandstillEnded) -> None:
        self.thawed_at, self.thawed_generation = event.at, self.generation
        message = (
            f"nothing of the job ran for {event.seconds:.0f} s (a suspended machine, a frozen "
            "container); what breaks of it now is recovered and charged to no budget"
        )
        self.effects.append(NotifyOperator(message=message))

    def note_sight(self, event: Event) -> None:
        self.blind_since = None

    # Actions of draining

    def drain_to_recover(self, event: Event) -> None:
        self._strengthen("recover")

    def drain_to_stop(self, event: StopRequested) -> None:
        """Of two requests the first decides the exit status: an operator's stop stays one."""
        if self._strengthen("stop"):
            self.stop_by = event.by
            self.exit_status = EXIT_STATUSES["signal" if event.by == "signal" else "operator"]
            self.reason = f"stopped by {'a signal' if event.by == 'signal' else 'an operator'}"

    def drain_to_complete(self, event: TrainingCompleted) -> None:
        self._strengthen("complete")
        self.result = {
            "step": event.step,
            "params_digest": event.params_digest,
            "loss": event.loss,
            "held_out_loss": event.held_out_loss,
        }
        self.exit_status = EXIT_STATUSES["COMPLETED"]
        self.reason = "the last step is committed"

    def drain_to_fail(self, event: Event) -> None:
        """What no retry can change."""
        if not self._strengthen("fail"):
            return
        self.exit_status = EXIT_STATUSES["pointless"]
        if isinstance(event, DeadlinePassed):
            self.reason = f"no capacity within {self.limits.capacity_wait_s:g} s: {self.reason}"
        else:
            self.reason = why_of(event)
        self.remedy = remedy_of(event)

    def _strengthen(self, purpose: str) -> bool:
        """Whether the drain takes this purpose, and with it the exit status and reason."""
        is_stronger = PURPOSES.index(purpose) > PURPOSES.index(self.purpose)
        if is_stronger:
            self.purpose = purpose
        return is_stronger

    def open_incident(self, event: Event) -> None:
        self.incidents += 1
        self.incident = incident_of(event, number=self.incidents, generation=self.active)

    def plan_rollback(self, event: NumbersDiverged) -> None:
        """To a checkpoint before the step, and past the batches from there up to it."""
        self.step_max, self.checkpoints_only = event.step, True
        self.skip_through = event.batch

    def plan_return(self, event: ReplicasDiverged) -> None:
        """To the last state on which all agreed; the data is not to blame."""
        self.step_max = event.agreed_step

    def fall_a_rung(self, event: Event) -> None:
        """What fails on the way back belongs to the incident that is under way."""
        self.free = True

    def charge_nobody(self, event: Event) -> None:
        """Restarts of the daemon are never charged, however late they come."""
        self.free = True

    def name_culprit(self, event: Event) -> None:
        """A primary cause turned up within the last-call window."""
        assert self.incident is not None
        found = incident_of(event, number=self.incident.number, generation=self.active)
        victims = tuple(sorted({*self.incident.ranks, *self.incident.victims} - {*found.ranks}))
        self.incident = replace(found, victims=victims, opened_at=self.incident.opened_at)

    def note_victims(self, event: Event) -> None:
        """A later word on the same trouble is evidence, no new failure."""
        if self.incident is None:
            return
        more = {*self.incident.victims, *getattr(event, "ranks", ())} - {*self.incident.ranks}
        self.incident = replace(self.incident, victims=tuple(sorted(more)))

    def lose_slots(self, event: Event) -> None:
        """A standby lives in the same slots, and is of no use without all of them."""
        self.slots_placed = False
        self._discard_standby()

    def note_lost_slots(self, event: Event) -> None:
        if isinstance(event, SlotLost | NodeLost):
            self.lose_slots(event)

    def call_last(self, event: Event) -> None:
        """A victim spoke first: wait a moment for the culprit."""
        self.stage = "last_call"
        self._set_deadline("last_call", self.limits.last_call_s)

    def collect_evidence(self, event: Event) -> None:
        assert self.incident is not None
        self.stage = "evidence"
        self.effects.append(CollectEvidence(generation=self.active, incident=self.incident.number))

    def save_workers(self, event: Event) -> None:
        self.stage = "saving"
        self.effects.append(SaveWorkers(generation=self.active))
        self._set_deadline("drain", self.limits.drain_s)

    def kill_workers(self, event: Event) -> None:
        self.stage = "killing"
        incident = self.incident.number if self.incident and self.purpose == "recover" else 0
        self.effects.append(KillWorkers(generation=self.active, incident=incident))

    def keep_snapshot(self, event: Event) -> None:
        """The slots, and what is in their memory, are given back when the job has failed."""
        self.purpose = "stop" if self.purpose == "stop" else "fail"
        self.stage = "keeping"
        self.effects.append(
            KeepSnapshot(generation=self.active, above=self.committed_step, rejected=self.rejected)
        )

    def note_kept_snapshot(self, event: SnapshotKept) -> None:
        self.committed_step = event.step
        self.verified = (*self.verified, (event.saved_by, event.step))
        message = f"the snapshot of step {event.step} is on the disk: the next run starts there"
        self.effects.append(NotifyOperator(message=message))

    def note_unkept_snapshot(self, event: SnapshotNotKept) -> None:
        if event.error:
            message = f"the newest snapshot is lost with the job: {event.error}"
            self.effects.append(NotifyOperator(message=message))

    def quarantine_restore_point(self, event: RestorePointRejected) -> None:
        self.stage = "quarantine"
        rejected = (self.restore_kind, self.restore_saved_by, self.restore_step)
        self.rejected = (*self.rejected, rejected)[-REJECTED_KEPT:]
        self.rejections += 1
        if self.restore_kind == "checkpoint":
            bad = (self.restore_saved_by, self.restore_step)
            self.verified = tuple(each for each in self.verified if each != bad)
        self.effects.append(
            QuarantineRestorePoint(
                kind=self.restore_kind,
                step=self.restore_step,
                path=event.path,
                saved_by=self.restore_saved_by,
                why=event.why,
            )
        )

    def note_failed_save(self, event: Event) -> None:
        """One that took too long has taken the time that a stop has."""
        self.unsaved = not isinstance(event, DeadlinePassed)
        self.effects.append(NotifyOperator(message=f"no last checkpoint: {why_of(event)}"))

    def quarantine_slots(self, event: ExitUnproven) -> None:
        """Where a process may still live, nothing is started again."""
        self.lose_slots(event)
        self._note_unproven(event)

    def _note_unproven(self, event: ExitUnproven) -> None:
        self.unproven = (*self.unproven, *event.unproven)
        names = ", ".join(event.unproven)
        self.effects.append(NotifyOperator(message=f"the end of {names} could not be proven"))

    def end_doubt(self, event: ExitProven) -> None:
        """Slots in which no process is in doubt any more can be used as they are."""
        ended = tuple(name for name in self.unproven if name in event.proven)
        self.unproven = tuple(name for name in self.unproven if name not in event.proven)
        self.quarantined = self.quarantined and bool(self.unproven)
        if ended:
            message = f"the end of {', '.join(ended)} is proven now"
            self.effects.append(NotifyOperator(message=message))

    # Actions of judging

    def judge_incident(self, event: Event) -> None:
        """Charge the incident once, by the culprit's cause, and say what follows."""
        assert self.incident is not None
        incident = self.incident
        self.effects.append(
            RecordIncident(
                incident=incident.number,
                summary={**asdict(incident), "exits": getattr(event, "exits", ())},
            )
        )
        if KILLED_FOR_MEMORY in incident.story:
            message = f"{incident.story}; {REMEDY_FOR_MEMORY}"
            self.effects.append(NotifyOperator(message=message))
        self.raised.append(self._verdict(incident, event.at))

    def _verdict(self, incident: Incident, at: float) -> RaisedEvent:
        common: dict[str, Any] = {"at": at, "generation": self.active}
        if self.free or self._is_cut_off(incident.generation, incident.opened_at):
            # A rung of a recovery: there is one standby, and only so many restore points.
            self.free = False
            return RetryGranted(**common, budget="none", spent=0, limit=-1, backoff_s=0.0)
        if incident.pointless and not self.stepped:
            return RetryRuledOut(**common, rule="before_first_step", why=incident.story)
        self.same_error = self.same_error + 1 if incident.error == self.last_error else 1
        self.last_error = incident.error
        is_unstarted = incident.event == "worker_crashed" and incident.phase in UNSTARTED
        times = min(2, self.limits.same_error_max) if is_unstarted else self.limits.same_error_max
        if incident.error and self.same_error >= times:
            why = f"{self.same_error} times running: {incident.story}"
            return RetryRuledOut(**common, rule="same_error", why=why)
        used = tuple(
            then for then in self.spent.get(incident.cause, ()) if then > at - self.limits.window_s
        )
        limit = self._limit_of(incident.cause)
        charge: dict[str, Any] = {"budget": incident.cause, "limit": limit}
        if 0 <= limit <= len(used):
            return RetryBudgetExhausted(**common, **charge, spent=len(used))
        if self.no_progress >= self.limits.no_progress_max >= 0:
            why = f"no later restore point over {self.limits.no_progress_max} generations"
            return RetryRuledOut(**common, rule="no_progress", why=why)
        self.spent = {**self.spent, incident.cause: (*used, at)}
        self.streak += 1
        backoff_s = self._backoff_s(incident.number)
        return RetryGranted(**common, **charge, spent=len(used) + 1, backoff_s=backoff_s)

    def _is_cut_off(self, generation: int, at: float) -> bool:
        """Whether a failure at that time comes of a standstill: word of both may cross."""
        if self.thawed_at is None or generation > self.thawed_generation:
            return False
        return -1.0 <= at - self.thawed_at <= STANDSTILL_GRACE_S

    def _limit_of(self, cause: str) -> int:
        return self.budgets[cause]["limit"]

    @property
    def budgets(self) -> dict[str, dict[str, int]]:
        """What is spent of each budget, and its limit."""
        limits = {
            "worker": self.limits.failures_max,
            "startup": self.limits.startup_failures_max,
            "node": self.limits.node_failures_max,
            "preemption": self.limits.preemptions_max,  # promised; nothing is charged to it yet
            "numbers": self.limits.rollbacks_max,
        }
        return {
            cause: {"spent": len(self.spent.get(cause, ())), "limit": limit}
            for cause, limit in limits.items()
        }

    def _backoff_s(self, incident: int) -> float:
        """Nothing for the first failure in a row, then doubling; jitter of ±25 % by hash."""
        if self.streak < 2:
            return 0.0
        plain_s: float = self.limits.backoff_base_s * 2.0 ** min(self.streak - 2, 30)
        chance = zlib.crc32(f"{self.limits.seed}:{incident}".encode()) / 2**32
        return round(min(plain_s, self.limits.backoff_max_s) * (0.75 + 0.5 * chance), 3)

    def back_off(self, event: RetryGranted) -> None:
        """Without a backoff the search for a restore point starts at once, or is under way."""
        looking = self.ahead == "looking" and self.rung == "standby"
        self.ahead = ""
        if looking and event.backoff_s == 0:
            self.stage = "selecting"
            return
        if event.backoff_s > 0:
            self.stage = "backoff"
            self._set_deadline("backoff", event.backoff_s)
        else:
            self.select_restore_point(event)

    def give_up(self, event: RetryBudgetExhausted | RetryRuledOut) -> None:
        if isinstance(event, RetryRuledOut):
            self.exit_status = EXIT_STATUSES["pointless"]
            self.reason = event.why
            self.remedy = remedy_for(self.incident) if self.incident else ""
        else:
            story = self.incident.story if self.incident else ""
            if self.incident:
                self.remedy = remedy_for(self.incident, budget=event.budget)
            self.exit_status = EXIT_STATUSES["budget"]
            self.reason = f"{event.spent} of {event.limit} {event.budget} retries used; {story}"

    # Actions of ending

    def finish(self, event: Event) -> None:
        """The last orders of a run. `state` is already the terminal one."""
        self.standby, self.standby_ready = None, False  # It ends with its slots.
        reason = self.reason
        if self.unproven:
            reason += f"; could not be ended: {', '.join(self.unproven)}"
        self.effects.append(ReleaseSlots())
        self.effects.append(
            WriteResult(
                state=self.state.name,
                exit_status=self.exit_status,
                reason=reason,
                remedy=self.remedy if self.state is State.FAILED else "",
            )
        )

    def _set_deadline(self, id: str, seconds: float) -> None:
        self.effects.append(SetDeadline(id=id, owner=self.owner, seconds=seconds))

    @property
    def owner(self) -> str:
        """Who owns the deadlines set now: void when this entry into the state ends."""
        return f"entry:{self.entry}"
