"""Low-rank additions: what is frozen is never saved, and comes back from the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.trainer import models
from tests.trainer.harness import write_text
from trainer.compute import step
from trainer.config import CheckpointSettings, TrainerSettings
from trainer.language.pretrained.model import open_pretrained
from trainer.language.trained import read_trained
from trainer.state import checkpoint
from trainer.task import Context
from trainer.training.task_loop import ModelTrainer
from trainer.wire.heartbeat import Beat

pytest.importorskip("safetensors", reason="needs the extra finetune")
pytest.importorskip("tokenizers", reason="needs the extra finetune")

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "evaluate_every_steps": 2,
    "evaluate_batches": 2,
    "model": {"pretrained": "model", "lora_rank": 2, "lora_targets": ["query", "down"]},
    "data": {"path": ["text.txt"], "batch_size": 4, "sequence_length": 16},
    "optimizer": {"warmup_steps": 0, "learning_rate": 0.02},
}


def trainer_of(folder: Path, generation: int = 1, restore_from: Path | None = None) -> ModelTrainer:
    settings = TrainerSettings.model_validate(SETTINGS)
    context = Context.alone(settings, folder, generation=generation)
    job_dir = folder / "job"
    job_dir.mkdir(exist_ok=True)
    return ModelTrainer(
        context=context,
        checkpoints=CheckpointSettings(every_steps=2, keep=4),
        job_dir=job_dir,
        beat=Beat(folder / f"beat-{generation}"),
        restore_from=restore_from,
        on_outcome=lambda _: None,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_text(folder)
    models.write_folder(folder / "model", models.LLAMA, models.tensors(models.LLAMA))
    return folder


def test_a_run_that_was_resumed_ends_as_the_undisturbed_one(folder: Path) -> None:
    """Frozen weights are in no checkpoint: a resume that drew them anew would ruin the model."""
    first = trainer_of(folder)
    first.connect()
    first.prepare()
    losses = [report.loss for report in first.run()]
    finish = first.finish()
    assert losses[-1] < losses[0]
    saved = checkpoint.finished(folder / "job")
    assert [row[0] for row in saved] == [4, 2]
    size = sum(one.stat().st_size for one in saved[0][2].rglob("*") if one.is_file())
    assert size < 4 * open_pretrained("model", folder).architecture.parameters

    second = trainer_of(folder, 2, saved[1][2])
    second.connect()
    second.build()
    second.warm_up()  # as a standby does, which reads the frozen weights ahead
    assert second.restore(saved[1][2]).step == 2
    assert [report.loss for report in second.run()] == losses[2:]
    assert second.finish().params_digest == finish.params_digest


def test_the_optimizer_keeps_nothing_for_frozen_weights(folder: Path) -> None:
    """Moments of weights that never change would triple the memory for nothing."""
    found = read_trained(TrainerSettings.model_validate(SETTINGS), folder, folder, untrained=True)
    shapes = jax.eval_shape(found.task.init, jax.random.key(0))
    names = [name for name, _ in step.named_leaves(shapes)]
    assert {name for name in names if "base." in name} == {
        f"base.{name}" for name in found.task.architecture.shapes
    }
    assert {name for name in names if name.startswith("params.")} == {
        f"params.{name}_{end}" for name in ("query", "down") for end in ("low", "high")
    }
    assert found.task.facts()["parameters_trained"] < found.task.architecture.parameters / 10


def test_what_is_exported_is_the_pretrained_model_with_the_additions(folder: Path) -> None:
    """Whoever gets the export has no additions to add."""
    settings = TrainerSettings.model_validate(SETTINGS)
    before = read_trained(settings, folder, folder / "job", untrained=True)
    after = read_trained(settings, folder, folder / "job")
    assert "generation-" in after.source
    given = open_pretrained("model", folder).values
    for name, values in before.params.items():
        np.testing.assert_array_equal(values, given[name].whole())
        assert np.array_equal(values, after.params[name]) == (name not in ("query", "down"))
