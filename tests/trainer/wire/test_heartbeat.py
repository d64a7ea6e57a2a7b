"""The wire contract of heartbeats: exact, strict, and cheap when the store is away."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from trainer.wire.heartbeat import (
    PHASES,
    Beat,
    BeatMessage,
    BeatSender,
    HeartbeatError,
    beat_key,
    connect,
    read_beat_file,
)
from trainer.wire.store_address import StoreAddress

MESSAGE = BeatMessage(
    generation=3,
    rank=1,
    pid=4711,
    seq=12,
    beats=99,
    phase="step",
    step=7,
    loss=1.25,
    durations={"step": (0.1, 0.5), "compile": (4.0, 4.0)},
)


class Store:
    """A store that keeps what it is given, or is away."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.away = False
        self.seen = threading.Semaphore(0)

    def set(self, key: str, value: str, *, px: int) -> None:
        self.seen.release()
        if self.away:
            raise redis.ConnectionError("away")
        self.values[key] = value


def sender(beat: Beat, store: Store) -> BeatSender:
    return BeatSender(
        beat,
        key=beat_key("job", 3, 1),
        generation=3,
        rank=1,
        every_s=0.001,
        connect=lambda _: store,  # type: ignore[arg-type,return-value]
    )


def test_a_message_survives_the_wire() -> None:
    """Both sides must mean the same by every field."""
    assert BeatMessage.from_json(MESSAGE.to_json()) == MESSAGE


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"v": 2}, "version 2"),
        ({"extra": 1}, "'extra'"),
        ({"seq": "12"}, "seq is '12'"),
        ({"phase": "dreaming"}, "phase is 'dreaming'"),
        ({"loss": "low"}, "loss is 'low'"),
        ({"durations": {"step": [1]}}, "durations.step"),
        ({"durations": None}, "durations is None"),
    ],
)
def test_a_malformed_message_is_refused_by_the_name_of_its_field(
    change: dict[str, Any], complaint: str
) -> None:
    """A half-understood heartbeat is worse than none."""
    raw = {**json.loads(MESSAGE.to_json()), **change}
    with pytest.raises(HeartbeatError, match=complaint):
        BeatMessage.from_json(json.dumps(raw))


def test_what_is_no_json_object_is_refused() -> None:
    """Anything may lie under a key."""
    for text in ("", "[]", "3", "{"):
        with pytest.raises(HeartbeatError):
            BeatMessage.from_json(text)


def test_the_file_shows_what_the_loop_last_did(tmp_path: Path) -> None:
    """The second witness of a hang needs no Redis (bluechi#952)."""
    beat = Beat(tmp_path / "beat")
    assert read_beat_file(tmp_path / "beat").step == -1
    beat.enter("step", 4)
    beat.tick()
    view = read_beat_file(tmp_path / "beat")
    assert (view.phase, view.step, view.seq == beat.seq) == ("step", 4, True)


def test_the_file_counts_the_sends_whether_they_arrive_or_not(tmp_path: Path) -> None:
    """A standby does no steps: only its thread can show the slot that it lives."""
    beat, store = Beat(tmp_path / "beat"), Store()
    store.away = True
    thread = sender(beat, store)
    thread.start()
    for _ in range(3):
        assert store.seen.acquire(timeout=5)
    thread.end()
    thread.join(5)
    view = read_beat_file(tmp_path / "beat")
    assert view.beats == thread.beats >= 3
    assert (view.seq, view.phase, view.step) == (0, "initialize", -1)


def test_a_disk_without_room_for_the_file_costs_the_witness_and_not_the_training(
    tmp_path: Path,
) -> None:
    """64 bytes that a full disk refuses are no reason to lose a day of training."""
    beat = Beat(tmp_path / "missing" / "beat")
    assert "missing/beat: No such file" in beat.no_file
    beat.enter("step", 1)
    beat.count(3)
    assert (beat.seq > 0, beat.phase) == (True, "step")
    assert Beat(tmp_path / "beat").no_file == ""


def test_ranks_begin_a_step_alike_whatever_they_waited_for_before(tmp_path: Path) -> None:
    """One that had read more data before looked further than those that waited for it."""
    one, other = Beat(tmp_path / "one"), Beat(tmp_path / "other")
    for _ in range(100):
        one.tick()
    for beat in (one, other):
        beat.enter("step", 0)
    assert one.seq == other.seq > 100
    other.tick()
    assert one.seq < other.seq


def test_a_file_that_is_no_beat_is_an_error(tmp_path: Path) -> None:
    """A witness that cannot see must say so."""
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "torn").write_bytes(b"\1" * 64)
    with pytest.raises(HeartbeatError):
        read_beat_file(tmp_path / "short")
    with pytest.raises(HeartbeatError):
        read_beat_file(tmp_path / "torn")
    with pytest.raises(OSError, match="nowhere"):
        read_beat_file(tmp_path / "nowhere")


def test_only_the_loop_makes_progress(tmp_path: Path) -> None:
    """A helper thread that goes on beating must not hide a stuck loop (marin#7344)."""
    beat, store = Beat(tmp_path / "beat"), Store()
    thread = sender(beat, store)
    thread.start()
    for _ in range(3):
        assert store.seen.acquire(timeout=5)
    thread.end()
    thread.join(5)
    message = BeatMessage.from_json(store.values["everstep:job:g3:r1"])
    assert message.beats >= 2
    assert message.seq == 0


def test_an_absent_store_costs_a_count_and_nothing_else(tmp_path: Path) -> None:
    """Training must not stop because heartbeats cannot be sent (resque#1883)."""
    beat, store = Beat(tmp_path / "beat"), Store()
    store.away = True
    thread = sender(beat, store)
    thread.start()
    for _ in range(3):
        assert store.seen.acquire(timeout=5)
    store.away = False
    while not store.values:
        assert store.seen.acquire(timeout=5)
    thread.end()
    thread.join(5)
    assert thread.failures >= 2


def test_the_client_gives_up_within_its_time_and_does_not_retry() -> None:
    """redis-py alone would hold a thread for a minute at a frozen server."""
    address = StoreAddress(host="127.0.0.1", port=6399, password="secret")
    client = connect(address)(0.2)
    options = client.connection_pool.connection_kwargs
    assert options["socket_timeout"] == options["socket_connect_timeout"] == 0.2
    assert options["retry"].get_retries() == 0


def test_durations_leave_out_the_steps_that_warm_up(tmp_path: Path) -> None:
    """A first step that also warms up would make every deadline too long (marin#8543)."""
    beat = Beat(tmp_path / "beat")
    beat.enter("compile")
    beat.enter("step", 0)
    assert set(beat.durations) == {"initialize", "compile"}
    beat.enter("step", 1)
    assert "step" not in beat.durations
    beat.enter("evaluate")
    typical, longest = beat.durations["step"]
    assert 0 <= typical <= longest
    beat.enter("step", 2)
    assert "evaluate" in beat.durations


def test_an_unknown_phase_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    """Deadlines are looked up by phase."""
    beat = Beat(tmp_path / "beat")
    with pytest.raises(ValueError, match="dreaming"):
        beat.enter("dreaming")
    assert beat.phase in PHASES
