"""What an earlier run leaves behind in the journal, read without the table that wrote it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.disk import incidents, restore_points
from supervisor.fsm.job import Job, Limits
from supervisor.fsm.states import TERMINAL
from supervisor.record.journal import Record

_TRAIN = ("StartWorkers", "RestoreWorkers", "PromoteStandby")
_ROLLBACK = ("step_max", "checkpoints_only", "skip_through")
UNKNOWN = "UNKNOWN"  # the state that a run without a journal has left


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The last segment of a journal: how it ended, and the numbers that only grow.

    `state` is empty if no daemon has run here. `run` is the number of the run; 0 = not known.
    `active` is the generation that was told to train. `verified` are (generation, step) of the
    newest checkpoints that were read back and agreed. `skips` are (step, number of batches left out
    before it). The last three are those of a `Job`: a rollback that was decided and not done,
    whatever ended the run before that.
    """

    state: str = ""
    run: int = 0
    generation: int = 0
    active: int = 0
    placement: int = 0
    incidents: int = 0
    committed_step: int = -1
    verified: tuple[tuple[int, int], ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    step_max: int = -1
    checkpoints_only: bool = False
    skip_through: int = -1


def why_nothing_is_trained(past: Past, steps: int) -> str:
    """Return that the job is further than it is to go, after a stop; "" if it is not."""
    if past.committed_step <= steps or past.step_max >= 0:
        return ""
    return (
        f"step {past.committed_step} is saved, beyond trainer.steps = {steps}: nothing is trained; "
        "raise trainer.steps to go on"
    )


def past_of(records: Iterable[Record]) -> Past:
    """Read the records of one segment, in order."""
    state, run, active, committed_step = "", 0, 0, -1
    verified: dict[tuple[int, int], None] = {}
    skips: tuple[tuple[int, int], ...] = ()
    rollback: dict[str, Any] = {}
    numbers = {"generation": 0, "placement": 0, "incident": 0}
    for record in records:
        if record["kind"] == "header":
            run = int(record.get("run", 0))
        elif record["kind"] == "job":
            job = record["job"]
            state, active, committed_step = job["state"], job["active"], job["committed_step"]
            numbers["generation"] = max(numbers["generation"], job["generation"])
            numbers["placement"] = max(numbers["placement"], job["placement"])
            numbers["incident"] = max(numbers["incident"], job["incidents"])
            verified = dict.fromkeys(_pairs(job["verified"]))
            skips = _pairs(job.get("skips", ()))
            rollback = {key: job[key] for key in _ROLLBACK if key in job}
        elif record["kind"] == "move":
            event = record["event"]
            state = record["target"]
            for named in (event, *record["effects"]):
                for key, so_far in numbers.items():
                    numbers[key] = max(so_far, int(named.get(key) or 0))
                if named.get("effect") in _TRAIN:
                    active = int(named["generation"])
                    skips = _pairs(named.get("skips", ()))
                if named.get("effect") == "SelectRestorePoint" and named.get("step_max", -1) >= 0:
                    committed_step = min(committed_step, int(named["step_max"]))
                    verified = {each: None for each in verified if each[1] <= named["step_max"]}
                if named.get("effect") == "QuarantineRestorePoint":
                    verified.pop((named["saved_by"], named["step"]), None)
            # It is done when a generation trains again, whatever ends a run or a start before that.
            if record["target"] == "RUNNING" != record["source"]:
                rollback = {}
            elif record["target"] == "DRAINING" != record["source"]:
                rollback |= _rollback_of(event)
            if event["event"] == "checkpoint_committed":
                committed_step = max(committed_step, event["step"])
                verified[(event["generation"], event["step"])] = None
                for effect in record["effects"]:  # what retention leaves on the disk
                    if effect["effect"] == "PruneCheckpoints":
                        kept = (*effect.get("spared", ()), *effect["verified"])
                        verified = dict.fromkeys(_pairs(kept))
            elif event["event"] == "snapshot_kept":
                committed_step = max(committed_step, event["step"])
                verified[(event["saved_by"], event["step"])] = None
            elif event["event"] == "checkpoint_skipped":
                verified.pop((event["saved_by"], event["step"]), None)
            elif event["event"] == "restore_point_selected" and event["kind"] != "seed":
                committed_step = max(committed_step, event["step"])
    return Past(
        state=state,
        run=run,
        generation=numbers["generation"],
        active=active,
        placement=numbers["placement"],
        incidents=numbers["incident"],
        committed_step=committed_step,
        verified=tuple(verified)[-16:],
        skips=skips,
        **rollback,
    )


def run_after(past: Past) -> int:
    """The number of the run that follows: its first generation, or that of a run not ended yet.

    A run ends in a terminal state only: a daemon that vanished, and lost workers, do not end it.
    """
    ended = past.state in ("", UNKNOWN, *(state.name for state in TERMINAL))
    return past.generation + 1 if ended or not past.run else past.run


def job_after(past: Past, limits: Limits) -> Job:
    """What a new run begins with."""
    return Job(
        limits=limits,
        generation=past.generation,
        placement=past.placement,
        incidents=past.incidents,
        committed_step=past.committed_step,
        progress_mark=past.committed_step - 1,
        verified=past.verified,
        skips=past.skips,
        step_max=past.step_max,
        checkpoints_only=past.checkpoints_only,
        skip_through=past.skip_through,
    )


def _rollback_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """What the event that ended a generation asks of the next one, beyond the newest state."""
    if event["event"] == "replicas_diverged":
        return {"step_max": int(event["agreed_step"])}
    if event["event"] == "numbers_diverged" and event["policy"] == "rollback":
        step, batch = int(event["step"]), int(event["batch"])
        return {"step_max": step, "checkpoints_only": True, "skip_through": batch}
    return {}


def _pairs(value: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(first), int(second)) for first, second in value)


def past_on_disk(run_dir: Path) -> Past:
    """What the other files tell where there is no journal: no number is used twice, nothing lost.

    Its `state` is empty where nothing has run, else UNKNOWN. Raises OSError.
    """
    names = (
        re.fullmatch(r"generation-(\d+)", one.name)
        for below in ("checkpoints", "logs")
        if (run_dir / below).is_dir()
        for one in (run_dir / below).iterdir()
    )
    generation = max((int(name[1]) for name in names if name), default=0)
    if generation == 0:
        return Past()
    points = restore_points.find(run_dir, None)
    incident = incidents.latest(run_dir)
    return Past(
        state=UNKNOWN,
        generation=generation,
        incidents=incident["number"] if incident else 0,
        committed_step=points[0].step if points else -1,
    )
