"""Compare the built-in model with one written by hand, and one process with two.

By turns in one process of one core, on the same batches: a step of the trainer's loop, metrics and
all, and a step of a plain JAX loop around the same architecture, written here from scratch. Then
the trainer alone over one and over two processes of one core each. Nothing else may run meanwhile.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.benchmarks.bare import Bare
from tests.benchmarks.report import (
    circumstances,
    note,
    parser_of,
    print_circumstances,
    print_table,
    summary,
    write_json,
)
from tests.benchmarks.supervised import Tail
from trainer.config import CheckpointSettings, ModelSettings, OptimizerSettings, TrainerSettings
from trainer.host.environment import worker_environment
from trainer.task import Context
from trainer.training.task_loop import ModelTrainer
from trainer.wire.heartbeat import Beat


def plain_loss(settings: ModelSettings, params: dict[str, Any], rows: Any) -> Any:
    """Cross-entropy of a Llama-type decoder, as a tutorial would write it."""
    tokens, targets = rows[:, :-1].astype(jnp.int32), rows[:, 1:].astype(jnp.int32)
    batch, length = tokens.shape
    heads, groups = settings.heads, settings.key_value_heads
    size = settings.width // heads
    angle = jnp.arange(length)[:, None] / settings.rope_base ** (jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def rotate(x: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = params["embedding"][tokens]
    for layer in params["layers"]:
        h = norm(x, layer["norm1"])
        q = rotate((h @ layer["q"]).reshape(batch, length, heads, size))
        k = rotate((h @ layer["k"]).reshape(batch, length, groups, size))
        v = (h @ layer["v"]).reshape(batch, length, groups, size)
        k, v = (jnp.repeat(one, heads // groups, axis=2) for one in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, -1)
        x = x + mixed @ layer["o"]
        h = norm(x, layer["norm2"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    logits = norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def plain_params(settings: ModelSettings, key: Any) -> dict[str, Any]:
    """The parameters of `plain_loss`."""
    width, shared = settings.width, settings.width // settings.heads * settings.key_value_heads
    draw = partial(_draw, iter(jax.random.split(key, 8 * settings.layers + 2)))
    return {
        "embedding": draw(256, width),
        "layers": [
            {
                "norm1": jnp.ones(width),
                "q": draw(width, width),
                "k": draw(width, shared),
                "v": draw(width, shared),
                "o": draw(width, width),
                "norm2": jnp.ones(width),
                "gate": draw(width, settings.hidden),
                "up": draw(width, settings.hidden),
                "down": draw(settings.hidden, width),
            }
            for _ in range(settings.layers)
        ],
        "norm": jnp.ones(width),
        "head": draw(width, 256),
    }


def _draw(keys: Any, rows: int, columns: int) -> Any:
    return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5


def plain_loop(settings: ModelSettings, optimizer: OptimizerSettings) -> Any:
    """A generator: send it rows, it gives the loss of a step on them."""
    rate = optimizer.learning_rate
    tools = optax.chain(
        optax.clip_by_global_norm(optimizer.gradient_norm_max),
        optax.adamw(rate, optimizer.beta1, optimizer.beta2, weight_decay=optimizer.weight_decay),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, rows: Any) -> tuple[Any, Any, Any]:
        loss, gradient = jax.value_and_grad(partial(plain_loss, settings))(params, rows)
        updates, moments = tools.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    params = plain_params(settings, jax.random.key(0))
    moments = tools.init(params)
    loss = 0.0
    while True:
        rows = yield loss
        params, moments, found = step(params, moments, rows)
        loss = float(found)


def pairs(steps: int) -> list[tuple[float, float]]:
    """Seconds of a step: the trainer's, the plain loop's, by turns."""
    settings = TrainerSettings(steps=steps + 20, evaluate_every_steps=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ModelTrainer(
            context=Context.alone(settings, folder),
            checkpoints=CheckpointSettings(every_steps=10**6),
            job_dir=Path(folder),
            beat=Beat(str(Path(folder) / "beat")),
            restore_from=None,
            on_outcome=lambda outcome: None,
        )
        trainer.connect()
        trainer.prepare()
        ours = trainer.run()
        plain = plain_loop(settings.model, settings.optimizer)
        next(plain)
        found = []
        for number in range(steps):
            rows = trainer._task.batch(number)["tokens"]  # the plain loop pays for its own
            began = time.perf_counter()
            next(ours)
            middle = time.perf_counter()
            trainer._task.batch(number)
            plain.send(rows)
            found.append((middle - began, time.perf_counter() - middle))
    return found[10:]  # both have compiled and warmed up


def tokens_per_s(processes: int, steps: int, folder: Path) -> float:
    """Of the default model over so many processes of one core."""
    settings = TrainerSettings(steps=steps, evaluate_every_steps=0)
    run = Bare(folder, settings=settings.model_dump(mode="json"), steps=steps, world_size=processes)
    try:
        run.wait(600)
        rows = Tail(run.rows).read()
    finally:
        run.end()
    step_s: float = statistics.median(row["step_s"] for row in rows[steps // 3 :])
    return settings.data.batch_size * settings.data.sequence_length / step_s


def main() -> None:
    """Measure, print, write."""
    parser = parser_of("throughput", __doc__)
    parser.add_argument("--steps", type=int, default=60, metavar="N")
    options = parser.parse_args()
    environment = worker_environment(1, 0, os.environ)
    if environment != dict(os.environ):  # threads and memory as a worker has them
        command = [sys.executable, "-m", "tests.benchmarks.throughput", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    facts = circumstances()
    note("pairs")
    found = pairs(options.steps)
    ratios = summary([plain / ours for ours, plain in found])
    ours, plain = (summary([pair[side] for pair in found]) for side in (0, 1))
    print_table(
        "seconds a step of the default model, one process",
        ["", "median", "p95"],
        [
            ["the trainer's loop", ours["median"], ours["p95"]],
            ["plain JAX, written by hand", plain["median"], plain["p95"]],
            ["ratio (above 1: ours is faster)", ratios["median"], ratios["p95"]],
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        speeds = {}
        for count in (1, 2):
            note(f"{count} processes")
            speeds[count] = tokens_per_s(count, options.steps, Path(folder) / str(count))
    print_table(
        "tokens/s over processes of one core",
        ["processes", "tokens/s", "times one"],
        [[str(count), speed, speed / speeds[1]] for count, speed in speeds.items()],
    )
    print_circumstances(facts)
    write_json(
        options.json,
        {"benchmark": "throughput", **facts, "pairs": found, "ratio": ratios, "speeds": speeds},
    )


if __name__ == "__main__":
    main()
