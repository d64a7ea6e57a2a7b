"""Stored programs: the same bits without a trace, and no trust in a file that is not sound."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import trainer
from tests.trainer.test_task import Sum, context
from trainer.compute import executable, step
from trainer.compute.executable import Chosen, ExecutableRejected
from trainer.compute.step import Layout, Programs, Shapes
from trainer.config import MeshSettings
from trainer.state.checkpoint import digests
from trainer.task import Task

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


def choose(folder: Path, layout: Layout, task: Task | None = None, run: int = 1) -> Chosen:
    """Load or compile, and wait for the file that a compilation leaves."""
    task = task or Traced(context(folder.parent))
    shapes = step.shapes_of(task, layout, 3)
    chosen = executable.choose(folder, task, layout, shapes, {}, run)
    key = executable.key_of(task, layout, shapes, {})
    path = executable.path_of(folder, key, chosen.digest)
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return chosen


def build(folder: Path, layout: Layout) -> Programs:
    return choose(folder, layout).programs


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
    (path,) = folder.glob("*.bin")
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


class Reader(Sum):
    """Reads three numbers while it is traced."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        TRACED.append("train")
        folder = Path(self.context.config_dir)
        rate = json.loads((folder / "hyper.json").read_text())["rate"]
        table = np.load(folder / "table.npy")
        state, metrics = super().train_step(state, batch)
        factor = rate * float(os.environ["A_NUMBER_OF_THE_USER"]) + table.sum()
        return state, {"loss": metrics["loss"] * factor}


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "file": lambda folder, _: write(folder / "hyper.json", '{"rate": 0.5}'),
    "variable": lambda _, patch: patch.setenv("A_NUMBER_OF_THE_USER", "3.0"),
    "array": lambda folder, _: np.save(folder / "table.npy", np.full(512, 7.0, np.float32)),
}


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize("changed", CHANGES)
def test_a_new_run_traces_what_a_recovery_within_a_run_does_not(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A number changed from 0.1 to 0.5 between two runs was ignored: the old program was loaded."""
    monkeypatch.setenv("A_NUMBER_OF_THE_USER", "2.0")
    write(folder.parent / "hyper.json", '{"rate": 0.1}')
    np.save(folder.parent / "table.npy", np.arange(512, dtype=np.float32))
    task = Reader(context(folder.parent))
    first = choose(folder, layout, task, run=1)
    CHANGES[changed](folder.parent, monkeypatch)
    TRACED.clear()
    recovered = choose(folder, layout, task, run=1)
    assert (recovered.digest, recovered.traced, TRACED) == (first.digest, False, [])
    wanted = trained(first.programs, layout)
    assert trained(recovered.programs, layout) == wanted
    opened = choose(folder, layout, task, run=2)
    assert opened.traced
    assert opened.digest != first.digest
    assert trained(opened.programs, layout)[1] != wanted[1]
    again = choose(folder, layout, task, run=2)
    assert (again.digest, again.traced) == (opened.digest, False)


def test_a_new_run_of_the_same_program_compiles_nothing(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing takes a moment, compiling may take minutes."""
    first = choose(folder, layout, run=1)
    monkeypatch.setattr(step.Lowered, "compile", lambda _: pytest.fail("it was compiled"))
    second = choose(folder, layout, run=2)
    assert (second.digest, second.traced) == (first.digest, True)


def test_a_note_that_cannot_be_read_or_trusted_costs_a_trace(folder: Path, layout: Layout) -> None:
    """The note names a file that is unpickled."""
    first = choose(folder, layout)
    (note,) = folder.glob("*.json")
    harms: tuple[Callable[[], None], ...] = (
        lambda: write(note, "{"),
        lambda: write(note, json.dumps({"run": 1, "program": "../../elsewhere"})),
        lambda: note.chmod(0o666),
    )
    for harm in harms:
        harm()
        assert choose(folder, layout).traced
        note.chmod(0o600)
        write(note, json.dumps({"run": 1, "program": first.digest}))
        assert not choose(folder, layout).traced


def test_other_settings_flags_or_shapes_have_another_key(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a run nothing is traced, so that a stale program would go unnoticed."""
    task = Traced(context(folder.parent))
    shapes = step.shapes_of(task, layout, 3)

    def key(shapes: Shapes = shapes, task: Task = task, **described: Any) -> str:
        return executable.key_of(task, layout, shapes, described)

    first = key()
    assert key() == first
    seen = {first, key(facts={"text_sha256": "another"})}
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
        seen.add(key())
    wider = Shapes(
        state={"total": jax.eval_shape(lambda: jax.numpy.zeros(4))},
        batch=shapes.batch,
        held_out=None,
    )
    seen.add(key(wider))
    seen.add(key(task=Traced(context(folder, world_size=2))))
    assert len(seen) == 5


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
        programs = executable.choose(folder, task, layout, shapes, {}).programs
        trained(programs, layout)
        time.sleep(0.3)
    assert not list(folder.glob("*.bin"))


def test_other_ranks_store_nothing(folder: Path, layout: Layout) -> None:
    """Two writers of one file would only race."""
    task = Traced(context(folder.parent, rank=1, world_size=2))
    shapes = step.shapes_of(task, layout, 3)
    executable.choose(folder, task, layout, shapes, {})
    time.sleep(0.3)
    assert not folder.exists()


def test_only_the_newest_files_stay(folder: Path, layout: Layout) -> None:
    """Every change of the settings leaves a file; the folder must not grow for ever."""
    programs = build(folder, layout)
    dead, living = folder / ".old.bin.123", folder / ".new.bin.456"
    for draft in (dead, living):
        draft.write_text("half")
    os.utime(dead, (0, 0))
    for number in range(executable.KEPT + 3):
        (folder / f"{number}.json").write_text("{}")
        executable.store(folder / f"{number}.bin", programs)
    assert len(list(folder.glob("*.bin"))) == executable.KEPT
    assert len(list(folder.glob("*.json"))) == executable.KEPT
    assert len(list(folder.iterdir())) == 2 * executable.KEPT + 1
    assert living.exists()  # of another rank, which was robbed of it before it could rename it
    assert (folder / f"{executable.KEPT + 2}.bin").exists()


def test_every_source_of_the_trainer_is_part_of_the_key(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of sources that the key did not see kept a program that a newer version had changed:
    it would be loaded, and compute what the older one did."""
    task = Traced(context(folder.parent))
    shapes = step.shapes_of(task, layout, 3)
    sources = sorted(Path(trainer.__file__).parent.rglob("*.py"))
    read, edited = Path.read_bytes, set[Path]()
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + (b"#" if path in edited else b"")
    )

    def key(*changed: Path) -> str:
        edited.clear()
        edited.update(changed)
        return executable.key_of(task, layout, shapes, {})

    before = key()
    assert len(sources) > 50
    assert [path for path in sources if key(path) == before] == []
    assert key() == before
