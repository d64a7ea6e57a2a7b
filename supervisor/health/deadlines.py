"""How long a phase may show no progress before that is a hang: fixed, or learned from the workers.

It keeps figures and answers questions. It has no clock, judges nobody and forgets nothing between
generations: what a phase took once, it may take again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

FIRST_STEP_S = 60.0
"""For the first step after a compilation: XLA allocates, gloo connects, there is no median yet."""

STEP_FLOOR_S = 1.0

DEFAULTS_S: Mapping[str, float] = {
    "initialize": 120.0,  # imports and the rendezvous with the slowest rank, on a cold disk
    "compile": 300.0,  # large models compile for minutes
    "restore": 300.0,  # reading back from a shared file system, every rank at once
    "evaluate": 120.0,  # the first evaluation compiles as well
    "checkpoint": 120.0,  # a save may first have to wait for the one before it
}
"""Before a phase was ever seen to end: a wrong verdict costs more than a late one."""

FLOORS_S: Mapping[str, float] = {"evaluate": 20.0, "checkpoint": 30.0}
"""Ten times a phase of milliseconds would be less than one hiccup of a disk or a network.

Only what one process does more than once gets below its first default. The rest is armed afresh by
each generation and may be cold again (another node, no cache), however fast it was last time.
"""


class DeadlineSettings(Protocol):
    """The table `[deadlines]`, as far as it is about heartbeats: seconds, or "auto"."""

    @property
    def initialize_s(self) -> float | Literal["auto"]: ...
    @property
    def compile_s(self) -> float | Literal["auto"]: ...
    @property
    def restore_s(self) -> float | Literal["auto"]: ...
    @property
    def step_s(self) -> float | Literal["auto"]: ...
    @property
    def evaluate_s(self) -> float | Literal["auto"]: ...
    @property
    def checkpoint_s(self) -> float | Literal["auto"]: ...


class Deadlines:
    """The deadline of each phase, in seconds, learned over generations where it is "auto".

    In `step`: max(1 s, 5 x median, 2 x recent maximum) over the slowest rank. Elsewhere: max(floor,
    10 x the longest seen); the floor is a fixed default until this process has done it once.
    """

    def __init__(self, settings: DeadlineSettings, *, every_s: float) -> None:
        given: dict[str, float | Literal["auto"]] = {
            "initialize": settings.initialize_s,
            "compile": settings.compile_s,
            "restore": settings.restore_s,
            "step": settings.step_s,
            "evaluate": settings.evaluate_s,
            "checkpoint": settings.checkpoint_s,
        }
        self._fixed = {phase: float(value) for phase, value in given.items() if value != "auto"}
        self._every_s = every_s
        self._longest_s: dict[str, float] = {}
        self._steps: dict[int, tuple[float, float]] = {}
        self._step_s: float | None = None  # asked of every rank at every poll, so computed once

    def learn(self, rank: int, durations: Mapping[str, tuple[float, float]]) -> None:
        """Take in what a rank measured: (typical, longest) seconds by phase."""
        for phase, (typical, longest) in durations.items():
            if not (math.isfinite(typical) and math.isfinite(longest)):
                continue
            if phase == "step":
                self._steps[rank] = (typical, longest)
                self._step_s = None
            elif longest > self._longest_s.get(phase, 0.0):
                self._longest_s[phase] = longest

    def learn_save(self, seconds: float) -> None:
        """Take in how long a checkpoint took to be committed: the last one is waited for."""
        self.learn(0, {"checkpoint": (seconds, seconds)})

    def forget_ranks_from(self, world_size: int) -> None:
        """Drop the step times of ranks that a smaller generation no longer has."""
        self._steps = {rank: pair for rank, pair in self._steps.items() if rank < world_size}
        self._step_s = None

    def limit_s(self, phase: str, *, warm: bool = True) -> float:
        """The deadline of `phase`; infinite in `wait`, where only liveness counts.

        `warm` says whether the process in question has done this before. The first time a step
        connects, an evaluation compiles, and a rank's part of a save may be the longest of all.
        """
        if phase == "wait":
            return math.inf
        if phase in self._fixed:
            return self._fixed[phase]
        if phase == "step":
            if self._step_s is None:
                self._step_s = self._learned_step_s()
            return self._step_s if warm and self._steps else max(FIRST_STEP_S, self._step_s)
        floor_s = FLOORS_S.get(phase, DEFAULTS_S[phase]) if warm else DEFAULTS_S[phase]
        return max(floor_s, 10.0 * self._longest_s.get(phase, 0.0))

    def _learned_step_s(self) -> float:
        median = max((typical for typical, _ in self._steps.values()), default=0.0)
        recent = max((longest for _, longest in self._steps.values()), default=0.0)
        # The number is sampled twice, when it is sent and when it is polled: a step three times
        # as long as usual must fit with both intervals, however short the steps are.
        sampled = 3.0 * median + 2.0 * self._every_s
        return max(STEP_FLOOR_S, 5.0 * median, 2.0 * recent, sampled)
