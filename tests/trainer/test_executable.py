"""Stored programs: the same bits without a trace, and no trust in a file that is not sound."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.trainer.test_task import Sum, context
from trainer import executable, step
from trainer.checkpoint import digests
from trainer.config import MeshSettings
from trainer.executable import ExecutableRejected
from trainer.step import Layout, Programs, Shapes
from trainer.task import Task, load_task

TRACED: list[str] = []


class Traced(Sum):
    """Tells when it is traced."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        TRACED.append("train")
        return super().train_step(state, batch)

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        TRACED.append("evaluate")
        return {"loss": (state["total"] * batch).mean()}

    def held_out_batch(self, index: int) -> Any:
        return np.full((4, 3), index, np.float32)


class Constant(Sum):
    """Closes over an array that no argument brings."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        state, metrics = super().train_step(state, batch)
        return state, {"loss": metrics["loss"] + self.table.sum()}

    @property
    def table(self) -> Any:
        return jax.numpy.arange(4096.0) + jax.numpy.asarray(np.random.default_rng(1).random(4096))


@pytest.fixture
def layout() -> Layout:
    return step.make_layout(MeshSettings())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = list(sys.path), set(sys.modules)
    TRACED.clear()
    yield tmp_path / "executables"
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name.startswith("users_"):
            del sys.modules[name]


def build(folder: Path, layout: Layout, task: Task | None = None) -> Programs:
    """Load or compile, and wait for the file that a compilation leaves."""
    task = task or Traced(context(folder.parent))
    shapes = step.shapes_of(task, layout, 3)
    programs = executable.load_or_compile(folder, task, layout, shapes, {})
    path = folder / f"{executable.key_of(task, layout, shapes, {})}.bin"
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return programs


def trained(programs: Programs, layout: Layout, steps: int = 4) -> tuple[str, list[float]]:
    """Digest of the state after some steps, and the losses."""
    task = Traced(context(Path()))
    state = step.initial_state(task, programs, seed=3)
    losses = []
    for index in range(steps):
        batch = step.place_rows(layout, task.batch(index))
        state, metrics = programs.train(state, batch)
        losses.append(float(metrics["loss"]))
    return digests(step.to_host(state))[2], losses


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_stored_program_computes_the_same_bits_and_is_not_traced(
    folder: Path, layout: Layout
) -> None:
    """A recovered run must equal an undisturbed one, whoever compiled."""
    compiled = build(folder, layout)
    wanted = trained(compiled, layout)
    assert TRACED
    TRACED.clear()
    loaded = build(folder, layout)
    assert TRACED == []
    assert trained(loaded, layout) == wanted
    assert loaded.evaluate is not None
    assert loaded.batch_rows == compiled.batch_rows
    assert only(folder).stat().st_mode & 0o777 == 0o600


def test_a_loaded_program_still_consumes_its_state(folder: Path, layout: Layout) -> None:
    """Twice the memory for the state would end a run that fitted before."""
    build(folder, layout)
    loaded = build(folder, layout)
    task = Traced(context(folder))
    before = step.initial_state(task, loaded, seed=3)
    loaded.train(before, step.place_rows(layout, task.batch(0)))
    assert before["total"].is_deleted()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def other_version(path: Path) -> None:
    line, _, payload = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(line), "version": 99}).encode() + b"\n" + payload)


def sound_but_senseless(path: Path) -> None:
    """A pickle with a right digest that XLA cannot use, as another version of it would leave."""
    import hashlib
    import pickle

    tree = jax.tree.structure(0)
    payload = pickle.dumps([(b"no program", tree, tree), None])
    digest = hashlib.sha256(payload).hexdigest()
    header = {"version": executable.VERSION, "bytes": len(payload), "sha256": digest}
    path.write_bytes(json.dumps(header).encode() + b"\n" + payload)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flip, "digest"),
        (truncate, "digest"),
        (empty, "header"),
        (open_to_all, "not ours alone"),
        (open_folder, "not ours alone"),
        (other_version, "version 99"),
        (sound_but_senseless, "cannot be loaded"),
    ],
)
def test_an_unsound_file_is_refused_and_replaced(
    folder: Path, layout: Layout, harm: Any, reason: str
) -> None:
    """Unpickling what another could have written would run their code; a torn one would crash."""
    wanted = trained(build(folder, layout), layout)
    path = only(folder)
    harm(path)
    task = Traced(context(folder.parent))
    shapes = step.shapes_of(task, layout, 3)
    with pytest.raises(ExecutableRejected, match=reason):
        executable.load(path, layout, shapes)
    damaged = path.read_bytes()
    TRACED.clear()
    assert trained(build(folder, layout), layout) == wanted
    assert TRACED
    deadline = time.monotonic() + 20
    while path.stat().st_mode & 0o777 != 0o600 or (
        path.read_bytes() == damaged and harm not in (open_to_all, open_folder)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if harm is not open_folder:
        executable.load(path, layout, shapes)


def test_changed_code_settings_flags_or_shapes_have_another_key(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced, so that a stale program would train something else without a word."""
    folder.mkdir(parents=True)
    code = "from tests.trainer.test_task import Sum\n\nclass Mine(Sum): pass\n"
    source, helper = folder.parent / "users_keyed.py", folder.parent / "users_helper.py"
    source.write_text(code)
    task = load_task(context(folder.parent, "users_keyed:Mine"))
    shapes = step.shapes_of(task, layout, 3)

    def key(shapes: Shapes = shapes, task: Task = task, **described: Any) -> str:
        return executable.key_of(task, layout, shapes, described)

    first = key()
    assert key() == first
    seen = {first}
    source.write_text(code + "# changed\n")
    seen.add(key())
    helper.write_text("x = 1\n")
    seen.add(key())
    seen.add(key(facts={"text_sha256": "another"}))
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
        seen.add(key())
    wider = Shapes(
        state={"total": jax.eval_shape(lambda: jax.numpy.zeros(4))},
        batch=shapes.batch,
        held_out=None,
    )
    seen.add(key(wider))
    seen.add(key(task=type(task)(context(folder, "users_keyed:Mine", world_size=2))))
    assert len(seen) == 7
    source.write_text(code)
    helper.unlink()
    assert key() == first


