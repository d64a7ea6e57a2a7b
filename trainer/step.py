"""The mesh, the compiled programs, and the ways of arrays between host and devices.

Everything is compiled once, ahead of the first step, and nothing here knows of files or failures.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import sharding
from trainer.config import MeshSettings
from trainer.guards import APPLIED, dissenters
from trainer.pieces import Assembly, Index, Piece, Read, index_of, whole
from trainer.settings import SettingsError
from trainer.task import Batch, State, Task, TaskError, place_of

Host = Any
"""A pytree of numpy arrays: a state copied off the devices, random keys as their bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where arrays lie, and what of them is this process's.

    `parts` processes with ranks in a row hold one replica of the state together. `feed`: which of
    how many equal parts of a batch's rows this process feeds.
    """

    mesh: Mesh
    whole: NamedSharding
    rows: NamedSharding
    parts: int
    feed: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What programs are compiled for: pytrees of shapes with their shardings.

    `batch` and `held_out` are global; the latter is None for a task without evaluation. `guarded`:
    a step can leave the state as it was; `compared`: there are replicas that should be equal.
    """

    state: Any
    batch: Any
    held_out: Any
    guarded: bool = False
    compared: bool = False

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
    train: Callable[..., tuple[State, Mapping[str, Any]]]
    evaluate: Callable[[State, Batch], Mapping[str, Any]] | None
    compare: Callable[[State], Any] | None = None
    guarded: bool = False

    def __post_init__(self) -> None:
        for program in (self.train, self.evaluate, self.compare):
            _accept_narrow_types(program)

    def step(
        self, state: State, batch: Batch, limit: float = np.inf
    ) -> tuple[State, Mapping[str, Any]]:
        """One step. A guarded one is not applied where its loss is above `limit` or not finite."""
        if self.guarded:
            return self.train(state, batch, np.float32(limit))
        return self.train(state, batch)


def _accept_narrow_types(program: Any) -> None:
    """Let a compiled program take numbers of less than a byte, such as int4, on several devices.

    jax 0.10.2 refuses them: to its own arrays it ascribes another layout than to its programs. Both
    hold one number per byte.
    """
    executable: Any = getattr(program, "_executable", None)
    layouts = getattr(executable, "_xla_in_layouts", ())
    if any(one is not None and one.sub_byte_element_size_in_bits for one in layouts):
        executable._xla_in_layouts = [None] * len(layouts)


