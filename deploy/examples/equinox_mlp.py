"""The digits with Equinox: the arrays of the model are the state, the rest of it stays.

python -m supervisor --config deploy/examples/job.toml --set 'trainer.task="equinox_mlp:Mlp"'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import optax
from digits_data import Digits as Data

from trainer.task import Context, Task


class Mlp(Task):
    """An `equinox.nn.MLP`; its activation functions are no arrays, and no part of the state."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.batch_size = context.settings.data.batch_size
        self.data = Data(seed=context.settings.seed, batch_size=self.batch_size)
        self.optimizer = optax.adam(3e-3)

    def init(self, key: Any) -> Any:
        """The arrays, and what the optimizer remembers of them."""
        arrays, self.rest = eqx.partition(eqx.nn.MLP(64, 10, 64, 1, key=key), eqx.is_array)
        return {"model": arrays, "optimizer": self.optimizer.init(arrays)}

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        """One update on the global batch."""

        def loss_of(arrays: Any) -> Any:
            model = eqx.combine(arrays, self.rest)
            given = jax.vmap(model)(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(given, batch["label"]).mean()

        loss, gradient = jax.value_and_grad(loss_of)(state["model"])
        updates, optimizer = self.optimizer.update(gradient, state["optimizer"])
        arrays = optax.apply_updates(state["model"], updates)
        return {"model": arrays, "optimizer": optimizer}, {"loss": loss}

    def batch(self, step: int) -> Any:
        """This worker's rows of the batch of a step."""
        return self.data.batch(step, self.context.rows(self.batch_size))
