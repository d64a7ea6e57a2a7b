"""Disks that are full or read-only: it is said, training goes on, nothing half is taken for whole.

Each disk is a small tmpfs of the test's own, below the directory of the job.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.disk.restore_points import survey
from tests.faults.conftest import MakeJob
from tests.faults.harness import Daemon, Job, Numbers, gone, until

full = pytest.mark.full

FULL, READ_ONLY = os.strerror(errno.ENOSPC), os.strerror(errno.EROFS)
BALLAST = "ballast"
SMALL_KB = 8  # less than three snapshots of the tiny job
STANDBY: dict[str, Any] = {
    "recovery.standby": "generation",
    "recovery.snapshot_every_steps": 1,
}


@contextmanager
def disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own at `path`. Skips where mounting is not permitted."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = f"size={megabytes}m,mode=0700,uid={os.getuid()}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "everstep-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def read_only(path: Path, *, on: bool) -> None:
    """Remount."""
    option = "remount,ro" if on else "remount,rw"
    subprocess.run(["mount", "-o", option, str(path)], check=True)


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Inside, not one byte more fits, and what is deleted is taken at once by somebody else."""
    over = threading.Event()

    def fill() -> None:
        with (path / BALLAST).open("ab", buffering=0) as file:
            while not over.wait(0.01):
                for size in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(b"\0" * size)

    somebody = threading.Thread(target=fill, daemon=True)
    somebody.start()
    until(lambda: shutil.disk_usage(path).free == 0, "a full disk", 10)
    try:
        yield
    finally:
        over.set()
        somebody.join()
        (path / BALLAST).unlink()


@contextmanager
def read_only_disk(path: Path) -> Iterator[None]:
    """Inside, nothing can be written."""
    read_only(path, on=True)
    try:
        yield
    finally:
        read_only(path, on=False)


def step_of(daemon: Daemon) -> int:
    """By the heartbeats, which need no disk."""
    return int(daemon.status()["step"])


def must_go_on(daemon: Daemon, steps: int = 5) -> None:
    """So many steps are done from now on."""
    first = step_of(daemon)
    until(lambda: step_of(daemon) >= first + steps, f"{steps} more steps", 30)


def troubles(daemon: Daemon) -> set[str]:
    """What `status` says cannot be written."""
    return {row["what"] for row in daemon.status()["disk"]}


def failures_after(tiny: Job, step: int) -> bool:
    """Whether a save of a later step has failed."""
    return any(one["step"] > step for one in tiny.events("checkpoint_failed"))


def must_have_no_half_point(tiny: Job) -> None:
    """Whatever looks like a checkpoint is one."""
    points, rejected = survey(tiny.run_dir)
    assert points
    assert all(one.unfinished or one.path.name == BALLAST for one in rejected), rejected


def test_a_full_disk_stops_decisions_and_not_the_training(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Everything on one disk, as at home: journal, metrics, logs, checkpoints."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.2})
    with disk(tiny.run_dir, 32):
        daemon = tiny.start()
        daemon.until("standby_ready")
        with full_disk(tiny.run_dir):
            until_journal_is_lost(daemon)
            must_go_on(daemon)
            until(lambda: "metrics" in troubles(daemon), "trouble with the metrics", 10)
            moves = len(tiny.moves())
            workers = [daemon.worker(rank).pid for rank in (0, 1)]
        until(lambda: daemon.status()["journal_lost_since"] is None, "a journal again", 10)
        until(lambda: troubles(daemon) <= {"checkpoint"}, "all else written again", 20)
        assert [daemon.worker(rank).pid for rank in (0, 1)] == workers
        assert len(tiny.moves()) > moves  # what waited was written, and then done
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)  # no line of the metrics is missing
        assert tiny.result()["failures"] == 0
        must_have_no_half_point(tiny)
        said = daemon.output.read_text()
        assert "journal_lost" in said
        assert "journal_recovered" in said
        assert FULL in said
        tiny.must_be_sound()


