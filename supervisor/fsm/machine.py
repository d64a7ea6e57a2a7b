"""Events in, moves out: the table at work, with no clock, no network and no disk."""

import copy
import hashlib
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from transitions import Machine, MachineError, Transition

from .effects import Effect
from .events import (
    CapacityFound,
    CapacityMissing,
    CheckpointSkipped,
    DeadlinePassed,
    Event,
    EvidenceCollected,
    ExitUnproven,
    GenerationEvent,
    PlacementFailed,
    PlacementTimedOut,
    RaisedEvent,
    RestorePointSelected,
    RestorePointsExhausted,
    RestorePointsUnreadable,
    SlotsPlaced,
    StandbyLost,
    StandbyReady,
    WorkersGone,
)
from .job import Job
from .states import LIVE, State
from .table import TRANSITIONS

CHAIN_MAX = 8

# The rest of what can be said of a standby is what only an active generation may say.
_OF_A_STANDBY = (
    StandbyReady,
    StandbyLost,
    RestorePointSelected,
    RestorePointsUnreadable,
    RestorePointsExhausted,
    CheckpointSkipped,
)


# The outcomes of orders, and the stages in which such an order is under way.
_OUTCOMES: dict[type[Event], tuple[frozenset[State], frozenset[str]]] = {
    **dict.fromkeys(
        (SlotsPlaced, CapacityMissing, CapacityFound, PlacementTimedOut, PlacementFailed),
        (frozenset({State.PROVISIONING}), frozenset({"placing", "capacity"})),
    ),
    **dict.fromkeys(
        (WorkersGone, ExitUnproven), (frozenset(LIVE), frozenset({"killing", "keeping"}))
    ),
}


class UnexpectedEvent(Exception):
    """A bug: the table has no row for this event in this state. Carries the story of the job."""


class OutcomeOfNothing(UnexpectedEvent):
    """A bug: the outcome of an order that was never given, which must not start or end anything."""


class Row(Transition):
    """A transition that remembers why it is there."""

    def __init__(self, *args: Any, why: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why = why

    def execute(self, event_data: Any) -> bool:
        """Take the row if its guards agree, and leave its reason with the job."""
        taken = bool(super().execute(event_data))
        if taken:
            event_data.model.why = self.why
        return taken


class Table(Machine):
    """The machine of all jobs: it holds the rows, and each job holds its state."""

    transition_cls = Row


# The job is not registered as a model, which would hang two dozen untyped attributes on it.
TABLE = Table(
    model=None,
    states=State,
    initial=State.PROVISIONING,
    transitions=TRANSITIONS,
    auto_transitions=False,
    send_event=False,
    queued=False,
)


def table_digest() -> str:
    """Names the table: a journal of another digest is not resumed blindly."""
    rows = [
        {**row, "source": [s.name for s in row["source"]], "dest": row["dest"] and row["dest"].name}
        for row in TRANSITIONS
    ]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One event and what it did. `raised` is true if the core itself raised the event."""

    event: Event
    source: State
    target: State
    effects: tuple[Effect, ...]
    why: str
    raised: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The move as it stands in the journal."""
        return {
            "event": self.event.to_dict(),
            "source": self.source.name,
            "target": self.target.name,
            "effects": [effect.to_dict() for effect in self.effects],
            "why": self.why,
            "raised": self.raised,
        }


class JobMachine:
    """The one door to a job: facts go in through `handle`, orders come out."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def handle(self, event: Event) -> list[Move]:
        """Take one event and all that it raises, and say what the daemon must do.

        Works on a copy of the job: an event that raises UnexpectedEvent changes nothing.
        """
        job = copy.copy(self.job)
        moves: list[Move] = []
        pending: deque[Event] = deque([event])
        while pending:
            if len(moves) == CHAIN_MAX:
                raise UnexpectedEvent(f"{event.name} raised an endless chain: {moves}")
            job.effects, job.raised, job.why = [], [], ""
            moves.append(_move(job, pending.popleft(), raised=bool(moves)))
            pending.extend(job.raised)
        job.effects, job.raised, job.why = [], [], ""
        self.job = job
        return moves


def _move(job: Job, event: Event, *, raised: bool) -> Move:
    source = job.state
    if isinstance(event, RaisedEvent) is not raised:
        raise UnexpectedEvent(f"{event.name} came from the wrong side")
    turned_away = _turned_away(job, event)
    if turned_away:
        return Move(event=event, source=source, target=source, effects=(), why=turned_away)
    try:
        taken = TABLE.events[event.name].trigger(job, event)
    except MachineError as error:
        raise UnexpectedEvent(f"{event} in {source.name}; the job: {job}") from error
    if not taken:
        raise UnexpectedEvent(f"every guard refused {event} in {source.name}; the job: {job}")
    effects = tuple(job.effects)
    return Move(
        event=event, source=source, target=job.state, effects=effects, why=job.why, raised=raised
    )


def _turned_away(job: Job, event: Event) -> str:
    """The door. A reason not to let the event at the table, or nothing."""
    if isinstance(event, DeadlinePassed) and event.owner.startswith("entry:"):
        return "" if event.owner == job.owner else "stale: the owner of the deadline has ended"
    if not isinstance(event, GenerationEvent):
        return ""
    if not 1 <= event.generation <= job.generation:
        raise UnexpectedEvent(f"{event} of a generation never issued; the job: {job}")
    if event.generation == job.active:
        states, stages = _OUTCOMES.get(type(event), (frozenset(), frozenset()))
        if job.state in states and job.stage not in stages:
            raise OutcomeOfNothing(f"{event} in {job.state.name}: never ordered; the job: {job}")
        return ""
    if event.generation == job.standby:
        if isinstance(event, _OF_A_STANDBY):
            return ""
        return "not a word that a standby may say"
    if event.generation in job.leaving:
        if isinstance(event, WorkersGone | ExitUnproven):
            return ""
        if isinstance(event, EvidenceCollected):
            return "evidence of a leaving generation"
        return "stale: the generation is leaving"
    return "stale: a late word from a generation that no longer counts"