def make_layout(settings: MeshSettings) -> Layout:
    """A mesh over all devices of all processes; the first use connects every rank with the others.

    Devices are in the order of their ranks, "tp" innermost: parts of a matrix are neighbours.
    Raises `SettingsError` where the devices are not as many as asked for.
    """
    devices = jax.devices()
    dp, fsdp, tp = settings.sizes(len(devices))
    own = len(devices) // jax.process_count()
    for name, size in (("fsdp x tp", fsdp * tp), ("tp", tp)):
        if size % own and own % size:
            raise SettingsError(
                f"[trainer.mesh] {name} = {size} and the {own} devices of a worker do not fit into "
                "each other; make one a multiple of the other"
            )
    mesh = Mesh(np.array(devices).reshape(dp, fsdp, tp), sharding.AXES)
    group = max(tp, own)
    layout = Layout(
        mesh=mesh,
        whole=NamedSharding(mesh, PartitionSpec()),
        rows=NamedSharding(mesh, PartitionSpec(sharding.ROWS)),
        parts=max(1, fsdp * tp // own),
        feed=(jax.process_index() * own // group, len(devices) // group),
    )
    _connect(layout)
    return layout


def _connect(layout: Layout) -> None:
    """A tiny all-reduce: ranks meet here, not minutes apart at their first step."""
    size = layout.mesh.size
    total = _reduce(layout, 1, jnp.sum)
    if total != size:
        raise RuntimeError(f"an all-reduce over {size} devices gave {total}")


def largest(layout: Layout, value: int) -> int:
    """The largest of what the processes give; all must call it, and wait for each other."""
    return _reduce(layout, value, jnp.max)


def _reduce(layout: Layout, value: int, function: Callable[[Any], Any]) -> int:
    spread = NamedSharding(layout.mesh, PartitionSpec(sharding.AXES))
    values = jax.make_array_from_callback(
        (layout.mesh.size,), spread, lambda _: np.full(1, value, np.int32)
    )
    return int(jax.jit(function, out_shardings=layout.whole)(values))


def shapes_of(task: Task, layout: Layout, seed: int) -> Shapes:
    """The shapes of the task's own state and batches; traces its `init`, computes nothing."""
    held_out = _abstract_batch(task.held_out_batch(0), layout) if task.evaluates else None
    return Shapes(
        state=_abstract_state(task, layout, seed),
        batch=_abstract_batch(task.batch(0), layout),
        held_out=held_out,
        guarded=task.context.settings.guards.leaves_out,
        compared=task.context.settings.guards.compare_every_steps > 0
        and layout.mesh.shape["dp"] > 1,
    )


def compile_programs(task: Task, layout: Layout, seed: int) -> Programs:
    """Trace and compile the task's functions for the shapes of its own state and batches.

    Raises `TaskError` where the task breaks its contract, and whatever its code raises.
    """
    return compile_shapes(task, layout, shapes_of(task, layout, seed))


def compile_shapes(task: Task, layout: Layout, shapes: Shapes) -> Programs:
    """Trace and compile the task's functions for these shapes; see `compile_programs`."""
    return lower(task, layout, shapes).compile()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The task's functions as traced and lowered, not compiled; parts that it lacks are None."""

    layout: Layout
    shapes: Shapes
    train: Any
    evaluate: Any
    compare: Any

    def digest(self) -> str:
        """SHA-256 over the StableHLO text of all parts, and over arrays that they close over.

        Two programs with one digest compute the same, whatever their sources were.
        """
        found = hashlib.sha256()
        for part in (self.train, self.evaluate, self.compare):
            found.update(b"none" if part is None else part.as_text().encode())
            for array in [] if part is None else getattr(part._lowering, "const_args", None) or []:
                found.update(np.asarray(_bits(array)).tobytes())
        return found.hexdigest()

    def compile(self) -> Programs:
        """Compile all parts."""
        return Programs(
            layout=self.layout,
            state=self.shapes.state,
            batch_rows=self.shapes.batch_rows,
            train=self.train.compile(),
            evaluate=None if self.evaluate is None else self.evaluate.compile(),
            compare=None if self.compare is None else self.compare.compile(),
            guarded=self.shapes.guarded,
        )


def lower(task: Task, layout: Layout, shapes: Shapes) -> Lowered:
    """Trace the task's functions for these shapes, and lower them; see `compile_programs`."""
    _check_contract(shapes.state, jax.eval_shape(task.train_step, shapes.state, shapes.batch))
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes.state)
    function: Callable[..., Any] = task.train_step
    given: tuple[Any, ...] = (shapes.state, shapes.batch)
    if shapes.guarded:
        limit = jax.ShapeDtypeStruct((), np.float32, sharding=layout.whole)
        function, given = _guarded(task), (*given, limit)
    with jax.set_mesh(layout.mesh):
        train = jax.jit(function, donate_argnums=0, out_shardings=(places, layout.whole)).lower(
            *given
        )
        evaluate = None
        if shapes.held_out is not None:
            jitted = jax.jit(task.evaluate, out_shardings=layout.whole)
            evaluate = jitted.lower(shapes.state, shapes.held_out)
        compare = _lower_comparison(layout, shapes.state) if shapes.compared else None
    return Lowered(layout=layout, shapes=shapes, train=train, evaluate=evaluate, compare=compare)


def _guarded(task: Task) -> Callable[[State, Batch, Any], tuple[State, Mapping[str, Any]]]:
    """The task's step, which gives the state back as it was where the numbers are out of bounds."""

    def train_step(state: State, batch: Batch, limit: Any) -> tuple[State, Mapping[str, Any]]:
        after, metrics = task.train_step(state, batch)
        finite = [jnp.isfinite(value).all() for value in jax.tree.leaves(dict(metrics))]
        applied = jnp.stack(finite).all() & (metrics["loss"] <= limit)
        kept = jax.tree.map(lambda new, old: jnp.where(applied, new, old), after, state)
        return kept, {**metrics, APPLIED: applied.astype(jnp.float32)}

    return train_step


def _lower_comparison(layout: Layout, state: Any) -> Any:
    """Fingerprints uint32 `[dp, fsdp * tp, 2]` of what each device holds: equal bits, equal ones.

    Two sums over the words of all leaves, one weighted by the place: any single bit that differs
    changes both.
    """
    leaves = [leaf for _, leaf in named_leaves(state)]
    dp = layout.mesh.shape["dp"]

    def local(*parts: Any) -> Any:
        total = jnp.zeros(2, jnp.uint32)
        for number, part in enumerate(parts):
            words = _words(part)
            places = jnp.arange(words.size, dtype=jnp.uint32) * 2 + 1
            sums = jnp.stack([words.sum(dtype=jnp.uint32), (words * places).sum(dtype=jnp.uint32)])
            total = total * jnp.uint32(31) + sums * jnp.uint32(2 * number + 1)
        return total[None]

    def compare(state: State) -> Any:
        parts = [_bits(leaf) for _, leaf in named_leaves(state)]
        spread = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=tuple(leaf.sharding.spec for leaf in leaves),
            out_specs=PartitionSpec(sharding.AXES),
            check_vma=False,
        )
        return spread(*parts).reshape(dp, -1, 2)

    return jax.jit(compare, out_shardings=layout.whole).lower(state)


