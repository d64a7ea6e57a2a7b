"""A loop of the user's own: what it is given, what it must do, and what it is told otherwise."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config import CheckpointSettings, TrainerSettings
from trainer.state import checkpoint
from trainer.task import Context, TaskError
from trainer.training.free_loop import FreeLoop, Worker, trainer_for
from trainer.training.guards import NumbersDiverged
from trainer.training.task_loop import Finish, Ready, StepReport
from trainer.wire.heartbeat import Beat


class Listened(Beat):
    """Remembers the phases that were entered."""

    def __init__(self, path: Path) -> None:
        self.phases: list[str] = []
        super().__init__(path)

    def enter(self, phase: str, step: int | None = None) -> None:
        self.phases.append(phase)
        super().enter(phase, step)


class Run:
    """One start of a function, alone and in this process; `stop_after` is the order to stop."""

    def __init__(self, folder: Path, function: Callable[[Worker], Any], **more: Any) -> None:
        module = types.ModuleType("users_loop")
        module.train = function  # type: ignore[attr-defined]
        sys.modules["users_loop"] = module
        folder.mkdir(exist_ok=True)
        self.folder, self.stop_after = folder, more.pop("stop_after", None)
        stands_by = more.pop("stands_by", False)
        self.ready: list[Ready] = []
        self.steps: list[StepReport] = []
        self.outcomes: list[Any] = []
        self.beat = Listened(folder / "beat")
        newest = checkpoint.finished(folder)
        self.loop = trainer_for(
            context=Context.alone(
                TrainerSettings(task="users_loop:train", **{"steps": 6, **more}),
                folder,
                generation=1 + len(newest),
            ),
            checkpoints=CheckpointSettings(every_steps=2),
            job_dir=folder,
            beat=self.beat,
            restore_from=newest[0][2] if newest else None,
            on_outcome=self.outcomes.append,
        )
        assert isinstance(self.loop, FreeLoop)
        self.loop.build()
        self.point = newest[0][2] if newest else None
        self.finish: Finish | None = self.loop.follow(
            self._stand_by if stands_by else self._start, self.ready.append, self._after
        )

    def _start(self) -> Ready:
        return self.loop.restore(self.point)

    def _stand_by(self) -> Ready:
        """As a standby does it: warmed up, loaded ahead, and then told of something newer."""
        self.loop.warm_up()
        self.loop.restore(None)
        return self.loop.restore(self.point)

    def _after(self, report: StepReport) -> bool:
        self.steps.append(report)
        if self.stop_after is None or report.step < self.stop_after or not self.loop.holds_state:
            return False
        self.loop.save(wait=True)
        return True

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(one) for one in (self.folder / "metrics.jsonl").read_text().splitlines()]


def add(worker: Worker) -> None:
    """The smallest loop that keeps the contract."""
    state: dict[str, Any] = {"total": jnp.zeros(3)}
    state |= {"key": jax.random.key(worker.settings.seed), "calls": 0}
    state = worker.restore(state)
    for step in worker.steps():
        key, noise = jax.random.split(state["key"])
        batch = worker.place(np.full((4, 3), step, np.float32))
        total = state["total"] + batch.mean(axis=0) + jax.random.normal(noise, (3,))
        state = {"total": total, "key": key, "calls": state["calls"] + 1}
        worker.report(loss=total.sum(), steps_so_far=step + 1)
        worker.checkpoint(state, position={"epoch": step // 2})


def test_a_stopped_loop_goes_on_to_the_same_end_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Random keys and numbers in the state included, and the user's own words beside it."""
    calm = Run(tmp_path / "calm", add)
    stopped = Run(tmp_path / "stopped", add, stop_after=2)
    assert stopped.finish is None
    assert [one.step for one in stopped.steps] == [0, 1, 2]
    seen: list[Any] = []

    def again(worker: Worker) -> None:
        add(worker)
        seen.append(worker.step)

    resumed = Run(tmp_path / "stopped", again)
    assert calm.finish is not None
    assert resumed.finish is not None
    assert resumed.ready[0].step == 3
    assert resumed.ready[0].differences == ()
    assert seen == [6]
    assert resumed.finish.params_digest == calm.finish.params_digest
    told = [(line["step"], line["loss"], line["steps_so_far"]) for line in calm.lines()]
    assert told == [(line["step"], line["loss"], line["steps_so_far"]) for line in resumed.lines()]
    _, _, path = checkpoint.finished(tmp_path / "stopped")[0]
    assert json.loads((path / "meta" / "metadata").read_text())["position"] == {"epoch": 2}


