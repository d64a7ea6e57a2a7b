"""What stands still, comes back late, or will not go: the daemon, a worker, a process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.disk.restore_points import find
from tests.faults.conftest import MakeJob
from tests.faults.harness import MARK, Machine, Numbers, RayHead, Store, gone, until
from tests.hold import held
from tests.trainer.harness import TINY, World, write_text
from trainer.host.processes import environment, look_at_all
from trainer.slot.child import GENERATION, RUN

full = pytest.mark.full


@full
def test_a_daemon_that_stood_still_for_half_a_minute_condemns_nobody(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A suspended host, a container that was frozen: its own silence is not the workers'."""
    tiny = job(
        **{
            "trainer.options.pace_s": 0.8,
            "heartbeats.lease_s": 1.0,
            "recovery.standby": "generation",
        }
    )
    daemon = tiny.start()
    daemon.until("standby_ready")
    first = daemon.until_step(0)
    daemon.signal(signal.SIGSTOP)
    time.sleep(30.0)
    daemon.signal(signal.SIGCONT)
    assert daemon.until_step(0) - first > 20  # nobody waited for it
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0
    assert tiny.events("standby_lost") == []
    assert tiny.events("heartbeat_store_lost") == []


@full
def test_a_job_that_stood_still_with_all_its_parts_goes_on(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Both ranks aborted 1.1 s after the thaw, overdue for each other, and a budget paid for it."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    daemon = tiny.start()
    daemon.until_committed()
    parts = [
        row.identity.pid
        for row in look_at_all().values()
        if row.is_alive and environment(row.identity.pid).get(MARK) == tiny.mark
    ]
    workers = {daemon.worker(rank).pid for rank in range(2)}
    assert {daemon.pid, *workers} <= set(parts)
    for pid in parts:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(25.0)  # more than twice of what JAX waits between hosts
    for pid in parts:
        os.kill(pid, signal.SIGCONT)
    told = daemon.until("standstill_ended")
    assert told["seconds"] > 20
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.failures() == []
    assert tiny.result()["failures"] == 0


STUBBORN: dict[str, Any] = {
    "trainer.options.pace_s": 0.2,
    "heartbeats.lease_s": 1.0,
    "deadlines.drain_s": 2.0,
    "recovery.last_call_s": 0.5,
    "cluster.placement_timeout_s": 10.0,
}


@full
def test_a_process_whose_end_cannot_be_proven_ends_the_job_by_name(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Dead on paper, alive on the device: nothing may be started beside it (marin#4690)."""
    tiny = job(**STUBBORN)
    daemon = tiny.start()
    daemon.until_committed()
    victim = daemon.worker(1)
    with held(victim.pid):
        daemon.strike(1)
        unproven = daemon.until("exit_unproven")
        assert f"pid {victim.pid}" in unproven["unproven"][0]
        assert daemon.exit_status(180) == 4
        assert not gone(victim)
        result = tiny.result()
        assert result["state"] == "FAILED"
        assert f"pid {victim.pid}" in result["reason"]
        assert len(tiny.events("workers_started")) == 1
    until(lambda: gone(victim), "the end of the process that was held", 5)
    assert tiny.start().exit_status() == 0  # the same command, once that is mended
    tiny.must_equal(undisturbed)


@full
def test_a_process_that_goes_after_all_lets_the_job_go_on(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A network file system that comes back lets its victims die."""
    tiny = job(**{**STUBBORN, "cluster.capacity_wait_s": 60.0})
    daemon = tiny.start()
    daemon.until_committed()
    victim = daemon.worker(1)
    with held(victim.pid):
        daemon.strike(1)
        daemon.until("exit_unproven")
        time.sleep(3.0)
    assert daemon.exit_status(180) == 0
    tiny.must_equal(undisturbed)
    assert gone(victim)
    assert tiny.result()["reason"] == "the last step is committed"


@full
def test_a_machine_that_is_cut_off_and_returns_two_generations_later_changes_nothing(
    job: MakeJob,
    undisturbed: Numbers,
    store: Store,
    ray_head: RayHead,
    other_machine: Machine,
) -> None:
    """Nobody can prove the end of what is there: it is replaced elsewhere, and fenced by name."""
    tiny = job(
        **{
            "cluster.address": ray_head.address,
            "cluster.placement": "spread",
            "heartbeats.redis_url": store.url,
            "heartbeats.lease_s": 1.0,
            "deadlines.drain_s": 4.0,
            "recovery.last_call_s": 0.5,
            "recovery.snapshot_every_steps": 1,
            "trainer.options.pace_s": 0.5,
        }
    )
    daemon = tiny.start()
    daemon.until_committed()
    there = [one for one in other_machine.processes() if RUN in environment(one.pid)]
    assert len(there) == 1  # a rank of the two
    other_machine.signal(signal.SIGSTOP)
    unproven = daemon.until("exit_unproven")["unproven"]
    assert len(unproven) == 1
    daemon.until("slots_placed", placement=2)
    daemon.until("first_step_taken", generation=2)
    assert not gone(there[0])
    for rank in (0, 1):
        assert daemon.worker(rank).pid not in {one.pid for one in other_machine.processes()}
    daemon_step = daemon.until_step(0)
    os.kill(workers_here(ray_head, generation=2)[0], signal.SIGKILL)
    daemon.until("first_step_taken", generation=3)
    other_machine.signal(signal.SIGCONT)
    until(lambda: gone(there[0]), "the end of the worker that woke", 30)
    assert daemon.exit_status(180) == 0
    assert daemon_step < 59
    tiny.must_equal(undisturbed)
    assert tiny.result()["generations"] == 3
    with store.client() as client:  # what it wrote as it woke goes by itself
        for key in client.keys("everstep:tiny:*:g1:*"):
            assert client.pttl(key) > 0
            client.delete(key)


def workers_here(head: RayHead, *, generation: int) -> list[int]:
    """The ranks of a generation on the daemon's own machine."""
    marks = {one.pid: environment(one.pid) for one in head.processes()}
    return [pid for pid, found in marks.items() if found.get(GENERATION) == str(generation)]


@full
def test_a_worker_that_wakes_two_generations_later_changes_nothing_and_ends(
    tmp_path: Path,
) -> None:
    """A cut-off host returns after an hour, and its worker goes on with the step it was in."""
    write_text(tmp_path)
    undisturbed = World(tmp_path / "undisturbed")
    world = World(tmp_path / "tiny")
    try:
        (alone,) = undisturbed.launch(world_size=1)
        wanted = alone.until("completed")
        slow = {0: [{"id": "a", "kind": "sleep", "phase": "step", "step": 6, "seconds": 2.0}]}
        (old,) = world.launch(world_size=1, faults=slow)
        until(lambda: {"drill", "checkpoint_committed"} <= set(old.kinds()), "a save and a drill")
        committed = old.of("checkpoint_committed")[0]
        old.signal(signal.SIGSTOP)
        point = {"kind": "checkpoint", "path": committed["path"], "step": 4, "generation": 1}
        (second,) = world.launch(generation=2, world_size=1, restore_point=point)
        second.until("checkpoint_committed")
        second.signal(signal.SIGKILL)
        second.until("exit")
        newest = find(world.job_dir, range(1, 3))[0]
        point = {
            "kind": "checkpoint",
            "path": str(newest.path),
            "step": newest.step,
            "generation": newest.generation,
        }
        (third,) = world.launch(generation=3, world_size=1, restore_point=point)
        done = third.until("completed")
        files = files_that_count(world.job_dir)
        old.hang_up()  # its slot is long gone
        old.signal(signal.SIGCONT)
        assert old.process.wait(20) == 0
        assert files_that_count(world.job_dir) == files
    finally:
        world.end()
        undisturbed.end()
    assert done["params_digest"] == wanted["params_digest"]
    assert world.losses() == undisturbed.losses()
    assert TINY["steps"] == len(world.losses())


def files_that_count(folder: Path) -> dict[str, bytes]:
    """What later generations published, by path: the old one may write under its own name only.

    A line of metrics tells its generation, and of a step that is there twice the highest counts.
    """
    return {
        str(path): path.read_bytes()
        for path in sorted((folder / "checkpoints").rglob("*"))
        if path.is_file() and "generation-1" not in path.parts
    }
