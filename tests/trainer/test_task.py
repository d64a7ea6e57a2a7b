"""The contract between a user's task and the trainer, and what is said when it is broken."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.compute import step
from trainer.config import CheckpointSettings, MeshSettings, TrainerSettings
from trainer.process import failures
from trainer.settings import SettingsError
from trainer.task import Context, Task, TaskError
from trainer.training.find_task import load_task
from trainer.training.free_loop import trainer_for
from trainer.training.task_loop import ModelTrainer
from trainer.wire.heartbeat import Beat


def context(
    folder: Path,
    task: str = "language_model",
    trainer: Mapping[str, Any] | None = None,
    **more: Any,
) -> Context:
    values = {"rank": 0, "world_size": 1, "local_rank": 0, "node_rank": 0, "generation": 1}
    settings = TrainerSettings(task=task, **(trainer or {}))
    return Context(**{**values, **more}, config_dir=str(folder), settings=settings)


class Sum(Task):
    """Learns nothing, but keeps the contract, random key included."""

    def init(self, key: Any) -> Any:
        return {"total": jnp.zeros(3), "key": key}

    def batch(self, step: int) -> Any:
        return np.full((4, 3), step, np.float32)

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        key, noise = jax.random.split(state["key"])
        total = state["total"] + batch.mean(axis=0) + jax.random.normal(noise, (3,))
        return {"total": total, "key": key}, {"loss": total.sum()}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name.startswith("users_"):
            del sys.modules[name]


def test_a_task_beside_the_settings_file_is_found(folder: Path) -> None:
    """A user starts with one file of their own."""
    code = "from tests.trainer.test_task import Sum\n\nclass Mine(Sum): pass\n"
    (folder / "users_one.py").write_text(code)
    task = load_task(context(folder, "users_one:Mine"))
    assert type(task).__name__ == "Mine"


def test_a_setting_that_a_task_of_ones_own_does_not_read_is_refused(folder: Path) -> None:
    """`check` cannot tell what a class inherits; the worker can, before its first step."""
    code = "from tests.trainer.test_task import Sum\n\nclass Mine(Sum):\n    {}\n"
    (folder / "users_plain.py").write_text(code.format("pass"))
    (folder / "users_all.py").write_text(code.format("reads_all_settings = True"))
    beta = {"optimizer": {"beta1": 0.5}}
    with pytest.raises(SettingsError, match=r"trainer\.optimizer\.beta1: only the built-in task"):
        load_task(context(folder, "users_plain:Mine", beta))
    load_task(context(folder, "users_all:Mine", beta))


def test_code_that_was_sent_to_this_node_wins_over_a_copy_of_it(folder: Path) -> None:
    """A stale checkout on one node would train something else than the other ranks."""
    code = "from tests.trainer.test_task import Sum\n\nclass Mine(Sum):\n    place = {!r}\n"
    for name in ("stale", "sent"):
        (folder / name).mkdir()
        (folder / name / "users_sent.py").write_text(code.format(name))
    sys.path.insert(0, str(folder / "stale"))  # as the directory that the process started in
    sys.path.append(str(folder / "sent"))  # as Ray says it in PYTHONPATH
    task: Any = load_task(
        context(folder / "stale", "users_sent:Mine", code_dir=str(folder / "sent"))
    )
    assert task.place == "sent"


def test_the_standard_library_is_found_before_the_users_files(folder: Path) -> None:
    """A `this.py` beside the settings broke whatever imported Python's own afterwards."""
    (folder / "this.py").write_text("raise AssertionError('imported')\n")
    (folder / "users_mine.py").write_text("from tests.trainer.test_task import Sum\n")
    load_task(context(folder, "users_mine:Sum"))
    spec = importlib.util.find_spec("this")
    assert spec is not None
    assert spec.origin != str(folder / "this.py")


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ("users_nowhere:Mine", "no module 'users_nowhere'"),
        ("users_two:Missing", "no class 'Missing'"),
        ("users_two:helper", "is a function"),
        ("users_two:NUMBER", "no class 'NUMBER' that"),
    ],
)
def test_a_task_that_is_not_there_is_named_with_its_place(
    folder: Path, task: str, complaint: str
) -> None:
    """The message must say where it was looked for."""
    (folder / "users_two.py").write_text("NUMBER = 7\ndef helper(): pass\n")
    with pytest.raises(SettingsError, match=complaint):
        load_task(context(folder, task))


