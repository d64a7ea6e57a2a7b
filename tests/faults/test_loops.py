"""Loops of the user's own under the daemon: struck, and uneven."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import STEPS, Job

full = pytest.mark.full

LOOP = """
import time

import jax
import jax.numpy as jnp
import numpy as np

@jax.jit
def update(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w - x) ** 2))(w)
    return w - 0.1 * gradient, loss

def train(worker):
    def batch(step):
        x = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
        return worker.place(x[worker.rows(8)])

    w = jax.random.normal(jax.random.key(worker.settings.seed), (16, 16))
    w = worker.restore(w, warm_up=lambda w: update(w, batch(0)))
    for step in worker.steps():
        if worker.options.get("leaves") == [worker.rank, step]:
            return
        time.sleep(worker.options.get("pace_s", 0.03))
        w, loss = update(w, batch(step))
        worker.report(loss=loss)
        worker.checkpoint(w)
"""


def made(job: MakeJob, **settings: Any) -> Job:
    one = job(**{"trainer.task": "my_loop:train", **settings})
    (one.folder / "my_loop.py").write_text(LOOP)
    return one


@full
def test_a_kill_costs_a_loop_the_step_in_flight_and_no_bit(job: MakeJob) -> None:
    """What a `Task` gets from its standby and its snapshots, a function gets too."""
    calm = made(job)
    assert calm.start().exit_status() == 0
    assert list(calm.numbers().losses) == list(range(STEPS))
    ready = {"recovery.standby": "generation", "recovery.snapshot_every_steps": 1}
    struck = made(job, **ready, **{"trainer.options.pace_s": 0.6})
    daemon = struck.start()
    daemon.until("standby_ready")
    daemon.strike(1, signal.SIGKILL)
    assert daemon.exit_status() == 0
    (recovery,) = struck.result()["recoveries"]
    assert recovery["resumed_step"] == recovery["step"]
    assert [one["generation"] for one in struck.events("workers_started")] == [1]
    struck.note_recoveries("a loop of the user's own, by its standby")
    struck.must_equal(calm.numbers())


@full
def test_a_rank_that_leaves_early_ends_the_job_with_its_name(job: MakeJob) -> None:
    """Uneven data is the commonest hang of all; here it has a message."""
    leaves = {"trainer.options.leaves": [1, 12], "budgets.same_error_max": 2}
    uneven = made(job, **leaves)
    assert uneven.start().exit_status() == 4
    said = "rank 1 ended after 12 steps, but rank 0 has begun 13"
    assert said in uneven.result()["reason"] + str(uneven.result()["traceback"])
    assert len(uneven.events("worker_raised", primary=True)) == 2
