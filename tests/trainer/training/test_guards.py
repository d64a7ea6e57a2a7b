"""Numbers that go wrong are seen, named, and handled as the settings say."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from tests.trainer.harness import TINY, Rank, World
from tests.trainer.process.test_standby import fault
from trainer.compute.replicas import dissenters
from trainer.config import GuardSettings
from trainer.training.guards import Guard

TASK = """
import jax.numpy as jnp
import numpy as np
from trainer.task import Task


class Line(Task):
    def init(self, key):
        return {"w": jnp.zeros(4), "steps": jnp.int32(0)}

    def train_step(self, state, batch):
        error = batch["x"] @ state["w"] - batch["y"]
        loss = jnp.mean(error**2)
        gradient = batch["x"].T @ error / len(batch["y"])
        after = {"w": state["w"] - 0.1 * gradient, "steps": state["steps"] + 1}
        return after, {"loss": loss, "gradient": jnp.linalg.norm(gradient)}

    def batch(self, step):
        rows = np.random.Generator(np.random.Philox(key=step)).normal(size=(8, 4))
        y = rows @ np.array([1.0, -2.0, 3.0, 0.5]) + 3.0
        bad = self.context.options
        if step in bad.get("nan", ()):
            y[3] = np.nan
        if step in bad.get("huge", ()):
            y *= 100
        part = self.context.rows(8)
        return {"x": rows[part].astype(np.float32), "y": y[part].astype(np.float32)}
"""


def settings(guards: dict[str, Any], **options: Any) -> dict[str, Any]:
    table = {name: TINY[name] for name in ("seed",)}
    return {**table, "task": "line:Line", "steps": 30, "options": options, "guards": guards}


@pytest.fixture
def line(world: World) -> World:
    (world.config_dir / "line.py").write_text(TASK)
    return world


def rows_of(world: World) -> list[dict[str, Any]]:
    lines = (world.job_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def ends(ranks: list[Rank]) -> list[dict[str, Any]]:
    return [rank.until("completed") for rank in ranks]


def test_a_nan_planted_at_a_step_stops_all_ranks_after_it(line: World) -> None:
    """A run that trains on with NaN all night has done nothing by morning."""
    ranks = line.launch(trainer=settings({}, nan=[13]))
    for rank in ranks:
        told = rank.until("numbers_diverged")
        assert {name: told[name] for name in ("step", "batch", "policy", "value")} == {
            "step": 13,
            "batch": 13,
            "policy": "stop",
            "value": "nan",
        }
        assert "loss is nan" in told["why"]
    assert rows_of(line)[-1] == {**rows_of(line)[-1], "step": 13, "loss": None, "gradient": None}


def test_a_step_that_is_left_out_leaves_the_state_as_it_was(line: World) -> None:
    """The optimizer's memory of a NaN would outlive the batch; so nothing of the step may stay."""
    ranks = line.launch(trainer=settings({"nonfinite": "skip"}, nan=[13, 14]))
    ends(ranks)
    rows = {row["step"]: row for row in rows_of(line)}
    assert [step for step, row in rows.items() if row["applied"] == 0] == [13, 14]
    assert [report["step"] for report in ranks[0].of("batch_skipped")] == [13, 14]
    path = line.job_dir / "checkpoints" / "generation-1" / "30"
    from trainer.state import checkpoint

    host, _ = checkpoint.load(path, _blank())
    assert host["steps"] == 28
    assert all(math.isfinite(value) for value in host["w"])


def _blank() -> dict[str, Any]:
    import numpy as np

    return {"w": np.zeros(4, np.float32), "steps": np.int32(0)}


@pytest.mark.parametrize(
    "losses",
    [[-8.0, -7.5, -8.5, -8.2, -7.9, -8.1], [0.3, -0.2, 0.1, -0.4, 0.2, -0.1]],
    ids=["below zero", "around zero"],
)
def test_losses_below_zero_have_spikes_too(losses: list[float]) -> None:
    """Twice a negative median lies below it, so that every step was a spike."""
    guard = Guard(GuardSettings(spike_factor=5.0, spike="stop", spike_window_steps=6))
    assert [guard.judge({"loss": loss}) for loss in losses * 2] == [None] * 12
    anomaly = guard.judge({"loss": 40.0})
    assert anomaly is not None
    assert (anomaly.metric, anomaly.policy) == ("loss", "stop")


def test_too_many_steps_left_out_in_a_row_are_a_stop(line: World) -> None:
    """Data that is broken from here on must not be skipped to its end in silence."""
    guards = {"nonfinite": "skip", "skips_max": 3}
    ranks = line.launch(trainer=settings(guards, nan=list(range(13, 30))))
    told = ranks[0].until("numbers_diverged")
    assert (told["step"], told["policy"]) == (16, "stop")
    assert "skips_max = 3" in told["why"]


