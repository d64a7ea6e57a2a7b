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

from trainer.compute import sharding
from trainer.compute.pieces import Assembly, Index, Piece, Read, as_bytes, index_of, whole
from trainer.compute.replicas import APPLIED, dissenters
from trainer.config import MeshSettings
from trainer.settings import SettingsError
from trainer.task import Batch, State, Task, TaskError

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


def seed_key(seed: int) -> Any:
    """The typed PRNG key of a seed, all 63 bits of it; `jax.random.key` drops all above 32."""
    key = jax.random.key(seed & 0xFFFF_FFFF)
    return jax.random.fold_in(key, seed >> 32) if seed >> 32 else key


def shapes_of(task: Task, layout: Layout, seed: int) -> Shapes:
    """The shapes of the task's own state and batches; traces its `init`, computes nothing."""
    held_out = None
    if task.evaluates:
        if type(task).held_out_batch is Task.held_out_batch:
            text = "a task with evaluate needs held_out_batch too"
            raise TaskError(text, at=task.evaluate)
        held_out = _abstract_batch(task.held_out_batch, layout)
    return Shapes(
        state=_abstract_state(task, layout, seed),
        batch=_abstract_batch(task.batch, layout),
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
                found.update(as_bytes(_bits(array)))
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
    checked = _of_arrays(task.train_step, exact=False)
    result = jax.eval_shape(checked, shapes.state, shapes.batch)
    _check_contract(task, shapes.state, result)
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
            jitted = jax.jit(_checked_evaluation(task), out_shardings=layout.whole)
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
        drawn = iter(jax.jit(rest, out_shardings=places)(seed_key(seed)))
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
        _refuse_overflow(rows)
        first, count = part * len(rows), parts * len(rows)

        def own(index: Any) -> Any:
            start, stop, _ = index[0].indices(count)
            return rows[start - first : stop - first]

        return jax.make_array_from_callback((count, *rows.shape[1:]), layout.rows, own)

    return jax.tree.map(place, local)


def _refuse_overflow(rows: Any) -> None:
    """JAX takes the lower 32 bits of larger integers without a word."""
    kept_as = jax.dtypes.canonicalize_dtype(rows.dtype)
    if kept_as == rows.dtype or rows.dtype.kind not in "iu" or not rows.size:
        return
    for value in (rows.min(), rows.max()):
        if not np.iinfo(kept_as).min <= value <= np.iinfo(kept_as).max:
            raise TaskError(
                f"a batch holds {value}, which {kept_as} does not: set jax_enable_x64 for more bits"
            )


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
    tree = jax.eval_shape(_of_arrays(task.init), seed_key(seed))
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


def _abstract_batch(function: Callable[[int], Batch], layout: Layout) -> Any:
    local = function(0)
    leaves = jax.tree.leaves(local)
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise TaskError("a batch must hold arrays whose first axis is the row", at=function)
    for name, leaf in named_leaves(local):
        if not _is_numeric(np.asarray(leaf).dtype):
            raise TaskError(f"batch: {name} is {np.asarray(leaf).dtype}, no numbers", at=function)
    _, feeds = layout.feed
    shards = int(layout.mesh.shape["dp"] * layout.mesh.shape["fsdp"])
    if any(len(leaf) * feeds % shards for leaf in leaves):
        raise SettingsError(
            f"[trainer.data] batch_size: {len(leaves[0]) * feeds} rows cannot be split over "
            f"dp x fsdp = {shards} devices; make it a multiple"
        )

    def widen(leaf: Any) -> Any:
        shape, dtype = _global_form(leaf, layout)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.rows)

    return jax.tree.map(widen, local)


def _global_form(rows: Any, layout: Layout) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the global batch that a rank's rows are a part of."""
    rows = np.asarray(rows)
    shape = (len(rows) * layout.feed[1], *rows.shape[1:]) if rows.ndim else ()
    return shape, jax.dtypes.canonicalize_dtype(rows.dtype)


def check_batch(
    local: Batch, first: Any, layout: Layout, function: Callable[[int], Batch], index: int
) -> None:
    """Raise `TaskError` for rows of another form than those of the `first` batch (global shapes).

    The compiled step takes no others.
    """
    wanted, found = dict(named_leaves(first)), dict(named_leaves(local))
    if different := sorted(set(wanted) ^ set(found)):
        raise TaskError(f"batch {index}: {different[0]} is not in every batch", at=function)
    for name, leaf in found.items():
        shape, dtype = _global_form(leaf, layout)
        if (shape, dtype) != (wanted[name].shape, wanted[name].dtype):
            raise TaskError(
                f"batch {index}: {name} is {dtype}{list(shape)} over all ranks and was "
                f"{wanted[name].dtype}{list(wanted[name].shape)} in the first batch: all must have "
                "one form; fill up a shorter last batch with rows of the next epoch, or leave it "
                "out",
                at=function,
            )


