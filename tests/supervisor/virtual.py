"""Workers and an event loop in virtual time, for tests of what judges them."""

from __future__ import annotations

import asyncio
import bisect
import selectors
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from supervisor.health.deadlines import Deadlines
from supervisor.health.monitor import HeartbeatMonitor, Suspicion
from trainer.wire.heartbeat import BeatMessage

EVERY_S = 0.25
LEASE_S = 3.0
AUTO = dict.fromkeys(
    ("initialize_s", "compile_s", "restore_s", "step_s", "evaluate_s", "checkpoint_s"), "auto"
)


def deadlines(**given: float) -> Deadlines:
    """Deadlines of settings that are "auto" but for `given`."""
    return Deadlines(SimpleNamespace(**{**AUTO, **given}), every_s=EVERY_S)


def monitor(**given: float) -> HeartbeatMonitor:
    """A monitor with the default lease and interval."""
    return HeartbeatMonitor(deadlines(**given), lease_s=LEASE_S, every_s=EVERY_S)


def steps(durations: Iterable[float], first: int = 0) -> list[tuple[str, int, float]]:
    """The part of a script that trains: a (phase, step, seconds) for each duration."""
    return [("step", first + i, duration) for i, duration in enumerate(durations)]


STARTUP = [("initialize", -1, 2.0), ("compile", -1, 4.0)]


@dataclass
class VirtualRank:
    """A worker that follows a script of (phase, step, seconds), then waits.

    `stuck_at`: its loop stops there while its thread goes on. `mute_at`: its thread stops.
    `stopped_at`: both stop, and its slot sees state T. `cut_at`: its heartbeats no longer arrive.
    """

    script: Sequence[tuple[str, int, float]]
    rank: int = 0
    generation: int = 1
    offset_s: float = 0.0
    stuck_at: float = float("inf")
    mute_at: float = float("inf")
    stopped_at: float = float("inf")
    cut_at: float = float("inf")
    slot_answers: bool = True
    starts: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [0.0, *accumulate(seconds for _, _, seconds in self.script)]
        self._typical: tuple[int, dict[str, tuple[float, float]]] = (-1, {})

    def position(self, now: float) -> tuple[int, str, int, int]:
        """Number, phase and step at `now`, and how many entries of the script are done."""
        now = min(now, self.stuck_at, self.stopped_at)
        done = bisect.bisect_right(self.starts, now) - 1
        if done >= len(self.script):
            return 3 * done, "wait", self.script[-1][1] + 1, done
        phase, step, seconds = self.script[done]
        into = (now - self.starts[done]) / seconds
        ticks = 0 if phase != "step" else (into >= 0.02) + (into >= 0.04)
        return 3 * done + ticks, phase, step, done

    def message(self, now: float) -> BeatMessage | None:
        """What lies in the store at `now`."""
        now = min(now, self.mute_at, self.stopped_at, self.cut_at)
        sends = int((now - self.offset_s) // EVERY_S)
        if sends < 0:
            return None
        seq, phase, step, done = self.position(sends * EVERY_S + self.offset_s)
        return BeatMessage(
            generation=self.generation,
            rank=self.rank,
            pid=100 + self.rank,
            seq=seq,
            beats=sends + 1,
            phase=phase,
            step=step,
            durations=self._durations(done),
        )

    def _durations(self, done: int) -> dict[str, tuple[float, float]]:
        if self._typical[0] != done:
            found: dict[str, tuple[float, float]] = {}
            recent: list[float] = []
            for phase, step, seconds in self.script[max(0, done - 64) : done]:
                if phase == "step":
                    recent += [seconds] if step > 0 else []  # the first one warms up
                else:
                    found[phase] = (seconds, max(seconds, found.get(phase, (0.0, 0.0))[1]))
            if recent:
                found["step"] = (statistics.median(recent), max(recent))
            self._typical = (done, found)
        return self._typical[1]

    def word_of_its_slot(self, now: float) -> dict[str, Any]:
        """What the second witness says."""
        seq, phase, step, _ = self.position(now)
        state = "T" if now >= self.stopped_at else "S"
        beats = int((min(now, self.mute_at, self.stopped_at) - self.offset_s) // EVERY_S) + 1
        told = {"seq": seq, "phase": phase, "step": step, "beats": max(0, beats)}
        return {"alive": True, "state": state, **told}


@dataclass
class World:
    """Some ranks, a monitor, and a poll every `EVERY_S` of virtual time."""

    ranks: Sequence[VirtualRank]
    monitor: HeartbeatMonitor = field(default_factory=monitor)
    now: float = 0.0

    def __post_init__(self) -> None:
        for generation in {rank.generation for rank in self.ranks}:
            mine = [rank.rank for rank in self.ranks if rank.generation == generation]
            self.monitor.arm(generation, mine, self.now)

    def beats(self) -> dict[tuple[int, int], BeatMessage | None]:
        """What a poll reads now."""
        return {(one.generation, one.rank): one.message(self.now) for one in self.ranks}

    def testimony(self, suspicion: Suspicion) -> Mapping[int, Mapping[str, Any]]:
        """What the slots say of the ranks under suspicion."""
        return {
            one.rank: one.word_of_its_slot(self.now)
            for one in self.ranks
            if one.generation == suspicion.generation
            and one.rank in suspicion.stalled
            and one.slot_answers
        }

    def poll(self) -> list[Suspicion]:
        """One poll, and the verdicts that came of it."""
        verdicts = []
        for suspicion in self.monitor.observe(self.now, self.beats()):
            verdict = self.monitor.judge(self.now, suspicion, self.testimony(suspicion))
            verdicts += [verdict] if verdict else []
        return verdicts

    def lose_store(self, until: float) -> None:
        """Until then every poll fails."""
        while self.now < until:
            self.monitor.miss(self.now)
            self.now += EVERY_S

    def attest(self) -> list[Suspicion]:
        """All slots are asked instead of the store; the verdicts that came of it."""
        told = {one.rank: one.word_of_its_slot(self.now) for one in self.ranks if one.slot_answers}
        verdict = self.monitor.attest(self.now, 1, told)
        return [verdict] if verdict else []

    def run(self, until: float) -> list[tuple[float, Suspicion]]:
        """Poll until then; the verdicts with their times."""
        found = []
        while self.now < until:
            found += [(self.now, verdict) for verdict in self.poll()]
            self.now += EVERY_S
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that skips the waiting: its clock jumps to the next thing that is due."""

    def __init__(self) -> None:
        self.virtual_s = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self.virtual_s


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.virtual_s += timeout
        return ready
