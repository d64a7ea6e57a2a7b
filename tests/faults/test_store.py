"""Redis is lost, emptied, full, frozen, slow, moved: blind, not dead. No worker is harmed.

Leases and deadlines are a few seconds here, so that each outage outlasts them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Daemon, Job, Numbers, Store, gone, until
from tests.relay import Relay

full = pytest.mark.full

IMPATIENT: dict[str, Any] = {
    "heartbeats.lease_s": 2.0,
    "deadlines.step_s": 3.0,
    "recovery.standby": "generation",
    "recovery.snapshot_every_steps": 1,
}
OUTAGE_S = 4.5


def client_of(tiny: Job) -> Any:
    """Of the job's own Redis."""
    from redis import Redis

    record = tiny.embedded("redis")
    return Redis(port=record["port"], password=record["password"], socket_timeout=5.0)


def must_be_unharmed(tiny: Job, daemon: Daemon, workers: list[int]) -> None:
    """The same processes to the end, no failure, no standby lost."""
    assert daemon.exit_status(180) == 0, tiny.story()
    assert tiny.result()["failures"] == 0
    assert tiny.events("standby_lost") == []
    assert [pid for _, pid in tiny.events("workers_started")[0]["pids"]] == workers
    assert len(tiny.events("workers_started")) == 1


def pids_of(daemon: Daemon) -> list[int]:
    return [one["pid"] for one in daemon.status()["workers"]]


def until_seen_again(tiny: Job, times: int, patience_s: float = 30.0) -> None:
    """So many losses of the store have ended."""
    until(
        lambda: len(tiny.events("heartbeat_store_recovered")) == times,
        f"recovery {times} of the store",
        patience_s,
    )