def test_a_loop_that_stands_by_compiles_on_a_copy_and_waits_in_restore(tmp_path: Path) -> None:
    """What it runs to be warm may consume the copy, and must leave no trace."""
    order: list[str] = []

    def train(worker: Worker) -> None:
        update = jax.jit(lambda state: (state[0] + 1, state[1]), donate_argnums=0)
        order.append("set up")

        def warm_up(state: Any) -> None:
            order.append("warm up")
            jax.block_until_ready(update(state))  # type: ignore[no-untyped-call]

        state = worker.restore((jnp.zeros(2), jax.random.key(1)), warm_up=warm_up)
        order.append("restored")
        for _ in worker.steps():
            state = update(state)
            worker.report(loss=state[0].sum())
            worker.checkpoint(state)

    for name in ("calm", "standby"):
        (tmp_path / name).mkdir()
    Run(tmp_path / "standby", train, stop_after=2)
    assert order == ["set up", "restored"]
    promoted = Run(tmp_path / "standby", train, stands_by=True)
    assert order[2:] == ["set up", "warm up", "restored"]
    calm = Run(tmp_path / "calm", train, stands_by=True)
    assert promoted.finish is not None
    assert calm.finish is not None
    assert [one.step for one in promoted.steps] == [3, 4, 5]
    assert promoted.finish.params_digest == calm.finish.params_digest


def test_the_position_that_was_saved_is_there_when_the_loop_starts_again(tmp_path: Path) -> None:
    """Users keep their epoch, or their place in a file, beside the state."""
    Run(tmp_path, add, stop_after=4)
    seen: list[Any] = []

    def look(worker: Worker) -> None:
        assert worker.position == {}
        state = worker.restore({"total": jnp.zeros(3), "key": jax.random.key(0), "calls": 0})
        seen.append((worker.step, worker.position, int(state["calls"])))
        for _ in worker.steps():
            worker.checkpoint(state)

    Run(tmp_path, look)
    assert seen == [(5, {"epoch": 2}, 5)]


def test_checkpoints_are_due_by_the_settings_or_at_once(tmp_path: Path) -> None:
    """A loop hands over its state in every step; the disk gets what the settings say."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for step in worker.steps():
            state = state + 1
            worker.checkpoint(state, now=step == 2)

    run = Run(tmp_path, train)
    saved = {one.step for one in run.outcomes if isinstance(one, checkpoint.Committed)}
    assert saved == {2, 3, 4, 6}
    assert [line["loss"] for line in run.lines()] == [None] * 6


def test_a_loop_that_is_left_early_is_complete_there(tmp_path: Path) -> None:
    """Early stopping is the user's to decide."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for step in worker.steps():
            worker.report(loss=1.0)
            worker.checkpoint(state)
            if step == 2:
                break

    run = Run(tmp_path, train)
    assert run.finish is not None
    assert run.finish.step == 3
    assert [one.step for one in run.steps] == [0, 1, 2]


def test_a_step_that_is_left_at_its_top_does_not_count(tmp_path: Path) -> None:
    """`if good_enough: break` stands at the top as often as at the bottom."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for step in worker.steps():
            if step == 3:
                break
            state = state + 1
            worker.report(loss=1.0)
            worker.checkpoint(state)

    run = Run(tmp_path, train)
    assert run.finish is not None
    assert run.finish.step == 3
    assert checkpoint.finished(tmp_path)[0][0] == 3


def test_an_order_to_stop_waits_for_a_state(tmp_path: Path) -> None:
    """Stopping where nothing was handed over would lose steps."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for step in worker.steps():
            if step % 2:
                worker.checkpoint(state)

    run = Run(tmp_path, train, stop_after=2)
    assert run.finish is None
    assert [one.step for one in run.steps] == [0, 1, 2, 3]
    assert checkpoint.finished(tmp_path)[0][0] == 4


@pytest.mark.parametrize("catch", ["pass", "again", "raise"])
def test_an_order_to_stop_stands_whatever_the_loop_catches(tmp_path: Path, catch: str) -> None:
    """`except:` around a loop swallowed the stop: COMPLETED after step 3 of 1000, status 0."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for _ in range(2):
            try:
                for _ in worker.steps():
                    worker.report(loss=1.0)
                    worker.checkpoint(state)
            except BaseException as error:
                if catch == "raise":
                    raise RuntimeError("the loop ended early") from error
                if catch == "pass":
                    break

    run = Run(tmp_path, train, steps=1000, stop_after=2)
    assert run.finish is None
    assert [one.step for one in run.steps] == [0, 1, 2]
    assert checkpoint.finished(tmp_path)[0][0] == 3


def test_a_verdict_on_a_step_stands_whatever_the_loop_catches(tmp_path: Path) -> None:
    """Numbers that went wrong, and a broken contract, ended as COMPLETED in the same way."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        try:
            for step in worker.steps():
                worker.report(loss=math.nan if step == 2 else 1.0)
                worker.checkpoint(state)
        except Exception:
            return

    with pytest.raises(NumbersDiverged):
        Run(tmp_path, train)


