"""A checkpoint is what was saved, or it is refused by name."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trainer.compute.pieces import Piece
from trainer.state import checkpoint
from trainer.state.checkpoint import CheckpointRejected, Committed, SaveFailed, Saver
from trainer.task import TaskError


def state() -> dict[str, Any]:
    return {
        "params": {"w": np.arange(2000, dtype=np.float32).reshape(40, 50), "b": np.ones(3)},
        "half": np.arange(6).astype(ml_dtypes.bfloat16),
        "optimizer": [np.int32(7), (np.zeros((), np.uint32),)],
    }


def meta(step: int) -> dict[str, Any]:
    return {"step": step, "next_batch": 4 * step, "loss": 1.5}


class Outcomes:
    """What the saver told, in order."""

    def __init__(self) -> None:
        self.told: list[Committed | SaveFailed] = []
        self.changed = threading.Condition()

    def __call__(self, outcome: Committed | SaveFailed) -> None:
        with self.changed:
            self.told.append(outcome)
            self.changed.notify_all()

    def wait(self, count: int) -> list[Committed | SaveFailed]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.told) >= count, 60)
            return self.told


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    outcomes = Outcomes()
    Saver(tmp_path, 1, outcomes).save(4, state(), meta(4))
    outcome = outcomes.wait(1)[0]
    assert isinstance(outcome, Committed), outcome
    return Path(outcome.path)


def test_a_state_comes_back_bit_for_bit_with_its_types(saved: Path) -> None:
    """Orbax casts silently and loses tuples when it is not told what to expect (orbax#487)."""
    host, found = checkpoint.load(saved, state())
    assert checkpoint.digests(host) == checkpoint.digests(state())
    assert host["half"].dtype == ml_dtypes.bfloat16
    assert isinstance(host["optimizer"][1], tuple)
    assert found["next_batch"] == 16
    assert found["params_digest"] == checkpoint.digests(state())[2]


def test_the_digest_changes_with_name_type_shape_and_value() -> None:
    """Equal digests must mean equal parameters."""
    base = {"a": np.arange(4, dtype=np.float32)}
    others: list[dict[str, Any]] = [
        {"b": base["a"]},
        {"a": base["a"].astype(np.int32)},
        {"a": base["a"].view(np.int32)},
        {"a": base["a"].reshape(2, 2)},
        {"a": base["a"] + 1},
    ]
    seen = {checkpoint.digests(one)[2] for one in [base, *others]}
    assert len(seen) == 6


def test_only_finished_steps_are_listed_newest_first(saved: Path, tmp_path: Path) -> None:
    """An integer for a name does not make a checkpoint (maxtext#5260)."""
    (saved.parent / "8").mkdir()
    (saved.parent / "9.orbax-checkpoint-tmp").mkdir()
    outcomes = Outcomes()
    Saver(tmp_path, 2, outcomes).save(6, state(), meta(6))
    outcomes.wait(1)
    assert [(step, generation) for step, generation, _ in checkpoint.finished(tmp_path)] == [
        (6, 2),
        (4, 1),
    ]


def flip(saved: Path) -> None:
    data = max(saved.glob("state/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(bytes(raw))


def truncate(saved: Path) -> None:
    data = max(saved.glob("state/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])


def unmark(saved: Path) -> None:
    (saved / checkpoint.FINISHED_MARK).unlink()


def lose_the_manifest(saved: Path) -> None:
    (saved / "state" / "manifest.ocdbt").unlink()


def lose_the_meta(saved: Path) -> None:
    (saved / "meta" / "metadata").unlink()


def tear_the_meta(saved: Path) -> None:
    path = saved / "meta" / "metadata"
    path.write_text(path.read_text()[:-20])


def claim_another_digest(saved: Path) -> None:
    path = saved / "meta" / "metadata"
    full = json.loads(path.read_text())
    full["digests"]["params.b"] = "0" * 64
    path.write_text(json.dumps(full))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "digest|cannot be read"),
        (truncate, "cannot be read"),
        (unmark, "not finished"),
        (lose_the_manifest, "cannot be read"),
        (lose_the_meta, "meta item"),
        (tear_the_meta, "meta item"),
        (claim_another_digest, "params.b has another digest"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_its_reason(
    saved: Path, damage: Any, reason: str
) -> None:
    """A bad checkpoint costs the steps since the one before, never the result."""
    damage(saved)
    with pytest.raises(CheckpointRejected, match=reason) as caught:
        checkpoint.load(saved, state())
    assert caught.value.path == str(saved)


def test_arrays_of_another_type_than_the_meta_says_are_refused(tmp_path: Path) -> None:
    """Orbax would cast them without a word."""
    wider = {**state(), "half": state()["half"].astype(np.float32)}
    outcomes = Outcomes()
    Saver(tmp_path, 1, outcomes).save(4, wider, meta(4))
    outcomes.wait(1)
    path = tmp_path / "checkpoints" / "generation-1" / "4"
    file = path / "meta" / "metadata"
    full = json.loads(file.read_text())
    full["leaves"]["half"] = "bfloat16[6]"
    file.write_text(json.dumps(full))
    with pytest.raises(CheckpointRejected, match="half"):
        checkpoint.load(path, state())


def test_a_changed_model_blames_the_change_and_not_the_checkpoint(saved: Path) -> None:
    """Quarantining every good checkpoint because the width was edited would lose the run."""
    other = state()
    other["params"]["w"] = np.zeros((40, 51), np.float32)
    with pytest.raises(
        TaskError, match=r"params\.w is float32\[40,51\] now and was float32\[40,50"
    ):
        checkpoint.load(saved, other)


def test_a_failed_save_is_told_and_the_next_one_works(tmp_path: Path) -> None:
    """An asynchronous save that fails unnoticed costs hours (orbax#605)."""
    outcomes = Outcomes()
    saver = Saver(tmp_path, 1, outcomes)
    blocker = tmp_path / "checkpoints"
    blocker.write_text("in the way")
    saver.save(4, state(), meta(4))
    first = outcomes.wait(1)[0]
    assert isinstance(first, SaveFailed)
    assert first.step == 4
    assert "Error" in first.error
    blocker.unlink()
    saver.save(8, state(), meta(8))
    assert isinstance(outcomes.wait(2)[1], Committed)
    assert saver.wait()


@pytest.mark.parametrize(
    "name", ["runs [v2]", "back\\slash", "a]b[c", "q?x", "st*r", 'quote"x', "new\nline", "a,b{c}"]
)
def test_a_checkpoint_is_saved_whatever_its_directory_is_called(tmp_path: Path, name: str) -> None:
    """In a path with brackets nothing was ever saved, and a backslash made another directory."""
    outcomes = Outcomes()
    run_dir = tmp_path / name
    run_dir.mkdir()
    Saver(run_dir, 1, outcomes).save(4, state(), meta(4))
    outcome = outcomes.wait(1)[0]
    assert isinstance(outcome, Committed), outcome
    path = run_dir / "checkpoints" / "generation-1" / "4"
    assert Path(outcome.path) == path
    assert checkpoint.load(path, state())[1]["step"] == 4
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_a_failed_save_says_whether_the_disk_would_have_had_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may get room; what fails for another reason fails each time."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    outcomes = Outcomes()
    saver = Saver(tmp_path, 1, outcomes)
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(4, state(), meta(4))
    outcome = outcomes.wait(1)[0]
    assert isinstance(outcome, SaveFailed)
    assert outcome.disk_is_fine
    monkeypatch.setattr(os, "posix_fallocate", full)
    saver.save(5, state(), meta(5))
    outcome = outcomes.wait(2)[1]
    assert isinstance(outcome, SaveFailed)
    assert not outcome.disk_is_fine
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoints"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """The last save of a stop may fall on a step that was just saved."""
    outcomes = Outcomes()
    saver = Saver(tmp_path, 1, outcomes)
    saver.save(4, state(), meta(4))
    saver.save(4, state(), meta(4))
    assert saver.wait()
    saver.save(5, state(), meta(5))
    assert [outcome.step for outcome in outcomes.wait(2)] == [4, 5]


def test_a_step_that_failed_is_saved_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """A stop right after a failed save must not end without one."""
    outcomes = Outcomes()
    saver = Saver(tmp_path, 1, outcomes)
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(4, state(), meta(4))
    assert isinstance(outcomes.wait(1)[0], SaveFailed)
    (tmp_path / "checkpoints").unlink()
    saver.save(4, state(), meta(4))
    assert isinstance(outcomes.wait(2)[1], Committed)


def test_a_save_that_does_not_read_back_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written badly must not be the newest checkpoint of the next start."""
    damaged = {**state(), "half": state()["half"] + 1}
    monkeypatch.setattr(checkpoint, "_read_state", lambda path, target: damaged)
    outcomes = Outcomes()
    Saver(tmp_path, 1, outcomes).save(4, state(), meta(4))
    outcome = outcomes.wait(1)[0]
    assert isinstance(outcome, SaveFailed)
    assert "does not read back" in outcome.error
    assert not list((tmp_path / "checkpoints" / "generation-1").iterdir())


def test_a_checkpoint_under_another_number_is_refused(saved: Path) -> None:
    """A step is known by the name of its folder before anything of it is read."""
    with pytest.raises(CheckpointRejected, match="says step 4"):
        checkpoint.load(saved.rename(saved.with_name("8")), state())


def test_a_digest_needs_no_copy_of_the_state() -> None:
    """Copying 3 GiB into bytes held the interpreter for 2.4 s, in which no heartbeat was sent;
    hashing the memory itself lets the other threads run.
    """
    size = 64 << 20
    host = {"w": np.ones((2, size // 8), np.float32), "half": np.ones(8, ml_dtypes.bfloat16)}
    tracemalloc.start()
    try:
        checkpoint.digests(host)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size // 16


def test_a_save_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy job whose last save took longer than a fixed minute never came to its end."""

    def slow(path: Path) -> None:
        (tmp_path / "traffic").write_bytes(b"0" * 200_000)
        time.sleep(0.1)

    monkeypatch.setattr(checkpoint, "flush", slow)
    monkeypatch.setattr(checkpoint, "SAVE_WAIT_S", 0.9)
    outcomes, ticks = Outcomes(), []
    saver = Saver(tmp_path, 1, outcomes)
    saver.on_progress = lambda: ticks.append(time.monotonic())
    began = time.monotonic()
    saver.save(4, state(), meta(4))
    saver.require(4)
    assert time.monotonic() - began > 2 * 0.9
    assert len(ticks) > 2
    assert isinstance(outcomes.wait(1)[0], Committed)


def test_a_save_that_does_not_go_on_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs for good must not hold the loop for good."""
    over = threading.Event()
    monkeypatch.setattr(checkpoint, "flush", lambda path: over.wait(60))
    monkeypatch.setattr(checkpoint, "SAVE_WAIT_S", 0.6)
    outcomes, ticks = Outcomes(), []
    saver = Saver(tmp_path, 1, outcomes)
    saver.save(4, state(), meta(4))
    while not any(tmp_path.rglob("commit_success.txt")):
        time.sleep(0.05)
    saver.on_progress = lambda: ticks.append(time.monotonic())
    time.sleep(0.2)
    with pytest.raises(checkpoint.NotSaved, match="no progress for"):
        saver.require(4)
    assert ticks == []
    over.set()
    outcomes.wait(1)


def test_the_first_checkpoint_in_parts_makes_its_folders(tmp_path: Path) -> None:
    """A job whose state is divided over its ranks could not save at all in a new run directory."""
    outcomes: list[Committed | SaveFailed] = []
    savers = [Saver(tmp_path, 1, outcomes.append, part=rank, parts=2) for rank in range(2)]
    for rank in (1, 0):  # not at once: Orbax takes two in one process for one
        rows = np.full((1, 3), rank, np.float32)
        piece = Piece(name="w", shape=(2, 3), index=((rank, rank + 1), (0, 3)), values=rows)
        savers[rank].save(5, [piece], meta(5))
        assert savers[rank].wait()
    assert [type(outcome) for outcome in outcomes] == [Committed]
    host, _ = checkpoint.load(
        tmp_path / "checkpoints/generation-1/5", {"w": np.zeros((2, 3), "f4")}
    )
    assert host["w"].tolist() == [[0, 0, 0], [1, 1, 1]]
