"""Recoveries in which a second thing goes wrong, in virtual time: each ends, and pays once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor.daemon.loop import Daemon
from supervisor.disk.restore_points import RestorePoint
from supervisor.fsm.job import Limits
from supervisor.record.journal import Journal
from tests.sim.run import Killed, MortalJournal, Sim, simulate
from tests.sim.world import Fault, Script, SimCluster, SimDisk

STANDBY = Limits(standby="generation")
LIMIT_S = 3000.0
"""Virtual seconds: what takes longer here takes for ever."""


def line_of(sim: Sim, name: str, generation: int | None = None, nth: int = 0) -> int:
    """The line of the journal that holds the nth event of this name."""
    lines = [
        move["seq"]
        for move in sim.moves
        if move["event"]["event"] == name and generation in (None, move["event"].get("generation"))
    ]
    return int(lines[nth])


def orders(sim: Sim, name: str) -> list[int]:
    """The generations that got this order."""
    return [
        effect["generation"]
        for move in sim.moves
        for effect in move["effects"]
        if effect["effect"] == name
    ]


def test_a_standby_promoted_half_built_is_not_built_again_by_the_next_daemon(
    tmp_path: Path,
) -> None:
    """A worker died while the standby was started, which was promoted then. Long afterwards the
    daemon died; the next one took the order to prepare it for one that was still open, and no
    longer understood what its workers reported: the job never completed."""

    def script() -> Script:
        return Script(steps=200, snapshot_every=1, faults=[Fault(kind="kill", step=8)])

    undisturbed = simulate(tmp_path / "undisturbed.jsonl", script(), limits=STANDBY)
    assert orders(undisturbed, "PromoteStandby") == [2]
    line = line_of(undisturbed, "checkpoint_committed", 2, 8)
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, script(), limits=STANDBY, die_after=line, limit_s=LIMIT_S)
    assert sim.status == 0
    assert orders(sim, "PrepareStandby") == orders(undisturbed, "PrepareStandby")


def test_what_workers_report_survives_an_order_that_is_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order to start reached the slots, its outcome never reached the journal. The reports of
    the workers came in while the next daemon could not write yet; the order, given again, threw
    them away, and the job never completed."""

    class DiesBefore(MortalJournal):
        """A journal whose first daemon dies before the outcome of the start is written."""

        def append(self, records: Any, *, durable: bool = True) -> None:
            records = list(records)
            names = {record.get("event", {}).get("event") for record in records}
            if self.epoch == 1 and "workers_started" in names:
                raise Killed
            Journal.append(self, records, durable=durable)

    monkeypatch.setattr("tests.sim.run.MortalJournal", DiesBefore)
    script = Script(steps=100)
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, script, die_after=10**6, dead_s=6.0, limit_s=LIMIT_S)
    assert sim.status == 0
    assert sim.daemon.job.generation == 1


def test_a_standby_promoted_by_the_next_daemon_is_monitored(tmp_path: Path) -> None:
    """The daemon died between the crash and the proof that the workers were gone. The next one
    promoted the standby without arming its monitor: when a rank stopped, no one noticed."""

    def script() -> Script:
        faults = [Fault(kind="kill", step=50), Fault(kind="stop", step=60, generation=2)]
        return Script(steps=100, snapshot_every=1, faults=faults)

    undisturbed = simulate(tmp_path / "undisturbed.jsonl", script(), limits=STANDBY)
    line = line_of(undisturbed, "worker_crashed")
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, script(), limits=STANDBY, die_after=line, limit_s=LIMIT_S)
    assert sim.status == 0
    assert {"heartbeat_lost", "progress_stalled"} & set(sim.names)


