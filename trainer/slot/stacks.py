"""What a worker is doing right now: the stacks of its threads, without its help if need be.

It looks only: a process that is stopped stays stopped, and one that cannot answer is not hurt.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.host.processes import Identity, look, send

_PAUSE_S = 0.01
_BRIEF_PAUSE_S = 0.001
_BRIEF_LIMIT_S = 0.015


def collect(identity: Identity, log_path: Path, timeout_s: float = 1.5) -> str:
    """Stacks of all threads as text: by `faulthandler` into its log, else by py-spy.

    The process has to have registered `faulthandler` on SIGUSR1 with its standard error.
    """
    deadline = time.monotonic() + timeout_s
    row = look(identity.pid)
    if row is None or row.identity != identity or not row.is_alive:
        return ""
    # A stopped process keeps the signal for later; one without a handler would die of it.
    if row.state not in "Tt" and _catches(identity.pid, signal.SIGUSR1):
        text = _by_signal(identity, log_path, min(0.5, timeout_s / 2))
        if text:
            return text
    return _by_py_spy(identity.pid, max(0.1, deadline - time.monotonic()))


def ask_briefly(identity: Identity, log_path: Path) -> str:
    """Stacks by `faulthandler` alone, or nothing: for a process that is about to be killed."""
    row = look(identity.pid)
    if row is None or row.identity != identity or not row.is_alive or row.state in "Tt":
        return ""
    if not _catches(identity.pid, signal.SIGUSR1):
        return ""
    return _by_signal(identity, log_path, _BRIEF_LIMIT_S, _BRIEF_PAUSE_S)


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _by_signal(
    identity: Identity, log_path: Path, timeout_s: float, pause_s: float = _PAUSE_S
) -> str:
    try:
        start = log_path.stat().st_size
    except FileNotFoundError:
        return ""
    if not send(identity, signal.SIGUSR1):
        return ""
    deadline = time.monotonic() + timeout_s
    text = ""
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        before, text = text, _read_from(log_path, start)
        # Whole once the thread that got the signal is there and nothing more is written.
        if text == before and "Current thread" in text:
            return text
    return text if "File " in text else ""


def _read_from(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(1 << 18).decode(errors="replace")


def _by_py_spy(pid: int, timeout_s: float) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        return "no stacks: the process does not answer SIGUSR1 and py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no stacks: py-spy took more than {timeout_s:.1f} s"
    if result.returncode != 0:
        return f"no stacks: py-spy said {result.stderr.strip()[-500:]}"
    return result.stdout