def test_phases_within_phases_count_once_and_an_error_leaves_them(tmp_path: Path) -> None:
    """`step_s` was negative, and all that followed a caught error counted as evaluation."""
    seen: list[str] = []

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for _ in worker.steps():
            with worker.phase("evaluate"):
                with worker.phase("checkpoint"):
                    time.sleep(0.2)
                seen.append(run.beat.phase)
            try:
                with worker.phase("evaluate"):
                    raise KeyError("caught")
            except KeyError as error:
                seen.append(run.beat.phase)
                seen.append(run.beat.phase_of(error))
            worker.report(loss=1.0)
            worker.checkpoint(state)

    run = Run.__new__(Run)
    run.__init__(tmp_path, train, steps=2)  # type: ignore[misc]
    assert seen[3:] == ["evaluate", "step", "evaluate"]
    assert all(0 <= one.step_s < 0.2 for one in run.steps)


def test_what_is_no_step_is_said_and_does_not_count(tmp_path: Path) -> None:
    """An evaluation has a deadline of its own, and a slow one makes no slow step."""

    def train(worker: Worker) -> None:
        state = worker.restore(jnp.zeros(2))
        for _ in worker.steps():
            with worker.phase("evaluate"):
                time.sleep(0.3)
            worker.report(held_out_loss=0.5, accuracy=np.float32(0.25), tokens=100)
            worker.checkpoint(state, now=False)

    run = Run(tmp_path, train, steps=1)
    # The first step compiles whatever it meets first.
    phases = ["compile", "restore", "compile", "compile", "evaluate", "compile", "checkpoint"]
    assert run.beat.phases == phases
    assert run.steps[0].held_out_loss == 0.5
    assert run.steps[0].step_s < 0.3
    assert run.lines()[0]["accuracy"] == 0.25
    assert run.lines()[0]["tokens_per_s"] > 0
    second = Run(tmp_path / "second", train, steps=2)
    assert second.beat.phases[6:9] == ["step", "evaluate", "step"]


def test_a_resume_says_which_module_has_changed_since(tmp_path: Path) -> None:
    """A run that goes on with other code is another run; its user must not find out by chance."""
    helper = tmp_path / "users_helper.py"
    helper.write_text("SCALE = 1\n")
    sys.path.insert(0, str(tmp_path))
    try:
        importlib.import_module("users_helper")
        Run(tmp_path, add, stop_after=2)
        assert Run(tmp_path, add, stop_after=4).ready[0].differences == ()
        helper.write_text("SCALE = 2\n")
        (line,) = Run(tmp_path, add).ready[0].differences
        assert line.startswith("code of users_helper: ")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["users_helper"]


def broken(**what: Any) -> Callable[[Worker], Any]:
    """A loop with one thing wrong."""

    def train(worker: Worker) -> None:
        state = {"w": jnp.zeros(2)}
        if "restore" in what:
            worker.restore(what["restore"])
        elif "unrestored" not in what:
            worker.restore(state)
        if "stepless" in what:
            return
        for step in worker.steps():
            worker.report(**what.get("report", {"loss": 1.0}))
            if "silent" not in what and step in what.get("only", range(6)):
                worker.checkpoint(what.get("state", state), position=what.get("position"))
            with worker.phase(what.get("phase", "evaluate")):
                pass

    return train


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ({"unrestored": 1}, "worker.restore"),
        ({"stepless": 1}, "without a step"),
        ({"silent": 1}, "3 steps without worker.checkpoint"),
        ({"only": (1, 3, 4)}, "after step 6 without worker.checkpoint"),
        ({"restore": {"w": jnp.zeros(2), "f": jax.nn.relu}}, "f is a .*, no array"),
        ({"restore": {"w": jnp.zeros(2), "n": np.int64(6 * 10**9)}}, "n is int64, of which JAX"),
        ({"restore": {"w": jnp.zeros(2), "x": np.float64(1 / 3)}}, "x is float64, of which JAX"),
        ({"restore": {"w": jnp.zeros(2), "x": 1 / 3}}, "x is float64, of which JAX keeps float32"),
        ({"restore": {"w": jnp.zeros(2), "n": 6 * 10**9}}, "n is 6000000000, which int32 does"),
        ({"restore": {}}, "holds none"),
        ({"state": {"w": jnp.zeros(3)}}, r"w is float32\[3\], .* float32\[2\]"),
        ({"state": {"v": jnp.zeros(2)}}, "v is not both"),
        ({"report": {"loss": jnp.zeros(2)}}, "loss must be a scalar"),
        ({"report": {"step": 1}}, "step is the name of something else"),
        ({"position": {"a": {1, 2}}}, "plain JSON"),
        ({"phase": "lunch"}, "'lunch'"),
    ],
)
def test_a_broken_contract_is_named(tmp_path: Path, what: Any, complaint: str) -> None:
    """The alternative is a checkpoint that cannot be restored, or none, found out too late."""
    with pytest.raises(TaskError, match=complaint):
        Run(tmp_path, broken(**what))


def test_a_state_of_another_form_than_was_saved_is_refused(tmp_path: Path) -> None:
    """The code has changed since: what cannot fit must be said, not guessed at."""
    Run(tmp_path, add, stop_after=2)
    with pytest.raises(TaskError, match="leaf calls is missing now"):
        Run(tmp_path, broken(restore={"v": jnp.zeros(2)}))
