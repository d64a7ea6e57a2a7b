"""A state that no rank holds in whole: trained, kept, lost and put together again."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.conftest import Undisturbed
from tests.trainer.harness import TINY, Rank, World
from tests.trainer.process.test_standby import fault, keeping, kill, newest, promote
from trainer.compute.pieces import Piece
from trainer.state import snapshot
from trainer.state.snapshot_writer import SnapshotContext, SnapshotWriter


def over(**mesh: int) -> dict[str, Any]:
    return {**TINY, "mesh": {"dp": 1, **mesh}}


@pytest.fixture
def directory(world: World) -> Iterator[Path]:
    """Where this world's snapshots go; nothing of it may stay."""
    path = snapshot.directory_of(world.job_dir)
    yield path
    world.end()
    shutil.rmtree(path, ignore_errors=True)


def end_of(ranks: list[Rank]) -> dict[str, Any]:
    """What rank 0 says at the end; the others may not know the digest."""
    ends = [rank.until("completed") for rank in ranks]
    return ends[0]


def checkpoint_of(world: World, step: int, generation: int = 1) -> dict[str, Any]:
    path = world.job_dir / "checkpoints" / f"generation-{generation}" / str(step)
    return {"kind": "checkpoint", "path": str(path), "step": step, "generation": generation}


def close(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return found.keys() == wanted.keys() and bool(
        np.allclose(list(found.values()), list(wanted.values()), rtol=2e-4)
    )


@pytest.mark.parametrize("mesh", [{"fsdp": 2}])
def test_a_kill_costs_a_sharded_state_no_bit(
    world: World, undisturbed: Undisturbed, directory: Path, mesh: dict[str, int]
) -> None:
    """Every rank's part is needed, and they must be of one step."""
    ranks = world.launch(trainer=over(**mesh))
    calm, digest = ranks[0], end_of(ranks)["params_digest"]
    losses = world.losses()
    assert close(losses, undisturbed.losses), "another mesh is another order of sums, no more"
    assert calm.of("checkpoint_committed")
    kill(ranks)
    shutil.rmtree(world.job_dir / "checkpoints")
    (world.job_dir / "metrics.jsonl").unlink()

    keep: dict[str, Any] = {"trainer": over(**mesh), "snapshots": keeping(directory)}
    active = world.launch(**keep, faults={1: [fault("sleep", step=9)]})
    active[1].until("drill")
    standby = world.launch(generation=2, role="standby", **keep)
    for rank in standby:
        rank.until("standing_by")
    active[1].signal(signal.SIGKILL)
    active[1].until("exit")
    kill(active)
    parts = {(one.part, one.parts) for one in snapshot.list_snapshots(directory) if one.step == 9}
    assert parts == {(0, 2), (1, 2)}
    promote(standby, newest(directory))
    assert standby[0].until("ready")["step"] == 9
    assert end_of(standby)["params_digest"] == digest
    assert world.losses() == losses


def test_a_checkpoint_in_parts_is_loaded_by_one_rank_and_by_two(
    world: World, undisturbed: Undisturbed
) -> None:
    """Nodes come and go: what three wrote, one must be able to read."""
    ranks = world.launch(trainer=over(fsdp=2))
    digest = end_of(ranks)["params_digest"]
    losses = world.losses()
    kill(ranks)
    again = world.launch(
        generation=2, world_size=1, trainer=over(), restore_point=checkpoint_of(world, 8)
    )
    end_of(again)
    assert close(world.losses(), losses)
    kill(again)
    finished = world.launch(
        generation=3, world_size=1, trainer=over(), restore_point=checkpoint_of(world, 12)
    )
    assert end_of(finished)["params_digest"] == digest, "put together, it is the same state"
    kill(finished)
    spread = world.launch(
        generation=4, trainer=over(fsdp=2), restore_point=checkpoint_of(world, 12, generation=3)
    )
    assert end_of(spread)["params_digest"] == digest, "and taken apart again, too"


def test_a_checkpoint_without_one_of_its_parts_is_refused(world: World) -> None:
    """A part that went with its disk must not be trained on as zeros."""
    ranks = world.launch(trainer=over(fsdp=2))
    end_of(ranks)
    kill(ranks)
    point = checkpoint_of(world, 12)
    shutil.rmtree(Path(point["path"]) / "part-1-of-2")
    (again,) = world.launch(generation=2, world_size=1, trainer=over(), restore_point=point)
    rejected = again.until("restore_rejected")
    assert "part-1-of-2 is missing" in rejected["reason"]


def test_parts_of_two_steps_are_no_snapshot(directory: Path) -> None:
    """Half of one step and half of the next is a state that never was."""
    for part, step in ((0, 4), (1, 5)):
        context = SnapshotContext(
            run="r", generation=1, rank=part, world_size=2, replica=0, part=part, parts=2
        )
        writer = SnapshotWriter(directory, context, 1)
        piece = Piece(
            name="w", shape=(4,), index=((2 * part, 2 * part + 2),), values=np.ones(2, np.float32)
        )
        writer.take(step, [piece], {"step": step}, volatile=True)
        writer.close()
    with pytest.raises(snapshot.SnapshotRejected, match=r"of its 2 parts only \[0\] are here"):
        snapshot.load_pieces(directory, 1, 4)
