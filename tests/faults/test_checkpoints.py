"""Saves that fail, are cut short, or rot: what is loaded is what was saved, or nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Numbers, until

full = pytest.mark.full


def flip_a_byte(checkpoint: Path) -> None:
    """In the middle of the file that holds the arrays."""
    files = list((checkpoint / "state" / "d").iterdir())
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def test_a_rotten_checkpoint_goes_to_quarantine_and_the_one_before_is_used(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Orbax loads a flipped bit without a word (FACTS 3.6): the digests must tell."""
    tiny = job()
    daemon = tiny.start()
    newest = daemon.until_committed(above=20)
    flip_a_byte(Path(newest["path"]))
    daemon.strike(1)
    rejected = daemon.until("restore_point_rejected")
    assert rejected["path"] == newest["path"]
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    resumed = tiny.events("workers_restored")
    assert [one["step"] for one in resumed] == [newest["step"] - 10]
    quarantine = tiny.run_dir / "checkpoints" / "quarantine"
    name = f"generation-1-{newest['step']}"
    assert (quarantine / name).is_dir()
    assert (quarantine / f"{name}.reason.txt").read_text().strip()
    assert tiny.result()["failures"] == 2
    charged = [one["budget"] for one in tiny.events("retry_granted")]
    assert charged == ["worker", "none"]  # rot is no failure of a worker
    tiny.note_recoveries("flipped byte")


@full
@pytest.mark.parametrize(
    "lost", ["commit_success.txt", "meta/metadata", "state/manifest.ocdbt", "state/d"]
)
def test_a_checkpoint_that_lacks_a_file_is_not_chosen(
    job: MakeJob, undisturbed: Numbers, lost: str
) -> None:
    """`latest_step()` named a save that was not on disk (maxtext#5260)."""
    tiny = job()
    daemon = tiny.start()
    newest = daemon.until_committed(above=20)
    path = Path(newest["path"]) / lost
    if path.is_dir():
        for one in path.iterdir():
            one.unlink()
    else:
        path.unlink()
    daemon.strike(0)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert [one["step"] for one in tiny.events("workers_restored")] == [newest["step"] - 10]


@full
def test_a_job_that_failed_goes_on_from_its_newest_snapshot(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """FAILED at step 100, checkpoint of 50, snapshot of 99: the next run started at 50."""
    tiny = job(**{"recovery.snapshot_every_steps": 1, "budgets.failures_max": 0})
    daemon = tiny.start()
    committed = daemon.until_committed(above=20)
    daemon.until_step(committed["step"] + 5)
    daemon.strike(1)
    assert daemon.exit_status() == 3
    (kept,) = tiny.events("snapshot_kept")
    assert kept["step"] > committed["step"]
    assert tiny.result()["step"] == kept["step"]
    tiny.set(**{"budgets.failures_max": 10})
    assert tiny.start().exit_status() == 0
    tiny.must_equal(undisturbed)
    starts = tiny.events("restore_point_selected", kind="checkpoint")
    assert [one["step"] for one in starts] == [kept["step"]]


@full
def test_a_kill_in_the_middle_of_a_save_leaves_nothing_that_is_loaded(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """SIGKILL during an asynchronous save: the step is there, and is not finished (CASES 19)."""
    tiny = job(**{"trainer.options.megabytes": 192})
    daemon = tiny.start()
    daemon.until_committed(above=10)
    half_done = tiny.run_dir / "checkpoints" / "generation-1" / "30"
    until(lambda: any((half_done / "state").glob("*")), "save of step 30")
    assert not (half_done / "commit_success.txt").exists()
    daemon.strike(0)
    daemon.until("first_step_taken", generation=2)
    assert not (half_done / "commit_success.txt").exists()
    assert [one["step"] for one in tiny.events("workers_restored")] == [20]
    assert daemon.exit_status() == 0
    assert tiny.numbers().losses == undisturbed.losses
    assert tiny.numbers().held_out_losses == undisturbed.held_out_losses
    tiny.note_recoveries("kill in a save of 192 MB")


@full
def test_failed_saves_are_told_and_training_goes_on(job: MakeJob, undisturbed: Numbers) -> None:
    """An asynchronous save failed unnoticed (orbax#605, CASES 20)."""
    tiny = job()
    daemon = tiny.start()
    first = daemon.until_committed()
    place = Path(first["path"]).parent
    aside = place.with_name("aside")
    place.rename(aside)
    place.write_text("a file where a directory should be")
    failed = daemon.until("checkpoint_failed")
    assert failed["step"] > first["step"]
    assert failed["error"]
    daemon.until_step(45)
    assert daemon.status()["restore_point"]["step"] == first["step"]
    assert tiny.failures() == []
    place.unlink()
    aside.rename(place)
    daemon.until_committed(above=40)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0


@full
def test_a_job_whose_last_save_fails_is_not_complete(job: MakeJob, undisturbed: Numbers) -> None:
    """COMPLETED means that the result can be loaded, not that the last step was computed."""
    tiny = job()
    daemon = tiny.start()
    daemon.until_committed(above=40)
    place = tiny.run_dir / "checkpoints" / "generation-1"
    aside = place.with_name("aside")
    place.rename(aside)
    place.write_text("a file where a directory should be")
    daemon.until("checkpoint_failed", step=60)
    place.unlink()
    aside.rename(place)
    assert daemon.exit_status(180) == 0
    tiny.must_equal(undisturbed)
    assert tiny.events("checkpoint_committed")[-1]["step"] == 60


@full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_costs_a_save_and_no_step(job: MakeJob, undisturbed: Numbers) -> None:
    """The disk of the checkpoints fills up, and is emptied again."""
    tiny = job()
    place = tiny.run_dir / "checkpoints"
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "everstep", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        daemon = tiny.start()
        daemon.until_committed()
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        failed = daemon.until("checkpoint_failed")
        assert "No space left on device" in failed["error"]
        daemon.until_step(failed["step"] + 5)
        filler.unlink()
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert tiny.result()["failures"] == 0
        tiny.must_be_sound()
    finally:
        for _ in range(50):
            if not subprocess.run(["umount", str(place)], check=False).returncode:
                break
            time.sleep(0.1)
