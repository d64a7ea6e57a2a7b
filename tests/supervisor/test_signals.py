"""What the shell, `nohup` or a service manager had a daemon ignore stays ignored."""

import subprocess
import sys

import pytest

LISTEN = """
import asyncio, os, signal, sys
from supervisor.signals import Signals

async def story():
    received = []
    signals = Signals(received.append)
    signals.catch()
    signal.signal(signal.SIGINT, lambda *_: None)  # as Ray does
    signals.catch()
    for number in map(int, sys.argv[1:]):
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)
    print(*(signal.Signals(one).name for one in received))

asyncio.run(story())
"""


@pytest.mark.parametrize(
    ("ignored", "received"),
    [
        ("", "SIGINT SIGTERM SIGHUP"),
        ("HUP", "SIGINT SIGTERM"),  # nohup python -m supervisor &
        ("INT", "SIGTERM SIGHUP"),  # a script that starts it with &, then Ctrl-C on its tail -f
    ],
)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(ignored: str, received: str) -> None:
    """A job under nohup stopped with status 75 when its terminal was closed."""
    prepare = f"trap '' {ignored}; " if ignored else ""
    command = ["bash", "-c", f'{prepare}exec "$@"', "bash", sys.executable, "-c", LISTEN]
    command += ["2", "15", "1"]  # SIGINT, SIGTERM, SIGHUP
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == received, done.stderr
