"""A model can be listened to, and taken away in a form that others read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.trainer import models, reference
from trainer.data.tokenizer import BytesTokenizer, SubwordTokenizer, bytes_as_subwords
from trainer.language import model
from trainer.language.generate import generate
from trainer.language.pretrained.export import export
from trainer.language.pretrained.model import Pretrained, open_pretrained
from trainer.settings import SettingsError

pytest.importorskip("safetensors", reason="needs the extra finetune")
pytest.importorskip("tokenizers", reason="needs the extra finetune")


def opened(path: Path) -> tuple[Pretrained, dict[str, Any]]:
    found = open_pretrained(str(path), "/")
    return found, {name: value.whole() for name, value in found.values.items()}


def logits(found: Pretrained, params: dict[str, Any], tokens: list[int]) -> Any:
    run = jax.jit(functools.partial(model.forward, found.architecture))
    return np.asarray(run(params, np.array([tokens])))[0]


def test_generated_text_is_the_likeliest_token_after_token(tmp_path: Path) -> None:
    """A cache that is off by one gives fluent nonsense."""
    folder = models.write_folder(tmp_path / "model", models.LLAMA, models.tensors(models.LLAMA))
    found, params = opened(folder)
    ids = [7, 31, 200, 12]
    made = list(generate(found.architecture, params, ids, count=8))
    assert len(made) == 8
    assert made == np.argmax(logits(found, params, ids + made), axis=-1)[3:-1].tolist()
    stopped = list(generate(found.architecture, params, ids, count=8, ends=(made[3],)))
    assert stopped == made[: made.index(made[3])]


def test_what_is_drawn_follows_from_the_seed(tmp_path: Path) -> None:
    """A sample that nobody can have again says little about a model."""
    folder = models.write_folder(tmp_path / "model", models.LLAMA, models.tensors(models.LLAMA))
    found, params = opened(folder)

    def drawn(seed: int) -> list[int]:
        return list(generate(found.architecture, params, [5], count=12, temperature=2.0, seed=seed))

    assert drawn(1) == drawn(1) != drawn(2)
    with pytest.raises(SettingsError, match="more than the 64"):
        list(generate(found.architecture, params, [5] * 60, count=5))
    with pytest.raises(SettingsError, match="empty"):
        list(generate(found.architecture, params, [], count=5))


@pytest.mark.parametrize("kind", ["llama-scaled", "llama-tied", "llama-linear", "qwen2", "qwen3"])
def test_an_exported_model_is_read_back_as_it_was(kind: str, tmp_path: Path) -> None:
    """Our loader reads it, and so does whoever goes by the names and the config alone."""
    config = models.FAMILY[kind]
    found, params = opened(
        models.write_folder(tmp_path / "model", config, models.tensors(config), files=2)
    )
    tokenizer = found.read_tokenizer()
    export(tmp_path / "out", found.architecture, params, tokenizer)
    again, back = opened(tmp_path / "out")
    assert again.architecture == found.architecture
    for name, values in params.items():
        np.testing.assert_array_equal(back[name], values)
    text = "in the other theatre"
    assert again.read_tokenizer().encode(text) == tokenizer.encode(text)
    assert again.read_tokenizer().end == tokenizer.end == 257
    from safetensors.numpy import load_file

    written = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tokens = [5, 200, 17, 91]
    expected = reference.logits(written, tensors, tokens)
    ours = logits(found, params, tokens)
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    """The folder may hold somebody's only copy of a model."""
    (tmp_path / "notes.txt").write_text("mine")
    found, params = opened(
        models.write_folder(tmp_path / "model", models.LLAMA, models.tensors(models.LLAMA))
    )
    with pytest.raises(SettingsError, match="not empty"):
        export(tmp_path, found.architecture, params, found.read_tokenizer())


def test_bytes_can_be_written_as_a_tokenizer_of_others() -> None:
    """A model over bytes is exported with a tokenizer.json that gives the same ids."""
    subwords: SubwordTokenizer = bytes_as_subwords()
    text = "def f(x):\n\treturn 'ünïcödé \U0001f600'" + "".join(map(chr, range(1, 256)))
    assert subwords.encode(text) == BytesTokenizer().encode(text)
    assert subwords.decode(subwords.encode(text)) == text
