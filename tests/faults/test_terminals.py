"""Whoever reads the daemon's output stops reading: the job does not notice."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import run


@contextmanager
def stopped_terminal() -> Iterator[int]:
    """Ctrl-S, or a network that hangs: not a byte is taken any more."""
    reader, writer = os.openpty()
    termios.tcflow(writer, termios.TCOOFF)
    yield writer
    os.close(writer)
    os.close(reader)


@contextmanager
def full_pipe() -> Iterator[int]:
    """`| less`, whose reader has gone for lunch."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"\n" * 512)
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)


def test_a_terminal_that_is_closed_stops_the_job_with_a_save_and_status_75(job: MakeJob) -> None:
    """Two SIGHUPs at once cost the last save, and what could not be printed made the status 1."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    reader, writer = os.openpty()
    daemon = tiny.start(stdout=writer)
    os.close(writer)
    try:
        daemon.until_committed()
    finally:
        os.close(reader)
    for _ in range(2):
        daemon.signal(signal.SIGHUP)
    assert daemon.exit_status() == 75
    assert tiny.events("workers_saved")
    assert tiny.result()["state"] == "STOPPED"


@pytest.mark.parametrize("destination", [stopped_terminal, full_pipe])
def test_a_reader_that_stops_reading_stops_nothing(
    job: MakeJob, destination: Callable[[], AbstractContextManager[int]]
) -> None:
    """Its event loop stood still: no recovery, no status, no signals, in the end no workers."""
    tiny = job(**{"trainer.options.pace_s": 0.2})
    with destination() as stdout:
        daemon = tiny.start(stdout=stdout)
        daemon.until_committed()
        assert daemon.status()["state"] == "RUNNING"
        daemon.strike(1)
        daemon.until("first_step_taken", generation=2)
        assert run(tiny, "status").returncode == 0
        daemon.signal(signal.SIGTERM)
        assert daemon.exit_status() == 75
    assert tiny.result()["state"] == "STOPPED"
