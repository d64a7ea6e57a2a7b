"""How commands reach a running daemon: a Unix socket for its owner only, a JSON object a line.

It carries questions and orders; it decides nothing and never waits without a bound.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from supervisor.errors import DiskError, NotRunning, Refused
from trainer.host.atomic_write import write_whole
from trainer.host.private_directories import private_directory, socket_path

Request = dict[str, Any]
Answer = dict[str, Any]
Handler = Callable[[Request], Awaitable[Answer]]

ADDRESS_FILE = "control"  # in the run directory: where the socket is
_LINE_LIMIT = 1 << 20  # bytes of a request
_ANSWER_LIMIT = 1 << 26  # bytes; that of 16,384 ranks has a tenth of it
_ANSWER_PATIENCE = 10  # times the limit for one piece of it
_ROWS_AT_ONCE = 256
_HANDLER_LIMIT_S = 30.0
_IDLE_LIMIT_S = 60.0
_log = structlog.get_logger()


class Control:
    """The daemon's side. `handler` answers one request with {"ok": true, …} or {"ok": false, …}.

    A handler that raises, or takes more than 30 s, becomes an answer {"ok": false, "error": …}.
    """

    def __init__(self, run_dir: Path, handler: Handler) -> None:
        self._handler = handler
        self._path = socket_path(run_dir)
        self._address = run_dir / ADDRESS_FILE
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._is_told = False
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Only for the holder of the job's lock: a socket that is there is a leftover."""
        try:
            private_directory(self._path.parent)
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise DiskError(
                f"{self._path}: {error.strerror}; remove {self._path.parent}"
            ) from error
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            self._inode = self._path.lstat().st_ino
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=_LINE_LIMIT
            )
            self._write_address()
        except OSError as error:
            listener.close()
            raise DiskError(f"cannot listen on {self._path}: {error.strerror}") from error

    async def mend(self) -> None:
        """Make the socket or the file with its address anew if either was removed; or later.

        Cleaners of /tmp do so. A socket that another daemon has made since is left alone.
        """
        if self._server is None:
            return
        is_there = os.path.lexists(self._path)
        if is_there and (os.path.lexists(self._address) or not self._is_ours()):
            return
        try:
            if is_there:
                self._write_address()
            else:
                self._server.close()
                await self.start()
        except (DiskError, OSError) as error:
            if not self._is_told:
                _log.warning("control_socket_lost", why=str(error))
            self._is_told = True
            return
        self._is_told = False
        _log.warning("control_socket_made_again", path=str(self._path))

    async def close(self, *, leave: bool = False) -> None:
        """Stop listening, hang up, and leave nothing behind. Harmless when done twice.

        With `leave` the address is not removed: another daemon listens there by now.
        """
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if leave or not self._is_ours():
            return
        self._address.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _write_address(self) -> None:
        write_whole(self._address, f"{self._path}\n")

    def _is_ours(self) -> bool:
        """Whether the socket is the one that was made here, or none."""
        try:
            return self._path.lstat().st_ino == self._inode
        except FileNotFoundError:
            return True
        except OSError:
            return False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while line := await _read_line(reader):
                answer = await self._answer(line)
                for piece in _pieces(answer):
                    writer.write(piece)
                    async with asyncio.timeout(_IDLE_LIMIT_S):
                        await writer.drain()
                    await asyncio.sleep(0)  # others have their turn between two pieces
        except (TimeoutError, ConnectionError, ValueError) as error:
            # ValueError is a line beyond the limit. The peer is gone or babbles: no answer.
            _log.info("control_connection_dropped", error=repr(error))
        except asyncio.CancelledError:
            # Only `close` cancels; asyncio's streams would log the cancellation as an error.
            _log.debug("control_connection_closed")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            return {"ok": False, "error": f"the request is not JSON: {error}"}
        if not isinstance(request, dict) or not isinstance(request.get("command"), str):
            return {"ok": False, "error": 'a request is an object with a text under "command"'}
        try:
            async with asyncio.timeout(_HANDLER_LIMIT_S):
                return await self._handler(request)
        except TimeoutError:
            return {"ok": False, "error": f"no answer within {_HANDLER_LIMIT_S:g} s"}
        except Exception as error:
            _log.exception("control_request_failed", command=request["command"])
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _pieces(answer: Answer) -> Iterator[bytes]:
    """Encode an answer as one line of JSON, a bounded piece at a time, whatever its size."""
    opening = "{"
    for key, value in answer.items():
        yield f"{opening}{json.dumps(key)}: ".encode()
        opening = ", "
        if isinstance(value, list) and len(value) > _ROWS_AT_ONCE:
            for first in range(0, len(value), _ROWS_AT_ONCE):
                rows = json.dumps(value[first : first + _ROWS_AT_ONCE], default=str)[1:-1]
                yield f"{', ' if first else '['}{rows}".encode()
            yield b"]"
        else:
            yield json.dumps(value, default=str).encode()
    yield b"{}\n" if opening == "{" else b"}\n"


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(_IDLE_LIMIT_S):  # `wait_for` of 3.11 may swallow a cancellation
        return await reader.readline()


def ask(run_dir: Path, request: Request, timeout_s: float = 5.0) -> Answer:
    """Send one request to the daemon of `run_dir` (`<run_dir>/<job>`) and return its answer.

    Raises NotRunning when there is no daemon or none that answers in time, Refused with the
    daemon's reason when the answer is not ok.
    """
    try:
        path = (run_dir / ADDRESS_FILE).read_text(encoding="utf-8").strip()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = _read_answer(connection, time.monotonic() + _ANSWER_PATIENCE * timeout_s)
        answer = json.loads(line) if line else None
    except TimeoutError:
        raise NotRunning(
            f"the daemon of {run_dir} does not answer within {timeout_s:g} s"
        ) from None
    except (FileNotFoundError, NotADirectoryError, ConnectionError):
        raise NotRunning(f"no daemon runs in {run_dir}") from None
    except PermissionError:
        raise NotRunning(f"the daemon of {run_dir} belongs to another user") from None
    except OSError as error:
        raise NotRunning(f"the daemon of {run_dir} cannot be reached: {error.strerror}") from None
    except (ValueError, RecursionError):  # an address that is no path, an answer cut off
        raise NotRunning(f"what answers for {run_dir} is not a daemon of everstep") from None
    if not isinstance(answer, dict):
        raise NotRunning(f"the daemon of {run_dir} hung up without an answer")
    if not answer.get("ok"):
        raise Refused(str(answer.get("error", "refused without a reason")))
    return answer


def _read_answer(connection: socket.socket, deadline: float) -> bytes:
    """Read one line. What answers may be another user's, and may never end what it says."""
    answer = bytearray()
    while not answer.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            break
        answer += piece
        if len(answer) > _ANSWER_LIMIT:
            raise ValueError("an answer above the limit")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(answer)
