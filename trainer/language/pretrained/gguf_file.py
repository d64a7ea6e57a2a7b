"""A model in one GGUF file: what its metadata says, and its tensors, dequantised as asked for."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat import Template
from trainer.data.tokenizer import EXTRA, SubwordTokenizer, build_tokenizer
from trainer.language.architecture import Architecture, RopeScaling
from trainer.language.pretrained.fields import Fields
from trainer.language.pretrained.gguf_header import GgufFile, Place
from trainer.language.pretrained.tokenizer_files import ABOUT, TEMPLATE
from trainer.language.pretrained.values import Floats, Tensor, Value, check_blocks, gather
from trainer.settings import SettingsError

NAMES: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "query": "blk.{}.attn_q.weight",
    "key": "blk.{}.attn_k.weight",
    "value": "blk.{}.attn_v.weight",
    "attention_out": "blk.{}.attn_output.weight",
    "feed_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "query_bias": "blk.{}.attn_q.bias",
    "key_bias": "blk.{}.attn_k.bias",
    "value_bias": "blk.{}.attn_v.bias",
    "query_norm": "blk.{}.attn_q_norm.weight",
    "key_norm": "blk.{}.attn_k_norm.weight",
    "head": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """A tensor of the file.

    llama.cpp pairs neighbours where Llama pairs halves, and so permutes the rows of queries and
    keys, within each of `heads` heads; 0 = not permuted.
    """

    where: str
    shape: tuple[int, ...]
    kind: int
    bytes: NDArray[np.uint8]
    heads: int = 0
    problem: str | None = None

    def read(self, index: tuple[slice, ...]) -> Floats:
        rows: Any = index[0]
        if len(self.shape) == 1:  # a vector is one row
            vector: Floats = self._values(self.bytes[None])[0][rows]
            return vector
        if self.heads:
            rows = self._permuted()[rows]
        return np.ascontiguousarray(self._values(self.bytes[rows])[:, index[1]])

    def _values(self, data: NDArray[np.uint8]) -> Floats:
        from gguf import GGMLQuantizationType, dequantize

        # `dequantize` turns float32 and float16 into float32 too.
        values = dequantize(np.ascontiguousarray(data), GGMLQuantizationType(self.kind))
        return np.asarray(values, np.float32)

    def _permuted(self) -> NDArray[np.int64]:
        """Where each row of the model lies in the file."""
        rows = np.arange(self.shape[0]).reshape(self.heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def architecture_of(file: GgufFile) -> Architecture:
    """What the metadata describes. Raises `SettingsError` for what we cannot compute."""
    _library(file.path)
    kind = file.metadata.get("general.architecture")
    fields = Fields(str(file.path), file.metadata)
    if kind not in _KINDS:
        raise fields.wrong(
            "general.architecture", f"is not supported, only {', '.join(_KINDS)} are"
        )
    fields.only("split.count", 0, 1)
    fields.only(f"{kind}.expert_count", 0)
    fields.only(f"{kind}.attention.sliding_window", 0)
    heads, width = (
        fields.whole(f"{kind}.attention.head_count"),
        fields.whole(f"{kind}.embedding_length"),
    )
    shared = fields.whole(f"{kind}.attention.head_count_kv", heads)
    if heads % shared:
        raise fields.wrong(f"{kind}.attention.head_count_kv", f"does not divide the {heads} heads")
    size = fields.whole(f"{kind}.attention.key_length", width // heads)
    if size % 2:
        raise fields.wrong(
            f"{kind}.attention.key_length", "is odd, but rotary positions turn pairs"
        )
    fields.only(f"{kind}.attention.value_length", size)
    fields.only(f"{kind}.rope.dimension_count", size)
    base = fields.number(f"{kind}.rope.freq_base", 10000.0)
    embedding = file.places.get(NAMES["embedding"])
    if embedding is None:
        raise SettingsError(f"{file.path}: tensor {NAMES['embedding']} is missing; fetch it anew")
    return Architecture(
        vocabulary=embedding.shape[0],
        layers=fields.whole(f"{kind}.block_count"),
        width=width,
        heads=heads,
        key_value_heads=shared,
        head_size=size,
        hidden=fields.whole(f"{kind}.feed_forward_length"),
        rope_base=base,
        rope_scaling=_scaling(file, fields, kind, base, size),
        norm_epsilon=_short(fields.number(f"{kind}.attention.layer_norm_rms_epsilon", 1e-6)),
        tied=NAMES["head"] not in file.places,
        attention_bias=NAMES["query_bias"].format(0) in file.places,
        query_key_norm=NAMES["query_norm"].format(0) in file.places,
        context=fields.whole(f"{kind}.context_length", 2048),
    )


def read_weights(file: GgufFile, architecture: Architecture) -> dict[str, Value]:
    """A lazy value for each parameter; names, shapes and types are checked.

    Raises `SettingsError`.
    """
    check_blocks(architecture, len(file.places), str(file.path))
    permuted = {}
    if file.metadata["general.architecture"] == "llama":
        for block in range(architecture.layers):
            permuted[NAMES["query"].format(block)] = architecture.heads
            permuted[NAMES["key"].format(block)] = architecture.key_value_heads
    data = np.memmap(file.path, np.uint8, "r")
    tensors: dict[str, Tensor] = {
        name: _tensor(file, data, name, place, permuted.get(name, 0))
        for name, place in file.places.items()
    }
    where = str(file.path)
    return gather(architecture, NAMES, tensors, where=where, ignored=(_ROPE_FACTORS,))


def tokenizer_of(file: GgufFile) -> SubwordTokenizer:
    """The tokenizer in the metadata: byte-level BPE. Raises `SettingsError` for any other."""
    fields = Fields(str(file.path), file.metadata)
    prefix = "tokenizer.ggml."
    model = file.metadata.get(f"{prefix}model")
    if model != "gpt2":
        raise fields.wrong(
            f"{prefix}model",
            "is not supported, only gpt2 (byte-level BPE) is; use the model's folder with "
            "tokenizer.json instead",
        )
    tokens = file.metadata.get(f"{prefix}tokens")
    merges = file.metadata.get(f"{prefix}merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise SettingsError(
            f"{file.path}: holds no tokens and merges of a tokenizer; fetch it anew"
        )
    kinds = file.metadata.get(f"{prefix}token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise SettingsError(f"{file.path}: {prefix}token_type is damaged; fetch it anew")
    split = str(file.metadata.get(f"{prefix}pre", "gpt-2"))
    named = {name: _special(file, tokens, name) for name in ("bos", "eos", "eot", "padding")}
    opening = named["bos"]
    # llama.cpp puts it before a text where the key is missing, for Llama 3 alone.
    if not fields.truth(f"{prefix}add_bos_token", split in ("llama-bpe", "llama3")):
        opening = None
    inner = build_tokenizer(
        where=str(file.path),
        tokens=tokens,
        merges=merges,
        kinds=kinds,
        split=split,
        opening=opening,
    )
    about = {
        f"{'pad' if name == 'padding' else name}_token": tokens[token]
        for name, token in named.items()
        if token is not None and name != "eot"
    }
    source = file.metadata.get(f"{prefix.removesuffix('ggml.')}chat_template")
    template = None
    beside = {ABOUT: json.dumps(about, indent=2, ensure_ascii=False) + "\n"}
    if isinstance(source, str) and source:
        template = Template(source, about, str(file.path))
        beside[TEMPLATE] = source
    return SubwordTokenizer(
        inner,
        end=named["eos"],
        ends=[token for token in (named["eos"], named["eot"]) if token is not None],
        template=template,
        beside=beside,
    )


def _special(file: GgufFile, tokens: Sequence[str], name: str) -> int | None:
    """A token by what it is for, where the metadata name it."""
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found if type(found) is int and 0 <= found < len(tokens) else None


def _tensor(
    file: GgufFile, data: NDArray[np.uint8], name: str, place: Place, heads: int
) -> _Blocks:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    problem = _unreadable(place.kind)
    if problem is not None:
        return _Blocks(
            where=str(file.path),
            shape=place.shape,
            kind=place.kind,
            bytes=data[:0],
            problem=problem,
        )
    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
    row = place.shape[-1] // per_block * size
    count = math.prod(place.shape[:-1]) * row
    if place.shape[-1] % per_block or place.start + count > len(data):
        raise SettingsError(
            f"{file.path}: is cut short or damaged: tensor {name} ends at byte "
            f"{place.start + count}, the file at {len(data)}; fetch it anew"
        )
    raw = data[place.start : place.start + count].reshape(*place.shape[:-1], row)
    return _Blocks(where=str(file.path), shape=place.shape, kind=place.kind, bytes=raw, heads=heads)


@functools.cache
def _unreadable(kind: int) -> str | None:
    """Why values of this type cannot be had, found out on one block of zeros."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        name = GGMLQuantizationType(kind)
    except ValueError:
        return f"is of type {kind}, which the installed package gguf does not know; update it"
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[name][1], np.uint8), name)
    except NotImplementedError:
        return f"is of type {name.name}, which the package gguf cannot turn into numbers"
    return None