def _words(values: Any) -> Any:
    """The bits of an array as uint32, flat."""
    kind = values.dtype
    if jnp.issubdtype(kind, jnp.complexfloating):
        return jnp.concatenate([_words(values.real), _words(values.imag)])
    if kind == jnp.bool_:
        return values.astype(jnp.uint32).ravel()
    bits = (jnp.iinfo if jnp.issubdtype(kind, jnp.integer) else jnp.finfo)(kind).bits
    narrow = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return jax.lax.bitcast_convert_type(values, narrow).astype(jnp.uint32).ravel()


def dissenting_ranks(layout: Layout, prints: Any) -> tuple[int, ...]:
    """The ranks whose devices hold other bits than their peers; see `guards.dissenters`."""
    table = np.asarray(prints.addressable_data(0))
    found = dissenters([[tuple(int(v) for v in one) for one in row] for row in table])
    devices = layout.mesh.devices.reshape(table.shape[:2])
    return tuple(sorted({int(devices[place].process_index) for place in found}))


def flip_bit(state: State) -> None:
    """Change one bit of what this process holds of the state, as failing memory does (CPU only)."""
    for piece in pieces_of(state):
        values = np.asarray(piece.values)
        if piece.values.device.platform == "cpu" and values.dtype == np.float32 and values.size:
            ctypes.c_uint32.from_address(values.ctypes.data).value ^= 1 << 20
            return
    raise RuntimeError("no float32 array in memory that could be changed")


def initial_state(task: Task, programs: Programs, seed: int) -> State:
    """The state of step 0: drawn from the seed alone where it lies, or read part by part.

    Raises `TaskError` where the task's own values are not of the form of its state.
    """
    given = dict(task.initial_values())
    leaves = dict(named_leaves(programs.state))
    for name, values in given.items():
        form = [(one.shape, one.dtype) for one in (values, leaves[name])] if name in leaves else []
        if not form or form[0] != form[1]:
            raise TaskError(
                f"initial_values: {name} is {values.dtype}{list(values.shape)}, in the state "
                + (f"{form[1][1]}{list(form[1][0])}" if form else "there is no such leaf")
            )

    def rest(key: Any) -> list[Any]:
        return [leaf for name, leaf in named_leaves(task.init(key)) if name not in given]

    places = [leaf.sharding for name, leaf in leaves.items() if name not in given]
    with jax.set_mesh(programs.layout.mesh):
        drawn = iter(jax.jit(rest, out_shardings=places)(jax.random.key(seed)))
    return jax.tree.unflatten(
        jax.tree.structure(programs.state),
        [
            _place(leaf, functools.partial(_read, given[name])) if name in given else next(drawn)
            for name, leaf in leaves.items()
        ],
    )


