"""What the daemon must do. Effects are orders, named in the imperative, and are plain data."""

from dataclasses import asdict, dataclass
from typing import Any

from .events import tuples


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """An order to a performer. All are idempotent per generation."""

    def to_dict(self) -> dict[str, Any]:
        """The effect as JSON-ready data, its name under `effect`."""
        return {"effect": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_dict(record: dict[str, Any]) -> "Effect":
        """The effect of a record. Raises KeyError or TypeError for one of another version."""
        given = dict(record)
        kind = _by_name(Effect)[given.pop("effect")]
        return kind(**{key: tuples(value) for key, value in given.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectRestorePoint(Effect):
    """Find the newest restore point; the seed counts only if nothing was ever committed.

    With a `step_max` of 0 or more this is a rollback: the newest up to that step (a checkpoint
    only, if so asked), and what lies above it goes to quarantine. Nothing does if nothing is found.
    `rejected` are (kind, generation that saved it, step) of what workers found damaged: it is not
    picked again, moved or not. Of the `committed` (generation, step) each that cannot be used is an
    event.
    """

    generation: int
    seed_allowed: bool
    step_max: int = -1
    checkpoints_only: bool = False
    rejected: tuple[tuple[str, int, int], ...] = ()
    committed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSnapshot(Effect):
    """Write the newest snapshot above a step to the disk as a checkpoint, in bounded time.

    `rejected` is that of `SelectRestorePoint`.
    """

    generation: int
    above: int
    rejected: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRestorePoint(Effect):
    """Move a rejected restore point to where nothing picks it again."""

    kind: str
    step: int
    path: str
    saved_by: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSlots(Effect):
    """Have Ray place one slot per rank."""

    generation: int
    placement: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers(Effect):
    """Start a process in every slot and have it load the starting state.

    `skips`: (step, number of batches left out before it and all later ones).
    """

    generation: int
    kind: str
    step: int
    path: str
    saved_by: int
    skips: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreWorkers(StartWorkers):
    """Start a process in every slot and have it load the restore point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStandby(Effect):
    """Start the next generation beside the active one, up to all but the state."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadStandby(StartWorkers):
    """Have the generation that stands by load what it will need if it is promoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteStandby(StartWorkers):
    """Have the generation that stands by load the restore point and train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSpares(Effect):
    """Have a process with JAX imported wait in every slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWorkers(Effect):
    """Have all workers stop after the same step and commit a last checkpoint."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectEvidence(Effect):
    """Write stacks and log tails of every rank into the incident's folder."""

    generation: int
    incident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorkers(Effect):
    """End every process of the generation and prove that it is gone.

    With an incident, the last words of the living (stacks, log tails) go to its folder.
    """

    generation: int
    incident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordIncident(Effect):
    """Write the incident's summary beside its evidence."""

    incident: int
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCheckpoints(Effect):
    """Delete what retention no longer keeps: all but `keep` of the verified checkpoints.

    `verified` are the newest (generation, step) that were read back and agreed; `spared` stay too:
    the newest on which all replicas are known to have agreed.
    """

    keep: int
    verified: tuple[tuple[int, int], ...]
    spared: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeadline(Effect):
    """Send `deadline_passed` after `seconds`, unless the owner ends before."""

    id: str
    owner: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyOperator(Effect):
    """Tell a person what matters now."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSlots(Effect):
    """Give slots and their resources back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Effect):
    """Write result.json for schedulers and people; `remedy` is what one should do next."""

    state: str
    exit_status: int
    reason: str
    remedy: str = ""


def _by_name(kind: type[Effect]) -> dict[str, type[Effect]]:
    # By the last one of a name: slots=True builds every class twice.
    found: dict[str, type[Effect]] = {}
    for below in kind.__subclasses__():
        found |= {below.__name__: below, **_by_name(below)}
    return found
