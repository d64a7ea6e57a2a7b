"""Loops of one's own in real processes: stopped together, and found out when they are uneven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.harness import World
from tests.trainer.process.test_rank import newest

LOOP = """
import time

import jax.numpy as jnp
import numpy as np

def train(worker):
    uneven = worker.rank == 1 and worker.options.get("uneven", "")
    w = worker.restore(jnp.zeros(4))
    for step in worker.steps():
        if uneven == "steps" and step == 6:
            break
        x = np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)
        w = w + worker.place(x[worker.rows(8)]).mean(axis=0)
        time.sleep(worker.options.get("pause_s", 0.0))
        more = {"accuracy": 1.0} if uneven == "metrics" else {}
        worker.report(loss=w.sum(), **more)
        worker.checkpoint(w)
"""


@pytest.fixture
def loops(world: World) -> World:
    (world.config_dir / "users_loop.py").write_text(LOOP)
    return world


def trainer(**options: Any) -> dict[str, Any]:
    return {"task": "users_loop:train", "steps": 60, "options": options}


def test_all_ranks_of_a_loop_stop_after_the_same_step_and_go_on(loops: World) -> None:
    """A function that drives itself must be as easy to drain as a task."""
    calm = loops.launch(trainer=trainer())
    wanted = {rank.until("completed")["params_digest"] for rank in calm}
    losses = loops.losses()
    (loops.job_dir / "metrics.jsonl").unlink()

    ranks = loops.launch(generation=2, trainer=trainer(pause_s=0.1))
    for rank in ranks:
        assert rank.until("ready")["step"] == 0
    ranks[0].until("stepped")
    ranks[0].order({"order": "stop"})
    last = ranks[0].until("stopping")["after_step"]
    ranks[1].order({"order": "stop_after", "step": last})
    ranks[1].until("acknowledged")
    ranks[0].order({"order": "go"})
    assert [rank.until("saved")["step"] for rank in ranks] == [last + 1, last + 1]
    for rank in ranks:
        rank.end()

    point = newest(loops, generation=2)
    again = loops.launch(generation=3, trainer=trainer(), restore_point=point)
    assert {rank.until("completed")["params_digest"] for rank in again} == wanted
    assert again[0].of("ready")[0]["step"] == last + 1
    assert loops.losses() == losses


@pytest.mark.parametrize(
    ("uneven", "culprit", "said"),
    [
        ("steps", 1, "rank 1 ended after 6 steps, but rank 0 has begun 7"),
        pytest.param(
            *("metrics", 0, "rank 0 reported loss, rank 1 accuracy, loss"), marks=pytest.mark.full
        ),
    ],
)
def test_uneven_ranks_are_an_error_that_names_them(
    loops: World, uneven: str, culprit: int, said: str
) -> None:
    """Without a word of theirs all that a user sees is a hang, a deadline later."""
    ranks = loops.launch(trainer=trainer(uneven=uneven, pause_s=0.05))
    raised = ranks[culprit].until("raised")
    assert said in raised["error"]["message"]
    assert raised["error"]["type"] == "TaskError"
    assert raised["error"]["user"]
    assert not raised["collective"]
    assert Path(loops.job_dir / "metrics.jsonl").exists()
