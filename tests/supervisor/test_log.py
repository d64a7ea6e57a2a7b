"""Log lines are for people, or facts for programs, and their levels are worth an alarm."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from supervisor.log import configure
from tests.sim.run import simulate
from tests.sim.world import Fault, Script


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_lines_are_json_on_a_stream() -> None:
    """A log that programs cannot read is searched by hand."""
    stream = io.StringIO()
    configure(stream, "json")
    structlog.get_logger().info("slots_placed", generation=1, path=Path("/runs"))
    line = json.loads(stream.getvalue())
    assert (line["event"], line["generation"], line["level"]) == ("slots_placed", 1, "info")
    assert line["path"] == "/runs"


def test_a_person_reads_lines_and_not_json() -> None:
    """`python -m supervisor | tee log` printed walls of JSON; no text may act on the terminal."""
    stream = io.StringIO()
    configure(stream, "plain")
    log = structlog.get_logger()
    log.warning("worker_crashed", ranks=(1,), why="\x1b[2Jgone\nfor good", detail="x" * 9999, no=())
    try:
        raise ValueError("of ours")
    except ValueError:
        log.exception("display_lost")
    first, *rest = stream.getvalue().splitlines()
    assert "[warning  ] worker_crashed" in first
    assert "gone for good" in first
    assert "\x1b" not in first
    assert "no=" not in first
    assert len(first) < 1000
    assert rest[0].endswith("display_lost")
    assert rest[-1] == "ValueError: of ours"


def levels_of(tmp_path: Path, script: Script) -> dict[str, str]:
    with capture_logs() as lines:
        simulate(tmp_path / "journal.jsonl", script)
    return {line["event"]: line["log_level"] for line in lines}


def test_an_alarm_can_go_by_the_level(tmp_path: Path) -> None:
    """Every move was "info": a rule on errors never fired, FAILED and a blind night included."""
    fault = Fault(kind="raise", generation=0, step=25, times=9)
    failing = levels_of(tmp_path / "failing", Script(faults=[fault]))
    assert failing["worker_raised"] == "warning"
    assert failing["retry_ruled_out"] == "error"
    assert failing["checkpoint_committed"] == failing["first_step_taken"] == "info"
    blind = levels_of(tmp_path / "blind", Script(store_away=(12.0, 13.0), steps=99))
    assert blind["heartbeat_store_lost"] == "warning"
    assert blind["heartbeat_store_recovered"] == blind["training_completed"] == "info"
