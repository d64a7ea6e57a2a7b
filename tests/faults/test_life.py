"""The life of a run directory: its job completed, trained longer, started over."""

from __future__ import annotations

import json
import signal

from tests.faults.conftest import MakeJob
from tests.faults.harness import SETTINGS, STEPS, Job, Numbers, run, step_rows


def test_a_complete_job_trains_on_when_its_steps_are_raised(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Steps were raised after COMPLETED, and the answer was that nothing is left to do."""
    tiny = job(**{"trainer.steps": STEPS - 20})
    assert tiny.start().exit_status() == 0
    tiny.set(**{"trainer.steps": STEPS - 30})
    said = run(tiny)
    assert said.returncode == 0
    assert f"complete at {STEPS - 20} steps, beyond trainer.steps = {STEPS - 30}" in said.stdout
    tiny.set(**{"trainer.steps": STEPS})
    assert tiny.start().exit_status() == 0
    assert {row["generation"] for row in step_rows(tiny.run_dir).values()} == {1, 2}
    assert tiny.result()["step"] == STEPS
    tiny.must_equal(undisturbed)
    assert "complete; nothing is left" in run(tiny).stdout


def runs_of(tiny: Job) -> list[tuple[str, str, int | None]]:
    """What `runs` lists: name, state and step of each."""
    said = run(tiny, "runs", "--json")
    assert said.returncode == 0, said.stderr
    return [(row["job"], row["state"], row["step"]) for row in json.loads(said.stdout)]


def test_a_job_that_starts_over_keeps_what_it_had(job: MakeJob, undisturbed: Numbers) -> None:
    """Those who began again deleted the folder, and with it what could still be compared."""
    tiny = job(**{"trainer.seed": 1, "trainer.steps": 50 * STEPS})
    daemon = tiny.start()
    daemon.until_committed()
    assert "another daemon runs this job" in run(tiny, "run", "--fresh").stderr
    daemon.signal(signal.SIGTERM)
    assert daemon.exit_status() == 75
    stopped_at = tiny.result()["step"]
    tiny.set(**{"trainer.seed": SETTINGS["trainer.seed"], "trainer.steps": STEPS})
    assert tiny.start("--fresh").exit_status() == 0
    tiny.must_equal(undisturbed)
    assert {row["generation"] for row in step_rows(tiny.run_dir).values()} == {1}
    assert runs_of(tiny) == [("tiny", "COMPLETED", STEPS), ("tiny.1", "STOPPED", stopped_at)]


def test_workers_that_may_live_are_not_left_behind_by_starting_over(job: MakeJob) -> None:
    """Their daemon was killed; in a folder of another name nobody would find them."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_committed()
    daemon.kill()
    said = run(tiny, "run", "--fresh")
    assert said.returncode == 1
    assert "its workers may still train" in said.stderr
    assert tiny.start().exit_status() == 0
