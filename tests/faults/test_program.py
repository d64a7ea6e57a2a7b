"""What a run trains by: the program and the code that it began with, until a person starts anew."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np

from tests.faults.conftest import MakeJob
from tests.faults.harness import Job, until

TASK = """
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from trainer.task import Task

SHIFT = 1.0

class Mine(Task):
    def init(self, key):
        return {"w": jnp.zeros(4)}

    def batch(self, step):
        time.sleep(0.2)
        return np.zeros((1, 4), np.float32)

    def train_step(self, state, batch):
        rate = json.loads((Path(self.context.config_dir) / "hyper.json").read_text())["rate"]
        table = jnp.asarray(np.load(Path(self.context.config_dir) / "table.npy"))
        loss = rate + SHIFT + table.sum() + 0 * batch.mean()
        return {"w": state["w"] + rate}, {"loss": loss}
"""


def made(job: MakeJob) -> Job:
    one = job(
        **{
            "trainer.task": "mine:Mine",
            "trainer.steps": 1000,
            "recovery.standby": "generation",
            "recovery.snapshot_every_steps": 1,
        }
    )
    (one.folder / "mine.py").write_text(TASK)
    np.save(one.folder / "table.npy", np.zeros(4096, np.float32))
    tune(one, 0.25)
    return one


def tune(job: Job, rate: float) -> None:
    (job.folder / "hyper.json").write_text(json.dumps({"rate": rate}))


def losses(job: Job, generation: int) -> set[float]:
    """Of all steps of a generation."""
    rows = map(json.loads, (job.run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["loss"] for row in rows if row["generation"] == generation}


def found(job: Job, **wanted: Any) -> list[str]:
    """All differences that were told."""
    events = job.events("differences_found", **wanted)
    return [line for event in events for line in event["differences"]]


def test_what_a_task_reads_while_it_is_traced_counts_from_the_next_run(job: MakeJob) -> None:
    """A number in a file went from 0.1 to 0.5 between two runs, and the old program was loaded."""
    mine = made(job)
    daemon = mine.start()
    daemon.until("first_step_taken", generation=1)
    until(lambda: "executable stored" in mine.log(1, 0), "a stored program")
    daemon.until("standby_ready", generation=2)
    tune(mine, 0.5)
    daemon.strike(1, signal.SIGKILL)
    daemon.until("first_step_taken", generation=2)
    daemon.until("standby_ready", generation=3)
    until(lambda: found(mine, generation=3) != [], "a word of the standby")
    (line,) = found(mine)
    assert "traced program" in line
    assert "counts from the next start" in line
    assert daemon.status()["differences"] == [line]
    daemon.strike(0, signal.SIGKILL)
    daemon.until_step(daemon.until("first_step_taken", generation=3)["step"] + 2)
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_status() == 75
    assert [losses(mine, generation) for generation in (1, 2, 3)] == [{1.25}] * 3
    daemon = mine.start()
    daemon.until("first_step_taken", generation=5)
    (line,) = found(mine, generation=5)
    assert "traced program" in line
    assert "it reads something else" in line
    assert daemon.status()["differences"] == [line]
    daemon.until_step(daemon.status()["step"] + 2)
    assert losses(mine, 5) == {1.5}
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_status() == 75


def test_edited_code_counts_from_the_next_run(job: MakeJob) -> None:
    """Edited before two kills, it counted from the second one: the loss jumped, unsaid."""
    mine = made(job)
    daemon = mine.start()
    daemon.until("standby_ready", generation=2)
    (mine.folder / "mine.py").write_text(TASK.replace("SHIFT = 1.0", "SHIFT = 2.0"))
    until(lambda: daemon.status()["code_changed"] == ["mine.py"], "the name of the edited file")
    for generation in (2, 3):
        daemon.until("standby_ready", generation=generation)
        daemon.strike(1, signal.SIGKILL)
        daemon.until("first_step_taken", generation=generation)
    daemon.kill()
    daemon = mine.start()
    daemon.until("supervisor_restarted")
    until(lambda: daemon.status()["code_changed"] == ["mine.py"], "the name of the edited file")
    daemon.strike(0, signal.SIGKILL)
    daemon.until_step(daemon.until("first_step_taken", generation=4)["step"] + 2)
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_status() == 75
    assert [losses(mine, generation) for generation in (1, 2, 3, 4)] == [{1.25}] * 4
    daemon = mine.start("--keep-code")
    daemon.until_step(daemon.until("first_step_taken", generation=6)["step"] + 2)
    assert losses(mine, 6) == {1.25}
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_status() == 75
    daemon = mine.start()
    daemon.until_step(daemon.until("first_step_taken", generation=8)["step"] + 2)
    assert losses(mine, 8) == {2.25}
    assert any(line.startswith("code of mine") for line in found(mine, generation=8))
    assert daemon.status()["code_changed"] == []
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_status() == 75
