"""The weights of a finished task of one's own, for other programs: the same bits, and no task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import trainer
from trainer.compute.pieces import Piece, whole
from trainer.compute.step import named_leaves
from trainer.state import checkpoint
from trainer.state.checkpoint import CheckpointRejected, Saver

ROOT = Path(__file__).parents[2]


def state(step: int) -> dict[str, Any]:
    """What a task of one's own may hold: an optimizer's named tuples, odd types, a key of dots."""
    params = {
        "dense": [{"kernel": np.full((2, 3), step, np.float32), "file": np.ones(2)}],
        "half": np.arange(6).astype(ml_dtypes.bfloat16),
        "tiny": np.arange(3).astype(ml_dtypes.float8_e4m3),
        "nothing": np.zeros((0, 2), np.float32),
    }
    optimizer = jax.tree.map(np.asarray, optax.adamw(1e-3).init({"w": np.ones(3, np.float32)}))
    return {"params": params, "optimizer": optimizer, "step": np.asarray(step, np.int32)}


def save(job_dir: Path, *steps: int) -> None:
    job_dir.mkdir(parents=True, exist_ok=True)
    outcomes: list[Any] = []
    saver = Saver(job_dir, 2, outcomes.append)
    for step in steps:
        saver.save(step, state(step), {"step": step, "generation": 2})
        saver.require(step)


def same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def test_a_state_comes_back_without_its_task(tmp_path: Path) -> None:
    """There was no way at all to get the weights of a job of one's own."""
    save(tmp_path, 5, 8)
    found = trainer.load(tmp_path)
    expected = state(8)
    same(found["params"]["dense"][0]["kernel"], expected["params"]["dense"][0]["kernel"])
    for name in ("half", "tiny", "nothing"):
        same(found["params"][name], expected["params"][name])
    same(found["optimizer"][0]["mu"]["w"], expected["optimizer"][0].mu["w"])
    assert trainer.load(tmp_path, step=5)["step"] == 5


def test_a_job_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call that the documents show ended in an error of Orbax about relative paths."""
    save(tmp_path / "runs" / "first", 5)
    monkeypatch.chdir(tmp_path)
    same(trainer.load("runs/first")["step"], state(5)["step"])


def test_a_tree_like_the_state_gives_it_its_own_structure(tmp_path: Path) -> None:
    """An optimizer's update wants its named tuples, not dicts."""
    save(tmp_path, 8)
    found = trainer.load(tmp_path, like=state(0))
    structure: Any = jax.tree.structure(found)  # jax gives it no type
    assert structure == jax.tree.structure(state(8))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state(8)), strict=True):
        same(one, other)
    with pytest.raises(KeyError, match="missing"):
        trainer.load(tmp_path, like={**state(0), "missing": np.zeros(1)})


def test_a_checkpoint_in_parts_comes_back_as_one(tmp_path: Path) -> None:
    """A state that ranks held together, and a snapshot that was kept when a job failed."""
    leaves = named_leaves(state(8))
    pieces = [Piece(name=n, shape=v.shape, index=whole(v.shape), values=v) for n, v in leaves]
    checkpoint.commit(tmp_path, 2, 8, pieces, {"step": 8, "generation": 2})
    found = trainer.load(tmp_path)
    same(found["params"]["dense"][0]["kernel"], np.full((2, 3), 8, np.float32))
    same(found["params"]["tiny"], state(8)["params"]["tiny"])


def test_paths_that_contradict_each_other_stay_dotted(tmp_path: Path) -> None:
    """A dict may have the keys "w" and "w.x"."""
    given = {"w": np.ones(2), "w.x": np.zeros(3)}
    outcomes: list[Any] = []
    saver = Saver(tmp_path, 2, outcomes.append)
    saver.save(1, given, {"step": 1, "generation": 2})
    saver.require(1)
    assert sorted(trainer.load(tmp_path)) == ["w", "w.x"]


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(tmp_path: Path) -> None:
    """What retention has deleted is gone; the message says what there is."""
    save(tmp_path, 5, 8)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; there are: 8, 5"):
        trainer.load(tmp_path, step=7)
    with pytest.raises(FileNotFoundError, match="there are: none at all"):
        trainer.load(tmp_path / "elsewhere")


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    """Orbax keeps no checksum over arrays: such bytes load silently."""
    given = {"w": np.random.default_rng(7).random((200, 300))}
    saver = Saver(tmp_path, 2, lambda outcome: None)
    saver.save(8, given, {"step": 8, "generation": 2})
    saver.require(8)
    folder = tmp_path / "checkpoints/generation-2/8/state"
    data = max(folder.glob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    data.write_bytes(bytes(raw))
    with pytest.raises(CheckpointRejected):
        trainer.load(tmp_path)


def export(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text('job.name = "own"\ntrainer.task = "own:Line"\n')
    command = [sys.executable, "-m", "trainer", "export", "--config", str(folder / "job.toml")]
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_an_export_of_a_task_of_ones_own_is_one_file_of_arrays(tmp_path: Path, kind: str) -> None:
    """Whoever takes the weights along has neither the task nor its code."""
    save(tmp_path / "runs" / "own", 5, 8)
    out = tmp_path / f"state.{kind}"
    done = export(tmp_path, "--format", kind, "--out", str(out), "--step", "5")
    assert done.returncode == 0, done.stderr
    assert f"{out}: " in done.stdout
    found = dict(np.load(out)) if kind == "npz" else load_file(out)
    assert set(found) == {name for name, _ in named_leaves(state(5))}
    same(found["params.dense.0.kernel"], np.full((2, 3), 5, np.float32))
    assert found["params.half"].astype(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    again = export(tmp_path, "--format", kind, "--out", str(out))
    assert again.returncode == 2
    assert "is there already" in again.stderr


def test_an_export_of_a_job_that_saved_nothing_says_so(tmp_path: Path) -> None:
    """Not a traceback: a person mistyped the name of the job."""
    done = export(tmp_path, "--format", "npz", "--out", str(tmp_path / "x.npz"))
    assert done.returncode == 2
    assert "no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
