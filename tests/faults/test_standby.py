"""Recovery in a blink, and what follows where it fails: each rung is struck, the next one holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.disk.run_directory import open_directory, settle
from tests.faults.conftest import MakeJob
from tests.faults.harness import EVERY_STEPS, Daemon, Job, Numbers, gone, limit_of, run, until
from trainer.host.processes import Identity, look
from trainer.state import snapshot

full = pytest.mark.full

PACE_S = 0.15
STANDBY: dict[str, Any] = {
    "recovery.standby": "generation",
    "recovery.snapshot_every_steps": 1,
    "trainer.options.pace_s": PACE_S,
}


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=full)])
def test_a_killed_worker_costs_the_step_in_flight_and_nothing_else(
    job: MakeJob, undisturbed: Numbers, rank: int
) -> None:
    """Tens of seconds and ten steps, elsewhere: here the next generation is there already."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    ready = daemon.until("standby_ready", generation=2)
    tiny.figures.add("standby: start (s)", ready["start_s"], f"{ready['memory_mb']:.0f} MB")
    at, step = strike_in_a_step(daemon, rank)
    first = daemon.until("first_step_taken", generation=2)
    tiny.figures.add(
        f"standby, kill of rank {rank}: kill to the end of the next step (s)",
        ended_at(tiny, 2, step) - at,
        f"a step takes {PACE_S} s",
    )
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    crash = tiny.events("worker_crashed", primary=True)[0]
    assert (crash["generation"], crash["ranks"], crash["step"]) == (1, [rank], step)
    assert first["step"] == step
    assert done_twice(tiny) == []
    assert orders(tiny, "PromoteStandby") == [promotion(2, "snapshot", step, saved_by=1)]
    assert orders(tiny, "RestoreWorkers") == []
    assert [one["generation"] for one in orders(tiny, "PrepareStandby")] == [2, 3]
    told = [move["event"]["event"] for move in tiny.moves()]
    path = ["worker_crashed", "workers_gone", "retry_granted", "workers_restored"]
    recovery = told[told.index("worker_crashed") : told.index("workers_restored") + 1]
    assert [name for name in dict.fromkeys(recovery) if name in path] == path
    tiny.note_recoveries(f"standby, rank {rank}")


