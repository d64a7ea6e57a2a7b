"""One daemon follows another: frozen, long dead, of another version, or with other settings."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from supervisor.record.journal import decode, encode
from tests.faults.conftest import MakeJob
from tests.faults.harness import STEPS, Daemon, Job, Numbers, gone, run, until
from trainer.host.processes import Identity
from trainer.slot.orphans import how_they_ended
from trainer.state import snapshot

full = pytest.mark.full


def test_a_daemon_that_wakes_after_another_took_its_job_ends_and_touches_nothing(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A suspended machine woke with a daemon whose job ran elsewhere by then."""
    tiny = job(**{"trainer.options.pace_s": 0.3})
    first = tiny.start()
    first.until_committed()
    workers = [first.worker(0), first.worker(1)]
    first.signal(signal.SIGSTOP)
    refused = run(tiny)
    assert refused.returncode == 73
    assert str(first.pid) in refused.stderr
    assert "--take-over" in refused.stderr
    (tiny.run_dir / "lock").unlink()  # somebody "repairs" the lock: now two can have it
    second = tiny.start()
    second.until("supervisor_restarted")
    written = tiny.records()
    woken = first.signal(signal.SIGCONT)
    assert first.exit_status(10) == 73
    tiny.figures.add("a daemon that lost its job: from waking to its end (s)", time.time() - woken)
    assert f"pid {second.pid}" in first.tail()
    assert "epoch 1 is over" in first.tail()
    assert tiny.records()[: len(written)] == written
    assert {record["epoch"] for record in tiny.records()[len(written) :]} <= {2}
    assert second.status()["state"] == "RUNNING"  # its socket, Redis and Ray are still there
    assert [second.worker(0), second.worker(1)] == workers
    second.signal(signal.SIGSTOP)
    third = tiny.start("--take-over")
    adopted = third.until("supervisor_restarted")["adopted"]
    assert second.exit_status(5) == -signal.SIGKILL
    assert [pid for _, _, pid in adopted] == [one.pid for one in workers]
    assert third.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["generations"] == 1
    assert tiny.result()["failures"] == 0


