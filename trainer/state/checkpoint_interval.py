"""When the next checkpoint is due: every so many steps, or as often as pays ("auto").

Young's first-order optimum (Young, 1974; Daly, 2006): a save that costs C seconds every
sqrt(2 C M) seconds, where something fails every M seconds. Knows neither files nor ranks.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

EVERY_MIN_S, EVERY_MAX_S = 30.0, 1800.0
FIRST_S = 30.0
"""The first save comes early: until then its cost is not known, and nothing is on the disk."""

_STEPS_REMEMBERED, _SAVES_REMEMBERED = 64, 8
_UNKNOWN_COST_S = 0.1


class Pace:
    """Decides between two steps; `failure_every_s` is the mean time between failures (seconds)."""

    def __init__(self, every_steps: int | str, failure_every_s: float) -> None:
        self._fixed = every_steps if isinstance(every_steps, int) else None
        self._failure_every_s = failure_every_s
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._costs: deque[float] = deque(maxlen=_SAVES_REMEMBERED)
        self._followed: int | None = None
        self._last = 0

    @property
    def is_auto(self) -> bool:
        """Whether the interval follows what was measured."""
        return self._fixed is None

    @property
    def cost_s(self) -> float:
        """What a save typically takes from the loop (seconds)."""
        return statistics.median(self._costs) if self._costs else _UNKNOWN_COST_S

    @property
    def every_steps(self) -> int:
        """Steps between two saves, as far as is known by now."""
        if self._fixed is not None:
            return self._fixed
        if self._followed is not None:
            return self._followed
        every_s = math.sqrt(2 * self.cost_s * self._failure_every_s)
        every_s = min(EVERY_MAX_S, max(EVERY_MIN_S, every_s)) if self._costs else FIRST_S
        typical_s = statistics.median(self._steps) if self._steps else 1.0
        return max(1, round(every_s / max(typical_s, 1e-6)))

    def follow(self, every_steps: int) -> None:
        """Parts of a checkpoint are of one step: ranks that hold them agree."""
        self._followed = every_steps

    def start(self, done: int) -> None:
        """Go on from a restore point."""
        self._last = done

    def due(self, done: int, step_s: float) -> bool:
        """Whether to save after `done` finished steps, the last of which took `step_s`."""
        self._steps.append(step_s)
        if self._fixed is not None:
            return done % self._fixed == 0
        if self._followed is not None:
            return done % self._followed == 0
        return done - self._last >= self.every_steps

    def saved(self, done: int, cost_s: float) -> None:
        """A save was begun and kept the loop so long."""
        self._last = done
        self._costs.append(cost_s)
