"""A training loop of the user's own: `task = "module:function"`, called with a `Worker`.

The function drives itself; between two of its steps happens what happens between two steps of a
`Task`: metrics, checkpoints, snapshots, orders. Knows nothing of Ray, Redis or the supervisor.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from trainer.compute import step
from trainer.config import TrainerSettings
from trainer.host.environment import describe_environment
from trainer.state import checkpoint
from trainer.task import Context, State, Task, TaskError, require_json
from trainer.training.consistency import open_ledger
from trainer.training.find_task import find
from trainer.training.guards import NumbersDiverged
from trainer.training.task_loop import Finish, ModelTrainer, Ready, StepReport
from trainer.wire.spec import RestorePoint

PHASES = ("evaluate", "checkpoint", "restore", "compile")
"""What a function may say that it is doing, apart from its steps."""


class Stopped(BaseException):
    """Ends the user's function between two steps, as an order wanted it: no error of anybody's."""


class Worker:
    """What a training function gets: its place in the world, and whom to tell what it does.

    Call `restore` once, then go through `steps`; in each step `report` its metrics and hand over
    the state with `checkpoint`. All ranks run the same function and say the same, so that they can
    be stopped, saved and resumed together; only `rank` differs, and the rows that it feeds.
    """

    def __init__(self, loop: FreeLoop) -> None:
        self._loop = loop

    @property
    def rank(self) -> int:
        """Of `world_size`, from 0."""
        return self._loop.context.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._loop.context.world_size

    @property
    def settings(self) -> TrainerSettings:
        """The table `[trainer]`; `settings.seed`, `settings.steps`, `settings.data.batch_size`."""
        return self._loop.context.settings

    @property
    def options(self) -> Mapping[str, Any]:
        """The free table `[trainer.options]`."""
        return self._loop.context.options

    @property
    def mesh(self) -> Mesh:
        """All devices of all ranks, with the axes "dp", "fsdp" and "tp" of `[trainer.mesh]`."""
        return self._loop.layout.mesh

    @property
    def step(self) -> int:
        """How many steps are finished; before `steps`, where it will begin."""
        return self._loop.done

    @property
    def position(self) -> Mapping[str, Any]:
        """What `checkpoint` was given as `position` in the state that was restored."""
        return self._loop.position

    def rows(self, count: int) -> slice:
        """This rank's rows of a global batch of `count` rows."""
        return self._loop.context.rows(count)

    def place(self, rows: Any) -> Any:
        """One global batch (jax) out of the rows that each rank holds (a pytree of numpy)."""
        return step.place_rows(self._loop.layout, rows)

    def restore(self, state: State, *, warm_up: Callable[[State], Any] | None = None) -> State:
        """The state to go on with: the one of the restore point, or at the first start `state`.

        Arrays come back global: as they were where they lie on `mesh` already, else whole on all
        devices. Raises `TaskError` where what was saved is of another form.

        A process that stands by waits in here, with all that comes before it done. It calls
        `warm_up` first, with a copy of `state` and for nothing but what is compiled by that.
        """
        return self._loop.take_up(state, warm_up)

    def steps(self) -> Iterator[int]:
        """The steps that are left, by index from 0; what is between two of them happens here.

        Leave it by `break` to end training early, on all ranks in the same step; that one counts if
        anything was reported or handed over in it.
        """
        return self._loop.steps()

    def report(self, **metrics: Any) -> None:
        """Scalars of this step: `loss` is shown, `held_out_loss` too, others go to metrics.jsonl.

        Waits until they are computed. All ranks report the same names.
        """
        self._loop.note(metrics)

    def checkpoint(
        self, state: State, *, position: Mapping[str, Any] | None = None, now: bool = False
    ) -> None:
        """Hand over the state after this step; best in every step, since it costs only when due.

        After the step it goes to the disk every `checkpoint.every_steps`, or `now`; into shared
        memory as `recovery.snapshot_every_steps` wants it; and wherever an order to stop wants it.
        `position` is JSON of your own that lies beside it, such as the epoch.
        """
        self._loop.hand_over(state, position, now=now)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that what follows is no step: "evaluate", "checkpoint", "restore" or "compile".

        Each has a deadline of its own, and does not count as time of the step.
        """
        with self._loop.aside(name):
            yield


class _Blank(Task):
    """Stands where the rest of the trainer expects a task; a free loop has none."""

    def init(self, key: Any) -> State:
        raise NotImplementedError

    def train_step(self, state: State, batch: Any) -> tuple[State, Mapping[str, Any]]:
        raise NotImplementedError

    def batch(self, step: int) -> Any:
        raise NotImplementedError


class FreeLoop(ModelTrainer):
    """Calls the user's function, and does what is between its steps.

    Where a `Task` is compiled ahead and loaded with its state, here only the function knows what
    to do: a generation that stands by calls it, and waits in its `restore`.
    """

    position: Mapping[str, Any] = {}  # replaced, never written to

    def build(self) -> None:
        """Import the module of the function: all that can be done without calling it."""
        found = find(self._context)
        assert not isinstance(found, type), "a task of its own class is driven by `ModelTrainer`"
        self._function: Callable[[Worker], Any] = found
        self._task = _Blank(self._context)
        self._facts = {}
        self._code = self._compare_code()
        self._environment = describe_environment()
        self._beat.enter("compile")
        threading.Thread(target=checkpoint.import_orbax, name="import", daemon=True).start()
        self._is_restored = False
        self._handed: State = None
        self._saved_at = -1
        self._save_now = False
        self._metrics_now: dict[str, float] = {}
        self._index: int | None = None
        self._started = 0.0
        self._aside_s = 0.0
        self._aside_since: float | None = None
        self._first = True
        self._end: BaseException | None = None

    @property
    def runs_ahead(self) -> bool:
        """Whether the function may be called, up to its `restore`, while another one trains.

        Not on accelerators, whose memory belongs to those that train.
        """
        return bool(self._layout.mesh.devices.flat[0].platform == "cpu")

    def warm_up(self) -> None:
        """Have the function compile what it can, on a copy of its first state."""
        if self._warm_up is not None:
            self._warm_up(jax.tree.map(_copy, self._spread(self._fresh)))
            self._beat.tick()

    def follow(
        self,
        start: Callable[[], Ready],
        on_ready: Callable[[Ready], None],
        on_step: Callable[[StepReport], bool],
    ) -> Finish | None:
        """Call the function; None where `on_step` wanted it to stop, between two steps.

        `start` is called when the form of its state is known: it waits for its turn, if need be,
        and ends with `restore`.

        Raises `TaskError` where the function breaks the contract, and whatever it raises.
        """
        self._start, self._on_ready, self._on_step = start, on_ready, on_step
        self._ledger = open_ledger(self._context.rank, self._context.world_size)
        try:
            self._function(Worker(self))
            if self._end is not None:  # which the function caught
                raise self._end
            if self._index is not None:  # it left its loop by `break`
                self._end_last()
        except BaseException as error:
            if isinstance(self._end or error, Stopped):
                return None
            raise
        self._check_end()
        if self._ledger is not None:
            self._beat.enter("wait")  # for the others, who may have more to do after their steps
            self._ledger.finish(self._progress.done, self._beat.tick)
        return self.finish()

    @property
    def holds_state(self) -> bool:
        """Whether the state of the finished step was handed over: only there can it stop."""
        return self._handed is not None

    # What a `Worker` passes on

    @property
    def context(self) -> Context:
        """Where it runs."""
        return self._context

    @property
    def layout(self) -> step.Layout:
        """Where arrays lie."""
        return self._layout

    @property
    def done(self) -> int:
        """Finished steps."""
        return self._progress.done

    def take_up(self, like: State, warm_up: Callable[[State], Any] | None = None) -> State:
        """See `Worker.restore`."""
        if self._is_restored:
            raise TaskError("worker.restore was called twice; call it once, before worker.steps")
        arrays = _arrays(like)
        shapes = jax.tree.unflatten(
            jax.tree.structure(arrays),
            [self._shape(name, leaf) for name, leaf in step.named_leaves(arrays)],
        )
        self._shapes = dict(step.named_leaves(shapes))
        self._programs = step.Programs(
            layout=self._layout, state=shapes, batch_rows=0, train=_no_step, evaluate=None
        )
        self._blank, self._wanted = step.host_shapes(self._programs), step.wanted(self._programs)
        self._fresh, self._warm_up = arrays, warm_up
        self._ready = self._start()
        self._fresh = None
        self._is_restored, self._saved_at = True, self._progress.done
        self._beat.enter("compile")
        return self._state

    def steps(self) -> Iterator[int]:
        """See `Worker.steps`."""
        if not self._is_restored:
            raise TaskError("call worker.restore(state) before worker.steps()")
        if self._end is not None:
            raise self._end
        self._on_ready(self._ready)
        try:
            while self._progress.done < self._settings.steps:
                self._begin_step(self._progress.done)
                yield self._progress.done
                self._end_step()
        except GeneratorExit:  # the function left by `break`
            raise
        except BaseException as error:  # which stands, whatever the function makes of it
            self._end = error
            raise

    def note(self, metrics: Mapping[str, Any]) -> None:
        """See `Worker.report`."""
        if self._index is None:
            raise TaskError("worker.report belongs inside of a step of worker.steps()")
        self._speak()
        for name, value in metrics.items():
            self._metrics_now[name] = _scalar(name, value)
        self._beat.tick()

    def hand_over(self, state: State, position: Mapping[str, Any] | None, *, now: bool) -> None:
        """See `Worker.checkpoint`."""
        if self._index is None:
            raise TaskError("worker.checkpoint belongs inside of a step of worker.steps()")
        if position is not None:
            require_json("worker.checkpoint: position", dict(position))
        self._speak()
        arrays = _arrays(state)
        self._check_form(arrays)
        self._handed, self._save_now = arrays, self._save_now or now
        if position is not None:
            self.position = dict(position)

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """See `Worker.phase`."""
        if name not in PHASES:
            raise TaskError(f"worker.phase({name!r}): it must be one of {', '.join(PHASES)}")
        before, is_outermost = self._beat.phase, self._aside_since is None
        if is_outermost:
            self._aside_since = time.monotonic()
        self._beat.enter(name)
        try:
            yield
        except BaseException as error:
            self._beat.blame(error)
            raise
        finally:
            if is_outermost and self._aside_since is not None:
                since = max(self._aside_since, self._started)
                self._aside_s += time.monotonic() - since
                self._aside_since = None
            self._beat.enter(before)

    # What happens between two steps

    def _begin_step(self, index: int) -> None:
        self._handed = None
        self._save_now, self._metrics_now, self._aside_s = False, {}, 0.0
        self._index, self._has_spoken = index, False
        if self._ledger is not None:
            self._ledger.begin(index)
        # Whatever the function runs for the first time is compiled then, and that takes longer.
        self._beat.enter("compile" if self._first else "step", index)
        self._first = False
        self._started = time.monotonic()

    def _speak(self) -> None:
        """The first word of a step: it has been done, and the state before it is not kept."""
        self._has_spoken, self._state = True, None

    def _end_last(self) -> None:
        """Of a step that was left without a word nothing was done: the one before it was the last.

        Unless the function has done away with the state before it, without handing over another.
        """
        if self._has_spoken:
            self._end_step()
        elif any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._state = None

    def _end_step(self) -> None:
        index = self._index
        assert index is not None
        self._index, self._state = None, self._handed
        report = self._sum_up(index, time.monotonic() - self._started - self._aside_s)
        if self._ledger is not None:
            self._ledger.end(index, self._metrics_now)
        if self._leads:
            self._write_metrics(report)
        self._check_loss(index)
        if self.holds_state:
            if self._is_due(report.step_s):
                self.save()
                self._saved_at = self._progress.done
        elif self._progress.done - self._saved_at > self._pace.every_steps:
            raise TaskError(
                f"{self._progress.done - self._saved_at} steps without worker.checkpoint(state), "
                f"though one is due every {self._pace.every_steps} (checkpoint.every_steps): call "
                "it in every step"
            )
        if self._on_step(report):
            raise Stopped
        if self.holds_state:
            self._snapshot(report.step_s)
        self._agree()

    def _check_loss(self, index: int) -> None:
        """Its batches are its own: none can be left out here, so that all policies are a stop."""
        if "loss" not in self._metrics_now:
            return
        anomaly = self._guard.judge(self._metrics_now)
        if anomaly is not None:
            raise NumbersDiverged(index, index, replace(anomaly, policy="stop"))

    def _is_due(self, step_s: float) -> bool:
        done = self._progress.done
        due = self._pace.due(done, step_s)
        if self._pace.is_auto:
            return self._save_now or due
        every = self._pace.every_steps
        return self._save_now or done // every > self._saved_at // every

    def _sum_up(self, index: int, seconds: float) -> StepReport:
        loss = self._metrics_now.get("loss")
        held_out = self._metrics_now.get("held_out_loss")
        self._progress.done = index + 1
        self._progress.loss = loss
        rate = self._metrics_now.get("tokens", 0.0) / seconds
        self._beat.loss, self._beat.step_s, self._beat.tokens_per_s = loss, seconds, rate
        if held_out is not None:
            self._progress.held_out_loss = self._beat.held_out_loss = held_out
        return StepReport(
            step=index,
            loss=math.nan if loss is None else loss,
            held_out_loss=held_out,
            step_s=seconds,
            tokens_per_s=rate,
            at=time.time(),
            metrics={
                name: value for name, value in self._metrics_now.items() if name not in _SHOWN
            },
        )

    def _check_end(self) -> None:
        """What is left to be said where the function has returned."""
        done, name = self._progress.done, self._settings.task
        if not self._is_restored:
            raise TaskError(f"{name} ended without worker.restore(state), and trained nothing")
        if self._first and done < self._settings.steps:
            raise TaskError(f"{name} ended without a step; go through worker.steps()")
        if self._state is None:
            raise TaskError(
                f"{name} ended after step {done} without worker.checkpoint(state) of that step, "
                "and what was trained would be lost: call it in every step"
            )

    # The state

    def _shape(self, name: str, leaf: Any) -> Any:
        """Form and place of a leaf: as it lies on the mesh, else whole on all devices."""
        place = leaf.sharding
        if not (isinstance(place, NamedSharding) and place.mesh == self._layout.mesh):
            if not leaf.is_fully_replicated:
                raise TaskError(f"state: {name} is spread over another mesh than worker.mesh")
            place = self._layout.whole
        if self._layout.parts > 1 and "dp" in _axes(place):
            raise TaskError(
                f'state: {name} is spread over "dp", whose members are replicas: use "fsdp" and '
                '"tp" of [trainer.mesh]'
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def _spread(self, state: State) -> State:
        """Every leaf where its form says; those that are there already stay."""
        leaves = dict(step.named_leaves(state))
        moved = {
            name: shape
            for name, shape in self._shapes.items()
            if leaves[name].sharding != shape.sharding
        }
        hosts = {name: np.asarray(_bits(leaves[name]).addressable_data(0)) for name in moved}
        part = replace(self._programs, state=moved)
        placed = step.place_state(
            part, lambda name, index: hosts[name][tuple(slice(*one) for one in index)]
        )
        whole = {**leaves, **placed}
        return jax.tree.unflatten(jax.tree.structure(state), [whole[name] for name in leaves])

    def _check_form(self, state: State) -> None:
        """A state of another form could be saved, but never be restored."""
        leaves = dict(step.named_leaves(state))
        if different := sorted(set(leaves) ^ set(self._shapes)):
            raise TaskError(
                f"worker.checkpoint: {different[0]} is not both in this state and in the one that "
                "worker.restore was given"
            )
        for name, leaf in leaves.items():
            wanted = self._shapes[name]
            if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
                raise TaskError(
                    f"worker.checkpoint: {name} is {leaf.dtype}{list(leaf.shape)}, in the state "
                    f"that worker.restore was given {wanted.dtype}{list(wanted.shape)}"
                )
            place = leaf.sharding
            if place == wanted.sharding or leaf.is_fully_replicated:
                continue
            if not place.is_equivalent_to(wanted.sharding, leaf.ndim):
                raise TaskError(
                    f"worker.checkpoint: {name} has come to lie as {place}, in the state that "
                    f"worker.restore gave as {wanted.sharding}: jax.jit has out_shardings for that"
                )

    def _restore(self, point: Path | RestorePoint | None) -> tuple[str, ...]:
        if point is not None:
            return super()._restore(point)
        self._forget()
        self.position = {}
        self._state = self._spread(self._fresh)
        return ()

    def _compare(self, meta: Mapping[str, Any]) -> tuple[str, ...]:
        self.position = dict(meta.get("position", {}))
        return super()._compare(meta)

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), "position": dict(self.position)}


_SHOWN = ("loss", "held_out_loss", "tokens")
_RESERVED = ("generation", "step", "step_s", "tokens_per_s", "at")


def _no_step(state: State, batch: Any) -> Any:
    raise AssertionError("a free loop steps by itself")


def _arrays(state: State) -> State:
    """The same with jax arrays for numbers and numpy arrays.

    Raises `TaskError` for what is none, and for what would lose bits that way.
    """
    leaves = step.named_leaves(state)
    if not leaves:
        raise TaskError("a state is a pytree of arrays, and this one holds none")
    return jax.tree.unflatten(
        jax.tree.structure(state), [_array(name, leaf) for name, leaf in leaves]
    )


def _array(name: str, leaf: Any) -> Any:
    if flaw := step.flaw_of(leaf):
        raise TaskError(f"state: {name} {flaw}")
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _copy(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.clone(leaf)
    return jnp.copy(leaf)


def _bits(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _axes(place: NamedSharding) -> set[str]:
    found: set[str] = set()
    for one in place.spec:
        found |= {one} if isinstance(one, str) else set(one or ())
    return found


def _scalar(name: str, value: Any) -> float:
    """Blocks until it is computed."""
    if name in _RESERVED:
        raise TaskError(f"worker.report: {name} is the name of something else; choose another")
    if isinstance(value, jax.Array) and value.ndim == 0 and value.is_fully_replicated:
        return float(value.addressable_data(0))
    if np.ndim(value) == 0 and isinstance(value, int | float | np.number | np.bool_ | np.ndarray):
        return float(value)
    raise TaskError(f"worker.report: {name} must be a scalar, the same on all devices")


def trainer_for(
    context: Context, layout: step.Layout | None = None, **arguments: Any
) -> ModelTrainer:
    """What trains the task that the settings name, with the arguments of `ModelTrainer`.

    Imports the user's module, and raises what `trainer.training.find_task.find` does.
    """
    kind = ModelTrainer if isinstance(find(context), type) else FreeLoop
    trainer = kind(context=context, **arguments)
    trainer.connect(layout)
    return trainer
