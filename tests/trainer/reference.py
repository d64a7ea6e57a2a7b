"""The Llama family once more, in numpy and float64, straight from the papers and HF's layout.

Slow, one row at a time, and sharing nothing with the trainer: what both compute must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]


def logits(config: Mapping[str, Any], tensors: Tensors, tokens: list[int]) -> Array:
    """`[length, vocabulary]` of one row, from tensors as they lie in safetensors files."""
    weights = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
    epsilon = config.get("rms_norm_eps", 1e-6)
    stream = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        block = {
            name.removeprefix(prefix): values
            for name, values in weights.items()
            if name.startswith(prefix)
        }
        stream = stream + attention(
            config, block, norm(stream, block["input_layernorm.weight"], epsilon)
        )
        stream = stream + feed(
            block, norm(stream, block["post_attention_layernorm.weight"], epsilon)
        )
    stream = norm(stream, weights["model.norm.weight"], epsilon)
    tied = config.get("tie_word_embeddings", False)
    return stream @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def norm(values: Array, scale: Array, epsilon: float) -> Array:
    """RMSNorm over the last axis."""
    normed: Array = values / np.sqrt((values**2).mean(-1, keepdims=True) + epsilon) * scale
    return normed


def feed(block: Mapping[str, Array], values: Array) -> Array:
    """SwiGLU."""
    gate = values @ block["mlp.gate_proj.weight"].T
    up = values @ block["mlp.up_proj.weight"].T
    gated: Array = gate / (1 + np.exp(-gate)) * up
    return gated @ block["mlp.down_proj.weight"].T


def attention(config: Mapping[str, Any], block: Mapping[str, Array], values: Array) -> Array:
    """Head by head, query by query."""
    heads = config["num_attention_heads"]
    shared = config.get("num_key_value_heads", heads)
    size = config.get("head_dim", config["hidden_size"] // heads)
    epsilon = config.get("rms_norm_eps", 1e-6)

    def project(which: str, count: int) -> Array:
        flat = values @ block[f"self_attn.{which}_proj.weight"].T
        flat = flat + block.get(f"self_attn.{which}_proj.bias", 0.0)
        split = flat.reshape(len(values), count, size)
        scale = block.get(f"self_attn.{which}_norm.weight")
        return split if scale is None else norm(split, scale, epsilon)

    queries, keys = rotate(config, project("q", heads)), rotate(config, project("k", shared))
    spoken = project("v", shared)
    mixed = np.zeros((len(values), heads, size))
    for head in range(heads):
        group = head // (heads // shared)
        for place in range(len(values)):
            scores = keys[: place + 1, group] @ queries[place, head] / math.sqrt(size)
            shares = np.exp(scores - scores.max())
            mixed[place, head] = shares @ spoken[: place + 1, group] / shares.sum()
    return mixed.reshape(len(values), -1) @ block["self_attn.o_proj.weight"].T


def rotate(config: Mapping[str, Any], values: Array) -> Array:
    """Turn the pairs (i, i + size / 2) by position times frequency, as complex numbers."""
    size = values.shape[-1]
    frequencies = config.get("rope_theta", 10000.0) ** (-np.arange(0, size, 2) / size)
    frequencies = scaled(config.get("rope_scaling"), frequencies)
    turns = np.exp(1j * np.arange(len(values))[:, None] * frequencies)[:, None]
    pairs = (values[..., : size // 2] + 1j * values[..., size // 2 :]) * turns
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def scaled(scaling: Mapping[str, Any] | None, frequencies: Array) -> Array:
    """The formulas of Llama 3.1 and of linear scaling."""
    if scaling is None:
        return frequencies
    factor: float = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low: float = scaling["low_freq_factor"]
    high: float = scaling["high_freq_factor"]
    original: int = scaling["original_max_position_embeddings"]
    lengths = 2 * np.pi / frequencies
    smooth: Array = np.clip((original / lengths - low) / (high - low), 0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies
