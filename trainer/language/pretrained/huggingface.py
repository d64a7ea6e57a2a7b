"""A model's folder as Hugging Face lays it out: config.json and *.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.tokenizer import EXTRA
from trainer.host.disk_errors import refusal
from trainer.host.json_text import parse_json
from trainer.language.architecture import Architecture, RopeScaling
from trainer.language.pretrained.fields import Fields
from trainer.language.pretrained.values import Floats, Tensor, Value, gather
from trainer.settings import SettingsError

NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "query": "model.layers.{}.self_attn.q_proj.weight",
    "key": "model.layers.{}.self_attn.k_proj.weight",
    "value": "model.layers.{}.self_attn.v_proj.weight",
    "attention_out": "model.layers.{}.self_attn.o_proj.weight",
    "feed_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "query_bias": "model.layers.{}.self_attn.q_proj.bias",
    "key_bias": "model.layers.{}.self_attn.k_proj.bias",
    "value_bias": "model.layers.{}.self_attn.v_proj.bias",
    "query_norm": "model.layers.{}.self_attn.q_norm.weight",
    "key_norm": "model.layers.{}.self_attn.k_norm.weight",
    "head": "lm_head.weight",
}
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_TYPES = ("F64", "F32", "F16", "BF16")
_IGNORED = ("rotary_emb.inv_freq",)  # old files hold what follows from the base


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sliced:
    """A tensor of a safetensors file."""

    where: str
    inner: Any
    shape: tuple[int, ...]
    problem: str | None

    def read(self, index: tuple[slice, ...]) -> Floats:
        return np.asarray(self.inner[index], np.float32)


def read_config(folder: Path) -> dict[str, Any]:
    """The table in config.json. Raises `SettingsError`."""
    return _json(folder / "config.json")


def architecture_of(folder: Path, config: Mapping[str, Any]) -> Architecture:
    """What config.json describes. Raises `SettingsError` for what we cannot compute."""
    fields = Fields(str(folder / "config.json"), config)
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise fields.wrong("model_type", f"is not supported, only {', '.join(_KINDS)} are")
    _refuse(fields, kind)
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    shared = fields.whole("num_key_value_heads", heads)
    if heads % shared:
        raise fields.wrong("num_key_value_heads", f"does not divide the {heads} heads")
    if "head_dim" not in config and width % heads:
        raise fields.wrong("hidden_size", f"does not split over {heads} heads")
    size = fields.whole("head_dim", width // heads)
    if size % 2:
        raise fields.wrong("head_dim", "is odd, but rotary positions turn pairs")
    base, scaling = _rope(fields)
    return Architecture(
        vocabulary=fields.whole("vocab_size"),
        layers=fields.whole("num_hidden_layers"),
        width=width,
        heads=heads,
        key_value_heads=shared,
        head_size=size,
        hidden=fields.whole("intermediate_size"),
        rope_base=base,
        rope_scaling=scaling,
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        tied=fields.truth("tie_word_embeddings", False),
        attention_bias=kind == "qwen2",
        query_key_norm=kind == "qwen3",
        context=fields.whole("max_position_embeddings", 2048),
    )


def read_weights(folder: Path, architecture: Architecture) -> dict[str, Value]:
    """A lazy value for each parameter; names, shapes and types are checked.

    Raises `SettingsError`.
    """
    tensors: dict[str, Tensor] = {}
    expected = _index(folder)
    for file in weight_files(folder):
        for name, tensor in _open(file).items():
            if name in tensors:
                raise SettingsError(f"{file}: tensor {name} lies in {tensors[name].where} too")
            tensors[name] = tensor
    if lost := sorted(set(expected) - set(tensors)):
        raise SettingsError(
            f"{folder / INDEX}: tensor {lost[0]} is not in {expected[lost[0]]}; fetch it anew"
        )
    # Some files hold the tied matrix twice.
    tied = (NAMES["head"],) if architecture.tied else ()
    return gather(architecture, NAMES, tensors, where=str(folder), ignored=(*_IGNORED, *tied))


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights: those that the index names, or model.safetensors, or all there are.

    Raises `SettingsError` where there are none.
    """
    if index := _index(folder):
        return [folder / name for name in sorted(set(index.values()))]
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise SettingsError(
            f"{folder}: holds no *.safetensors; put the weights of the model there (files of "
            "pickled weights such as pytorch_model.bin are not read)"
        )
    return found


def _refuse(fields: Fields, kind: str) -> None:
    """Options that change what the model computes and that we do not have."""
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", *((True,) if kind == "qwen2" else (False,)))
    fields.only("mlp_bias", False)
    fields.only("quantization_config")
    fields.only("partial_rotary_factor", 1, 1.0)
    if kind == "mistral":
        fields.only("sliding_window")
    fields.only("use_sliding_window", False)
    if any(one != "full_attention" for one in fields.table.get("layer_types") or ()):
        raise fields.wrong("layer_types", "is not supported: only full attention is")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 writes both into one table, earlier ones into two keys."""
    table = fields.table.get("rope_parameters") or fields.table.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise fields.wrong("rope_scaling", "must be a table")
    key = "rope_parameters" if fields.table.get("rope_parameters") else "rope_scaling"
    inner = Fields(f"{fields.where}: {key}", table)
    base = fields.number("rope_theta", inner.number("rope_theta", 10000.0))
    inner.only("partial_rotary_factor", 1, 1.0)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling(kind="linear", factor=inner.number("factor"))
    if kind != "llama3":
        raise inner.wrong(
            "rope_type" if "rope_type" in table else "type",
            "is not supported, only default, linear and llama3 are; use another model",
        )
    return base, RopeScaling(
        kind="llama3",
        factor=inner.number("factor"),
        low=inner.number("low_freq_factor"),
        high=inner.number("high_freq_factor"),
        original=inner.whole("original_max_position_embeddings"),
    )


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.exists():
        return {}
    places = _json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise SettingsError(f"{path}: has no weight_map of tensors to files; fetch it anew")
    if outside := sorted(one for one in places.values() if Path(one).name != one):
        raise SettingsError(f"{path}: names the file {outside[0]}, which is not beside it")
    return places


def _open(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise SettingsError(
            f"{path}: the package safetensors is not installed, and a pretrained model needs it: "
            f"{EXTRA}"
        ) from None
    try:
        opened: Any = safe_open(path, "np")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise SettingsError(f"{path}: there is no such file; fetch it anew") from None
    except (OSError, SafetensorError) as error:
        raise refusal(
            f"{path}: is damaged, cut short, or no safetensors file ({error}); fetch it anew", error
        ) from None
    tensors: dict[str, Tensor] = {}
    for name, inner in slices.items():
        dtype = inner.get_dtype()
        problem = f"is of type {dtype}; only {', '.join(_TYPES)} are read"
        tensors[name] = _Sliced(
            where=str(path),
            inner=inner,
            shape=tuple(inner.get_shape()),
            problem=None if dtype in _TYPES else problem,
        )
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        table = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file; a model's folder holds config.json, *.safetensors and "
            "tokenizer.json"
        ) from None
    except OSError as error:
        raise refusal(f"{path}: cannot be read ({error.strerror})", error) from None
    except ValueError as error:
        raise SettingsError(f"{path}: is not valid JSON ({error}); fetch it anew") from None
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: is not a JSON object; fetch it anew")
    return table
