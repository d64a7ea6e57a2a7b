"""Pretrained models compute what others compute of the same files, or are refused by name."""

from __future__ import annotations

import functools
import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.trainer import models, reference
from trainer.language import model
from trainer.language.pretrained.model import open_pretrained
from trainer.settings import SettingsError

pytest.importorskip("safetensors", reason="needs the extra finetune")
pytest.importorskip("tokenizers", reason="needs the extra finetune")
gguf = pytest.importorskip("gguf", reason="needs the extra finetune")

TOKENS = [5, 200, 17, 17, 91, 3, 269, 44, 45, 46, 12]
LLAMA = models.LLAMA


def ours(path: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits `[length, vocabulary]` by the model of the house."""
    found = open_pretrained(str(path), "/")
    params = {name: value.whole() for name, value in found.values.items()}
    run = jax.jit(functools.partial(model.forward, found.architecture))
    logits: np.ndarray[Any, Any] = np.asarray(run(params, np.array([tokens])))[0]
    return logits


@pytest.mark.parametrize("kind", models.FAMILY)
def test_logits_agree_with_a_reference_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    """One wrong transposition, rotation or norm, and a pretrained model is a random one."""
    config = models.FAMILY[kind]
    weights = models.tensors(config)
    folder = models.write_folder(tmp_path / "model", config, weights)
    expected = reference.logits(config, weights, TOKENS)
    np.testing.assert_allclose(ours(folder, TOKENS), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "kind", ["llama", "llama-tied", "llama-scaled", "llama-linear", "qwen2", "qwen3"]
)
def test_a_gguf_file_of_the_same_weights_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    """llama.cpp permutes, renames and folds in: each of these must be undone."""
    config = models.FAMILY[kind]
    weights = models.tensors(config)
    folder = models.write_folder(tmp_path / "model", config, weights, files=3)
    file = models.write_gguf(tmp_path / "model.gguf", config, weights)
    np.testing.assert_allclose(ours(file, TOKENS), ours(folder, TOKENS), atol=1e-5)


def test_half_values_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    """Most files hold bfloat16; the state is float32 all the same."""
    import ml_dtypes

    config = LLAMA
    weights = models.tensors(config)
    halves = {name: one.astype(ml_dtypes.bfloat16) for name, one in weights.items()}
    folder = models.write_folder(tmp_path / "half", config, halves)
    wide = {name: one.astype(np.float32) for name, one in halves.items()}
    whole = models.write_folder(tmp_path / "whole", config, wide)
    np.testing.assert_array_equal(ours(folder, TOKENS), ours(whole, TOKENS))
    found = open_pretrained(str(folder), "/").values["query"]
    assert found.dtype == np.float32


@pytest.mark.parametrize(("name", "error"), [("F16", 1e-3), ("Q8_0", 0.01), ("Q4_1", 0.2)])
def test_blocks_of_few_bits_are_turned_into_numbers(
    name: str, error: float, tmp_path: Path
) -> None:
    """A quantised file is read slice by slice too, and permuted rows stay what they are."""
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 64}
    weights = models.tensors(config)
    kind = gguf.GGMLQuantizationType[name]
    file = models.write_gguf(tmp_path / "model.gguf", config, weights, quantised=kind)
    whole = models.write_gguf(tmp_path / "whole.gguf", config, weights)
    expected = open_pretrained(str(whole), "/").values
    for parameter, value in open_pretrained(str(file), "/").values.items():
        scale = np.abs(expected[parameter].whole()).max()
        index = tuple(slice(length // 3, length) for length in value.shape)
        np.testing.assert_allclose(value[index], expected[parameter][index], atol=error * scale)


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_slice_is_what_the_whole_has_there(form: str, tmp_path: Path) -> None:
    """A device reads its own part alone; a part read wrongly would train unnoticed."""
    weights = models.tensors(LLAMA)
    if form == "folder":
        path = models.write_folder(tmp_path / "model", LLAMA, weights, files=2)
    else:
        path = models.write_gguf(tmp_path / "model.gguf", LLAMA, weights)
    found = open_pretrained(str(path), "/")
    for name, value in found.values.items():
        whole = value.whole()
        assert whole.shape == value.shape == found.architecture.shapes[name]
        index = tuple(slice(length // 3, length - length // 4) for length in value.shape)
        np.testing.assert_array_equal(value[index], whole[index])
        np.testing.assert_array_equal(value[(slice(None),) * len(value.shape)], whole)


def test_the_tokenizer_of_a_gguf_file_is_that_of_the_folder(tmp_path: Path) -> None:
    """Text cut into other tokens than in training is noise to the model."""
    weights = models.tensors(LLAMA)
    folder = models.write_folder(tmp_path / "model", LLAMA, weights)
    file = models.write_gguf(tmp_path / "model.gguf", LLAMA, weights)
    one = open_pretrained(str(folder), "/").read_tokenizer()
    other = open_pretrained(str(file), "/").read_tokenizer()
    for text in ("in the other theatre", "ünïcödé\n\t 12 3", "<|im_start|>user\nthe<|im_end|>"):
        assert one.encode(text) == other.encode(text)
    plain = "in the other theatre, ünïcödé\n\t 12 3"
    assert one.decode(one.encode(plain)) == plain
    assert len(one.encode(" the")) == 1
    assert one.end == other.end == 257
    talk = [{"role": "user", "content": "the in"}, {"role": "assistant", "content": "er"}]
    ((ids, counts),) = one.encode_many([one.conversation(talk)])
    assert [(ids, counts)] == other.encode_many([other.conversation(talk)])
    assert counts is not None
    assert [one for one, counted in zip(ids, counts, strict=True) if counted] == [263, 257]


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.pop(name)


def put(name: str, values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update({name: values})


LAST = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(LAST), (LAST, "missing")),
        (
            put("model.layers.2.mlp.up_proj.weight", np.zeros(3, np.float32)),
            ("layers.2", "no place"),
        ),
        (put(LAST, np.zeros((47, 32), np.float32)), (LAST, "[47, 32]", "[48, 32]")),
        (put(LAST, np.zeros((48, 32), np.int8)), (LAST, "I8")),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Any]], None], words: tuple[str, ...], tmp_path: Path
) -> None:
    """A tensor silently left at its first draw costs a week of training."""
    weights: dict[str, Any] = models.tensors(LLAMA)
    change(weights)
    folder = models.write_folder(tmp_path / "model", LLAMA, weights)
    with pytest.raises(SettingsError) as caught:
        open_pretrained(str(folder), "/")
    assert len(caught.value.problems) == 1
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mixtral"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"bits": 4}),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", "two"),
        ("rms_norm_eps", -1.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "longrope"}),
        ("vocab_size", None),
    ],
)
def test_what_we_cannot_compute_is_refused_with_file_key_and_value(
    key: str, value: Any, tmp_path: Path
) -> None:
    """An option that is passed over changes what the model computes, and nothing says so."""
    folder = models.write_folder(tmp_path / "model", {**LLAMA, key: value}, models.tensors(LLAMA))
    with pytest.raises(SettingsError) as caught:
        open_pretrained(str(folder), "/")
    assert "config.json" in str(caught.value)
    assert (key if not key.startswith("rope") else "rope_type") in str(caught.value)


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    """Mistral 0.1 looks back 4096 tokens only; with full attention it is another model."""
    config = {**models.FAMILY["mistral"], "sliding_window": 4096}
    folder = models.write_folder(tmp_path / "model", config, models.tensors(config))
    with pytest.raises(SettingsError, match="sliding_window = 4096 is not supported"):
        open_pretrained(str(folder), "/")


def test_the_rope_table_of_newer_files_means_the_same(tmp_path: Path) -> None:
    """transformers 5 moved base and scaling into one table."""
    config = models.FAMILY["llama-scaled"]
    newer = {name: one for name, one in config.items() if not name.startswith("rope")}
    newer["rope_parameters"] = {**models.SCALED, "rope_theta": 500000.0}
    weights = models.tensors(config)
    one = open_pretrained(str(models.write_folder(tmp_path / "a", config, weights)), "/")
    other = open_pretrained(str(models.write_folder(tmp_path / "b", newer, weights)), "/")
    assert one.architecture == other.architecture


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"')


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def lost_part(folder: Path) -> None:
    places = dict.fromkeys(models.tensors(LLAMA), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_config, ("config.json", "not valid JSON")),
        (damage_weights, ("model.safetensors", "cut short")),
        (no_weights, ("holds no *.safetensors",)),
        (no_tokenizer, ("tokenizer.json", "no such file")),
        (no_config, ("config.json", "no such file")),
        (lost_part, ("model-00001-of-00002.safetensors", "no such file")),
    ],
)
def test_a_damaged_folder_is_one_clear_message(
    damage: Callable[[Path], None], words: tuple[str, ...], tmp_path: Path
) -> None:
    """Half a download is the usual first attempt."""
    folder = models.write_folder(tmp_path / "model", LLAMA, models.tensors(LLAMA))
    damage(folder)
    with pytest.raises(SettingsError) as caught:
        open_pretrained(str(folder), "/")
    assert len(caught.value.problems) == 1
    assert all(word in str(caught.value) for word in words), str(caught.value)


def nested(depth: int) -> bytes:
    """A header whose only key holds a list in a list in a list."""
    text = b"a.deep.list"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(text)) + text
    return header + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + b"\0" * 64


def test_lists_without_end_in_the_metadata_are_one_clear_message(tmp_path: Path) -> None:
    """A header of 1 MB ended in a RecursionError of a hundred thousand frames."""
    (tmp_path / "deep.gguf").write_bytes(nested(100_000))
    with pytest.raises(SettingsError, match=r"deep\.gguf: is cut short or damaged at byte"):
        open_pretrained(str(tmp_path / "deep.gguf"), "/")


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_the_number_of_blocks_is_compared_with_the_tensors_first(form: str, tmp_path: Path) -> None:
    """Names of twenty million blocks were made before the first of them was looked for."""
    weights = models.tensors(LLAMA)
    path = tmp_path / "model"
    config = {**LLAMA, "num_hidden_layers": 20_000_000}
    if form == "folder":
        models.write_folder(path, config, weights)
    else:
        path = models.write_gguf(tmp_path / "model.gguf", config, weights)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SettingsError, match="20000000 blocks, but only"):
        open_pretrained(str(path), "/")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.9, 0.999])
def test_a_gguf_file_that_is_cut_short_is_one_clear_message(share: float, tmp_path: Path) -> None:
    """Wherever the download broke off: in the header, among the tokens, in the last tensor."""
    file = models.write_gguf(tmp_path / "model.gguf", LLAMA, models.tensors(LLAMA))
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SettingsError) as caught:
        open_pretrained(str(file), "/")
    assert str(file) in str(caught.value)


def test_a_gguf_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Architectures and tokenizers that only resemble ours."""
    weights = models.tensors(LLAMA)
    file = models.write_gguf(tmp_path / "a.gguf", {**LLAMA, "model_type": "gemma"}, weights)
    with pytest.raises(SettingsError, match=r"general.architecture = .gemma. is not supported"):
        open_pretrained(str(file), "/")
    file = models.write_gguf(tmp_path / "b.gguf", LLAMA, weights)
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"new-1"))
    with pytest.raises(SettingsError, match=r"tokenizer.ggml.pre = 'new-1' is not supported"):
        open_pretrained(str(file), "/").read_tokenizer()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "does not exist"),
        ("package:no_such_package", "pip install --no-deps no-such-package"),
        ("package:json", "holds 0 .gguf files"),
        ("weights.bin", "no .gguf"),
    ],
)
def test_a_model_that_is_not_there_says_where_it_was_looked_for(
    name: str, words: str, tmp_path: Path
) -> None:
    """The name is the setting a user types by hand."""
    (tmp_path / "weights.bin").touch()
    with pytest.raises(SettingsError, match=words) as caught:
        open_pretrained(name, tmp_path)
    assert f'pretrained = "{name}"' in str(caught.value)
