"""What the shell, `nohup` or a service manager had a daemon ignore stays ignored."""

import signal
import subprocess
import sys

import pytest

from supervisor.daemon.signals import NUMBERS

LISTEN = """
import asyncio, os, signal, sys
from supervisor.daemon.signals import Signals

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
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == received, done.stderr


SETTLED = """
import asyncio, ctypes, sys, time
from supervisor.daemon.signals import Signals, ignore

async def job():
    signals = Signals(lambda number: None)
    signals.catch()
    signals.settle(5)

class Lasting:
    def __del__(self, wait=ctypes.CDLL(None).usleep, write=ctypes.CDLL(None).write):
        write(1, b"ended\\n", 6)
        wait(1_000_000)

asyncio.run(job())
if sys.argv[1] == "interpreter":  # while it ends
    ignore()
    ctypes.lasting = Lasting()
    sys.exit(5)
print("ended", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("where", ["job", "interpreter"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_after_the_end_changes_no_exit_status(number: signal.Signals, where: str) -> None:
    """Ctrl-C right after `stop` made a scheduler start the stopped job again."""
    command = [sys.executable, "-c", SETTLED, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ended\n"
        daemon.send_signal(number)
        assert daemon.wait(20) == 5
