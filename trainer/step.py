"""The mesh, the compiled programs, and the ways of arrays between host and devices.

Everything is compiled once, ahead of the first step, and nothing here knows of files or failures.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config import MeshSettings
from trainer.settings import SettingsError
from trainer.task import Batch, State, Task, TaskError

Host = Any
"""A pytree of numpy arrays: a state copied off the devices, random keys as their bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where arrays lie: the state whole on every device, the rows of a batch spread over "dp"."""

    mesh: Mesh
    whole: NamedSharding
    rows: NamedSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What programs are compiled for: pytrees of shapes with their shardings.

    `batch` and `held_out` are global; the latter is None for a task without evaluation.
    """

    state: Any
    batch: Any
    held_out: Any

    @property
    def batch_rows(self) -> int:
        """Rows of a global batch."""
        return int(jax.tree.leaves(self.batch)[0].shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The compiled steps, with the shapes they were compiled for.

    `train` consumes the state that it is given. `batch_rows` counts the rows of a global batch.
    """

    layout: Layout
    state: Any
    batch_rows: int
    train: Callable[[State, Batch], tuple[State, Mapping[str, Any]]]
    evaluate: Callable[[State, Batch], Mapping[str, Any]] | None


def make_layout(settings: MeshSettings) -> Layout:
    """A mesh over all devices of all processes; the first use connects every rank with the others.

    Raises `SettingsError` where the devices are not as many as asked for.
    """
    devices = jax.devices()
    if settings.dp not in (-1, len(devices)):
        raise SettingsError(
            f"[trainer.mesh] dp = {settings.dp}: the workers have {len(devices)} devices in all; "
            f"use -1 or {len(devices)}"
        )
    mesh = Mesh(np.array(devices), ("dp",))
    layout = Layout(
        mesh=mesh,
        whole=NamedSharding(mesh, PartitionSpec()),
        rows=NamedSharding(mesh, PartitionSpec("dp")),
    )
    _connect(layout)
    return layout


def _connect(layout: Layout) -> None:
    """A tiny all-reduce: ranks meet here, not minutes apart at their first step."""
    local = np.ones(len(layout.mesh.local_devices), np.int32)
    spread = jax.make_array_from_process_local_data(layout.rows, local)
    total = jax.jit(lambda values: values.sum(), out_shardings=layout.whole)(spread)
    if int(total) != layout.mesh.size:
        raise RuntimeError(f"an all-reduce over {layout.mesh.size} devices gave {int(total)}")


def shapes_of(task: Task, layout: Layout, seed: int) -> Shapes:
    """The shapes of the task's own state and batches; traces its `init`, computes nothing."""
    held_out = _abstract_batch(task.held_out_batch(0), layout) if task.evaluates else None
    return Shapes(
        state=_abstract(jax.eval_shape(task.init, jax.random.key(seed)), layout.whole),
        batch=_abstract_batch(task.batch(0), layout),
        held_out=held_out,
    )


def compile_programs(task: Task, layout: Layout, seed: int) -> Programs:
    """Trace and compile the task's functions for the shapes of its own state and batches.

    Raises `TaskError` where the task breaks its contract, and whatever its code raises.
    """
    return compile_shapes(task, layout, shapes_of(task, layout, seed))


def compile_shapes(task: Task, layout: Layout, shapes: Shapes) -> Programs:
    """Trace and compile the task's functions for these shapes; see `compile_programs`."""
    _check_contract(shapes.state, jax.eval_shape(task.train_step, shapes.state, shapes.batch))
    train = jax.jit(
        task.train_step, donate_argnums=0, out_shardings=(layout.whole, layout.whole)
    ).lower(shapes.state, shapes.batch)
    evaluate = None
    if shapes.held_out is not None:
        lowered = jax.jit(task.evaluate, out_shardings=layout.whole)
        evaluate = lowered.lower(shapes.state, shapes.held_out).compile()
    return Programs(
        layout=layout,
        state=shapes.state,
        batch_rows=shapes.batch_rows,
        train=train.compile(),
        evaluate=evaluate,
    )


def initial_state(task: Task, layout: Layout, seed: int) -> State:
    """The state of step 0, drawn on the devices from the seed alone."""
    return jax.jit(task.init, out_shardings=layout.whole)(jax.random.key(seed))


def place_rows(layout: Layout, local: Batch) -> Batch:
    """One global batch out of the rows that each rank holds (numpy)."""
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(layout.rows, np.asarray(rows)), local
    )