def kept(task: Task, tree: Any) -> Any:
    """What must be saved of a state, or of anything of its structure.

    The tree itself; where something is frozen, a flat dict of the other leaves by name.
    """
    leaves = named_leaves(tree)
    if not any(task.frozen(name) for name, _ in leaves):
        return tree
    return {name: leaf for name, leaf in leaves if not task.frozen(name)}


def frozen_leaves(task: Task, programs: Programs) -> dict[str, Any]:
    """The leaves that nobody saves, read and placed.

    Raises `TaskError` for one that is not among the initial values.
    """
    given = task.initial_values()
    found = {}
    for name, leaf in named_leaves(programs.state):
        if task.frozen(name):
            if name not in given:
                raise TaskError(f"initial_values: {name} is frozen, but is not among them")
            found[name] = _place(leaf, functools.partial(_read, given[name]))
    return found


def place_rows(layout: Layout, local: Batch) -> Batch:
    """One global batch out of the rows that each rank holds (numpy)."""
    part, parts = layout.feed

    def place(rows: Any) -> Any:
        rows = np.asarray(rows)
        first, count = part * len(rows), parts * len(rows)

        def own(index: Any) -> Any:
            start, stop, _ = index[0].indices(count)
            return rows[start - first : stop - first]

        return jax.make_array_from_callback((count, *rows.shape[1:]), layout.rows, own)

    return jax.tree.map(place, local)


def place_state(
    programs: Programs, read: Read, frozen: Mapping[str, Any] = MappingProxyType({})
) -> State:
    """A state on the devices; `read` gives what each of ours is to hold, but for what is frozen."""
    return jax.tree.unflatten(
        jax.tree.structure(programs.state),
        [
            frozen[name] if name in frozen else _place(leaf, functools.partial(read, name))
            for name, leaf in named_leaves(programs.state)
        ],
    )


def wanted(programs: Programs) -> dict[str, tuple[Index, ...]]:
    """What this process's devices hold of each leaf."""
    return {
        name: tuple(
            dict.fromkeys(
                index_of(slices, leaf.shape)
                for slices in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
            )
        )
        for name, leaf in ((name, _plain(leaf)) for name, leaf in named_leaves(programs.state))
    }


def to_host(state: State) -> Host:
    """A copy of a state that this process holds in whole; later steps cannot touch it."""

    def copy(leaf: Any) -> Any:
        bits = _bits(leaf)
        if bits.sharding.is_fully_replicated:
            return np.array(bits.addressable_data(0), copy=True)
        values = np.empty(bits.shape, bits.dtype)
        for shard in bits.addressable_shards:
            values[shard.index] = np.asarray(shard.data)
        return values

    return jax.tree.map(copy, state)


def pieces_of(state: State) -> list[Piece]:
    """What this process holds of the state, each part once, in tree order; jax arrays."""
    found = []
    for name, leaf in named_leaves(state):
        bits = _bits(leaf)
        if bits.sharding.is_fully_replicated:
            parts = {whole(bits.shape): bits.addressable_data(0)}
        else:
            parts = {
                index_of(shard.index, bits.shape): shard.data for shard in bits.addressable_shards
            }
        found += [
            Piece(name=name, shape=bits.shape, index=index, values=values)
            for index, values in parts.items()
        ]
    return found


def host_pieces(state: State) -> list[Piece]:
    """`pieces_of` as a copy on the host, that later steps cannot touch."""
    return [replace(piece, values=np.array(piece.values, copy=True)) for piece in pieces_of(state)]


def snapshot_pieces(state: State) -> tuple[list[Piece], bool]:
    """What this process holds, for a snapshot, and whether the next step takes it away.

    On CPU these are views of the state itself, to be copied and dropped before the next step; on
    accelerators they are copies on the device, already on their way to the host.
    """
    pieces = pieces_of(state)
    if all(piece.values.device.platform == "cpu" for piece in pieces):
        return [replace(piece, values=np.asarray(piece.values)) for piece in pieces], True
    copies = [replace(piece, values=jnp.copy(piece.values)) for piece in pieces]
    for piece in copies:
        piece.values.copy_to_host_async()
    return copies, False


