"""The order that starts a training process: one JSON line on its standard input.

Strict both ways: an unknown, missing or mistyped key is an error that names it. No jax here: the
slot and the supervisor may build specs too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from trainer.config import CheckpointSettings, TrainerSettings
from trainer.wire.faults import Fault, FaultError
from trainer.wire.store_address import StoreAddress

DEFAULT_FAILURE_EVERY_S = 6 * 3600.0
"""Assumed until failures were seen."""

ROLES = ("active", "standby")
KINDS_OF_RESTORE_POINTS = ("checkpoint", "snapshot")


class SpecError(ValueError):
    """A spec that no process can follow: a mistake of whoever wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """What to start from: `step` steps are finished in it.

    `kind` "checkpoint": `path` is its directory. "snapshot": `path` is the directory of all
    snapshots, and `step` and `generation` say which of them.
    """

    kind: str
    path: str
    step: int
    generation: int

    @classmethod
    def from_dict(cls, where: str, raw: object) -> RestorePoint | None:
        """Read what stands at `where`, null included; raises `SpecError` that names the key."""
        if raw is None:
            return None
        point = cls(**_typed(where, cls, raw))
        if point.kind not in KINDS_OF_RESTORE_POINTS:
            wanted = " or ".join(KINDS_OF_RESTORE_POINTS)
            raise SpecError(f"{where}.kind is {point.kind!r}, expected {wanted}")
        return point


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Where this node's snapshots go, and after how many steps: a number, 0 = never, or "auto"."""

    directory: str
    every_steps: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatStore(StoreAddress):
    """Where heartbeats go, and how often (seconds)."""

    every_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that one rank of one generation needs to know.

    `job` is what its keys in the store of heartbeats are named by: unlike those of any other run.
    `run_dir` is the job's own directory. `coordinator` ("host:port") may be empty in a world of
    one. Without `heartbeat` nothing is sent; the beat file is written all the same. A "standby"
    gets its restore point later, with the order to promote it. `log_file` is for a process that was
    started before it was known what for; the others write to it from the start. `skips` are (step,
    batches left out before it), `failure_every_s` is the mean time between failures (seconds).
    `code_dir`: where the run's copy of the task's module lies, "" if it is installed. `run`
    numbers the run of the machine: its generations run one program.
    """

    job: str
    run_dir: str
    generation: int
    epoch: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    coordinator: str
    config_dir: str
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    beat_file: str
    role: str = "active"
    restore_point: RestorePoint | None = None
    heartbeat: HeartbeatStore | None = None
    join_timeout_s: float = 60.0
    drills: bool = False
    faults: tuple[Fault, ...] = ()
    snapshots: Snapshots | None = None
    log_file: str | None = None
    skips: tuple[tuple[int, int], ...] = ()
    failure_every_s: float = DEFAULT_FAILURE_EVERY_S
    code_dir: str = ""
    run: int = 0

    def to_json(self) -> str:
        """One line of JSON, the password included: it belongs on a pipe, never in a log."""
        return json.dumps({one.name: _plain(getattr(self, one.name)) for one in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """Read a spec; raises `SpecError` that names the key."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise SpecError(f"the spec is not JSON: {text[:80]!r}") from error
        values = _typed("spec", cls, raw)
        for name, schema in (("trainer", TrainerSettings), ("checkpoint", CheckpointSettings)):
            try:
                values[name] = schema.model_validate(raw[name])
            except ValidationError as error:
                raise SpecError(f"spec.{name}: {error}") from error
        if values.get("role", ROLES[0]) not in ROLES:
            raise SpecError(f"spec.role is {raw['role']!r}, expected {' or '.join(ROLES)}")
        values["restore_point"] = RestorePoint.from_dict(
            "spec.restore_point", raw.get("restore_point")
        )
        if values.get("snapshots") is not None:
            values["snapshots"] = _snapshots(raw["snapshots"])
        if values.get("heartbeat") is not None:
            store = _typed("spec.heartbeat", HeartbeatStore, raw["heartbeat"])
            values["heartbeat"] = HeartbeatStore(**store)
        values["skips"] = read_skips("spec.skips", raw.get("skips", ()))
        try:
            values["faults"] = tuple(Fault.from_dict(one) for one in raw.get("faults", ()))
        except FaultError as error:
            raise SpecError(f"spec.faults: {error}") from error
        return cls(**values)


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str | None": (str, type(None)),
    "int | str": (int, str),
}


def read_skips(where: str, raw: object) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers; raises `SpecError`."""
    if not isinstance(raw, list | tuple):
        raise SpecError(f"{where} is {raw!r}, expected a list of pairs")
    for pair in raw:
        if not (
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(type(number) is int and number >= 0 for number in pair)
        ):
            raise SpecError(f"{where} holds {pair!r}, expected two whole numbers")
    return tuple((pair[0], pair[1]) for pair in raw)


def _snapshots(raw: object) -> Snapshots:
    found = Snapshots(**_typed("spec.snapshots", Snapshots, raw))
    every = found.every_steps
    if (isinstance(every, str) and every != "auto") or (isinstance(every, int) and every < 0):
        raise SpecError(
            f'spec.snapshots.every_steps is {every!r}, expected a number from 0 or "auto"'
        )
    return found


def _typed(where: str, schema: type[Any], raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SpecError(f"{where} is {raw!r}, expected an object")
    known = {one.name: one for one in fields(schema)}
    if unknown := sorted(set(raw) - set(known)):
        raise SpecError(f"{where}.{unknown[0]} is no key of it")
    defaults = schema.__dataclass_fields__
    for name, one in known.items():
        if name not in raw:
            if _required(defaults[name]):
                raise SpecError(f"{where}.{name} is missing")
            continue
        kinds = _KINDS.get(str(one.type))
        if kinds is not None and type(raw[name]) not in kinds:
            raise SpecError(f"{where}.{name} is {raw[name]!r}, expected {one.type}")
    return dict(raw)


def _required(one: Any) -> bool:
    from dataclasses import MISSING

    return one.default is MISSING and one.default_factory is MISSING


def _plain(value: Any) -> Any:
    if isinstance(value, TrainerSettings | CheckpointSettings):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return value