@full
def test_a_job_goes_on_for_a_minute_under_a_frozen_daemon_and_is_taken_over(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Training does not wait for anybody; what happened meanwhile is heard by the next."""
    tiny = job(**{"trainer.options.pace_s": 1.5})
    first = tiny.start()
    first.until_committed()
    workers = [first.worker(0), first.worker(1)]
    before = first.until_step(0)
    first.signal(signal.SIGSTOP)
    time.sleep(60.0)  # real time is what this is about
    assert first.until_step(0) > before + 20
    second = tiny.start("--take-over")
    second.until("supervisor_restarted")
    assert first.exit_status(5) == -signal.SIGKILL
    assert [second.worker(0), second.worker(1)] == workers
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0


@full
def test_a_living_daemon_is_taken_over_too(job: MakeJob, undisturbed: Numbers) -> None:
    """It must not drain the job on its way out: it is ended by SIGKILL."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    first = tiny.start()
    first.until_committed()
    second = tiny.start("--take-over")
    second.until("supervisor_restarted")
    assert first.exit_status(5) == -signal.SIGKILL
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["generations"] == 1


def left_alone(tiny: Job, daemon: Daemon) -> list[Identity]:
    """Kill the daemon; returns the workers, once they and their slots have ended by themselves."""
    workers = [daemon.worker(0), daemon.worker(1)]
    slots = [daemon.slot(0), daemon.slot(1)]
    daemon.kill()
    killed = time.time()
    until(lambda: all(map(gone, [*workers, *slots])), "end of the orphans")
    tiny.figures.add("death of the daemon to the end of its orphans (s)", time.time() - killed)
    assert not snapshot.directory_of(tiny.run_dir).exists()
    tiny.must_leave_nothing(20.0)  # their Ray and their Redis neither
    return workers


@full
def test_workers_without_a_daemon_save_and_end_and_the_next_daemon_goes_on_from_there(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Workers whose daemon nobody started again held their machines for days (skypilot#9672)."""
    tiny = job(
        **{
            "trainer.options.pace_s": 0.4,
            "recovery.orphan_after_s": 5.0,
            "recovery.snapshot_every_steps": 1,
            "recovery.standby": "generation",
        }
    )
    first = tiny.start()
    committed = first.until_committed()["step"]
    first.until("standby_ready")
    left_alone(tiny, first)
    ended = how_they_ended(tiny.run_dir, 1)
    assert ended is not None
    assert (ended["saved"], ended["completed"]) == (True, None)
    assert ended["step"] > committed
    second = tiny.start()
    orphaned = second.until("workers_orphaned")
    assert orphaned["step"] == ended["step"]
    chosen = second.until("restore_point_selected")
    assert (chosen["kind"], chosen["step"]) == ("checkpoint", ended["step"])
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert second.until("retry_granted")["budget"] == "none"
    rows = (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == sorted(set(steps))  # nothing was done twice


@full
def test_a_job_that_finishes_as_an_orphan_is_complete(job: MakeJob, undisturbed: Numbers) -> None:
    """It commits, waits, and ends; the next daemon says so from the files and starts nothing."""
    tiny = job(**{"trainer.options.pace_s": 0.1, "recovery.orphan_after_s": 8.0})
    first = tiny.start()
    first.until_committed()
    left_alone(tiny, first)
    ended = how_they_ended(tiny.run_dir, 1)
    assert ended is not None
    assert ended["completed"]["step"] == STEPS
    second = tiny.start()
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert len(tiny.events("workers_started")) == 1
    assert tiny.result()["failures"] == 0


@full
def test_a_living_daemon_keeps_its_workers_from_being_orphans(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """The long poll of a watch is silent for longer than this limit; the canary is not."""
    tiny = job(**{"trainer.options.pace_s": 0.5, "recovery.orphan_after_s": 4.0})
    assert tiny.start().exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["generations"] == 1
    assert how_they_ended(tiny.run_dir, 1) is None


@full
def test_what_another_version_has_begun_is_drained_and_goes_on(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """everstep was upgraded under a running job, whose table is another one now."""
    tiny = job(**{"trainer.options.pace_s": 0.3})
    first = tiny.start()
    committed = first.until_committed()["step"]
    workers = [first.worker(0), first.worker(1)]
    first.kill()
    path = tiny.run_dir / "journal.jsonl"
    header, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(encode({**decode(header), "table": "0" * 16}) + b"".join(rest))
    second = tiny.start()
    assert second.until("job_started")["after"] == "RUNNING"
    chosen = second.until("restore_point_selected")
    assert chosen["step"] > committed  # they saved before they were ended
    assert all(map(gone, workers))
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    rows = (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == sorted(set(steps))


@full
def test_changed_settings_are_named_and_count_when_the_workers_start_anew(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Whoever edits the file of a running job must neither disturb it nor wonder."""
    tiny = job(**{"trainer.options.pace_s": 0.3})
    first = tiny.start()
    first.until_committed()
    workers = [first.worker(0), first.worker(1)]
    first.kill()
    tiny.set(**{"checkpoint.every_steps": 7, "heartbeats.lease_s": 2.0})
    second = tiny.start()
    second.until("supervisor_restarted")
    assert second.status()["settings_changed"] == ["heartbeats.lease_s", "checkpoint.every_steps"]
    assert "checkpoint.every_steps" in run(tiny, "status").stdout.replace("\n", "")
    assert [second.worker(0), second.worker(1)] == workers
    assert second.until_committed()["step"] % 10 == 0
    os.kill(workers[1].pid, signal.SIGKILL)
    assert second.until("job_started")["after"] == "RESTORING"
    second.until("first_step_taken")
    assert second.status()["settings_changed"] == []
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    late = [one["step"] for one in tiny.events("checkpoint_committed") if one["generation"] > 1]
    assert all(step % 7 == 0 for step in late[:-1])
    (recovery,) = tiny.result()["recoveries"]
    assert recovery["event"] == "worker_crashed"
    assert recovery["total_s"] is not None
    tiny.figures.add("a restart under changed settings (s)", recovery["total_s"])
