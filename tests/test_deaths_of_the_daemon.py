"""`kill -9` of the daemon after every single line of its journal, in virtual time.

Whatever it had decided and not done is done by the next one, once; the job ends as it would have.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import supervisor.record.journal
from supervisor.cluster.slots import ClusterError, ClusterOutOfReach
from supervisor.fsm.job import Limits
from supervisor.record.journal import archives, decode, encode, last_segment, read_journal
from supervisor.record.previous_run import past_of
from supervisor.record.replay import replay_file
from tests.sim.run import Meddling, MortalJournal, Sim, simulate
from tests.sim.world import Fault, Script, SimCluster
from tests.test_scenarios import stop

STANDBY = Limits(standby="generation")


def crash() -> tuple[Script, Limits, dict[float, Meddling]]:
    return Script(faults=[Fault(kind="kill", step=25)]), Limits(), {}


def hang() -> tuple[Script, Limits, dict[float, Meddling]]:
    return Script(faults=[Fault(kind="stop", step=25)]), Limits(), {}


def promotion() -> tuple[Script, Limits, dict[float, Meddling]]:
    script = Script(faults=[Fault(kind="kill", step=36)], snapshot_every=1, steps=60)
    return script, STANDBY, {}


def damaged_snapshot() -> tuple[Script, Limits, dict[float, Meddling]]:
    faults = [
        Fault(kind="kill", step=36),
        Fault(kind="reject", phase="restore", generation=2, rank=0),
    ]
    return Script(faults=faults, snapshot_every=1, steps=60), STANDBY, {}


def drain() -> tuple[Script, Limits, dict[float, Meddling]]:
    return Script(steps=400), STANDBY, {16.0: stop()}


STORIES = {one.__name__: one for one in (crash, hang, promotion, damaged_snapshot, drain)}


def lines_of(story: str, path: Path) -> tuple[int, Sim]:
    script, limits, meddle = STORIES[story]()
    sim = simulate(path, script, limits=limits, meddle=meddle)
    return len(sim.records), sim


@pytest.mark.parametrize("story", STORIES)
def test_the_daemon_may_die_after_any_line(story: str, tmp_path: Path) -> None:
    """The same end, the same steps, never two generations, never a start done twice."""
    lines, undisturbed = lines_of(story, tmp_path / "undisturbed.jsonl")
    assert lines > 15
    for line in range(2, lines + 1):
        path = tmp_path / f"killed-after-{line}.jsonl"
        script, limits, meddle = STORIES[story]()
        sim = simulate(path, script, limits=limits, meddle=meddle, die_after=line)
        if sim is None:
            assert line > lines - 4  # all was done already
            continue
        assert sim.status == undisturbed.status, line
        assert sim.states[-1] == undisturbed.states[-1], line
        assert not sim.cluster.ever_two_alive, line
        starts = [call for call in sim.cluster.calls if call.startswith("start")]
        live = {one.generation for one in sim.cluster.workers.values()}
        assert len(starts) - len(live) <= 1, (line, starts)  # once more, for the one in flight
        assert len(sim.daemon.job.spent.get("worker", ())) == len(
            undisturbed.daemon.job.spent.get("worker", ())
        ), line
        assert all(one.exit is not None for one in sim.cluster.workers.values()), line
        assert sim.disk.result is not None, line
        assert replay_file(path).difference == "", line


@pytest.mark.parametrize("story", STORIES)
def test_a_daemon_that_comes_back_needs_none_of_the_news(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot keeps so many reports. After six hours `ready` was not among them, and a job whose
    daemon was started again then never ended. What was reached is told apart from the news."""
    monkeypatch.setattr(SimCluster, "window", 0)
    lines, undisturbed = lines_of(story, tmp_path / "undisturbed.jsonl")
    for line in range(2, lines - 3, 3):
        script, limits, meddle = STORIES[story]()
        path = tmp_path / f"killed-after-{line}.jsonl"
        sim = simulate(path, script, limits=limits, meddle=meddle, die_after=line)
        assert (sim.status, sim.states[-1]) == (undisturbed.status, undisturbed.states[-1]), line
        assert not sim.cluster.ever_two_alive, line


def test_training_goes_on_while_the_daemon_is_dead(tmp_path: Path) -> None:
    """Ray Train's controller dies with its driver, and the run with it. Ours must not."""
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(steps=400), die_after=13, dead_s=20.0)
    assert sim.status == 0
    assert sim.daemon.job.generation == 1
    assert sim.cluster.calls.count("start 1") == 1
    restarted = sim.event("supervisor_restarted")
    assert restarted["adopted"] == [[1, 0, 100], [1, 1, 101]]
    assert sim.virtual_s == pytest.approx(lines_of_undisturbed(tmp_path), abs=2.0)


