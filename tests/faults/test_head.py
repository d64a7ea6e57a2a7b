"""Ray's head dies or hangs while the daemon lives: training resumes, or never stops."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Daemon, Job, Numbers, RayHead, Store, gone
from trainer.host.processes import Identity

full = pytest.mark.full

STANDBY: dict[str, Any] = {
    "recovery.standby": "generation",
    "recovery.snapshot_every_steps": 1,
}


def kill_head(tiny: Job, daemon: Daemon) -> list[Identity]:
    """SIGKILL of gcs, raylet, agents, slots and workers: whatever is neither daemon nor store."""
    spared = {daemon.pid, tiny.process_of("redis", "redis-server").pid}
    struck = [one for one in tiny.processes() if one.pid not in spared]
    for one in struck:
        os.kill(one.pid, signal.SIGSTOP)  # at one moment, as by a host's memory killer
    for one in struck:
        os.kill(one.pid, signal.SIGKILL)
    return struck


@full
@pytest.mark.parametrize("kind", ["snapshot", "checkpoint"])
def test_a_head_that_is_killed_with_all_its_workers_is_replaced_by_the_daemon(
    job: MakeJob, undisturbed: Numbers, kind: str
) -> None:
    """Nothing but the daemon, its journal, memory and disk are left; nobody has to do anything."""
    kept = STANDBY if kind == "snapshot" else {}
    # Longer than the minute after which Ray's own code ends a process that asks a dead head.
    tiny = job(**{**kept, "trainer.options.pace_s": 1.3})
    daemon = tiny.start()
    daemon.until_committed()
    at = time.time()
    struck = kill_head(tiny, daemon)
    lost = daemon.until("cluster_lost")
    chosen = daemon.until("restore_point_selected", kind=kind)
    daemon.until("slots_placed", placement=2)
    first = daemon.until_move(
        lambda move: move["event"]["event"] == "first_step_taken" and move["event"]["step"] > 0,
        "a first step of a later generation",
    )["event"]
    tiny.figures.add(f"Ray head killed, from a {kind}: to its loss (s)", lost["at"] - at)
    tiny.figures.add(f"Ray head killed, from a {kind}: to the next step (s)", first["at"] - at)
    assert chosen["step"] >= 10
    assert all(gone(one) for one in struck)
    assert daemon.exit_status(180) == 0
    assert time.time() - at > 65
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1
    tiny.note_recoveries(f"Ray head, {kind}")


_AS_PROCESS_1 = """
import os, subprocess, sys
daemon = subprocess.Popen(sys.argv[1:])
while (ended := os.wait())[0] != daemon.pid:
    pass
sys.exit(os.waitstatus_to_exitcode(ended[1]))
"""


@full
def test_a_daemon_whose_parent_is_process_1_outlives_its_ray_head(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Under systemd, in a container or after nohup it ended with status 1, without a word.

    One request that any user of the machine may send ends Ray's control plane (RaySyncer/StartSync
    without its header, in Ray 2.60), and the daemon went with it.
    """
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.3})
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    daemon = tiny.start(under=(*namespace, sys.executable, "-c", _AS_PROCESS_1))
    daemon.until("standby_ready")
    (control,) = (
        one
        for one in tiny.processes()
        if Path(f"/proc/{one.pid}/exe").readlink().name == "gcs_server"
    )
    os.kill(control.pid, signal.SIGKILL)
    daemon.until("cluster_lost")
    daemon.until("slots_placed", placement=2)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1


@full
def test_a_control_plane_that_hangs_harms_nobody_and_hinders_no_recovery(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """gcs under memory pressure answered after a minute; healthy jobs were restarted by it."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.6})
    daemon = tiny.start()
    daemon.until("standby_ready")
    before = len(tiny.moves())
    control = tiny.process_of("ray", "gcs_server")
    os.kill(control.pid, signal.SIGSTOP)
    time.sleep(12.0)
    harmless = {"checkpoint_committed"}
    assert {move["event"]["event"] for move in tiny.moves()[before:]} <= harmless
    at = daemon.strike(1)  # a recovery needs the slots, and nothing of Ray's control plane
    first = daemon.until("first_step_taken", generation=2)
    tiny.figures.add("gcs frozen, kill to the next step (s)", first["at"] - at, "step 0.6 s")
    time.sleep(8.0)
    os.kill(control.pid, signal.SIGCONT)
    daemon.until("standby_ready", generation=3)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1
    assert len(tiny.events("slots_placed")) == 1
    assert tiny.events("cluster_lost") == []


@full
def test_anothers_head_that_hangs_harms_nobody(
    job: MakeJob, undisturbed: Numbers, ray_head: RayHead
) -> None:
    """A status call that took long was read as failure: 24 recoveries of one healthy job."""
    tiny = job(**{**STANDBY, "cluster.address": ray_head.address, "trainer.options.pace_s": 0.7})
    daemon = tiny.start()
    daemon.until("standby_ready")
    before = len(tiny.moves())
    control = ray_head.pid_of("gcs_server")
    os.kill(control, signal.SIGSTOP)
    time.sleep(25.0)
    os.kill(control, signal.SIGCONT)
    harmless = {"checkpoint_committed"}
    assert {move["event"]["event"] for move in tiny.moves()[before:]} <= harmless
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0


@full
def test_anothers_head_that_dies_is_waited_for(
    job: MakeJob, undisturbed: Numbers, ray_head: RayHead
) -> None:
    """Whoever runs the cluster starts it again after a while; the job goes on there."""
    tiny = job(
        **{
            **STANDBY,
            "cluster.address": ray_head.address,
            "cluster.placement_timeout_s": 60.0,
            "trainer.options.pace_s": 0.2,
        }
    )
    daemon = tiny.start()
    daemon.until_committed()
    at = time.time()
    ray_head.kill()
    lost = daemon.until("cluster_lost")
    tiny.figures.add("another's Ray head killed: to its loss (s)", lost["at"] - at)
    time.sleep(15.0)  # longer than Ray lets a driver live on together with the patience before
    ray_head.start()
    restored = daemon.until("slots_placed", placement=2)
    tiny.figures.add("another's Ray head killed: to slots in the new one (s)", restored["at"] - at)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)


@full
def test_another_head_than_ours_keeps_nothing_of_a_job_whose_daemon_was_killed(
    job: MakeJob, undisturbed: Numbers, ray_head: RayHead, store: Store
) -> None:
    """Slots outlive a daemon; a successor that ends the job must find them all (CASES 7)."""
    tiny = job(
        **{
            **STANDBY,
            "cluster.address": ray_head.address,
            "heartbeats.redis_url": store.url,
            "trainer.options.pace_s": 0.2,
        }
    )
    daemon = tiny.start()
    daemon.until_committed()
    assert ray_head.ours()
    daemon.kill()
    successor = tiny.start()
    successor.until("supervisor_restarted")
    assert successor.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0
