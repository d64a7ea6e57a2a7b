"""What the files of a run tell when no daemon is there to ask. Reads only; guesses nothing."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOURNAL_FILE = "journal.jsonl"
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"
_TAIL = 64 * 1024  # bytes


def recorded_status(run_dir: Path) -> dict[str, Any] | None:
    """The fields of `status --json` as far as journal, metrics and result of `run_dir` know them.

    `supervisor` is None: nobody runs the job. Returns None when there has been no run.
    """
    moves = [record for record in _journal(run_dir) if record.get("kind") == "move"]
    result = read_result(run_dir) or {}
    if not moves and not result:
        return None
    last = moves[-1] if moves else {}
    event = last.get("event") or {}
    metrics = last_metrics(run_dir) or {}
    step = result.get("step")
    if step is None and "step" in metrics:
        step = metrics["step"] + 1  # the line names the step that was done, counted from 0
    return {
        "job": run_dir.name,
        "state": result.get("state") or last.get("target"),
        "generation": metrics.get("generation", event.get("generation")),
        "step": step,
        "steps": None,
        "workers": [],
        "standby": None,
        "restore_point": _restore_point(moves),
        "budgets": {},
        "supervisor": None,
        "incident": None,
        "loss": metrics.get("loss", result.get("loss")),
        "held_out_loss": metrics.get("held_out_loss", result.get("held_out_loss")),
        "reason": result.get("reason"),
        "exit_status": result.get("exit_status"),
        "last_event": {"event": event.get("event"), "at": event.get("at"), "why": last.get("why")}
        if event
        else None,
    }


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """result.json, or None when the job has not reached a terminal state."""
    try:
        result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return result if isinstance(result, dict) else None


def last_metrics(run_dir: Path) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl."""
    try:
        with (run_dir / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            return record
    return None


def _journal(run_dir: Path) -> Iterator[dict[str, Any]]:
    path = run_dir / JOURNAL_FILE
    if path.exists():
        from supervisor.journal import read_journal  # only here: it is not needed to answer no

        yield from read_journal(path)


def _restore_point(moves: list[dict[str, Any]]) -> dict[str, Any] | None:
    for move in reversed(moves):
        event = move.get("event") or {}
        if event.get("event") == "checkpoint_committed":
            return {"kind": "checkpoint", "step": event.get("step"), "verified": True}
    return None
