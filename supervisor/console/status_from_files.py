"""What the files of a run tell when no daemon is there to ask. Reads only; guesses nothing."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supervisor.daemon.lock import is_held
from supervisor.fsm.states import LIVE
from supervisor.record.metrics import last_row
from supervisor.record.settings_in_force import Kept, kept_before
from trainer.host.printable import printable

if TYPE_CHECKING:
    from supervisor.fsm.job import Job

JOURNAL_FILE = "journal.jsonl"
RESULT_FILE = "result.json"
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "steps_lost", "generation", "exit_status"), (int,)),
    **dict.fromkeys(("loss", "held_out_loss"), (int, float)),
    **dict.fromkeys(("state", "reason", "traceback", "remedy", "log"), (str,)),
    "log_tail": (list,),
}
_LOG_LINES, _LOG_LINE_LENGTH, _LOG_BYTES = 12, 400, 1 << 14
_OF_AN_INCIDENT = ("number", "event", "cause", "ranks", "victims", "story", "frame")


def recorded_status(run_dir: Path) -> dict[str, Any] | None:
    """The fields of `status --json` as far as journal, metrics and result of `run_dir` know them.

    `supervisor` is None: nobody runs the job. Returns None when there has been no run.
    """
    segment = _segment(run_dir)
    result = read_result(run_dir) or {}
    if not segment and not result:
        return None
    moves = [record for record in segment if record["kind"] == "move"]
    last = moves[-1] if moves else {}
    event = last.get("event") or {}
    metrics = _of_known_types(last_row(run_dir) or {})
    step = result.get("step")
    if step is not None:  # what was reached, saved or not
        step += result.get("steps_lost") or 0
    elif metrics.get("step") is not None:
        step = metrics["step"] + 1  # the line names the step that was done, counted from 0
    past, kept, job = _past(segment), kept_before(run_dir), _rebuilt(segment)
    return {
        "job": run_dir.name,
        "state": past["state"] or result.get("state"),
        "generation": past["generation"],
        "step": step,
        "steps": kept.steps,
        "workers": [],
        "standby": None,
        "restore_point": past["restore_point"],
        "budgets": job.budgets if job else {},
        "supervisor": None,
        "incident": _incident(run_dir, segment, job),
        "loss": metrics.get("loss", result.get("loss")),
        "held_out_loss": metrics.get("held_out_loss", result.get("held_out_loss")),
        "reason": result.get("reason"),
        "exit_status": result.get("exit_status"),
        **{key: result.get(key) for key in ("remedy", "log", "log_tail")},
        "attention": _if_abandoned(run_dir, past["state"], kept),
        "last_event": {"event": event.get("event"), "at": event.get("at"), "why": last.get("why")}
        if event
        else None,
    }


def _rebuilt(segment: list[dict[str, Any]]) -> Job | None:
    """The job as its daemon had it; None where another version's table wrote the journal."""
    from supervisor.record.replay import rebuild

    return rebuild(segment)


def _if_abandoned(run_dir: Path, state: str, kept: Kept) -> str | None:
    """What has become of a job whose daemon vanished, and which command goes on with it."""
    if state not in {one.name for one in LIVE} or is_held(run_dir):
        return None
    command = f"python -m supervisor --config {shlex.quote(kept.config or 'FILE')}"
    ends = f"; without one they save and end after {kept.orphan_after_s:g} s"
    return (
        f"its daemon vanished and its workers may train on{ends if kept.orphan_after_s else ''}. "
        f"The command that started it goes on with them: {command}"
    )


def rank_log(generation: int, rank: int) -> str:
    """Where below a run's directory a rank logs."""
    return f"logs/generation-{generation}/rank-{rank}.log"


def log_tail(path: Path) -> list[str]:
    """The last lines of a log that say something (no marks under code); none if unreadable."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    spoken = [line.rstrip() for line in lines if line.strip(" ^~")][-_LOG_LINES:]
    return [printable(line)[:_LOG_LINE_LENGTH] for line in spoken]


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """result.json, or None if the job has not reached a terminal state, or it is damaged.

    What is not of the type that was written is left out. Raises OSError.
    """
    try:
        result = json.loads((run_dir / RESULT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return _of_known_types(result) if isinstance(result, dict) else None


def _of_known_types(found: dict[str, Any]) -> dict[str, Any]:
    """The same without what no daemon or worker of ours has written under these names."""
    return {
        key: value
        for key, value in found.items()
        if value is None or (type(value) in _TYPES[key] if key in _TYPES else True)
    }


def _segment(run_dir: Path) -> list[dict[str, Any]]:
    """The records of the last run, its header first; empty when there is no journal."""
    path = run_dir / JOURNAL_FILE
    if not path.exists():
        return []
    from supervisor.record.journal import last_segment  # only here: it is not needed to answer no

    return last_segment(path)


def _incident(
    run_dir: Path, segment: list[dict[str, Any]], job: Job | None
) -> dict[str, Any] | None:
    """The latest incident, as the daemon would tell of it; `error` where its file is damaged."""
    from supervisor.disk.incidents import latest
    from supervisor.record.recoveries import Chronicle

    # One that ended the job at once has no file; one of an earlier run has nothing else.
    found = asdict(job.incident) if job and job.incident else latest(run_dir)
    if found is None:
        return None
    told = {key: found.get(key) for key in _OF_AN_INCIDENT}
    told["at"] = found.get("opened_at")
    if isinstance(told["at"], float) and isinstance(found.get("step"), int):
        told |= Chronicle.of(segment).recovery_from(told["at"], found["step"])
    if "error" in found and "event" not in found:
        told["story"] = found["error"]
    return told


def _past(segment: list[dict[str, Any]]) -> dict[str, Any]:
    from supervisor.record.previous_run import past_of

    past = past_of(segment)
    point = None
    if past.committed_step >= 0:
        verified = any(step == past.committed_step for _, step in past.verified)
        point = {"kind": "checkpoint", "step": past.committed_step, "verified": verified}
    generation = past.active or past.generation  # of which the last may be a standby's
    return {"state": past.state, "generation": generation, "restore_point": point}
