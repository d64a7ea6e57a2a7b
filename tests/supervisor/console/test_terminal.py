"""What is typed while the picture is drawn does not end up in it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import termios

CHILD = """
import fcntl, os, signal, sys, termios
from supervisor.console.terminal import without_echo
signal.signal(signal.SIGINT, signal.SIG_IGN)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
echoes = lambda: bool(termios.tcgetattr(0)[3] & termios.ECHO)
before = echoes()
with without_echo(1):
    print("drawing", echoes(), flush=True)
    sys.stdin.readline()
print("after", before, echoes(), flush=True)
"""


def read_until(reader: int, words: bytes) -> bytes:
    found = b""
    while words not in found:
        assert select.select([reader], [], [], 20.0)[0], f"only {found!r}"
        found += os.read(reader, 1000)
    return found


def test_ctrl_c_does_not_push_the_picture_a_line_down() -> None:
    """The terminal wrote "^C" behind the panel, and a second border stayed on the screen."""
    reader, writer = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=writer, stdout=writer, start_new_session=True
    )
    try:
        assert b"drawing False" in read_until(reader, b"\n")
        os.write(reader, b"\x03typed\n")
        shown = read_until(reader, b"after True True")
        assert b"^C" not in shown
        assert b"typed" not in shown
        assert child.wait(10) == 0
        assert termios.tcgetattr(writer)[3] & termios.ECHO
    finally:
        child.kill()
        child.wait()
        os.close(reader)
        os.close(writer)
