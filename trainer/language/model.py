"""A decoder of the Llama family, as plain functions over a dict of arrays.

RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), grouped-query attention
(Ainslie et al., 2023), SwiGLU (Shazeer, 2020), low-rank additions (Hu et al., 2021). The arrays of
all blocks are stacked: their first axis is the block. Knows nothing of files, tasks or devices.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compute.sharding import LogicalAxes, constrain
from trainer.config import MATRICES, ModelSettings
from trainer.language.architecture import STACKED, Architecture

Params = dict[str, jax.Array]

_LOW, _HIGH = "_low", "_high"
"""`query_low` `[in, rank]` and `query_high` `[rank, out]`: what training adds to `query`."""

_AXES: Mapping[str, LogicalAxes] = {
    "embedding": ("vocabulary", "embed"),
    "head": ("embed", "vocabulary"),
    "query": ("layers", "embed", "heads"),
    "key": ("layers", "embed", "key_value_heads"),
    "value": ("layers", "embed", "key_value_heads"),
    "attention_out": ("layers", "heads", "embed"),
    "gate": ("layers", "embed", "hidden"),
    "up": ("layers", "embed", "hidden"),
    "down": ("layers", "hidden", "embed"),
    "query_bias": ("layers", "heads"),
    "key_bias": ("layers", "key_value_heads"),
    "value_bias": ("layers", "key_value_heads"),
}
_UNROLLED = 4
"""So few blocks are written out one after the other: XLA optimises across them."""

_SMALL = 1 << 20
"""Numbers of a matrix that any device can hold besides all that it has to hold."""

_LOGITS_MAX = 1 << 26
"""Logits that a device holds at once; more are computed in pieces, twice, and never all there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How the model is computed; nothing here changes what it means."""

    dtype: str = "float32"
    remat: bool = False
    low_rank_scale: float = 1.0

    @classmethod
    def of_settings(cls, settings: ModelSettings) -> Compute:
        """As `[trainer.model]` says."""
        scale = settings.lora_alpha / settings.lora_rank if settings.lora_rank else 1.0
        return cls(dtype=settings.compute_dtype, remat=settings.remat, low_rank_scale=scale)


PLAIN = Compute()


def logical_axes(name: str) -> LogicalAxes | None:
    """What each axis of a parameter is; None = a vector that every device holds."""
    for end, axes in ((_LOW, (0, 1, "low_rank")), (_HIGH, (0, "low_rank", 2))):
        if name.endswith(end):
            whole = _AXES[name.removesuffix(end)]
            return tuple(one if isinstance(one, str) else whole[one] for one in axes)
    return _AXES.get(name)


def decayed(names: Iterable[str]) -> dict[str, bool]:
    """Which parameters weight decay applies to: the matrices, not scales of norms and biases."""
    return {name: not name.endswith(("norm", "bias")) for name in names}


def init_params(architecture: Architecture, key: jax.Array) -> Params:
    """Norms at one, matrices normal with variance 1 / fan-in, those that end a block smaller."""
    draws = _draws(architecture.shapes, key)
    params: Params = {}
    for name, shape in architecture.shapes.items():
        if name.endswith("norm"):
            params[name] = jnp.ones(shape)
        elif name.endswith("bias"):
            params[name] = jnp.zeros(shape)
        else:
            scale = (architecture.width if name == "embedding" else shape[-2]) ** -0.5
            if name in ("attention_out", "down"):
                scale *= (2 * architecture.layers) ** -0.5
            params[name] = scale * draws[name]
    return params


def _draws(shapes: Mapping[str, tuple[int, ...]], key: jax.Array) -> Params:
    """Normal values for each matrix.

    A large one has a draw of its own, which devices can compute in parts. The small ones, which any
    device can hold, come out of one: each draw takes a third of a second to compile.
    """
    matrices = {name: one for name, one in shapes.items() if not name.endswith(("norm", "bias"))}
    small = {name: one for name, one in matrices.items() if math.prod(one) <= _SMALL}
    together = jax.random.normal(key, (sum(math.prod(one) for one in small.values()),))
    draws: Params = {}
    start = 0
    for index, (name, shape) in enumerate(matrices.items()):
        if name not in small:
            draws[name] = jax.random.normal(jax.random.fold_in(key, index), shape)
            continue
        end = start + math.prod(shape)
        draws[name] = together[start:end].reshape(shape)
        start = end
    return draws


def low_rank_shapes(
    architecture: Architecture, rank: int, targets: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the two factors of each target."""
    found: dict[str, tuple[int, ...]] = {}
    for name in targets:
        blocks, inner, outer = architecture.shapes[name]
        found[name + _LOW] = (blocks, inner, rank)
        found[name + _HIGH] = (blocks, rank, outer)
    return found


