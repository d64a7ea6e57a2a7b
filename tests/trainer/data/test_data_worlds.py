"""Packed records in real processes: the same samples after a resume, here and in other worlds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.harness import TINY, Report, World
from trainer.wire.heartbeat import HeartbeatError, read_beat_file

PACKED: dict[str, Any] = {
    **TINY,
    "data": {"path": ["pairs.jsonl"], "batch_size": 4, "sequence_length": 24},
}


def write_pairs(folder: Path, count: int = 300) -> None:
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def restore_point(world: World, step: int) -> dict[str, Any]:
    path = world.job_dir / "checkpoints" / "generation-1" / str(step)
    return {"kind": "checkpoint", "path": str(path), "step": step, "generation": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An undisturbed run of two workers."""

    world: World
    losses: dict[int, float]
    completed: Report


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("packed")
    write_pairs(folder)
    world = World(folder / "tiny")
    try:
        ranks = world.launch(trainer=PACKED)
        first, _ = [rank.until("completed") for rank in ranks]
        yield Run(world=world, losses=world.losses(), completed=first)
    finally:
        world.end()


def test_packed_data_teach_and_are_tokenised_once(packed: Run) -> None:
    """Both ranks start together, and only one of them may write."""
    assert list(packed.losses) == list(range(TINY["steps"]))
    assert packed.losses[TINY["steps"] - 1] < packed.losses[0]
    cache = packed.world.config_dir / "runs" / ".data"
    assert len(list(cache.glob("*/store.json"))) == 1
    assert not list(cache.glob("*.partial"))


def test_a_resume_on_one_worker_instead_of_two_sees_the_same_samples(packed: Run) -> None:
    """An order that depends on the number of workers repeats some samples and skips others."""
    (rank,) = packed.world.launch(
        generation=2, world_size=1, trainer=PACKED, restore_point=restore_point(packed.world, 4)
    )
    ready = rank.until("ready")
    assert ready["step"] == 4
    assert not [line for line in ready["differences"] if "data" in line]
    completed = rank.until("completed")
    found = packed.world.losses()
    assert list(found) == list(packed.losses)
    assert np.allclose(list(found.values()), list(packed.losses.values()), rtol=1e-4)
    assert completed["held_out_loss"] == pytest.approx(packed.completed["held_out_loss"], rel=1e-4)


def test_a_rank_that_waits_for_data_shows_that_it_goes_on(packed: Run) -> None:
    """Tokenising takes longer than a start usually may (its deadline is two minutes)."""
    world = packed.world
    (meta,) = (world.config_dir / "runs/.data").glob("*/store.json")
    shutil.rmtree(meta.parent)
    with (meta.parent.with_suffix(".lock")).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as another rank that tokenises
        (rank,) = world.launch(generation=4, world_size=1, trainer=PACKED)
        beats: set[int] = set()
        deadline = time.monotonic() + 60.0
        while len(beats) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            with contextlib.suppress(OSError, HeartbeatError):
                beat = read_beat_file(world.job_dir / "beat-4-0")
                assert beat.phase == "initialize"
                beats.add(beat.seq)
    assert rank.until("ready")["step"] == 0


def test_a_resume_with_other_data_says_so(packed: Run) -> None:
    """Whoever exchanges a file under a running job should hear of it."""
    write_pairs(packed.world.config_dir, 301)
    (rank,) = packed.world.launch(
        generation=3, world_size=1, trainer=PACKED, restore_point=restore_point(packed.world, 8)
    )
    said = rank.until("ready")["differences"]
    assert any(line.startswith("data_sha256: ") for line in said)
    assert any(line.startswith("data_documents: 285 when saved, 286 now") for line in said)