def test_a_program_that_cannot_be_stored_still_trains(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX refuses some programs; a full disk refuses any. The next start compiles again."""
    from jax.experimental import serialize_executable

    def refuse(program: Any) -> Any:
        raise NotImplementedError("serialize_executables with const_args")

    with monkeypatch.context() as patched:
        patched.setattr(serialize_executable, "serialize", refuse)
        task = Traced(context(folder.parent))
        shapes = step.shapes_of(task, layout, 3)
        programs = executable.load_or_compile(folder, task, layout, shapes, {})
        trained(programs, layout)
        time.sleep(0.3)
    assert not folder.exists()


def test_other_ranks_store_nothing(folder: Path, layout: Layout) -> None:
    """Two writers of one file would only race."""
    task = Traced(context(folder.parent, rank=1, world_size=2))
    shapes = step.shapes_of(task, layout, 3)
    executable.load_or_compile(folder, task, layout, shapes, {})
    time.sleep(0.3)
    assert not folder.exists()


def test_only_the_newest_files_stay(folder: Path, layout: Layout) -> None:
    """Every change of the settings leaves a file; the folder must not grow for ever."""
    programs = build(folder, layout)
    (folder / ".old.bin.123").write_text("a draft of the dead")
    for number in range(executable.KEPT + 3):
        executable.store(folder / f"{number}.bin", programs)
    assert len(list(folder.iterdir())) == executable.KEPT
    assert (folder / f"{executable.KEPT + 2}.bin").exists()