def test_an_import_that_fails_inside_the_users_module_is_not_ours_to_explain(folder: Path) -> None:
    """ "No module users_three" would be a lie: it is another one that is missing."""
    (folder / "users_three.py").write_text("import users_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="users_not_installed"):
        load_task(context(folder, "users_three:Mine"))


def test_rows_of_all_ranks_make_up_the_global_batch(folder: Path) -> None:
    """The global batch is the same whatever the number of workers."""
    shares = [context(folder, rank=rank, world_size=4).rows(12) for rank in range(4)]
    rows = [row for share in shares for row in range(12)[share]]
    assert rows == list(range(12))
    with pytest.raises(SettingsError, match="multiple of 5"):
        context(folder, world_size=5).rows(12)


def test_a_state_with_a_random_key_goes_to_the_host_and_back(folder: Path) -> None:
    """Keys have a type of their own, which neither numpy nor a file knows."""
    task = Sum(context(folder))
    layout = step.make_layout(MeshSettings())
    programs = step.compile_programs(task, layout, seed=3)
    state = step.initial_state(task, programs, seed=3)
    host = step.to_host(state)
    for name, leaf in step.named_leaves(step.host_shapes(programs)):
        found = dict(step.named_leaves(host))[name]
        assert (leaf.shape, leaf.dtype) == (found.shape, found.dtype)
    again = step.place_state(programs, step.assembly_of(host).read)
    batch = step.place_rows(layout, task.batch(1))
    _, one = programs.train(state, batch)
    _, two = programs.train(again, batch)
    assert float(one["loss"]) == float(two["loss"])
    assert programs.evaluate is None
    assert programs.batch_rows == 4


def test_a_copy_on_the_host_outlives_the_state_it_came_from(folder: Path) -> None:
    """On CPU a view would change under the hands of the saver, and the digest with it."""
    task = Sum(context(folder))
    layout = step.make_layout(MeshSettings())
    programs = step.compile_programs(task, layout, seed=3)
    state = step.initial_state(task, programs, seed=3)
    host = step.to_host(state)
    before = host["total"].copy()
    for index in range(5):
        state, _ = programs.train(state, step.place_rows(layout, task.batch(index)))
    jax.block_until_ready(state)  # type: ignore[no-untyped-call]
    assert np.array_equal(host["total"], before)


class Noise(Sum):
    """Begins with what the seed gives."""

    def init(self, key: Any) -> Any:
        return {"total": jax.random.normal(key, (3,)), "key": key}


class Grows(Sum):
    """Returns a state of another shape."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        state, metrics = super().train_step(state, batch)
        return {**state, "total": jnp.zeros(4)}, metrics


class Forgets(Sum):
    """Loses a part of the state."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        state, metrics = super().train_step(state, batch)
        return {"total": state["total"]}, metrics


class Mute(Sum):
    """Gives no loss."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        return super().train_step(state, batch)[0], {"accuracy": jnp.zeros(())}


class Vector(Sum):
    """Gives a loss for each row."""

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        return super().train_step(state, batch)[0], {"loss": jnp.zeros(4)}


class Single(Sum):
    """Gives no metrics at all."""

    def train_step(self, state: Any, batch: Any) -> Any:
        return super().train_step(state, batch)[0]


class Named(Sum):
    """Has a string in its state."""

    def init(self, key: Any) -> Any:
        return {**super().init(key), "name": "mine"}


class Unfinished(Task):
    """Lacks what has to be there."""

    def init(self, key: Any) -> Any:
        return {"w": jnp.zeros(2)}


class Closed(Sum):
    """Wants nothing to begin with."""

    def __init__(self) -> None:
        pass


class Unindexed(Sum):
    """Draws its batches by no step."""

    def batch(self) -> Any:  # type: ignore[override]
        return np.zeros((4, 3))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Unfinished, r"test_task\.py: class Unfinished lacks batch, train_step"),
        (Closed, r"test_task\.py:\d+ Closed\.__init__ is called as __init__\(context\): too many"),
        (Unindexed, r"test_task\.py:\d+ Unindexed\.batch is called as batch\(step\): too many"),
    ],
)
def test_a_class_that_cannot_be_called_as_a_task_is_refused_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Task], complaint: str
) -> None:
    """Python's TypeError has no frame of the user's, and was retried until the budget was spent."""
    module = types.ModuleType("users_classes")
    module.Mine = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_classes", module)
    with pytest.raises(TaskError, match=complaint):
        load_task(context(folder, task="users_classes:Mine"))


def gives(**metrics: Any) -> type[Sum]:
    """A task with these metrics besides a sound loss."""

    class Gives(Sum):
        def train_step(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
            state, sound = super().train_step(state, batch)
            return state, {**sound, **metrics}

    return Gives


def begins_with(leaf: Any) -> type[Sum]:
    """A task with this leaf in its first state."""

    class Begins(Sum):
        def init(self, key: Any) -> Any:
            return {**super().init(key), "leaf": leaf}

    return Begins


class Blind(Sum):
    """Evaluates without a loss."""

    def held_out_batch(self, index: int) -> Any:
        return self.batch(index)

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        return {"accuracy": batch.mean()}


class HalfBlind(Sum):
    """A task that evaluates, but names no data to evaluate on."""

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        return {"loss": batch.mean()}


class Words(Sum):
    """Feeds words."""

    def batch(self, step: int) -> Any:
        return np.array(["to", "be", "or", "not"])


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (gives(aux=None), "metric aux is a NoneType"),
        (gives(aux={"norm": 1.0}), "metric aux is a dict"),
        (gives(note="fine"), "metrics.note is a str"),
        (gives(loss=1j), "metric loss is complex64"),
        (begins_with("adam"), "init: leaf is a str"),
        (begins_with(np.int64(6_000_000_000)), "init: leaf is int64, of which JAX keeps int32"),
        (begins_with(np.float64(1 / 3)), "init: leaf is float64, of which JAX keeps float32"),
        (begins_with(6_000_000_000), "init: leaf is 6000000000, which int32 does not hold"),
        (Blind, 'metrics of evaluate must be a mapping with a scalar "loss"'),
        (HalfBlind, "needs held_out_batch"),
        (Words, "is <U3, no numbers"),
        (Grows, r"total was float32\[3\] and became float32\[4\]"),
        (Forgets, "key is not in both"),
        (Mute, 'scalar "loss"'),
        (Vector, 'scalar "loss"'),
        (Single, r"\(state, metrics\)"),
        (Named, r"test_task\.py:\d+ Named\.init: name is a str, no array"),
    ],
)
def test_a_broken_contract_is_named_before_the_first_step(
    folder: Path, kind: type[Sum], complaint: str
) -> None:
    """The compiler would say the same on two pages, one step later."""
    with pytest.raises(TaskError, match=complaint) as caught:
        step.compile_programs(kind(context(folder)), step.make_layout(MeshSettings()), seed=0)
    told = failures.describe(caught.value, task=f"{__name__}:Sum")
    assert told.user
    assert told.frame.startswith(f"{__file__}:")
    assert told.frame in told.message


def test_all_bits_of_the_seed_count(folder: Path) -> None:
    """Seeds 1 and 1 + 2**32 gave the same weights, and a sweep over seeds less than it said."""
    drawn = set()
    layout = step.make_layout(MeshSettings())
    for seed in (1, 1 + 2**32, 1 + 2**62, 2**63 - 1):
        task = Noise(context(folder))
        state = step.initial_state(task, step.compile_programs(task, layout, seed), seed)
        drawn.add(tuple(np.asarray(state["total"]).tolist()))
    assert len(drawn) == 4


def test_a_small_seed_means_what_it_means_to_jax(folder: Path) -> None:
    """Runs that exist begin with these weights."""
    for seed in (0, 7, 2**32 - 1):
        ours, theirs = (jax.random.key_data(k) for k in (step.seed_key(seed), jax.random.key(seed)))
        assert np.array_equal(ours, theirs)


def test_a_mesh_that_does_not_fit_the_devices_is_a_mistake_in_the_settings() -> None:
    """Half of the devices idle, or twice as many as there are: neither is meant."""
    with pytest.raises(SettingsError, match="dp = 7"):
        step.make_layout(MeshSettings(dp=7))


def test_start_is_called_once_before_all_else_of_the_task(tmp_path: Path) -> None:
    """Users set up what a process needs once (Ray Train's wish for on_worker_start)."""
    calls: list[str] = []

    class Started(Sum):
        def start(self) -> None:
            calls.append("start")

        def batch(self, step: int) -> Any:
            calls.append("batch")
            return super().batch(step)

    built(Started, tmp_path).build()
    assert calls[0] == "start"
    assert calls.count("start") == 1


def test_words_of_the_task_that_no_checkpoint_could_hold_are_refused(tmp_path: Path) -> None:
    """Else every save would fail, and the job would find out at its end."""

    class Odd(Sum):
        def position(self, step: int) -> Mapping[str, Any]:
            return {"seen": {1, 2}}

    with pytest.raises(TaskError, match="position must be plain JSON"):
        built(Odd, tmp_path).build()


def built(kind: type[Task], folder: Path) -> ModelTrainer:
    """A trainer of this task, before anything is loaded."""
    module = types.ModuleType("users_built")
    module.Mine = kind  # type: ignore[attr-defined]
    sys.modules["users_built"] = module
    return trainer_for(
        context=context(folder, "users_built:Mine"),
        checkpoints=CheckpointSettings(),
        job_dir=folder,
        beat=Beat(folder / "beat"),
        restore_from=None,
        on_outcome=lambda outcome: None,
    )
