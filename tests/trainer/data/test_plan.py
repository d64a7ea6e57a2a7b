"""Which token stands in which row: nothing is lost, nothing doubled, nothing mixed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.data.plan import (
    Plan,
    cut_documents,
    cut_stream,
    one_each,
    pack,
    that_count,
)

DOCUMENTS = st.lists(st.integers(0, 40), max_size=30)
LENGTHS = st.integers(1, 16)


def ends_of(sizes: list[int]) -> NDArray[np.int64]:
    return np.cumsum(np.asarray(sizes, np.int64))


def targets_of(plan: Plan) -> list[int]:
    """Every token that some piece predicts."""
    return [
        token
        for start, length in zip(plan.pieces.start, plan.pieces.length, strict=True)
        for token in range(int(start) + 1, int(start + length))
    ]


@settings(deadline=None)
@given(sizes=DOCUMENTS, length=LENGTHS, packed=st.booleans())
def test_every_token_with_one_before_it_is_predicted_once_an_epoch(
    sizes: list[int], length: int, packed: bool
) -> None:
    """Packers that drop what does not fit train on less than the user gave, and say nothing."""
    ends = ends_of(sizes)
    pieces = cut_documents(ends, length)
    plan = pack(pieces, length + 1) if packed else one_each(pieces)
    firsts = {int(end - size) for end, size in zip(ends, sizes, strict=True)}
    wanted = [token for token in range(sum(sizes)) if token not in firsts]
    assert sorted(targets_of(plan)) == wanted


@settings(deadline=None)
@given(sizes=DOCUMENTS, length=LENGTHS)
def test_a_piece_lies_in_one_document_and_a_row_holds_no_more_than_its_room(
    sizes: list[int], length: int
) -> None:
    """A token that sees the document before it learns what is not there."""
    ends = ends_of(sizes)
    plan = pack(cut_documents(ends, length), length + 1)
    of_token = np.repeat(np.arange(len(sizes)), sizes)
    for start, size in zip(plan.pieces.start, plan.pieces.length, strict=True):
        assert size >= 2
        assert len(set(of_token[start : start + size].tolist())) == 1
    for row in range(len(plan)):
        pieces = plan.pieces.length[plan.first[row] : plan.first[row + 1]]
        assert len(pieces) >= 1
        assert pieces.sum() <= length + 1


@settings(deadline=None)
@given(sizes=DOCUMENTS, length=LENGTHS)
def test_no_two_rows_would_fit_into_one(sizes: list[int], length: int) -> None:
    """Room that is left over is paid for in every epoch."""
    plan = pack(cut_documents(ends_of(sizes), length), length + 1)
    used = sorted(
        int(plan.pieces.length[plan.first[row] : plan.first[row + 1]].sum())
        for row in range(len(plan))
    )
    assert len(used) < 2 or used[0] + used[1] > length + 1


@settings(deadline=None)
@given(tokens=st.integers(0, 200), length=LENGTHS)
def test_a_stream_leaves_out_less_than_a_row(tokens: int, length: int) -> None:
    """Every rank must have whole rows; the rest of the last one is all that this may cost."""
    plan = one_each(cut_stream(tokens, length))
    found = targets_of(plan)
    assert found == list(range(1, len(found) + 1))
    assert 0 <= max(0, tokens - 1) - len(found) < length


@settings(deadline=None)
@given(sizes=DOCUMENTS, length=LENGTHS, seed=st.integers(0, 2**32 - 1), share=st.floats(0.0, 1.0))
def test_pieces_without_a_target_that_counts_are_left_out_and_no_others(
    sizes: list[int], length: int, seed: int, share: float
) -> None:
    """A row of weight zero costs a step's time and teaches nothing; one lost is a lost lesson."""
    counts = (np.random.default_rng(seed).random(sum(sizes)) < share).astype(np.uint8)
    pieces = cut_documents(ends_of(sizes), length)
    kept = that_count(pieces, counts)
    wanted = [
        (start, size)
        for start, size in zip(pieces.start.tolist(), pieces.length.tolist(), strict=True)
        if counts[start + 1 : start + size].any()
    ]
    assert list(zip(kept.start.tolist(), kept.length.tolist(), strict=True)) == wanted


def test_neighbours_of_equal_length_are_not_put_together() -> None:
    """Records that follow each other in a file are often alike; a step should see many kinds."""
    plan = pack(cut_documents(ends_of([8] * 1000), 16), 17)
    first, second = plan.pieces.start[::2], plan.pieces.start[1::2]
    assert len(plan) == 500
    assert np.mean(second - first == 8) < 0.02
