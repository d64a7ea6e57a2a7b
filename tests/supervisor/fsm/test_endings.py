"""Which word decides how a run ends: its state, its exit status and its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.fsm import events as e
from supervisor.fsm.job import Job
from supervisor.fsm.machine import JobMachine
from supervisor.fsm.states import State
from supervisor.record.journal import read_journal

TRACES = Path(__file__).parents[2] / "traces"


def training(*, restored: bool = False) -> JobMachine:
    """A machine whose first generation has its slots; it trains, or (`restored`) still loads."""
    machine = JobMachine(Job())
    kind, step, path = ("checkpoint", 10, "p") if restored else ("seed", 0, "")
    for event in (
        e.JobStarted(at=1.0, after=""),
        e.RestorePointSelected(at=2.0, generation=1, kind=kind, step=step, path=path, saved_by=0),
        e.SlotsPlaced(at=3.0, generation=1, placement=1, slots=()),
    ):
        machine.handle(event)
    if not restored:
        machine.handle(e.WorkersInitialized(at=4.0, generation=1, step=0))
    return machine


def test_an_operators_stop_stays_one_whatever_signals_follow() -> None:
    """Slurm's SIGTERM came while the job drained: status 75, and what a person had stopped for good
    was queued again."""
    machine = training()
    machine.handle(e.StopRequested(at=5.0, by="operator"))
    machine.handle(e.StopRequested(at=6.0, by="signal"))
    machine.handle(e.StopRequested(at=7.0, by="signal", now=True))
    machine.handle(e.WorkersGone(at=8.0, generation=1, exits=()))
    job = machine.job
    assert (job.state, job.exit_status, job.stop_by) == (State.STOPPED, 5, "operator")
    assert job.reason == "stopped by an operator"


def test_a_signals_stop_is_requeued_although_an_operator_hurries_it() -> None:
    """The first word decides: whoever only shortens the wait does not change what it is for."""
    machine = training()
    machine.handle(e.StopRequested(at=5.0, by="signal"))
    machine.handle(e.StopRequested(at=6.0, by="operator", now=True))
    machine.handle(e.WorkersGone(at=7.0, generation=1, exits=()))
    assert (machine.job.state, machine.job.exit_status) == (State.STOPPED, 75)


def test_completed_has_status_0_whatever_else_fails_meanwhile() -> None:
    """Orphans had finished the job while the daemon was away; what it had been setting aside could
    not be moved, and COMPLETED came with the status of a failure."""
    machine = training(restored=True)
    for event in (
        e.RestorePointRejected(at=5.0, generation=1, ranks=(0,), path="p", why="a digest differs"),
        e.TrainingCompleted(
            at=6.0, generation=1, step=60, params_digest="d", loss=1.0, held_out_loss=None
        ),
        e.HousekeepingFailed(at=7.0, action="QuarantineRestorePoint", error="EROFS"),
        e.WorkersGone(at=8.0, generation=1, exits=()),
    ):
        machine.handle(event)
    job = machine.job
    assert (job.state, job.exit_status) == (State.COMPLETED, 0)
    assert job.reason == "the last step is committed"


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ("an_error_before_the_first_step", ["mend task.py:7; then give the same command again"]),
        ("a_loss_that_is_not_finite_stops_the_job", ['trainer.guards.nonfinite = "skip"']),
        ("a_worker_that_dies_without_end", ["logs/generation-4/rank-1.log", "raise budgets.fail"]),
        ("no_node_joins_in_time", ["cluster.capacity_wait_s"]),
        ("no_restore_point_is_left", ["--fresh"]),
        ("stopped_by_an_operator", []),
        ("undisturbed", []),
    ],
)
def test_a_job_that_failed_says_what_to_do_next(trace: str, words: list[str]) -> None:
    """It was told why a job had FAILED, and not which line, guard or budget one should change."""
    orders = [
        effect
        for record in read_journal(TRACES / f"{trace}.jsonl")
        if record["kind"] == "move"
        for effect in record["effects"]
    ]
    (result,) = [effect for effect in orders if effect["effect"] == "WriteResult"]
    assert bool(result["remedy"]) is bool(words)
    assert all(word in result["remedy"] for word in words)


def test_numbers_that_diverge_are_told_with_their_step_and_batch() -> None:
    """ "loss is nan" was all: nobody could look at the rows that had led to it."""
    machine = training()
    machine.handle(e.FirstStepTaken(at=5.0, generation=1, step=0))
    machine.handle(
        e.NumbersDiverged(
            at=6.0,
            generation=1,
            step=33,
            batch=35,
            metric="loss",
            value="nan",
            policy="stop",
            why="loss is nan",
        )
    )
    assert machine.job.reason == "loss is nan in step 33, which is batch 35 of the data"
