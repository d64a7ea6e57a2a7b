"""What a decoder of the Llama family looks like: its sizes and options, and what they imply.

Plain numbers, no arrays: jax is not imported, and the supervisor may read this too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config import MATRICES, ModelSettings

BYTES = 256
"""The vocabulary of a model that reads bytes."""

STACKED = frozenset(
    {
        *MATRICES,
        *("attention_norm", "feed_norm", "query_norm", "key_norm"),
        *("query_bias", "key_bias", "value_bias"),
    }
)
"""Parameters of the blocks: their first axis is the block."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary angles reach beyond the lengths of the first training.

    "linear" divides every rate by `factor` (Chen et al., 2023). "llama3" divides the slow ones,
    leaves the fast ones and goes from one to the other in between (Llama 3.1): fast and slow are
    told by how often a rate turns in the `original` length.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU; Llama, Qwen2, Qwen3 by options.

    `hidden` is the inner size of the SwiGLU block, `context` the longest sequence that the model
    was made for (0 = not known).
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_size: int
    hidden: int
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    tied: bool = False
    attention_bias: bool = False
    query_key_norm: bool = False
    dropout: float = 0.0
    context: int = 0

    @property
    def shapes(self) -> Shapes:
        """The shape of every parameter, by name; matrices are `[in, out]`."""
        blocks, width, head = self.layers, self.width, self.head_size
        queries, shared = self.heads * head, self.key_value_heads * head
        found: Shapes = {
            "embedding": (self.vocabulary, width),
            "attention_norm": (blocks, width),
            "query": (blocks, width, queries),
            "key": (blocks, width, shared),
            "value": (blocks, width, shared),
            "attention_out": (blocks, queries, width),
            "feed_norm": (blocks, width),
            "gate": (blocks, width, self.hidden),
            "up": (blocks, width, self.hidden),
            "down": (blocks, self.hidden, width),
            "final_norm": (width,),
        }
        if self.attention_bias:
            found["query_bias"] = (blocks, queries)
            found["key_bias"] = found["value_bias"] = (blocks, shared)
        if self.query_key_norm:
            found["query_norm"] = found["key_norm"] = (blocks, head)
        if not self.tied:
            found["head"] = (width, self.vocabulary)
        return found

    @property
    def parameters(self) -> int:
        """How many numbers that is."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def rope_rates(self) -> list[float]:
        """Radians a position for each of the `head_size / 2` pairs that are turned."""
        half = self.head_size // 2
        rates = [self.rope_base ** (-index / half) for index in range(half)]
        scaling = self.rope_scaling
        if scaling is None:
            return rates
        return [_scaled(rate, scaling) for rate in rates]


def of_settings(settings: ModelSettings) -> Architecture:
    """The model over bytes that `[trainer.model]` describes."""
    return Architecture(
        vocabulary=BYTES,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        key_value_heads=settings.key_value_heads,
        head_size=settings.width // settings.heads,
        hidden=settings.hidden,
        rope_base=settings.rope_base,
        dropout=settings.dropout,
    )


def _scaled(rate: float, scaling: RopeScaling) -> float:
    if scaling.kind == "linear":
        return rate / scaling.factor
    turns = scaling.original * rate / (2 * math.pi)
    if turns > scaling.high:
        return rate
    if turns < scaling.low:
        return rate / scaling.factor
    share = (turns - scaling.low) / (scaling.high - scaling.low)
    return rate * (share + (1 - share) / scaling.factor)
