"""What the files of a run tell when its daemon is gone: the same as it would have told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor.config import Settings
from supervisor.console.status_from_files import log_tail, recorded_status
from supervisor.daemon.lock import acquire
from supervisor.record.settings_in_force import keep
from tests.sim.run import simulate
from tests.sim.world import Fault, Script
from trainer.settings import read_settings


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    settings, _ = read_settings(Settings, None, ["trainer.steps=600"])
    keep(path, settings, tmp_path / "job.toml")
    return path


def look(run_dir: Path) -> dict[str, Any]:
    answer = recorded_status(run_dir)
    assert answer is not None
    return answer


def test_a_job_that_lost_its_daemon_is_shown_as_it_was(run_dir: Path) -> None:
    """After `kill -9` of the daemon there was no "of 600", no budget was known, and nothing said
    that the workers trained on or what would adopt them."""
    simulate(run_dir / "journal.jsonl", Script(faults=[Fault(kind="kill", step=25)], steps=60))
    lines = (run_dir / "journal.jsonl").read_bytes().splitlines(keepends=True)
    running = [n for n, line in enumerate(lines) if b'"target":"DRAINING"' in line][-1]
    (run_dir / "journal.jsonl").write_bytes(b"".join(lines[:running]))
    (run_dir / "metrics.jsonl").write_text('{"step": 54, "generation": 2, "loss": 2.5}\n')
    shown = look(run_dir)
    assert (shown["state"], shown["step"], shown["steps"]) == ("RUNNING", 55, 600)
    assert shown["generation"] == 2
    assert shown["incident"]["story"] == "rank 1 ended by SIGKILL in step 25"
    assert shown["incident"]["steps_redone"] == 5
    assert shown["budgets"]["worker"] == {"spent": 1, "limit": 10}
    assert "its workers may train on" in shown["attention"]
    assert f"python -m supervisor --config {run_dir.parents[1]}/job.toml" in shown["attention"]
    with acquire(run_dir):  # a daemon that does not answer is not one that is gone
        assert look(run_dir)["attention"] is None


def test_what_was_reached_is_shown_although_less_was_saved(run_dir: Path) -> None:
    """A job that had done 100 steps was shown at step 50, where its last checkpoint was."""
    simulate(run_dir / "journal.jsonl", Script())
    result = {"state": "FAILED", "exit_status": 4, "step": 50, "steps_lost": 50, "remedy": "mend"}
    (run_dir / "result.json").write_text(json.dumps(result))
    shown = look(run_dir)
    assert (shown["step"], shown["remedy"], shown["attention"]) == (100, "mend", None)


def test_the_end_of_a_log_is_short_and_of_the_last_lines(tmp_path: Path) -> None:
    """A log of gigabytes, or one line of megabytes, must not fill a screen or the memory."""
    path = tmp_path / "rank-0.log"
    assert log_tail(path) == []
    path.write_text(
        "\n".join([*(f"line {n}" for n in range(9999)), "", "x" * 9000, "\x1b[2Jend\n"])
    )
    *before, long, last = log_tail(path)
    assert last == "\\x1b[2Jend"
    assert len(long) == 400
    assert before[-1] == "line 9998"
    assert len(before) == 10