def place_state(programs: Programs, host: Host) -> State:
    """A state on the devices, out of a host copy that every rank holds in whole."""

    def place(target: Any, values: Any) -> Any:
        data = np.asarray(values)
        placed = jax.make_array_from_callback(
            data.shape, programs.layout.whole, lambda index: data[index]
        )
        if jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(placed, impl=_implementation(target.dtype))
        return placed

    return jax.tree.map(place, programs.state, host)


def to_host(state: State) -> Host:
    """A copy of the state that later steps cannot touch, though they consume the original."""
    return jax.tree.map(lambda leaf: np.array(_bits(leaf).addressable_data(0), copy=True), state)


def snapshot_leaves(state: State) -> tuple[list[tuple[str, Any]], bool]:
    """Name and array of each leaf, for a snapshot, and whether the next step takes them away.

    On CPU these are views of the state itself, to be copied and dropped before the next step; on
    accelerators they are copies on the device, already on their way to the host.
    """
    flat = [(name, _bits(leaf).addressable_data(0)) for name, leaf in named_leaves(state)]
    if all(one.device.platform == "cpu" for _, one in flat):
        return [(name, np.asarray(one)) for name, one in flat], True
    copies = [(name, jnp.copy(one)) for name, one in flat]
    for _, one in copies:
        one.copy_to_host_async()
    return copies, False


def host_shapes(programs: Programs) -> Host:
    """What `to_host` gives for a state of these programs: numpy arrays that cost no memory."""

    def blank(target: Any) -> Any:
        if jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
            target = jax.eval_shape(jax.random.key_data, target)
        return np.broadcast_to(np.zeros((), target.dtype), target.shape)

    return jax.tree.map(blank, programs.state)


def _bits(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


@functools.cache
def _implementation(dtype: Any) -> Any:
    """Which generator keys of this dtype belong to; only a traced key tells, and tracing takes."""
    found: list[Any] = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _abstract(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _abstract_batch(local: Batch, layout: Layout) -> Any:
    leaves = jax.tree.leaves(local)
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise TaskError("a batch must hold arrays whose first axis is the row")
    processes = jax.process_count()
    if any(len(leaf) * processes % layout.mesh.size for leaf in leaves):
        raise SettingsError(
            f"[trainer.data] batch_size: {len(leaves[0])} rows a worker cannot be split over its "
            f"{layout.mesh.size // processes} devices; make it a multiple"
        )

    def widen(leaf: Any) -> Any:
        rows = np.asarray(leaf)
        shape = (rows.shape[0] * processes, *rows.shape[1:])
        dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.rows)

    return jax.tree.map(widen, local)


def _check_contract(state: Any, result: Any) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TaskError("train_step must return (state, metrics)")
    after, metrics = result
    if not isinstance(metrics, Mapping) or "loss" not in metrics or metrics["loss"].shape != ():
        raise TaskError('the metrics of train_step must be a mapping with a scalar "loss"')
    before = dict(named_leaves(state))
    then = dict(named_leaves(after))
    if changed := sorted(set(before) ^ set(then)):
        raise TaskError(f"train_step must keep the state's structure: {changed[0]} is not in both")
    for name, leaf in before.items():
        if (leaf.shape, leaf.dtype) != (then[name].shape, then[name].dtype):
            raise TaskError(
                f"train_step must keep the state's shapes: {name} was {leaf.dtype}"
                f"{list(leaf.shape)} and became {then[name].dtype}{list(then[name].shape)}"
            )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves in tree order, each with its dotted path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in flat]
