"""Each command that a page shows does what the page says, typed in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.console.status_from_files import read_result
from supervisor.record.journal import read_journal
from tests.documents import PAGES, ROOT, commands
from trainer.state.snapshot import directory_of, sweep

pytestmark = pytest.mark.full

ELSEWHERE = {  # commands that a test of their own runs
    "pip install": ".ci/run installs by them",
    ".ci/run": "runs this test",
    "finetune-smollm2.toml": "tests/faults/test_finetune.py",
}
COMMAND_S, FIRST_STEP_S, END_S = 180.0, 120.0, 60.0
STEPS = {True: 100_000, False: 60}  # with a daemon that runs beside the other commands, and alone
START = re.compile(r"-m supervisor (--config \S+)( --set '[^']*')*$")


class Shell:
    """A user's folder: settings, examples, and `.venv/bin/python`."""

    def __init__(self, folder: Path, *, endless: bool) -> None:
        self.folder = folder
        self.daemon: subprocess.Popen[bytes] | None = None
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        text = (ROOT / "job.toml").read_text()
        text = re.sub(r"^steps = \d+", f"steps = {STEPS[endless]}", text, flags=re.MULTILINE)
        (folder / "job.toml").write_text(text)
        script = folder / ".venv" / "bin" / "python"
        script.parent.mkdir(parents=True)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
        self.path = f"{folder}/.venv/bin:/usr/bin:/bin"

    def type(self, command: str) -> None:
        """Run it to its end; a start of a job runs on beside what comes next."""
        if START.search(command):
            self.end()
            self.start(command)
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def environment(self) -> dict[str, str]:
        """That of a shell with this folder's Python first."""
        paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return {**os.environ, "PATH": self.path, "PYTHONPATH": paths}

    def start(self, command: str) -> None:
        """Until a standby is ready, or to its end if it is short."""
        output = self.folder / "daemon.log"
        with output.open("wb") as opened:
            self.daemon = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + FIRST_STEP_S
        while self.daemon.poll() is None and not self.journal_has("standby_ready"):
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            time.sleep(0.1)
        assert self.daemon.poll() in (None, 0), output.read_text()[-3000:]

    def journal_has(self, event: str) -> bool:
        """Of whatever job runs in this folder."""
        records = (one for path in self.folder.rglob("journal.jsonl") for one in read_journal(path))
        return any(one["kind"] == "move" and one["event"]["event"] == event for one in records)

    def end(self) -> None:
        """Ctrl-C, as its page says: it saves and stops."""
        if self.daemon is None:
            return
        if self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGINT)
        try:
            assert self.daemon.wait(END_S) in (0, 5, 75)
        finally:
            self.daemon.kill()
            self.daemon.wait()
            self.daemon = None


@pytest.fixture
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    typed = commands(request.getfixturevalue("page"))
    shell = Shell(tmp_path, endless=any(START.search(command) for command in typed))
    yield shell
    shell.end()
    for result in tmp_path.rglob("result.json"):
        assert read_result(result.parent)
        sweep(directory_of(result.parent))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=str)
def test_every_command_of_a_page_works(page: Path, shell: Shell) -> None:
    """A page that was right once misleads a whole release later."""
    for command in commands(page):
        parts = [
            part
            for part in command.split(" && ")
            if "-m venv" not in part and not any(word in part for word in ELSEWHERE)
        ]
        for part in parts:
            shell.type(part)
