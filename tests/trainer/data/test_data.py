"""Batches are a function of seed and step, and held-out text stays held out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from trainer.config import DataSettings
from trainer.data.windows import Text, held_out_rows, read_text, train_rows, unigram_entropy
from trainer.settings import SettingsError

GOLDEN = [80, 130, 120, 192]


def text_of(size: int, *, held_out: int = 50) -> Text:
    values = np.arange(size) % 251
    return Text(
        train=values.astype(np.uint8),
        held_out=values[:held_out].astype(np.uint8),
        files=1,
        digest="",
    )


def settings(path: Path, **more: object) -> DataSettings:
    return DataSettings.model_validate({"path": [str(path)], "sequence_length": 8, **more})


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    """Data that repeats or is skipped after a resume changes the result (ray#37633)."""
    text = text_of(5000)
    first = train_rows(text, seed=3, step=17, count=8, length=10)
    assert first.shape == (8, 11)
    assert np.array_equal(first, train_rows(text, seed=3, step=17, count=8, length=10))
    assert not np.array_equal(first, train_rows(text, seed=3, step=18, count=8, length=10))
    assert not np.array_equal(first, train_rows(text, seed=4, step=17, count=8, length=10))


def test_the_draws_are_the_same_for_ever() -> None:
    """A library that changes its stream would silently change every resumed run."""
    rows = train_rows(text_of(5000), seed=0, step=0, count=4, length=1)
    assert rows[:, 0].tolist() == GOLDEN


def test_rows_are_consecutive_bytes_of_the_text() -> None:
    """The target of a byte is the byte that follows it."""
    rows = train_rows(text_of(5000), seed=0, step=5, count=64, length=20).astype(int)
    assert set(np.unique(np.diff(rows, axis=1) % 251)) == {1}


def test_held_out_batches_cover_the_text_evenly_and_stay_inside() -> None:
    """An evaluation that moves around cannot be compared with the one before."""
    text = text_of(5000, held_out=100)
    rows = [held_out_rows(text, index=i, batches=4, count=3, length=9) for i in range(4)]
    starts = np.concatenate(rows)[:, 0]
    assert starts[0] == 0
    assert list(starts) == sorted(starts)
    assert len(set(starts.tolist())) == 12


def test_the_tail_of_each_file_is_held_out(tmp_path: Path) -> None:
    """A held-out loss on text that was trained on says nothing."""
    (tmp_path / "a.txt").write_bytes(b"a" * 900 + b"A" * 100)
    (tmp_path / "b.txt").write_bytes(b"b" * 450 + b"B" * 50)
    (tmp_path / "ignored.bin").write_bytes(b"x" * 500)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.txt").write_bytes(b"c" * 500)
    text = read_text(settings(tmp_path, held_out_fraction=0.1), "/")
    assert text.train.tobytes() == b"a" * 900 + b"b" * 450
    assert text.held_out.tobytes() == b"A" * 100 + b"B" * 50
    assert text.files == 2


def test_text_beyond_the_limit_is_refused_not_left_out(tmp_path: Path) -> None:
    """Whoever names a text means all of it, and a large folder must not delay the start."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 1000)
    with pytest.raises(SettingsError, match=r"3000 bytes .* bytes_max = 1500; .* bytes_max = 3000"):
        read_text(settings(tmp_path, bytes_max=1500), "/")
    text = read_text(settings(tmp_path, bytes_max=3000), "/")
    assert len(text.train) + len(text.held_out) == 3000


def test_of_the_standard_library_so_much_is_read() -> None:
    """It stands in for data, and is longer than a demo."""
    text = read_text(DataSettings(bytes_max=5000, sequence_length=8), "/")
    assert len(text.train) + len(text.held_out) == 5000


def test_relative_paths_start_at_the_settings_file(tmp_path: Path) -> None:
    """The same file of settings must work from any working directory."""
    (tmp_path / "text.txt").write_bytes(b"abcdefgh" * 100)
    text = read_text(DataSettings(path=("text.txt",), sequence_length=8), str(tmp_path))
    assert text.files == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [("gone", None, "does not exist"), ("small.txt", b"x" * 100, "too few")],
)
def test_text_that_cannot_be_used_is_named_with_a_remedy(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    """No retry can change it, so the message must."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=complaint):
        read_text(settings(tmp_path / name), "/")


def test_a_folder_without_text_says_which_suffixes_count(tmp_path: Path) -> None:
    """An empty text is a mistake, not a short one."""
    with pytest.raises(SettingsError, match=r"\.md"):
        read_text(settings(tmp_path), "/")


def test_the_default_text_is_there_on_every_machine() -> None:
    """The first run needs no download, and reads in a moment."""
    text = read_text(DataSettings(), "/")
    assert len(text.train) > 3_000_000
    assert len(text.held_out) > 150_000
    assert 3.0 < unigram_entropy(text) < 3.6


def test_the_entropy_of_a_uniform_text_is_the_logarithm_of_its_alphabet() -> None:
    """The display compares losses with this number."""
    even = np.tile(np.arange(16, dtype=np.uint8), 50)
    text = Text(train=even, held_out=even, files=1, digest="")
    assert unigram_entropy(text) == pytest.approx(math.log(16))