def _check_contract(task: Task, state: Any, result: Any) -> None:
    at = task.train_step
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TaskError("train_step must return (state, metrics)", at=at)
    after, metrics = result
    _check_metrics(metrics, "train_step", at)
    before = dict(named_leaves(state))
    then = dict(named_leaves(after))
    if changed := sorted(set(before) ^ set(then)):
        text = f"train_step must keep the state's structure: {changed[0]} is not in both"
        raise TaskError(text, at=at)
    for name, leaf in before.items():
        if (leaf.shape, leaf.dtype) != (then[name].shape, then[name].dtype):
            raise TaskError(
                f"train_step must keep the state's shapes: {name} was {leaf.dtype}"
                f"{list(leaf.shape)} and became {then[name].dtype}{list(then[name].shape)}",
                at=at,
            )


def _check_metrics(metrics: Any, what: str, at: Callable[..., Any]) -> None:
    """Raise `TaskError` for metrics that are no flat mapping to arrays with a real, scalar loss."""
    loss: Any = metrics.get("loss") if isinstance(metrics, Mapping) else None
    if loss is None or not _is_scalar(loss):
        raise TaskError(f'the metrics of {what} must be a mapping with a scalar "loss"', at=at)
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TaskError(f"{what}: the name of metric {name!r} is no text", at=at)
        if not hasattr(value, "dtype") and not isinstance(value, bool | int | float):
            raise TaskError(
                f"{what}: metric {name} is a {type(value).__name__}, not an array; metrics are "
                "scalars in a flat mapping",
                at=at,
            )
        if _is_scalar(value) and not _is_real(value):
            raise TaskError(f"{what}: metric {name} is {value.dtype}, no real number", at=at)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) in (None, ())


def _is_real(value: Any) -> bool:
    if not hasattr(value, "dtype"):
        return True
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _is_numeric(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


def _checked_evaluation(task: Task) -> Callable[[State, Batch], Mapping[str, Any]]:
    @functools.wraps(task.evaluate)
    def evaluate(state: State, batch: Batch) -> Mapping[str, Any]:
        metrics = _of_arrays(task.evaluate, exact=False)(state, batch)
        _check_metrics(metrics, "evaluate", task.evaluate)
        return dict(metrics)

    return evaluate


def _of_arrays(function: Callable[..., Any], *, exact: bool = True) -> Callable[..., Any]:
    """The function, to be traced; raises `TaskError` for what it returns and JAX cannot keep.

    Unless `exact`, JAX may keep it with fewer bits.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        for name, leaf in named_leaves(result):
            if flaw := flaw_of(leaf, traced=True, exact=exact):
                if isinstance(result, tuple):
                    place, _, rest = name.partition(".")
                    name = f"{'metrics' if place == '1' else 'state'}.{rest}"
                raise TaskError(f"{name} {flaw}", at=function)
        return result

    return call


def flaw_of(leaf: Any, *, traced: bool = False, exact: bool = True) -> str:
    """Why JAX cannot keep a leaf as it is; "" where it can.

    `traced`: it comes out of a traced function, where a Python float never has more bits than JAX
    gives it. In a state that a loop hands over it has 64 until the first restart. Unless `exact`,
    JAX may keep fewer bits of an array.
    """
    if isinstance(leaf, jax.Array):
        return ""
    if not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        return (
            f"is a {type(leaf).__name__}, no array: keep it out of the state "
            "(nnx.split, equinox.partition)"
        )
    own = np.asarray(leaf).dtype
    if not _is_numeric(own):
        return f"is {own}, which is not a number that JAX knows"
    kept_as = jax.dtypes.canonicalize_dtype(own)
    if kept_as == own:
        return ""
    if type(leaf) is int:
        fits = np.iinfo(kept_as).min <= leaf <= np.iinfo(kept_as).max
        return "" if fits else f"is {leaf}, which {kept_as} does not hold; {_WIDER}"
    if not exact or (traced and type(leaf) in (float, complex)):
        return ""
    return f"is {own}, of which JAX keeps {kept_as}: convert it yourself; {_WIDER}"


_WIDER = 'set jax_enable_x64 for more bits, or keep it out of the state ("position" takes JSON)'


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves in tree order, each with its dotted path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in flat]
