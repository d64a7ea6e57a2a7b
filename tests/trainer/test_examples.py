"""The examples of deploy/examples: whatever they are written with, a kill costs them no bit."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.harness import World
from tests.trainer.process.test_standby import fault, keeping, kill, newest, promote
from trainer.compute import step
from trainer.config import MeshSettings, TrainerSettings
from trainer.state import checkpoint, snapshot
from trainer.task import Context
from trainer.training.find_task import load_task

pytest.importorskip("sklearn", reason="needs the extra examples")

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
SHORT: dict[str, Any] = {"steps": 12, "data": {"batch_size": 48}, "evaluate_batches": 2}


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "examples")
    world.config_dir = EXAMPLES
    yield world
    world.end()
    shutil.rmtree(snapshot.directory_of(world.job_dir), ignore_errors=True)


@pytest.fixture
def path_of_modules() -> Iterator[None]:
    """Importing a task puts its folder on the path of this process."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def settings(task: str, **more: Any) -> dict[str, Any]:
    return {**SHORT, "task": task, **more}


def of(settings: dict[str, Any]) -> Context:
    return Context.alone(TrainerSettings(**settings), EXAMPLES)


@pytest.mark.parametrize(
    ("task", "package"),
    [
        ("model_trainer:main", "sklearn"),
        pytest.param("free_loop:train", "sklearn", marks=pytest.mark.full),
        pytest.param("flax_nnx:Nnx", "flax", marks=pytest.mark.full),
        pytest.param("equinox_mlp:Mlp", "equinox", marks=pytest.mark.full),
    ],
)
def test_a_kill_costs_an_example_no_bit(examples: World, task: str, package: str) -> None:
    """What a framework keeps outside of the state that it gives is lost with the process."""
    pytest.importorskip(package)
    directory = snapshot.directory_of(examples.job_dir)
    # The one that always runs is the hardest: no rank holds its state in whole.
    mesh = {"dp": 1, "tp": 2} if task == "model_trainer:main" else {}
    trained = settings(task, mesh=mesh)
    keep: dict[str, Any] = {"trainer": trained, "snapshots": keeping(directory)}
    active = examples.launch(**keep, faults={1: [fault("sleep", step=9)]})
    active[1].until("drill")
    standby = examples.launch(generation=2, role="standby", **keep)
    for rank in standby:
        rank.until("standing_by")
    active[1].signal(signal.SIGKILL)
    active[1].until("exit")
    kill(active)
    promote(standby, newest(directory))
    assert standby[0].until("ready")["step"] == 9
    assert standby[0].of("ready")[0]["differences"] == []
    digests = {rank.until("completed")["params_digest"] or "said by rank 0" for rank in standby}
    disturbed = examples.losses()
    kill(standby)

    (examples.job_dir / "metrics.jsonl").unlink()
    calm = examples.launch(generation=3, trainer=trained)
    digests |= {rank.until("completed")["params_digest"] or "said by rank 0" for rank in calm}
    assert len(digests - {"said by rank 0"}) == 1
    assert list(disturbed) == list(range(12))
    assert examples.losses() == disturbed


@pytest.mark.parametrize(
    ("task", "package"), [("flax_nnx:Nnx", "flax"), ("equinox_mlp:Mlp", "equinox")]
)
def test_the_state_of_a_framework_goes_to_the_host_and_back(
    path_of_modules: None, task: str, package: str
) -> None:
    """All that changes is in it, dropout keys and step counts too, and nothing else is."""
    pytest.importorskip(package)
    own = load_task(of(settings(task)))
    layout = step.make_layout(MeshSettings())
    programs = step.compile_programs(own, layout, seed=0)
    state = step.initial_state(own, programs, seed=0)
    losses = []
    for index in range(4):
        state, metrics = programs.train(state, step.place_rows(layout, own.batch(index)))
        losses.append(float(metrics["loss"]))
        if index == 1:
            kept = step.to_host(state)
    state = step.place_state(programs, step.assembly_of(kept).read)
    for index in (2, 3):
        state, metrics = programs.train(state, step.place_rows(layout, own.batch(index)))
        assert float(metrics["loss"]) == losses[index]


def test_digits_learn_the_same_on_two_workers_as_on_one(
    examples: World, path_of_modules: None
) -> None:
    """Spreading the rows over workers is a matter of speed, not of the result."""
    whole = settings("digits:Digits", steps=200, evaluate_batches=6, evaluate_every_steps=0)
    ends, losses = [], []
    for generation, world_size in enumerate((1, 2), start=1):
        ranks = examples.launch(generation=generation, world_size=world_size, trainer=whole)
        completed = [rank.until("completed") for rank in ranks]
        ends.append(completed[0])
        losses.append(list(examples.losses().values()))
        (examples.job_dir / "metrics.jsonl").unlink()
    assert len(losses[0]) == 200
    # The order of sums differs, and 200 steps make that grow; early steps are all but equal.
    np.testing.assert_allclose(losses[1][:50], losses[0][:50], rtol=1e-3)
    np.testing.assert_allclose(losses[1], losses[0], atol=0.05)
    assert ends[1]["held_out_loss"] == pytest.approx(ends[0]["held_out_loss"], abs=0.02)
    assert accuracy(examples.job_dir, whole) >= 0.98


def accuracy(job_dir: Path, settings: dict[str, Any]) -> float:
    """The share of all held-out digits that the newest checkpoint of the job gets right."""
    task: Any = load_task(of(settings))
    programs = step.compile_programs(task, step.make_layout(MeshSettings()), seed=0)
    state, meta = checkpoint.load(checkpoint.finished(job_dir)[0][2], step.host_shapes(programs))
    assert meta["position"] == {"epoch": 200 // task.data.steps_an_epoch}
    scores = sys.modules["digits"].scores(state["params"], task.data.held_out["image"])
    return float(np.mean(np.argmax(scores, axis=-1) == task.data.held_out["label"]))
