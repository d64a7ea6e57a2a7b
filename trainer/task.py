"""What a user subclasses to train something of their own.

A task says what is trained; it knows nothing of processes, checkpoints or failures.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from trainer.config import TrainerSettings
from trainer.settings import SettingsError

State = Any
"""A pytree of arrays: all that training changes, random keys and optimizer state included."""

Batch = Any
"""A pytree of arrays whose first axis is the row."""

WEIGHT = "weight"
"""Metric of `evaluate` that says how much its batch counts."""


class TaskError(Exception):
    """The task breaks the contract of `Task`; only its author can help.

    `at`: the function of theirs that does, whose file and line the text then begins with.
    """

    def __init__(self, text: str, *, at: Callable[..., Any] | None = None) -> None:
        self.frame = "" if at is None else place_of(at)
        super().__init__(f"{self.frame}: {text}" if self.frame else text)


def require_json(what: str, value: Mapping[str, Any]) -> None:
    """Raise `TaskError` for what could not be written beside the arrays of a checkpoint."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{what} must be plain JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a task runs. Nothing but `rank` may make ranks differ, and only in their rows."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    generation: int
    config_dir: str
    settings: TrainerSettings
    code_dir: str = ""
    """Where the modules of the user are; "" = in `config_dir`, as everything else of theirs."""

    feed: tuple[int, int] | None = None
    """Which of how many equal parts of a batch's rows this rank feeds; None = part `rank` of
    `world_size`. Ranks that hold parts of one matrix feed the same rows."""
    tick: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """To be called while a long preparation goes on: silence for too long is taken for a hang."""

    @classmethod
    def alone(
        cls,
        settings: TrainerSettings,
        config_dir: str | Path,
        *,
        generation: int = 1,
        feed: tuple[int, int] | None = None,
    ) -> Self:
        """Of the only process that there is."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            node_rank=0,
            generation=generation,
            config_dir=str(config_dir),
            settings=settings,
            feed=feed,
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """The free table `[trainer.options]`."""
        return self.settings.options

    def rows(self, count: int) -> slice:
        """This rank's rows of a global batch of `count` rows.

        Raises `SettingsError` where they cannot be split evenly.
        """
        part, parts = self.feed or (self.rank, self.world_size)
        if count % parts:
            raise SettingsError(
                f"[trainer.data] batch_size = {count} cannot be split over {parts} workers: "
                f"make it a multiple of {parts}"
            )
        share = count // parts
        return slice(part * share, (part + 1) * share)


class Task(ABC):
    """Training, as pure functions of state, batch, seed and step.

    `init`, `train_step` and `evaluate` are traced and compiled once; `batch` and `held_out_batch`
    run on the host for each step. All must give the same result whenever they are called with the
    same arguments: that is what makes a resumed run exact.
    """

    reads_all_settings: ClassVar[bool] = False
    """Whether it reads [trainer.model], [trainer.optimizer] and all of [trainer.data] itself.
    Otherwise what is set there is refused, since it would have no effect."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def start(self) -> None:  # noqa: B027, most tasks have nothing to do here
        """Called once in each worker process, one that stands by included, before all that follows.

        The place for what a process needs only once: a library's set-up, a connection, a warm file.
        """

    @abstractmethod
    def init(self, key: Any) -> State:
        """The state before the first step, drawn from a typed PRNG key."""

    @abstractmethod
    def train_step(self, state: State, batch: Batch) -> tuple[State, Mapping[str, Any]]:
        """The state after one step on a global batch, and metrics with a scalar "loss".

        The returned state has the shapes and dtypes of the one given.
        """

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """This rank's rows (numpy) of the global batch of a step, by seed and step alone."""

    def logical_axes(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """What each axis of a leaf of the state is, by `trainer.compute.sharding.RULES`.

        `name` is its dotted path, such as "params.query" or "optimizer.1.mu.query". None: nobody
        knows, and its longest axis is spread over "fsdp".
        """
        return None

    def initial_values(self) -> Mapping[str, Any]:
        """Leaves of the first state that do not come from `init`, by dotted path.

        Each has a shape, a dtype, and gives numpy arrays for a tuple of slices: it is read part by
        part, never as a whole. `init` still says their shapes.
        """
        return {}

    def frozen(self, name: str) -> bool:
        """Whether a leaf of `initial_values` never changes.

        It is not part of snapshots and checkpoints, and is read from where it came from again.
        """
        return False

    def position(self, step: int) -> Mapping[str, Any]:
        """Where in the data `step` finished steps are, such as the epoch; plain JSON of your own.

        Goes into every snapshot and checkpoint.
        """
        return {}

    def evaluate(self, state: State, batch: Batch) -> Mapping[str, Any]:
        """Metrics with a scalar "loss" on a held-out batch. Optional.

        Each scalar is averaged over the batches and reported as "held_out_" and its name. Where
        they are means over different counts, such as of tokens, "weight" is the batch's count.
        """
        raise NotImplementedError

    def held_out_batch(self, index: int) -> Batch:
        """This rank's rows (numpy) of a held-out batch. Goes with `evaluate`."""
        raise NotImplementedError

    @property
    def evaluates(self) -> bool:
        """Whether the task has an evaluation."""
        return type(self).evaluate is not Task.evaluate

    @property
    def tokens_per_step(self) -> int:
        """What a step consumes over all ranks, for the rate on display; 0 = not known."""
        return 0

    def facts(self) -> Mapping[str, Any]:
        """What is worth recording beside the state: digests of data, baselines. Plain JSON.

        Where a name ends in "_sha256", ranks that do not agree on it are refused.
        """
        return {}


def place_of(function: Callable[..., Any]) -> str:
    """Where a function of the user's is defined: file, line and name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return f"{code.co_filename}:{code.co_firstlineno} {name}" if code else name
