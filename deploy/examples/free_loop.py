"""The digits as a loop of one's own: a function that drives itself.

python -m supervisor --config deploy/examples/job.toml --set 'trainer.task="free_loop:train"'
"""

from __future__ import annotations

import jax
import optax
from digits import Params, loss_of, new_params, scores
from digits_data import Digits

from trainer.free_loop import Worker


def train(worker: Worker) -> None:
    """Called in every worker; at a restart it goes on from the state that it handed over last."""
    size = worker.settings.data.batch_size
    data = Digits(seed=worker.settings.seed, batch_size=size)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def update(params: Params, moments: optax.OptState, batch: Params) -> tuple:
        loss, gradient = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def warm_up(state: tuple) -> None:  # in a process that stands by
        update(*state, worker.place(data.batch(0, worker.rows(size))))

    params = new_params(jax.random.key(worker.settings.seed))
    params, moments = worker.restore((params, optimizer.init(params)), warm_up=warm_up)
    for step in worker.steps():
        batch = worker.place(data.batch(step, worker.rows(size)))
        params, moments, loss = update(params, moments, batch)
        worker.report(loss=loss)
        if (step + 1) % 50 == 0:
            with worker.phase("evaluate"):
                held_out = worker.place(data.held_out_batch(step // 50, worker.rows(size)))
                right = scores(params, held_out["image"]).argmax(axis=-1) == held_out["label"]
                worker.report(held_out_loss=loss_of(params, held_out), accuracy=right.mean())
        worker.checkpoint((params, moments), position={"epoch": step // data.steps_an_epoch})
