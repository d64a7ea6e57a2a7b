"""A disk that is slow is no hang, and what cannot fit into a drain is said before it is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from supervisor.daemon.loop import Daemon
from supervisor.fsm import events as e
from supervisor.fsm.job import Limits
from tests.sim.run import Meddling, simulate
from tests.sim.world import Script, SimCluster

SAVE_S = 45.0


def stop(seen: list[str]) -> Meddling:
    def order(daemon: Daemon, _: SimCluster) -> None:
        seen.append(daemon.drain_warning)
        daemon.post(e.StopRequested(at=daemon.clock(), by="operator", now=False))

    return order


def run(tmp_path: Path, *, drain_s: float, stop_at_s: float | None, **script: Any) -> Any:
    seen: list[str] = []
    sim = simulate(
        tmp_path / "journal.jsonl",
        Script(
            steps=200 if stop_at_s is None else 2000, checkpoint_every=50, beside_s=SAVE_S, **script
        ),
        limits=Limits(drain_s=drain_s),
        meddle={} if stop_at_s is None else {stop_at_s: stop(seen)},
    )
    return sim, seen


def test_a_last_save_has_the_time_of_its_drain(tmp_path: Path) -> None:
    """With drain_s = 60 a save of 45 s was cut off at 32 s, as a hang, and 44 steps were lost."""
    sim, seen = run(tmp_path, drain_s=60.0, stop_at_s=40.0)
    assert seen == [""]
    assert sim.status == 5
    assert "progress_stalled" not in sim.names
    assert sim.event("workers_saved")["step"] > 50


def test_a_healthy_job_with_a_slow_last_save_completes(tmp_path: Path) -> None:
    """It was taken for a hang each time, started over, and FAILED in the end."""
    sim, _ = run(tmp_path, drain_s=30.0, stop_at_s=None)
    assert sim.status == 0
    assert "progress_stalled" not in sim.names
    assert sim.daemon.job.generation <= 2  # the second is the standby


def test_a_save_that_cannot_fit_is_said_when_the_stop_is_asked(tmp_path: Path) -> None:
    """With drain_s = 20 nothing said beforehand that a save takes 45 s."""
    with capture_logs() as lines:
        sim, seen = run(tmp_path, drain_s=20.0, stop_at_s=40.0)
    saved = [m["event"]["step"] for m in sim.moves if m["event"]["event"] == "checkpoint_committed"]
    assert seen == [
        (
            "a save took 45.0 s and deadlines.drain_s is 20 s: the last one may be cut off, "
            f"and the steps after {saved[-1]} be lost"
        )
    ]
    assert [line for line in lines if line["event"] == "save_exceeds_drain"]
    assert "last_save_failed" in sim.names
    assert sim.status == 5
