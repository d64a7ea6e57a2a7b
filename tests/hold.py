"""Keeps a process from ending: `python hold.py PID` says "held", and lets go when its input ends.

A tracer may stop a process on its way out (PTRACE_EVENT_EXIT), where SIGKILL has no more to say:
from outside that is a process in an uninterruptible sleep, as on a dead network file system.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PTRACE_SEIZE = 0x4206
PTRACE_O_TRACEEXIT = 0x40


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Inside, this process can be killed and does not end. Skips where none may be traced."""
    with subprocess.Popen(
        [sys.executable, __file__, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        if (said := holder.stdout.readline().strip()) != "held":
            import pytest

            pytest.skip(f"no process may be traced here: {said}")
        try:
            yield
        finally:
            holder.stdin.close()
            holder.wait(10)


def main() -> None:
    """Hold until standard input ends; a tracer that ends lets go of what it traced."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, PTRACE_O_TRACEEXIT):
        print(os.strerror(ctypes.get_errno()), flush=True)
        return
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
