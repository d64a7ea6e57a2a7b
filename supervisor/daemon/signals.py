"""Which signals ask the daemon to end. What its starter had it ignore stays ignored.

`nohup` ignores SIGHUP so that a job outlives its terminal; a shell ignores SIGINT in a command that
it runs in the background, where Ctrl-C is meant for another program.
"""

import asyncio
import os
import signal
from collections.abc import Callable

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore() -> None:
    """For the very end: Python gives handlers back long before the process is gone."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


class Signals:
    """Make it before anything installs handlers of its own: it notes what is ignored."""

    def __init__(self, interrupt: Callable[[int], None]) -> None:
        self._interrupt = interrupt
        self._ignored = {one for one in NUMBERS if signal.getsignal(one) is signal.SIG_IGN}

    def catch(self) -> None:
        """Call it again after each connection to Ray, which installs handlers of its own."""
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            if number in self._ignored:
                signal.signal(number, signal.SIG_IGN)
            else:
                loop.add_signal_handler(number, self._interrupt, number)

    def settle(self, status: int) -> None:
        """The job has ended: a signal from now on ends the daemon at once, with its exit status.

        Without it a signal that comes while the interpreter ends would be the status, by which a
        scheduler would start the job again.
        """
        loop = asyncio.get_running_loop()
        caught = set(NUMBERS) - self._ignored
        signal.pthread_sigmask(signal.SIG_BLOCK, caught)  # asyncio gives the default back first
        for number in caught:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(status))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
