"""A forked copy of this process that computes one text beside it, for comparison alone.

It runs at the lowest priority and shares no lock of the interpreter with its parent, which may end
it at any moment; nothing may depend on its answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
import warnings
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_TEXT_MAX = 1 << 16  # bytes: what a pipe holds


class Aside:
    """Forks at once, from a thread that lives as long as the copy may."""

    def __init__(self, compute: Callable[[], str]) -> None:
        parent = os.getpid()
        self._reading, writing = os.pipe()
        with warnings.catch_warnings():  # JAX warns of threads, which such a copy does not use
            warnings.simplefilter("ignore")
            self._pid = os.fork()
        if self._pid == 0:
            _compute(compute, parent, writing)
        os.close(writing)
        self._handle = os.pidfd_open(self._pid)

    def end(self) -> None:
        """Kill the copy; harmless once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def answer(self, limit_s: float) -> str | None:
        """Wait for the text and reap the copy; None if it was ended, or gave none in time."""
        deadline, text = time.monotonic() + limit_s, b""
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self._reading], [], [], left_s)[0]:
                break
            if not (read := os.read(self._reading, _TEXT_MAX)):
                break
            text += read
        self.end()
        _, status = os.waitpid(self._pid, 0)
        os.close(self._reading)
        return text.decode(errors="replace") if status == 0 else None


def _compute(compute: Callable[[], str], parent: int, writing: int) -> None:
    """Never returns: what comes after a fork is the parent's to do."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.write(writing, compute().encode()[:_TEXT_MAX])
            status = 0
    finally:
        os._exit(status)
