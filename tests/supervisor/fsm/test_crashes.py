"""When a process that ends without a report has ended in the same way before."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.fsm import events as e
from supervisor.fsm.effects import SetDeadline
from supervisor.fsm.job import Job
from supervisor.fsm.machine import JobMachine
from supervisor.fsm.states import State


def crashes(**facts: Any) -> tuple[JobMachine, int]:
    """A job whose every generation crashes so, and how many it took to end it (10 at most).

    `details`: the last words of one generation after the other.
    """
    details = facts.pop("details", [""])
    crash = {"status": 1, "signal": None, "phase": "compile", "step": -1, **facts}
    machine = JobMachine(Job())
    machine.handle(e.JobStarted(at=1.0, after=""))
    for generation in range(1, 11):
        at = 1000.0 * generation
        machine.handle(
            e.RestorePointSelected(
                at=at, generation=generation, kind="seed", step=0, path="", saved_by=0
            )
        )
        if generation == 1:
            machine.handle(e.SlotsPlaced(at=at, generation=1, placement=1, slots=()))
        machine.handle(
            e.WorkerCrashed(
                at=at,
                generation=generation,
                ranks=(0,),
                primary=True,
                detail=details[(generation - 1) % len(details)],
                **crash,
            )
        )
        moves = machine.handle(e.WorkersGone(at=at, generation=generation, exits=()))
        if machine.job.state is State.FAILED:
            return machine, generation
        for effect in (effect for move in moves for effect in move.effects):
            if isinstance(effect, SetDeadline):
                passed = e.DeadlinePassed(at=at + 100.0, id=effect.id, owner=effect.owner)
                machine.handle(passed)
    return machine, 0


@pytest.mark.parametrize(
    ("facts", "generations"),
    [
        ({}, 3),
        ({"status": None, "signal": "SIGSEGV", "phase": "step", "step": 7}, 3),
        ({"details": ["pid 71 at 0x7f1a: refused", "pid 98 at 0x7f2b: refused"]}, 3),
        ({"phase": "launch", "details": ["a\nAttributeError: no 'Empty'"]}, 2),
        ({"status": None, "signal": "SIGABRT", "phase": "initialize"}, 2),
    ],
)
def test_a_crash_that_repeats_itself_ends_the_job(facts: dict[str, Any], generations: int) -> None:
    """A module that hid the standard library's was retried for minutes: a crash had no signature.
    What ends a process before it has met its peers or the task is final the second time."""
    machine, took = crashes(**facts)
    assert (took, machine.job.exit_status) == (generations, 4)
    last_words = facts.get("details", [""])[0].rpartition("\n")[2]
    if facts.get("phase") == "launch":
        assert machine.job.reason.endswith(last_words)


@pytest.mark.parametrize(
    "facts",
    [
        {"details": ["one thing", "another"]},
        {"status": None, "signal": "SIGKILL"},  # from outside: no error of the process
    ],
)
def test_crashes_that_differ_or_come_from_outside_spend_the_budget(facts: dict[str, Any]) -> None:
    """A host that is short of memory must not be taken for a job that cannot work."""
    _, took = crashes(**facts)
    assert took not in (2, 3)
