"""Text from a language model, token by token, with a cache of keys and values.

A sanity check before and after training, on one device; no server.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.compute.step import seed_key
from trainer.language import model
from trainer.language.architecture import Architecture
from trainer.settings import SettingsError

_ROUND = 64  # tokens; prompts of similar length share a program


def generate(
    architecture: Architecture,
    params: Mapping[str, Any],
    prompt: Sequence[int],
    *,
    count: int,
    temperature: float = 0.0,
    seed: int = 0,
    ends: Collection[int] = (),
    compute: model.Compute = model.PLAIN,
) -> Iterator[int]:
    """At most `count` ids that follow a prompt; stops before any of `ends`.

    Temperature 0 takes the likeliest each time. The same arguments give the same ids. Raises
    `SettingsError` for a prompt that is empty, or too long for the model.
    """
    if not prompt:
        raise SettingsError("--prompt is empty: give the model something to go on from")
    if architecture.context and len(prompt) + count > architecture.context:
        raise SettingsError(
            f"--prompt: its {len(prompt)} tokens and {count} new ones are more than the "
            f"{architecture.context} that the model was made for; shorten it, or lower --tokens"
        )
    padded = -(-len(prompt) // _ROUND) * _ROUND
    cache = model.empty_cache(architecture, 1, padded + count, compute)
    step = _program(architecture, compute, temperature)
    on_device = {name: jnp.asarray(values) for name, values in params.items()}
    tokens = jnp.zeros((1, padded), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt))
    key = seed_key(seed)
    start, last = 0, len(prompt) - 1
    for number in range(count):
        # What lies behind the prompt in the cache is overwritten before anything looks at it.
        chosen, cache = step(
            on_device, tokens, start, last, jax.random.fold_in(key, number), cache=cache
        )
        token = int(chosen)
        if token in ends:
            return
        yield token
        tokens, start, last = jnp.full((1, 1), token, jnp.int32), len(prompt) + number, 0


@functools.lru_cache(maxsize=4)
def _program(architecture: Architecture, compute: model.Compute, temperature: float) -> Any:
    step = functools.partial(_step, architecture, compute, temperature)
    return jax.jit(step, donate_argnames=("cache",))


def _step(
    architecture: Architecture,
    compute: model.Compute,
    temperature: float,
    params: model.Params,
    tokens: jax.Array,
    start: jax.Array,
    last: jax.Array,
    key: jax.Array,
    *,
    cache: model.Params,
) -> tuple[jax.Array, model.Params]:
    logits, cache = model.forward_cached(architecture, params, tokens, start, cache, compute)
    row = logits[0, last]
    if temperature == 0.0:
        return jnp.argmax(row), cache
    return jax.random.categorical(key, row / temperature), cache
