"""The terminal under the picture: what is typed there must not be drawn into it."""

import contextlib
import os
import termios
from collections.abc import Iterator


@contextlib.contextmanager
def without_echo(descriptor: int) -> Iterator[None]:
    """Keep keys (the ^C of Ctrl-C too) off the screen, where a terminal is ours to set.

    It is not in the background: whoever sets it there is stopped. Never raises.
    """
    before = None
    with contextlib.suppress(OSError, termios.error):
        if _is_ours(descriptor):
            before = termios.tcgetattr(descriptor)
            quiet = [*before]
            quiet[3] &= ~termios.ECHO
            termios.tcsetattr(descriptor, termios.TCSANOW, quiet)  # waits for no output
    try:
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):
            if before is not None and _is_ours(descriptor):
                termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _is_ours(descriptor: int) -> bool:
    return os.tcgetpgrp(descriptor) == os.getpgrp()
