"""Ranks that do not have the same data, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.trainer.harness import World, free_port, write_text
from trainer.settings import SettingsError
from trainer.training.agreement import compare


class Board:
    """What ranks wrote, in memory."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

    def write(self, rank: int, text: str) -> None:
        self.texts[rank] = text

    def read(self) -> Mapping[int, str]:
        return self.texts


def test_ranks_with_the_same_digests_agree_whatever_else_differs() -> None:
    """A path or a float may differ between nodes; the data may not."""
    board = Board()
    compare({"data_sha256": "a", "entropy": 1.0}, board, 0)
    compare({"data_sha256": "a", "entropy": 1.1}, board, 1)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"data_sha256": "b"}, "data_sha256 is b here and a there"),
        ({}, "data_sha256 is none here and a there"),
    ],
)
def test_a_rank_with_other_data_says_so(ours: dict[str, str], said: str) -> None:
    """Training on two versions of a data set looks like training on one."""
    board = Board()
    compare({"data_sha256": "a"}, board, 0)
    with pytest.raises(SettingsError, match=rf"rank 3 has other data than rank 0 \({said}\)"):
        compare(ours, board, 3)


def test_a_rank_waits_for_the_first_and_shows_that_it_goes_on() -> None:
    """Another node may still tokenise."""
    board, ticks = Board(), []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            compare({"data_sha256": "a"}, board, 0)

    compare({"data_sha256": "a"}, board, 1, tick)
    assert len(ticks) == 3


def test_two_nodes_with_different_files_never_take_a_step(world: World) -> None:
    """Copies on local disks, of which one was not brought up to date."""
    other = world.config_dir / "other"
    other.mkdir()
    write_text(other)
    (other / "text.txt").write_text((other / "text.txt").read_text().replace("square", "cube"))
    port = free_port()
    (first,) = world.launch(only=(0,), port=port)
    (second,) = world.launch(only=(1,), port=port, config_dir=str(other))
    raised = second.until("raised")
    assert raised["phase"] == "initialize"
    assert raised["error"]["user"]
    assert "rank 1 has other data than rank 0 (text_sha256 is" in raised["error"]["message"]
    assert "stepped" not in first.kinds()


def test_a_rank_with_other_code_says_so() -> None:
    """An installed package of two versions computes two things, or hangs."""
    board = Board()
    compare({"code_sha256": "a"}, board, 0)
    with pytest.raises(SettingsError, match="rank 1 has other code than rank 0"):
        compare({"code_sha256": "b"}, board, 1)
