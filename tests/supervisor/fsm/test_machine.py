"""The door and the machine: stale words change nothing, bugs change nothing, replays agree."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.fsm import events as e
from supervisor.fsm.effects import (
    KillWorkers,
    PrepareStandby,
    RestoreWorkers,
    SetDeadline,
    StartWorkers,
)
from supervisor.fsm.job import Job, Limits
from supervisor.fsm.machine import JobMachine, OutcomeOfNothing, UnexpectedEvent, table_digest
from supervisor.fsm.states import TERMINAL, State
from supervisor.fsm.table import IMPOSSIBLE
from supervisor.record.replay import replay

OUTCOMES = (
    e.SlotsPlaced, e.CapacityMissing, e.CapacityFound, e.PlacementTimedOut, e.PlacementFailed,
    e.WorkersGone, e.ExitUnproven,
)  # fmt: skip
EXTERNAL = [event for event in e.EVENTS.values() if event not in e.RAISED]


def crashed(generation: int = 1, **given: Any) -> e.WorkerCrashed:
    facts: dict[str, Any] = {"ranks": (1,), "status": None, "signal": "SIGKILL", "phase": "step"}
    facts |= {"step": 5, "primary": True, "detail": ""}
    return e.WorkerCrashed(at=1.0, generation=generation, **{**facts, **given})


def selected(generation: int = 1, step: int = 0) -> e.RestorePointSelected:
    kind = "checkpoint" if step else "seed"
    return e.RestorePointSelected(
        at=0.0, generation=generation, kind=kind, step=step, path="p" if step else "", saved_by=0
    )


def running(**given: Any) -> JobMachine:
    """A machine whose generation 1 trains."""
    machine = JobMachine(Job(**given))
    placed = e.SlotsPlaced(at=0.0, generation=1, placement=1, slots=())
    for event in (
        e.JobStarted(at=0.0, after=""),
        selected(),
        placed,
        e.WorkersInitialized(at=0.0, generation=1, step=0),
    ):
        machine.handle(event)
    assert machine.job.state is State.RUNNING
    return machine


def test_a_late_word_from_a_dead_generation_is_recorded_and_changes_nothing() -> None:
    """A frozen worker that wakes up an hour later must not end the generation that replaced it."""
    machine = running()
    machine.handle(crashed())
    machine.handle(e.EvidenceCollected(at=2.0, generation=1, missing=()))
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    machine.handle(selected(2))
    before = machine.job.to_dict()
    (move,) = machine.handle(crashed(1))
    assert move.why.startswith("stale")
    assert move.effects == ()
    assert machine.job.to_dict() == before


def test_a_generation_that_was_never_issued_is_a_bug() -> None:
    """A number out of nowhere means that somebody else writes into our inbox."""
    with pytest.raises(UnexpectedEvent, match="never issued"):
        running().handle(crashed(2))


def test_a_standby_may_not_speak_for_the_active_generation() -> None:
    """Roles are in the core from the start: a crash of a standby is no crash of the job."""
    machine = running()
    machine.job.generation, machine.job.standby = 2, 2
    (move,) = machine.handle(crashed(2))
    assert move.target is State.RUNNING
    assert move.effects == ()


def test_a_leaving_generation_leaves_once() -> None:
    """Its exit ends its role; whatever else it says is stale."""
    machine = running()
    machine.job.generation, machine.job.active, machine.job.leaving = 2, 2, (1,)
    (move,) = machine.handle(crashed(1))
    assert "leaving" in move.why
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    assert not machine.job.leaving
    assert machine.job.state is State.RUNNING


def lost(machine: JobMachine) -> tuple[list[str], float]:
    """The standby fails, is ended, and the pause passes: what was raised, and the pause."""
    standby = machine.job.standby
    assert standby is not None
    moves = machine.handle(e.StandbyLost(at=5.0, generation=standby, ranks=(0,), why="w"))
    (move,) = machine.handle(e.WorkersGone(at=6.0, generation=standby, exits=()))
    (deadline,) = move.effects
    assert isinstance(deadline, SetDeadline)
    passed = e.DeadlinePassed(at=7.0, id=deadline.id, owner=deadline.owner)
    (due,) = machine.handle(passed)
    assert [type(effect) for effect in due.effects] == [PrepareStandby]
    return [move.event.name for move in moves[1:]], deadline.seconds


def test_standbys_that_failed_often_are_tried_again_after_growing_pauses() -> None:
    """Three bad minutes of a node cost a run of weeks its standby: it was never tried again."""
    machine = running(limits=Limits(standby="generation"))
    machine.handle(e.FirstStepTaken(at=1.0, generation=1, step=0))
    told = [lost(machine) for _ in range(11)]
    pauses = [pause_s for _, pause_s in told]
    assert pauses == [1, 2, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert [raised for raised, _ in told if raised] == [["standby_disabled"]]
    ready = e.StandbyReady(at=8.0, generation=machine.job.generation, start_s=1.0, memory_mb=1.0)
    machine.handle(ready)
    assert lost(machine) == ([], 1)


@pytest.mark.parametrize("kind", OUTCOMES, ids=lambda kind: kind.name)
def test_the_outcome_of_an_order_that_was_never_given_is_a_bug(kind: type[e.Event]) -> None:
    """Slots that no one asked for, or an end that no one ordered, would let a second generation
    start beside the first."""
    machine = JobMachine(Job())
    machine.handle(e.JobStarted(at=0.0, after=""))
    before = machine.job.to_dict()
    with pytest.raises(OutcomeOfNothing, match=f"{kind.__name__}.* never ordered"):
        machine.handle(_make(kind, 1, 0))
    assert machine.job.to_dict() == before


def test_the_walk_that_launched_two_generations_is_refused_at_its_first_step() -> None:
    """Slots placed, a restore point rejected, workers gone, a restore point selected, after
    nothing but a start: two generations were launched, and no order had ended the first."""
    machine = JobMachine(Job())
    machine.handle(e.JobStarted(at=0.0, after=""))
    with pytest.raises(OutcomeOfNothing, match="SlotsPlaced"):
        machine.handle(_make(e.SlotsPlaced, 1, 0))
    machine.handle(selected())
    machine.handle(_make(e.SlotsPlaced, 1, 0))
    rejected = e.RestorePointRejected(at=1.0, generation=1, ranks=(0,), path="p", why="digest")
    machine.handle(rejected)
    with pytest.raises(OutcomeOfNothing, match="WorkersGone"):
        machine.handle(e.WorkersGone(at=2.0, generation=1, exits=()))


def restoring() -> JobMachine:
    """A machine that waits for the answer where to go on from; generation 2 is not started."""
    machine = running()
    machine.handle(crashed())
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    assert machine.job.state is State.RESTORING
    return machine


def test_a_restore_point_that_is_told_twice_starts_workers_once() -> None:
    """A daemon that comes back asks again; both answers may arrive."""
    machine = restoring()
    (first,) = machine.handle(selected(2))
    assert [type(effect) for effect in first.effects] == [RestoreWorkers]
    (second,) = machine.handle(selected(2))
    assert second.effects == ()


@pytest.mark.parametrize("event", [
    e.WorkersRestored(at=4.0, generation=2, step=0),
    e.RestorePointRejected(at=4.0, generation=2, ranks=(0,), path="p", why="digest"),
], ids=lambda event: event.name)  # fmt: skip
def test_what_only_a_started_generation_can_report_changes_nothing_before(event: e.Event) -> None:
    """Without workers there is nothing to train, and nothing that was loaded."""
    machine = restoring()
    (move,) = machine.handle(event)
    assert (move.target, move.effects) == (State.RESTORING, ())


def test_a_doubt_about_slots_that_are_gone_does_not_touch_the_new_ones() -> None:
    """The exit of the standby could not be proven in slots that were being placed anew already."""
    machine = running(limits=Limits(standby="generation"))
    machine.handle(e.FirstStepTaken(at=1.0, generation=1, step=0))
    machine.handle(e.SlotLost(at=2.0, generation=1, ranks=(0,), why="w"))
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    machine.handle(selected(3))
    machine.handle(e.ExitUnproven(at=4.0, generation=2, unproven=("pid 7 on n",), exits=()))
    machine.handle(e.SlotsPlaced(at=5.0, generation=3, placement=2, slots=()))
    assert machine.job.slots_placed
    assert not machine.job.quarantined
    assert machine.job.unproven == ("pid 7 on n",)


def test_slots_are_used_again_once_what_was_in_doubt_there_is_proven_gone() -> None:
    """A standby that could not be ended for a while had the next recovery place all slots anew."""
    machine = running(limits=Limits(standby="generation"))
    machine.handle(e.FirstStepTaken(at=1.0, generation=1, step=0))
    machine.handle(e.StandbyLost(at=2.0, generation=2, ranks=(0,), why="w"))
    machine.handle(e.ExitUnproven(at=3.0, generation=2, unproven=("pid 7 on n",), exits=()))
    assert machine.job.quarantined
    (move,) = machine.handle(e.ExitProven(at=4.0, proven=("pid 7 on n", "pid 8 on n")))
    assert not machine.job.quarantined
    assert machine.job.unproven == ()
    assert [type(effect).__name__ for effect in move.effects] == ["NotifyOperator"]


def test_a_proof_for_one_process_leaves_the_doubt_about_another() -> None:
    """Two ranks could not be ended; one of them is gone by now."""
    machine = running(limits=Limits(standby="generation"))
    machine.handle(e.FirstStepTaken(at=1.0, generation=1, step=0))
    machine.handle(e.StandbyLost(at=2.0, generation=2, ranks=(0,), why="w"))
    doubt = ("pid 7 on n", "pid 8 on n")
    machine.handle(e.ExitUnproven(at=3.0, generation=2, unproven=doubt, exits=()))
    machine.handle(e.ExitProven(at=4.0, proven=("pid 7 on n",)))
    assert machine.job.quarantined
    assert machine.job.unproven == ("pid 8 on n",)


def test_a_cluster_lost_after_its_slots_is_the_same_incident() -> None:
    """The node of the head takes slots and head with it: one after the other, one charge."""
    machine = running()
    machine.handle(e.NodeLost(at=2.0, generation=1, ranks=(0, 1), why="its node has died"))
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    (move,) = machine.handle(e.ClusterLost(at=4.0, why="the head has died"))
    assert (move.target, move.effects) == (State.RESTORING, ())
    assert len(machine.job.spent["node"]) == 1


def test_a_death_by_sigterm_is_a_failure_of_a_worker() -> None:
    """It went to a budget of its own without a limit, and could be repeated for ever."""
    machine = running()
    machine.handle(crashed(signal="SIGTERM"))
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    assert list(machine.job.spent) == ["worker"]


def test_a_raised_event_from_outside_is_a_bug() -> None:
    """Nobody but the core grants a retry."""
    granted = e.RetryGranted(at=0.0, generation=1, budget="worker", spent=1, limit=9, backoff_s=0.0)
    with pytest.raises(UnexpectedEvent, match="wrong side"):
        running().handle(granted)


def test_a_bug_changes_nothing() -> None:
    """The machine works on a copy: after an exception the job is what it was."""
    machine = running()
    before = machine.job.to_dict()
    with pytest.raises(UnexpectedEvent):
        machine.handle(crashed(7))
    assert machine.job.to_dict() == before


def test_a_deadline_is_void_when_its_owner_has_ended() -> None:
    """A backoff of an earlier RESTORING must not start workers in a later one."""
    machine = running()
    stale = e.DeadlinePassed(at=9.0, id="backoff", owner="entry:1")
    (move,) = machine.handle(stale)
    assert move.why.startswith("stale")


def test_no_workers_start_before_the_last_ones_are_gone() -> None:
    """Two living generations could both write checkpoints."""
    machine = running()
    moves = machine.handle(crashed())
    moves += machine.handle(e.EvidenceCollected(at=2.0, generation=1, missing=()))
    assert [type(x) for move in moves for x in move.effects].count(KillWorkers) == 1
    assert not any(isinstance(x, StartWorkers) for move in moves for x in move.effects)
    machine.handle(e.WorkersGone(at=3.0, generation=1, exits=()))
    (move,) = machine.handle(selected(2))
    assert [type(x) for x in move.effects] == [RestoreWorkers]


def test_the_job_survives_its_own_record() -> None:
    """The daemon rebuilds itself from the `job` line of the journal."""
    machine = running()
    machine.handle(crashed())
    record = json.loads(json.dumps(machine.job.to_dict()))
    assert Job.from_dict(record) == machine.job


@pytest.mark.parametrize("event", EXTERNAL, ids=lambda event: event.name)
def test_an_event_survives_its_own_record(event: type[e.Event]) -> None:
    """What replay reads is what was handled."""
    made = _make(event, 1, 0)
    record = json.loads(json.dumps(made.to_dict()))
    assert e.Event.from_dict(record).to_dict() == e.Event.from_dict(made.to_dict()).to_dict()


@pytest.mark.parametrize(
    "record",
    [{}, {"event": "worker_exploded"}, {"event": "job_started"}, {"event": ["job_started"]},
     {"event": "job_started", "at": 0, "after": "", "colour": "red"}],
)  # fmt: skip
def test_an_unreadable_event_says_what_is_wrong(record: dict[str, Any]) -> None:
    """A trace of another version must not raise a TypeError from nowhere."""
    with pytest.raises(e.UnreadableEvent, match=r"event|field"):
        e.Event.from_dict(record)


def _make(kind: type[e.Event], generation: int, salt: int) -> e.Event:
    """An event with plausible fields."""
    values: dict[str, Any] = {
        "at": float(salt), "generation": generation, "ranks": (salt % 2,), "stalled": (0, 1),
        "error": {"type": "KeyError", "message": "x", "frame": "f", "user": salt % 3 == 0},
        "missing": (), "exits": ((0, None, "SIGKILL"),), "slots": (), "pids": (), "step": salt,
        "owner": f"entry:{salt % 9}", "id": ("last_call", "backoff", "drain", "capacity")[salt % 4],
        "primary": salt % 2 == 0, "now": salt % 5 == 0, "by": "operator", "unproven": ("pid 1",),
        "status": None, "signal": "SIGKILL", "kind": "checkpoint" if salt % 2 else "seed",
        "loss": None, "held_out_loss": None,
    }  # fmt: skip
    given: dict[str, Any] = {}
    for field in fields(kind):
        kinds = {"str": "x", "int": 1, "float": 1.0, "bool": False}
        value = values.get(field.name, kinds.get(str(getattr(field.type, "__name__", "")), "x"))
        if field.name == "error" and field.type is str:
            value = "an error"
        given[field.name] = value
    return kind(**given)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EXTERNAL), st.integers(0, 40)), max_size=60))
def test_random_walks_keep_the_invariants_and_replay(
    story: list[tuple[type[e.Event], int]],
) -> None:
    """Whatever happens in whatever order, the promises of the core hold."""
    limits = Limits(failures_max=3, no_progress_max=2)
    machine = JobMachine(Job(limits=limits))
    header = {"kind": "header", "seq": 1, "table": table_digest(), "schema": 1}
    first = {"kind": "job", "seq": 2, "job": json.loads(json.dumps(machine.job.to_dict()))}
    records: list[dict[str, Any]] = [header, first]
    started: list[tuple[type[e.Event], int]] = [(e.JobStarted, 0), *story]
    killed: set[int] = set()
    launched: list[int] = []
    for kind, salt in started:
        job = machine.job
        generation = max(1, job.generation - (salt % 7 == 6))
        if (kind, job.state) in IMPOSSIBLE or (not job.generation and kind is not e.JobStarted):
            continue
        state = job.state
        try:
            moves = machine.handle(_make(kind, generation, salt))
        except OutcomeOfNothing:
            assert kind in OUTCOMES
            assert machine.job is job
            continue
        for move in moves:
            records.append({"kind": "move", "seq": 0, **json.loads(json.dumps(move.to_dict()))})
            killed |= {x.generation for x in move.effects if isinstance(x, KillWorkers)}
            for effect in move.effects:
                if isinstance(effect, StartWorkers):
                    assert all(earlier in killed for earlier in launched)
                    launched.append(effect.generation)
        assert launched == sorted(set(launched)), "a generation was started twice"
        assert len(machine.job.spent.get("worker", ())) <= limits.failures_max
        if state in TERMINAL:
            assert machine.job.state is state
        if machine.job.state in TERMINAL:
            assert machine.job.exit_status >= 0
    report = replay(records)
    assert report.difference == ""


def failed_save(step: int, *, disk_is_fine: bool = True) -> e.CheckpointFailed:
    return e.CheckpointFailed(
        at=1.0, generation=1, step=step, error="no such path", disk_is_fine=disk_is_fine
    )


def test_a_job_that_can_never_save_says_so_and_stops_after_three_saves() -> None:
    """It trained for a week, and the last save of the stop failed like all others."""
    machine = running()
    (move,) = machine.handle(failed_save(10))
    assert "NOTHING IS SAVED so far" in str(move.effects)
    machine.handle(failed_save(20))
    (move,) = machine.handle(failed_save(30))
    assert (move.target, machine.job.exit_status) == (State.DRAINING, 4)
    assert "no such path" in machine.job.reason


def test_failed_saves_on_a_full_disk_or_after_good_ones_stop_nothing() -> None:
    """A full disk gets room again, and a job that has saved has something to go back to."""
    machine = running()
    for step in range(10):
        machine.handle(failed_save(step, disk_is_fine=False))
    saved = e.CheckpointCommitted(at=1.0, generation=1, step=11, path="p", duration_s=1.0)
    machine.handle(saved)
    for step in range(12, 20):
        machine.handle(failed_save(step))
    assert machine.job.state is State.RUNNING


def test_restore_points_that_are_rejected_without_end_fail_the_job() -> None:
    """Workers of a deleted run wrote new ones: RESTORING looped, without a pause or a charge."""
    machine = running(rejections=21, committed_step=5)
    machine.handle(crashed())
    states = []
    for generation in (2, 3):
        for event in (
            e.WorkersGone(at=2.0, generation=generation - 1, exits=()),
            selected(generation, step=5),
            e.RestorePointRejected(at=3.0, generation=generation, ranks=(0,), path="p", why="bad"),
            e.RestorePointQuarantined(at=4.0, path="p"),
        ):
            machine.handle(event)
        states.append((machine.job.state, machine.job.exit_status))
    assert states == [(State.DRAINING, -1), (State.DRAINING, 4)]
