"""Workers that die, each phase and each way: the job goes on and computes what it would have."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Numbers, free_ports, gone, until

full = pytest.mark.full


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=full)])
def test_a_worker_killed_in_every_phase_costs_no_bit(
    job: MakeJob, undisturbed: Numbers, rank: int
) -> None:
    """Each phase leaves something else half done: a rendezvous, a program, a save."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_listening()
    daemon.order(rank, "kill", phase="initialize")
    daemon.order(rank, "kill", phase="compile")
    daemon.order(rank, "kill", phase="step", step=15)
    daemon.order(rank, "kill", phase="evaluate", step=29)
    daemon.order(rank, "kill", phase="checkpoint", step=39)
    daemon.until("workers_restored", generation=3)
    daemon.order(rank, "kill", phase="restore")
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    struck = [
        (event["generation"], event["phase"], event["step"], event["ranks"], event["signal"])
        for event in tiny.events("worker_crashed", primary=True)
    ]
    assert struck == [
        (1, "initialize", -1, [rank], "SIGKILL"),
        (2, "compile", -1, [rank], "SIGKILL"),
        (3, "step", 15, [rank], "SIGKILL"),
        (4, "restore", -1, [rank], "SIGKILL"),
        (5, "evaluate", 29, [rank], "SIGKILL"),
        (6, "checkpoint", 39, [rank], "SIGKILL"),
    ]
    # The save before the last death may or may not have ended with rank 0.
    resumed = [event["step"] for event in tiny.events("workers_restored")]
    assert resumed[0] == 0
    assert resumed[1] in (0, 10)
    tiny.note_recoveries(f"kill rank {rank}")


def test_a_death_is_in_the_journal_within_a_tenth_of_a_second(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Ray tells of a death late and without its cause; the slot sees it at once (FACTS 6)."""
    tiny = job()
    daemon = tiny.start()
    struck = [(0, signal.SIGKILL), (1, signal.SIGSEGV), (1, signal.SIGKILL)]
    since = []
    for count, (rank, number) in enumerate(struck):
        daemon.until_committed(above=count * 10)
        since.append(daemon.strike(rank, number))
        daemon.until("first_step_taken", generation=count + 2)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    deaths = tiny.events("worker_crashed", primary=True)
    assert [(event["ranks"], event["signal"], event["status"]) for event in deaths] == [
        ([rank], number.name, None) for rank, number in struck
    ]
    late = [event["at"] - at for at, event in zip(since, deaths, strict=True)]
    for seconds in late:
        tiny.figures.add("death of a worker to its line in the journal (s)", seconds)
    # The daemon's clock is the wall's at its start and monotonic since: they drift apart a little.
    assert all(-0.01 < seconds < 0.1 for seconds in late), late
    tiny.note_recoveries("killed from outside")


@full
def test_a_worker_may_end_in_any_way(job: MakeJob, undisturbed: Numbers) -> None:
    """An exit with status 0 is a death like any other; an exception names its rank (CASES 17)."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_listening()
    daemon.order(0, "exit", step=12)
    daemon.order(1, "raise", step=22)
    daemon.order(0, "allocate", step=32)
    daemon.order(1, "segfault", step=42)
    daemon.order(0, "hold-gil", step=52)
    assert daemon.exit_status(180) == 0
    tiny.must_equal(undisturbed)
    told = [
        (event["event"], event["ranks"], event["step"])
        for event in tiny.failures()
        if event.get("primary", True)
    ]
    assert told[:4] == [
        ("worker_crashed", [0], 12),
        ("worker_raised", [1], 22),
        ("worker_raised", [0], 32),
        ("worker_crashed", [1], 42),
    ]
    assert told[4][0] in ("progress_stalled", "heartbeat_lost")
    assert told[4][1:] == ([0], 52)
    crashes = tiny.events("worker_crashed", primary=True)
    assert [(event["status"], event["signal"]) for event in crashes] == [
        (0, None),
        (None, "SIGSEGV"),
    ]
    errors = [event["error"]["type"] for event in tiny.events("worker_raised", primary=True)]
    assert errors == ["DrillError", "MemoryError"]
    tiny.note_recoveries("drill")


@full
def test_a_process_that_will_not_go_never_meets_its_successor(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Dead on paper, alive on the device: a lock and a port tell (ray#59872, marin#4690)."""
    tiny = job(**{"trainer.task": "paced:Stubborn", "trainer.options.port": free_ports(2)})
    daemon = tiny.start()
    daemon.until_committed()
    held = tiny.processes(EVERSTEP_GENERATION="1")
    assert len(held) == 4  # each rank, and the child that it started in a session of its own
    for rank in (0, 1):
        daemon.strike(rank, signal.SIGTERM)
    daemon.until_committed(above=20)
    assert tiny.failures() == []
    daemon.strike(1)
    daemon.until("workers_gone")
    assert all(gone(one) for one in held)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert not (tiny.folder / "overlap").exists(), (tiny.folder / "overlap").read_text()


@full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_that_is_killed_is_placed_anew(
    job: MakeJob, undisturbed: Numbers, rank: int
) -> None:
    """An actor dies with its node, or under memory pressure: its child must not outlive it."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_committed()
    worker, slot = daemon.worker(rank), daemon.slot(rank)
    at = daemon.signal_pid(slot.pid, signal.SIGKILL)
    lost = daemon.until("slot_lost")
    assert lost["ranks"] == [rank]
    tiny.figures.add(f"death of rank {rank}'s slot to its line (s)", lost["at"] - at)
    until(lambda: gone(worker), "end of the child of a dead slot", 5)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert [event["placement"] for event in tiny.events("slots_placed")] == [1, 2]
    tiny.note_recoveries(f"slot of rank {rank} killed")


@full
def test_a_shared_store_keeps_no_key_of_the_job(
    job: MakeJob, undisturbed: Numbers, redis_server: str
) -> None:
    """Keys of dead generations are rubbish in a store that others use too."""
    tiny = job(**{"heartbeats.redis_url": redis_server, "control.drills": True})
    daemon = tiny.start()
    daemon.until_committed()
    daemon.strike(1)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    from redis import Redis

    with Redis.from_url(redis_server) as client:
        assert client.keys("everstep:*") == []
