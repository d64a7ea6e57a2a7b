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
        places = {name: NamedSharding(worker.mesh, place) for name, place in PLACES.items()}
        # Drawn where they lie: no device ever holds a whole matrix.
        params = jax.jit(new_params, out_shardings=places)(jax.random.key(worker.settings.seed))
        fresh = {"params": params, "optimizer": jax.jit(self.optimizer.init)(params)}
        self.state = worker.restore(fresh)
        # What comes out lies as what goes in, or the state could not be kept in parts.
        places = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self.update = jax.jit(self._update, donate_argnums=0, out_shardings=(places, None))

    def _update(self, state: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, optimizer = self.optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, loss

    def train_step(self, step: int) -> Any:
        """One update on the batch of a step; the loss."""
        rows = self.data.batch(step, self.worker.rows(self.size))
        self.state, loss = self.update(self.state, self.worker.place(rows))
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
