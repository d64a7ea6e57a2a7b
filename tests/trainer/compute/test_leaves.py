"""Leaves of every type and size come back as they were, or are refused before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.harness import Rank, World
from trainer.state import snapshot

TASK = """
import jax
import jax.numpy as jnp
import numpy as np
from trainer.task import Task

jax.config.update("jax_enable_x64", True)
KINDS = (
    "bool int2 uint2 int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
    "float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float16 bfloat16 float32 float64 "
    "complex64 complex128"
).split()


class Zoo(Task):
    def init(self, key):
        leaves = {name: jnp.arange(8).reshape(4, 2) % 2 + 1 for name in KINDS}
        leaves = {name: leaf.astype(getattr(jnp, name)) for name, leaf in leaves.items()}
        leaves["complex64"] = leaves["complex64"] * 1j
        nothing = {"rows": jnp.zeros((0, 4)), "columns": jnp.zeros((4, 0), jnp.int8)}
        return {"kinds": leaves, "nothing": nothing, "key": key, "steps": jnp.int64(6_000_000_000)}

    def train_step(self, state, batch):
        kinds = {
            name: leaf[::-1] if leaf.dtype.itemsize > 2 else leaf
            for name, leaf in state["kinds"].items()
        }
        after = {**state, "kinds": kinds, "steps": state["steps"] + 1}
        return after, {"loss": jnp.mean(batch["x"]), "steps": after["steps"]}

    def batch(self, step):
        return {"x": np.full((2, 1), step, np.float32)}
"""


@pytest.fixture
def memory(world: World) -> Iterator[Path]:
    path = snapshot.directory_of(world.job_dir)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def zoo(world: World, **changes: Any) -> dict[str, Any]:
    (world.config_dir / "zoo.py").write_text(TASK)
    guards = {"compare_every_steps": 1}
    return {"task": "zoo:Zoo", "steps": 6, "seed": 7, "guards": guards, **changes}


def digest_at_the_end(ranks: list[Rank]) -> str:
    found = {rank.until("completed")["params_digest"] for rank in ranks} - {""}
    assert len(found) == 1
    return str(found.pop())


@pytest.mark.parametrize("mesh", [{}, {"dp": 1, "fsdp": 2}], ids=["replicas", "parts"])
def test_leaves_of_every_type_are_compared_saved_and_restored(
    world: World, memory: Path, mesh: dict[str, int]
) -> None:
    """Complex and int4 leaves did not start with two replicas; of leaves without elements every
    save failed, and a run that had trained to its end left nothing on the disk.
    """
    trainer = zoo(world, mesh=mesh)
    snapshots = {"directory": str(memory), "every_steps": 1}
    ranks = world.launch(trainer=trainer, snapshots=snapshots)
    undisturbed = digest_at_the_end(ranks)
    committed = [report["step"] for report in ranks[0].of("checkpoint_committed")]
    assert committed == [4, 6]
    path = ranks[0].of("checkpoint_committed")[0]["path"]
    newest = snapshot.list_snapshots(memory)[0].step
    assert newest >= 4
    world.end()
    for generation, point in enumerate(
        (
            {"kind": "checkpoint", "step": 4, "generation": 1, "path": path},
            {"kind": "snapshot", "step": newest, "generation": 1, "path": str(memory)},
        ),
        2,
    ):
        again = world.launch(trainer=trainer, generation=generation, restore_point=point)
        assert again[0].until("ready")["step"] == point["step"]
        assert digest_at_the_end(again) == undisturbed
        world.end()
