"""What a daemon that vanished had ordered and not seen done, read off its journal.

Every effect can be ordered again: performers and slots take the second order for the first.
"""

from collections.abc import Iterable, Mapping

from supervisor.fsm import effects as x
from supervisor.fsm.job import Job
from supervisor.fsm.table import STARTING
from supervisor.record.journal import Record

# The events that end an effect. Of those that carry a generation, it must be the effect's.
_ENDED_BY: Mapping[type[x.Effect], tuple[str, ...]] = {
    x.SelectRestorePoint: (
        "restore_point_selected",
        "restore_points_exhausted",
        "restore_points_unreadable",
    ),
    x.KeepSnapshot: ("snapshot_kept", "snapshot_not_kept"),
    x.QuarantineRestorePoint: ("restore_point_quarantined",),
    x.PlaceSlots: ("slots_placed", "placement_timed_out", "placement_failed"),
    x.StartWorkers: ("workers_started", "initialization_failed"),
    x.RestoreWorkers: ("workers_started", "initialization_failed"),
    x.PromoteStandby: ("workers_restored", "initialization_failed"),
    x.PrepareStandby: ("standby_ready", "standby_lost"),
    x.SaveWorkers: ("workers_saved", "last_save_failed"),
    x.CollectEvidence: ("evidence_collected",),
    x.KillWorkers: ("workers_gone", "exit_unproven"),
    x.SetDeadline: ("deadline_passed",),
}
# These are worth nothing to anybody after a restart.
_DROPPED = (x.NotifyOperator, x.PreloadStandby)


class Unfinished:
    """The effects of one segment whose outcome is not written yet, kept as its records come."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._pending: list[x.Effect] = []
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Take in the next record. Raises KeyError or TypeError for one of another version."""
        if record["kind"] == "job" and "pending" in record:  # the journal has rolled over here
            self._pending = [x.Effect.from_dict(effect) for effect in record["pending"]]
        elif record["kind"] == "move":
            event = record["event"]
            self._pending = [effect for effect in self._pending if not _ends(event, effect)]
            self._pending += [x.Effect.from_dict(effect) for effect in record["effects"]]
        elif record["kind"] == "action" and record["outcome"] == "finished":
            self._pending = [
                effect
                for effect in self._pending
                if type(effect) in _ENDED_BY or type(effect).__name__ != record["action"]
            ]

    def of(self, job: Job) -> list[x.Effect]:
        """Those that the job, as the records leave it, still needs, in their order."""
        return [effect for effect in self._pending if _still_wanted(effect, job)]


def unfinished(records: Iterable[Record], job: Job) -> list[x.Effect]:
    """The unfinished effects of a whole segment; see `Unfinished`."""
    return Unfinished(records).of(job)


def _ends(event: Mapping[str, object], effect: x.Effect) -> bool:
    name = event["event"]
    generation = getattr(effect, "generation", None)
    same = event.get("generation") in (None, generation)
    if name in ("workers_gone", "exit_unproven") and generation is not None and same:
        return True  # with a generation ends all that was ordered for it
    if name == "housekeeping_failed":
        return event["action"] == type(effect).__name__
    if isinstance(effect, x.SetDeadline) and event.get("id") != effect.id:
        return False
    return name in _ENDED_BY.get(type(effect), ()) and same


def _still_wanted(effect: x.Effect, job: Job) -> bool:
    if isinstance(effect, _DROPPED):
        return False
    if isinstance(effect, x.SetDeadline):
        return effect.owner == job.owner
    if isinstance(effect, x.PrepareStandby) and effect.generation == job.standby:
        return True
    if isinstance(effect, x.StartWorkers | x.PrepareStandby):
        # A start, or a standby that was promoted half-built, is over once all its ranks are ready.
        return effect.generation == job.active and job.state in STARTING
    return True
