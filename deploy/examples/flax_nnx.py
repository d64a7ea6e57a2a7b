"""The digits with Flax NNX: the module is split into its graph, which stays, and its state.

python -m supervisor --config deploy/examples/job.toml --set 'trainer.task="flax_nnx:Nnx"'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax
from digits_data import Digits as Data
from flax import nnx

from trainer.task import Context, Task


class Mlp(nnx.Module):
    """Two layers, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        return self.out(self.dropout(nnx.relu(self.hidden(images))))


class Nnx(Task):
    """Dropout draws from keys that are part of the state, so that a resume is exact."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.batch_size = context.settings.data.batch_size
        self.data = Data(seed=context.settings.seed, batch_size=self.batch_size)
        self.transformation = optax.adam(3e-3)

    def init(self, key: Any) -> Any:
        """The state of model and optimizer; their graph is kept aside as this is traced."""
        model = Mlp(nnx.Rngs(key))
        optimizer = nnx.Optimizer(model, self.transformation, wrt=nnx.Param)
        self.graph, state = nnx.split((model, optimizer))
        return state

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        """Put together, train, take apart."""
        model, optimizer = nnx.merge(self.graph, state)

        def loss_of(model: Mlp) -> Any:
            given = model(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(given, batch["label"]).mean()

        loss, gradient = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradient)
        return nnx.state((model, optimizer)), {"loss": loss}

    def batch(self, step: int) -> Any:
        """This worker's rows of the batch of a step."""
        return self.data.batch(step, self.context.rows(self.batch_size))