@full
def test_a_second_kill_finds_the_standby_half_built_and_waits_for_it(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """What is half built is nearer to its end than what is not begun."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    strike_in_a_step(daemon, 1)
    daemon.until("first_step_taken", generation=2)
    _, second = strike_in_a_step(daemon, 0)  # its successor's processes have only just begun
    daemon.until("first_step_taken", generation=3)
    await_standby(daemon, 4)
    _, third = strike_in_a_step(daemon, 1)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.events("standby_ready", generation=3) == []
    assert tiny.events("standby_ready", generation=4) == []
    promoted = orders(tiny, "PromoteStandby")
    assert promoted[1:] == [
        promotion(3, "snapshot", second, saved_by=2),
        promotion(4, "snapshot", third, saved_by=3),
    ]
    assert done_twice(tiny) == []
    assert orders(tiny, "RestoreWorkers") == []
    tiny.note_recoveries("half-built standby")


def test_a_standby_that_dies_is_built_anew_and_costs_the_job_nothing(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A spare wheel that bursts is no accident."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    workers = active_pids(daemon)
    struck = [identity(pid) for pid in standby_pids(daemon, 2)]
    daemon.signal_pid(struck[1].pid, signal.SIGKILL)
    lost = daemon.until("standby_lost", generation=2)
    assert lost["ranks"] == [1]
    assert "SIGKILL" in lost["why"]
    daemon.until("standby_ready", generation=3)
    assert all(gone(one) for one in struck)  # its other half went with it
    assert active_pids(daemon) == workers
    assert daemon.status()["budgets"]["worker"]["spent"] == 0
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0
    assert done_twice(tiny) == []


@full
def test_a_standby_that_dies_again_and_again_is_given_up(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """What fails again and again costs more than it gives; the next rung is still there."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("first_step_taken")
    for generation in (2, 3, 4):
        await_standby(daemon, generation)
        daemon.signal_pid(standby_pids(daemon, generation)[0], signal.SIGKILL)
        daemon.until("standby_lost", generation=generation)
    daemon.until("standby_disabled")
    assert daemon.status()["standby"]["disabled"]
    _, step = strike_in_a_step(daemon, 1)
    assert daemon.until("first_step_taken", generation=5)["step"] == step
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert orders(tiny, "PromoteStandby") == []
    assert [one["generation"] for one in orders(tiny, "PrepareStandby")] == [2, 3, 4]
    assert charges(tiny) == ["worker"]
    tiny.note_recoveries("standby given up")


@full
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_both_generations_may_die_at_once(
    job: MakeJob, undisturbed: Numbers, ranks: tuple[int, ...]
) -> None:
    """One cause, such as memory, may take both: new workers then start in the slots."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    pids = [pids[rank] for rank in ranks for pids in (active_pids(daemon), standby_pids(daemon, 2))]
    step = within_a_step(tiny)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    first = daemon.until("first_step_taken", generation=3)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert first["step"] == step
    assert done_twice(tiny) == []
    assert [one["generation"] for one in orders(tiny, "RestoreWorkers")] == [3]
    assert charges(tiny) == ["worker"]
    tiny.note_recoveries(f"both generations, ranks {ranks}")


@full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_that_dies_takes_both_generations_along_and_no_step(
    job: MakeJob, undisturbed: Numbers, rank: int
) -> None:
    """The standby lives in the same slots; the snapshot outlives all of them."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    pids = (*active_pids(daemon), *standby_pids(daemon, 2))
    processes = [identity(pid) for pid in pids]
    step = within_a_step(tiny)
    daemon.signal_pid(daemon.slot(rank).pid, signal.SIGKILL)
    first = daemon.until("first_step_taken", generation=3)
    assert all(gone(one) for one in processes)
    daemon.until_move(
        lambda move: (
            any(one["effect"] == "PrepareStandby" for one in move["effects"])
            and move["event"].get("generation") == 3
        ),
        "a new standby",
    )
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert first["step"] == step
    assert done_twice(tiny) == []
    assert [event["placement"] for event in tiny.events("slots_placed")] == [1, 2]
    started = [one for one in orders(tiny, "StartWorkers") if one["generation"] == 3]
    assert [(one["kind"], one["step"]) for one in started] == [("snapshot", step)]
    assert orders(tiny, "PromoteStandby") == []
    assert charges(tiny) == ["worker"]
    tiny.note_recoveries(f"slot of rank {rank} with a standby")


@full
@pytest.mark.parametrize("built", ["ready", "half-built"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_standby_that_dies_while_it_takes_over_is_followed_by_new_workers(
    job: MakeJob, undisturbed: Numbers, built: str, rank: int
) -> None:
    """The same trouble goes on: it is charged once, and the next rung is tried at once."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("workers_initialized", generation=1)
    daemon.order(rank, "kill", phase="restore")  # generation 1 is past it, the next one is told
    if built == "ready":
        daemon.until("standby_ready", generation=2)
    else:
        await_standby(daemon, 2)
    _, step = strike_in_a_step(daemon, 1)
    first = daemon.until("first_step_taken", generation=3)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert "drill " in tiny.log(2, rank)
    assert first["step"] == step
    assert done_twice(tiny) == []
    restored = orders(tiny, "RestoreWorkers")
    assert [(one["generation"], one["kind"], one["step"]) for one in restored] == [
        (3, "snapshot", step)
    ]
    assert charges(tiny) == ["worker"]
    assert tiny.result()["failures"] <= 2
    tiny.note_recoveries(f"kill of rank {rank} while a {built} standby takes over")


@pytest.mark.parametrize("damaged", [1, pytest.param(3, marks=full)])
def test_a_damaged_snapshot_goes_to_quarantine_and_the_next_one_is_used(
    job: MakeJob, undisturbed: Numbers, damaged: int
) -> None:
    """Memory rots too: each older one is tried before a checkpoint, and nothing committed is lost.

    Three buffers hold three snapshots; one that is older than the checkpoint is not tried.
    """
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    daemon.until_committed()
    within_a_step(tiny)
    stop(daemon, active_pids(daemon)[0])  # who writes them writes no more
    committed = tiny.events("checkpoint_committed", generation=1)[-1]
    held = [
        one
        for one in snapshot.list_snapshots(snapshot.directory_of(tiny.run_dir))
        if one.step >= committed["step"]
    ]
    assert held
    for one in held[:damaged]:
        flip_a_byte(one.path)
    daemon.strike(1)
    generation = 2 + min(damaged, len(held))
    restored = daemon.until("workers_restored", generation=generation)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    rejected = [(one["generation"], one["why"]) for one in tiny.events("restore_point_rejected")]
    assert {generation for generation, _ in rejected} == set(range(2, generation))
    assert all("checksum" in why for _, why in rejected)
    gone_bad = [(one["kind"], one["step"]) for one in orders(tiny, "QuarantineRestorePoint")]
    assert gone_bad == [("snapshot", one.step) for one in held[:damaged]]
    chosen = tiny.events("restore_point_selected", generation=generation)[-1]
    if damaged < len(held):
        assert (chosen["kind"], chosen["step"]) == ("snapshot", held[damaged].step)
    else:
        assert (chosen["kind"], chosen["step"]) == ("checkpoint", committed["step"])
    assert restored["step"] == chosen["step"]
    assert charges(tiny) == ["worker"]
    tiny.note_recoveries(f"{damaged} damaged snapshots")


@full
def test_a_full_shared_memory_costs_snapshots_and_nothing_else(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A mapped file on a full tmpfs is a SIGBUS in the middle of training (FACTS)."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("slots_placed")
    with small(snapshot.directory_of(tiny.run_dir)):
        failed = daemon.until("snapshot_failed", generation=1)
        assert "No space left" in failed["error"]
        daemon.until("standby_ready", generation=2)
        committed = daemon.until_committed()
        step = within_a_step(tiny)
        daemon.strike(1)
        daemon.until("first_step_taken", generation=2)
        daemon.until("snapshot_failed", generation=2)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    told = Counter(one["generation"] for one in tiny.events("snapshot_failed"))
    assert told == {1: 1, 2: 1}  # not at every step
    done = step // EVERY_STEPS * EVERY_STEPS
    assert done >= committed["step"]
    assert orders(tiny, "PromoteStandby") == [promotion(2, "checkpoint", done, saved_by=1)]
    assert done_twice(tiny) == list(range(done, step))
    assert charges(tiny) == ["worker"]
    tiny.note_recoveries("full shared memory")


@full
def test_a_directory_in_shared_memory_that_is_not_ours_alone_is_left_alone(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Anybody may make a directory of that name in /dev/shm; it must not keep a job from running.

    That is the business of whoever made it: nothing of it is used, and nothing is removed.
    """
    tiny = job(**STANDBY)
    open_directory(tiny.run_dir)
    settle(tiny.run_dir)  # from here on the name, which nobody can guess, is known to us
    directory = snapshot.directory_of(tiny.run_dir)
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    (directory / "theirs").write_text("of another user")
    try:
        daemon = tiny.start()
        failed = daemon.until("snapshot_failed")
        assert "not ours alone" in failed["error"]
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert [one.name for one in directory.iterdir()] == ["theirs"]
    finally:
        (directory / "theirs").unlink()
        directory.rmdir()


@full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_stands_still_is_followed_by_the_standby(
    job: MakeJob, undisturbed: Numbers, rank: int
) -> None:
    """JAX notices nothing; the verdict takes its deadline, the rest takes no time."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    at, step = strike_in_a_step(daemon, rank, signal.SIGSTOP)
    first = daemon.until("first_step_taken", generation=2)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    (verdict,) = [one for one in tiny.failures() if one["event"] != "worker_crashed"]
    assert verdict["event"] in ("heartbeat_lost", "progress_stalled")
    assert verdict["ranks"] == [rank]
    assert step - 2 <= verdict["step"] <= step  # as its last heartbeat told
    limit_s = limit_of(verdict)
    note = f"{verdict['event']}, limit {limit_s} s"
    tiny.figures.add(
        f"standby, SIGSTOP of rank {rank} to its verdict (s)", verdict["at"] - at, note
    )
    assert verdict["at"] - at < limit_s + 1.0
    assert first["step"] == step
    assert done_twice(tiny) == []
    assert orders(tiny, "PromoteStandby") == [promotion(2, "snapshot", step, saved_by=1)]
    tiny.note_recoveries("standby, SIGSTOP")


@full
def test_an_error_in_the_loop_strikes_once_and_is_followed_by_the_standby(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A drill that the standby was told of as well must not strike there again."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("workers_initialized", generation=1)
    daemon.order(1, "raise", step=45)  # in the spec of every generation that starts before it
    daemon.until("standby_ready", generation=2)
    first = daemon.until("first_step_taken", generation=2)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    raised = tiny.events("worker_raised", primary=True)
    assert [(one["ranks"], one["step"]) for one in raised] == [([1], 45)]
    assert first["step"] == 45
    assert done_twice(tiny) == []
    assert charges(tiny) == ["worker"]
    tiny.note_recoveries("standby, exception")


@full
def test_a_drill_that_was_ordered_beside_a_standby_finds_it_when_it_has_taken_over(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A drill waits for its step, whichever generation gets there."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    daemon.order(1, "kill", step=55)
    strike_in_a_step(daemon, 0)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    struck = tiny.events("worker_crashed", primary=True)
    assert [one["generation"] for one in struck] == [1, 2]
    assert (struck[1]["ranks"], struck[1]["step"]) == ([1], 55)


@full
def test_a_stop_beside_a_standby_leaves_nothing_and_resumes(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A standby must not outlive its job, nor must a snapshot."""
    tiny = job(**STANDBY)
    first = tiny.start()
    first.until("standby_ready", generation=2)
    stopped = run(tiny, "stop")
    assert stopped.returncode == 0
    assert first.exit_status() == 5
    tiny.must_leave_nothing()
    saved = tiny.events("workers_saved")[0]
    second = tiny.start()
    chosen = second.until("restore_point_selected")
    assert (chosen["kind"], chosen["step"]) == ("checkpoint", saved["step"])
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert done_twice(tiny) == []


@full
def test_the_next_daemon_adopts_a_standby_too(job: MakeJob, undisturbed: Numbers) -> None:
    """Who has not stopped for the daemon's death must not be slower to recover after it."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.3})
    first = tiny.start()
    first.until("standby_ready", generation=2)
    pids = active_pids(first), standby_pids(first, 2)
    first.kill()
    second = tiny.start()
    second.until("supervisor_restarted")
    assert (active_pids(second), standby_pids(second, 2)) == pids
    _, step = strike_in_a_step(second, 1)
    assert second.until("first_step_taken", generation=2)["step"] == step
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert done_twice(tiny) == []
    assert orders(tiny, "PromoteStandby") == [promotion(2, "snapshot", step, saved_by=1)]
    assert tiny.result()["failures"] == 1
    assert tiny.events("housekeeping_failed") == []


@full
def test_both_generations_of_a_dead_daemon_that_died_too_leave_their_newest_snapshot(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A machine may lose daemon and workers at once, and keep its memory."""
    tiny = job(**STANDBY)
    first = tiny.start()
    first.until("standby_ready", generation=2)
    step = within_a_step(tiny)
    pids = (*active_pids(first), *standby_pids(first, 2))
    first.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    second = tiny.start()
    stepped = second.until("first_step_taken", generation=3)
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert stepped["step"] == step
    assert done_twice(tiny) == []


@full
def test_spares_are_faster_than_a_cold_start(job: MakeJob, undisturbed: Numbers) -> None:
    """Importing is most of a start; a spare has that behind it, and costs no second world."""
    took: dict[str, float] = {}
    for mode in ("none", "spares"):
        tiny = job(**{**STANDBY, "recovery.standby": mode})
        daemon = tiny.start()
        daemon.until_step(10)
        if mode == "spares":
            await_spares(tiny, 2)
        at, step = strike_in_a_step(daemon, 1)
        first = daemon.until("first_step_taken", generation=2)
        took[mode] = ended_at(tiny, 2, step) - at
        tiny.figures.add(f"standby = {mode}: kill to the end of the next step (s)", took[mode])
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert first["step"] == step
        assert done_twice(tiny) == []
        restored = orders(tiny, "RestoreWorkers")
        assert [(one["kind"], one["step"]) for one in restored] == [("snapshot", step)]
        assert orders(tiny, "PrepareStandby") == []
        assert bool(orders(tiny, "PrepareSpares")) == (mode == "spares")
        for rank in (0, 1):  # each rank of each generation has its log, a spare's too
            assert "executable loaded" in tiny.log(2, rank)
        tiny.note_recoveries(f"standby = {mode}")
    assert took["spares"] < took["none"]


@full
def test_a_spare_that_dies_is_not_missed(job: MakeJob, undisturbed: Numbers) -> None:
    """The rung below a spare is a process of one's own."""
    tiny = job(**{**STANDBY, "recovery.standby": "spares"})
    daemon = tiny.start()
    daemon.until("first_step_taken")
    await_spares(tiny, 2)
    for spare in tiny.processes(EVERSTEP_GENERATION="spare"):
        os.kill(spare.pid, signal.SIGKILL)
    _, step = strike_in_a_step(daemon, 1)
    assert daemon.until("first_step_taken", generation=2)["step"] == step
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert charges(tiny) == ["worker"]


@full
def test_a_spare_that_became_a_worker_ends_though_its_slot_is_frozen(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Whoever is ended without the help of its slot is found by its marks, or by its identity."""
    tiny = job(**{**STANDBY, "recovery.standby": "spares"})
    daemon = tiny.start()
    daemon.until("first_step_taken")
    await_spares(tiny, 2)
    strike_in_a_step(daemon, 1)
    daemon.until("first_step_taken", generation=2)
    pids = active_pids(daemon)
    worker, slot = identity(pids[1]), daemon.slot(1)
    stop(daemon, slot.pid)
    daemon.signal_pid(pids[0], signal.SIGKILL)
    daemon.until("workers_gone", generation=2)
    assert gone(worker)
    daemon.signal_pid(slot.pid, signal.SIGCONT)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)


@full
def test_a_program_is_compiled_once_unless_its_file_is_not_to_be_trusted(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """On CPU the cache of JAX serves rank 0 alone; and a file that is unpickled is code."""
    tiny = job(**{**STANDBY, "recovery.standby": "none", "trainer.options.pace_s": 0.1})
    daemon = tiny.start()
    daemon.until("first_step_taken", generation=1)
    until(lambda: "executable stored" in tiny.log(1, 0), "a stored program")
    (blob,) = (tiny.run_dir / "executables").glob("*.bin")
    assert blob.stat().st_mode & 0o777 == 0o600

    def start_again(generation: int) -> list[str]:
        strike_in_a_step(daemon, 1)
        daemon.until("first_step_taken", generation=generation)
        return [tiny.log(generation, rank) for rank in (0, 1)]

    assert all("executable compiled: none is stored" in tiny.log(1, rank) for rank in (0, 1))
    assert all("executable loaded" in log for log in start_again(2))
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    damaged = start_again(3)
    assert all("another digest" in log and "executable loaded" not in log for log in damaged)
    until(lambda: "executable stored" in tiny.log(3, 0), "a program in its place")
    blob.chmod(0o666)
    assert all("not ours alone" in log for log in start_again(4))
    until(lambda: "executable stored" in tiny.log(4, 0), "a program in its place")
    if os.getuid() == 0:
        os.chown(blob, 65534, -1)
        assert all("not ours alone" in log for log in start_again(5))
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)


@full
def test_a_shared_store_keeps_no_key_of_a_standby(
    job: MakeJob, undisturbed: Numbers, redis_server: str
) -> None:
    """A generation that never trained has keys too."""
    tiny = job(**{**STANDBY, "heartbeats.redis_url": redis_server, "control.drills": True})
    daemon = tiny.start()
    daemon.until("standby_ready", generation=2)
    strike_in_a_step(daemon, 1)
    daemon.until("standby_ready", generation=3)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    from redis import Redis

    with Redis.from_url(redis_server) as client:
        assert client.keys("everstep:*") == []


# Striking


def within_a_step(tiny: Job) -> int:
    """Wait until the next step has just begun, whose predecessor's snapshot is published; which."""
    daemon = tiny.daemons[-1]
    begun = daemon.until_step(0) + 1
    done = daemon.until_step(begun)
    while (done + 1) % EVERY_STEPS == 0:  # it is followed by a save
        done = daemon.until_step(done + 1)
    time.sleep(PACE_S / 4)
    return done + 1


def strike_in_a_step(daemon: Daemon, rank: int, number: int = signal.SIGKILL) -> tuple[float, int]:
    """Strike the generation that trains; when (seconds since the epoch), and in which step."""
    pid = active_pids(daemon)[rank]
    step = within_a_step(daemon.job)
    return daemon.signal_pid(pid, number), step


def stop(daemon: Daemon, pid: int) -> None:
    """SIGSTOP, and wait until it stands."""
    daemon.signal_pid(pid, signal.SIGSTOP)
    until(lambda: (row := look(pid)) is not None and row.state == "T", "a stopped process")


def flip_a_byte(manifest: Path) -> None:
    """In the first leaf of the snapshot that a manifest describes."""
    body = json.loads(manifest.read_bytes().partition(b"\n")[0])
    with (manifest.parent / body["data"]).open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 0x10]))


@contextmanager
def small(directory: Path) -> Iterator[None]:
    """A file system with room for little more than nothing, where snapshots go."""
    directory.mkdir(mode=0o700)
    options = "size=8k,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "everstep-test", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        directory.rmdir()
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


# Looking


def active_pids(daemon: Daemon) -> tuple[int, ...]:
    """The processes of the generation that trains, by rank."""
    return tuple(one["pid"] for one in daemon.status()["workers"])


def standby_pids(daemon: Daemon, generation: int) -> tuple[int, ...]:
    """The processes of the generation that stands by, if it is this one and has any."""
    standby = daemon.status()["standby"]
    if standby is None or standby["generation"] != generation:
        return ()
    pids = tuple(one["pid"] for one in standby["workers"])
    return pids if all(pids) else ()


def identity(pid: int) -> Identity:
    """Who a process is."""
    row = look(pid)
    assert row is not None, f"pid {pid} is gone"
    return row.identity


def orders(tiny: Job, name: str) -> list[dict[str, Any]]:
    """All effects of one name in the journal."""
    return [one for move in tiny.moves() for one in move["effects"] if one["effect"] == name]


def promotion(generation: int, kind: str, step: int, *, saved_by: int) -> dict[str, Any]:
    """An order to promote, without its path."""

    class _Order(dict[str, Any]):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, dict) and self.items() <= other.items()

        __hash__ = None

    return _Order(generation=generation, kind=kind, step=step, saved_by=saved_by)


