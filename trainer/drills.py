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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainer.heartbeat import PHASES

KINDS = ("kill", "stop", "raise", "segfault", "exit", "hold-gil", "allocate", "sleep", "flip-bit")
_AT_ONCE = frozenset({"kill", "stop", "segfault", "exit", "hold-gil"})
_HEADROOM_BYTES = 1 << 30
_FOR_EVER_S = 10**9


class FaultError(ValueError):
    """An order for a fault that does not exist."""


class DrillError(RuntimeError):
    """What the drill "raise" raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; with `phase` or `step` it waits until the loop gets there.

    `seconds` bounds "sleep" and "hold-gil"; without it they never end.
    """

    id: str
    kind: str
    phase: str | None = None
    step: int | None = None
    seconds: float | None = None

    @classmethod
    def from_dict(cls, raw: object) -> Fault:
        """Read an order; raises `FaultError` that names the key."""
        if not isinstance(raw, dict):
            raise FaultError(f"{raw!r} is no object")
        known = {one.name for one in fields(cls)}
        values: dict[str, Any] = {name: raw[name] for name in raw if name in known}
        values["id"] = str(raw.get("id", ""))
        if unknown := sorted(set(raw) - known - {"order"}):
            raise FaultError(f"{unknown[0]!r} is no key of a fault")
        if raw.get("kind") not in KINDS:
            raise FaultError(f"kind is {raw.get('kind')!r}, expected one of {', '.join(KINDS)}")
        if raw.get("phase") is not None and raw["phase"] not in PHASES:
            raise FaultError(f"phase is {raw['phase']!r}, expected one of {', '.join(PHASES)}")
        if raw.get("step") is not None and type(raw["step"]) is not int:
            raise FaultError(f"step is {raw['step']!r}, expected an integer")
        if raw.get("seconds") is not None and type(raw["seconds"]) not in (int, float):
            raise FaultError(f"seconds is {raw['seconds']!r}, expected a number")
        return cls(**values)

    def due(self, phase: str, step: int) -> bool:
        """Whether entering `phase` at `step` is what this fault waits for."""
        if self.phase is None:
            return phase == "step" and self.step in (None, step)
        return phase == self.phase and self.step in (None, step)


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
