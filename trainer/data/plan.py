"""Which tokens stand in which row; numbers only, the same on every rank and in every world.

A *piece* is a run of tokens of one document that stands in one row: all of it, or, of a document
that is too long, the next part, which repeats one token as the first to predict from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Where each piece starts in the tokens, and its length in tokens, 2 at least."""

    start: Integers
    length: Integers

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Row `r` holds the pieces from `first[r]` to before `first[r + 1]`, from left to right."""

    pieces: Pieces
    first: Integers

    def __len__(self) -> int:
        return len(self.first) - 1


def cut_documents(ends: Integers, length: int) -> Pieces:
    """Cut documents into pieces of `length` targets at most; each target is in exactly one.

    `ends` int64 `[documents]`. The first token of a document has nothing before it and is never a
    target; a document of one token has none.
    """
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    targets = np.maximum(ends - starts - 1, 0)
    counts = -(-targets // length)
    document = np.repeat(np.arange(len(ends)), counts)
    before = np.cumsum(counts) - counts
    index = np.arange(len(document)) - before[document]
    left = targets[document] - index * length
    return Pieces(start=starts[document] + index * length, length=np.minimum(left, length) + 1)


def cut_stream(tokens: int, length: int) -> Pieces:
    """Cut all tokens, whatever document they belong to; an incomplete last piece is left out."""
    count = max(0, tokens - 1) // length
    return Pieces(
        start=np.arange(count, dtype=np.int64) * length,
        length=np.full(count, length + 1, np.int64),
    )


def that_count(pieces: Pieces, counts: NDArray[np.uint8]) -> Pieces:
    """The pieces with a target that counts; `counts` uint8 `[tokens]`. The others teach nothing."""
    if not len(pieces):
        return pieces
    edges = np.stack([pieces.start + 1, pieces.start + pieces.length], axis=1).ravel()
    inside = edges[:-1] if edges[-1] == len(counts) else edges  # the last sum runs to the end
    sums = np.add.reduceat(counts, inside, dtype=np.int64)[::2]
    kept = sums > 0
    return Pieces(start=pieces.start[kept], length=pieces.length[kept])


def one_each(pieces: Pieces) -> Plan:
    """Every piece in a row of its own."""
    return Plan(pieces=pieces, first=np.arange(len(pieces) + 1, dtype=np.int64))


def pack(pieces: Pieces, room: int) -> Plan:
    """Several pieces a row of `room` tokens: the longest first, each where it fits most tightly.

    Best-fit decreasing (Johnson, 1973); within a row in the order of the documents.
    """
    row_of = np.empty(len(pieces), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]  # by the room that is left
    fits = 0  # bit r is set where there is a row with room r left
    rows = 0
    # Of equal ones any: neighbours in a file are alike, and better met in different steps.
    lots = np.random.Philox(key=0).random_raw(len(pieces))
    order = np.lexsort((lots, -pieces.length))
    for piece, needed in zip(order.tolist(), pieces.length[order].tolist(), strict=True):
        candidates = fits >> needed
        if candidates:
            left = needed + (candidates & -candidates).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                fits &= ~(1 << left)
        else:
            left, row = room, rows
            rows += 1
        left -= needed
        if left >= 2:  # the shortest piece
            open_rows[left].append(row)
            fits |= 1 << left
        row_of[piece] = row
    by_row = np.argsort(row_of, kind="stable")
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of, minlength=rows))])
    return Plan(
        pieces=Pieces(start=pieces.start[by_row], length=pieces.length[by_row]), first=first
    )
