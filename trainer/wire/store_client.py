"""Clients of a Redis that is believed in nothing: answers are bounded, and nothing is retried.

redis-py reads whatever length a server announces, and by its defaults would block one `set` against
a frozen server for about a minute. Imported when a connection is wanted: redis-py takes a moment.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis._parsers import _AsyncRESP2Parser, _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from trainer.wire.store_address import StoreAddress

ANSWER_BYTES_MAX = 1 << 24
"""Of one answer: 16,384 heartbeats have a half of it."""
ANSWER_LINES_MAX = 1 << 16
"""A line holds a value; a million of them would take the loop a second."""


def _refuse(what: str) -> redis.ConnectionError:
    return redis.ConnectionError(f"its answer is above the limit of {what}")


class _Buffer(SocketBuffer):
    """All that is read of one answer; what is behind it is dropped with it."""

    def _read_from_socket(self, length: int | None = None, *args: Any, **more: Any) -> bool:
        if self._buffer.getbuffer().nbytes + (length or 0) > ANSWER_BYTES_MAX:
            raise _refuse(f"{ANSWER_BYTES_MAX} bytes")
        return bool(super()._read_from_socket(length, *args, **more))


class _Parser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        size, timeout_s = self.socket_read_size, connection.socket_timeout
        self._buffer = _Buffer(connection._sock, size, timeout_s)


class _AsyncParser(_AsyncRESP2Parser):
    async def read_response(self, disable_decoding: bool = False) -> Any:
        self._bytes_left, self._lines_left = ANSWER_BYTES_MAX, ANSWER_LINES_MAX
        return await super().read_response(disable_decoding)

    async def _read(self, length: int) -> bytes:
        self._bytes_left -= length
        if self._bytes_left < 0:
            raise _refuse(f"{ANSWER_BYTES_MAX} bytes")
        return bytes(await super()._read(length))

    async def _readline(self) -> bytes:
        self._lines_left -= 1
        if self._lines_left < 0:
            raise _refuse(f"{ANSWER_LINES_MAX} values")
        return bytes(await super()._readline())


def client(address: StoreAddress, timeout_s: float) -> redis.Redis:
    """One that answers or fails within `timeout_s`."""
    kind = redis.SSLConnection if address.tls else redis.Connection
    pool = redis.ConnectionPool(
        connection_class=kind,
        parser_class=_Parser,
        retry=Retry(NoBackoff(), 0),
        **_options(address, timeout_s),
    )
    return redis.Redis.from_pool(pool)


def async_client(address: StoreAddress, timeout_s: float) -> redis.asyncio.Redis:
    """The same for a loop, with two connections at most."""
    kind = redis.asyncio.SSLConnection if address.tls else redis.asyncio.Connection
    pool = redis.asyncio.ConnectionPool(
        connection_class=kind,
        parser_class=_AsyncParser,
        retry=AsyncRetry(NoBackoff(), 0),
        max_connections=2,
        **_options(address, timeout_s),
    )
    return redis.asyncio.Redis.from_pool(pool)


def _options(address: StoreAddress, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "username": address.username,
        "password": address.password,
        "db": address.db,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,  # whose parser is ours
        "decode_responses": True,
        "encoding_errors": "replace",  # what is no text is unreadable for itself alone
    }
    if address.tls:
        options["ssl_ca_certs"] = address.ca_file or None
    return options
