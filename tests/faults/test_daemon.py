"""The daemon dies, is stopped, is paused, is started twice; its store dies. The job goes on."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest

from supervisor.daemon.loop import ONE_SIGNAL_S
from tests.faults.conftest import MakeJob
from tests.faults.harness import STEPS, Daemon, Job, Numbers, gone, run, step_rows
from trainer.host.processes import Identity, look

full = pytest.mark.full


def test_a_daemon_that_is_killed_loses_no_line_and_its_workers_go_on(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Ray Train's controller dies with its driver, and the run with it (dlrover#1342)."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    first = tiny.start()
    first.until_committed()
    refused = run(tiny)
    assert refused.returncode == 73
    assert str(first.pid) in refused.stderr
    memory = psutil.Process(first.pid).memory_info().rss
    tiny.figures.add("memory of the daemon (MB)", memory / 1e6)
    assert memory < 200e6
    before = tiny.records()
    old = [first.worker(0), first.worker(1)]
    first.kill()
    written = tiny.records()
    assert written[: len(before)] == before
    said = first.moves_said()
    kept = [record["event"]["event"] for record in written if record["kind"] == "move"]
    assert said == kept[: len(said)]
    assert len(kept) - len(said) <= 1  # journalled and not yet said
    told = json.loads(run(tiny, "status", "--json").stdout)
    assert (told["state"], told["steps"]) == ("RUNNING", STEPS)
    assert told["attention"].endswith(f"python -m supervisor --config {tiny.folder}/job.toml")
    step = first_step_after(tiny)
    second = tiny.start()
    restarted = second.until("supervisor_restarted")
    assert [pid for _, _, pid in restarted["adopted"]] == [one.pid for one in old]
    tiny.figures.add("start of a daemon to adoption (s)", restarted["at"] - second.started_at)
    assert first_step_after(tiny) > step
    assert not any(gone(one) for one in old)
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.records()[: len(written)] == written
    assert tiny.result()["generations"] == 1
    assert tiny.result()["failures"] == 0


def first_step_after(tiny: Job) -> int:
    """A step that was finished after this call: training goes on, daemon or not."""
    path = tiny.run_dir / "metrics.jsonl"
    size = path.stat().st_size
    deadline = time.monotonic() + 20
    while path.stat().st_size == size:
        assert time.monotonic() < deadline, "training has stopped"
        time.sleep(0.02)
    return int(json.loads(path.read_text().splitlines()[-1])["step"])


def test_a_crash_while_the_daemon_is_dead_is_found_by_the_next(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """The slot kept the exit, with its signal, until somebody asked."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    first = tiny.start()
    first.until_committed()
    victim = first.worker(1)
    first.kill()
    os.kill(victim.pid, signal.SIGKILL)
    second = tiny.start()
    crash = second.until("worker_crashed")
    assert (crash["ranks"], crash["signal"]) == ([1], "SIGKILL")
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1


