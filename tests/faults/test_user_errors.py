"""Mistakes of the user: no retry can change them, and the user's own lines are shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import EVERY_STEPS, run

full = pytest.mark.full

SOON_S = 20.0


def test_an_exception_of_megabytes_is_a_line_in_status_and_whole_in_the_incident(
    job: MakeJob,
) -> None:
    """`status` had 385 lines with raw escape codes, and the middle of the text was nowhere."""
    tiny = job(**{"trainer.task": "paced:RaisesAtLength", "budgets.failures_max": 0})
    assert tiny.start().exit_status() == 3
    shown = run(tiny, "status").stdout
    assert "\x1b" not in shown
    assert len(shown.splitlines()) < 40
    incident = tiny.run_dir / "incidents" / "0001"
    kept, *_ = incident.glob("error-generation-1-rank-*.txt")  # of the rank that was first
    assert "\nthe middle\n" in kept.read_text()


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        pytest.param(
            {"trainer.task": "paced:MissingImport"},
            "ModuleNotFoundError",
            ["import no_such_module_anywhere", "paced.py", "No module named"],
            id="import",
        ),
        pytest.param(
            {"trainer.task": "paced:WrongShape"},
            "TypeError",
            ["rows @ weights", "paced.py", "train_step"],
            id="shape",
            marks=full,
        ),
    ],
)
def test_a_mistake_that_shows_before_the_first_step_ends_the_job_at_once(
    job: MakeJob, settings: dict[str, Any], kind: str, words: list[str]
) -> None:
    """A user's error was retried for ever (pytorch#60910; marin#4615: ten times)."""
    tiny = job(**settings)
    daemon = tiny.start()
    started = daemon.until("workers_started")
    assert daemon.exit_status() == 4
    ended = tiny.moves()[-1]["event"]
    took_s = ended["at"] - started["at"]
    tiny.figures.add(f"{kind}: start of the workers to FAILED (s)", took_s)
    assert took_s < SOON_S
    assert tiny.result()["exit_status"] == 4
    assert kind in tiny.result()["reason"]
    assert len(tiny.events("workers_started")) == 1
    raised = tiny.events("worker_raised", primary=True)[0]["error"]
    assert raised["user"]
    assert len(raised["traceback"].splitlines()) < 40
    incident = "".join(
        path.read_text() for path in sorted((tiny.run_dir / "incidents" / "0001").iterdir())
    )
    for word in words:
        assert word in raised["traceback"]
        assert word in incident
        assert word in tiny.result()["traceback"]


def test_the_same_error_at_the_same_step_ends_the_job(job: MakeJob) -> None:
    """What fails alike three times will fail alike the fourth time (CASES 15)."""
    tiny = job(**{"trainer.task": "paced:RaisesAlways", "budgets.same_error_max": 3})
    assert tiny.start().exit_status() == 4
    raised = tiny.events("worker_raised", primary=True)
    assert [(event["generation"], event["step"]) for event in raised] == [(1, 5), (2, 5), (3, 5)]
    assert all(event["ranks"] == [1] for event in raised)
    ruled_out = tiny.events("retry_ruled_out")
    assert [event["rule"] for event in ruled_out] == ["same_error"]
    assert "row 3 of step 5 is not what it should be" in tiny.result()["reason"]
    assert "raise ValueError" in tiny.result()["traceback"]
    place = raised[-1]["error"]["frame"].partition(" in ")[0]
    result = tiny.result()
    assert "paced.py:" in place
    assert place in result["reason"]
    assert result["remedy"] == f"mend {place}; then give the same command again"
    assert result["log_tail"][-1].endswith("row 3 of step 5 is not what it should be")
    shown = "".join(run(tiny, "status").stdout.split())  # wherever its lines end
    assert place in shown.replace("│", "")
    assert f"raised_at={place}" in run(tiny, "events").stdout


@full
def test_a_worker_that_dies_without_end_spends_the_budget(job: MakeJob) -> None:
    """A dying worker may not hammer a cluster for ever, nor go on for ever (CASES 14)."""
    settings = {"budgets.failures_max": 4, "budgets.backoff_base_s": 0.5}
    settings["budgets.same_error_max"] = 9  # it dies in the same way each time
    tiny = job(**{"trainer.task": "paced:DiesAlways", **settings})
    assert tiny.start().exit_status(180) == 3
    crashed = tiny.events("worker_crashed", primary=True)
    assert [(one["ranks"], one["status"], one["signal"]) for one in crashed] == [([1], 7, None)] * 5
    granted = tiny.events("retry_granted")
    assert [(one["spent"], one["limit"]) for one in granted] == [(n, 4) for n in (1, 2, 3, 4)]
    waits = [one["backoff_s"] for one in granted]
    assert waits[0] == 0
    for doubled, wait_s in enumerate(waits[1:]):
        assert 0.375 * 2**doubled <= wait_s <= 0.625 * 2**doubled
        tiny.figures.add("backoff (s)", wait_s, f"failure {doubled + 2} in a row")
    for one, wait_s in zip(granted, waits, strict=True):
        after = [e for e in tiny.events("restore_point_selected") if e["at"] >= one["at"]]
        assert after[0]["at"] - one["at"] >= wait_s
    exhausted = tiny.events("retry_budget_exhausted")
    assert [(one["spent"], one["limit"]) for one in exhausted] == [(4, 4)]
    result = tiny.result()
    assert (result["state"], result["exit_status"]) == ("FAILED", 3)
    assert "4 of 4 worker retries used" in result["reason"]
    assert result["step"] < EVERY_STEPS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.task": "language_model", "trainer.data.path": ["no.txt"]}, "no.txt does not"),
        ({"trainer.task": "nope:Line"}, "no module 'nope'"),
        ({"cluster.workers": 64, "trainer.data.batch_size": 64}, "needs 64 CPUs, this machine has"),
    ],
)
def test_what_check_finds_missing_is_said_before_anything_starts(
    job: MakeJob, settings: dict[str, Any], said: str
) -> None:
    """Half a minute of Ray and workers went by before a missing file was named, with status 4."""
    tiny = job(**settings)
    for command in ("check",), ():
        told = run(tiny, *command)
        assert told.returncode == 2
        assert said in told.stderr
    assert not (tiny.run_dir / "embedded.json").exists()


def test_every_mistake_in_the_settings_is_told_at_once(job: MakeJob) -> None:
    """One message a mistake, each with key, value and remedy, before anything is started."""
    tiny = job(
        **{
            "trainer.stepz": 5,
            "trainer.seed": "seven",
            "heartbeats.lease_s": 40.0,
            "heartbeats.every_s": 0.25,
        }
    )
    told = run(tiny)
    assert told.returncode == 2
    lines = told.stderr.strip().splitlines()
    assert len(lines) == 3
    by_key = {key: line for line in lines for key in ("stepz", "seed", "lease_s") if key in line}
    assert "trainer.steps" in by_key["stepz"]
    assert "seven" in by_key["seed"]
    assert "number" in by_key["seed"]
    assert "deadlines.drain_s" in by_key["lease_s"]
    assert "40" in by_key["lease_s"]
    assert not tiny.run_dir.exists()