def charges(tiny: Job) -> list[str]:
    """The budgets that paid for retries; a rung within one incident is free."""
    granted = tiny.events("retry_granted")
    return [one["budget"] for one in granted if one["budget"] != "none"]


def done_twice(tiny: Job) -> list[int]:
    """The steps that more than one generation has finished."""
    lines = (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
    times = Counter(json.loads(line)["step"] for line in lines)
    return sorted(step for step, count in times.items() if count > 1)


def ended_at(tiny: Job, generation: int, step: int) -> float:
    """When a generation finished a step, by its own clock: seconds since the epoch."""

    def found() -> list[float]:
        lines = (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        wanted = (generation, step)
        return [row["at"] for row in rows if (row["generation"], row["step"]) == wanted]

    until(lambda: found() != [], f"step {step} of generation {generation}")
    return found()[0]


def await_standby(daemon: Daemon, generation: int) -> None:
    """Wait until each rank of the generation that stands by has a process."""
    until(lambda: standby_pids(daemon, generation) != (), f"a start of {generation}")


def await_spares(tiny: Job, count: int) -> None:
    """Wait until so many spares are ready."""
    until(lambda: imported_spares(tiny) == count, f"{count} spares")


def imported_spares(tiny: Job) -> int:
    """How many spares have said that they are ready."""
    logs = (tiny.run_dir / "logs" / "spares").glob("*.log")
    return sum("everything is imported" in log.read_text() for log in logs)
