"""Output may be lost; it may not stop, fail or end anything, and the loss is reported."""

import json
import os
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.console.output import BackgroundStream, appended

ROOT = Path(__file__).parents[3]
PICTURE = "x" * 2000 + "\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal: the end that a person reads, and the end that a program writes to."""
    reader, writer = os.openpty()
    yield reader, writer
    os.close(reader)


def test_a_terminal_that_has_stopped_stops_no_writer(terminal: tuple[int, int]) -> None:
    """Ctrl-S in the terminal stood the daemon's loop still: no recovery, no status, no signals."""
    reader, writer = terminal
    stream = BackgroundStream(writer, pending_max=10_000)
    termios.tcflow(writer, termios.TCOOFF)
    for _ in range(1000):
        stream.write(PICTURE)
    stream.flush()
    assert stream.is_behind
    assert stream.lost > 900
    assert not stream.drain(0.05)
    found: list[bytes] = []

    def read() -> None:
        while not found or b"and on it goes" not in found[-1]:
            found.append(os.read(reader, 1 << 16))

    reading = threading.Thread(target=read)
    reading.start()
    termios.tcflow(writer, termios.TCOON)
    assert stream.drain(10)
    stream.write("and on it goes\n")
    reading.join(10)
    assert not reading.is_alive()
    assert b"lines of output were lost" in b"".join(found)
    assert stream.lost == 0


def test_lost_lines_are_counted_in_the_log(tmp_path: Path) -> None:
    """A daemon died of its own log line on a full disk; now the gap has a number."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with appended(path) as stream:
        for number in range(100):
            stream.write(json.dumps({"event": "x" * 40_000, "number": number}) + "\n")
        os.set_blocking(reader, True)
        lines: list[bytes] = []

        def read() -> None:
            with os.fdopen(reader, "rb") as file:
                lines.extend(file)

        reading = threading.Thread(target=read)
        reading.start()
        assert isinstance(stream, BackgroundStream)
        assert stream.drain(10)
        stream.write('{"event": "later"}\n')
        assert stream.drain(10)
        os.close(stream.fileno())
    reading.join(10)
    told = [json.loads(line) for line in lines]
    lost = [line["count"] for line in told if line["event"] == "log_lines_lost"]
    written = [line["number"] for line in told if "number" in line]
    assert sum(lost) + len(written) == 100
    assert lost
    assert told[-1] == {"event": "later"}


@pytest.mark.parametrize("path", ["/dev/full", "a pipe without a reader"])
def test_what_cannot_be_written_is_dropped(path: str) -> None:
    """`python -m supervisor | head` closes the pipe; the job goes on."""
    if path == "/dev/full":
        descriptor = os.open(path, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    stream = BackgroundStream(descriptor)
    print("nobody reads this", file=stream)
    assert stream.drain(10)
    assert stream.lost == 1


def test_a_character_that_the_terminal_lacks_is_replaced() -> None:
    """An arrow in an exception's text ended the command on an ascii terminal with status 70."""
    reader, writer = os.pipe()
    stream = BackgroundStream(writer, encoding="latin-1")
    print("RUNNING → DRAINING, schön", file=stream)
    assert stream.drain(10)
    assert os.read(reader, 100).decode("latin-1") == "RUNNING ? DRAINING, schön\n"


def everstep(
    *arguments: str, tail: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command in a shell, with what stands behind it."""
    command = " ".join([sys.executable, "-m", "supervisor", *arguments, tail])
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_terminal_shows_the_state_machine(encoding: str) -> None:
    """`graph` prints arrows; on a latin-1 terminal it ended as a bug of ours."""
    done = everstep("graph", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "RUNNING" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`| head -1` ended with 120 and a traceback."""
    done = everstep("check", "--defaults", tail="| head -1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_destination_that_is_full_is_a_sentence() -> None:
    """An answer that nobody can read is not given."""
    done = everstep("check", "--defaults", tail="> /dev/full")
    assert (done.returncode, done.stderr) == (
        1,
        "the output cannot be written: No space left on device\n",
    )


def test_a_closed_standard_output_is_no_error() -> None:
    """A service manager may close it."""
    done = everstep("check", "--defaults", tail=">&-")
    assert (done.returncode, done.stderr) == (0, "")
