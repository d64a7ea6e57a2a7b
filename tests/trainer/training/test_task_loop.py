"""The loop in one process: what it reports, writes, and learns."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from tests.trainer.harness import TINY, write_text
from trainer.config import CheckpointSettings, TrainerSettings
from trainer.state.checkpoint import Committed, SaveFailed
from trainer.task import Context
from trainer.training.task_loop import ModelTrainer
from trainer.wire.heartbeat import Beat


class Journal(Beat):
    """A beat that remembers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.entered: list[tuple[str, int]] = []

    def enter(self, phase: str, step: int | None = None) -> None:
        super().enter(phase, step)
        self.entered.append((phase, self.step))


def trainer(
    folder: Path, outcomes: list[Any], restore_from: Path | None = None, **changes: Any
) -> tuple[ModelTrainer, Journal]:
    write_text(folder)
    beat = Journal(folder / "beat")
    built = ModelTrainer(
        context=Context.alone(
            TrainerSettings.model_validate({**TINY, **changes}),
            folder,
            generation=1 if restore_from is None else 2,
        ),
        checkpoints=CheckpointSettings(every_steps=4),
        job_dir=folder,
        beat=beat,
        restore_from=restore_from,
        on_outcome=outcomes.append,
    )
    built.connect()
    return built, beat


def test_the_loop_writes_a_line_a_step_and_evaluates_when_it_is_due(tmp_path: Path) -> None:
    """Programs rely on the names in metrics.jsonl, and no step may lack its line."""
    outcomes: list[Committed | SaveFailed] = []
    built, beat = trainer(tmp_path, outcomes, steps=7, evaluate_every_steps=3)
    assert built.prepare().step == 0
    reports = list(built.run())
    assert [report.step for report in reports] == list(range(7))
    evaluated = [report.step for report in reports if report.held_out_loss is not None]
    assert evaluated == [2, 5, 6]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["generation"], row["step"]) for row in rows] == [(1, step) for step in range(7)]
    assert [row["loss"] for row in rows] == [report.loss for report in reports]
    assert {"tokens_per_s", "step_s", "at"} <= set(rows[0])
    assert [row["step"] for row in rows if "held_out_loss" in row] == evaluated
    assert built.finish().step == 7
    assert [outcome.step for outcome in outcomes] == [4, 7]
    phases = [phase for phase, _ in beat.entered]
    assert phases[:2] == ["compile", "restore"]
    assert [step for phase, step in beat.entered if phase == "step"] == list(range(7))
    assert ("evaluate", 2) in beat.entered
    assert ("checkpoint", 3) in beat.entered


def test_a_model_learns_more_than_the_frequencies_of_bytes(tmp_path: Path) -> None:
    """A trainer that trains nothing would pass every test of recovery."""
    optimizer = {"learning_rate": 0.02, "warmup_steps": 5}
    built, _ = trainer(tmp_path, [], steps=150, optimizer=optimizer, evaluate_every_steps=0)
    ready = built.prepare()
    first, *_, last = built.run()
    assert abs(first.loss - math.log(256)) < 1.5
    assert last.held_out_loss is not None
    assert last.held_out_loss < 0.85 * ready.facts["unigram_entropy"]


def test_a_restored_run_names_what_has_changed_since(tmp_path: Path) -> None:
    """Equal bits are promised only where settings and environment are equal; else it is said."""
    outcomes: list[Committed | SaveFailed] = []
    built, _ = trainer(tmp_path, outcomes, steps=4)
    built.prepare()
    losses = [report.loss for report in built.run()]
    end = built.finish()
    assert isinstance(outcomes[-1], Committed)
    again, beat = trainer(tmp_path, [], Path(outcomes[-1].path), steps=6, seed=8)
    ready = again.prepare()
    assert ready.step == 4
    *settings, program = ready.differences
    assert set(settings) == {
        "trainer.steps: 4 when saved, 6 now",
        "trainer.seed: 7 when saved, 8 now",
    }
    assert re.fullmatch(r"traced program: [0-9a-f]{12} when saved, [0-9a-f]{12} now", program)
    assert beat.loss == losses[-1]
    assert beat.held_out_loss == end.held_out_loss
    assert [report.step for report in again.run()] == [4, 5]


def test_a_finished_run_that_is_restored_is_finished_at_once(tmp_path: Path) -> None:
    """A worker that dies after the last step must not lose the result."""
    outcomes: list[Committed | SaveFailed] = []
    built, _ = trainer(tmp_path, outcomes, steps=4)
    built.prepare()
    list(built.run())
    end = built.finish()
    assert isinstance(outcomes[-1], Committed)
    again, _ = trainer(tmp_path, [], Path(outcomes[-1].path), steps=4)
    assert again.prepare().step == 4
    assert list(again.run()) == []
    assert again.finish() == end
