"""What is known of other people's programs and is no part of their interface.

Each with the version that it was seen in. No jax here: the supervisor asks too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ABORTED_FOR_A_PEER = re.compile(
    r"F\d{4} .*client\.h:\d+\] .*the JAX distributed service detected fatal errors"
)
"""The line of a fatal log entry of JAX's native client."""


def aborted_for_a_peer(log_tail: Iterable[str]) -> bool:
    """Whether a SIGABRT came from JAX because another process is gone: the log's last lines tell.

    Without process 0 JAX ends every other process within 0.1 s, whatever it is doing.
    """
    return any(_ABORTED_FOR_A_PEER.match(line) for line in log_tail)
