"""Ranks that do not do the same: found without a collective, and named."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import pytest

from trainer.task import TaskError
from trainer.training.consistency import Account, Ledger, Mark, complaint


class Shared:
    """What the coordination service is to real ranks."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def write(self, rank: int, text: str) -> None:
        self._texts[rank] = text

    def read(self) -> Mapping[int, str]:
        return dict(self._texts)


def mark(*names: str, digest: str = "same") -> Mark:
    return Mark(names=names, digest=digest)


def test_an_account_survives_the_way_to_the_others() -> None:
    """Keys of JSON are text, those of marks are numbers."""
    account = Account(rank=1, begun=4, ended=4, marks={3: mark("loss"), 63: mark()})
    assert Account.from_json(account.to_json()) == account


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([Account(rank=1, begun=9)], ""),
        ([Account(rank=1, begun=9, ended=9)], ""),
        ([Account(rank=1, begun=8)], ""),
        ([Account(rank=1, begun=10)], "rank 0 ended after 9 steps, but rank 1 has begun 10"),
        ([Account(rank=1, begun=8, ended=8)], "rank 0 ended after 9 .* rank 1 ended after 8"),
        (
            [Account(rank=2, begun=12), Account(rank=1, begun=10)],
            "rank 1 has begun 10, rank 2 has begun 12",
        ),
        ([Account(rank=1, begun=9, marks={1: mark("loss", digest="x")})], "step up to 1 "),
        ([Account(rank=1, begun=9, marks={1: mark("accuracy", "loss")})], "rank 1 accuracy, loss"),
        ([Account(rank=1, begun=9, marks={2: mark()})], ""),
    ],
)
def test_what_is_uneven_is_told_with_its_ranks(others: list[Account], words: str) -> None:
    """ "Some rank differs" sends a user through a thousand logs."""
    found = complaint([*others, Account(rank=0, begun=9, ended=9, marks={1: mark("loss")})])
    if not words:
        assert found == ""
        return
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


def run(ledger: Ledger, steps: int, names: Sequence[str]) -> None:
    for index in range(steps):
        ledger.begin(index)
        ledger.end(index, names)


def test_ranks_that_do_the_same_end_together_without_a_word() -> None:
    """The first to end waits for the last, and says meanwhile that it lives."""
    board = Shared()
    slow, fast = (Ledger(board, rank, 2, every_s=0.01, grace_s=0.1) for rank in range(2))
    run(fast, 5, ["loss"])
    ticks: list[float] = []
    waiting = threading.Thread(target=fast.finish, args=(5, lambda: ticks.append(time.monotonic())))
    waiting.start()
    while len(ticks) < 3:
        time.sleep(0.01)
    run(slow, 5, ["loss"])
    slow.finish(5, lambda: None)
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_rank_that_ends_early_says_so_while_the_others_hang() -> None:
    """They wait in a collective for a rank that will never come, and can say nothing."""
    board = Shared()
    hanging, early = (Ledger(board, rank, 2, every_s=0.01, grace_s=0.1) for rank in range(2))
    run(hanging, 4, ["loss"])
    run(early, 4, ["loss"])
    hanging.begin(4)
    with pytest.raises(TaskError, match="rank 1 ended after 4 steps, but rank 0 has begun 5"):
        early.finish(4, lambda: None)


def test_a_rank_that_leaves_a_step_at_once_has_not_done_it() -> None:
    """All ranks end early, at the top of a step that some have told of already."""
    board = Shared()
    slow, fast = (Ledger(board, rank, 2, every_s=0.01, grace_s=5.0) for rank in range(2))
    for ledger in (slow, fast):
        run(ledger, 3, ["loss"])
        ledger.begin(3)
    time.sleep(0.1)  # both are known to have begun a fourth
    ends = threading.Thread(target=fast.finish, args=(3, lambda: None))
    ends.start()
    time.sleep(0.1)
    slow.finish(3, lambda: None)
    ends.join(5)
    assert not ends.is_alive()


def test_rank_0_hears_of_other_metrics_while_it_trains() -> None:
    """Long before the end, and without waiting for anybody."""
    board = Shared()
    leader, other = (Ledger(board, rank, 2, every_s=0.01, grace_s=0.1) for rank in range(2))
    run(other, 4, ["loss", "accuracy"])

    def train() -> None:
        for index in range(2000):
            run(leader, 1, ["loss"]) if index == 0 else leader.end(index, ["loss"])
            time.sleep(0.005)

    with pytest.raises(TaskError, match="rank 0 reported loss, rank 1 accuracy, loss"):
        train()
