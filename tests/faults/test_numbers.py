"""Numbers that go wrong, and a state in parts, under the real daemon."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Numbers
from tests.trainer.training.test_guards import TASK

full = pytest.mark.full


def test_a_flipped_bit_leads_back_to_where_the_replicas_agreed(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A bit that memory lost is in the gradient of all one step later; nobody would ever know."""
    tiny = job(**{"trainer.guards.compare_every_steps": 5})
    daemon = tiny.start()
    daemon.until_listening()
    daemon.order(1, "flip-bit", step=17)
    assert daemon.exit_status() == 0
    (found,) = tiny.events("replicas_diverged")
    assert (found["ranks"], found["step"], found["agreed_step"]) == ([0, 1], 19, 15)
    chosen = tiny.events("restore_point_selected")[-1]
    assert (chosen["kind"], chosen["step"]) == ("checkpoint", 10)
    tiny.must_equal(undisturbed)
    tiny.note_recoveries("a flipped bit")


@full
def test_a_rollback_goes_past_the_batches_that_led_astray(job: MakeJob) -> None:
    """The same data would lead to the same NaN, again and again."""
    tiny = job(
        **{
            "trainer.task": "line:Line",
            "trainer.steps": 60,
            "trainer.options.nan": [33],
            "trainer.guards.nonfinite": "rollback",
            "trainer.evaluate_every_steps": 0,
            "recovery.standby": "generation",
            "recovery.snapshot_every_steps": 1,
        }
    )
    (tiny.folder / "line.py").write_text(TASK)
    daemon = tiny.start()
    assert daemon.exit_status() == 0
    (found,) = tiny.events("numbers_diverged")
    assert (found["step"], found["batch"], found["metric"]) == (33, 33, "loss")
    back = tiny.events("restore_point_selected")[-1]
    assert back["kind"] == "checkpoint"
    assert back["step"] <= 30, "a snapshot just before it would lead there again"
    orders = [effect for move in tiny.moves() for effect in move["effects"]]
    (skips,) = [
        effect["skips"]
        for effect in orders
        if effect["effect"] in ("RestoreWorkers", "PromoteStandby")
    ]
    assert skips == [[back["step"], 34 - back["step"]]]
    assert tiny.result()["state"] == "COMPLETED"


@full
def test_a_nan_ends_the_job_where_the_settings_ask_for_a_stop(job: MakeJob) -> None:
    """Deterministic arithmetic meets it again whatever is restarted: do not requeue."""
    tiny = job(
        **{
            "trainer.task": "line:Line",
            "trainer.steps": 60,
            "trainer.options.nan": [33],
            "trainer.evaluate_every_steps": 0,
        }
    )
    (tiny.folder / "line.py").write_text(TASK)
    assert tiny.start().exit_status() == 4
    assert "loss is nan" in tiny.result()["reason"]


@full
@pytest.mark.parametrize("snapshot_every", [1, 0])
def test_a_state_in_parts_survives_a_kill_of_any_rank(job: MakeJob, snapshot_every: int) -> None:
    """No rank holds it in whole: each part must come back, and all of the same step."""
    mesh = {
        "trainer.task": "line:Line",
        "trainer.steps": 400,
        "trainer.evaluate_every_steps": 0,
        "trainer.mesh.dp": 1,
        "trainer.mesh.fsdp": 2,
        "recovery.standby": "generation",
        "recovery.snapshot_every_steps": snapshot_every,
    }
    calm = job(**mesh)
    (calm.folder / "line.py").write_text(TASK)
    assert calm.start().exit_status() == 0
    struck = job(**mesh)
    (struck.folder / "line.py").write_text(TASK.replace("def batch(self, step):", SLOW))
    daemon = struck.start()
    for count, rank in enumerate((1, 0)):
        daemon.until_committed(above=count * 100)
        daemon.until("standby_ready", generation=count + 2)
        daemon.strike(rank, signal.SIGKILL)
        daemon.until("first_step_taken", generation=count + 2)
    assert daemon.exit_status() == 0
    restored = [event["kind"] for event in struck.events("restore_point_selected")][1:]
    assert restored == ["snapshot" if snapshot_every else "checkpoint"] * 2
    assert struck.numbers().losses == calm.numbers().losses
    assert struck.result()["params_digest"] == calm.result()["params_digest"]


SLOW = """def batch(self, step):
        import time

        time.sleep(0.05)"""
