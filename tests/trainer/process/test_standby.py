"""Worlds that stand by, with real processes: what a kill costs, and what is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import Undisturbed
from tests.trainer.harness import TINY, Rank, World
from trainer.state import snapshot
from trainer.wire.heartbeat import read_beat_file

LONG = {**TINY, "steps": 100_000}


@pytest.fixture
def directory(world: World) -> Iterator[Path]:
    """Where this world's snapshots go; nothing of it may stay."""
    path = snapshot.directory_of(world.job_dir)
    yield path
    world.end()
    shutil.rmtree(path, ignore_errors=True)


def keeping(directory: Path, every_steps: int | str = 1) -> dict[str, Any]:
    return {"directory": str(directory), "every_steps": every_steps}


def fault(kind: str, **more: Any) -> dict[str, Any]:
    return {"id": "f1", "kind": kind, **more}


def newest(directory: Path) -> dict[str, Any]:
    info = snapshot.list_snapshots(directory)[0]
    place = {"kind": "snapshot", "path": str(directory)}
    return {**place, "step": info.step, "generation": info.generation}


def promote(ranks: list[Rank], point: dict[str, Any] | None) -> None:
    for rank in ranks:
        rank.order({"order": "promote", "restore_point": point})


def kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.end()


def same_end(world: World, ranks: list[Rank], undisturbed: Undisturbed) -> None:
    ends = [rank.until("completed") for rank in ranks]
    assert world.losses() == undisturbed.losses
    for name in ("params_digest", "loss", "held_out_loss"):
        assert {end[name] for end in ends} == {undisturbed.completed[0][name]}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_promoted_standby_goes_on_from_the_last_step_and_costs_no_bit(
    world: World, undisturbed: Undisturbed, directory: Path, victim: int
) -> None:
    """A killed worker costs the step in flight, and nothing of the result."""
    active = world.launch(snapshots=keeping(directory), faults={1: [fault("sleep", step=9)]})
    active[1].until("drill")
    standby = world.launch(generation=2, role="standby", snapshots=keeping(directory))
    standing = [rank.until("standing_by") for rank in standby]
    assert all(report["seconds"] > 0 for report in standing)
    assert all(report["rss_bytes"] > 1 << 20 for report in standing)
    assert read_beat_file(world.job_dir / "beat-2-0").phase == "wait"
    active[victim].signal(signal.SIGKILL)
    active[victim].until("exit")
    kill(active)
    point = newest(directory)
    assert (point["generation"], point["step"]) == (1, 9)
    promote(standby, point)
    for rank in standby:
        ready = rank.until("ready")
        assert ready["step"] == 9
        assert ready["differences"] == []
        assert rank.until("stepped")["step"] == 9
    same_end(world, standby, undisturbed)
    for rank in standby:
        assert "executable loaded" in rank.log.read_text()


def test_a_standby_without_a_restore_point_starts_from_the_seed(
    world: World, undisturbed: Undisturbed, directory: Path
) -> None:
    """A job that dies in its first step has nothing to go back to, and loses nothing."""
    standby = world.launch(generation=2, role="standby", snapshots=keeping(directory, 0))
    promote(standby, None)  # long before it stands by
    same_end(world, standby, undisturbed)
    assert "standing_by" not in standby[0].kinds()
    assert not directory.exists()


def test_a_standby_is_promoted_from_a_checkpoint_too(
    world: World, undisturbed: Undisturbed
) -> None:
    """Where memory is gone, as with a node, the disk is the next rung."""
    source = undisturbed.job_dir / "checkpoints" / "generation-1" / "8"
    target = world.job_dir / "checkpoints" / "generation-1" / "8"
    shutil.copytree(source, target)
    shutil.copy(undisturbed.job_dir / "metrics.jsonl", world.job_dir)
    standby = world.launch(generation=2, role="standby")
    standby[0].until("standing_by")
    promote(standby, {"kind": "checkpoint", "path": str(target), "step": 8, "generation": 1})
    assert standby[0].until("ready")["step"] == 8
    same_end(world, standby, undisturbed)


