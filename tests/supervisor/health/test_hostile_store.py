"""Whatever a Redis says, it makes the daemon blind with a reason, and ends nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from supervisor.health.store import RedisStore, StoreUnavailable, _Reader
from trainer.wire.heartbeat import Beat, BeatMessage, BeatSender, connect, read_canary
from trainer.wire.store_address import StoreAddress

HUGE = b"$500000000\r\n"
DEEP = b"*1\r\n" * 100_000
ANSWERS = {
    "not text": b"$3\r\n\xff\xfe\xfd\r\n",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a number of 5000 digits": b":" + b"9" * 5000 + b"\r\n",
    "a length that is none": b"$many\r\n",
    "nested": DEEP,
    "huge": HUGE,
    "many": b"*100000000\r\n" + b":1\r\n" * 200_000,
    "a map of RESP3": b"%1\r\n+proto\r\n:9\r\n",
    "a line without end": b"+" + b"x" * 200_000,
    "an error with escape codes": b"-ERR \x1b[2J" + b"x" * 10_000 + b"\r\n",
    "a number for MGET": b"+OK\r\n:7\r\n",
    "too few for MGET": b"+OK\r\n*1\r\n$1\r\na\r\n",
}


@contextlib.contextmanager
def serving(answer: bytes) -> Iterator[StoreAddress]:
    """A server that says the same to everything, and 500 MB after an announcement of that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=speak, args=(connection,), daemon=True).start()

        def speak(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16):
                    connection.sendall(answer)
                    for _ in range(500 if answer == HUGE else 0):
                        connection.sendall(bytes(1_000_000))

        threading.Thread(target=serve, daemon=True).start()
        yield StoreAddress(host="127.0.0.1", port=listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_what_a_store_says_makes_blind_and_ends_nothing(answer: bytes) -> None:
    """Bytes that are no text ended the daemon as a bug; a bad HELLO and nested answers too."""

    async def story(address: StoreAddress) -> str:
        store = RedisStore(job="job", address=address)
        with pytest.raises(StoreUnavailable) as caught:
            await store.poll(["one", "two"])
        with contextlib.suppress(StoreUnavailable):
            await store.delete(["one"])
        await store.close()
        return str(caught.value)

    before = psutil.Process().memory_info().rss
    with serving(answer) as address:
        reason = asyncio.run(story(address))
    assert reason.isprintable()
    assert 0 < len(reason) <= 200
    assert psutil.Process().memory_info().rss - before < 100e6


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_what_a_store_says_never_ends_the_thread_of_a_worker(
    answer: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its heartbeat thread died, and the rank was taken for silent."""
    before = psutil.Process().memory_info().rss
    beat = Beat(tmp_path_factory.mktemp("beat") / "beat")
    with serving(answer) as address:
        sender = BeatSender(
            beat, key="k", generation=1, rank=0, every_s=0.05, connect=connect(address)
        )
        sender.start()
        deadline = time.monotonic() + 10
        while sender.beats < 3:
            assert sender.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sender.end()
        sender.join(10)
        assert not sender.is_alive()
        read_canary("job", {"host": address.host, "port": address.port}, timeout_s=0.5)
    assert psutil.Process().memory_info().rss - before < 100e6


VALID = {
    "v": 1,
    "generation": 1,
    "rank": 0,
    "pid": 1,
    "seq": 1,
    "beats": 1,
    "phase": "step",
    "step": 3,
    "durations": {},
}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "�" * 20,
        json.dumps({**VALID, "seq": 10**400}),
        json.dumps({**VALID, "durations": {"step": [float("inf"), 1.0]}}),
        json.dumps({**VALID, "durations": {"step": [float("nan"), -1.0]}}),
        json.dumps({**VALID, "phase": "x" * 1_000_000}),
        json.dumps({**VALID, "v": 2}),
    ],
)
def test_a_heartbeat_that_cannot_be_read_is_unknown_and_alone(text: str) -> None:
    """Whoever may set one key could end the daemon with it."""

    class Store:
        async def poll(self, keys: list[str]) -> list[str | None]:
            return [text, json.dumps({**VALID, "rank": 1})]

        async def delete(self, keys: list[str]) -> None: ...

    found = asyncio.run(_Reader("job", Store()).read([(1, 0), (1, 1)]))  # type: ignore[arg-type]
    assert found[1, 0] is None
    assert isinstance(found[1, 1], BeatMessage)