def assembly_of(host: Host) -> Assembly:
    """A host copy as pieces to read from."""
    return Assembly(
        Piece(name=name, shape=leaf.shape, index=whole(leaf.shape), values=leaf)
        for name, leaf in named_leaves(host)
    )


def host_shapes(programs: Programs) -> Host:
    """What `to_host` gives for a state of these programs: numpy arrays that cost no memory."""
    return jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), _plain(leaf).dtype), _plain(leaf).shape),
        programs.state,
    )


def _place(target: Any, read: Callable[[Index], Any]) -> Any:
    plain = _plain(target)

    def part(index: Any) -> Any:
        return read(index_of(index, plain.shape))

    placed = jax.make_array_from_callback(plain.shape, plain.sharding, part)
    if plain is not target:
        return jax.random.wrap_key_data(placed, impl=_implementation(target.dtype))
    return placed


def _plain(target: Any) -> Any:
    """The form of a leaf on the host: of random keys, that of their bits."""
    if not jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return target
    bits = jax.eval_shape(jax.random.key_data, target)
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=target.sharding)


def _read(values: Any, index: Index) -> Any:
    return values[_slices(index)]


def _slices(index: Index) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in index)


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


def _abstract_state(task: Task, layout: Layout, seed: int) -> Any:
    tree = jax.eval_shape(lambda key: _only_arrays(task, task.init(key)), jax.random.key(seed))
    leaves = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(layout.mesh, _spec(task, layout, name, leaf)),
        )
        for name, leaf in named_leaves(tree)
    ]
    for axis in ("fsdp", "tp"):
        size = layout.mesh.shape[axis]
        if size > 1 and not any(axis in _axes(leaf.sharding.spec) for leaf in leaves):
            raise SettingsError(
                f"[trainer.mesh] {axis} = {size}: no leaf of the task's state can be spread over "
                f"it (see Task.logical_axes); make {axis} 1 and use dp"
            )
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _only_arrays(task: Task, state: State) -> State:
    """Raise `TaskError` where jax's own error would name no line of the user's."""
    for name, leaf in named_leaves(state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TaskError(
                f"{place_of(task.init)}: {name} is a {type(leaf).__name__}, no array: keep it out "
                "of the state"
            )
    return state


def _axes(spec: PartitionSpec) -> set[str]:
    found: set[str] = set()
    for one in spec:
        found |= {one} if isinstance(one, str) else set(one or ())
    return found


def _spec(task: Task, layout: Layout, name: str, leaf: Any) -> PartitionSpec:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or 0 in leaf.shape:
        return PartitionSpec()
    axes = task.logical_axes(name, tuple(leaf.shape))
    if axes is None:
        return sharding.spread_evenly(layout.mesh, leaf.shape)
    if len(axes) != len(leaf.shape):
        raise TaskError(f"logical_axes names {len(axes)} axes of {name}, {list(leaf.shape)}")
    try:
        return sharding.spec_of(layout.mesh, axes, leaf.shape)
    except KeyError as error:
        known = ", ".join(sharding.RULES)
        raise TaskError(f"logical_axes of {name}: {error} is not among {known}") from None


def _abstract_batch(local: Batch, layout: Layout) -> Any:
    leaves = jax.tree.leaves(local)
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise TaskError("a batch must hold arrays whose first axis is the row")
    _, feeds = layout.feed
    shards = int(layout.mesh.shape["dp"] * layout.mesh.shape["fsdp"])
    if any(len(leaf) * feeds % shards for leaf in leaves):
        raise SettingsError(
            f"[trainer.data] batch_size: {len(leaves[0]) * feeds} rows cannot be split over "
            f"dp x fsdp = {shards} devices; make it a multiple"
        )

    def widen(leaf: Any) -> Any:
        rows = np.asarray(leaf)
        shape = (rows.shape[0] * feeds, *rows.shape[1:])
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