def test_a_promoted_standby_that_does_not_take_the_order_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats went on, its loop stayed in `wait`, which had no deadline: RESTORING for
    ever. The way from the promotion to the first step has the deadline of `restore`."""
    order = SimCluster.order

    async def lost(self: SimCluster, generation: int, rank: int, given: dict[str, Any]) -> None:
        if generation != 2:
            await order(self, generation, rank, given)

    monkeypatch.setattr(SimCluster, "order", lost)
    script = Script(steps=100, faults=[Fault(kind="kill", step=60)])
    sim = simulate(tmp_path / "journal.jsonl", script, limits=STANDBY, limit_s=LIMIT_S)
    assert sim.status == 0
    assert sim.event("progress_stalled")["phase"] == "wait"
    assert len(sim.daemon.job.spent["worker"]) == 1  # the same incident, with new workers


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    look = SimDisk.restore_points

    async def slow(self: SimDisk, accepted: Sequence[int]) -> list[RestorePoint]:
        await asyncio.sleep(seconds)
        return await look(self, accepted)

    monkeypatch.setattr(SimDisk, "restore_points", slow)


def test_a_restore_point_found_late_does_not_end_the_backoff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where looking ahead took longer than the kill, the answer promoted the standby in the midst
    of the backoff, and the end of the backoff promoted it once more."""
    slow_disk(monkeypatch, 0.3)
    faults = [Fault(kind="kill", step=60, generation=0, times=3)]
    script = Script(steps=80, restore_s=5.0, checkpoint_every=500, faults=faults)
    limits = Limits(standby="generation", backoff_base_s=4.0)
    sim = simulate(tmp_path / "journal.jsonl", script, limits=limits, limit_s=LIMIT_S)
    promoted = orders(sim, "PromoteStandby")
    assert len(promoted) == len(set(promoted)) == 3
    granted = [move["event"] for move in sim.moves if move["event"]["event"] == "retry_granted"]
    at = {
        effect["generation"]: move["event"]["at"]
        for move in sim.moves
        for effect in move["effects"]
        if effect["effect"] == "PromoteStandby"
    }
    assert granted[-1]["backoff_s"] > 2.0
    for retry, generation in zip(granted, promoted, strict=True):
        assert at[generation] - retry["at"] >= retry["backoff_s"]


def test_no_progress_counts_a_generation_once_with_a_standby_and_without(tmp_path: Path) -> None:
    """What was found ahead counted as a generation of its own: with a standby the job FAILED
    after half as many failures."""

    def failures(standby: str) -> int:
        faults = [Fault(kind="kill", step=60, generation=0, times=99)]
        script = Script(steps=200, checkpoint_every=500, faults=faults)
        limits = Limits(standby=standby, no_progress_max=6, failures_max=-1)
        sim: Sim = simulate(tmp_path / f"{standby}.jsonl", script, limits=limits, limit_s=LIMIT_S)
        assert sim.status == 4
        return sim.names.count("worker_crashed")

    assert failures("none") == failures("generation") == 7


@pytest.mark.parametrize("where", ["RESTORING", "PROVISIONING"])
def test_slots_that_die_one_after_another_are_one_incident(tmp_path: Path, where: str) -> None:
    """The slots of one node died a second apart, while the job backed off or waited for a node:
    each was charged, and the wait began anew."""

    def lose(rank: int) -> Any:
        return lambda _, cluster: cluster.on_slot_lost((rank,), "its node has died", True)

    def shrink(_: Daemon, cluster: SimCluster) -> None:
        cluster.script.shortage, cluster.script.shortage_until = "needs 2 CPUs", 40.0
        cluster.on_slot_lost((0,), "its node has died", True)

    if where == "RESTORING":
        crash = [Fault(kind="kill", step=25)]
        script = Script(steps=300, checkpoint_every=500, faults=crash)
        limits, meddle = Limits(backoff_base_s=4.0), {22.0: lose(0), 23.0: lose(1)}
    else:
        script, limits = Script(steps=100), Limits(capacity_wait_s=60.0)
        meddle = {15.0: shrink, 25.0: lose(1)}
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, script, limits=limits, meddle=meddle, limit_s=LIMIT_S)
    second = [move for move in sim.moves if move["event"]["event"] == "node_lost"][1]
    assert (second["source"], second["target"]) == (where, where)
    assert sim.status == 0
    assert len(sim.daemon.job.spent["node"]) == 1


def test_capacity_that_came_in_time_may_be_placed_in_peace(tmp_path: Path) -> None:
    """The node joined after 58 of 60 s, and its slots needed 5 s to start: FAILED after 60 s."""
    script = Script(steps=20, shortage="needs 4 CPUs", shortage_until=58.0, placement_s=5.0)
    limits = Limits(capacity_wait_s=60.0)
    sim = simulate(tmp_path / "journal.jsonl", script, limits=limits)
    assert sim.status == 0
    assert sim.event("slots_placed")["at"] - sim.event("capacity_missing")["at"] > 60.0


