"""`--take-over` ends the daemon that holds a job, and nothing else; one that lost its job ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from supervisor.daemon.lock import LOCK_FILE, Holder, acquire, read_holder
from supervisor.errors import AlreadyRunning, Superseded
from tests.supervisor.daemon.test_lock import HOLD
from trainer.host.processes import look

Hold = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts processes that hold the lock of `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline()
        return holder

    yield start
    for one in started:
        one.kill()
        one.communicate()


def rewrite(run_dir: Path, **changed: object) -> Holder:
    """Change what stands in the lock of a holder that goes on holding it."""
    holder = read_holder(run_dir)
    assert holder is not None
    holder = replace(holder, **changed)  # type: ignore[arg-type]
    (run_dir / LOCK_FILE).write_text(json.dumps(asdict(holder)))
    return holder


@pytest.mark.parametrize("frozen", [True, False])
def test_a_holder_is_ended_frozen_or_not(tmp_path: Path, hold: Hold, frozen: bool) -> None:
    """A frozen daemon heeds no SIGTERM, and kept its job from going on for a night."""
    holder = hold()
    if frozen:
        holder.send_signal(signal.SIGSTOP)
    with acquire(tmp_path, take_over=True) as lock:
        assert holder.wait(5) == -signal.SIGKILL
        assert lock.epoch == 2
        lock.check()


def test_where_nobody_holds_the_job_there_is_nothing_to_end(tmp_path: Path, hold: Hold) -> None:
    """A unit file may always say --take-over."""
    holder = hold()
    holder.kill()
    holder.wait()
    with acquire(tmp_path, take_over=True) as lock:
        assert lock.epoch == 2


def test_the_refusal_tells_of_the_option(tmp_path: Path, hold: Hold) -> None:
    """Who meets a frozen daemon for the first time does not know that there is one."""
    holder = hold()
    with pytest.raises(AlreadyRunning) as caught:
        acquire(tmp_path)
    text = str(caught.value)
    assert f"pid {holder.pid} on " in text
    assert "since 20" in text
    assert "--take-over" in text


def test_a_holder_on_another_host_is_left_alone(tmp_path: Path, hold: Hold) -> None:
    """The same pid is somebody else's here."""
    holder = hold()
    rewrite(tmp_path, host="far-away", machine="another boot/pid:[1]")
    with pytest.raises(AlreadyRunning, match="use it on far-away"):
        acquire(tmp_path, take_over=True)
    assert holder.poll() is None


def test_a_pid_that_is_anothers_by_now_is_left_alone(tmp_path: Path, hold: Hold) -> None:
    """Pids are used again; the start time tells."""
    holder = hold()
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        row = look(bystander.pid)
        assert row is not None
        rewrite(tmp_path, pid=bystander.pid, after_boot_s=row.identity.started_at - 5.0)
        with pytest.raises(AlreadyRunning, match="its pid is another process's now"):
            acquire(tmp_path, take_over=True)
        assert bystander.poll() is None
        assert holder.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_lock_without_a_name_is_not_guessed_at(tmp_path: Path, hold: Hold) -> None:
    """Whoever holds the file is not known to be a daemon."""
    holder = hold()
    (tmp_path / LOCK_FILE).write_text("")
    with pytest.raises(AlreadyRunning, match="nothing is ended on a guess"):
        acquire(tmp_path, take_over=True)
    assert holder.poll() is None


def test_a_record_of_an_older_version_names_no_process_to_end(tmp_path: Path, hold: Hold) -> None:
    """It is read all the same: `status` and the refusal name its pid."""
    holder = hold()
    record = json.loads((tmp_path / LOCK_FILE).read_text())
    del record["machine"], record["after_boot_s"]
    (tmp_path / LOCK_FILE).write_text(json.dumps(record))
    with pytest.raises(AlreadyRunning, match=f"pid {holder.pid} .* another container"):
        acquire(tmp_path, take_over=True)
    assert holder.poll() is None


def test_who_lost_the_lock_to_another_is_told_by_whom(tmp_path: Path) -> None:
    """`rm lock`, or a file system that forgot it: two daemons hold it, one epoch is over."""
    with acquire(tmp_path) as old:
        old.check()
        (tmp_path / LOCK_FILE).unlink()
        with acquire(tmp_path) as new:
            new.check()
            with pytest.raises(Superseded, match=r"epoch 1 is over: pid \d+ .*\(epoch 2\)") as told:
                old.check()
    assert told.value.exit_status == 73
    (tmp_path / "epoch").unlink()
    old.check()  # a disk that cannot be read proves nothing


def test_looking_at_the_lock_keeps_no_daemon_from_it(tmp_path: Path) -> None:
    """`status` holds it for a moment; a start at that moment was refused."""
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); "
        "print(1, flush=True); time.sleep(0.1)"
    )
    with acquire(tmp_path):
        pass
    command = [sys.executable, "-c", code, str(tmp_path / LOCK_FILE)]
    looking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert looking.stdout is not None
    assert looking.stdout.readline()
    begun = time.monotonic()
    with acquire(tmp_path) as lock:
        assert lock.epoch == 2
    assert time.monotonic() - begun < 2.0
    looking.communicate()