def test_a_store_that_is_emptied_or_full_harms_no_worker(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """FLUSHALL by an operator, memory eaten by another: they looked like deaths (bluechi#952)."""
    tiny = job(**{**IMPATIENT, "trainer.options.pace_s": 0.25})
    daemon = tiny.start()
    daemon.until("standby_ready")
    workers = pids_of(daemon)
    with client_of(tiny) as client:
        for _ in range(10):
            client.flushall()
            time.sleep(0.1)
        assert tiny.events("heartbeat_store_lost") == []
        client.config_set("maxmemory", "1")
        at = time.time()
        lost = daemon.until("heartbeat_store_lost")
        assert "OutOfMemory" in lost["why"]
        tiny.figures.add("a full store to blindness (s)", lost["at"] - at)
        time.sleep(OUTAGE_S)
        before = daemon.status()
        assert before["heartbeat_store_lost_since"] == lost["at"]
        assert before["state"] == "RUNNING"
        client.config_set("maxmemory", "64mb")
        recovered = daemon.until("heartbeat_store_recovered")
    assert recovered["blind_s"] >= OUTAGE_S
    until(lambda: daemon.status()["heartbeat_store_lost_since"] is None, "sight in the status")
    must_be_unharmed(tiny, daemon, workers)
    tiny.must_equal(undisturbed)


@full
def test_a_store_that_is_frozen_for_a_minute_harms_no_worker(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """A host that swaps, a virtual machine that is moved."""
    tiny = job(**{**IMPATIENT, "trainer.options.pace_s": 1.3, "deadlines.step_s": 4.0})
    daemon = tiny.start()
    daemon.until("standby_ready")
    workers = pids_of(daemon)
    server = tiny.process_of("redis", "redis-server")
    os.kill(server.pid, signal.SIGSTOP)
    daemon.until("heartbeat_store_lost")
    first = daemon.until_step(0)
    time.sleep(60.0)
    os.kill(server.pid, signal.SIGCONT)
    daemon.until("heartbeat_store_recovered")
    assert daemon.until_step(0) - first > 30  # training went on meanwhile
    must_be_unharmed(tiny, daemon, workers)
    tiny.must_equal(undisturbed)


@full
def test_a_store_of_others_that_dies_and_comes_back_empty_harms_no_worker(
    job: MakeJob, undisturbed: Numbers, store: Store
) -> None:
    """A managed Redis fails over: for seconds nothing, then another one that knows nothing."""
    url = {"heartbeats.redis_url": store.url}
    tiny = job(**{**IMPATIENT, **url, "trainer.options.pace_s": 0.8})
    daemon = tiny.start()
    daemon.until("standby_ready")
    workers = pids_of(daemon)
    store.kill()
    daemon.until("heartbeat_store_lost")
    time.sleep(OUTAGE_S)
    assert daemon.status()["state"] == "RUNNING"
    store.start()
    until_seen_again(tiny, 1)
    os.kill(store.process.pid, signal.SIGSTOP)
    until(lambda: len(tiny.events("heartbeat_store_lost")) == 2, "second loss")
    time.sleep(OUTAGE_S)
    os.kill(store.process.pid, signal.SIGCONT)
    until_seen_again(tiny, 2)
    with store.client() as client:
        client.config_set("requirepass", "another")  # and nobody told us
        client.client_kill_filter(skipme=True)
        until(lambda: len(tiny.events("heartbeat_store_lost")) == 3, "third loss")
        time.sleep(OUTAGE_S)
        client.config_set("requirepass", store.password)
    must_be_unharmed(tiny, daemon, workers)
    tiny.must_equal(undisturbed)
    told = (tiny.run_dir / "journal.jsonl").read_text() + daemon.output.read_text()
    assert store.password not in told


@full
def test_a_worker_that_dies_while_nobody_can_see_is_replaced_all_the_same(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Deaths come from the slots: blindness freezes verdicts on silence and nothing else."""
    tiny = job(**{**IMPATIENT, "trainer.options.pace_s": 0.5})
    daemon = tiny.start()
    daemon.until("standby_ready")
    with client_of(tiny) as client:
        client.config_set("maxmemory", "1")
        daemon.until("heartbeat_store_lost")
        daemon.strike(1)
        crash = daemon.until("worker_crashed")
        assert (crash["ranks"], crash["signal"]) == ([1], "SIGKILL")
        daemon.until("first_step_taken", generation=2)
        daemon.until("standby_ready", generation=3)  # and its successor is prepared, blind
        assert daemon.status()["heartbeat_store_lost_since"] is not None
        client.config_set("maxmemory", "64mb")
    daemon.until("heartbeat_store_recovered")
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1
    tiny.note_recoveries("blind")


@full
def test_a_store_that_comes_back_elsewhere_is_found_by_the_daemon(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """Between the death of a server and its return anybody may take its port."""
    tiny = job(**{**IMPATIENT, "trainer.options.pace_s": 0.4})
    daemon = tiny.start()
    daemon.until("standby_ready")
    workers = pids_of(daemon)
    port, server = tiny.embedded("redis")["port"], tiny.process_of("redis", "redis-server")
    daemon.signal(signal.SIGSTOP)  # or it would be back before its port can be taken
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: gone(server), "the end of redis-server", 5)
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        daemon.signal(signal.SIGCONT)
        daemon.until("heartbeat_store_recovered")
        assert tiny.embedded("redis")["port"] != port
        time.sleep(OUTAGE_S)  # who lives beats in vain; its slot bears witness
        assert pids_of(daemon) == workers
        assert tiny.failures() == []
        assert tiny.events("standby_lost") == []
        daemon.strike(1)
        daemon.until("standby_ready", generation=3)  # which beats where the daemon looks
        until(lambda: beats_of(daemon), "heartbeats of the new standby", 10)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1


def beats_of(daemon: Daemon) -> bool:
    """Whether the new Redis holds a heartbeat."""
    with client_of(daemon.job) as client:
        return bool(client.keys("everstep:*:r0"))


@pytest.fixture
def relay(store: Store) -> Iterator[Relay]:
    """On the way to the store."""
    relay = Relay(store.port)
    yield relay
    relay.end()


@full
@pytest.mark.parametrize("delay_s", [0.12, 0.2, 2.0])
def test_a_slow_store_harms_no_worker(
    job: MakeJob, undisturbed: Numbers, store: Store, relay: Relay, delay_s: float
) -> None:
    """Too slow for the workers, for the daemon, for both; each way. Half an outage is one too."""
    url = store.url.replace(str(store.port), str(relay.port))
    tiny = job(**{**IMPATIENT, "heartbeats.redis_url": url, "trainer.options.pace_s": 0.4})
    daemon = tiny.start()
    daemon.until("standby_ready")
    workers = pids_of(daemon)
    relay.delay_s = delay_s
    time.sleep(10.0)
    relay.delay_s = 0.0
    must_be_unharmed(tiny, daemon, workers)
    tiny.must_equal(undisturbed)
