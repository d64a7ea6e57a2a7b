"""What a small fault in the core once changed without any test noticing; see benchmarks/mutants."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Limits
from supervisor.fsm.machine import JobMachine
from supervisor.fsm.states import State
from tests.supervisor.fsm.test_machine import crashed, running, selected

STANDBY = Limits(standby="generation")


def gone(generation: int = 1, at: float = 3.0) -> e.WorkersGone:
    return e.WorkersGone(at=at, generation=generation, exits=())


def committed(step: int, generation: int = 1) -> e.CheckpointCommitted:
    return e.CheckpointCommitted(at=1.0, generation=generation, step=step, path="p", duration_s=0.1)


def effects_of(machine: JobMachine, event: e.Event, kind: type[x.Effect]) -> list[Any]:
    return [
        effect
        for move in machine.handle(event)
        for effect in move.effects
        if isinstance(effect, kind)
    ]


def with_standby() -> JobMachine:
    """Generation 1 trains, and generation 2 stands by."""
    machine = running(limits=STANDBY)
    machine.handle(e.FirstStepTaken(at=1.0, generation=1, step=0))
    assert machine.job.standby == 2
    return machine


def recovering(machine: JobMachine, *, at: float = 2.0, signal: str = "SIGKILL") -> None:
    """The active generation crashes, and is gone."""
    active = machine.job.active
    machine.handle(crashed(active, signal=signal, detail=f"at {at}"))
    machine.handle(gone(active, at=at))


def test_after_a_commit_the_seed_is_no_restore_point() -> None:
    """A job that had saved for a week could have started from its seed."""
    for commits in (False, True):
        machine = running()
        if commits:
            machine.handle(committed(0))
        machine.handle(crashed())
        (order,) = effects_of(machine, gone(), x.SelectRestorePoint)
        assert order.seed_allowed is not commits
        machine = with_standby()
        if commits:
            machine.handle(committed(0))
        (order,) = effects_of(machine, crashed(), x.SelectRestorePoint)
        assert order.seed_allowed is not commits


@pytest.mark.parametrize(
    ("kind", "left"), [("snapshot", ((1, 10), (1, 20))), ("checkpoint", ((1, 10),))]
)
def test_a_rejected_snapshot_costs_no_checkpoint_of_its_step(
    kind: str, left: tuple[tuple[int, int], ...]
) -> None:
    """What is verified on the disk does not change with what lies in memory."""
    machine = running()
    machine.handle(committed(10))
    machine.handle(committed(20))
    recovering(machine)
    found = e.RestorePointSelected(at=3.0, generation=2, kind=kind, step=20, path="p", saved_by=1)
    machine.handle(found)
    rejected = e.RestorePointRejected(at=4.0, generation=2, ranks=(0,), path="p", why="digest")
    (order,) = effects_of(machine, rejected, x.QuarantineRestorePoint)
    assert (order.kind, order.step) == (kind, 20)
    assert machine.job.verified == left


def test_what_was_found_ahead_is_used_once() -> None:
    """Kept for the next failure, it would take the job back to a state of long ago."""
    machine = with_standby()
    machine.handle(crashed())
    machine.handle(selected(2, step=0))
    assert machine.job.ahead == "found"
    assert effects_of(machine, gone(), x.SelectRestorePoint) == []
    assert (machine.job.state, machine.job.active, machine.job.ahead) == (State.RESTORING, 2, "")


def test_a_search_that_is_under_way_is_not_begun_again() -> None:
    """Two answers would come, and the first would be taken for the second."""
    machine = with_standby()
    assert len(effects_of(machine, crashed(), x.SelectRestorePoint)) == 1
    assert effects_of(machine, gone(), x.SelectRestorePoint) == []
    assert machine.job.stage == "selecting"
    assert len(effects_of(machine, selected(2), x.PromoteStandby)) == 1


def test_a_failure_leaves_the_window_of_its_budget_on_the_second() -> None:
    """One that is a window old does not count; a moment younger, it does."""
    for age_s, spent in ((100.0, 1), (99.9, 2)):
        machine = running(limits=Limits(window_s=100.0, backoff_base_s=0.0))
        recovering(machine, at=1000.0)
        machine.handle(selected(2))
        machine.handle(e.WorkersRestored(at=1000.0, generation=2, step=0))
        machine.handle(crashed(2, signal="SIGBUS"))
        (granted,) = [
            move.event
            for move in machine.handle(gone(2, at=1000.0 + age_s))
            if isinstance(move.event, e.RetryGranted)
        ]
        assert granted.spent == spent


def test_blindness_counts_from_its_beginning() -> None:
    """Told again, an outage of an hour looked a second old."""
    machine = running()
    for at in (10.0, 20.0):
        machine.handle(e.HeartbeatStoreLost(at=at, why="refused"))
    assert machine.job.blind_since == 10.0


def test_a_standby_in_preparation_is_not_ready_though_the_last_one_was() -> None:
    """It would have been promoted as if it needed nothing but a state."""
    machine = with_standby()
    machine.handle(e.StandbyReady(at=2.0, generation=2, start_s=1.0, memory_mb=1.0))
    assert machine.job.standby_ready
    recovering(machine)
    machine.handle(selected(2))
    machine.handle(e.WorkersRestored(at=4.0, generation=2, step=0))
    machine.handle(e.FirstStepTaken(at=5.0, generation=2, step=0))
    assert (machine.job.standby, machine.job.standby_ready) == (3, False)


def test_a_commit_that_is_no_later_than_the_restore_point_is_no_progress() -> None:
    """A job that did the same steps over and over would have done so for ever."""
    machine = running(limits=Limits(backoff_base_s=0.0))
    machine.handle(committed(10))
    recovering(machine)
    machine.handle(selected(2, step=10))
    machine.handle(e.WorkersRestored(at=4.0, generation=2, step=10))
    recovering(machine, at=5.0, signal="SIGBUS")
    machine.handle(selected(3, step=10))
    machine.handle(e.WorkersRestored(at=6.0, generation=3, step=10))
    assert machine.job.no_progress == 1
    machine.handle(committed(10, generation=3))
    assert machine.job.no_progress == 1
    machine.handle(committed(11, generation=3))
    assert (machine.job.no_progress, machine.job.streak) == (0, 0)


def test_a_later_restore_point_begins_the_count_of_vain_generations_anew() -> None:
    """With a count of one left over, no_progress_max would be a generation less."""
    machine = running(limits=Limits(backoff_base_s=0.0))
    machine.handle(committed(10))
    recovering(machine)
    machine.handle(selected(2, step=10))
    assert (machine.job.progress_mark, machine.job.no_progress) == (10, 0)


def test_only_the_deadline_of_a_pause_ends_it() -> None:
    """Another one that passes meanwhile would have cut the backoff short."""
    machine = running()
    recovering(machine)
    machine.handle(selected(2))
    machine.handle(e.WorkersRestored(at=4.0, generation=2, step=0))
    recovering(machine, at=5.0, signal="SIGBUS")
    assert machine.job.stage == "backoff"
    other = e.DeadlinePassed(at=6.0, id="standby", owner=machine.job.owner)
    assert effects_of(machine, other, x.SelectRestorePoint) == []
    due = e.DeadlinePassed(at=7.0, id="backoff", owner=machine.job.owner)
    assert len(effects_of(machine, due, x.SelectRestorePoint)) == 1


@pytest.mark.parametrize(
    ("now", "before", "kills"),
    [(True, "saving", 1), (False, "saving", 0), (True, "killing", 0)],
)
def test_a_stop_hurries_what_still_waits_and_nothing_else(
    now: bool, before: str, kills: int
) -> None:
    """A second order to end would run beside the first; a stop without haste lets a save end."""
    machine = running()
    machine.handle(e.StopRequested(at=2.0, by="operator", now=before == "killing"))
    assert machine.job.stage == before
    again = e.StopRequested(at=3.0, by="operator", now=now)
    assert len(effects_of(machine, again, x.KillWorkers)) == kills


def test_differences_are_told_once_each() -> None:
    """Another program than the run's own would have gone unseen, or been told at each standby."""
    machine = running()
    for differences, told in ((("a",), 1), (("a",), 0), (("a", "b"), 1)):
        event = e.DifferencesFound(at=2.0, generation=1, differences=differences)
        assert len(effects_of(machine, event, x.NotifyOperator)) == told
    assert machine.job.differences == ("a", "b")
