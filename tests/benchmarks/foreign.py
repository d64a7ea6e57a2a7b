"""How much of the machine others use while something is measured: cores, from /proc.

What a hypervisor takes away (steal) counts as others' too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from trainer.host.processes import Identity

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Foreign:
    """From its making to `cores()`: what was used by none of `own()` and not by this process."""

    def __init__(self, own: Callable[[], Collection[Identity]]) -> None:
        self._pids = {os.getpid(), *(one.pid for one in own())}
        self._began, self._busy = time.monotonic(), _busy_s()
        self._used = {pid: _used_s(pid) for pid in self._pids}

    def cores(self) -> float:
        """Cores that others used on average; processes of ours that ended meanwhile count too."""
        seconds = time.monotonic() - self._began
        used = sum(max(0.0, _used_s(pid) - self._used[pid]) for pid in self._pids)
        return max(0.0, _busy_s() - self._busy - used) / seconds


def _busy_s() -> float:
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = dict(zip(names, map(int, fields), strict=False))
    return sum(ticks[name] for name in names if name not in ("idle", "iowait")) / _TICKS_PER_S


def _used_s(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
