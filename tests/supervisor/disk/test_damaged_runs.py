"""Files of a run that are damaged, foreign or something else: a sentence, never a bug of ours."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.cli import main
from tests.supervisor.test_cli import write_journal

ROOT = Path(__file__).parents[3]
COMMANDS = (["status"], ["status", "--json"], ["events"], ["events", "--json"], ["replay"])
LOOKING = (*COMMANDS, ["stop", "--timeout", "1"], ["fault", "--rank", "0", "--kind", "kill"])
DEEP = "[" * 100_000
ROW = {"generation": 1, "step": 3, "loss": 1.5}


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content

    def write(run_dir: Path) -> None:
        (run_dir / name).write_bytes(data)

    return write


def folder(name: str) -> Callable[[Path], None]:
    def make(run_dir: Path) -> None:
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).mkdir()

    return make


CONTENTS: dict[str, str | bytes] = {
    "bytes": b"\xff\xfe\x00\n",
    "nothing": "",
    "a list": "[1, 2]\n",
    "null": "null\n",
    "depth": f"{DEEP}\n",
    "digits": "1" * 10_000 + "\n",
}
WRONG = {"step": "many", "loss": [1], "held_out_loss": {}, "reason": 7, "state": None}
DAMAGES = {
    f"{what} in {name}": text(name, content)
    for name in (
        "result.json",
        "metrics.jsonl",
        "control",
        "journal.jsonl",
        "embedded.json",
        "lock",
    )
    for what, content in CONTENTS.items()
} | {
    "wrong types in result.json": text("result.json", json.dumps(WRONG)),
    "wrong types in metrics.jsonl": text("metrics.jsonl", json.dumps({**ROW, **WRONG}) + "\n"),
    "no number in metrics.jsonl": text("metrics.jsonl", '{"step": null, "loss": NaN}\n'),
    **{
        f"a folder for {name}": folder(name) for name in ("result.json", "metrics.jsonl", "control")
    },
    "a folder for journal.jsonl": folder("journal.jsonl"),
    "text for incidents": text("incidents", "none"),
}


@pytest.mark.parametrize(("what", "damage"), DAMAGES.items(), ids=DAMAGES.keys())
def test_whatever_a_file_of_a_run_holds_a_command_says_a_sentence(
    what: str, damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` of a run with a damaged result.json was "a bug of everstep"."""
    write_journal(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    damage(tmp_path)
    # Only without its journal nothing can be said of a run.
    statuses = (0, 1, 2, 4) if "journal" in what else (0, 1, 2)
    for command in LOOKING:
        assert main([*command, "--run", str(tmp_path)]) in statuses, command
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert len(told.splitlines()) <= 2


@pytest.mark.parametrize("command", LOOKING)
def test_a_file_in_place_of_a_directory_is_a_sentence(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--run runs/first/journal.jsonl` is an easy slip."""
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert main([*command, "--run", str(tmp_path / "journal.jsonl")]) in (1, 2)
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "journal.jsonl" in told


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that other users may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("closed", ["first", "first/journal.jsonl"])
@pytest.mark.parametrize("command", LOOKING)
def test_the_run_of_another_user_is_a_sentence(
    open_place: Path, command: list[str], closed: str
) -> None:
    """Its directory is for its owner only, and so is each file in it."""
    run_dir = open_place / "first"
    run_dir.mkdir()
    run_dir.chmod(0o755)
    write_journal(run_dir)
    (open_place / closed).chmod(0o700)
    code = (
        "import os, sys\n"
        "from supervisor import cli\n"
        "from supervisor.console import control, display, narrate, status_from_files\n"
        "from supervisor.daemon import lock\n"
        "from supervisor.record import journal, replay\n"
        "if os.getuid() == 0:\n"
        "    os.setuid(65534)\n"
        "else:\n"
        "    os.chmod(sys.argv[1], 0)\n"
        "sys.exit(cli.main(sys.argv[2:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(open_place / closed), *command, "--run", str(run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    (open_place / closed).chmod(0o700)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert str(run_dir) in done.stderr
