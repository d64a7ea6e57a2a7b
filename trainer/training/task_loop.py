"""The training loop: a generator of step reports that someone outside drives.

Knows the task, the compiled programs, checkpoints and its beat; nothing of Ray, Redis or orders.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.compute import executable, step
from trainer.compute.pieces import Assembly, extent, form
from trainer.config import CheckpointSettings
from trainer.host.environment import describe_environment, differences
from trainer.host.tolerant_output import LineFile
from trainer.state import checkpoint, snapshot
from trainer.state.checkpoint import Committed, SaveFailed
from trainer.state.checkpoint_interval import Pace
from trainer.state.snapshot_writer import SnapshotContext, SnapshotOutcome, SnapshotWriter
from trainer.task import WEIGHT, Context, State, Task, TaskError, require_json
from trainer.training import agreement, code_digests
from trainer.training.find_task import load_task
from trainer.training.guards import BatchSkipped, Guard, NumbersDiverged, ReplicasDiverged
from trainer.training.tensorboard import Board
from trainer.wire.heartbeat import Beat
from trainer.wire.spec import DEFAULT_FAILURE_EVERY_S, RestorePoint, Snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """All is compiled and loaded; `step` is the first to be done.

    `differences` names what is not as it was when the restore point was saved.
    """

    step: int
    environment: Mapping[str, Any]
    differences: tuple[str, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step; `step_s` without evaluation and saving, `at` in seconds since 1970.

    `metrics` are the task's other scalars.
    """

    step: int
    loss: float
    held_out_loss: float | None
    step_s: float
    tokens_per_s: float
    at: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Where training ended; `step` counts the finished steps, losses are the last known."""

    step: int
    params_digest: str
    loss: float | None
    held_out_loss: float | None
    facts: Mapping[str, Any]


Skips = Sequence[tuple[int, int]]

_AGREED_EARLY, _AGREED_EVERY = (8, 16, 32), 64
"""At which of its steps a generation agrees on how often "auto" takes snapshots in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsChanged:
    """`why` no line can be written to metrics.jsonl; "" when all of them are there again."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """What "auto" makes of the cost of a save: one every so many steps."""

    every_steps: int
    cost_s: float


Outcome = (
    Committed | SaveFailed | SnapshotOutcome | MetricsChanged | BatchSkipped | CheckpointInterval
)

LAST_SAVE_PATIENCE_S = 600.0
_LAST_SAVE_PAUSES_S = (1.0, 60.0)  # the first, the longest; doubled in between


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What changes with each step besides the state."""

    done: int = 0
    loss: float | None = None
    held_out_loss: float | None = None


