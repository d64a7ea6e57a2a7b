"""A run directory is copied, deleted, replaced or moved, with its job running or just killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Numbers

full = pytest.mark.full


def test_a_copy_of_a_running_job_leaves_the_original_alone(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """It took the original's Ray head and Redis for its own, and killed both at its end."""
    original, copy = job(**{"trainer.options.pace_s": 0.3}), job()
    first = original.start()
    first.until_committed()
    copy.run_dir.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", original.run_dir, copy.run_dir], check=True)
    second = copy.start()
    assert second.exit_status() == 0
    copy.must_equal(undisturbed)
    assert first.exit_status() == 0
    original.must_equal(undisturbed)
    assert original.result()["generations"] == 1


def test_what_is_left_of_a_deleted_run_is_ended_before_the_next_begins(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """The old workers trained on; the new daemon looped in RESTORING, and left nine processes."""
    tiny = job(**{"trainer.options.pace_s": 0.3})
    first = tiny.start()
    first.until_committed()
    session = Path(tiny.embedded("ray")["temp_dir"])
    first.kill()
    subprocess.run(["rm", "-rf", tiny.run_dir], check=True)
    second = tiny.start()
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["generations"] == 1
    assert not session.exists()


@full
def test_a_job_whose_directory_is_emptied_stops_with_a_sentence_and_leaves_nothing(
    job: MakeJob,
) -> None:
    """`rm -rf` met a file that was written meanwhile: the job trained on without a journal."""
    tiny = job(**{"trainer.options.pace_s": 0.3})
    daemon = tiny.start()
    daemon.until_committed()
    for path in tiny.run_dir.iterdir():
        subprocess.run(["rm", "-rf", path], check=False)
    assert daemon.exit_status(20) == 4
    assert "has lost its files" in daemon.tail()
    assert "Traceback" not in daemon.output.read_text()
    tiny.must_leave_nothing()
    subprocess.run(["rm", "-rf", tiny.run_dir], check=True)


def test_a_job_whose_directory_is_moved_stops_with_a_sentence_and_goes_on_once_it_is_back(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """It went on in a new folder of the old name, ended with 70, and left Ray and Redis."""
    tiny = job(**{"trainer.options.pace_s": 0.3})
    first = tiny.start()
    first.until_committed()
    elsewhere = tiny.folder / "elsewhere"
    tiny.run_dir.rename(elsewhere)
    assert first.exit_status(20) == 4
    assert "it was moved or deleted while the job ran" in first.tail()
    assert "Traceback" not in first.output.read_text()
    assert not tiny.run_dir.exists()
    tiny.must_leave_nothing()
    elsewhere.rename(tiny.run_dir)
    assert tiny.start().exit_status() == 0
    tiny.must_equal(undisturbed)