def test_an_order_to_promote_counts_once_and_only_for_a_standby(
    world: World, directory: Path
) -> None:
    """A late or doubled order must not reach into a running world."""
    ranks = world.launch(world_size=1, trainer=LONG)
    ranks[0].until("stepped")
    promote(ranks, None)
    standby = world.launch(world_size=1, generation=2, role="standby")
    standby[0].until("standing_by")
    standby[0].order({"order": "promote", "restore_point": {"kind": "tape"}})
    promote(standby, None)
    assert standby[0].until("ready")["step"] == 0
    promote(standby, None)
    standby[0].until("completed")
    assert ranks[0].process.poll() is None
    wait_for(lambda: "only a standby" in ranks[0].log.read_text())
    wait_for(lambda: standby[0].log.read_text().count("order refused") == 2)
    refusals = standby[0].log.read_text()
    assert "order.restore_point" in refusals
    assert "only once" in refusals


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, cut])
def test_a_damaged_snapshot_is_rejected_by_the_worker_with_its_place(
    world: World, directory: Path, harm: Any
) -> None:
    """The supervisor must hear which restore point to set aside, and try the next one."""
    active = world.launch(world_size=1, trainer=LONG, snapshots=keeping(directory))
    active[0].until("stepped")
    wait_for(lambda: len(snapshot.list_snapshots(directory)) == 3)
    kill(active)
    point = newest(directory)
    for path in directory.glob("*.data"):
        harm(path)
    standby = world.launch(
        world_size=1, trainer=LONG, generation=2, role="standby", restore_point=None
    )
    promote(standby, point)
    rejected = standby[0].until("restore_rejected")
    wanted = {name: point[name] for name in ("path", "kind", "step", "generation")}
    assert {name: rejected[name] for name in wanted} == wanted
    assert f"g1-s{point['step']}-r0.json" in rejected["reason"]
    assert standby[0].until("exit")["status"] == 1


def test_a_snapshot_is_the_state_of_its_step_though_buffers_are_donated(
    world: World, undisturbed: Undisturbed, directory: Path
) -> None:
    """A copy taken while the next step writes would mix two steps, and no checksum would tell."""
    ranks = world.launch(snapshots=keeping(directory))
    for rank in ranks:
        rank.until("completed")
    beats = read_beat_file(world.job_dir / "beat-1-0")
    assert beats.step == TINY["steps"] - 1
    kill(ranks)
    steps = [info.step for info in snapshot.list_snapshots(directory)]
    assert steps == [12, 11, 10]
    for step in steps[1:]:
        # From each of them the rest of the run must come out as it did.
        point = {"kind": "snapshot", "path": str(directory), "step": step, "generation": 1}
        again = world.launch(generation=10 + step, restore_point=point)
        same_end(world, again, undisturbed)
        kill(again)


@contextlib.contextmanager
def small_memory(path: Path, size: str) -> Iterator[None]:
    """A tmpfs of its own; skips where we may not mount."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_shared_memory_is_told_and_training_goes_on(
    world: World, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Writing to a map without memory behind it is SIGBUS; a full /dev/shm must cost no step."""
    small = tmp_path / "small"
    with small_memory(small, "16k"):
        place = small / "snapshots"
        ranks = world.launch(snapshots=keeping(place))
        same_end(world, ranks, undisturbed)
        failed = ranks[0].of("snapshot_failed")
        world.end()
    assert [report["step"] for report in failed] == [1]
    assert "No space left" in failed[0]["error"]


def test_auto_says_what_it_settled_on(world: World, directory: Path) -> None:
    """How many steps a failure may cost is for the operator to know beforehand."""
    ranks = world.launch(world_size=1, trainer=LONG, snapshots=keeping(directory, "auto"))
    told = ranks[0].until("snapshot_interval")
    assert told["every_steps"] >= 1
    assert 0 < told["cost_s"] < 1


def test_only_the_first_rank_of_a_node_writes_what_all_hold(
    world: World, undisturbed: Undisturbed, directory: Path
) -> None:
    """Two copies of one state in one memory protect from nothing."""
    ranks = world.launch(snapshots=keeping(directory))
    same_end(world, ranks, undisturbed)
    assert {info.rank for info in snapshot.list_snapshots(directory)} == {0}


def test_a_spare_becomes_a_rank_in_place_of_a_new_process(
    world: World, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Imports take most of a start, and need not be waited for after a failure."""
    spares = world.spares()
    for spare in spares:
        spare.until("started")
    logs = [world.job_dir / "logs" / f"rank-{rank}.log" for rank in range(2)]
    time.sleep(1.0)
    assert [spare.kinds() for spare in spares] == [["started"]] * 2
    world.launch_in(spares, log_files=logs)
    same_end(world, spares, undisturbed)
    assert [spare.kinds().count("started") for spare in spares] == [1, 1]
    for spare, log in zip(spares, logs, strict=True):
        assert "ready" in log.read_text()
        assert "ready" not in spare.log.read_text()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert Path(f"/proc/{spare.process.pid}/cwd").readlink() == world.config_dir


def test_a_spare_ends_with_its_slot(world: World) -> None:
    """A process that nobody will ever use must not outlive its owner."""
    (spare,) = world.spares(1)
    spare.until("started")
    spare.hang_up()
    assert spare.until("exit")["status"] == 0


def wait_for(met: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)