@full
def test_a_death_while_the_journal_is_full_is_decided_when_there_is_room(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """An order that is not written down is not given: not one worker may be started by it."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.2})
    with disk(tiny.run_dir, 32):
        daemon = tiny.start()
        daemon.until("standby_ready")
        with full_disk(tiny.run_dir):
            until_journal_is_lost(daemon)
            daemon.strike(1)
            time.sleep(3.0)
            assert tiny.failures() == []
            assert daemon.status()["generation"] == 1
        daemon.until("worker_crashed")
        daemon.until("first_step_taken", generation=2)
        assert daemon.exit_status() == 0
        assert tiny.numbers().digest == undisturbed.digest
        assert tiny.result()["failures"] == 1
        tiny.must_be_sound()


@full
def test_a_daemon_on_a_full_disk_can_be_sent_away_and_the_next_one_goes_on(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Ctrl-C did nothing, however often: a stop is an order, and no order could be written."""
    tiny = job(**{"trainer.options.pace_s": 0.4})
    with disk(tiny.run_dir, 32):
        daemon = tiny.start()
        daemon.until_committed()
        workers = [daemon.worker(rank) for rank in (0, 1)]
        with full_disk(tiny.run_dir):
            until_journal_is_lost(daemon)
            daemon.signal(signal.SIGINT)
            time.sleep(2.0)
            assert daemon.process.poll() is None  # there may be room in a moment
            daemon.signal(signal.SIGINT)
            assert daemon.exit_status(20) == 75
            assert FULL in daemon.tail()
            assert not any(gone(one) for one in workers)
        successor = tiny.start()
        adopted = successor.until("supervisor_restarted")["adopted"]
        assert [pid for _, _, pid in adopted] == [one.pid for one in workers]
        assert successor.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert tiny.result()["failures"] == 0
        tiny.must_be_sound()


@full
def test_checkpoints_that_a_full_disk_refuses_are_told_and_come_back(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """An asynchronous save failed unnoticed, and days hung on one old file (orbax#605)."""
    tiny = job(**{"trainer.options.pace_s": 0.15})
    checkpoints = tiny.run_dir / "checkpoints"
    with disk(checkpoints, 8):
        daemon = tiny.start()
        good = daemon.until_committed()
        with full_disk(checkpoints):
            failed = daemon.until("checkpoint_failed")
            assert FULL in failed["error"]
            assert "checkpoint" in troubles(daemon)
            must_go_on(daemon)
            must_have_no_half_point(tiny)
        later = daemon.until_committed(above=failed["step"])
        assert troubles(daemon) == set()
        with full_disk(checkpoints):
            until(lambda: failures_after(tiny, later["step"]), "another failure", 30)
            daemon.strike(1)  # what is committed is what counts
            chosen = daemon.until("restore_point_selected", kind="checkpoint")
            assert chosen["step"] > good["step"]
            assert chosen["step"] in {one["step"] for one in tiny.events("checkpoint_committed")}
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        must_have_no_half_point(tiny)
        tiny.must_be_sound()


@full
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_the_last_checkpoint_waits_for_its_disk(
    job: MakeJob, undisturbed: Numbers, how: str
) -> None:
    """The state is all there; ending the job for want of a megabyte would throw it away."""
    tiny = job(**{"trainer.options.pace_s": 0.1, "deadlines.checkpoint_s": 3.0})
    checkpoints = tiny.run_dir / "checkpoints"
    with disk(checkpoints, 8):
        daemon = tiny.start()
        daemon.until_committed()
        with full_disk(checkpoints) if how == "full" else read_only_disk(checkpoints):
            failed = daemon.until("checkpoint_failed", step=60)
            assert (FULL if how == "full" else READ_ONLY) in failed["error"]
            time.sleep(8.0)  # longer than the deadline of the phase: it waits, and does not hang
            assert daemon.status()["state"] == "RUNNING"
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert tiny.result()["failures"] == 0
        tiny.must_be_sound()


@full
def test_logs_that_a_full_disk_refuses_cost_lines_and_no_worker(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """`print` raised OSError in the loop; the file of the second witness had no room."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.2, "trainer.task": "paced:Talkative"})
    logs = tiny.run_dir / "logs"
    with disk(logs, 2):
        daemon = tiny.start()
        daemon.until("standby_ready")
        with full_disk(logs):
            must_go_on(daemon)
            until(lambda: "log" in troubles(daemon), "trouble with a log", 10)
            daemon.strike(1)
            daemon.until("standby_ready", generation=3)  # started without room for its files
            assert "beat" in troubles(daemon)
            assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert tiny.result()["failures"] == 1
        assert len(tiny.events("standby_lost")) == 0
        said = [one["action"] for one in tiny.events("housekeeping_failed")]
        assert "to write the log of rank 0" in said
        tiny.must_be_sound()


@full
def test_a_job_without_a_place_for_logs_trains_all_the_same(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A log directory on a share that turned read-only; SIGKILL must still be proven."""
    tiny = job(**{"trainer.options.pace_s": 0.05})
    logs = tiny.run_dir / "logs"
    with disk(logs, 2), read_only_disk(logs):
        daemon = tiny.start()
        daemon.until_committed()
        assert troubles(daemon) == {"log", "beat"}
        daemon.strike(1)
        daemon.until("first_step_taken", generation=2)
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert tiny.events("exit_unproven") == []
        tiny.must_be_sound()


@full
def test_a_hang_is_found_without_the_file_of_the_second_witness(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A worker whose slot cannot say more than that it lives is judged by its heartbeats."""
    tiny = job(**{"trainer.options.pace_s": 0.05, "deadlines.step_s": 1.5})
    logs = tiny.run_dir / "logs"
    with disk(logs, 2), read_only_disk(logs):
        daemon = tiny.start()
        daemon.until_committed()
        daemon.order(1, "sleep")
        stalled = daemon.until("progress_stalled")
        assert 1 in stalled["ranks"]
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        tiny.must_be_sound()


@full
def test_a_directory_that_cannot_be_written_at_all_is_named_at_once(job: MakeJob) -> None:
    """A traceback of the lock file told nobody what to do."""
    tiny = job()
    with disk(tiny.run_dir, 1):
        for refusing, words in ((read_only_disk, READ_ONLY), (full_disk, FULL)):
            with refusing(tiny.run_dir):
                daemon = tiny.start()
                assert daemon.exit_status(60) == 4
                said = daemon.output.read_text()
                assert str(tiny.run_dir) in said
                assert words in said
                assert "Traceback" not in said
        tiny.must_leave_nothing()


@full
def test_an_incident_without_room_for_its_evidence_recovers_all_the_same(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Evidence never stops a recovery."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.2})
    with disk(tiny.run_dir / "incidents", 1) as incidents, full_disk(incidents):
        daemon = tiny.start()
        daemon.until("standby_ready")
        daemon.strike(1)
        assert daemon.exit_status() == 0
        tiny.must_equal(undisturbed)
        assert not list(incidents.rglob("incident.json"))
        told = [json.loads(line) for line in daemon.output.read_text().splitlines()]
        assert any(FULL in json.dumps(line) for line in told)
        assert tiny.events("housekeeping_failed", action="RecordIncident")
        tiny.must_be_sound()


@full
def test_a_container_with_little_shared_memory_trains_and_says_what_snapshots_need(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """The 64 MB of a container held no state; `status` said nothing, and recoveries were long."""
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.1})
    small = f'mount -t tmpfs -o size={SMALL_KB}k,mode=1777 small /dev/shm && exec "$@"'
    daemon = tiny.start(under=("unshare", "--mount", "sh", "-c", small, "sh"))
    daemon.until("first_step_taken")
    until(lambda: "snapshots" in troubles(daemon), "trouble with snapshots", 30)
    rows = [row for row in daemon.status()["disk"] if row["what"] == "snapshots"]
    assert all("snapshots of this rank need 4224 bytes" in row["why"] for row in rows), rows
    daemon.until_committed()
    daemon.strike(1)
    daemon.until("restore_point_selected", kind="checkpoint")
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1
    tiny.must_be_sound()


def until_journal_is_lost(daemon: Daemon) -> None:
    """What is left of the last page of a file still takes a line or two."""
    until(lambda: daemon.status()["journal_lost_since"] is not None, "a lost journal", 60)
