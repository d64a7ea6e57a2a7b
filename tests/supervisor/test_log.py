"""Log lines may be lost; they may not stop the daemon, and the loss is told."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from supervisor.log import LOG_FILE, Sink, configure


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class FullDisk(io.StringIO):
    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_loses_lines_and_says_so_later() -> None:
    """A daemon died of its own log line while training went on without it."""
    stream = FullDisk()
    sink = Sink(stream)
    sink.msg("one")
    stream.full = True
    sink.msg("two")
    sink.msg("three")
    stream.full = False
    sink.msg("four")
    assert stream.getvalue().splitlines() == [
        "one",
        '{"event": "log_lines_lost", "count": 2}',
        "four",
    ]


def test_a_reader_that_has_left_is_survived() -> None:
    """`python -m supervisor | head` closes the pipe; the job goes on."""
    stream = io.StringIO()
    stream.close()
    Sink(stream).msg("nobody reads this")


def test_lines_are_json_on_stdout_or_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the display owns the terminal, a line printed over it helps nobody."""
    configure()
    structlog.get_logger().info("slots_placed", generation=1)
    line = json.loads(capsys.readouterr().out)
    assert (line["event"], line["generation"], line["level"]) == ("slots_placed", 1, "info")
    configure(tmp_path / "job")
    structlog.get_logger().info("workers_started", path=tmp_path)
    assert capsys.readouterr().out == ""
    (text,) = (tmp_path / "job" / LOG_FILE).read_text().splitlines()
    assert json.loads(text)["event"] == "workers_started"
