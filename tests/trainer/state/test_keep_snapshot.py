"""The newest snapshot of a job that failed, on the disk: the same bits, or nothing at all."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from supervisor.disk import restore_points
from supervisor.disk.run_files import RunFiles
from supervisor.errors import DiskError
from trainer.compute.pieces import Piece, whole
from trainer.compute.step import named_leaves
from trainer.state import checkpoint, snapshot
from trainer.state.checkpoint import digests
from trainer.state.keep_snapshot import keep
from trainer.state.snapshot import SnapshotRejected
from trainer.state.snapshot_writer import SnapshotContext, SnapshotWriter


def state() -> dict[str, Any]:
    return {
        "params": {"w": np.arange(2000, dtype=np.float32).reshape(40, 50), "b": np.ones(3)},
        "half": np.arange(6).astype(ml_dtypes.bfloat16),
        "nothing": np.zeros((0, 3), np.float32),
        "optimizer": [np.asarray(7, np.int32), (np.zeros((), np.uint32),)],
    }


def meta(step: int) -> dict[str, Any]:
    return {"step": step, "generation": 3, "loss": 1.5}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose snapshots go with it."""
    yield tmp_path
    shutil.rmtree(snapshot.directory_of(tmp_path), ignore_errors=True)


def take(run_dir: Path, step: int, *, parts: int = 1) -> None:
    """A snapshot of `state()`; in parts, each rank holds some rows of what can be divided."""
    for rank in range(parts):
        context = SnapshotContext(
            run=str(run_dir),
            generation=3,
            rank=rank,
            world_size=parts,
            replica=0,
            part=rank,
            parts=parts,
        )
        writer = SnapshotWriter(snapshot.directory_of(run_dir), context, 1)
        pieces = [_part(name, leaf, rank, parts) for name, leaf in named_leaves(state())]
        writer.take(step, pieces, meta(step), volatile=True)
        writer.close()


def _part(name: str, leaf: Any, rank: int, parts: int) -> Piece:
    index = whole(leaf.shape)
    if leaf.shape and leaf.shape[0] % parts == 0:
        rows = leaf.shape[0] // parts
        index = ((rank * rows, (rank + 1) * rows), *index[1:])
        leaf = leaf[rank * rows : (rank + 1) * rows]
        return Piece(name=name, shape=(rows * parts, *leaf.shape[1:]), index=index, values=leaf)
    return Piece(name=name, shape=leaf.shape, index=index, values=leaf)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_kept_snapshot_is_a_checkpoint_like_any_other(run_dir: Path, parts: int) -> None:
    """A job failed at step 100 with a checkpoint of 50 and a snapshot of 99: 49 steps were lost."""
    take(run_dir, 99, parts=parts)
    path = keep(run_dir, 3, 99)
    (point,) = restore_points.find(run_dir, {3})
    assert (point.generation, point.step, point.path) == (3, 99, path)
    host, found = checkpoint.load(path, state())
    assert found == meta(99)
    assert digests(host) == digests(state())
    assert keep(run_dir, 3, 99) == path  # a daemon that came back orders it again


def test_what_a_killed_save_has_left_is_no_obstacle(run_dir: Path) -> None:
    """The generation died while it saved the very step that its snapshot holds."""
    take(run_dir, 99)
    folder = checkpoint.directory_of(run_dir, 3, 99)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "torn").write_text("half")
    keep(run_dir, 3, 99)
    assert checkpoint.load(folder, state())[1]["step"] == 99


def test_a_damaged_snapshot_leaves_nothing_on_the_disk(run_dir: Path) -> None:
    """The next run must not start from bits that nobody computed."""
    take(run_dir, 99)
    (data,) = snapshot.directory_of(run_dir).glob("*.data")
    held = bytearray(data.read_bytes())
    held[0] ^= 1
    data.write_bytes(held)
    with pytest.raises(SnapshotRejected, match="checksum"):
        keep(run_dir, 3, 99)
    assert restore_points.find(run_dir) == []


def test_a_process_of_its_own_keeps_it_for_the_daemon(run_dir: Path) -> None:
    """The daemon loads no JAX, and learns in one line why a snapshot could not be kept."""
    take(run_dir, 99)
    files = RunFiles(run_dir)
    path = asyncio.run(files.keep_snapshot(3, 99))
    assert Path(path) == checkpoint.directory_of(run_dir, 3, 99)
    with pytest.raises(DiskError, match="no snapshot of generation 3, step 98 is here"):
        asyncio.run(files.keep_snapshot(3, 98))
