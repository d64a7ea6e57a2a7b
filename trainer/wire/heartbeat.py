"""The heartbeat as it crosses processes: keys, phases, messages, the file of the second witness.

The loop writes a `Beat`, a thread ships it to Redis, the slot reads the file. Nothing here imports
jax, and nothing here judges: whether a rank is silent is the supervisor's to say.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis import Redis
from trainer.wire.store_address import StoreAddress

PHASES = ("initialize", "compile", "restore", "step", "evaluate", "checkpoint", "wait")
"""What a loop can be doing. "wait": done, stopped, or standing by; only its thread is alive."""

VERSION = 1
KEY_TTL_MS = 3_600_000
MESSAGE_LENGTH_MAX = 1 << 14
DURATION_S_MAX = 1e9  # thirty years
STEPS_REMEMBERED = 64

_LAYOUT = struct.Struct("<QqIQ")  # sequence number, step, phase, sequence number again
_BEATS = struct.Struct("<Q")  # the sends of the thread, which alone writes there
_BEATS_AT = 32
_FILE_BYTES = 64
_RAISED_IN = "_everstep_phase"


class HeartbeatError(ValueError):
    """A message or file that is no heartbeat of this version."""


def beat_key(job: str, generation: int, rank: int) -> str:
    """The Redis key of one rank of one generation."""
    return f"everstep:{job}:g{generation}:r{rank}"


def canary_key(job: str) -> str:
    """The Redis key that the supervisor writes with each poll to know that it can see."""
    return f"everstep:{job}:canary"


_PHASE_BITS = 16
"""Room for the progress inside a phase: sequence numbers begin anew with each, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatView:
    """What the beat file says: the loop's sequence number, its phase, and its step (-1 before).

    `beats` counts the sends of its thread, arrived or not.
    """

    seq: int
    phase: str
    step: int
    beats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatMessage:
    """One heartbeat as it lies in Redis.

    `seq` changes only by the loop (progress), `beats` with each send (liveness of the process).
    `step` is the index of the step being done or next, -1 before the first is known. `durations`
    maps a phase to seconds: for "step" the median and the longest of the last 64 steps without
    those that warm up, elsewhere the last and the longest. `snapshot_step` counts the steps in
    the last snapshot that this rank published, where it publishes any.
    """

    v: int = VERSION
    generation: int
    rank: int
    pid: int
    seq: int
    beats: int
    phase: str
    step: int
    loss: float | None = None
    held_out_loss: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    snapshot_step: int | None = None
    durations: dict[str, tuple[float, float]] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BeatMessage:
        """Read a message; raises `HeartbeatError` that says what is wrong with it."""
        if len(text) > MESSAGE_LENGTH_MAX:
            raise HeartbeatError(f"{len(text)} characters, at most {MESSAGE_LENGTH_MAX} expected")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise HeartbeatError(f"not JSON: {text[:80]!r}") from error
        if not isinstance(raw, dict):
            raise HeartbeatError(f"not an object: {text[:80]!r}")
        if raw.get("v") != VERSION:
            raise HeartbeatError(f"version {raw.get('v')!r}, expected {VERSION}")
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise HeartbeatError(f"unknown field {unknown[0]!r}")
        _check_message(raw)
        raw["durations"] = {name: (float(a), float(b)) for name, (a, b) in raw["durations"].items()}
        return cls(**raw)


def _check_message(raw: dict[str, Any]) -> None:
    for name in ("generation", "rank", "pid", "seq", "beats", "step"):
        if type(raw.get(name)) is not int or abs(raw[name]) >= 1 << 63:
            raise HeartbeatError(f"{name} is {_brief(raw.get(name))}, expected an integer")
    if raw.get("phase") not in PHASES:
        told = _brief(raw.get("phase"))
        raise HeartbeatError(f"phase is {told}, expected one of {', '.join(PHASES)}")
    if type(raw.get("snapshot_step")) not in (int, type(None)):
        told = _brief(raw["snapshot_step"])
        raise HeartbeatError(f"snapshot_step is {told}, expected an integer")
    for name in ("loss", "held_out_loss", "step_s", "tokens_per_s"):
        if raw.get(name) is not None and type(raw[name]) not in (int, float):
            raise HeartbeatError(f"{name} is {_brief(raw[name])}, expected a number or null")
    durations = raw.get("durations")
    if not isinstance(durations, dict):
        raise HeartbeatError(f"durations is {_brief(durations)}, expected an object")
    for name, pair in durations.items():
        well_formed = isinstance(pair, list) and len(pair) == 2 and all(map(_is_duration, pair))
        if name not in PHASES or not well_formed:
            told = f"durations.{name[:40]} is {_brief(pair)}"
            raise HeartbeatError(f"{told}, expected two durations of a phase in seconds")


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < DURATION_S_MAX


def _brief(value: Any) -> str:
    return repr(value)[:80]


def read_beat_file(path: str | Path) -> BeatView:
    """What the loop last wrote, without asking it.

    Raises `OSError` where there is no file, `HeartbeatError` where it is torn or too short.
    """
    for _ in range(16):
        raw = Path(path).read_bytes()
        if len(raw) < _LAYOUT.size:
            raise HeartbeatError(f"{path} has {len(raw)} bytes, expected {_FILE_BYTES}")
        seq, step, phase, again = _LAYOUT.unpack_from(raw)
        if seq == again and phase < len(PHASES):
            (beats,) = _BEATS.unpack_from(raw.ljust(_FILE_BYTES, b"\0"), _BEATS_AT)
            return BeatView(seq=seq, phase=PHASES[phase], step=step, beats=beats)
    raise HeartbeatError(f"{path} holds no readable beat")