class ModelTrainer:
    """Trains the task of the settings from a restore point (a path: a checkpoint), or the seed.

    Call `connect()` and `prepare()` once, then drive `run()`; between two of its reports nothing
    is in flight but a save. Whoever stands by calls `build()` and `warm_up()`, and `restore()` when
    its time has come. `skips` are (step, batches left out before it and all later ones). Rank 0
    writes metrics, the ranks of one replica checkpoints, those on a node snapshots; `on_outcome`
    hears of these, from another thread too.
    """

    def __init__(
        self,
        *,
        context: Context,
        checkpoints: CheckpointSettings,
        job_dir: Path,
        beat: Beat,
        restore_from: Path | RestorePoint | None,
        on_outcome: Callable[[Outcome], None],
        snapshots: Snapshots | None = None,
        executables: Path | None = None,
        run: int = 0,
        skips: Skips = (),
        failure_every_s: float = DEFAULT_FAILURE_EVERY_S,
    ) -> None:
        self._context, self._settings = context, context.settings
        self._pace = Pace(checkpoints.every_steps, failure_every_s)
        self._skips = tuple(skips)
        self._guard = Guard(self._settings.guards)
        self._agreed_step = self._told_pace = 0
        self._board: Board | None = None
        self._job_dir, self._beat, self._restore_from = job_dir, beat, restore_from
        self._on_outcome = on_outcome
        self._executables, self._run = executables, run
        self._program, self._is_traced = "", True
        self._snapshots = snapshots
        self._writer: SnapshotWriter | None = None
        self._saver: checkpoint.Saver | None = None
        self._leads = context.rank == 0
        self._steps_here = 0
        self._metrics = LineFile(job_dir / "metrics.jsonl", self._metrics_changed)
        self._progress = _Progress()
        self._state: State = None
        self._frozen: dict[str, Any] = {}

    def _metrics_changed(self, why: str) -> None:
        self._on_outcome(MetricsChanged(why=why))

    @property
    def holds_state(self) -> bool:
        """Whether it can be saved after the step that it is at; see `FreeLoop`."""
        return True

    def connect(self, layout: step.Layout | None = None) -> None:
        """Find all devices and connect this rank with the others, if nobody did; waits for them."""
        self._layout = layout or step.make_layout(self._settings.mesh)
        self._context = replace(self._context, feed=self._layout.feed)

    def prepare(self) -> Ready:
        """Load the task, compile, and load the starting state."""
        self.build()
        return self.restore(self._restore_from)

    def build(self) -> None:
        """Load the task and compile: all that can be done without a state."""
        self._task: Task = load_task(self._context)
        self._task.start()
        self._facts = dict(self._task.facts())
        require_json("facts", self._facts)
        require_json("position", dict(self._task.position(0)))
        self._code = self._compare_code()
        self._environment = describe_environment()
        self._beat.enter("compile")
        # Beside the compilation; whoever needs it first waits for the rest of the import.
        threading.Thread(target=checkpoint.import_orbax, name="import", daemon=True).start()
        self._programs = self._load_or_compile()
        self._blank = step.kept(self._task, step.host_shapes(self._programs))
        places = step.wanted(self._programs)
        self._wanted = {name: places[name] for name, _ in step.named_leaves(self._blank)}

    def _compare_code(self) -> Mapping[str, str]:
        """Digests of the user's modules, once all ranks are found to have the same, and data."""
        code = code_digests.digests_of(self._settings.task)
        agreement.compare_over_ranks(
            {**self._facts, agreement.CODE: code_digests.digest_of(code)},
            rank=self._context.rank,
            world_size=self._context.world_size,
            tick=self._beat.tick,
        )
        return code

    def _load_or_compile(self) -> step.Programs:
        shapes = step.shapes_of(self._task, self._layout, self._settings.seed)
        self._shapes_traced = shapes
        if self._executables is None:
            lowered = step.lower(self._task, self._layout, shapes)
            self._program = lowered.digest()
            return lowered.compile()
        described = {"environment": self._environment, "facts": self._facts}
        chosen = executable.choose(
            self._executables, self._task, self._layout, shapes, described, self._run
        )
        self._program, self._is_traced = chosen.digest, chosen.traced
        agreement.compare_over_ranks(
            {agreement.PROGRAM: self._program},
            rank=self._context.rank,
            world_size=self._context.world_size,
            tick=self._beat.tick,
            subject="programs",
        )
        return chosen.programs

    @property
    def may_retrace(self) -> bool:
        """Whether its program was loaded without a trace; a trace may give another one by now."""
        return not self._is_traced

    def retrace(self) -> str:
        """Trace again, for comparison alone, and say what differs; "" if nothing does.

        Raises what the task raises.
        """
        now = step.lower(self._task, self._layout, self._shapes_traced).digest()
        if now == self._program:
            return ""
        return (
            f"traced program: {self._program[:12]} in this run, {now[:12]} by now, since it reads "
            "something else while it is traced (a file, a variable); it counts from the next start"
        )

    def warm_up(self) -> None:
        """Run a step on a state of zeros and forget it: what a first step does once is then done.

        Not on accelerators, whose memory belongs to those that train.
        """
        if self._layout.mesh.devices.flat[0].platform != "cpu":
            return
        blank = dict(step.named_leaves(step.host_shapes(self._programs)))
        state = step.place_state(
            self._programs, lambda name, index: np.zeros(extent(index), blank[name].dtype)
        )
        batch = step.place_rows(self._layout, self._task.batch(0))
        _, metrics = self._programs.step(state, batch)
        _number(metrics["loss"])
        self._beat.tick()
        self._frozen = step.frozen_leaves(self._task, self._programs)
        self._beat.tick()

    def skip(self, skips: Skips) -> None:
        """Which batches are left out, before a restore; see the class."""
        self._skips = tuple(skips)

    def restore(self, point: Path | RestorePoint | None) -> Ready:
        """Load the starting state; everything but the steps is done then. May be called again.

        Raises `CheckpointRejected` or `SnapshotRejected` where it must not be used.
        """
        self._beat.enter("restore")
        changed = self._restore(point)
        self._agreed_step = self._progress.done
        self._pace.start(self._progress.done)
        self._start_saver()
        return Ready(
            step=self._progress.done,
            environment=self._environment,
            differences=changed,
            facts=self._facts,
        )

    def _start_saver(self) -> None:
        parts = self._layout.parts
        if self._context.rank < parts and self._saver is None:
            self._saver = checkpoint.Saver(
                self._job_dir,
                self._context.generation,
                self._report_save,
                part=self._context.rank,
                parts=parts,
            )
            self._saver.on_progress = self._beat.tick

    def _report_save(self, outcome: Committed | SaveFailed) -> None:
        """With the last step on which all replicas agreed, for whoever decides what is kept."""
        if isinstance(outcome, Committed) and self._programs.compare is not None:
            outcome = replace(outcome, agreed_step=self._agreed_step)
        self._on_outcome(outcome)

    def run(self) -> Iterator[StepReport]:
        """Do the steps that are left; yields after each, when its line and its save are on the way.

        The metrics of a step are written before its checkpoint: no restored run lacks a line.
        """
        while self._progress.done < self._settings.steps:
            report = self._advance(self._progress.done)
            yield report
            self._snapshot(report.step_s)
            self._agree()

    def _advance(self, index: int) -> StepReport:
        """A step, and what belongs to it."""
        try:
            report = self._step(index)
            self._judge(report)
            if self._evaluation_due(index):
                report = self._evaluate(report)
        except StopIteration as error:  # which would end `run` as if all were done, or as our bug
            raise TaskError(
                f"step {index}: an iterator of the task has come to its end (StopIteration); "
                "batch(step) must give rows for every step"
            ) from error
        if self._leads:
            self._write_metrics(report)
        if self._pace.due(self._progress.done, report.step_s):
            self.save()
        return report

    def _judge(self, report: StepReport) -> None:
        """Raise, on all ranks alike, if the state is not worth keeping after this step.

        `NumbersDiverged` or `ReplicasDiverged`; the step's line is written then, and shows why.
        """
        anomaly = self._guard.judge({"loss": report.loss, **report.metrics})
        if anomaly is not None and anomaly.policy == "skip":
            self._on_outcome(
                BatchSkipped(step=report.step, metric=anomaly.metric, value=anomaly.value)
            )
        elif anomaly is not None:
            if self._leads:
                self._write_metrics(report)
            raise NumbersDiverged(report.step, self._batch_of(report.step), anomaly)
        every = self._settings.guards.compare_every_steps
        if self._programs.compare is not None and self._progress.done % every == 0:
            self._compare_replicas(self._programs.compare)

    def _compare_replicas(self, compare: Callable[[State], Any]) -> None:
        ranks = step.dissenting_ranks(self._layout, compare(self._state))
        done = self._progress.done
        if ranks:
            named = ", ".join(map(str, ranks))
            why = f"the parameters of rank {named} are not those of the other replicas"
            raise ReplicasDiverged(done - 1, self._agreed_step, ranks, why)
        self._agreed_step = done

    def _batch_of(self, index: int) -> int:
        """The place in the data of a step's batch."""
        shift = 0
        for first, count in self._skips:
            shift = count if index >= first else shift
        return index + shift

    def flip_bit(self) -> None:
        """Damage the state of this rank, for a drill."""
        step.flip_bit(self._state)

    def save(self, *, wait: bool = False) -> int:
        """Save the state as it is, in the background unless told to wait; the number of steps.

        Raises `NotSaved` where it waits and the state is not on the disk after that.
        """
        done = self._progress.done
        self._beat.enter("checkpoint")
        began = time.monotonic()
        if self._saver is not None:
            hold = step.to_host if self._layout.parts == 1 else step.host_pieces
            self._saver.save(done, hold(self._kept()), self._meta())
            if wait and self._board is not None:
                self._board.close()
                self._board = None
            if wait:
                self._saver.require(done)
        self._pace.saved(done, time.monotonic() - began)
        self._tell_pace()
        return done

    def _tell_pace(self) -> None:
        """What "auto" comes to, when it has changed by more than noise."""
        now = self._pace.every_steps
        if (
            self._leads
            and self._pace.is_auto
            and not 0.8 <= now / (self._told_pace or 1e-9) <= 1.25
        ):
            self._told_pace = now
            self._on_outcome(CheckpointInterval(every_steps=now, cost_s=self._pace.cost_s))

    def finish(self) -> Finish:
        """Save the final state, wait for it, and sum up.

        A disk that is full then may be given room: the state is still here, so that is waited for.
        """
        give_up_at = time.monotonic() + LAST_SAVE_PATIENCE_S
        pause_s, longest_s = _LAST_SAVE_PAUSES_S
        while True:
            try:
                done = self.save(wait=True)
                break
            except checkpoint.NotSaved as error:
                if not error.may_pass or time.monotonic() >= give_up_at:
                    raise
            self._wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        self._metrics.flush()  # where there was no room for them either
        return Finish(
            step=done,
            params_digest=self._digest(done),
            loss=self._progress.loss,
            held_out_loss=self._progress.held_out_loss,
            facts=self._facts,
        )

    def _digest(self, done: int) -> str:
        """Of a state in parts only rank 0 says it, out of what all have saved."""
        if self._layout.parts == 1:
            return checkpoint.digests(step.to_host(self._kept()))[2]
        path = checkpoint.directory_of(self._job_dir, self._context.generation, done)
        return checkpoint.digest_of(path, self._blank) if self._leads else ""

    def _wait(self, seconds: float) -> None:
        """Which is no hang."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._beat.tick()
            time.sleep(min(0.5, left_s))

    def _kept(self) -> State:
        return step.kept(self._task, self._state)

    def _step(self, index: int) -> StepReport:
        started = time.monotonic()
        self._beat.enter("step", index)
        place = self._batch_of(index)
        local = self._task.batch(place)
        step.check_batch(local, self._shapes_traced.batch, self._layout, self._task.batch, place)
        self._beat.tick()  # from here on the others may wait for this rank
        batch = step.place_rows(self._layout, local)
        self._state, metrics = self._programs.step(self._state, batch, self._guard.limit)
        self._beat.tick()
        others = _scalars(metrics)
        loss = others.pop("loss")
        seconds = time.monotonic() - started
        self._progress.done = index + 1
        self._progress.loss = loss
        rate = self._task.tokens_per_step / seconds
        self._beat.loss, self._beat.step_s, self._beat.tokens_per_s = loss, seconds, rate
        return StepReport(
            step=index,
            loss=loss,
            held_out_loss=None,
            step_s=seconds,
            tokens_per_s=rate,
            at=time.time(),
            metrics=others,
        )

    def _evaluation_due(self, index: int) -> bool:
        every = self._settings.evaluate_every_steps
        last = index + 1 == self._settings.steps
        return self._programs.evaluate is not None and (
            last or (every > 0 and (index + 1) % every == 0)
        )

    def _evaluate(self, report: StepReport) -> StepReport:
        assert self._programs.evaluate is not None
        self._beat.enter("evaluate")
        found = []
        for index in range(self._settings.evaluate_batches):
            local = self._task.held_out_batch(index)
            function = self._task.held_out_batch
            step.check_batch(local, self._shapes_traced.held_out, self._layout, function, index)
            self._beat.tick()  # from here on the others may wait for this rank
            batch = step.place_rows(self._layout, local)
            found.append(_scalars(self._programs.evaluate(self._state, batch)))
            self._beat.tick()
        means = _weighted_means(found)
        loss = means.pop("loss")
        self._progress.held_out_loss = self._beat.held_out_loss = loss
        held_out = {f"held_out_{name}": value for name, value in means.items()}
        return replace(report, held_out_loss=loss, metrics={**report.metrics, **held_out})

    def _snapshot(self, step_s: float) -> None:
        """Keep the state in shared memory, where it is due, before the next step consumes it."""
        if self._snapshots is None:
            return
        if self._writer is None and self._context.local_rank < self._layout.parts:
            self._writer = self._start_snapshots(self._snapshots)
        if self._writer is not None and self._writer.due(self._progress.done, step_s):
            pieces, volatile = step.snapshot_pieces(self._kept())
            self._writer.take(self._progress.done, pieces, self._meta(), volatile=volatile)

    def _agree(self) -> None:
        """On what "auto" comes to, where ranks hold parts: they count when they are of one step."""
        if self._layout.parts == 1:
            return
        self._steps_here += 1
        if self._steps_here not in _AGREED_EARLY and self._steps_here % _AGREED_EVERY:
            return
        if self._pace.is_auto:
            self._pace.follow(step.largest(self._layout, self._pace.every_steps))
        if self._snapshots is not None and self._snapshots.every_steps == "auto":
            mine = 1 if self._writer is None else self._writer.interval
            interval = step.largest(self._layout, mine)
            if self._writer is not None:
                self._writer.follow(interval)

    def _start_snapshots(self, snapshots: Snapshots) -> SnapshotWriter:
        context = self._context

        def published(done: int) -> None:
            self._beat.snapshot_step = done

        every = snapshots.every_steps
        writer = SnapshotWriter(
            snapshots.directory,
            SnapshotContext(
                run=str(self._job_dir),
                generation=context.generation,
                rank=context.rank,
                world_size=context.world_size,
                replica=context.rank // self._layout.parts,
                part=context.rank % self._layout.parts,
                parts=self._layout.parts,
            ),
            every if isinstance(every, int) else "auto",
            on_published=published,
            on_outcome=self._on_outcome,
            background_counts=self._layout.mesh.devices.flat[0].platform == "cpu",
        )
        if self._layout.parts > 1 and every == "auto":
            writer.follow(1)
        return writer

    def _restore(self, point: Path | RestorePoint | None) -> tuple[str, ...]:
        if point is None:
            self._forget()
            self._state = step.initial_state(self._task, self._programs, self._settings.seed)
            jax.block_until_ready(self._state)  # type: ignore[no-untyped-call]
            return ()
        if isinstance(point, RestorePoint) and point.kind == "snapshot":
            held, meta = self._load_snapshot(point)
        else:
            path = Path(point.path) if isinstance(point, RestorePoint) else point
            held, meta = checkpoint.load_pieces(path, self._blank, self._wanted)
        frozen = self._frozen or step.frozen_leaves(self._task, self._programs)
        self._frozen = {}  # the first step consumes them
        self._state = step.place_state(self._programs, held.read, frozen)
        self._progress = _Progress(
            done=int(meta["step"]), loss=meta.get("loss"), held_out_loss=meta.get("held_out_loss")
        )
        self._guard = Guard(self._settings.guards, meta.get("recent_losses", ()))
        self._beat.loss = self._progress.loss
        self._beat.held_out_loss = self._progress.held_out_loss
        return self._compare(meta)

    def _forget(self) -> None:
        """Begin at step 0."""
        self._progress = _Progress()
        self._guard = Guard(self._settings.guards)

    def _load_snapshot(self, point: RestorePoint) -> tuple[Assembly, Mapping[str, Any]]:
        leaves = step.named_leaves(self._blank)
        return snapshot.load_pieces(
            point.path,
            point.generation,
            point.step,
            forms={name: form(leaf.dtype, leaf.shape) for name, leaf in leaves},
            wanted=self._wanted,
            run=str(self._job_dir),
        )

    def _compare(self, meta: Mapping[str, Any]) -> tuple[str, ...]:
        """What is not as it was when the restore point was saved."""
        now = self._meta()
        pairs = [(meta.get(name, {}), now[name]) for name in ("environment", "facts")]
        pairs.append((_flat(meta.get("settings", {})), _flat(now["settings"])))
        pairs.append((_of_code(meta.get("code", now["code"])), _of_code(now["code"])))
        changed = [line for then, present in pairs for line in differences(then, present)]
        if meta.get("next_batch") != now["next_batch"]:
            changed.append(f"next_batch: {meta.get('next_batch')} when saved, derived otherwise")
        return (*changed, *self._compare_program(meta, explained=bool(changed)))

    def _compare_program(self, meta: Mapping[str, Any], *, explained: bool) -> Iterator[str]:
        """Another world has another program by nature; a changed setting or code may have one."""
        then, now = meta.get("program"), self._program
        if not then or then == now or meta.get("world_size") != self._context.world_size:
            return
        why = (
            "" if explained else "; it reads something else while it is traced (a file, a variable)"
        )
        yield f"traced program: {then[:12]} when saved, {now[:12]} now{why}"

    def _meta(self) -> dict[str, Any]:
        """What lies beside the arrays; plain JSON. `next_batch` counts the rows consumed."""
        return {
            "step": self._progress.done,
            "next_batch": self._batch_of(self._progress.done) * self._programs.batch_rows,
            "skips": [list(skip) for skip in self._skips],
            "recent_losses": self._guard.recent,
            "position": dict(self._task.position(self._progress.done)),
            "generation": self._context.generation,
            "world_size": self._context.world_size,
            "seed": self._settings.seed,
            "loss": self._progress.loss,
            "held_out_loss": self._progress.held_out_loss,
            "settings": self._settings.model_dump(mode="json"),
            "environment": self._environment,
            "facts": self._facts,
            "code": self._code,
            "program": self._program,
        }

    def _write_metrics(self, report: StepReport) -> None:
        if self._settings.tensorboard:
            self._write_board(report)
        others = {name: _json_number(value) for name, value in report.metrics.items()}
        line: dict[str, Any] = {
            **others,
            "generation": self._context.generation,
            "step": report.step,
            "loss": _json_number(report.loss),
            "tokens_per_s": round(report.tokens_per_s, 1),
            "step_s": round(report.step_s, 6),
            "at": report.at,
        }
        if report.held_out_loss is not None:
            line["held_out_loss"] = _json_number(report.held_out_loss)
        self._metrics.append(json.dumps(line))

    def _write_board(self, report: StepReport) -> None:
        if self._board is None:
            self._board = Board(self._job_dir / "tensorboard", report.step, self._metrics_changed)
        self._board.write(
            report.step,
            report.at,
            {
                "loss": report.loss,
                **({} if report.held_out_loss is None else {"held_out_loss": report.held_out_loss}),
                "tokens_per_s": report.tokens_per_s,
                "step_s": report.step_s,
                **report.metrics,
            },
        )


def _number(scalar: Any) -> float:
    """The exact value of a scalar that every device holds; blocks until it is computed."""
    return float(scalar.addressable_data(0))


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in metrics.items() if value.ndim == 0}


def _weighted_means(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over batches that count by their "weight"; NaN if none counts."""
    weighed = [(batch.get(WEIGHT, 1.0), batch) for batch in batches]
    counting = [(weight, batch) for weight, batch in weighed if weight > 0]
    total = math.fsum(weight for weight, _ in counting)
    return {
        name: math.fsum(weight * batch[name] for weight, batch in counting) / total
        if counting
        else math.nan
        for name in batches[0]
        if name != WEIGHT
    }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _of_code(digests: Mapping[str, str]) -> dict[str, str]:
    return {f"code of {module}": digest for module, digest in digests.items()}


def _flat(table: Mapping[str, Any], prefix: str = "trainer.") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and name != "options":
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