@full
def test_a_job_that_ends_while_the_daemon_is_dead_is_completed_by_the_next(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """The workers commit and wait to be told that they may go."""
    tiny = job(**{"trainer.options.pace_s": 0.1})
    first = tiny.start()
    first.until_committed()
    first.kill()
    deadline = time.monotonic() + 90
    while max(step_rows(tiny.run_dir)) < STEPS - 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert tiny.start().exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["generations"] == 1


@full
def test_a_head_that_dies_with_its_daemon_is_charged_to_nobody(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Nothing is left to adopt; the next daemon starts a head of its own and restores."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    first = tiny.start()
    first.until_committed()
    record = json.loads((tiny.run_dir / "embedded.json").read_text())["ray"]
    first.kill()
    for pid, _ in record["processes"].values():
        os.kill(int(pid), signal.SIGKILL)
    second = tiny.start()
    assert second.until("supervisor_restarted")["slots"] is False
    second.until("slots_vanished")
    assert second.until("retry_granted")["budget"] == "none"
    assert second.exit_status() == 0
    tiny.must_equal(undisturbed)


@full
def test_a_daemon_may_be_killed_in_every_state(job: MakeJob, undisturbed: Numbers) -> None:
    """`kill -9` at each transition, then the same command again (CASES 7, 26)."""
    tiny = job(**{"trainer.options.pace_s": 0.6})  # no daemon is so long away that it ends
    daemon = tiny.start()
    daemon.until("restore_point_selected")  # PROVISIONING: Ray is being started
    daemon = again(tiny)
    daemon.until("slots_placed")  # INITIALIZING
    daemon = again(tiny)
    daemon.until("workers_initialized")  # RUNNING
    daemon = again(tiny)
    daemon.until_committed()
    daemon.strike(1)
    daemon.until_state("DRAINING")
    daemon = again(tiny)
    daemon.until_state("RESTORING")
    daemon = again(tiny)
    daemon.until("first_step_taken")
    daemon.signal(signal.SIGTERM)
    daemon.until_state("DRAINING")  # the last save
    daemon = again(tiny)
    assert daemon.exit_status() == 75
    assert tiny.start().exit_status() == 0
    tiny.must_equal(undisturbed)
    started = [one["generation"] for one in tiny.events("workers_started")]
    assert started == sorted(started)


def test_a_stopped_job_saves_says_who_stopped_it_and_resumes(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A scheduler must know whether to requeue: 75 after a signal, 5 after an operator."""
    tiny = job(**{"trainer.options.pace_s": 0.1})
    first = tiny.start()
    first.until_step(12)
    at = first.signal(signal.SIGINT)
    assert first.exit_status() == 75
    tiny.figures.add("SIGINT to the end of the daemon (s)", time.time() - at)
    saved = tiny.events("workers_saved")
    assert tiny.result()["state"] == "STOPPED"
    assert saved[0]["step"] > 12
    tiny.must_leave_nothing()
    second = tiny.start()
    assert second.until("restore_point_selected")["step"] == saved[0]["step"]
    second.until_step(saved[0]["step"] + 2)
    stopped = run(tiny, "stop")
    assert stopped.returncode == 0
    assert second.exit_status(5) == 5
    saved = tiny.events("workers_saved")
    assert tiny.events("checkpoint_committed", step=saved[1]["step"])
    third = tiny.start()
    assert third.until("restore_point_selected")["step"] == saved[1]["step"]
    assert third.exit_status() == 0
    tiny.must_equal(undisturbed)
    rows = (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == sorted(set(steps))  # nothing was done twice
    assert tiny.start().exit_status() == 0  # there is nothing left to do
    assert tiny.numbers().digest == undisturbed.digest


@full
def test_a_second_interrupt_ends_the_workers_at_once(job: MakeJob) -> None:
    """Who presses Ctrl-C twice does not want to wait for a save."""
    tiny = job(**{"trainer.options.pace_s": 4.0})
    daemon = tiny.start()
    daemon.until("first_step_taken")
    daemon.signal(signal.SIGINT)
    daemon.until("stop_requested", now=False)
    time.sleep(ONE_SIGNAL_S)  # sooner it is the same one
    at = daemon.signal(signal.SIGINT)
    assert daemon.exit_status() == 75
    ended = tiny.events("workers_gone")[0]
    tiny.figures.add("second SIGINT to the end of the workers (s)", ended["at"] - at)
    assert ended["at"] - at < 0.5
    assert tiny.events("workers_saved") == []


@full
def test_a_store_that_dies_harms_no_worker(job: MakeJob, undisturbed: Numbers) -> None:
    """Blind, not dead: an outage of the store looked like dead workers (resque#1883)."""
    tiny = job(**{"trainer.options.pace_s": 0.15})
    daemon = tiny.start()
    daemon.until_committed()
    workers = [daemon.worker(0), daemon.worker(1)]
    os.kill(redis_of(tiny).pid, signal.SIGKILL)
    daemon.until("heartbeat_store_lost")
    recovered = daemon.until("heartbeat_store_recovered")
    tiny.figures.add("blind after the store's death (s)", recovered["blind_s"])
    store = redis_of(tiny)
    os.kill(store.pid, signal.SIGSTOP)  # frozen for longer than a lease and any deadline of a step
    daemon.until_step(50)
    os.kill(store.pid, signal.SIGCONT)
    assert [daemon.worker(0), daemon.worker(1)] == workers
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0
    assert len(tiny.events("heartbeat_store_lost")) == 2


@full
def test_a_daemon_that_was_paused_blames_nobody(job: MakeJob, undisturbed: Numbers) -> None:
    """A laptop's lid, a frozen container: the daemon's own silence is no silence of workers."""
    tiny = job(**{"trainer.options.pace_s": 0.15})
    daemon = tiny.start()
    daemon.until_committed()
    daemon.signal(signal.SIGSTOP)
    time.sleep(5.0)  # longer than a lease: real time is what this is about
    daemon.signal(signal.SIGCONT)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0


def again(tiny: Job) -> Daemon:
    """kill -9 of the newest daemon, and the same command once more; it has taken over."""
    tiny.daemons[-1].kill()
    daemon = tiny.start()
    daemon.until("supervisor_restarted")
    return daemon


def redis_of(tiny: Job) -> Identity:
    """The job's own redis-server."""
    record = json.loads((tiny.run_dir / "embedded.json").read_text())["redis"]
    row = look(int(record["processes"]["redis-server"][0]))
    assert row is not None
    return row.identity