def test_a_daemon_that_comes_back_does_not_wait_for_capacity_that_is_there(
    tmp_path: Path,
) -> None:
    """The node joined while no daemon lived. The wait that the next one found in the journal has
    ended; only the limit of the placement counts."""
    script = Script(steps=20, shortage="needs 4 CPUs", shortage_until=10.0, placement_s=65.0)
    limits = Limits(capacity_wait_s=60.0)
    waiting = simulate(tmp_path / "undisturbed.jsonl", script, limits=limits)
    script.shortage_until = 10.0
    line = line_of(waiting, "capacity_missing")
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, script, limits=limits, die_after=line, dead_s=20.0)
    assert sim.status == 0
    assert "capacity_found" not in sim.names


def test_beside_a_standby_that_may_still_live_no_other_is_started(tmp_path: Path) -> None:
    """The exit of a lost standby could not be proven: this went by in silence, and the next one
    was started beside it. The slots must be placed anew, as soon as the active generation ends."""
    faults = [
        Fault(kind="raise", phase="wait", generation=2, rank=0),
        Fault(kind="kill", step=150),
    ]
    script = Script(steps=200, unkillable={(2, 1)}, faults=faults)
    sim = simulate(tmp_path / "journal.jsonl", script, limits=STANDBY)
    assert sim.status == 0
    assert any("pid 201" in name for name in sim.daemon.job.unproven)
    assert "pid 201" in sim.disk.result["reason"]
    assert [call for call in sim.cluster.calls if call.startswith("place")] == [
        "place 1",
        "place 2",
    ]
    first = line_of(sim, "exit_unproven")
    prepared = [
        move["seq"]
        for move in sim.moves
        for x in move["effects"]
        if x["effect"] == "PrepareStandby"
    ]
    assert all(line < first or line > line_of(sim, "slots_placed", nth=1) for line in prepared)


def test_replicas_that_differ_go_back_to_the_last_agreement_and_not_to_the_seed(
    tmp_path: Path,
) -> None:
    """Compared every 100 steps, saved every 10, two kept: retention had deleted all on which the
    replicas were known to agree, and the job started over from its seed."""
    script = Script(steps=250, replicas_diverge_at=195, agreed_every=100)
    sim = simulate(tmp_path / "journal.jsonl", script)
    chosen = [
        (move["event"]["kind"], move["event"]["step"])
        for move in sim.moves
        if move["event"]["event"] == "restore_point_selected"
    ]
    assert chosen == [("seed", 0), ("checkpoint", 100)]
    assert sim.status == 0
    kept = {point.step for point in sim.disk.points}
    assert kept == {200, 240, 250}  # the newest two, and the newest that all agreed on


def test_a_rollback_without_a_target_fails_the_job_and_sets_nothing_aside(tmp_path: Path) -> None:
    """Something is committed and nothing lies at or below the agreed step: to start over from the
    seed would lose it. What is there stays, for an operator to look at."""
    script = Script(steps=250, replicas_diverge_at=95, agreed_every=100)
    sim = simulate(tmp_path / "journal.jsonl", script)
    assert (sim.states[-1], sim.status) == ("FAILED", 4)
    assert sim.disk.quarantined == []
    assert [point.step for point in sim.disk.points] == [80, 90]
    assert "step 0 or before" in sim.disk.result["reason"]


def crashes(count: int) -> list[Fault]:
    return [Fault(kind="raise", phase="compile", generation=2 + nth) for nth in range(count)]


def test_the_pause_of_a_standby_outlasts_a_recovery(tmp_path: Path) -> None:
    """A crash must not be the moment at which what has just failed three times is tried again."""
    script = Script(
        steps=1000,
        snapshot_every=1,
        checkpoint_every=500,
        faults=[*crashes(3), Fault(kind="kill", step=300)],
    )
    sim = simulate(tmp_path / "journal.jsonl", script, limits=STANDBY)
    assert sim.status == 0
    assert orders(sim, "PrepareStandby") == [2, 3, 4, 6]
    taken = [move for move in sim.moves if move["event"]["event"] == "first_step_taken"][-1]
    assert [effect["effect"] for effect in taken["effects"]] == ["SetDeadline"]
    assert taken["effects"][0]["seconds"] == 60.0
