"""A journal that is not what was written: one clear message, the right status, nothing done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from supervisor import assembly
from supervisor.cli import main
from supervisor.record.journal import encode
from supervisor.record.previous_run import UNKNOWN, Past
from tests.test_scenarios import TRACES

WHOLE = (TRACES / "killed_in_step.jsonl").read_bytes()
LINES = WHOLE.splitlines(keepends=True)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text("[job]\nname = 'mine'\n")
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    return path


def lay(run_dir: Path, content: bytes) -> None:
    (run_dir / "journal.jsonl").write_bytes(content)


def middle() -> bytes:
    damaged = LINES[4].replace(b'"kind"', b'"kinb"')
    return b"".join([*LINES[:4], damaged, *LINES[5:]])


def future() -> bytes:
    header = json.loads(LINES[0])
    del header["crc"]
    return encode({**header, "schema": 99}) + b"".join(LINES[1:])


def gap() -> bytes:
    return b"".join([*LINES[:4], *LINES[5:]])


FOREIGN = b"#!/bin/sh\necho this is no journal\n"
# What is wrong, the exit status of each command, and what its message must say.
CASES: list[tuple[str, Callable[[], bytes], int, tuple[str, ...]]] = [
    ("a damaged middle", middle, 4, ("line 5", "nothing was done", "intact copy", "newest check")),
    ("a missing line", gap, 4, ("line 5", "sequence number", "intact copy")),
    ("a foreign file", lambda: FOREIGN, 4, ("line 1", "not JSON", "move it away")),
    ("a future schema", future, 4, ("line 1", "schema 99", "the version of everstep that wrote")),
]
COMMANDS = (["run", "--plain"], ["status"], ["events"], ["replay"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(("what", "content", "status", "says"), CASES, ids=[c[0] for c in CASES])
def test_what_was_not_written_is_not_gone_on_with(
    what: str,
    content: Callable[[], bytes],
    status: int,
    says: tuple[str, ...],
    command: list[str],
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To guess past a damaged line is to run another story than the one that happened."""
    lay(run_dir, content())
    config = str(run_dir.parents[1] / "job.toml")
    assert main([*command, "--config", config]) == status
    message = capsys.readouterr().err
    for words in (str(run_dir / "journal.jsonl"), *says):
        assert words in message, what
    assert "Traceback" not in message
    assert (run_dir / "journal.jsonl").read_bytes() == content()
    assert not (run_dir / "embedded.json").exists()  # neither Ray nor Redis was started


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_journal_that_cannot_be_read_is_said(
    command: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory stands for all that the system refuses: the tests may run as root."""
    (run_dir / "journal.jsonl").mkdir()
    status = main([*command, "--config", str(run_dir.parents[1] / "job.toml")])
    message = capsys.readouterr().err
    assert status in (1, 4)
    assert str(run_dir / "journal.jsonl") in message
    assert "Traceback" not in message


@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda words: words[0])
def test_an_empty_journal_has_nothing_to_tell(
    command: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that was full at the first line; silence with status 0 would read as fine."""
    lay(run_dir, b"")
    assert main([*command, "--config", str(run_dir.parents[1] / "job.toml")]) == 1
    assert str(run_dir) in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda words: words[0])
def test_a_torn_tail_is_left_out(
    command: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever reads while the daemon writes sees one now and then."""
    lay(run_dir, WHOLE[:-7])
    assert main([*command, "--config", str(run_dir.parents[1] / "job.toml")]) == 0
    assert capsys.readouterr().err == ""


def began(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> Past:
    """What a daemon would begin with; it goes no further."""
    found: list[Past] = []

    class Stub:
        def __init__(self, *arguments: Any) -> None:
            found.extend(one for one in arguments if isinstance(one, Past))

        async def run(self, **_: Any) -> int:
            return 0

    monkeypatch.setattr(assembly, "_Assembly", Stub)
    assert main(["--plain", "--config", str(run_dir.parents[1] / "job.toml")]) == 0
    return found[0]


def test_a_daemon_goes_on_before_a_torn_tail_and_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine lost power in the middle of the last line."""
    lay(run_dir, b"".join(LINES[:-3]) + LINES[-3][:-7])
    past = began(monkeypatch, run_dir)
    assert past.generation == 2
    assert "journal_truncated" in capsys.readouterr().out
    assert (run_dir / "journal.jsonl").read_bytes() == b"".join(LINES[:-3])


@pytest.mark.parametrize("content", [None, b""])
def test_a_journal_that_is_gone_loses_neither_checkpoints_nor_numbers(
    content: bytes | None,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever moved a damaged one away wants the job to go on, not to start over on top of it."""
    if content is not None:
        lay(run_dir, content)
    for generation in (1, 3):
        (run_dir / "checkpoints" / f"generation-{generation}").mkdir(parents=True)
    (run_dir / "logs" / "generation-4").mkdir(parents=True)
    (run_dir / "incidents" / "0002").mkdir(parents=True)
    past = began(monkeypatch, run_dir)
    assert (past.state, past.generation, past.incidents) == (UNKNOWN, 4, 2)
    assert past.committed_step == -1  # there are directories, and nothing in them
    assert "journal_missing" in capsys.readouterr().out


def test_a_job_that_never_ran_begins_at_the_beginning(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No journal is the usual case."""
    assert began(monkeypatch, run_dir) == Past()
    assert "journal_missing" not in capsys.readouterr().out
