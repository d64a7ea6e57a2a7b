"""Fine-tuning a pretrained model under the real daemon: struck, resumed, refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Job
from tests.trainer import models
from tests.trainer.harness import write_text

pytest.importorskip("safetensors", reason="needs the extra finetune")
pytest.importorskip("tokenizers", reason="needs the extra finetune")

full = pytest.mark.full

STEPS = 24
PATIENCE_S = 240.0
LOW_RANK: dict[str, Any] = {
    "trainer.task": "language_model",
    "trainer.steps": STEPS,
    "trainer.evaluate_every_steps": 8,
    "trainer.model.pretrained": "model",
    "trainer.model.lora_rank": 2,
    "trainer.data.path": ["text.txt"],
    "trainer.data.batch_size": 4,
    "trainer.data.sequence_length": 32,
    "trainer.optimizer.learning_rate": 0.01,
    "checkpoint.every_steps": 8,
}


def write_model(job: Job) -> None:
    write_text(job.folder)
    models.write_folder(job.folder / "model", models.LLAMA, models.tensors(models.LLAMA))


@full
@pytest.mark.parametrize("standby", ["generation", "none"])
def test_low_rank_additions_survive_a_kill_and_frozen_weights_come_back(
    job: MakeJob, standby: str
) -> None:
    """What no snapshot and no checkpoint holds is read again, by a standby ahead of its turn.

    The standby may be half built when the worker dies; it is waited for then.
    """
    more = {**LOW_RANK, "recovery.standby": standby, "recovery.snapshot_every_steps": 1}
    undisturbed = job(**more)
    write_model(undisturbed)
    assert undisturbed.start().exit_status(PATIENCE_S) == 0
    struck = job(**more)
    write_model(struck)
    daemon = struck.start()
    daemon.until_listening()
    daemon.order(1, "kill", phase="step", step=12)
    assert daemon.exit_status(PATIENCE_S) == 0
    struck.must_equal(undisturbed.numbers())
    assert [event["step"] for event in struck.events("worker_crashed", primary=True)] == [12]
    held_out = list(struck.numbers().held_out_losses.values())
    assert held_out[-1] < held_out[0]
    struck.note_recoveries(f"low rank, standby {standby}")


@full
def test_weights_that_are_cut_short_end_the_job_before_its_first_step(job: MakeJob) -> None:
    """No retry makes half a download whole."""
    tiny = job(**LOW_RANK)
    write_model(tiny)
    weights = tiny.folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert tiny.start().exit_status(PATIENCE_S) == 4
    assert "model.safetensors: is damaged, cut short" in tiny.result()["reason"]
    assert len(tiny.events("workers_started")) == 1