class Beat:
    """The loop's own account of what it is doing; only the loop's thread may write it.

    Writing costs microseconds and never fails once the file is mapped. Where there can be no file,
    `no_file` says why: training goes on, and the slot cannot bear witness.
    """

    def __init__(self, path: str | Path) -> None:
        self.no_file = ""
        try:
            self._map = _map_file(path)
        except OSError as error:
            self.no_file = f"{path}: {error.strerror}"
            self._map = mmap.mmap(-1, _FILE_BYTES)
        self.seq = 0
        self.phase = "initialize"
        self.step = -1
        self.loss: float | None = None
        self.held_out_loss: float | None = None
        self.step_s: float | None = None
        self.tokens_per_s: float | None = None
        self.snapshot_step: int | None = None
        self.durations: dict[str, tuple[float, float]] = {}
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._entered_at = time.monotonic()
        self._warming_up = True
        self._publish()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase (or the next step): progress, and the end of the phase before it."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is none of {', '.join(PHASES)}")
        now = time.monotonic()
        self._remember(now - self._entered_at)
        self._entered_at = now
        self.phase = phase
        if step is not None:
            self.step = step
        # Ranks that had more to tell of before (a wait for data, or for the others' digests) begin
        # it alike: who has the lowest number in it is the one that the others wait for.
        place = (self.step + 1) * len(PHASES) + PHASES.index(phase)
        self.seq = max(self.seq, place << _PHASE_BITS)
        self.tick()

    def blame(self, error: BaseException) -> None:
        """Remember in which phase an error was raised, before that phase is left because of it."""
        error.__dict__.setdefault(_RAISED_IN, self.phase)  # a reference here would keep its frames

    def phase_of(self, error: BaseException) -> str:
        """The phase in which an error was raised."""
        return str(error.__dict__.get(_RAISED_IN, self.phase))

    def tick(self) -> None:
        """Progress inside a phase."""
        self.seq += 1
        self._publish()

    def count(self, beats: int) -> None:
        """How many beats the thread has sent, or failed to: it lives, whatever became of them."""
        self._map[_BEATS_AT : _BEATS_AT + _BEATS.size] = _BEATS.pack(beats)

    def _publish(self) -> None:
        packed = _LAYOUT.pack(self.seq, self.step, PHASES.index(self.phase), self.seq)
        self._map[: len(packed)] = packed

    def _remember(self, seconds: float) -> None:
        if self.phase == "compile":
            self._warming_up = True
        if self.phase != "step":
            longest = self.durations.get(self.phase, (0.0, 0.0))[1]
            self.durations = {**self.durations, self.phase: (seconds, max(longest, seconds))}
        elif self._warming_up:
            self._warming_up = False  # the first step after a compilation also warms up
        else:
            self._steps.append(seconds)
            typical = statistics.median(self._steps)
            self.durations = {**self.durations, "step": (typical, max(self._steps))}


def _map_file(path: str | Path) -> mmap.mmap:
    """The file, mapped; its blocks are there, since a write to a map on a full disk is SIGBUS."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
        return mmap.mmap(descriptor, _FILE_BYTES)
    finally:
        os.close(descriptor)


class BeatSender(threading.Thread):
    """Ships the beat to Redis every `every_s` seconds.

    A store that is away costs nothing but a count in `failures`: training goes on, and the
    supervisor knows by its own canary that it is blind.
    """

    def __init__(
        self,
        beat: Beat,
        *,
        key: str,
        generation: int,
        rank: int,
        every_s: float,
        connect: Callable[[float], Redis],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._beat, self._key, self._generation, self._rank = beat, key, generation, rank
        self._every_s, self._connect = every_s, connect
        self._ended = threading.Event()
        self.beats = 0
        self.failures = 0

    def run(self) -> None:
        """Send until `end()`; one SET a beat."""
        client = self._connect(max(0.05, 0.8 * self._every_s))
        while True:
            started = time.monotonic()
            try:
                client.set(self._key, self.message().to_json(), px=KEY_TTL_MS)
            except Exception:  # whatever a server says: redis-py raises of many kinds on nonsense
                self.failures += 1
            self._beat.count(self.beats)  # the attempt is over: this thread is not stuck in it
            if self._ended.wait(max(0.0, self._every_s - (time.monotonic() - started))):
                return

    def end(self) -> None:
        """Ask the thread to stop after the send it is in."""
        self._ended.set()

    def message(self) -> BeatMessage:
        """The heartbeat of this moment, and one more `beats`."""
        self.beats += 1
        beat = self._beat
        return BeatMessage(
            generation=self._generation,
            rank=self._rank,
            pid=os.getpid(),
            seq=beat.seq,
            beats=self.beats,
            phase=beat.phase,
            step=beat.step,
            loss=beat.loss,
            held_out_loss=beat.held_out_loss,
            step_s=beat.step_s,
            tokens_per_s=beat.tokens_per_s,
            snapshot_step=beat.snapshot_step,
            durations=beat.durations,
        )


def connect(address: StoreAddress) -> Callable[[float], Redis]:
    """A maker of clients that fail within the time-out they are given."""

    def make(timeout_s: float) -> Redis:
        from trainer.wire.store_client import client

        return client(address, timeout_s)

    return make


def read_canary(job: str, store: Mapping[str, Any], timeout_s: float = 1.0) -> str | None:
    """What the daemon of a job last wrote to the store; None where it is not there, or no answer.

    `store` is the part of a worker's spec that names it.
    """
    address = {one.name: store[one.name] for one in fields(StoreAddress) if one.name in store}
    try:
        with connect(StoreAddress(**address))(timeout_s) as client:
            found = client.get(canary_key(job))
    except Exception:  # whatever a server says
        return None
    return None if found is None else str(found)
