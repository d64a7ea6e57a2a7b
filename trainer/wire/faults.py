"""Faults on demand, as orders: which kinds there are, and what each waits for.

Nothing is done here: see `trainer.process.drills`. No jax here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from trainer.wire.heartbeat import PHASES

KINDS = ("kill", "stop", "raise", "segfault", "exit", "hold-gil", "allocate", "sleep", "flip-bit")


class FaultError(ValueError):
    """An order for a fault that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; with `phase` or `step` it waits until the loop gets there.

    `seconds` bounds "sleep" and "hold-gil"; without it they never end.
    """

    id: str
    kind: str
    phase: str | None = None
    step: int | None = None
    seconds: float | None = None

    @classmethod
    def from_dict(cls, raw: object) -> Fault:
        """Read an order; raises `FaultError` that names the key."""
        if not isinstance(raw, dict):
            raise FaultError(f"{raw!r} is no object")
        known = {one.name for one in fields(cls)}
        values: dict[str, Any] = {name: raw[name] for name in raw if name in known}
        values["id"] = str(raw.get("id", ""))
        if unknown := sorted(set(raw) - known - {"order"}):
            raise FaultError(f"{unknown[0]!r} is no key of a fault")
        if raw.get("kind") not in KINDS:
            raise FaultError(f"kind is {raw.get('kind')!r}, expected one of {', '.join(KINDS)}")
        if raw.get("phase") is not None and raw["phase"] not in PHASES:
            raise FaultError(f"phase is {raw['phase']!r}, expected one of {', '.join(PHASES)}")
        if raw.get("step") is not None and type(raw["step"]) is not int:
            raise FaultError(f"step is {raw['step']!r}, expected an integer")
        if raw.get("seconds") is not None and type(raw["seconds"]) not in (int, float):
            raise FaultError(f"seconds is {raw['seconds']!r}, expected a number")
        return cls(**values)

    def due(self, phase: str, step: int) -> bool:
        """Whether entering `phase` at `step` is what this fault waits for."""
        if self.phase is None:
            return phase == "step" and self.step in (None, step)
        return phase == self.phase and self.step in (None, step)
