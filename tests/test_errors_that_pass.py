"""A disk or a slot that fails once and is well again, in virtual time: the job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supervisor.cluster.slots import ClusterError
from supervisor.daemon.loop import Daemon
from supervisor.fsm.job import Limits
from supervisor.record.replay import replay_file
from tests.sim.run import Sim, simulate
from tests.sim.world import Fault, Script, SimCluster, SimDisk

SILENT = ClusterError("the slot of rank 1 did not answer `discard_snapshot` within 5.0 s")


def fail(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, error: Exception) -> list[int]:
    """From its first call on, `name` fails so often as the list that comes back is long."""
    left = [1, 2]
    real = getattr(kind, name)

    async def flaky(self: Any, *arguments: Any) -> Any:
        if left:
            left.pop()
            raise error
        return await real(self, *arguments)

    monkeypatch.setattr(kind, name, flaky)
    return left


def chosen(sim: Sim) -> dict[str, Any]:
    """The last restore point that was selected."""
    events = [move["event"] for move in sim.moves]
    found = [event for event in events if event["event"] == "restore_point_selected"]
    last: dict[str, Any] = found[-1]
    return last


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        (SimDisk, "quarantine_above", OSError(5, "Input/output error")),
        (SimCluster, "discard_snapshot", SILENT),
    ],
)
def test_a_rollback_that_meets_an_error_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, error: Exception
) -> None:
    """One EIO, or one late slot, while a rollback set aside what lay above its target: the job
    stayed in RESTORING for ever, since nothing answered the effect that had failed."""
    left = fail(monkeypatch, kind, name, error)
    script = Script(steps=60, snapshot_every=1, bad_batches={33: "rollback"})
    sim = simulate(tmp_path / "journal.jsonl", script)
    assert left == []
    assert sim.names.count("restore_points_unreadable") == 2
    assert sim.status == 0
    assert (chosen(sim)["kind"], chosen(sim)["step"]) == ("checkpoint", 30)
    assert all(snapshot.generation > 1 for snapshot in sim.cluster.held)


def test_a_damaged_snapshot_that_cannot_be_discarded_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot answered late when a rejected snapshot was to be discarded: the job failed with "do
    not requeue", though an older snapshot and checkpoints were there."""
    left = fail(monkeypatch, SimCluster, "discard_snapshot", SILENT)
    faults = [
        Fault(kind="kill", step=36),
        Fault(kind="reject", phase="restore", generation=2, rank=0),
    ]
    script = Script(steps=60, snapshot_every=1, faults=faults)
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, script, limits=Limits(standby="generation"))
    assert left == [1]
    assert sim.status == 0
    assert (chosen(sim)["kind"], chosen(sim)["step"]) == ("snapshot", 35)
    assert sim.cluster.held[-1].generation == sim.daemon.job.active
    assert replay_file(path).difference == ""


def test_a_committed_checkpoint_that_is_passed_over_is_an_event_with_its_reason(
    tmp_path: Path,
) -> None:
    """One bit of metadata was flipped: the checkpoint was passed over without a word, and seven
    steps were done twice. It is reported once, and is no longer listed as verified."""

    def damage(daemon: Daemon, cluster: SimCluster) -> None:
        cluster.disk.points.pop()

    faults = [Fault(kind="kill", step=35), Fault(kind="kill", step=36, generation=2)]
    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(steps=60, faults=faults), meddle={12.9: damage})
    skipped = [m["event"] for m in sim.moves if m["event"]["event"] == "checkpoint_skipped"]
    assert [(event["saved_by"], event["step"]) for event in skipped] == [(1, 30)]
    assert skipped[0]["why"] == "its metadata is damaged"
    assert sim.status == 0
    assert replay_file(path).difference == ""
