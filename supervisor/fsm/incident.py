"""One trouble, read off the event that opened it: who is blamed, which budget pays, in one line."""

from dataclasses import dataclass

from .events import (
    Event,
    HeartbeatLost,
    InitializationFailed,
    ProgressStalled,
    RestoreFailed,
    WorkerCrashed,
    WorkerRaised,
)

# Errors that a later attempt may not meet again, although the user's code raised them.
TRANSIENT_ERRORS = frozenset(
    {
        "BlockingIOError",
        "BrokenPipeError",
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "InterruptedError",
        "JaxRuntimeError",
        "MemoryError",
        "OSError",
        "TimeoutError",
        "XlaRuntimeError",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One trouble, from the first word of it to the retry that is granted or refused."""

    number: int
    generation: int
    opened_at: float
    cause: str
    event: str
    ranks: tuple[int, ...]
    victims: tuple[int, ...]
    phase: str
    step: int
    story: str
    error: str
    pointless: bool
    primary: bool


def why_of(event: Event) -> str:
    """What the event itself gives as its reason, else its name."""
    return str(getattr(event, "why", "") or getattr(event, "error", "") or event.name)


def cause_of(event: Event) -> str:
    """Which budget pays."""
    named = {
        "node_lost": "node",
        "cluster_lost": "node",
        "initialization_failed": "startup",
        "placement_failed": "startup",
        "placement_timed_out": "startup",
        "restore_point_rejected": "restore_point",
        "numbers_diverged": "numbers",
        "replicas_diverged": "numbers",
    }
    return named.get(event.name, "worker")


def incident_of(event: Event, *, number: int, generation: int) -> Incident:
    error = getattr(event, "error", {})
    error = error if isinstance(error, dict) else {}
    step, ranks = getattr(event, "step", -1), getattr(event, "ranks", ())
    signature, pointless = "", False
    if error and getattr(event, "primary", True):
        signature = f"{error.get('type')} at {error.get('frame')} in step {step}"
        pointless = bool(error.get("user")) and error.get("type") not in TRANSIENT_ERRORS
    return Incident(
        number=number,
        generation=generation,
        opened_at=event.at,
        cause=cause_of(event),
        event=event.name,
        ranks=ranks,
        victims=tuple(rank for rank in getattr(event, "stalled", ()) if rank not in ranks),
        phase=getattr(event, "phase", ""),
        step=step,
        story=story_of(event),
        error=signature,
        pointless=pointless,
        primary=bool(getattr(event, "primary", True)),
    )


def story_of(event: Event) -> str:
    """One line for people: who, what, where."""
    ranks = getattr(event, "ranks", ())
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "the job"
    phase, step = getattr(event, "phase", ""), getattr(event, "step", -1)
    where = f" in {phase}" if phase else ""
    where += f" of step {step}" if phase and step >= 0 else ""
    if isinstance(event, WorkerCrashed):
        how = f"by {event.signal}" if event.signal else f"with status {event.status}"
        return f"{who} ended {how}{where}"
    if isinstance(event, WorkerRaised | RestoreFailed):
        return f"{who} raised {event.error.get('type')}: {event.error.get('message')}{where}"
    if isinstance(event, InitializationFailed):
        return f"{who} did not start: {event.error}"
    if isinstance(event, HeartbeatLost | ProgressStalled):
        limit_s = event.lease_s if isinstance(event, HeartbeatLost) else event.deadline_s
        return f"{who} silent for {event.silence_s:.1f} s of {limit_s:.1f} s{where}"
    return f"{who}: {event.name.replace('_', ' ')}: {why_of(event)}"
