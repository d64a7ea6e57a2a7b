"""Whole runs in virtual time, one scenario each: the real daemon and core against scripted workers.

Each scenario's journal is a golden trace in tests/traces. After a change that is meant, rewrite
them with `pytest tests/test_scenarios.py --rewrite-traces` and read the difference.
"""

# mypy: disable-error-code="func-returns-value"
# (a scenario's check may be a tuple of checks, each of which asserts and returns nothing)
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisor.daemon.loop import Daemon
from supervisor.fsm import events as e
from supervisor.fsm.job import Job, Limits
from supervisor.fsm.machine import JobMachine
from supervisor.record.journal import decode, encode, read_journal
from supervisor.record.previous_run import past_of
from supervisor.record.replay import replay_file
from tests.sim.run import Meddling, Sim, simulate
from tests.sim.world import Fault, Script, SimCluster

TRACES = Path(__file__).parent / "traces"
RECOVERY = ["DRAINING", "RESTORING", "RUNNING"]
START = ["PROVISIONING", "INITIALIZING", "RUNNING"]
END = ["DRAINING", "COMPLETED"]


def stop(now: bool = False, by: str = "operator") -> Meddling:
    return lambda daemon, _: daemon.post(e.StopRequested(at=daemon.clock(), by=by, now=now))


def lose_slot(rank: int, node_lost: bool = False) -> Meddling:
    return lambda _, cluster: cluster.on_slot_lost((rank,), "the actor died", node_lost)


@dataclass
class Scenario:
    """A script, what is done to it, and what must come of it."""

    script: Script
    status: int = 0
    states: list[str] = field(default_factory=lambda: [*START, *END])
    events: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    meddle: dict[float, Meddling] = field(default_factory=dict)
    check: Callable[[Sim], Any] = lambda sim: None


def faulty(*faults: Fault, **script: Any) -> Script:
    return Script(faults=list(faults), **script)


def culprit(sim: Sim, ranks: tuple[int, ...], victims: tuple[int, ...] | None = None) -> None:
    assert sim.daemon.job.incident is not None
    assert sim.daemon.job.incident.ranks == ranks
    if victims is not None:
        assert sim.daemon.job.incident.victims == victims


def restored(sim: Sim, step: int) -> None:
    chosen = [m["event"] for m in sim.moves if m["event"]["event"] == "restore_point_selected"]
    assert chosen[-1]["step"] == step


def spent(sim: Sim, **by_cause: int) -> None:
    assert {cause: len(times) for cause, times in sim.daemon.job.spent.items()} == by_cause


def trained(sim: Sim, batches: dict[int, int]) -> None:
    """Which batch a step was done with, the last time that it was done."""
    assert {step: sim.cluster.trained[step] for step in batches} == batches


def kept(sim: Sim, step: int) -> None:
    """The newest step that the disk holds, for the next run."""
    assert max(point.step for point in sim.disk.points) == step
    past = past_of(sim.records)
    assert past.committed_step == step
    assert max(saved for _, saved in past.verified) == step


def doubted(sim: Sim, *names: str) -> None:
    """Whose end the result says could not be proven."""
    assert sim.daemon.job.unproven == names
    assert sim.disk.result is not None
    assert ("could not be ended" in sim.disk.result["reason"]) is bool(names)


def started(sim: Sim, *generations: int) -> None:
    """Which generations were started to train, not to stand by."""
    started = [
        effect["generation"]
        for move in sim.moves
        for effect in move["effects"]
        if effect["effect"] in ("StartWorkers", "RestoreWorkers")
    ]
    assert tuple(started) == generations


def standstill(seconds: float) -> Meddling:
    return lambda daemon, _: daemon.post(e.StandstillEnded(at=daemon.clock(), seconds=seconds))


def kill_all(daemon: Daemon, cluster: SimCluster) -> None:
    for worker in list(cluster.workers.values()):
        cluster.end(worker, None, "SIGKILL")


