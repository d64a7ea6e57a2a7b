"""A model that is too large for one device, and what is known of that beforehand."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.trainer.harness import TINY, Rank, World

MB = 1 << 20

TASK = """
import jax
import jax.numpy as jnp
import numpy as np
from trainer.task import Task

LAYERS, WIDTH = 48, 1024  # 200 MB


class Wide(Task):
    def init(self, key):
        w = jnp.broadcast_to(0.5 * jnp.eye(WIDTH), (LAYERS, WIDTH, WIDTH))
        return {"w": w, "momentum": jnp.zeros_like(w)}

    def logical_axes(self, name, shape):
        return ("layers", "embed", None)

    def train_step(self, state, batch):
        def loss_of(w):
            def layer(x, w):
                return jnp.tanh(x @ w), None

            x, _ = jax.lax.scan(jax.checkpoint(layer), batch, w)
            return jnp.mean(x**2)

        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        momentum = 0.9 * state["momentum"] + gradient
        return {"w": state["w"] - 0.1 * momentum, "momentum": momentum}, {"loss": loss}

    def batch(self, step):
        return np.ones((4, WIDTH), np.float32)[self.context.rows(4)]
"""


def settings(**mesh: int) -> dict[str, object]:
    guards = {"compare_every_steps": 0}
    return {
        "task": "wide:Wide",
        "steps": 3,
        "seed": TINY["seed"],
        "mesh": {"dp": 1, **mesh},
        "guards": guards,
    }


def data_bytes(rank: Rank) -> int:
    """What the process has of writable memory of its own, which RLIMIT_DATA bounds."""
    for line in Path(f"/proc/{rank.process.pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmData")


def launch_with_limit(world: World, limit: int, generation: int, count: int) -> list[Rank]:
    ranks = world.launch(
        generation=generation,
        world_size=count,
        trainer=settings(fsdp=count),
        checkpoint={"every_steps": 1000, "keep": 2},
    )
    for rank in ranks:
        rank.until("started")
        resource.prlimit(rank.process.pid, resource.RLIMIT_DATA, (limit, limit))
    return ranks


def test_a_model_too_large_for_one_device_trains_over_two(world: World) -> None:
    """Ray's users could not train what did not fit on one GPU; a process with a limit is one."""
    (world.config_dir / "wide.py").write_text(TASK)
    (free,) = launch_with_limit(world, resource.RLIM_INFINITY, 1, 1)
    needed = 0
    while not free.of("stepped"):  # what comes after the first step takes more
        needed = max(needed, data_bytes(free))
        time.sleep(0.01)
    free.end()
    limit = needed - 120 * MB  # the state alone has 400 MB
    (alone,) = launch_with_limit(world, limit, 2, 1)
    alone.until("exit")
    assert not alone.of("stepped")
    assert "emory" in alone.log.read_text() or "alloc" in alone.log.read_text()
    for rank in launch_with_limit(world, limit, 3, 2):
        assert rank.until("stepped")["step"] == 0


def test_the_memory_of_a_device_is_told_before_a_start(tmp_path: Path) -> None:
    """An out-of-memory after half an hour in the queue was to be known before."""
    (tmp_path / "wide.py").write_text(TASK)
    found = {}
    for fsdp in (1, 2):
        table = settings(fsdp=fsdp)
        mesh = f"dp = 1\nfsdp = {fsdp}\n"
        text = f'[trainer]\ntask = "{table["task"]}"\nsteps = 3\n[trainer.mesh]\n{mesh}'
        (tmp_path / "job.toml").write_text(text)
        line = f"-m supervisor check --memory --json --set cluster.workers={fsdp} --config"
        told = subprocess.run(
            [sys.executable, *line.split(), str(tmp_path / "job.toml")],
            capture_output=True,
            text=True,
            check=True,
        )
        found[fsdp] = json.loads(told.stdout)
    state = 2 * 48 * 1024 * 1024 * 4
    assert (found[1]["state"], found[2]["state"]) == (state, state // 2)
    assert found[1]["snapshots"] == 2 * state, "two buffers, the least with which any are taken"
    assert found[1]["peak"] > 1.4 * state, "the gradient lies beside the state"
    assert found[2]["peak"] < 0.75 * found[1]["peak"]
