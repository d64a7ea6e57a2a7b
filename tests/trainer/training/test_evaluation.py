"""What is held out counts by its tokens, and all that a task says about it is kept."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.harness import World
from trainer.config import CheckpointSettings, TrainerSettings
from trainer.process import failures
from trainer.task import Context, Task, TaskError
from trainer.training.task_loop import ModelTrainer, StepReport
from trainer.wire.heartbeat import Beat

SIZES = (377, 492, 462)


class Ragged(Task):
    """Batches with different numbers of targets; right or wrong by their place."""

    def init(self, key: Any) -> Any:
        return {"w": jnp.zeros(2)}

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        return state, {"loss": batch["x"].mean()}

    def batch(self, step: int) -> Any:
        return {"x": np.ones((2, 1), np.float32)}

    def held_out_batch(self, index: int) -> Any:
        mask = np.arange(500, dtype=np.float32)[None] < SIZES[index]
        return {"mask": mask.astype(np.float32), "x": np.full((1, 500), index, np.float32)}

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        count = batch["mask"].sum()
        loss = (batch["x"] * batch["mask"]).sum() / count
        return {"loss": loss, "accuracy": 1 - loss / 4, "weight": count}


class Shortens(Ragged):
    """Its epoch does not divide into batches."""

    def batch(self, step: int) -> Any:
        return {"x": np.ones((1 if step == 2 else 2, 1), np.float32)}


class Ends(Ragged):
    """Its iterator has an end."""

    def start(self) -> None:
        self._rows = iter([np.ones((2, 1), np.float32)] * 3)

    def batch(self, step: int) -> Any:
        return {"x": next(self._rows)}


class Overflows(Ragged):
    """Its token numbers need more than 32 bits."""

    def batch(self, step: int) -> Any:
        return {"x": np.full((2, 1), 5 if step < 2 else 6_000_000_000, np.int64)}


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("users_ragged")
    for kind in (Ragged, Shortens, Ends, Overflows):
        setattr(made, kind.__name__, kind)
    sys.modules["users_ragged"] = made
    yield made
    del sys.modules["users_ragged"]


def trainer(folder: Path, kind: type[Task]) -> ModelTrainer:
    built = ModelTrainer(
        context=Context.alone(
            TrainerSettings(
                task=f"users_ragged:{kind.__name__}",
                steps=5,
                evaluate_every_steps=0,
                evaluate_batches=3,
            ),
            folder,
        ),
        checkpoints=CheckpointSettings(),
        job_dir=folder,
        beat=Beat(folder / "beat"),
        restore_from=None,
        on_outcome=lambda outcome: None,
    )
    built.connect()
    built.prepare()
    return built


@pytest.mark.usefixtures("module")
def test_what_is_held_out_counts_by_its_targets_and_every_metric_is_kept(tmp_path: Path) -> None:
    """The mean of the batches' means is another number, and accuracy was thrown away."""
    last: StepReport = list(trainer(tmp_path, Ragged).run())[-1]
    loss = (492 * 1 + 462 * 2) / sum(SIZES)
    assert last.held_out_loss == pytest.approx(loss, rel=1e-12)
    assert last.metrics["held_out_accuracy"] == pytest.approx(1 - loss / 4, rel=1e-6)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["held_out_loss"] == last.held_out_loss
    assert line["held_out_accuracy"] == last.metrics["held_out_accuracy"]
    assert "held_out_weight" not in line


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Shortens, r"batch 2: x is float32\[1, 1\] over all ranks and was float32\[2, 1\]"),
        (Ends, r"step 2: an iterator of the task has come to its end"),
        (Overflows, "a batch holds 6000000000, which int32 does not"),
    ],
)
def test_a_batch_that_cannot_be_is_the_tasks_and_not_ours(
    tmp_path: Path, kind: type[Task], complaint: str
) -> None:
    """As bugs of everstep they were tried again and again, without the line that could be mended.
    Integers of more than 32 bits even became others.
    """
    with pytest.raises(TaskError, match=complaint) as caught:
        list(trainer(tmp_path, kind).run())
    told = failures.describe(caught.value, task=f"{__name__}:Ragged")
    assert told.user
    assert told.frame.startswith(f"{__file__}:")


@pytest.mark.parametrize("world_size", [1, 2])
def test_records_that_are_held_out_count_once_each_on_any_number_of_ranks(
    world: World, world_size: int
) -> None:
    """Three batches of few and masked tokens: the loss is the mean over all of them, none twice."""
    pytest.importorskip("grain")
    lines = [
        json.dumps({"prompt": "of " * (n % 5), "completion": f"{n} and {n * n}" * (1 + n % 7)})
        for n in range(60)
    ]
    (world.config_dir / "pairs.jsonl").write_text("\n".join(lines))
    trainer = {
        "steps": 1,
        "seed": 7,
        "evaluate_batches": 3,
        "model": {"layers": 1, "width": 16, "heads": 2, "key_value_heads": 1, "hidden": 24},
        "optimizer": {"learning_rate": 1e-30},
        "data": {
            "path": ["pairs.jsonl"],
            "batch_size": 4,
            "sequence_length": 48,
            "packing": "none",
            "held_out_fraction": 0.1,
        },
    }
    ranks = world.launch(world_size=world_size, trainer=trainer)
    told = ranks[0].until("completed")["held_out_loss"]
    assert told == pytest.approx(_held_out_loss(trainer, world.config_dir), rel=2e-6)


def _held_out_loss(settings: Any, folder: Path) -> float:
    """The same, each row by itself."""
    import jax

    from trainer.compute import step
    from trainer.language.task import LanguageModel

    single = {**settings, "data": {**settings["data"], "batch_size": 1}, "evaluate_batches": 12}
    task = LanguageModel(Context.alone(TrainerSettings.model_validate(single), folder))
    state = jax.jit(task.init)(step.seed_key(7))
    rows = [task.held_out_batch(index) for index in range(12)]
    there = [row for row in rows if row["weights"].any()]
    assert 4 < len({row["tokens"].tobytes() for row in there}) == len(there) < 12
    summed = counted = 0.0
    for row in there:
        found = task.evaluate(state, row)
        summed += float(found["loss"]) * float(found["weight"])
        counted += float(found["weight"])
    return summed / counted
