"""Two steps of the language model on meshes of virtual devices: one JSON line a mesh.

Started by a test with XLA_FLAGS for eight devices; a process has its number of devices for life.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.compute.sharding import AXES, ROWS, spec_of
from trainer.compute.step import named_leaves
from trainer.config import TrainerSettings
from trainer.language.task import LanguageModel
from trainer.task import Context


def train(task: LanguageModel, sizes: list[int]) -> tuple[list[float], Any, int]:
    """Losses of two steps, the parameters after them, and bytes of state on the first device."""
    count = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), AXES)
    key = jax.random.key(3)
    tree = jax.eval_shape(task.init, key)
    specs = []
    for name, leaf in named_leaves(tree):
        plain = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        axes = None if plain else task.logical_axes(name, leaf.shape)
        specs.append(PartitionSpec() if axes is None else spec_of(mesh, axes, leaf.shape))
    places = jax.tree.unflatten(
        jax.tree.structure(tree), [NamedSharding(mesh, one) for one in specs]
    )
    rows, whole = (NamedSharding(mesh, PartitionSpec(*one)) for one in ((ROWS,), ()))
    losses = []
    with jax.set_mesh(mesh):
        state = jax.jit(task.init, out_shardings=places)(key)
        step = jax.jit(task.train_step, out_shardings=(places, whole))
        for number in range(2):
            batch = jax.device_put(task.batch(number), rows)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    held = sum(
        leaf.addressable_shards[0].data.nbytes
        for name, leaf in named_leaves(state)
        if not name.startswith("key")
    )
    params = {name: np.asarray(values) for name, values in state["params"].items()}
    return losses, params, held


def main() -> None:
    """Every mesh against the first."""
    config_dir, settings, meshes = sys.argv[1:]
    task = LanguageModel(
        Context(
            rank=0,
            world_size=1,
            local_rank=0,
            node_rank=0,
            generation=1,
            config_dir=config_dir,
            settings=TrainerSettings.model_validate(json.loads(Path(settings).read_text())),
        )
    )
    expected: Any = None
    for sizes in json.loads(meshes):
        losses, params, held = train(task, sizes)
        expected = expected or (losses, params, held)
        apart = max(
            float(np.abs(params[name] - values).max() / np.abs(values).max())
            for name, values in expected[1].items()
        )
        line = {"mesh": sizes, "losses": losses, "apart": apart, "share": held / expected[2]}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
