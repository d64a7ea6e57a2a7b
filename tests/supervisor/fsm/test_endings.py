"""Which word decides how a run ends: its state, its exit status and its reason."""

from __future__ import annotations

from supervisor.fsm import events as e
from supervisor.fsm.job import Job
from supervisor.fsm.machine import JobMachine
from supervisor.fsm.states import State


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