def test_a_spike_is_judged_by_the_steps_before_it_in_a_resumed_run_too(line: World) -> None:
    """A restart that forgot the last losses would let through what a calm run stops."""
    guards = {"spike_factor": 20.0, "spike": "rollback", "spike_window_steps": 8}
    (rank,) = line.launch(world_size=1, trainer=settings(guards, huge=[13]))
    told = rank.until("numbers_diverged")
    assert (told["step"], told["policy"], told["metric"]) == (13, "rollback", "loss")
    while not any(saved["step"] == 12 for saved in rank.of("checkpoint_committed")):
        rank.until("checkpoint_committed")
    rank.end()
    point = {
        "kind": "checkpoint",
        "path": str(line.job_dir / "checkpoints" / "generation-1" / "12"),
        "step": 12,
        "generation": 1,
    }
    (again,) = line.launch(
        generation=2, world_size=1, trainer=settings(guards, huge=[13]), restore_point=point
    )
    assert again.until("numbers_diverged")["step"] == 13
    again.end()
    (past,) = line.launch(
        generation=3,
        world_size=1,
        trainer=settings(guards, huge=[13]),
        restore_point=point,
        skips=[[12, 2]],
    )
    ends([past])
    meta = line.job_dir / "checkpoints" / "generation-3" / "30" / "meta" / "metadata"
    assert json.loads(meta.read_text())["next_batch"] == 32 * 8


def test_a_flipped_bit_in_one_replica_is_seen_and_the_rank_is_named(line: World) -> None:
    """Failing memory says nothing: two replicas drift apart, and every loss looks as usual."""
    guards = {"compare_every_steps": 5}
    faults = {2: [fault("flip-bit", step=12)]}
    ranks = line.launch(
        world_size=4,
        trainer=settings(guards),
        faults=faults,
    )
    for rank in ranks:
        told = rank.until("replicas_diverged")
        assert (told["ranks"], told["step"], told["agreed_step"]) == ([2], 14, 10)


def test_replicas_that_agree_say_nothing(line: World) -> None:
    """A comparison that cries wolf costs a recovery each time."""
    ranks = line.launch(trainer=settings({"compare_every_steps": 1}))
    ends(ranks)
    assert not ranks[0].of("replicas_diverged")
    saved = ranks[0].of("checkpoint_committed")
    assert saved
    assert all(one["agreed_step"] >= one["step"] for one in saved)  # retention relies on it


@pytest.mark.parametrize(
    ("prints", "found"),
    [
        ([[(1, 1)], [(1, 1)]], set()),
        ([[(1, 1)], [(1, 2)]], {(0, 0), (1, 0)}),
        ([[(1, 1)], [(1, 2)], [(1, 1)]], {(1, 0)}),
        ([[(1, 1), (5, 5)], [(1, 1), (5, 6)], [(1, 1), (5, 5)]], {(1, 1)}),
        ([[(1, 1)], [(2, 2)], [(3, 3)]], {(0, 0), (1, 0), (2, 0)}),
        ([[(1, 1)], [(1, 1)], [(2, 2)], [(2, 2)]], {(0, 0), (1, 0), (2, 0), (3, 0)}),
    ],
)
def test_a_majority_names_who_is_wrong(prints: Any, found: set[tuple[int, int]]) -> None:
    """Two against one is evidence; one against one accuses nobody alone."""
    assert dissenters(prints) == found


def test_no_spike_is_called_before_half_of_the_window_is_known() -> None:
    """The first losses of a run are wild, and that is no reason to go back."""
    guard = Guard(GuardSettings(spike_factor=2.0, spike_window_steps=8))
    for loss in (1.0, 50.0, 1.0, 1.0):
        assert guard.judge({"loss": loss}) is None
    assert guard.judge({"loss": 3.0}) is not None
    assert guard.recent == [1.0, 50.0, 1.0, 1.0], "a spike is no yardstick"
    assert Guard(GuardSettings(spike_factor=2.0), guard.recent).limit == math.inf


def test_the_metrics_go_to_tensorboard_once_a_step(line: World) -> None:
    """Steps that are done again must not be shown twice."""
    table = {**settings({}), "tensorboard": True, "steps": 6}
    (rank,) = line.launch(world_size=1, trainer=table)
    ends([rank])
    files = list((line.job_dir / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"gradient" in Path(files[0]).read_bytes()


def curve_of(folder: Path) -> dict[int, float]:
    """The losses that TensorBoard shows: from each restart on, older points are thrown away."""
    curve: dict[int, float] = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            if event.HasField("session_log"):
                curve = {step: loss for step, loss in curve.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "loss":
                    curve[event.step] = value.simple_value
    return curve


def test_the_curve_in_tensorboard_is_that_of_the_metrics_after_a_kill(line: World) -> None:
    """What was written in the last two seconds before a kill was missing for ever."""
    table = {**settings({}), "tensorboard": True, "steps": 14}
    (rank,) = line.launch(world_size=1, trainer=table, faults={0: [fault("sleep", step=9)]})
    rank.until("checkpoint_committed", where=lambda report: report["step"] == 8)
    rank.end()
    point = {
        "kind": "checkpoint",
        "path": str(line.job_dir / "checkpoints" / "generation-1" / "8"),
        "step": 8,
        "generation": 1,
    }
    (again,) = line.launch(generation=2, world_size=1, trainer=table, restore_point=point)
    ends([again])
    losses = line.losses()
    assert list(losses) == list(range(14))
    assert curve_of(line.job_dir / "tensorboard") == pytest.approx(losses, rel=1e-6)
