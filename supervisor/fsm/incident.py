"""One trouble, read off the event that opened it: who is blamed, which budget pays, in one line."""

import re
from dataclasses import dataclass

from .events import (
    CapacityMissing,
    CheckpointFailed,
    DeadlinePassed,
    Event,
    HeartbeatLost,
    InitializationFailed,
    NumbersDiverged,
    ProgressStalled,
    RestoreFailed,
    RestorePointRejected,
    RestorePointsExhausted,
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


KILLED_FOR_MEMORY = "killed for memory"
"""How the detail of a crash begins if the kernel ended the process for want of memory."""

UNSTARTED = ("launch", "initialize")
"""The phases before a worker has met its peers or the task: what ends it there will do so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One trouble, from the first word of it to the retry that is granted or refused.

    `frame` is where in the user's code an exception came from, as "FILE:LINE in FUNCTION".
    """

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
    frame: str = ""


def why_of(event: Event) -> str:
    """What the event itself gives as its reason, else its name."""
    if isinstance(event, NumbersDiverged):
        return f"{event.why} in step {event.step}, which is batch {event.batch} of the data"
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
    """Begin an incident with the failure that an event reports."""
    error = getattr(event, "error", {})
    error = error if isinstance(error, dict) else {}
    step, ranks = getattr(event, "step", -1), getattr(event, "ranks", ())
    signature, pointless = "", False
    if isinstance(event, WorkerCrashed):
        signature = _signature_of_crash(event)
    elif error and getattr(event, "primary", True):
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
        frame=str(error.get("frame") or ""),
    )


def _signature_of_crash(event: WorkerCrashed) -> str:
    """What makes two crashes the same; "" where a peer or somebody outside ended the process."""
    if event.detail.startswith(KILLED_FOR_MEMORY):
        return f"{KILLED_FOR_MEMORY} in {event.phase} of step {event.step}"
    if not event.primary or event.signal in ("SIGKILL", "SIGTERM"):
        return ""
    how = event.signal or f"status {event.status}"
    last_words = re.sub(r"0x[0-9a-f]+|[0-9]+", "#", event.detail)  # pids, times, addresses differ
    return f"{how} in {event.phase} of step {event.step}: {last_words}"


def story_of(event: Event) -> str:
    """One line for people: who, what, where."""
    ranks = getattr(event, "ranks", ())
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "the job"
    phase, step = getattr(event, "phase", ""), getattr(event, "step", -1)
    where = f" in {phase}" if phase else ""
    if phase and step >= 0:
        where = f" in step {step}" if phase == "step" else f" in {phase} of step {step}"
    if isinstance(event, WorkerCrashed):
        how = f"by {event.signal}" if event.signal else f"with status {event.status}"
        detail = event.detail.rpartition("\n")[2]
        is_told = event.phase in UNSTARTED or detail.startswith(KILLED_FOR_MEMORY)
        last_words = f": {detail}" if detail and is_told else ""
        return f"{who} ended {how}{where}{last_words}"
    if isinstance(event, WorkerRaised | RestoreFailed):
        frame = event.error.get("frame")
        place = f" at {frame}" if frame else ""  # before the message, which may be long
        return f"{who} raised {event.error.get('type')}{place}{where}: {event.error.get('message')}"
    if isinstance(event, InitializationFailed):
        return f"{who} did not start: {event.error}"
    if isinstance(event, HeartbeatLost | ProgressStalled):
        if isinstance(event, HeartbeatLost):
            limit = f"its lease is {event.lease_s:.2f} s"
        else:
            limit = f"the limit is {event.deadline_s:.2f} s"
        return f"{who} was silent for {event.silence_s:.2f} s{where}; {limit}"
    return f"{who}: {event.name.replace('_', ' ')}: {why_of(event)}"


REMEDY_FOR_MEMORY = (
    "raise the limit of its container or job (docker --memory, Slurm --mem, systemd MemoryMax), "
    "lower trainer.data.batch_size or raise trainer.accumulation_steps, or set recovery.standby = "
    '"none", which keeps no second set of processes'
)
_AGAIN = "then give the same command again"
_SETTING_OF = {
    "worker": "budgets.failures_max",
    "startup": "budgets.startup_failures_max",
    "node": "cluster.node_failures_max",
    "numbers": "trainer.guards.rollbacks_max",
}


def remedy_for(incident: Incident, *, budget: str = "") -> str:
    """What a person should do about a job that this incident ended; `budget` is the spent one."""
    if incident.frame and incident.pointless:
        look = f"mend {incident.frame.partition(' in ')[0]}"
    elif KILLED_FOR_MEMORY in incident.story:
        look = REMEDY_FOR_MEMORY
    elif incident.ranks:
        log = f"logs/generation-{incident.generation}/rank-{incident.ranks[0]}.log"
        look = f"read the end of {log} and incidents/{incident.number:04d}"
    else:
        look = "read what led to it in `events`, and mend that"
    more = f", or raise {_SETTING_OF[budget]}" if budget in _SETTING_OF else ""
    return f"{look}{more}; {_AGAIN}"


def remedy_of(event: Event) -> str:
    """The same for an event that ends a job by itself."""
    if isinstance(event, NumbersDiverged):
        guard = "nonfinite" if event.value.lstrip("-") in ("nan", "inf") else "spike"
        return (
            f'look at that batch and at the learning rate; trainer.guards.{guard} = "skip" leaves '
            f'such a step out, "rollback" goes back to the checkpoint before it; {_AGAIN}'
        )
    if isinstance(event, CapacityMissing | DeadlinePassed):
        return (
            "add nodes, ask for less ([cluster] workers, cpus_per_worker, gpus_per_worker), or set "
            f"cluster.capacity_wait_s; {_AGAIN}"
        )
    if isinstance(event, CheckpointFailed):
        return f"mend what the save failed of, or set job.run_dir to another place; {_AGAIN}"
    if isinstance(event, RestorePointRejected | RestorePointsExhausted):
        return (
            "put a whole checkpoint back (what was set aside says why), or start over with --fresh"
        )
    return f"read what led to it in `events`, and mend that; {_AGAIN}"
