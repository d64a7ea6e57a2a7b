"""A decoder-only transformer over bytes, as plain functions over a dict of arrays.

RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), grouped-query attention
(Ainslie et al., 2023), SwiGLU (Shazeer, 2020). The arrays of all blocks are stacked: their first
axis is the block.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config import ModelSettings

VOCABULARY = 256
_NORM_EPSILON = 1e-6
_OUTSIDE_BLOCKS = frozenset({"embedding", "final_norm", "head"})

Params = dict[str, jax.Array]


def shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    blocks, width, hidden = settings.layers, settings.width, settings.hidden
    head = width // settings.heads
    shared = settings.key_value_heads * head
    return {
        "embedding": (VOCABULARY, width),
        "attention_norm": (blocks, width),
        "query": (blocks, width, width),
        "key": (blocks, width, shared),
        "value": (blocks, width, shared),
        "attention_out": (blocks, width, width),
        "feed_norm": (blocks, width),
        "gate": (blocks, width, hidden),
        "up": (blocks, width, hidden),
        "down": (blocks, hidden, width),
        "final_norm": (width,),
        "head": (width, VOCABULARY),
    }


def decayed(settings: ModelSettings) -> dict[str, bool]:
    """Which parameters weight decay applies to: the matrices, not the scales of the norms."""
    return {name: not name.endswith("norm") for name in shapes(settings)}


def init_params(settings: ModelSettings, key: jax.Array) -> Params:
    """Norms at one, matrices normal with variance 1 / fan-in, those that end a block smaller.

    All come out of one long draw: a draw for each would take seconds to compile.
    """
    wanted = shapes(settings)
    matrices = [name for name in wanted if not name.endswith("norm")]
    draw = jax.random.normal(key, (sum(math.prod(wanted[name]) for name in matrices),))
    params: Params = {}
    start = 0
    for name, shape in wanted.items():
        if name.endswith("norm"):
            params[name] = jnp.ones(shape)
            continue
        fan_in = settings.width if name == "embedding" else shape[-2]
        scale = fan_in**-0.5
        if name in ("attention_out", "down"):
            scale *= (2 * settings.layers) ** -0.5
        end = start + math.prod(shape)
        params[name] = scale * draw[start:end].reshape(shape)
        start = end
    return params


def loss(
    settings: ModelSettings, params: Params, rows: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Mean cross-entropy in nats a byte of rows `[batch, length + 1]`; `key` turns dropout on."""
    logits = forward(settings, params, rows[:, :-1], key)
    targets = rows[:, 1:].astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def forward(
    settings: ModelSettings, params: Params, tokens: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Logits float32 `[batch, length, 256]` of the byte after each byte of `[batch, length]`."""
    stacked = {name: params[name] for name in params if name not in _OUTSIDE_BLOCKS}
    stream = params["embedding"][tokens.astype(jnp.int32)]
    angles = _angles(settings, tokens.shape[1])
    for index in range(settings.layers):
        block = {name: values[index] for name, values in stacked.items()}
        keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, index))
        mixed = _attention(settings, block, _norm(stream, block["attention_norm"]), angles)
        stream = stream + _drop(settings, mixed, keys[0])
        fed = _feed(block, _norm(stream, block["feed_norm"]))
        stream = stream + _drop(settings, fed, keys[1])
    return _norm(stream, params["final_norm"]) @ params["head"]


def _norm(values: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + _NORM_EPSILON) * scale


def _angles(settings: ModelSettings, length: int) -> tuple[jax.Array, jax.Array]:
    half = settings.width // settings.heads // 2
    rates = settings.rope_base ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None] * rates
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def _rotate(values: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = angles
    first, second = jnp.split(values, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(
    settings: ModelSettings, block: Params, stream: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> jax.Array:
    batch, length, width = stream.shape
    head = width // settings.heads
    groups = settings.key_value_heads
    queries = (stream @ block["query"]).reshape(batch, length, settings.heads, head)
    keys = (stream @ block["key"]).reshape(batch, length, groups, head)
    values = (stream @ block["value"]).reshape(batch, length, groups, head)
    queries = _rotate(queries, angles).reshape(batch, length, groups, -1, head)
    scores = jnp.einsum("btgqd,bsgd->bgqts", queries, _rotate(keys, angles)) * head**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bgqts,bsgd->btgqd", weights, values).reshape(batch, length, width)
    return mixed @ block["attention_out"]


def _feed(block: Params, stream: jax.Array) -> jax.Array:
    return (jax.nn.silu(stream @ block["gate"]) * (stream @ block["up"])) @ block["down"]


def _drop(settings: ModelSettings, values: jax.Array, key: Any) -> jax.Array:
    if key is None or settings.dropout == 0.0:
        return values
    kept = jax.random.bernoulli(key, 1.0 - settings.dropout, values.shape)
    return jnp.where(kept, values / (1.0 - settings.dropout), 0.0)