def lines_of_undisturbed(tmp_path: Path) -> float:
    sim: Sim = simulate(tmp_path / "undisturbed.jsonl", Script(steps=400))
    return sim.virtual_s


def test_a_crash_while_the_daemon_is_dead_is_an_ordinary_failure(tmp_path: Path) -> None:
    """It is found when the daemon comes back, and charged to the workers, not to the restart."""
    path = tmp_path / "journal.jsonl"
    script = Script(faults=[Fault(kind="kill", step=30)])
    sim = simulate(path, script, die_after=14, dead_s=20.0)
    assert sim.status == 0
    assert len(sim.daemon.job.spent["worker"]) == 1
    assert sim.names.index("supervisor_restarted") < sim.names.index("worker_crashed")


def test_a_job_that_finishes_while_the_daemon_is_dead_is_completed_by_the_next(
    tmp_path: Path,
) -> None:
    """The workers commit and wait; nothing is trained twice."""
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(), die_after=14, dead_s=60.0)
    assert sim.status == 0
    assert sim.states[-1] == "COMPLETED"
    assert sim.daemon.job.generation == 1
    assert [r["kind"] for r in read_journal(path)].count("header") == 1


@pytest.mark.parametrize("story", STORIES)
def test_a_journal_that_rolls_over_loses_nothing_of_what_it_tells(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets, recoveries, and the whole history replay as if it were one file."""
    monkeypatch.setattr(supervisor.record.journal, "ARCHIVES_KEPT", 1000)
    script, limits, meddle = STORIES[story]()
    whole = simulate(tmp_path / "whole.jsonl", script, limits=limits, meddle=meddle)
    script, limits, meddle = STORIES[story]()
    path = tmp_path / "rolled" / "journal.jsonl"
    path.parent.mkdir()
    sim = simulate(path, script, limits=limits, meddle=meddle, roll_bytes=2600)
    assert len(archives(path)) >= 2
    assert sim.status == whole.status
    assert sim.names == whole.names
    assert sim.daemon.chronicle.recoveries() == whole.daemon.chronicle.recoveries()
    assert sim.daemon.job.spent == whole.daemon.job.spent
    report = replay_file(path)
    assert report.difference == ""
    assert (report.moves, report.segments) == (len(whole.moves), 1)
    alone = tmp_path / "alone" / "journal.jsonl"  # what an operator copies away
    alone.parent.mkdir()
    shutil.copy(path, alone)
    assert replay_file(alone).difference == ""
    assert replay_file(alone).state == sim.states[-1]
    past, expected = past_of(last_segment(path)), past_of(whole.records)
    assert (past.state, past.generation, past.placement, past.incidents, past.committed_step) == (
        expected.state,
        expected.generation,
        expected.placement,
        expected.incidents,
        expected.committed_step,
    )


def test_a_journal_rolls_over_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading 8 MB of it held up the daemon, and every event of the job, for 0.36 s."""
    lines_read: list[bytes] = []

    def counting(line: bytes) -> dict[str, Any]:
        lines_read.append(line)
        return decode(line)

    monkeypatch.setattr(supervisor.record.journal, "decode", counting)
    script, limits, _ = STORIES["promotion"]()
    path = tmp_path / "rolled" / "journal.jsonl"
    path.parent.mkdir()
    seen: list[tuple[int, int]] = []
    meddle = {15.0: lambda *_: seen.append((len(archives(path)), len(lines_read)))}
    simulate(path, script, limits=limits, meddle=meddle, roll_bytes=1500)
    ((rolled, read),) = seen
    assert rolled >= 2
    assert read == 0


def test_what_is_told_at_the_end_does_not_hang_on_how_many_old_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recoveries of result.json, and the numbers that only grow, go along with each roll."""
    monkeypatch.setattr(supervisor.record.journal, "ARCHIVES_KEPT", 1)
    script, limits, meddle = STORIES["damaged_snapshot"]()
    whole = simulate(tmp_path / "whole.jsonl", script, limits=limits, meddle=meddle)
    script, limits, meddle = STORIES["damaged_snapshot"]()
    path = tmp_path / "rolled" / "journal.jsonl"
    path.parent.mkdir()
    sim = simulate(path, script, limits=limits, meddle=meddle, roll_bytes=2000)
    assert len(archives(path)) == 1
    assert len(sim.moves) < len(whole.moves)
    assert sim.daemon.chronicle.recoveries() == whole.daemon.chronicle.recoveries()
    assert past_of(last_segment(path)).generation == past_of(whole.records).generation
    assert replay_file(path).difference == ""


def test_the_daemon_may_die_anywhere_in_a_journal_that_rolls_over(tmp_path: Path) -> None:
    """What was ordered before the roll and not done is done by the next daemon all the same."""
    story = "promotion"
    script, limits, meddle = STORIES[story]()
    undisturbed = simulate(
        tmp_path / "whole.jsonl", script, limits=limits, meddle=meddle, roll_bytes=1500
    )
    last = undisturbed.records[-1]["seq"]
    for line in range(2, last + 1, 3):
        path = tmp_path / str(line) / "journal.jsonl"
        path.parent.mkdir()
        script, limits, meddle = STORIES[story]()
        sim = simulate(path, script, limits=limits, meddle=meddle, die_after=line, roll_bytes=1500)
        if sim is None:
            assert line > last - 6
            continue
        assert (sim.status, sim.states[-1]) == (undisturbed.status, undisturbed.states[-1]), line
        assert not sim.cluster.ever_two_alive, line
        rows = sim.daemon.chronicle.recoveries()
        assert len(rows) == len(undisturbed.daemon.chronicle.recoveries()), line
        assert all(row["total_s"] is not None for row in rows), line
        assert replay_file(path).difference == "", line


def doubt(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[SimCluster]:
    """For so long after a daemon first asks for its slots, one of them does not answer."""
    asked: list[SimCluster] = []
    until: list[float] = []
    adopt = SimCluster.adopt

    async def late(self: SimCluster, placement: int) -> dict[int, dict[int, int]] | None:
        now = asyncio.get_running_loop().time()
        asked.append(self)
        until.append(now + seconds)
        await asyncio.sleep(5.0)
        if now < until[0]:
            raise ClusterError("the slot of rank 1 did not answer `describe` within 5.0 s")
        return await adopt(self, placement)

    monkeypatch.setattr(SimCluster, "adopt", late)
    return asked


def test_a_slot_that_answers_late_to_a_daemon_that_came_back_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node was busy for half a minute: all healthy workers were ended, and charged for it."""
    asked = doubt(monkeypatch, 30.0)
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(steps=600), die_after=14)
    assert len(asked) > 3
    assert sim.status == 0
    assert sim.daemon.job.generation == 1
    assert sim.cluster.calls.count("start 1") == 1
    assert sim.daemon.job.spent == {}


def test_slots_that_went_with_the_daemons_host_cost_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was started again, and the loss of its own slots was charged to the workers."""

    async def gone(self: SimCluster, placement: int) -> None:
        await self.end_all()

    monkeypatch.setattr(SimCluster, "adopt", gone)
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(steps=60), limits=Limits(failures_max=0), die_after=14, dead_s=1.0)
    assert sim.status == 0
    assert sim.event("slots_vanished")["why"] == "gone when the daemon came back"
    assert sim.daemon.job.spent == {}
    assert replay_file(path).difference == ""


def test_a_cluster_that_stays_out_of_reach_ends_the_daemon_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray was slow for minutes. The daemon said that this was a bug of everstep, and on its way out
    it stopped what still trained."""
    asked = doubt(monkeypatch, 1e6)
    path = tmp_path / "journal.jsonl"
    with pytest.raises(ClusterOutOfReach, match="whatever trains was left alone") as caught:
        simulate(path, Script(steps=5000), die_after=14)
    assert caught.value.exit_status == 75
    assert "release" not in asked[-1].calls
    assert not any(call.startswith("kill") for call in asked[-1].calls)
    assert past_of(last_segment(path)).state == "RUNNING"  # the same command goes on from here


def orphans_ended(**facts: Any) -> dict[str, Any]:
    return {"after_s": 3600.0, "at": 1.0, "step": -1, "saved": False, "completed": None, **facts}


def test_orphans_that_saved_and_ended_cost_no_budget(tmp_path: Path) -> None:
    """Nobody started the daemon again for an hour; the job goes on from what they saved."""
    path = tmp_path / "journal.jsonl"
    script = Script(steps=60, orphans_ended=orphans_ended(step=20, saved=True))
    sim = simulate(path, script, limits=Limits(failures_max=0), die_after=14, dead_s=60.0)
    assert sim.status == 0
    orphaned = sim.event("workers_orphaned")
    assert orphaned["why"] == "no daemon was heard of for 3600 s; step 20 is saved"
    assert sim.daemon.job.spent == {}
    assert sim.daemon.job.generation == 2
    assert not sim.cluster.ever_two_alive
    assert replay_file(path).difference == ""


