"""The life of a run directory: its job completed, trained longer, started over."""

from __future__ import annotations

from tests.faults.conftest import MakeJob
from tests.faults.harness import STEPS, Numbers, run, step_rows


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
