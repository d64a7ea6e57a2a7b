"""A trainer class as guides to Ray and JAX write it, on a mesh of data and tensor parallelism.

    python -m supervisor --config deploy/examples/job.toml \
        --set 'trainer.task="model_trainer:main"' --set trainer.mesh.tp=2
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from digits_data import Digits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.free_loop import Worker

PLACES = {"up": P(None, "tp"), "down": P("tp", None)}
"""The matrices of an MLP, cut so that one sum over "tp" is all that a layer needs."""


class ModelTrainer:
    """Everything is set up once; after a failure that is done again, and `restore` goes on."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.size = worker, worker.settings.data.batch_size
        self.data = Digits(seed=worker.settings.seed, batch_size=self.size)
        self.optimizer = optax.adamw(3e-3)
        key = jax.random.key(worker.settings.seed)
        places = jax.tree_util.tree_map_with_path(self._place, jax.eval_shape(self._new, key))
        # Drawn where they lie: no device ever holds a whole matrix.
        fresh = jax.jit(self._new, out_shardings=places)(key)
        # What comes out lies as what goes in, or the state could not be kept in parts.
        self.update = jax.jit(self._update, donate_argnums=0, out_shardings=(places, None))
        self.state = worker.restore(fresh, warm_up=self.warm_up)

    def _new(self, key: Any) -> Any:
        params = new_params(key)
        return {"params": params, "optimizer": self.optimizer.init(params)}

    def _place(self, path: Any, leaf: Any) -> NamedSharding:
        """Of a matrix, and of what the optimizer remembers of it, by its name."""
        name = getattr(path[-1], "key", None)
        return NamedSharding(self.worker.mesh, PLACES.get(name, P()))

    def _update(self, state: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, optimizer = self.optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, loss

    def batch(self, step: int) -> Any:
        """The global batch of a step; each worker feeds its rows."""
        return self.worker.place(self.data.batch(step, self.worker.rows(self.size)))

    def warm_up(self, state: Any) -> None:
        """In a process that stands by: compile."""
        self.update(state, self.batch(0))

    def train_step(self, step: int) -> Any:
        """One update on the batch of a step; the loss."""
        self.state, loss = self.update(self.state, self.batch(step))
        return loss

    def evaluate(self) -> Any:
        """The loss on digits that training does not see."""
        with self.worker.phase("evaluate"):
            rows = self.data.held_out_batch(0, self.worker.rows(self.size))
            return jax.jit(loss_of)(self.state["params"], self.worker.place(rows))

    def run(self) -> None:
        """The loop: no heartbeats, no signal handlers, no checkpoint manager, no try."""
        for step in self.worker.steps():
            self.worker.report(loss=self.train_step(step))
            if (step + 1) % 50 == 0:
                self.worker.report(held_out_loss=self.evaluate())
            self.worker.checkpoint(self.state)


def main(worker: Worker) -> None:
    """What `[trainer] task` names."""
    ModelTrainer(worker).run()


def new_params(key: Any) -> dict[str, Any]:
    """Two matrices."""
    one, two = jax.random.split(key)
    return {
        "up": jax.random.normal(one, (64, 128)) / 8.0,
        "down": jax.random.normal(two, (128, 10)) / 16.0,
    }


def loss_of(params: dict[str, Any], batch: Any) -> Any:
    """Mean cross entropy, in nats."""
    scores = jnp.tanh(batch["image"] @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()
