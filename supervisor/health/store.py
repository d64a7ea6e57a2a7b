"""Redis: heartbeats are read here, all ranks in one round trip, and handed to the monitor.

Decides nothing itself: the monitor suspects, the second witness is asked, the callbacks are told.
A store that cannot be read or written makes the supervisor blind; it never makes a worker dead.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import structlog

from supervisor.health.deadlines import Deadlines, DeadlineSettings
from supervisor.health.monitor import (
    STANDSTILL_MIN_S,
    WITNESS_S,
    HeartbeatMonitor,
    Kind,
    Member,
    RankView,
    Suspicion,
)
from trainer.wire.heartbeat import BeatMessage, HeartbeatError, beat_key, canary_key
from trainer.wire.store_address import StoreAddress
from trainer.wire.store_client import async_client

__all__ = [
    "DeadlineSettings",
    "Deadlines",
    "HeartbeatMonitor",
    "HeartbeatStore",
    "Kind",
    "Member",
    "RankView",
    "RedisStore",
    "StoreUnavailable",
    "Suspicion",
    "Witness",
    "watch",
]

STORE_TIMEOUT_S = 0.5
LOST_AFTER = 3  # polls in a row; one that fails now and then is no outage
CALM_MIN_S = 2.0
CALM_MAX_S = 300.0
CANARY_TTL_MS = 60_000
REASON_LENGTH_MAX = 200

Witness = Callable[[int, Sequence[int]], Awaitable[Mapping[int, Mapping[str, Any]]]]
"""Asks the slots of (generation, ranks); ranks that did not answer are missing."""

log = structlog.get_logger(__name__)


class StoreUnavailable(Exception):
    """The store cannot be read or written now; the text says why, without its password."""


class HeartbeatStore(Protocol):
    """Where heartbeats lie; two of them: Redis, and the one of the tests."""

    async def poll(self, keys: Sequence[str]) -> list[str | None]:
        """Write the canary and read all keys; None where there is none.

        Raises `StoreUnavailable`.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove the keys, those that are not there included. Raises `StoreUnavailable`."""
        ...


class RedisStore:
    """Heartbeats in Redis. Every call ends within about a second, with `StoreUnavailable` if not.

    Its address is never shown. redis-py retries for a minute by default; here nothing is retried:
    the next poll is the retry.
    """

    def __init__(
        self, *, job: str, address: StoreAddress, timeout_s: float = STORE_TIMEOUT_S
    ) -> None:
        self._canary = canary_key(job)
        self._canaries = 0
        self._timeout_s = timeout_s
        self._client = async_client(address, timeout_s)

    async def move(self, address: StoreAddress) -> None:
        """From now on the store is elsewhere."""
        former, self._client = self._client, async_client(address, self._timeout_s)
        await _close(former)

    async def poll(self, keys: Sequence[str]) -> list[str | None]:
        """Write the canary and read all keys in one round trip; None where there is none."""
        self._canaries += 1
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._canary, self._canaries, px=CANARY_TTL_MS)
        if keys:
            pipeline.mget(keys)
        answers = await self._bounded(pipeline.execute())
        if not keys:
            return []
        if not (isinstance(answers[1], list) and len(answers[1]) == len(keys)):
            raise StoreUnavailable(f"it answers MGET of {len(keys)} keys with another number")
        return [None if text is None else str(text) for text in answers[1]]

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove the keys, those that are not there included."""
        if keys:
            await self._bounded(self._client.delete(*keys))

    async def close(self) -> None:
        """Close the connection; a failure to say goodbye is of no interest."""
        await _close(self._client)

    async def _bounded(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                answer = await call
        except Exception as error:  # whatever a server says: redis-py raises of many kinds
            _heed_cancellation()
            # A connection that failed may still hold the answer to a question of the past.
            with suppress(Exception):
                await self._client.connection_pool.disconnect()
            text = str(error) or f"no answer within {self._timeout_s:g} s"
            raise StoreUnavailable(_plain(f"{type(error).__name__}: {text}")) from error
        _heed_cancellation()
        return answer


def _plain(text: str) -> str:
    """One short line, whatever a server puts into its errors."""
    return "".join(one if one.isprintable() else "?" for one in text[:REASON_LENGTH_MAX])


async def _close(client: Any) -> None:
    with suppress(Exception):
        await client.aclose()
    _heed_cancellation()


def _heed_cancellation() -> None:
    """redis-py (8.1) often swallows a cancellation, or makes an error of its own out of it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class _Reader:
    """Turns what lies in the store into messages; parses only what changed, tells oddities once."""

    def __init__(self, job: str, store: HeartbeatStore) -> None:
        self._job, self._store = job, store
        self._known: dict[Member, tuple[str, BeatMessage | None]] = {}

    async def read(self, members: Sequence[Member]) -> dict[Member, BeatMessage | None]:
        texts = await self._store.poll([beat_key(self._job, *member) for member in members])
        self._known = {member: self._known[member] for member in members if member in self._known}
        return {
            member: None if text is None else self._parse(member, text)
            for member, text in zip(members, texts, strict=True)
        }

    def _parse(self, member: Member, text: str) -> BeatMessage | None:
        before = self._known.get(member)
        if before and before[0] == text:
            return before[1]
        message: BeatMessage | None = None
        try:
            message = BeatMessage.from_json(text)
            if (message.generation, message.rank) != member:
                raise HeartbeatError(f"says generation {message.generation}, rank {message.rank}")
        except HeartbeatError as error:
            message = None
            if before is None or before[1] is not None:
                log.warning(
                    "heartbeat_unreadable", generation=member[0], rank=member[1], why=str(error)
                )
        self._known[member] = (text, message)
        return message


class _Outage:
    """Whether the store counts as lost: late to say so and, after a relapse, later to take it back.

    What is told is journalled, and a store that comes and goes must not flood the journal.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._is_lost = False
        self._good_since: float | None = None
        self._calm_s = CALM_MIN_S
        self._over_at = -math.inf

    def note_failure(self, now: float) -> bool:
        """A poll failed: whether the store has just been lost."""
        self._failures += 1
        self._good_since = None
        if self._is_lost or self._failures < LOST_AFTER:
            return False
        self._is_lost = True
        is_relapse = now - self._over_at < 10 * self._calm_s
        self._calm_s = min(2 * self._calm_s, CALM_MAX_S) if is_relapse else CALM_MIN_S
        return True

    def note_answer(self, now: float) -> bool:
        """A poll succeeded: whether the store is back, having answered for long enough."""
        self._failures = 0
        if not self._is_lost:
            return False
        if self._good_since is None:
            self._good_since = now
        if now - self._good_since < self._calm_s:
            return False
        self._is_lost, self._over_at = False, now
        return True


def suspended_s() -> float:
    """How long this machine has been suspended since its boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


async def watch(
    *,
    job: str,
    monitor: HeartbeatMonitor,
    store: HeartbeatStore,
    witness: Witness,
    every_s: float,
    on_suspicion: Callable[[Suspicion], None],
    on_store_lost: Callable[[str], None],
    on_store_recovered: Callable[[], None],
    on_beats: Callable[[Mapping[Member, BeatMessage]], None],
    on_standstill: Callable[[float], None],
    asleep_s: Callable[[], float] = suspended_s,
) -> None:
    """Poll until cancelled. `on_suspicion` gets verdicts only: suspicions the slots bear out.

    Time is the loop's own monotonic clock. Who is watched is the monitor's to say and may change
    between polls; the canary is written even when nobody is. While the store is away the slots are
    asked instead. `on_store_lost` and `on_store_recovered` tell of outages, not of single polls;
    `on_standstill` is given the seconds for which nothing of the job ran.
    """
    clock = asyncio.get_running_loop().time
    reader = _Reader(job, store)
    broken: set[Member] = set()
    outage = _Outage()
    asked_at = -math.inf
    asleep = asleep_s()
    while True:
        begun = clock()
        # The clock of the loop, and so every lease, stands still while the machine is suspended.
        before, asleep = asleep, asleep_s()
        if asleep - before >= STANDSTILL_MIN_S:
            on_standstill(asleep - before)
        members = monitor.members()
        try:
            beats = await reader.read(members)
        except StoreUnavailable as error:
            monitor.miss(clock())
            if outage.note_failure(clock()):
                monitor.blind()
                on_store_lost(str(error))
            if monitor.is_blind and begun - asked_at >= monitor.lease_s / 3:
                asked_at = begun
                await _ask_instead(monitor, witness, members, on_suspicion)
        else:
            if outage.note_answer(clock()):
                monitor.see()
                on_store_recovered()
            suspicions = monitor.observe(begun, beats, read_at=clock())
            if standstill_s := monitor.take_standstill():
                on_standstill(standstill_s)
            on_beats({member: beat for member, beat in beats.items() if beat is not None})
            for suspicion in suspicions:
                testimony = await _ask(witness, suspicion.generation, suspicion.stalled)
                if verdict := monitor.judge(clock(), suspicion, testimony):
                    on_suspicion(verdict)
            if not monitor.is_blind:  # then the path of every rank was broken
                broken = _tell_broken_paths(monitor, broken)
        await asyncio.sleep(max(0.0, begun + every_s - clock()))


async def _ask_instead(
    monitor: HeartbeatMonitor,
    witness: Witness,
    members: Sequence[Member],
    on_suspicion: Callable[[Suspicion], None],
) -> None:
    """Ask all slots, since the store cannot be read."""
    clock = asyncio.get_running_loop().time
    for generation in sorted({generation for generation, _ in members}):
        ranks = [rank for of, rank in members if of == generation]
        testimony = await _ask(witness, generation, ranks)
        if verdict := monitor.attest(clock(), generation, testimony):
            on_suspicion(verdict)


async def _ask(
    witness: Witness, generation: int, ranks: Sequence[int]
) -> Mapping[int, Mapping[str, Any]]:
    try:
        async with asyncio.timeout(WITNESS_S):
            told = await witness(generation, ranks)
    except TimeoutError:
        return {}
    except Exception as error:
        log.warning("witness_failed", generation=generation, why=repr(error))
        return {}
    return {rank: word for rank, word in told.items() if "error" not in word}


def _tell_broken_paths(monitor: HeartbeatMonitor, told: set[Member]) -> set[Member]:
    broken = set(monitor.broken_paths())
    for generation, rank in sorted(broken - told):
        log.warning("heartbeat_path_broken", generation=generation, rank=rank)
    return broken
