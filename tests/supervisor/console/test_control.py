"""The socket between commands and a daemon: bounded, private, and never the end of either side."""

import asyncio
import contextlib
import gc
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from supervisor.console.control import ADDRESS_FILE, Answer, Control, Handler, Request, ask
from supervisor.errors import NotRunning, Refused
from trainer.host.private_directories import private_directory, socket_path


async def echo(request: Request) -> Answer:
    if request["command"] == "crash":
        raise RuntimeError("broken")
    if request["command"] == "refuse":
        return {"ok": False, "error": "drills are off"}
    return {"ok": True, "request": request}


@contextlib.asynccontextmanager
async def serving(run_dir: Path, handler: Handler = echo) -> AsyncIterator[Control]:
    control = Control(run_dir, handler)
    await control.start()
    try:
        yield control
    finally:
        await control.close()


def test_a_request_is_answered(tmp_path: Path) -> None:
    """The daemon answers while its loop does other things."""

    async def story() -> Answer:
        async with serving(tmp_path):
            return await asyncio.to_thread(ask, tmp_path, {"command": "status", "n": 1})

    assert asyncio.run(story()) == {"ok": True, "request": {"command": "status", "n": 1}}


def test_a_refusal_and_a_bug_reach_the_one_who_asked(tmp_path: Path) -> None:
    """A refused drill that looks accepted is waited for in vain."""

    async def story() -> None:
        async with serving(tmp_path):
            with pytest.raises(Refused, match="drills are off"):
                await asyncio.to_thread(ask, tmp_path, {"command": "refuse"})
            with pytest.raises(Refused, match="RuntimeError: broken"):
                await asyncio.to_thread(ask, tmp_path, {"command": "crash"})
            await asyncio.to_thread(ask, tmp_path, {"command": "status"})

    asyncio.run(story())


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b"{}\n", b'{"command": 3}\n'])
def test_a_line_that_is_no_request_is_answered(tmp_path: Path, line: bytes) -> None:
    """Anything may connect; the daemon goes on."""

    async def story() -> bytes:
        async with serving(tmp_path):
            reader, writer = await asyncio.open_unix_connection(socket_path(tmp_path))
            writer.write(line)
            answer = await reader.readline()
            writer.close()
            await asyncio.to_thread(ask, tmp_path, {"command": "status"})
            return answer

    assert asyncio.run(story()).startswith(b'{"ok": false, "error": ')


def test_an_endless_line_and_a_silent_client_do_no_harm(tmp_path: Path) -> None:
    """Whoever holds a connection open may not keep the daemon from ending."""

    async def story() -> None:
        async with serving(tmp_path):
            _, silent = await asyncio.open_unix_connection(socket_path(tmp_path))
            reader, babbling = await asyncio.open_unix_connection(socket_path(tmp_path))
            babbling.write(b"x" * (1 << 21))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            await asyncio.to_thread(ask, tmp_path, {"command": "status"})
        silent.close()
        babbling.close()

    started = time.monotonic()
    asyncio.run(story())
    assert time.monotonic() - started < 5


def test_an_answer_may_have_any_size(tmp_path: Path) -> None:
    """`status` of 5,000 ranks was cut at a megabyte: "a bug of everstep"."""
    row = {"pid": 1234567, "node": "n" * 56, "phase": "step", "step": 100, "beat_age_s": 0.1}
    workers = [{"rank": rank, **row} for rank in range(16_384)]
    answer = {"ok": True, "step": 3, "workers": workers, "none": [], "few": [1], "nothing": {}}

    async def many(request: Request) -> Answer:
        return answer

    async def story() -> tuple[Answer, float]:
        longest_s = 0.0
        async with serving(tmp_path, many):
            asking = asyncio.create_task(asyncio.to_thread(ask, tmp_path, {"command": "status"}))
            while not asking.done():
                turn = time.thread_time()
                await asyncio.sleep(0)
                longest_s = max(longest_s, time.thread_time() - turn)
            return await asking, longest_s

    gc.disable()  # the heap of a test session is larger than a daemon's
    try:
        found, longest_s = asyncio.run(story())
    finally:
        gc.enable()
    assert found == answer
    assert longest_s < 0.05  # of the loop's own time


@pytest.mark.parametrize("left", [b"\xff\xfe", b"/nowhere/at/all\n", b"\0\n", b"", b"x" * 5000])
def test_a_damaged_address_is_no_daemon(tmp_path: Path, left: bytes) -> None:
    """A file `control` that holds anything made `status` a bug of ours."""
    (tmp_path / ADDRESS_FILE).write_bytes(left)
    with pytest.raises(NotRunning):
        ask(tmp_path, {"command": "status"})


@pytest.mark.parametrize("answer", [b"[1\n", b"nonsense\n", b"[" * 100_000 + b"\n", b"\xff\n", b""])
def test_an_answer_that_is_none_is_said_to_be(tmp_path: Path, answer: bytes) -> None:
    """A daemon that dies in the midst of its answer has not answered."""
    path = tmp_path / "s"
    (tmp_path / ADDRESS_FILE).write_text(f"{path}\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        serving_once = threading.Thread(target=serve)
        serving_once.start()
        with pytest.raises(NotRunning):
            ask(tmp_path, {"command": "status"})
        serving_once.join(5)


def test_no_daemon_is_said_to_be_none(tmp_path: Path) -> None:
    """Before the first start, after a clean end, and after `kill -9`."""
    with pytest.raises(NotRunning, match="no daemon runs"):
        ask(tmp_path, {"command": "status"})

    async def story() -> None:
        async with serving(tmp_path):
            pass

    asyncio.run(story())
    assert not (tmp_path / ADDRESS_FILE).exists()
    assert not socket_path(tmp_path).exists()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(socket_path(tmp_path)))
    left.close()  # the file stays, as it does after a kill
    (tmp_path / ADDRESS_FILE).write_text(f"{socket_path(tmp_path)}\n")
    with pytest.raises(NotRunning, match="no daemon runs"):
        ask(tmp_path, {"command": "status"})
    asyncio.run(story())  # and the next daemon takes its place
    assert not socket_path(tmp_path).exists()


def test_a_frozen_daemon_is_not_waited_for(tmp_path: Path) -> None:
    """A stopped process still accepts connections in the kernel (case 27: slow is not dead)."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(path))
        frozen.listen()
        (tmp_path / ADDRESS_FILE).write_text(f"{path}\n")
        started = time.monotonic()
        with pytest.raises(NotRunning, match=r"does not answer within 0\.2 s"):
            ask(tmp_path, {"command": "status"}, timeout_s=0.2)
        assert time.monotonic() - started < 2


def test_only_the_owner_may_give_orders(tmp_path: Path) -> None:
    """/tmp belongs to everybody."""

    async def story() -> None:
        async with serving(tmp_path):
            path = socket_path(tmp_path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    asyncio.run(story())
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "open", tmp_path / "link"):
        with pytest.raises(PermissionError, match="0700"):
            private_directory(path)


def test_a_deep_run_directory_has_a_short_socket(tmp_path: Path) -> None:
    """Unix sockets allow 107 bytes; home directories on clusters are longer."""
    deep = tmp_path / ("d" * 200) / "job"
    deep.mkdir(parents=True)
    assert len(bytes(socket_path(deep))) <= 107

    async def story() -> None:
        async with serving(deep):
            await asyncio.to_thread(ask, deep, {"command": "status"})

    asyncio.run(story())
