"""Whether the numbers of a step are sound, by the settings; pure, no jax.

What is judged is the same on every rank, so that all come to the same verdict without a word.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config import GuardSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """A step whose numbers are out of bounds, and what the settings ask for.

    `metric` is `value`; `policy` is "stop", "skip" or "rollback"; `why` is a line for people.
    """

    metric: str
    value: float
    policy: str
    why: str


class NumbersDiverged(Exception):
    """A step after which this generation must not go on; `batch` is its place in the data."""

    def __init__(self, step: int, batch: int, anomaly: Anomaly) -> None:
        super().__init__(f"step {step}: {anomaly.why}")
        self.step, self.batch, self.anomaly = step, batch, anomaly


class ReplicasDiverged(Exception):
    """Ranks that should hold the same parameters do not; they did after `agreed_step` steps."""

    def __init__(self, step: int, agreed_step: int, ranks: Sequence[int], why: str) -> None:
        super().__init__(f"after step {step}: {why}")
        self.step, self.agreed_step, self.ranks, self.why = step, agreed_step, tuple(ranks), why


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped:
    """A step that was not applied; training goes on with the next batch."""

    step: int
    metric: str
    value: float


class Guard:
    """Judges step by step; `recent` are the losses before the first of them, oldest first."""

    def __init__(self, settings: GuardSettings, recent: Iterable[float] = ()) -> None:
        self._settings = settings
        self._recent: deque[float] = deque(recent, maxlen=settings.spike_window_steps)
        self._skipped = 0

    @property
    def recent(self) -> list[float]:
        """The last losses that were in bounds: belongs to every restore point."""
        return list(self._recent) if self._settings.spike_factor else []

    @property
    def limit(self) -> float:
        """A loss above it is a spike; infinite until half of the window is known."""
        enough = len(self._recent) * 2 >= self._settings.spike_window_steps
        if not self._settings.spike_factor or not enough:
            return math.inf
        # From the median, by what the losses measure: they may be negative, or change their sign.
        size = statistics.median(map(abs, self._recent))
        above = (self._settings.spike_factor - 1) * size
        # As the compiled step will see it: both must draw the same line.
        return float(np.float32(statistics.median(self._recent) + above))

    def judge(self, metrics: Mapping[str, float]) -> Anomaly | None:
        """What is wrong with a step, if anything."""
        limit, loss = self.limit, metrics["loss"]
        wild = next((name for name, value in metrics.items() if not math.isfinite(value)), None)
        if wild is not None:
            why = f"{wild} is {metrics[wild]}"
            return self._bounded(wild, metrics[wild], self._settings.nonfinite, why)
        if loss > limit:
            why = f"the loss {loss:.6g} is above {limit:.6g}, which is spike_factor = "
            why += f"{self._settings.spike_factor:g} times the usual size of the last steps"
            return self._bounded("loss", loss, self._settings.spike, why)
        self._skipped = 0
        self._recent.append(loss)
        return None

    def _bounded(self, metric: str, value: float, policy: str, why: str) -> Anomaly:
        if policy == "skip":
            self._skipped += 1
            if self._skipped > self._settings.skips_max:
                policy = "stop"
                why += f"; skips_max = {self._settings.skips_max} steps before it were left out too"
        return Anomaly(metric=metric, value=value, policy=policy, why=why)
