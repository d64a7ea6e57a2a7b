"""Deadlines of the core on the loop's monotonic clock; it decides nothing, it only reminds."""

import asyncio
from collections.abc import Callable

from supervisor.fsm.effects import SetDeadline


class Timers:
    """Armed deadlines by id. `ring` gets the effect back when its time is over."""

    def __init__(self, ring: Callable[[SetDeadline], None]) -> None:
        self._ring = ring
        self._armed: dict[str, tuple[SetDeadline, asyncio.TimerHandle]] = {}

    def set(self, deadline: SetDeadline) -> None:
        """Arm a deadline; one of the same id is replaced."""
        if deadline.id in self._armed:
            self._armed.pop(deadline.id)[1].cancel()
        loop = asyncio.get_running_loop()
        handle = loop.call_later(deadline.seconds, self._pass, deadline.id)
        self._armed[deadline.id] = (deadline, handle)

    def end_owners(self, owner: str) -> None:
        """Drop every deadline whose owner is not the living one."""
        for id, (deadline, handle) in list(self._armed.items()):
            if deadline.owner != owner:
                handle.cancel()
                del self._armed[id]

    def left_s(self, id: str) -> float | None:
        """Seconds until the deadline passes, or None if it is not armed."""
        if id not in self._armed:
            return None
        return max(0.0, self._armed[id][1].when() - asyncio.get_running_loop().time())

    def clear(self) -> None:
        """Drop all."""
        self.end_owners("")

    def _pass(self, id: str) -> None:
        self._ring(self._armed.pop(id)[0])
