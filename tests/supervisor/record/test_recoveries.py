"""The result adds up: where the seconds of a recovery went, and how much of the time was useful."""

from __future__ import annotations

import pytest

from supervisor.record.journal import read_journal
from supervisor.record.previous_run import Past, past_of, why_nothing_is_trained
from supervisor.record.recoveries import recoveries
from tests.test_scenarios import TRACES


def test_the_stages_of_a_recovery_add_up_to_the_whole() -> None:
    """A split that does not add up sends people to the wrong stage."""
    (row,) = recoveries(read_journal(TRACES / "killed_in_step.jsonl"))
    stages = [value for key, value in row.items() if key.endswith("_s") and key != "total_s"]
    assert sum(stages) == pytest.approx(row["total_s"], abs=1e-3)
    assert (row["event"], row["ranks"], row["step"]) == ("worker_crashed", [1], 25)
    assert row["resumed_step"] == 20
    assert row["start_s"] + row["load_s"] == pytest.approx(3.5, abs=0.1)


def test_an_incident_that_ends_the_job_has_no_total() -> None:
    """A job that failed has not recovered, and the result must not claim it."""
    rows = recoveries(read_journal(TRACES / "the_same_error_at_the_same_step.jsonl"))
    assert [row["total_s"] is None for row in rows] == [False, False, True]


def test_a_stop_is_no_recovery() -> None:
    """Failures are counted from these rows."""
    assert recoveries(read_journal(TRACES / "stopped_by_an_operator.jsonl")) == []


def test_what_is_past_is_read_without_the_table_that_wrote_it() -> None:
    """Numbers only grow, also over a change of the table."""
    past = past_of(read_journal(TRACES / "a_damaged_restore_point.jsonl"))
    assert (past.state, past.generation, past.incidents) == ("COMPLETED", 3, 1)
    assert past.committed_step == 40
    assert past.verified[-1] == (3, 40)
    assert past_of([]).state == ""


def test_a_job_that_is_beyond_its_steps_is_said_to_train_nothing() -> None:
    """Stopped at 164 of 1000 and resumed with 70: it started Ray, and was COMPLETED at 164."""
    past = Past(state="STOPPED", committed_step=164)
    assert "step 164 is saved, beyond trainer.steps = 70" in why_nothing_is_trained(past, 70)
    assert why_nothing_is_trained(past, 164) == ""
    rolled_back = Past(state="STOPPED", committed_step=164, step_max=50)
    assert why_nothing_is_trained(rolled_back, 70) == ""
