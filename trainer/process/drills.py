"""Faults on demand: what a drill asks for is really done to this process.

Nothing happens unless the job allows drills. No jax here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.wire.faults import Fault

_AT_ONCE = frozenset({"kill", "stop", "segfault", "exit", "hold-gil"})
_HEADROOM_BYTES = 1 << 30
_FOR_EVER_S = 10**9


class DrillError(RuntimeError):
    """What the drill "raise" raises."""


class Drills:
    """The faults that are still to come; `announce` is called just before each strikes.

    `flip_bit` damages the training state; whoever holds that sets it.
    """

    def __init__(self, announce: Callable[[Fault], None]) -> None:
        self._announce = announce
        self.flip_bit: Callable[[], None] | None = None
        self._armed: list[Fault] = []
        self._lock = threading.Lock()

    def order(self, fault: Fault) -> None:
        """Strike at once if the fault can, else arm it."""
        if fault.phase is None and fault.step is None and fault.kind in _AT_ONCE:
            self._strike(fault)
            return
        with self._lock:
            self._armed.append(fault)

    def replace(self, faults: Sequence[Fault]) -> None:
        """These are to come, and no others: a standby that takes over may know of the past only."""
        with self._lock:
            self._armed = list(faults)

    def entered(self, phase: str, step: int) -> None:
        """Called by the loop at each phase and step: strikes with what is due."""
        if not self._armed:
            return
        with self._lock:
            due = [fault for fault in self._armed if fault.due(phase, step)]
            self._armed = [fault for fault in self._armed if fault not in due]
        for fault in due:
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self._announce(fault)
        seconds = _FOR_EVER_S if fault.seconds is None else fault.seconds
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "raise":
            raise DrillError("this error was ordered by a drill")
        elif fault.kind == "segfault":
            ctypes.string_at(0)
        elif fault.kind == "exit":
            os._exit(0)
        elif fault.kind == "hold-gil":
            ctypes.PyDLL(None).usleep(int(min(seconds, 4000) * 1e6))
        elif fault.kind == "allocate":
            _allocate_too_much()
        elif fault.kind == "sleep":
            time.sleep(seconds)
        elif fault.kind == "flip-bit" and self.flip_bit is not None:
            self.flip_bit()


def _allocate_too_much() -> None:
    """Raises MemoryError, and leaves enough for its report."""
    # A limit of our own: the machine and the other rank must not suffer.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(2 * _HEADROOM_BYTES)
