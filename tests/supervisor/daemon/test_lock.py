"""One daemon a job, and epochs that only grow."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.daemon.lock import EPOCH_FILE, LOCK_FILE, acquire, is_held, read_holder
from supervisor.errors import AlreadyRunning, DiskError

HOLD = (
    "import sys, pathlib, time; from supervisor.daemon.lock import acquire; "
    "lock = acquire(pathlib.Path(sys.argv[1])); print(lock.epoch, flush=True); time.sleep(60)"
)


def test_a_second_daemon_is_told_who_runs_the_job(tmp_path: Path) -> None:
    """Two daemons of one job killed each other's workers in turn."""
    with acquire(tmp_path / "job") as lock, pytest.raises(AlreadyRunning) as caught:
        acquire(tmp_path / "job")
    assert lock.epoch == 1
    assert caught.value.exit_status == 73
    for word in (f"pid {os.getpid()}", socket.gethostname(), "since 20", "epoch 1"):
        assert word in str(caught.value)


def test_each_daemon_takes_the_next_epoch(tmp_path: Path) -> None:
    """An order of the daemon before must be seen to be one."""
    for epoch in (1, 2, 3):
        with acquire(tmp_path) as lock:
            assert lock.epoch == epoch
    (tmp_path / EPOCH_FILE).unlink()  # restored from a backup without it
    with acquire(tmp_path) as lock:
        assert lock.epoch == 4


def test_a_killed_daemon_holds_nothing(tmp_path: Path) -> None:
    """A pid file of a daemon that was killed kept its successor out."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        assert is_held(tmp_path)
        held_by = read_holder(tmp_path)
        assert held_by is not None
        assert held_by.pid == holder.pid
        assert abs(held_by.started_at - time.time()) < 60
        with pytest.raises(AlreadyRunning, match=f"pid {holder.pid} "):
            acquire(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert not is_held(tmp_path)
    with acquire(tmp_path) as lock:
        assert lock.epoch == 2


def test_processes_that_the_daemon_starts_do_not_inherit_the_lock(tmp_path: Path) -> None:
    """A Ray head that outlived its daemon kept the job locked for ever."""
    with acquire(tmp_path):
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        )
        try:
            links = [link.resolve() for link in Path(f"/proc/{child.pid}/fd").iterdir()]
            assert links
            assert tmp_path / LOCK_FILE not in links
        finally:
            child.kill()
            child.communicate()
    assert not is_held(tmp_path)


def test_a_damaged_epoch_is_not_guessed(tmp_path: Path) -> None:
    """To begin again at 1 would make every slot refuse the daemon's orders."""
    (tmp_path / EPOCH_FILE).write_text("?")
    with pytest.raises(DiskError, match="epoch is damaged"):
        acquire(tmp_path)
    assert not is_held(tmp_path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The remedy is a setting, so the message names it."""
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"job\.run_dir") as caught:
        acquire(tmp_path / "file" / "job")
    assert caught.value.exit_status == 4


def test_looking_is_not_taking(tmp_path: Path) -> None:
    """`status` on a job that never ran must not leave a lock behind."""
    assert not is_held(tmp_path / "none")
    assert read_holder(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
