"""The task of the house: its settings, and a batch computed in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer import models
from tests.trainer.harness import TINY, write_text
from trainer.config import TrainerSettings
from trainer.language.task import LanguageModel
from trainer.settings import SettingsError, read_settings
from trainer.task import Context


def task_of(folder: Path, **changes: Any) -> LanguageModel:
    return LanguageModel(Context.alone(TrainerSettings.model_validate({**TINY, **changes}), folder))


def test_a_batch_in_parts_gives_the_step_of_the_whole(tmp_path: Path) -> None:
    """Parts with fewer targets that count must not count more: sums are added, not means."""
    write_text(tmp_path)
    draw = np.random.default_rng(0)
    segments = np.sort(draw.integers(1, 4, (4, 17)).astype(np.int32), axis=1)
    batch = {
        "tokens": jnp.asarray(draw.integers(0, 256, (4, 17), dtype=np.uint8)),
        "weights": jnp.asarray(draw.integers(0, 2, (4, 16)), jnp.float32),
        "segments": jnp.asarray(segments),
    }
    found = []
    for count in (1, 2):
        task = task_of(tmp_path, accumulation_steps=count)
        state = jax.jit(task.init)(jax.random.key(0))
        state, metrics = jax.jit(task.train_step)(state, batch)
        found.append((float(metrics["loss"]), state["optimizer"][1].mu))
    (whole, expected), (loss, moments) = found
    assert loss == pytest.approx(whole, rel=1e-5)
    for name, values in moments.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6)


def test_the_first_token_of_a_packed_document_is_nobodys_target(tmp_path: Path) -> None:
    """Nothing before it tells what it is, and padding after the last document is no text."""
    write_text(tmp_path)
    task = task_of(tmp_path)
    state = jax.jit(task.init)(jax.random.key(0))
    tokens = np.arange(17, dtype=np.uint8)[None].repeat(4, 0)
    segments = np.array([[1] * 9 + [2] * 5 + [0] * 3] * 4, np.int32)
    batch = {"tokens": jnp.asarray(tokens), "segments": jnp.asarray(segments)}
    evaluate = jax.jit(task.evaluate)
    loss = float(evaluate(state, batch)["loss"])
    tokens[:, 14:] = 99
    batch["tokens"] = jnp.asarray(tokens)
    assert float(evaluate(state, batch)["loss"]) == pytest.approx(loss, rel=1e-6)
    tokens[:, 9] = 99
    batch["tokens"] = jnp.asarray(tokens)
    assert float(evaluate(state, batch)["loss"]) != pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("model.lora_rank=4", "need a pretrained model"),
        ("accumulation_steps=5", "multiple of 5"),
        ('model.lora_targets=["querry"]', "has no matrix 'querry'"),
        ('model.compute_dtype="float16"', "bfloat16"),
    ],
)
def test_contradictions_in_the_settings_are_said_at_once(given: str, words: str) -> None:
    """Before anything is placed or compiled."""
    with pytest.raises(SettingsError, match=words):
        read_settings(TrainerSettings, None, [given])


def test_a_pretrained_model_brings_its_own_sizes() -> None:
    """Sizes beside it would be believed by whoever reads the file."""
    with pytest.raises(SettingsError, match="brings its own; leave layers out"):
        read_settings(TrainerSettings, None, ['model.pretrained="somewhere"', "model.layers=12"])


def test_sequences_longer_than_the_model_was_made_for_are_refused(tmp_path: Path) -> None:
    """Positions it has never seen give nonsense that looks like a bad learning rate."""
    pytest.importorskip("safetensors", reason="needs the extra finetune")
    pytest.importorskip("tokenizers", reason="needs the extra finetune")
    models.write_folder(tmp_path / "model", models.LLAMA, models.tensors(models.LLAMA))
    data = {**TINY["data"], "sequence_length": 65}
    with pytest.raises(SettingsError, match=r"sequence_length = 65.*64 tokens at most"):
        task_of(tmp_path, model={"pretrained": "model"}, data=data)