STANDBY = Limits(standby="generation")
ONCE = [*START, *RECOVERY, *END]
FAILED = [*START, "DRAINING", "FAILED"]
SCENARIOS = {
    "undisturbed": Scenario(Script(), check=lambda sim: spent(sim)),
    "killed_in_initialize": Scenario(
        faulty(Fault(kind="kill", phase="initialize")),
        states=["PROVISIONING", "INITIALIZING", *RECOVERY, *END],
        events=["worker_crashed", "retry_granted", "workers_restored"],
    ),
    "killed_in_compile": Scenario(
        faulty(Fault(kind="kill", phase="compile", rank=0)),
        states=["PROVISIONING", "INITIALIZING", *RECOVERY, *END],
    ),
    "killed_in_step": Scenario(
        faulty(Fault(kind="kill", step=25)),
        states=ONCE,
        events=["worker_crashed", "workers_gone", "retry_granted"],
        check=lambda sim: (culprit(sim, (1,)), restored(sim, 20), spent(sim, worker=1)),
    ),
    "killed_in_checkpoint": Scenario(
        faulty(Fault(kind="kill", phase="checkpoint", step=20, rank=0)),
        states=ONCE,
        check=lambda sim: restored(sim, 10),
    ),
    "killed_in_evaluate": Scenario(
        faulty(Fault(kind="kill", phase="evaluate", step=20), evaluate_every=20), states=ONCE
    ),
    "killed_in_restore": Scenario(
        faulty(
            Fault(kind="kill", step=25), Fault(kind="kill", phase="restore", generation=2, rank=0)
        ),
        states=[*START, "DRAINING", "RESTORING", *RECOVERY, *END],
        check=lambda sim: spent(sim, worker=2),
    ),
    "exit_0_before_the_last_step": Scenario(
        faulty(Fault(kind="exit0", step=5)), states=ONCE, events=["worker_crashed"]
    ),
    "ended_by_sigterm": Scenario(
        faulty(Fault(kind="sigterm", step=15)),
        states=ONCE,
        check=lambda sim: spent(sim, worker=1),
    ),
    "a_victim_speaks_first": Scenario(
        faulty(Fault(kind="segv_late", step=12)),
        states=ONCE,
        events=["worker_raised", "worker_crashed", "workers_gone"],
        check=lambda sim: (culprit(sim, (1,), (0,)), spent(sim, worker=1)),
    ),
    "only_victims_speak": Scenario(
        faulty(Fault(kind="segv_late", step=12), workers=3),
        limits=Limits(last_call_s=0.05),
        states=ONCE,
        events=["worker_raised", "deadline_passed", "evidence_collected"],
        check=lambda sim: spent(sim, worker=1),
    ),
    "an_exception_in_the_loop": Scenario(
        faulty(Fault(kind="raise", step=12, error="KeyError")),
        states=ONCE,
        check=lambda sim: culprit(sim, (1,)),
    ),
    "an_error_before_the_first_step": Scenario(
        faulty(Fault(kind="raise", phase="compile", error="TypeError")),
        status=4,
        states=["PROVISIONING", "INITIALIZING", "DRAINING", "FAILED"],
        events=["worker_raised", "workers_gone", "retry_ruled_out"],
    ),
    "a_transient_error_before_the_first_step": Scenario(
        faulty(Fault(kind="raise", phase="compile", error="OSError")),
        states=["PROVISIONING", "INITIALIZING", *RECOVERY, *END],
    ),
    "the_same_error_at_the_same_step": Scenario(
        faulty(Fault(kind="raise", step=12, generation=0, times=99, error="KeyError")),
        status=4,
        states=[*START, *RECOVERY, *RECOVERY, "DRAINING", "FAILED"],
        events=["retry_ruled_out"],
        check=lambda sim: spent(sim, worker=2),
    ),
    "a_worker_that_dies_without_end": Scenario(
        faulty(Fault(kind="kill", step=25, generation=0, times=99)),
        status=3,
        states=[*START, *RECOVERY * 3, "DRAINING", "FAILED"],
        limits=Limits(failures_max=3),
        events=["retry_budget_exhausted"],
        check=lambda sim: spent(sim, worker=3),
    ),
    "no_progress": Scenario(
        faulty(Fault(kind="sigterm", step=25, generation=0, times=99)),
        status=4,
        states=[*START, *RECOVERY * 3, "DRAINING", "FAILED"],
        limits=Limits(no_progress_max=2),
        events=["retry_ruled_out"],
    ),
    "stopped_by_sigstop": Scenario(
        faulty(Fault(kind="stop", step=25)), states=ONCE, check=lambda sim: culprit(sim, (1,))
    ),
    "a_loop_that_sleeps_in_step": Scenario(
        faulty(Fault(kind="sleep", step=25, rank=0)), states=ONCE, events=["progress_stalled"]
    ),
    "a_hang_in_initialize": Scenario(
        faulty(Fault(kind="sleep", phase="initialize")),
        states=["PROVISIONING", "INITIALIZING", *RECOVERY, *END],
        events=["progress_stalled"],
    ),
    "slow_phases_are_no_hangs": Scenario(
        faulty(
            Fault(kind="sleep", phase="compile", seconds=6 * 2.0),
            Fault(kind="sleep", phase="evaluate", step=10, seconds=6 * 0.5),
            Fault(kind="sleep", phase="checkpoint", step=10, seconds=6 * 0.05),
            Fault(kind="sleep", phase="restore", seconds=6 * 0.5),
            evaluate_every=10,
        ),
        check=lambda sim: spent(sim),
    ),
    "the_port_was_taken": Scenario(
        faulty(Fault(kind="port_taken", phase="initialize", rank=0)),
        states=["PROVISIONING", "INITIALIZING", *RECOVERY, *END],
        events=["initialization_failed"],
        check=lambda sim: spent(sim, startup=1),
    ),
    "starts_that_fail_without_end": Scenario(
        Script(start_fails=[(0,), (0, 1), (1,), (0,), (0,)]),
        status=3,
        states=[
            "PROVISIONING",
            "INITIALIZING",
            *["DRAINING", "RESTORING"] * 3,
            "DRAINING",
            "FAILED",
        ],
        events=["initialization_failed", "retry_budget_exhausted"],
        check=lambda sim: spent(sim, startup=3),
    ),
    "a_save_fails": Scenario(
        Script(save_fails_at={20}),
        events=["checkpoint_failed"],
        check=lambda sim: spent(sim),
    ),
    "a_damaged_restore_point": Scenario(
        faulty(
            Fault(kind="kill", step=25), Fault(kind="reject", phase="restore", generation=2, rank=0)
        ),
        states=[*START, "DRAINING", "RESTORING", *RECOVERY, *END],
        events=["restore_point_rejected", "restore_point_quarantined"],
        check=lambda sim: (restored(sim, 10), spent(sim, worker=1)),
    ),
    "a_damaged_restore_point_that_cannot_be_moved": Scenario(
        faulty(
            Fault(kind="kill", step=25),
            Fault(kind="reject", phase="restore", generation=2, rank=0),
            quarantine_fails=True,
        ),
        states=[*START, "DRAINING", "RESTORING", *RECOVERY, *END],
        events=["restore_point_rejected", "housekeeping_failed"],
        check=lambda sim: (restored(sim, 10), spent(sim, worker=1)),
    ),
    "no_restore_point_is_left": Scenario(
        faulty(
            Fault(kind="kill", step=15), Fault(kind="reject", phase="restore", generation=2, rank=0)
        ),
        status=4,
        states=[*START, "DRAINING", "RESTORING", "DRAINING", "RESTORING", "DRAINING", "FAILED"],
        events=["restore_points_exhausted"],
    ),
    "loading_fails_though_the_point_is_whole": Scenario(
        faulty(
            Fault(kind="kill", step=15),
            Fault(kind="reject_hard", phase="restore", generation=2, error="OSError"),
        ),
        states=[*START, "DRAINING", "RESTORING", *RECOVERY, *END],
        events=["restore_failed"],
        check=lambda sim: restored(sim, 10),
    ),
    "a_disk_that_cannot_be_read_for_a_while": Scenario(
        faulty(Fault(kind="kill", step=15), disk_unreadable=(9.0, 30.0)),
        states=ONCE,
        events=["restore_points_unreadable", "deadline_passed"],
        check=lambda sim: restored(sim, 10),
    ),
    "retention_fails": Scenario(
        Script(prune_fails=True), events=["housekeeping_failed"], check=lambda sim: spent(sim)
    ),
    "a_slot_is_lost": Scenario(
        Script(),
        meddle={11.0: lose_slot(1)},
        states=[*START, "DRAINING", "RESTORING", *START, *END],
        events=["slot_lost", "slots_placed"],
        check=lambda sim: spent(sim, worker=1),
    ),
    "a_node_is_lost": Scenario(
        Script(),
        meddle={11.0: lose_slot(1, node_lost=True)},
        states=[*START, "DRAINING", "RESTORING", *START, *END],
        events=["node_lost"],
        check=lambda sim: spent(sim, node=1),
    ),
    "the_cluster_is_too_small": Scenario(
        Script(shortage="needs 4 CPUs, the cluster has 2"),
        status=4,
        states=["PROVISIONING", "DRAINING", "FAILED"],
        events=["capacity_missing"],
    ),
    "a_node_joins_in_time": Scenario(
        Script(shortage="needs 4 CPUs, the cluster has 2", shortage_until=40.0),
        limits=Limits(capacity_wait_s=60.0),
        events=["capacity_missing"],
    ),
    "no_node_joins_in_time": Scenario(
        Script(shortage="needs 4 CPUs, the cluster has 2"),
        limits=Limits(capacity_wait_s=60.0),
        status=4,
        states=["PROVISIONING", "DRAINING", "FAILED"],
        events=["capacity_missing", "deadline_passed"],
    ),
    "a_placement_times_out_once": Scenario(
        Script(placement_fails=["timeout"]),
        states=["PROVISIONING", "DRAINING", "RESTORING", *START, *END],
        events=["placement_timed_out"],
        check=lambda sim: spent(sim, startup=1),
    ),
    "placements_fail_without_end": Scenario(
        Script(placement_fails=["ray is angry"] * 9),
        status=3,
        states=[
            *["PROVISIONING", "DRAINING", "RESTORING"] * 3,
            "PROVISIONING",
            "DRAINING",
            "FAILED",
        ],
        events=["placement_failed"],
    ),
    "a_process_that_cannot_be_ended": Scenario(
        faulty(Fault(kind="stop", step=25), unkillable={(1, 1)}),
        states=[*START, "DRAINING", "RESTORING", *START, *END],
        events=["exit_unproven", "slots_placed"],
    ),
    "a_process_that_ends_after_all": Scenario(
        faulty(Fault(kind="stop", step=25), unkillable={(1, 1)}, unkillable_until=20.0),
        states=[*START, "DRAINING", "RESTORING", *START, *END],
        events=["exit_unproven", "slots_placed", "training_completed", "exit_proven"],
        check=lambda sim: doubted(sim),
    ),
    "the_newest_snapshot_outlives_a_job_that_fails": Scenario(
        faulty(Fault(kind="kill", step=25), snapshot_every=1),
        status=3,
        limits=Limits(failures_max=0),
        states=FAILED,
        events=["workers_gone", "retry_budget_exhausted", "snapshot_kept"],
        check=lambda sim: kept(sim, 25),
    ),
    "a_job_fails_and_its_snapshot_cannot_be_written": Scenario(
        faulty(Fault(kind="kill", step=25), snapshot_every=1, keep_fails=True),
        status=3,
        limits=Limits(failures_max=0),
        states=FAILED,
        events=["retry_budget_exhausted", "snapshot_not_kept"],
        check=lambda sim: kept(sim, 20),
    ),
    "a_job_fails_and_its_snapshot_takes_too_long": Scenario(
        faulty(Fault(kind="kill", step=25), snapshot_every=1, keep_s=600.0),
        status=3,
        limits=Limits(failures_max=0, drain_s=30.0),
        states=FAILED,
        events=["retry_budget_exhausted", "snapshot_not_kept"],
        check=lambda sim: (kept(sim, 20), sim.virtual_s < 60 or pytest.fail("it waited")),
    ),
    "the_newest_snapshot_stands_in_for_a_last_save_that_failed": Scenario(
        faulty(
            Fault(kind="kill", phase="checkpoint"),
            steps=1000,
            checkpoint_every=1000,
            snapshot_every=1,
        ),
        meddle={10.75: stop()},
        status=5,
        states=[*START, "DRAINING", "STOPPED"],
        events=["stop_requested", "worker_crashed", "workers_gone", "snapshot_kept"],
        check=lambda sim: sim.disk.points or pytest.fail("nothing is saved"),
    ),
    "a_second_signal_waits_for_no_snapshot": Scenario(
        faulty(Fault(kind="kill", step=25), snapshot_every=1, keep_s=25.0),
        status=3,
        limits=Limits(failures_max=0),
        meddle={14.0: stop(by="signal"), 16.0: stop(now=True, by="signal")},
        states=FAILED,
        check=lambda sim: (kept(sim, 20), sim.virtual_s < 20 or pytest.fail("it waited")),
    ),
    "everything_stood_still_and_its_ranks_abort": Scenario(
        faulty(Fault(kind="kill", step=35, generation=2)),
        meddle={11.4: standstill(40.0), 12.5: kill_all},
        states=[*START, *RECOVERY, *RECOVERY, *END],
        events=["standstill_ended", "worker_crashed", "workers_restored", "worker_crashed"],
        check=lambda sim: spent(sim, worker=1),
    ),
    "stopped_by_an_operator": Scenario(
        Script(),
        meddle={11.0: stop()},
        status=5,
        states=[*START, "DRAINING", "STOPPED"],
        events=["stop_requested", "checkpoint_committed", "workers_saved"],
    ),
    "stopped_by_a_signal": Scenario(
        Script(),
        meddle={11.0: stop(by="signal")},
        status=75,
        states=[*START, "DRAINING", "STOPPED"],
    ),
    "a_second_signal_hurries": Scenario(
        Script(last_save_hangs=True),
        meddle={11.0: stop(by="signal"), 12.0: stop(now=True, by="signal")},
        status=75,
        states=[*START, "DRAINING", "STOPPED"],
        check=lambda sim: sim.virtual_s < 14 or pytest.fail("it waited"),
    ),
    "the_last_save_hangs": Scenario(
        Script(last_save_hangs=True, steps=1000),
        meddle={11.0: stop()},
        status=5,
        states=[*START, "DRAINING", "STOPPED"],
        events=["stop_requested", "workers_gone"],
    ),
    "a_worker_dies_during_the_last_save": Scenario(
        faulty(Fault(kind="kill", phase="checkpoint"), steps=1000, checkpoint_every=1000),
        meddle={10.75: stop()},
        status=5,
        states=[*START, "DRAINING", "STOPPED"],
        events=["stop_requested", "worker_crashed", "workers_gone"],
    ),
    "stopped_while_starting": Scenario(
        Script(),
        meddle={7.0: stop()},
        status=5,
        states=["PROVISIONING", "INITIALIZING", "DRAINING", "STOPPED"],
    ),
    "stopped_while_placing": Scenario(
        Script(placement_s=50.0),
        meddle={3.0: stop()},
        status=5,
        states=["PROVISIONING", "DRAINING", "STOPPED"],
    ),
    "stopped_while_backing_off": Scenario(
        faulty(Fault(kind="kill", step=5, generation=0, times=99)),
        limits=Limits(backoff_base_s=30.0),
        meddle={25.0: stop()},
        status=5,
        states=[*START, *RECOVERY, "DRAINING", "RESTORING", "DRAINING", "STOPPED"],
    ),
    "a_standby_takes_over": Scenario(
        faulty(Fault(kind="kill", step=36), snapshot_every=1),
        limits=STANDBY,
        states=ONCE,
        events=["standby_ready", "worker_crashed", "workers_gone", "workers_restored"],
        check=lambda sim: (restored(sim, 36), spent(sim, worker=1), started(sim, 1)),
    ),
    "a_half_built_standby_takes_over": Scenario(
        faulty(Fault(kind="kill", step=5), snapshot_every=1),
        limits=STANDBY,
        states=ONCE,
        check=lambda sim: (restored(sim, 5), spent(sim, worker=1), started(sim, 1)),
    ),
    "the_promoted_standby_dies_while_loading": Scenario(
        faulty(
            Fault(kind="kill", step=36),
            Fault(kind="kill", phase="restore", generation=2),
            snapshot_every=1,
        ),
        limits=STANDBY,
        states=[*START, "DRAINING", "RESTORING", *RECOVERY, *END],
        check=lambda sim: (restored(sim, 36), spent(sim, worker=1), started(sim, 1, 3)),
    ),
    "a_second_kill_while_the_standby_is_rebuilt": Scenario(
        faulty(
            Fault(kind="kill", step=36),
            Fault(kind="kill", step=38, generation=2, rank=0),
            snapshot_every=1,
        ),
        limits=STANDBY,
        states=[*START, *RECOVERY * 2, *END],
        check=lambda sim: (restored(sim, 38), spent(sim, worker=2), started(sim, 1)),
    ),
    "the_standby_dies_and_is_prepared_again": Scenario(
        faulty(Fault(kind="kill", phase="wait", generation=2), steps=150),
        limits=STANDBY,
        events=["standby_lost", "deadline_passed", "standby_ready"],
        check=lambda sim: spent(sim),
    ),
    "a_standby_that_falls_silent": Scenario(
        faulty(Fault(kind="stop", phase="wait", generation=2), steps=150),
        limits=STANDBY,
        events=["standby_lost"],
        check=lambda sim: spent(sim),
    ),
    "standbys_that_fail_without_end": Scenario(
        faulty(*[Fault(kind="raise", phase="compile", generation=g) for g in (2, 3, 4)], steps=200),
        limits=STANDBY,
        events=["standby_lost", "standby_lost", "standby_lost", "standby_disabled"],
        check=lambda sim: spent(sim),
    ),
    "both_generations_die_at_once": Scenario(
        Script(snapshot_every=1, steps=60),
        meddle={13.2: kill_all},
        limits=STANDBY,
        states=ONCE,
        events=["worker_crashed", "standby_lost"],
        check=lambda sim: (spent(sim, worker=1), started(sim, 1, 3)),
    ),
    "a_damaged_snapshot": Scenario(
        faulty(
            Fault(kind="kill", step=36),
            Fault(kind="reject", phase="restore", generation=2, rank=0),
            snapshot_every=1,
        ),
        limits=STANDBY,
        states=[*START, "DRAINING", "RESTORING", *RECOVERY, *END],
        events=["restore_point_rejected", "restore_point_quarantined"],
        check=lambda sim: (restored(sim, 35), spent(sim, worker=1)),
    ),
    "no_slot_tells_of_snapshots": Scenario(
        faulty(Fault(kind="kill", step=36), snapshot_every=1, snapshots_unknown=True),
        limits=STANDBY,
        states=ONCE,
        check=lambda sim: restored(sim, 30),
    ),
    "the_memory_for_snapshots_is_full": Scenario(
        Script(snapshot_fails_at=12), events=["snapshot_failed"], check=lambda sim: spent(sim)
    ),
    "a_loss_that_is_not_finite_stops_the_job": Scenario(
        Script(bad_batches={25: "stop"}),
        status=4,
        states=FAILED,
        events=["numbers_diverged"],
        check=lambda sim: spent(sim),
    ),
    "a_rollback_leaves_the_batches_out": Scenario(
        Script(bad_batches={25: "rollback"}),
        states=ONCE,
        events=["numbers_diverged", "retry_granted", "restore_point_selected"],
        check=lambda sim: (
            restored(sim, 20),
            spent(sim, numbers=1),
            trained(sim, {19: 19, 20: 26, 39: 45}),
        ),
    ),
    "a_rollback_with_a_standby": Scenario(
        Script(bad_batches={25: "rollback"}, snapshot_every=1),
        limits=STANDBY,
        states=ONCE,
        check=lambda sim: (restored(sim, 20), trained(sim, {20: 26}), started(sim, 1)),
    ),
    "a_second_rollback_from_the_same_checkpoint": Scenario(
        Script(bad_batches={25: "rollback", 33: "rollback"}),
        states=[*START, *RECOVERY, *RECOVERY, *END],
        check=lambda sim: (spent(sim, numbers=2), trained(sim, {19: 19, 20: 34, 39: 53})),
    ),
    "a_rollback_before_the_first_checkpoint": Scenario(
        Script(bad_batches={5: "rollback"}),
        states=ONCE,
        check=lambda sim: (restored(sim, 0), trained(sim, {0: 6, 39: 45})),
    ),
    "rollbacks_without_end": Scenario(
        Script(bad_batches=dict.fromkeys(range(25, 999), "rollback")),
        status=3,
        states=[*START, *RECOVERY, *RECOVERY, *RECOVERY, "DRAINING", "FAILED"],
        events=["retry_budget_exhausted"],
        check=lambda sim: spent(sim, numbers=3),
    ),
    "a_worker_dies_after_a_rollback": Scenario(
        faulty(Fault(kind="kill", step=35, generation=2), bad_batches={25: "rollback"}),
        states=[*START, *RECOVERY, *RECOVERY, *END],
        check=lambda sim: (restored(sim, 30), trained(sim, {20: 26, 30: 36, 39: 45})),
    ),
    "replicas_that_differ": Scenario(
        Script(replicas_diverge_at=25, snapshot_every=1),
        limits=STANDBY,
        states=ONCE,
        events=["replicas_diverged", "retry_granted"],
        check=lambda sim: (
            culprit(sim, (1,)),
            restored(sim, 20),
            trained(sim, {20: 20, 39: 39}),
        ),
    ),
    "a_slot_is_lost_with_its_standby": Scenario(
        Script(snapshot_every=1),
        meddle={13.2: lose_slot(1)},
        limits=STANDBY,
        states=[*START, "DRAINING", "RESTORING", *START, *END],
        check=lambda sim: (spent(sim, worker=1), started(sim, 1, 3)),
    ),
    "spares_wait_in_the_slots": Scenario(
        faulty(Fault(kind="kill", step=25)),
        limits=Limits(standby="spares"),
        states=ONCE,
        check=lambda sim: sim.cluster.calls.count("spares") == 2 or pytest.fail("no spares"),
    ),
    "stopped_with_a_standby": Scenario(
        Script(),
        meddle={13.2: stop()},
        limits=STANDBY,
        status=5,
        states=[*START, "DRAINING", "STOPPED"],
    ),
    "redis_is_away_for_a_while": Scenario(
        Script(steps=400, store_away=(12.0, 32.0)),
        events=["heartbeat_store_lost", "heartbeat_store_recovered"],
        check=lambda sim: spent(sim),
    ),
    "a_hang_while_blind_is_seen_by_the_slots": Scenario(
        faulty(Fault(kind="sleep", step=40), steps=100, store_away=(10.0, 30.0)),
        states=ONCE,
        events=["heartbeat_store_lost", "progress_stalled", "workers_restored"],
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The job ends as it should, its journal replays, and equals the golden trace."""
    scenario = SCENARIOS[name]
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, scenario.script, limits=scenario.limits, meddle=scenario.meddle)

    assert sim.states == scenario.states
    assert sim.status == scenario.status
    in_order = iter(sim.names)
    assert all(event in in_order for event in scenario.events), sim.names
    scenario.check(sim)
    assert not sim.cluster.ever_two_alive
    assert all(worker.exit is not None for worker in sim.cluster.workers.values())
    assert sim.disk.result is not None
    assert sim.disk.result["exit_status"] == scenario.status
    assert "release" in sim.cluster.calls
    assert sim.daemon.job.incidents == len(sim.disk.summaries) or scenario.status == 4

    report = replay_file(path)
    assert report.difference == ""
    assert report.state == scenario.states[-1]

    golden = TRACES / f"{name}.jsonl"
    if request.config.getoption("--rewrite-traces"):
        golden.write_bytes(path.read_bytes())
        if name == "killed_in_step":
            (TRACES / "divergent.jsonl").write_bytes(_bent(golden))
    assert _comparable(path) == _comparable(golden)


def _comparable(path: Path) -> list[dict[str, Any]]:
    return [decode(line) for line in path.read_bytes().splitlines(keepends=True)]


def _bent(path: Path) -> bytes:
    """The trace with the target of its one granted retry altered."""
    records = _comparable(path)
    granted = next(r for r in records if r.get("event", {}).get("event") == "retry_granted")
    granted["target"] = "FAILED"
    return b"".join(map(encode, records))


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_golden_trace_replays_but_the_divergent_one(path: Path) -> None:
    """A replay that never finds a difference would be worth nothing."""
    report = replay_file(path)
    assert report.moves > 3
    if path.stem == "divergent":
        assert "recorded" in report.difference
        assert "the table says" in report.difference
    else:
        assert report.difference == ""


def test_traces_and_scenarios_are_the_same_set() -> None:
    """A trace without its scenario is never checked against the daemon again."""
    assert {path.stem for path in TRACES.glob("*.jsonl")} == {*SCENARIOS, "divergent"}


def test_a_stopped_job_resumes_in_a_new_segment(tmp_path: Path) -> None:
    """Numbers only grow: a generation, incident or placement is never used twice."""
    path = tmp_path / "journal.jsonl"
    script = Script(faults=[Fault(kind="kill", step=5)])
    first = simulate(path, script, meddle={16.0: stop()})
    assert first.status == 5
    second = simulate(path, Script(), epoch=2, disk=first.disk)
    assert second.status == 0
    events = [r["event"] for r in read_journal(path) if r["kind"] == "move"]
    started = [event for event in events if event["event"] == "job_started"]
    assert [event["after"] for event in started] == ["", "STOPPED"]
    assert second.daemon.job.active == first.daemon.job.generation + 1
    chosen = [event for event in events if event["event"] == "restore_point_selected"]
    assert chosen[-1]["step"] == first.event("workers_saved")["step"]
    report = replay_file(path)
    assert (report.difference, report.segments, report.state) == ("", 2, "COMPLETED")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rollback_that_was_decided_is_done_by_the_next_run(tmp_path: Path, stopped: bool) -> None:
    """What replicas wrote after they had parted lies on the disk, and looks like any checkpoint."""
    path = tmp_path / "journal.jsonl"
    script = Script(replicas_diverge_at=28, checkpoint_every=4, agreed_every=20)
    first = simulate(
        path,
        script,
        limits=Limits(rollbacks_max=-1 if stopped else 0, backoff_base_s=5.0),
        meddle=dict.fromkeys([_just_after_the_parting(tmp_path)], stop()) if stopped else {},
    )
    assert first.states[-1] == ("STOPPED" if stopped else "FAILED")
    assert max(point.step for point in first.disk.points) == 28
    second = simulate(path, Script(checkpoint_every=4), epoch=2, disk=first.disk)
    assert second.status == 0
    chosen = [r["event"] for r in read_journal(path) if r["kind"] == "move"]
    chosen = [event for event in chosen if event["event"] == "restore_point_selected"]
    assert chosen[-1]["step"] == 20
    assert second.daemon.job.step_max == -1
    assert replay_file(path).difference == ""


@pytest.mark.parametrize("how", ["stop", "slot"])
def test_a_rollback_survives_what_comes_before_it_is_done(how: str) -> None:
    """Replicas differed at step 35 and agreed at 30. The job was stopped in its backoff, with or
    without the loss of a slot: the next run took checkpoint 32, which holds the difference."""
    job = Job(limits=Limits(backoff_base_s=4.0))
    machine = JobMachine(job)
    records: list[dict[str, Any]] = [{"kind": "job", "job": job.to_dict()}]
    seed: dict[str, Any] = {"kind": "seed", "step": 0, "path": "", "saved_by": 0}
    crash: dict[str, Any] = {
        "status": None,
        "signal": "SIGKILL",
        "phase": "step",
        "step": 3,
        "detail": "",
    }
    story: list[e.Event] = [
        e.JobStarted(at=1, after=""),
        e.RestorePointSelected(at=2, generation=1, **seed),
        e.SlotsPlaced(at=3, generation=1, placement=1, slots=()),
        e.WorkersInitialized(at=4, generation=1, step=0),
        # A first failure, so that the second recovery has a backoff.
        e.WorkerCrashed(at=5, generation=1, ranks=(0,), primary=True, **crash),
        e.WorkersGone(at=6, generation=1, exits=()),
        e.RestorePointSelected(at=7, generation=2, **seed),
        e.WorkersRestored(at=8, generation=2, step=0),
        e.ReplicasDiverged(at=9, generation=2, step=35, ranks=(1,), agreed_step=30, why="w"),
        e.WorkersGone(at=10, generation=2, exits=()),
    ]
    if how == "slot":
        story.append(e.SlotLost(at=11, generation=3, ranks=(0,), why="w"))
    story += [e.StopRequested(at=12, by="operator"), e.WorkersGone(at=13, generation=3, exits=())]
    for event in story:
        records += [{"kind": "move", **move.to_dict()} for move in machine.handle(event)]
    assert machine.job.state.name == "STOPPED"
    assert machine.job.step_max == 30
    assert past_of(records).step_max == 30


def _just_after_the_parting(folder: Path) -> float:
    """Virtual seconds at which the job drains for it, before its workers are gone."""
    script = Script(replicas_diverge_at=28, checkpoint_every=4, agreed_every=20)
    sim = simulate(folder / "look.jsonl", script)
    times = {m["event"]["event"]: m["event"]["at"] for m in sim.moves}
    began = sim.moves[0]["event"]["at"]
    return float(times["replicas_diverged"] - began) + 0.001


def test_backoff_doubles_from_the_second_failure_in_a_row(tmp_path: Path) -> None:
    """A job that dies at once over and over must not hammer the cluster."""
    script = Script(faults=[Fault(kind="kill", step=5, generation=0, times=99)])
    sim = simulate(tmp_path / "journal.jsonl", script, limits=Limits(failures_max=5))
    granted = [m["event"] for m in sim.moves if m["event"]["event"] == "retry_granted"]
    waits = [event["backoff_s"] for event in granted]
    assert waits[0] == 0
    for doubled, wait in enumerate(waits[1:]):
        assert 0.75 * 2**doubled <= wait <= 1.25 * 2**doubled


def test_the_divergent_trace_differs_in_one_decision() -> None:
    """The divergent trace is a real one with one target altered, nothing else."""
    real = [json.dumps(record) for record in read_journal(TRACES / "killed_in_step.jsonl")]
    bent = [json.dumps(record) for record in read_journal(TRACES / "divergent.jsonl")]
    assert sum(a != b for a, b in zip(real, bent, strict=True)) == 1
