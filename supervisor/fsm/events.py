"""What can happen to a job. Events are facts, named in the past tense, and carry no behaviour."""

import re
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

EVENTS: dict[str, type["Event"]] = {}


class UnreadableEvent(ValueError):
    """A recorded event that this version cannot read: unknown name, missing or unknown field."""


def tuples(value: Any) -> Any:
    """JSON lists as tuples, at any depth, so that events stay immutable."""
    if isinstance(value, list):
        return tuple(tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A fact. `at` is when it was observed, in seconds: the core never reads a clock."""

    name: ClassVar[str] = "event"

    at: float

    def __init_subclass__(cls) -> None:
        # slots=True builds every class twice; the second, final one wins.
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        EVENTS[cls.name] = cls

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-ready data, its name under `event`."""
        return {"event": self.name, **asdict(self)}

    @staticmethod
    def from_dict(record: dict[str, Any]) -> "Event":
        """The event of a record; raises UnreadableEvent with what is wrong."""
        given = dict(record)
        name = given.pop("event", None)
        kind = EVENTS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise UnreadableEvent(f"unknown event {name!r}")
        known = {field.name for field in fields(kind)}
        needed = {field.name for field in fields(kind) if field.default is MISSING}
        if odd := sorted((given.keys() - known) | (needed - given.keys())):
            raise UnreadableEvent(f"{name}: missing or unknown field {', '.join(odd)}")
        return kind(**{key: tuples(value) for key, value in given.items()})


# Of the operator, the host and the stores: they carry no generation and are never stale.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted(Event):
    """A daemon opened a run of the job. `after` says how the previous run ended, or is empty."""

    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRestarted(Event):
    """Another daemon goes on where the last one vanished.

    `adopted` are the living workers, (generation, rank, pid); `slots` whether all slots are there.
    """

    epoch: int
    adopted: tuple[tuple[int, int, int], ...]
    slots: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """An operator or a signal asked for the end; `now` asks for it without a last checkpoint."""

    by: str
    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatStoreLost(Event):
    """The canary could not be written: the supervisor is blind, the workers are not dead."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatStoreRecovered(Event):
    """Heartbeats can be read again; only time in which nobody looked is left out of a silence."""

    blind_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLost(Event):
    """Ray's control plane is gone, and its workers with it."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed(Event):
    """A deadline that the core had set ran out."""

    id: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HousekeepingFailed(Event):
    """An effect that nothing waits for did not succeed."""

    action: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencesFound(Event):
    """Something is not as it was: since the restore point was saved, or since the run opened.

    `generation` found them, in whatever role; `differences` has a line for each.
    """

    generation: int
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandstillEnded(Event):
    """Nothing of the job ran for so long, the daemon included.

    The machine was suspended, or a container frozen: what ends in the moments after was cut off by
    that.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitProven(Event):
    """Processes whose end was in doubt are proven gone; each named as `exit_unproven` named it."""

    proven: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePointQuarantined(Event):
    """A rejected restore point was moved to where nothing picks it again."""

    path: str


# Of one generation. The door routes them by the generation's role.


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent(Event):
    """A fact about one generation."""

    generation: int


del EVENTS["generation_event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePointSelected(GenerationEvent):
    """Where the generation starts: a checkpoint, or `seed` when nothing was ever committed."""

    kind: str
    step: int
    path: str
    saved_by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(GenerationEvent):
    """A committed checkpoint that cannot be used: damaged in a way that is seen without loading it.

    It is that of `step`, saved by `saved_by`.
    """

    saved_by: int
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePointsExhausted(GenerationEvent):
    """Something was committed once and nothing is left to load."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePointsUnreadable(GenerationEvent):
    """The disk did not say which restore points there are: that is not "there are none"."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePointRejected(GenerationEvent):
    """Workers found the restore point damaged while loading it."""

    ranks: tuple[int, ...]
    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsPlaced(GenerationEvent):
    """Every rank has a slot: (rank, node, pid of the slot), ranks ordered by node, then device.

    `hosts` names each node once: (node, host name, address).
    """

    placement: int
    slots: tuple[tuple[int, str, int], ...]
    hosts: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityMissing(GenerationEvent):
    """The whole cluster, however idle, is too small for the job."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityFound(GenerationEvent):
    """The cluster has become large enough; the slots are being placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTimedOut(GenerationEvent):
    """The cluster is large enough, but its resources were not free in time."""

    waited_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFailed(GenerationEvent):
    """Ray, or a slot, could not be started."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted(GenerationEvent):
    """Every slot started its process: (rank, pid)."""

    pids: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersInitialized(GenerationEvent):
    """Every worker of a first start joined, compiled and loaded its starting state."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersRestored(GenerationEvent):
    """Every worker of a recovery joined, compiled and loaded the restore point."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InitializationFailed(GenerationEvent):
    """A start that failed for reasons of its own: port taken, join timed out, no process."""

    ranks: tuple[int, ...]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(GenerationEvent):
    """Loading the restore point raised, and not because the point is damaged."""

    ranks: tuple[int, ...]
    error: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepTaken(GenerationEvent):
    """The generation finished its first step, numbered `step`."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCrashed(GenerationEvent):
    """Processes ended unasked. Exactly one of `status` and `signal` is set.

    `primary` is false for a death that a peer's death explains.
    """

    ranks: tuple[int, ...]
    status: int | None
    signal: str | None
    phase: str
    step: int
    primary: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRaised(GenerationEvent):
    """An exception left the training loop: {type, message, frame, traceback, user}.

    `primary` is false for a collective that lost its peer.
    """

    ranks: tuple[int, ...]
    error: dict[str, Any]
    phase: str
    step: int
    primary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatLost(GenerationEvent):
    """Nothing of these workers moved for longer than the lease, and their slots agree."""

    ranks: tuple[int, ...]
    phase: str
    step: int
    silence_s: float
    lease_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStalled(GenerationEvent):
    """A phase outlived its deadline. `ranks` are the culprits, `stalled` all that stand still."""

    ranks: tuple[int, ...]
    stalled: tuple[int, ...]
    phase: str
    step: int
    silence_s: float
    deadline_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLost(GenerationEvent):
    """The actors that own the workers died, and the workers with them."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOrphaned(GenerationEvent):
    """No daemon lived for too long: the workers ended by themselves, and their slots with them.

    `step` is what they saved, -1 if they could not.
    """

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsVanished(GenerationEvent):
    """The slots were gone when a daemon came back: lost with its host, or with the cluster."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(GenerationEvent):
    """A node left the cluster, and its slots and workers with it."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(GenerationEvent):
    """A checkpoint is finalised on disk, read back, and its digests agree.

    All replicas agreed when `agreed_step` steps were finished; -1 if they are not compared.
    """

    step: int
    path: str
    duration_s: float
    agreed_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(GenerationEvent):
    """A save did not reach the disk; training goes on.

    `disk_is_fine`: the same bytes could be written there just after, so that room is not missing.
    """

    step: int
    error: str
    disk_is_fine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFailed(GenerationEvent):
    """No snapshots for now, for example because /dev/shm is full; training goes on."""

    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersDiverged(GenerationEvent):
    """A metric of a step is not finite, or far above what it was; the workers wait.

    `batch` is the place of the step's rows in the data, which is `step` until some are skipped.
    `policy` is what the settings ask for: "stop" or "rollback".
    """

    step: int
    batch: int
    metric: str
    value: str
    policy: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped(GenerationEvent):
    """A step came out of bounds and was not applied; training went on with the next batch."""

    step: int
    metric: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiverged(GenerationEvent):
    """Copies of the same parameters are not equal: memory or arithmetic went wrong somewhere.

    `ranks` are those that differ from most, or all of them where no majority agrees. They agreed
    when `agreed_step` steps were finished.
    """

    ranks: tuple[int, ...]
    step: int
    agreed_step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyReady(GenerationEvent):
    """The next generation stands by. Its cost: seconds to start, MB of memory over its ranks."""

    start_s: float
    memory_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyLost(GenerationEvent):
    """A worker of the generation that stood by, or was about to, ended, raised or fell silent."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCompleted(GenerationEvent):
    """The last step is done and committed."""

    step: int
    params_digest: str
    loss: float | None
    held_out_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSaved(GenerationEvent):
    """All workers stopped after the same step and its checkpoint is committed."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSaveFailed(GenerationEvent):
    """The checkpoint that a stop asked for was not written."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotKept(GenerationEvent):
    """The newest snapshot is a checkpoint now: that of `step`, taken by generation `saved_by`."""

    saved_by: int
    step: int
    path: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotNotKept(GenerationEvent):
    """No snapshot became a checkpoint; `error` is empty if none is newer than what is committed."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceCollected(GenerationEvent):
    """Stacks and log tails lie in the incident's folder; `missing` ranks did not answer."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersGone(GenerationEvent):
    """No process of the generation is left, each proven: (rank, status, signal)."""

    exits: tuple[tuple[int, int | None, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitUnproven(GenerationEvent):
    """The end of some processes could not be proven in time; each is named with pid and node."""

    unproven: tuple[str, ...]
    exits: tuple[tuple[int, int | None, str | None], ...]


# Raised by the core itself, and handled before anything from outside.


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedEvent(GenerationEvent):
    """A decision of the core, as an event of its own."""


del EVENTS["raised_event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryGranted(RaisedEvent):
    """A budget covers the incident. `spent` of `limit`; a limit of -1 means none."""

    budget: str
    spent: int
    limit: int
    backoff_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudgetExhausted(RaisedEvent):
    """The budget of this cause is spent."""

    budget: str
    spent: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRuledOut(RaisedEvent):
    """No retry can help: `rule` says which of the early stops."""

    rule: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyDisabled(RaisedEvent):
    """Standbys failed too often in a row: recoveries take the next rung until one is ready."""

    failures: int


# Trouble with the active generation: each of these opens an incident.
FAILURES: tuple[type[GenerationEvent], ...] = (
    WorkerCrashed,
    WorkerRaised,
    HeartbeatLost,
    ProgressStalled,
    SlotLost,
    NodeLost,
    InitializationFailed,
    RestoreFailed,
)
VERDICTS: tuple[type[RaisedEvent], ...] = (RetryGranted, RetryBudgetExhausted, RetryRuledOut)
RAISED: tuple[type[RaisedEvent], ...] = (*VERDICTS, StandbyDisabled)
