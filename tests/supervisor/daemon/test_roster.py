"""What workers say becomes the right event, once, in the right order, blamed on the right one."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.daemon.roster import Roster
from supervisor.fsm import events as e
from supervisor.fsm.incident import incident_of, remedy_for


def roster(**given: Any) -> Roster:
    facts: dict[str, Any] = {"generation": 3, "world_size": 2, "restoring": False}
    return Roster(**{**facts, **given})


def names(found: list[e.Event]) -> list[str]:
    return [event.name for event in found]


def say(one: Roster, report: str, rank: int = 0, **facts: Any) -> list[e.Event]:
    return one.take({"report": report, "rank": rank, "generation": 3, **facts}, 5.0)


def ready(one: Roster) -> Roster:
    say(one, "ready", 0, step=4)
    say(one, "ready", 1, step=4)
    return one


ERROR = {"type": "KeyError", "message": "x", "frame": "f", "user": True}


def test_all_ranks_must_be_ready_and_a_recovery_is_told_apart() -> None:
    """RUNNING means all; and the journal says whether it was a first start."""
    one = roster()
    assert say(one, "ready", 0, step=4) == []
    assert say(one, "ready", 0, step=4) == []
    assert names(say(one, "ready", 1, step=4)) == ["workers_initialized"]
    again = roster(restoring=True)
    say(again, "ready", 0, step=4)
    assert names(say(again, "ready", 1, step=4)) == ["workers_restored"]


def test_what_overtakes_ready_on_another_way_waits_for_it() -> None:
    """Slots report on separate ways: the first step may be heard of before the last `ready`."""
    one = roster()
    say(one, "ready", 0, step=4)
    assert say(one, "stepped", 0, step=4) == []
    assert say(one, "checkpoint_committed", 0, step=5, path="p", seconds=0.1) == []
    assert names(say(one, "ready", 1, step=4)) == [
        "workers_initialized",
        "first_step_taken",
        "checkpoint_committed",
    ]
    assert say(one, "stepped", 1, step=4) == []


def test_a_collective_error_is_secondary_and_any_other_is_primary() -> None:
    """CASES 17: the victim is not blamed."""
    one = ready(roster())
    (victim,) = say(one, "raised", 0, error=ERROR, phase="step", step=7, collective=True)
    (culprit,) = say(one, "raised", 1, error=ERROR, phase="step", step=7, collective=False)
    assert isinstance(victim, e.WorkerRaised)
    assert isinstance(culprit, e.WorkerRaised)
    assert (victim.primary, culprit.primary) == (False, True)


def test_an_abort_that_jax_explains_by_a_lost_peer_is_secondary() -> None:
    """When rank 0 dies, JAX aborts all others within 0.1 s: they are victims."""
    tail = [
        (
            "F1129 23:59:01.000000 7 client.h:80] Terminating process because the JAX distributed "
            "service detected fatal errors"
        )
    ]
    exit = {"status": None, "signal": "SIGABRT", "phase": "step", "step": 7}
    (victim,) = say(ready(roster()), "exit", 1, **exit, log_tail=tail)
    (other,) = say(ready(roster()), "exit", 1, **exit, log_tail=["assertion failed"])
    assert isinstance(victim, e.WorkerCrashed)
    assert isinstance(other, e.WorkerCrashed)
    assert not victim.primary
    assert other.primary
    assert other.detail == "assertion failed"


def test_an_exit_that_was_explained_or_ordered_is_no_news() -> None:
    """One trouble is one event: the exit after an exception, or after our own kill, is none."""
    one = ready(roster())
    say(one, "raised", 0, error=ERROR, phase="step", step=7, collective=False)
    assert say(one, "exit", 0, status=1, signal=None, log_tail=[]) == []
    other = ready(roster())
    other.ending = True
    assert say(other, "exit", 0, status=None, signal="SIGKILL", log_tail=[]) == []


def test_an_exit_before_the_last_step_is_a_crash_whatever_its_status() -> None:
    """A worker that leaves with status 0 has left all the same."""
    (event,) = say(ready(roster()), "exit", 0, status=0, signal=None, log_tail=[], step=7)
    assert isinstance(event, e.WorkerCrashed)
    assert (event.status, event.primary) == (0, True)


def test_startup_and_restore_failures_have_their_own_names() -> None:
    """They are charged to other budgets than a crash in the middle of training."""
    kwargs = {"error": ERROR, "collective": False, "step": None}
    assert names(say(roster(), "raised", 0, phase="initialize", startup=True, **kwargs)) == [
        "initialization_failed"
    ]
    assert names(say(roster(), "raised", 0, phase="restore", **kwargs)) == ["restore_failed"]
    assert names(say(roster(), "restore_rejected", 0, path="p", reason="r")) == [
        "restore_point_rejected"
    ]


def test_a_process_that_ends_before_it_reports_leaves_its_last_lines() -> None:
    """A module that hid the standard library's killed it, and the cause was cut off."""
    tail = ["Traceback (most recent call last):", '  File "queue.py", line 1', "AttributeError: x"]
    (event,) = say(roster(), "exit", 0, status=1, signal=None, log_tail=tail)
    assert isinstance(event, e.WorkerCrashed)
    assert (event.phase, event.detail) == ("launch", "\n".join(tail))
    begun = roster()
    say(begun, "started", 0, pid=1)
    (event,) = say(begun, "exit", 0, status=1, signal=None, log_tail=tail)
    assert isinstance(event, e.WorkerCrashed)
    assert (event.phase, event.detail) == ("initialize", "AttributeError: x")


