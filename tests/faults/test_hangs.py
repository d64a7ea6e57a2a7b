"""Workers that stand still are found; workers that are only slow are left alone."""

from __future__ import annotations

import json
import signal

import pytest
from redis import Redis

from tests.faults.conftest import MakeJob
from tests.faults.harness import Job, Numbers, limit_of

full = pytest.mark.full

SLOW = 6.5  # times longer than usual
SLOW_S = 3.0  # at least: usual is a hundredth of a second for some


def test_a_worker_that_stands_still_is_found_within_its_deadline(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """JAX never notices: its own heartbeats come from a thread (jax#38503, marin#7344)."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_listening()
    daemon.order(1, "sleep", step=25)  # for ever
    hung = daemon.until("progress_stalled")
    slept_at = tiny.struck_at(1, 1)
    daemon.until_committed(above=30)
    stopped_at = [daemon.strike(1, signal.SIGSTOP)]
    daemon.until("first_step_taken", generation=3)
    daemon.until_committed(above=40)
    stopped_at.append(daemon.strike(0, signal.SIGSTOP))
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert (hung["phase"], hung["step"], hung["ranks"], hung["stalled"]) == (
        "step",
        25,
        [1],
        [0, 1],
    )
    assert hung["silence_s"] > hung["deadline_s"]
    tiny.figures.add(
        "hang in a step to its verdict (s)",
        hung["at"] - slept_at,
        f"deadline {hung['deadline_s']} s",
    )
    # A beat is sent and polled every quarter of a second, and a slot is asked before the verdict.
    assert hung["at"] - slept_at < hung["deadline_s"] + 1.0
    others = [one for one in tiny.failures() if one["event"] != "worker_crashed"][1:]
    assert [one["ranks"] for one in others] == [[1], [0]]
    for rank, at, event in zip((1, 0), stopped_at, others, strict=True):
        limit_s = limit_of(event)
        note = f"{event['event']}, limit {limit_s} s"
        tiny.figures.add(f"SIGSTOP of rank {rank} to its verdict (s)", event["at"] - at, note)
        assert event["at"] - at < limit_s + 1.0
    stacks = (tiny.run_dir / "incidents" / "0001" / "stacks-rank-1.txt").read_text()
    assert "_strike" in stacks  # where it sleeps
    assert (tiny.run_dir / "incidents" / "0002" / "stacks-rank-1.txt").read_text()
    tiny.note_recoveries("hang")


@full
def test_phases_that_take_six_times_longer_give_no_verdict(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Alarmed by compilation, by a save, by one slow reader (marin#8543, dlrover#1730)."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_committed(above=10)
    usual = durations(tiny)
    slept = {phase: max(SLOW_S, SLOW * longest) for phase, longest in usual.items()}
    for phase, step, rank in (("evaluate", 39, 1), ("checkpoint", 49, 0)):
        daemon.order(rank, "sleep", phase=phase, step=step, seconds=slept[phase])
    for phase, rank in (("compile", 1), ("restore", 0)):
        daemon.order(rank, "sleep", phase=phase, seconds=slept[phase])
    daemon.strike(1)
    assert daemon.exit_status(240) == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1  # the kill, and no verdict
    for phase in ("compile", "restore", "evaluate", "checkpoint"):
        assert f"phase={phase}" in tiny.log(2, 0) + tiny.log(2, 1)  # it did sleep
        tiny.figures.add(f"{phase}: usual (s)", usual[phase], f"slept {slept[phase]:.2f} s")


@full
def test_a_rank_that_never_comes_is_named_within_its_deadline(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Blind before the first step: a start without an end (marin#8543, CASES 2)."""
    tiny = job(**{"deadlines.initialize_s": 8.0})
    daemon = tiny.start()
    daemon.until_listening()
    daemon.order(1, "sleep", phase="initialize")
    started = daemon.until("workers_started", generation=1)
    stalled = daemon.until("progress_stalled")
    assert (stalled["ranks"], stalled["phase"]) == ([1], "initialize")
    late_s = stalled["at"] - started["at"]
    tiny.figures.add("a rank that never joins to its verdict (s)", late_s, "deadline 8 s")
    assert 8.0 < late_s < 9.5
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    tiny.note_recoveries("missing rank")


@full
@pytest.mark.parametrize("phase", ["evaluate", "checkpoint"])
def test_a_hang_outside_the_steps_is_found_by_the_deadline_of_its_phase(
    job: MakeJob, undisturbed: Numbers, phase: str
) -> None:
    """Each phase has its own limit, and the victims in the next one are not blamed."""
    tiny = job(**{f"deadlines.{phase}_s": 4.0})
    daemon = tiny.start()
    daemon.until_listening()
    daemon.order(0, "sleep", phase=phase, step=29)
    stalled = daemon.until("progress_stalled")
    assert (stalled["ranks"], stalled["phase"]) == ([0], phase)
    late_s = stalled["at"] - tiny.struck_at(1, 0)
    tiny.figures.add(f"hang in {phase} to its verdict (s)", late_s, "deadline 4 s")
    assert 4.0 < late_s < 5.5
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)


def durations(tiny: Job) -> dict[str, float]:
    """The longest that each phase has taken so far, of any rank, by their heartbeats."""
    record = json.loads((tiny.run_dir / "embedded.json").read_text())["redis"]
    found: dict[str, float] = {}
    with Redis(host="127.0.0.1", port=record["port"], password=record["password"]) as client:
        for key in client.keys("everstep:*:r*"):
            beat = json.loads(client.get(key))
            for phase, (_, longest) in beat["durations"].items():
                found[phase] = max(found.get(phase, 0.0), longest)
    return found
