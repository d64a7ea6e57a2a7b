"""A convolutional network on handwritten digits: a plain pytree, plain JAX, and optax.

python -m supervisor --config deploy/examples/job.toml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digits_data import Digits as Data

from trainer.task import Context, Task

Params = dict[str, Any]


class Digits(Task):
    """98 % of the held-out digits are right after 200 steps."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.batch_size = context.settings.data.batch_size
        self.data = Data(seed=context.settings.seed, batch_size=self.batch_size)
        self.optimizer = optax.adam(context.options.get("learning_rate", 3e-3))

    def init(self, key: Any) -> Any:
        """All that changes: parameters, and what the optimizer remembers."""
        params = new_params(key)
        return {"params": params, "optimizer": self.optimizer.init(params)}

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        """One update on the global batch; over how many workers it is spread does not show."""
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, optimizer = self.optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, {"loss": loss}

    def batch(self, step: int) -> Any:
        """This worker's rows of the batch of a step."""
        return self.data.batch(step, self.context.rows(self.batch_size))

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        """On digits that training does not see."""
        right = scores(state["params"], batch["image"]).argmax(axis=-1) == batch["label"]
        return {"loss": loss_of(state["params"], batch), "accuracy": right.mean()}

    def held_out_batch(self, index: int) -> Any:
        """This worker's rows of a held-out batch."""
        return self.data.held_out_batch(index, self.context.rows(self.batch_size))

    def position(self, step: int) -> Mapping[str, Any]:
        """Lies in every checkpoint."""
        return {"epoch": step // self.data.steps_an_epoch}


def new_params(key: Any) -> Params:
    """One convolution of 32 channels, one matrix."""
    draw = jax.nn.initializers.he_normal()
    one, two = jax.random.split(key)
    return {
        "kernel": draw(one, (3, 3, 1, 32)),
        "out": 0.1 * draw(two, (8 * 8 * 32, 10)),
        "bias": jnp.zeros(10),
    }


def scores(params: Params, images: Any) -> Any:
    """Of the ten digits, for each image."""
    grid = images.reshape(-1, 8, 8, 1)
    form = ("NHWC", "HWIO", "NHWC")
    hidden = jax.lax.conv_general_dilated(
        grid, params["kernel"], (1, 1), "SAME", dimension_numbers=form
    )
    return jax.nn.relu(hidden).reshape(len(images), -1) @ params["out"] + params["bias"]


def loss_of(params: Params, batch: Any) -> Any:
    """Mean cross entropy, in nats."""
    given = scores(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(given, batch["label"]).mean()
