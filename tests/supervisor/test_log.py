"""Log lines are facts for programs."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from supervisor.log import configure


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_lines_are_json_on_a_stream() -> None:
    """A log that programs cannot read is searched by hand."""
    stream = io.StringIO()
    configure(stream)
    structlog.get_logger().info("slots_placed", generation=1, path=Path("/runs"))
    line = json.loads(stream.getvalue())
    assert (line["event"], line["generation"], line["level"]) == ("slots_placed", 1, "info")
    assert line["path"] == "/runs"