def test_a_rank_that_was_ready_can_no_longer_fail_to_start() -> None:
    """An error in a phase "restore" of the user's own, while the job ran, made no event at all, and
    the exit after it was taken for explained."""
    kwargs = {"error": ERROR, "collective": False, "step": 7}
    for more in ({"phase": "step", "startup": True}, {"phase": "restore", "startup": False}):
        (event,) = say(ready(roster()), "raised", 0, **more, **kwargs)
        assert isinstance(event, e.WorkerRaised)
        assert (event.primary, event.phase) == (True, more["phase"])


def test_a_standby_says_nothing_but_that_it_is_ready_or_lost() -> None:
    """Its trouble is not the job's."""
    one = roster(restoring=True, standby=True)
    assert say(one, "standing_by", 0, seconds=4.0, rss_bytes=400e6) == []
    (there,) = say(one, "standing_by", 1, seconds=5.0, rss_bytes=410e6)
    assert isinstance(there, e.StandbyReady)
    assert (there.start_s, there.memory_mb) == (5.0, 810.0)
    (gone,) = say(one, "exit", 1, status=None, signal="SIGKILL", log_tail=[])
    assert isinstance(gone, e.StandbyLost)
    assert "rank 1 ended by SIGKILL" in gone.why


def test_a_promoted_standby_speaks_as_the_active_generation() -> None:
    """After promotion its death is a crash of the job."""
    one = roster(restoring=True, standby=True)
    one.promote()
    say(one, "ready", 0, step=4)
    assert names(say(one, "ready", 1, step=4)) == ["workers_restored"]
    assert names(say(one, "exit", 1, status=None, signal="SIGKILL", log_tail=[])) == [
        "worker_crashed"
    ]


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        ({"used": 4 << 30, "limit": 4 << 30}, "killed for memory: 4.0 of 4.0 GB"),
        ({"used": 199 << 20, "limit": 200 << 20}, "killed for memory: 0.194 of 0.195 GB"),
        ({}, "killed for memory: the machine had none left"),
    ],
)
def test_a_rank_that_the_kernel_ended_for_memory_says_so_and_what_to_set(
    memory: dict[str, int], text: str
) -> None:
    """A rank at the limit of its container was "ended by SIGKILL", and nobody knew by whom."""
    one = ready(roster())
    facts = {"status": None, "signal": "SIGKILL", "phase": "step", "step": 7, "memory": memory}
    (crash,) = say(one, "exit", 1, **facts)
    assert isinstance(crash, e.WorkerCrashed)
    assert crash.detail == text
    incident = incident_of(crash, number=1, generation=3)
    assert incident.story == f"rank 1 ended by SIGKILL in step 7: {text}"
    assert "trainer.data.batch_size" in remedy_for(incident)


def test_a_standby_that_ran_out_of_memory_says_so_too() -> None:
    """It is the second set of processes that no longer fits."""
    one = roster(standby=True)
    facts = {"status": None, "signal": "SIGKILL", "memory": {"used": 4 << 30, "limit": 4 << 30}}
    (lost,) = say(one, "exit", 1, **facts)
    assert isinstance(lost, e.StandbyLost)
    assert lost.why == "rank 1 ended by SIGKILL: killed for memory: 4.0 of 4.0 GB"


def test_what_stands_both_in_the_state_and_in_the_news_is_taken_once() -> None:
    """A daemon that comes back is told where a rank stands, then its news: an exit that stands in
    both must not be two crashes."""
    one = ready(roster())
    crash = {"status": None, "signal": "SIGKILL", "seq": 9}
    assert names(say(one, "exit", 1, **crash)) == ["worker_crashed"]
    assert say(one, "exit", 1, **crash) == []
    assert names(say(one, "exit", 0, **crash)) == ["worker_crashed"]  # another slot counts too


def test_what_differs_is_told_once_before_the_steps_that_it_changes() -> None:
    """Changed code was a line in a log, and the loss jumped without a word on screen."""
    one = roster(restoring=True)
    (found,) = say(one, "ready", 0, step=4, differences=["seed: 1 when saved, 2 now"])
    assert found == e.DifferencesFound(
        at=5.0, generation=3, differences=("seed: 1 when saved, 2 now",)
    )
    lines = ["seed: 1 when saved, 2 now", "isa: a when saved, b now"]
    told = say(one, "ready", 1, step=4, differences=lines)
    assert names(told) == ["differences_found", "workers_restored"]
    assert told[0].to_dict()["differences"] == ("isa: a when saved, b now",)


def test_a_standby_tells_that_its_task_would_be_traced_otherwise_by_now() -> None:
    """It trains by the program of its run; a person who changed a file should know."""
    one = roster(standby=True)
    assert say(one, "program_retraced", difference="") == []
    (found,) = say(one, "program_retraced", difference="traced program: a, b by now")
    assert names([found]) == ["differences_found"]
    assert say(one, "program_retraced", 1, difference="traced program: a, b by now") == []