@pytest.mark.parametrize("line", [8, 12, 14])
def test_a_job_that_finished_as_an_orphan_is_completed_from_the_files(
    tmp_path: Path, line: int
) -> None:
    """It committed, waited, and ended; the next daemon has nothing to start, in any state."""
    path = tmp_path / "journal.jsonl"
    done = {"step": 40, "params_digest": "d" * 64, "loss": 1.0, "held_out_loss": 1.1}
    script = Script(orphans_ended=orphans_ended(step=40, saved=True, completed=done))
    sim = simulate(path, script, die_after=line, dead_s=60.0)
    assert sim.status == 0
    assert sim.states[-1] == "COMPLETED"
    assert sim.daemon.job.result["params_digest"] == "d" * 64
    assert sim.daemon.job.generation == 1
    assert sim.daemon.job.incidents == 0
    assert replay_file(path).difference == ""


def of_another_table(path: Path) -> None:
    """As if an older version had written the journal."""
    lines = path.read_bytes().splitlines(keepends=True)
    header = decode(lines[0])
    path.write_bytes(encode({**header, "table": "0" * 16}) + b"".join(lines[1:]))


@pytest.mark.parametrize("snapshot_every", [0, 1])
def test_a_journal_of_another_table_is_drained_and_goes_on_in_a_new_segment(
    tmp_path: Path, snapshot_every: int
) -> None:
    """everstep was upgraded while the job trained: what nobody can go on with saves, and ends."""
    path = tmp_path / "journal.jsonl"
    script = Script(steps=200, checkpoint_every=500, snapshot_every=snapshot_every)

    class Upgraded(MortalJournal):
        def __init__(self, path: Path, *, epoch: int) -> None:
            if epoch == 2:
                of_another_table(path)
            super().__init__(path, epoch=epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.sim.run.MortalJournal", Upgraded)
        sim = simulate(path, script, limits=STANDBY, die_after=14, dead_s=5.0)
    assert sim.status == 0
    records = list(read_journal(path))
    headers = [record["seq"] for record in records if record["kind"] == "header"]
    assert len(headers) == 2
    started = sim.event("job_started")
    assert started["after"] == ""
    (_, second) = [m["event"] for m in sim.moves if m["event"]["event"] == "job_started"]
    assert second["after"] == "RUNNING"
    chosen = [m["event"] for m in sim.moves if m["event"]["event"] == "restore_point_selected"][-1]
    assert chosen["kind"] == ("snapshot" if snapshot_every else "checkpoint")
    assert chosen["saved_by"] == 1
    assert chosen["step"] > 20  # nothing was lost of what had been reached
    assert sim.daemon.job.generation >= 3  # the standby's number is not used again
    assert not sim.cluster.ever_two_alive
    report = replay_file(path)
    assert (report.difference, report.segments) == ("", 2)
    assert "written by table 0000000000000000" in report.notes[0]


def test_changed_settings_wait_for_the_next_restart_of_the_workers(tmp_path: Path) -> None:
    """A daemon started again with other settings must not disturb workers that train."""
    path = tmp_path / "journal.jsonl"
    script = Script(steps=200, faults=[Fault(kind="kill", step=60)], snapshot_every=1)
    sim = simulate(path, script, limits=STANDBY, die_after=14, dead_s=2.0, renews=True)
    assert sim.status == 0
    records = sim.records
    headers = [record["seq"] for record in records if record["kind"] == "header"]
    assert len(headers) == 2
    names = [m["event"]["event"] for m in sim.moves if m["seq"] < headers[1]]
    assert names.index("supervisor_restarted") < names.index("worker_crashed")
    assert names[-1] == "retry_granted"  # and what it ordered was left to the next run
    starts = [call for call in sim.cluster.calls if call.startswith(("place", "start"))]
    assert starts[0] == "place 1"
    assert "place 2" in starts
    assert not sim.cluster.ever_two_alive
    (row,) = sim.daemon.chronicle.recoveries()
    assert row["event"] == "worker_crashed"
    assert row["total_s"] is not None
    assert row["resumed_step"] >= 59
    assert replay_file(path).difference == ""


def test_without_a_restart_changed_settings_never_count(tmp_path: Path) -> None:
    """The job runs to its end as it began."""
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(steps=100), die_after=14, dead_s=2.0, renews=True)
    assert sim.status == 0
    assert sim.daemon.job.generation == 1
    assert [r["kind"] for r in read_journal(path)].count("header") == 1


def test_a_stop_prevails_over_changed_settings(tmp_path: Path) -> None:
    """Nobody wants the job started anew in order to be stopped."""
    path = tmp_path / "journal.jsonl"
    sim = simulate(
        path,
        Script(steps=400),
        limits=STANDBY,
        meddle={16.0: stop()},
        die_after=14,
        dead_s=2.0,
        renews=True,
    )
    assert sim.states[-1] == "STOPPED"
    assert [r["kind"] for r in read_journal(path)].count("header") == 1
