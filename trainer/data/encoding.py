"""From texts to tokens, many at once; a text too long for that is cut where it makes no difference.

Knows neither files nor formats.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.data.tokenizer import Passage, Placed, Tokenizer

_CHARACTERS_AT_ONCE = 1 << 21
_PASSAGES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of a document, in order; `ends` with the last of them.

    `counts` says of each token whether it counts as a target; None: all do.
    """

    tokens: Sequence[int]
    counts: Sequence[bool] | None = None
    held_out: bool = False
    ends: bool = True


ALIVE = Part(tokens=(), ends=False)
"""Nothing, but whoever waits sees that it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a long text, with what stands on either side of it.

    The first block of a document has nothing before it, the last nothing after it.
    """

    before: str
    text: str
    after: str
    held_out: bool
    first: bool
    last: bool


def encode_passages(passages: Iterable[Passage | None], tokenizer: Tokenizer) -> Iterator[Part]:
    """Each passage is a document; the same order. For None there is `ALIVE`."""
    group: list[Passage] = []
    size = 0
    for passage in passages:
        if passage is None:
            yield ALIVE
            continue
        group.append(passage)
        size += len(passage.text)
        if size >= _CHARACTERS_AT_ONCE or len(group) >= _PASSAGES_AT_ONCE:
            yield from _documents(group, tokenizer)
            group, size = [], 0
    yield from _documents(group, tokenizer)


def encode_blocks(blocks: Iterable[Block], tokenizer: Tokenizer) -> Iterator[Part]:
    """The tokens are those of each document as a whole.

    Two neighbours are encoded apart, each with a margin of the other. Where they agree on all
    tokens around the border, the one is cut from the other there; where they do not, they are
    encoded as one.
    """
    if not tokenizer.reach:
        for block in blocks:
            passage = Passage(text=block.text, opens=block.first, closes=block.last)
            ((tokens, _),) = tokenizer.encode_many([passage])
            yield Part(tokens=tokens, held_out=block.held_out, ends=block.last)
        return
    held: _Stretch | None = None
    for found in _stretches(blocks, tokenizer):
        if held is None:
            held = found
        elif not held.waiting and held.agrees_with(found):
            yield held.part(tokenizer)
            held = found
        else:
            held = held.joined(found, tokenizer)
        if held.block.last:
            yield held.part(tokenizer)
            held = None


def _documents(group: Sequence[Passage], tokenizer: Tokenizer) -> Iterator[Part]:
    for tokens, counts in tokenizer.encode_many(group) if group else ():
        yield Part(tokens=tokens, counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A block and its tokens; `waiting` are blocks after it that it will be encoded with."""

    block: Block
    placed: Placed
    waiting: tuple[Block, ...] = ()

    def part(self, tokenizer: Tokenizer) -> Part:
        """The tokens of the block without its margins."""
        start = len(self.block.before)
        first = bisect_left(self.placed.starts, start) if start else 0
        last = len(self.placed.ids)
        if self.block.after:
            last = bisect_left(self.placed.starts, start + len(self.block.text))
        tokens = list(self.placed.ids[first:last])
        if self.block.first:
            tokens = [*tokenizer.opening, *tokens]
        if self.block.last:
            tokens = [*tokens, *tokenizer.closing]
        return Part(tokens=tokens, held_out=self.block.held_out, ends=self.block.last)

    def agrees_with(self, other: _Stretch) -> bool:
        """Whether both have the same tokens at the same places in the middle of their overlap."""
        half = min(len(self.block.after), len(other.block.before)) // 2
        here = self._around(len(self.block.before) + len(self.block.text), half)
        return bool(here) and here == other._around(len(other.block.before), half)

    def joined(self, other: _Stretch, tokenizer: Tokenizer) -> _Stretch:
        """Both as one, encoded when it has grown to twice its size, or ends."""
        waiting = (*self.waiting, other.block)
        added = "".join(block.text for block in waiting)
        last = waiting[-1]
        if len(added) < len(self.block.text) and not last.last:
            return replace(self, waiting=waiting)
        block = replace(self.block, text=self.block.text + added, after=last.after, last=last.last)
        (placed,) = tokenizer.encode_placed([block.before + block.text + block.after])
        return _Stretch(block=block, placed=placed)

    def _around(self, place: int, half: int) -> list[tuple[int, int, int]]:
        placed = self.placed
        first = bisect_left(placed.starts, place - half)
        last = bisect_left(placed.starts, place + half)
        return [
            (placed.ids[index], placed.starts[index] - place, placed.ends[index] - place)
            for index in range(first, last)
        ]


def _stretches(blocks: Iterable[Block], tokenizer: Tokenizer) -> Iterator[_Stretch]:
    group: list[Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += len(block.text)
        if size >= _CHARACTERS_AT_ONCE:
            yield from _encoded(group, tokenizer)
            group, size = [], 0
    yield from _encoded(group, tokenizer)


def _encoded(group: Sequence[Block], tokenizer: Tokenizer) -> Iterator[_Stretch]:
    texts = [block.before + block.text + block.after for block in group]
    for block, placed in zip(group, tokenizer.encode_placed(texts) if texts else (), strict=True):
        yield _Stretch(block=block, placed=placed)