def init_low_rank(
    architecture: Architecture, rank: int, targets: Iterable[str], key: jax.Array
) -> Params:
    """Factors whose product is zero: before the first step the model is the one it was."""
    shapes = low_rank_shapes(architecture, rank, targets)
    draws = _draws({name: one for name, one in shapes.items() if name.endswith(_LOW)}, key)
    return {
        name: shape[-2] ** -0.5 * draws[name] if name in draws else jnp.zeros(shape)
        for name, shape in shapes.items()
    }


def merge(base: Mapping[str, Any], low_rank: Mapping[str, Any], compute: Compute) -> dict[str, Any]:
    """The base with its low-rank additions added; numpy or jax arrays."""
    merged = dict(base)
    for name in MATRICES:
        if name + _LOW in low_rank:
            added = low_rank[name + _LOW] @ low_rank[name + _HIGH]
            merged[name] = merged[name] + compute.low_rank_scale * added
    return merged


def loss(
    architecture: Architecture,
    params: Params,
    rows: jax.Array,
    *,
    weights: jax.Array | None = None,
    segments: jax.Array | None = None,
    total: jax.Array | None = None,
    key: jax.Array | None = None,
    compute: Compute = PLAIN,
) -> jax.Array:
    """Mean cross-entropy in nats a token of rows `[batch, length + 1]`; `key` turns dropout on.

    `weights` `[batch, length]` says how much each target counts, `segments` `[batch, length + 1]`
    which document a token belongs to: attention stays within it. `total` replaces the sum of the
    weights as what the sum is divided by, where the rows are only a part of a batch.
    """
    inner = None if segments is None else segments[:, :-1]
    stream = _stream(architecture, params, rows[:, :-1], inner, key, compute)
    targets = rows[:, 1:].astype(jnp.int32)
    if total is None:
        total = jnp.float32(targets.size) if weights is None else jnp.sum(weights)
    pieces = _pieces(architecture, targets)
    if pieces == 1:
        return _summed_loss(architecture, compute, params, stream, targets, weights) / total

    def split(values: jax.Array) -> jax.Array:
        rest = values.shape[2:]
        cut = values.reshape(values.shape[0], pieces, values.shape[1] // pieces, *rest)
        return jnp.moveaxis(cut, 1, 0)

    def body(summed: jax.Array, piece: Any) -> tuple[jax.Array, None]:
        return summed + _summed_loss(architecture, compute, params, *piece), None

    cut = (split(stream), split(targets), None if weights is None else split(weights))
    step = jax.checkpoint(body, prevent_cse=False)
    mean: jax.Array = jax.lax.scan(step, jnp.float32(0.0), cut)[0] / total
    return mean


def forward(
    architecture: Architecture,
    params: Params,
    tokens: jax.Array,
    *,
    segments: jax.Array | None = None,
    key: jax.Array | None = None,
    compute: Compute = PLAIN,
) -> jax.Array:
    """Logits float32 `[batch, length, vocabulary]` of the token after each of `[batch, length]`."""
    stream = _stream(architecture, params, tokens, segments, key, compute)
    return _logits(architecture, compute, params, stream)


def empty_cache(architecture: Architecture, batch: int, length: int, compute: Compute) -> Params:
    """Room for the keys and values of `length` tokens in each block."""
    shape = (architecture.layers, batch, length, architecture.key_value_heads)
    return {
        name: jnp.zeros((*shape, architecture.head_size), compute.dtype)
        for name in ("keys", "values")
    }


def forward_cached(
    architecture: Architecture,
    params: Params,
    tokens: jax.Array,
    start: jax.Array,
    cache: Params,
    compute: Compute = PLAIN,
) -> tuple[jax.Array, Params]:
    """Logits after each of the tokens `[batch, new]` at positions from `start` on, and the cache.

    The cache holds keys and values of all positions before; those of the new ones are added.
    """
    new, length = tokens.shape[1], cache["keys"].shape[2]
    places = start + jnp.arange(new)
    mask = (jnp.arange(length) <= places[:, None])[None, None]
    angles = _angles(architecture, places)
    stream = _embed(compute, params, tokens)

    def body(stream: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        block, *past = xs
        return _block(
            architecture, compute, block, stream, angles, mask, past=(past[0], past[1], start)
        )

    xs = (_stacked(params), cache["keys"], cache["values"])
    stream, (keys, values) = jax.lax.scan(body, stream, xs)
    stream = _norm(architecture, stream, params["final_norm"])
    return _logits(architecture, compute, params, stream), {"keys": keys, "values": values}


def _stacked(params: Params) -> Params:
    ends = (_LOW, _HIGH)
    return {
        name: values for name, values in params.items() if name in STACKED or name.endswith(ends)
    }


def _embed(compute: Compute, params: Params, tokens: jax.Array) -> jax.Array:
    stream = params["embedding"][tokens.astype(jnp.int32)].astype(compute.dtype)
    return constrain(stream, "rows", "length", "stream")


def _stream(
    architecture: Architecture,
    params: Params,
    tokens: jax.Array,
    segments: jax.Array | None,
    key: jax.Array | None,
    compute: Compute,
) -> jax.Array:
    """What the last norm gives, `[batch, length, width]`.

    Rotary angles count distances alone, so that the positions of a packed document need not start
    at zero.
    """
    unrolled = architecture.layers <= _UNROLLED
    # XLA would compute the angles of blocks that are written out anew wherever they are used, for
    # each number of each head; as constants it does not. A loop over blocks has them from outside.
    angles = _angles(architecture, (np if unrolled else jnp).arange(tokens.shape[1]))
    places = jnp.arange(tokens.shape[1])
    mask = (places <= places[:, None])[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    stream = _embed(compute, params, tokens)

    def body(stream: jax.Array, xs: Any) -> tuple[jax.Array, None]:
        block, index = xs
        keys = None if key is None else jax.random.split(jax.random.fold_in(key, index))
        stream, _ = _block(architecture, compute, block, stream, angles, mask, keys=keys)
        return stream, None

    step: Callable[..., Any] = body
    if compute.remat:
        step = jax.checkpoint(body, prevent_cse=unrolled)
    blocks = _stacked(params)
    if unrolled:
        for index in range(architecture.layers):
            stream, _ = step(stream, ({name: one[index] for name, one in blocks.items()}, index))
    else:
        stream, _ = jax.lax.scan(step, stream, (blocks, jnp.arange(architecture.layers)))
    return _norm(architecture, stream, params["final_norm"])


def _block(
    architecture: Architecture,
    compute: Compute,
    block: Params,
    stream: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    *,
    keys: Any = None,
    past: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One block, and the keys and values of all positions; `past` are a cache and where to add."""
    project = functools.partial(_project, compute, block)
    normed = _norm(architecture, stream, block["attention_norm"])
    queries, near, values = _heads(architecture, project, block, normed, angles)
    if past is not None:
        near = jax.lax.dynamic_update_slice_in_dim(past[0], near, past[2], axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(past[1], values, past[2], axis=1)
    mixed = _attend(queries, near, values, mask)
    stream = stream + _drop(architecture, project("attention_out", mixed), keys, 0)
    stream = constrain(stream, "rows", "length", "stream")
    normed = _norm(architecture, stream, block["feed_norm"])
    inner = jax.nn.silu(project("gate", normed)) * project("up", normed)
    inner = constrain(inner, "rows", "length", "active_hidden")
    stream = stream + _drop(architecture, project("down", inner), keys, 1)
    return constrain(stream, "rows", "length", "stream"), (near, values)


def _project(compute: Compute, block: Params, name: str, values: jax.Array) -> jax.Array:
    out = values @ block[name].astype(compute.dtype)
    if name + _LOW in block:
        low = values @ block[name + _LOW].astype(compute.dtype)
        out = out + compute.low_rank_scale * (low @ block[name + _HIGH].astype(compute.dtype))
    return out


def _norm(architecture: Architecture, values: jax.Array, scale: jax.Array) -> jax.Array:
    wide = values.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + architecture.norm_epsilon) * scale
    return normed.astype(values.dtype)


def _angles(architecture: Architecture, places: Any) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[length, 1, head_size / 2]` of the positions.

    Constants of the program where the places are numpy.
    """
    tools: Any = np if isinstance(places, np.ndarray) else jnp
    angles = places.astype(np.float32)[:, None] * tools.asarray(
        architecture.rope_rates(), np.float32
    )
    return jnp.asarray(tools.cos(angles)[:, None]), jnp.asarray(tools.sin(angles)[:, None])


def _rotate(values: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = angles
    first, second = jnp.split(values.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(values.dtype)


def _heads(
    architecture: Architecture,
    project: Callable[[str, jax.Array], jax.Array],
    block: Params,
    normed: jax.Array,
    angles: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[batch, length, heads, head_size]`, and keys and values of the heads they share."""

    def heads(name: str) -> jax.Array:
        flat = project(name, normed)
        if name + "_bias" in block:
            flat = flat + block[name + "_bias"].astype(flat.dtype)
        split = flat.reshape(*flat.shape[:2], -1, architecture.head_size)
        if name + "_norm" in block:
            split = _norm(architecture, split, block[name + "_norm"])
        return constrain(split, "rows", "length", "active_heads", None)

    return _rotate(heads("query"), angles), _rotate(heads("key"), angles), heads("value")


def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mixed values `[batch, length, heads * head_size]`; the softmax is taken in float32.

    `mask` `[batch or 1, 1, length, positions]` is true where a query may look.
    """
    batch, length, heads, size = queries.shape
    groups = keys.shape[2]
    # As plain products of matrices: the queries of the heads that share keys are rows of one.
    rows = jnp.swapaxes(queries, 1, 2).reshape(batch, groups, heads // groups * length, size)
    scores = jnp.matmul(
        rows, jnp.transpose(keys, (0, 2, 3, 1)), preferred_element_type=jnp.float32
    ).reshape(batch, groups, heads // groups, length, -1)
    seen = jnp.where(mask[:, :, None], scores * size**-0.5, -jnp.inf)
    shares = jax.nn.softmax(seen, axis=-1).astype(values.dtype)
    mixed = jnp.matmul(shares.reshape(*rows.shape[:3], -1), jnp.swapaxes(values, 1, 2))
    mixed = jnp.swapaxes(mixed.reshape(batch, heads, length, size), 1, 2)
    return mixed.reshape(batch, length, heads * size)


def _logits(
    architecture: Architecture, compute: Compute, params: Params, stream: jax.Array
) -> jax.Array:
    matrix = params["embedding"].T if architecture.tied else params["head"]
    logits = jnp.matmul(stream, matrix.astype(compute.dtype), preferred_element_type=jnp.float32)
    return constrain(logits, "rows", "length", "active_vocabulary")


def _summed_loss(
    architecture: Architecture,
    compute: Compute,
    params: Params,
    stream: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
) -> jax.Array:
    logits = _logits(architecture, compute, params, stream)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    each = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(each if weights is None else each * weights)


def _pieces(architecture: Architecture, targets: jax.Array) -> int:
    """In how many pieces of equal length the logits are computed."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else mesh.size
    wanted = -(-targets.size * architecture.vocabulary // (devices * _LOGITS_MAX))
    length = targets.shape[1]
    return next(count for count in range(min(wanted, length), length + 1) if length % count == 0)


def _drop(architecture: Architecture, values: jax.Array, keys: Any, which: int) -> jax.Array:
    if keys is None or architecture.dropout == 0.0:
        return values
    share = 1.0 - architecture.dropout
    kept = jax.random.bernoulli(keys[which], share, values.shape)
    return jnp.where(kept, values / share, jnp.zeros((), values.dtype))