def _scaling(
    file: GgufFile, fields: Fields, kind: str, base: float, size: int
) -> RopeScaling | None:
    factors = file.places.get(_ROPE_FACTORS)
    if factors is not None:
        return _llama3(file, factors, base, size)
    key = f"{kind}.rope.scaling.type"
    fields.only(key, "none", "linear")
    if file.metadata.get(key) == "linear":
        return RopeScaling(kind="linear", factor=fields.number(f"{kind}.rope.scaling.factor"))
    return None


def _llama3(file: GgufFile, place: Place, base: float, size: int) -> RopeScaling:
    """The scaling behind the factors that the file holds for each rate."""
    data = np.memmap(file.path, np.uint8, "r")
    if place.shape != (size // 2,):
        raise SettingsError(f"{file.path}: tensor {_ROPE_FACTORS} is of another model")
    factors = _tensor(file, data, _ROPE_FACTORS, place, 0).read((slice(None),))
    scaling = RopeScaling(kind="llama3", factor=_short(float(factors.max())))
    plain = _rates(base, size, None)
    if not np.allclose(plain / _rates(base, size, scaling), factors, rtol=1e-3):
        raise SettingsError(
            f"{file.path}: tensor {_ROPE_FACTORS} scales positions in a way that is not supported, "
            "only that of Llama 3.1 to 3.3 is; use the model's folder with config.json instead"
        )
    return scaling


def _rates(base: float, size: int, scaling: RopeScaling | None) -> NDArray[np.float64]:
    blank = Architecture(
        vocabulary=1,
        layers=1,
        width=size,
        heads=1,
        key_value_heads=1,
        head_size=size,
        hidden=1,
        rope_base=base,
        rope_scaling=scaling,
    )
    return np.array(blank.rope_rates())


def _short(value: float) -> float:
    """A number that was stored in 32 bits, as it was written: 9.9999997e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _library(path: object) -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise SettingsError(
            f"{path}: the package gguf is not installed, and a GGUF file needs it: {EXTRA}"
        ) from None
