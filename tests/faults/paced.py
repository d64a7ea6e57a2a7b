"""Tasks of a user that the fault tests train; copied beside each job's settings.

`Paced` compiles in a moment and lets each step take `pace_s`, so that a fault can strike in it. The
others do what users' code does when it goes wrong.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.task import Context, Task

ROWS = 8
WIDTH = 16


class Paced(Task):
    """Fits a noisy linear map by momentum; every number depends on seed and step alone.

    Options: `pace_s` seconds a step; `megabytes` of ballast in the state, to make saves long.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.seed = context.settings.seed
        self.pace_s = float(context.options.get("pace_s", 0.03))
        self.ballast = int(context.options.get("megabytes", 0)) << 18

    def init(self, key: Any) -> dict[str, Any]:
        """Weights, their momentum, the key that the noise is drawn from, and the ballast."""
        first, rest = jax.random.split(key)
        weights = jax.random.normal(first, (WIDTH, WIDTH))
        state = {"weights": weights, "momentum": jnp.zeros_like(weights), "key": rest}
        if self.ballast:
            state["ballast"] = jnp.arange(self.ballast, dtype=jnp.float32)
        return state

    def train_step(
        self, state: dict[str, Any], batch: jax.Array
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """One step of gradient descent with momentum and noise."""
        key, draw = jax.random.split(state["key"])
        loss, gradient = jax.value_and_grad(_loss)(state["weights"], batch)
        noise = jax.random.normal(draw, gradient.shape)
        momentum = 0.9 * state["momentum"] + gradient + 0.01 * noise
        weights = state["weights"] - 0.05 * momentum
        return {**state, "weights": weights, "momentum": momentum, "key": key}, {"loss": loss}

    def batch(self, step: int) -> Any:
        """float32 `[rows of this rank, WIDTH]`."""
        time.sleep(self.pace_s)
        return self._rows(step)

    def evaluate(self, state: dict[str, Any], batch: jax.Array) -> Mapping[str, Any]:
        """The loss alone."""
        return {"loss": _loss(state["weights"], batch)}

    def held_out_batch(self, index: int) -> Any:
        """float32 `[rows of this rank, WIDTH]`, never trained on."""
        return self._rows((1 << 32) + index)

    def _rows(self, number: int) -> Any:
        draws = np.random.Philox(key=(self.seed << 64) | number).random_raw(ROWS * WIDTH)
        values = (draws >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
        return values.reshape(ROWS, WIDTH)[self.context.rows(ROWS)]


def _loss(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(rows @ weights) - jnp.flip(rows, axis=1)))


class Talkative(Paced):
    """Says something in each step, as users' code does."""

    def batch(self, step: int) -> Any:
        print(f"step {step}: " + "word " * 200, flush=True)
        return super().batch(step)


class Stubborn(Paced):
    """Its process and a child of it ignore SIGTERM and hold a lock and a port of the rank.

    Whoever finds them held by another generation has met it alive: it says so in `overlap`.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        here = Path(context.config_dir)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.lock = (here / f"lock-{context.rank}").open("w")
        self.port = socket.socket()
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.port.bind(("127.0.0.1", int(context.options["port"]) + context.rank))
            self.port.listen()
        except OSError as error:
            with (here / "overlap").open("a") as told:
                told.write(f"generation {context.generation}, rank {context.rank}: {error}\n")
        wait = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        self.child = subprocess.Popen(
            [sys.executable, "-c", wait],
            pass_fds=(self.lock.fileno(), self.port.fileno()),
            start_new_session=True,
        )


class RaisesAlways(Paced):
    """Rank 1 meets the same bad row in step 5 of every generation."""

    def batch(self, step: int) -> Any:
        rows = super().batch(step)
        if step == 5 and self.context.rank == 1:
            raise ValueError(f"row 3 of step {step} is not what it should be")
        return rows


class RaisesAtLength(Paced):
    """The text of its exception is a whole batch, escape codes included."""

    def batch(self, step: int) -> Any:
        if step == 5:
            raise ValueError(
                "\x1b[2Jbad row\n" + "0.1234\n" * 500_000 + "the middle\n" + "5\n" * 500_000
            )
        return super().batch(step)


class DiesAlways(Paced):
    """Rank 1 ends with status 7 in step 2 of every generation."""

    def batch(self, step: int) -> Any:
        if step == 2 and self.context.rank == 1:
            os._exit(7)
        return super().batch(step)


class WrongShape(Paced):
    """A mistake that shows when the step is traced."""

    def train_step(
        self, state: dict[str, Any], batch: jax.Array
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        wide = jnp.concatenate([batch, batch], axis=1)
        return state, {"loss": _loss(state["weights"], wide)}


class MissingImport(Paced):
    """A mistake that shows when the task is built."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401
