"""The default job under a real daemon, for benchmarks: started, asked, read, and ended.

It measures nothing itself, and reads files only from where it stopped the last time: whoever
measures on two cores must not be a load.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from supervisor.console.control import ask
from supervisor.errors import EverstepError
from tests.benchmarks.report import ROOT, note
from tests.faults.harness import SETTINGS, Daemon, Figures, Job

Row = dict[str, Any]

START_LIMIT_S = 300.0
POLL_S = 0.05
ENDLESS: dict[str, Any] = {
    "trainer.steps": 1_000_000,
    "budgets.failures_max": -1,
    "budgets.no_progress_max": 1_000_000,
    "budgets.same_error_max": 1_000_000,
}
"""No benchmark may run out of steps, or of patience with failures that it ordered itself."""


class Tail:
    """The rows of a file of JSON lines that grows; each is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._offset = 0

    def read(self) -> list[Row]:
        """The rows that are new since the last call."""
        try:
            if self.path.stat().st_size <= self._offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.rows += new
        return new


class Supervised:
    """One job in a folder of its own, its daemon, and what both have written so far."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults = {key: None for key in SETTINGS if key != "job.name"}
        self.job = Job(folder, Figures(), **{**defaults, **ENDLESS, **settings})
        self.journal = Tail(self.job.run_dir / "journal.jsonl")
        self.metrics = Tail(self.job.run_dir / "metrics.jsonl")
        self.daemon: Daemon

    def start(self) -> None:
        """Start the daemon."""
        self.daemon = self.job.start()

    def status(self) -> Row:
        """What `status --json` says; empty while the daemon does not answer."""
        with contextlib.suppress(EverstepError):
            return self.daemon.status()
        return {}

    def read(self) -> None:
        """Take in what is new in journal and metrics."""
        self.journal.read()
        self.metrics.read()

    def moves(self) -> list[Row]:
        """The moves read so far."""
        return [record for record in self.journal.rows if record["kind"] == "move"]

    def until(self, what: str, happened: Callable[[], bool], limit_s: float, poll_s: float) -> None:
        """Wait; raises AssertionError with the job's story when it takes too long."""
        deadline = time.monotonic() + limit_s
        while not happened():
            ended = self.daemon.process.poll()
            assert ended is None, f"the daemon ended ({ended}) before {what}{self.job.story()}"
            assert time.monotonic() < deadline, f"no {what} in {limit_s:g} s{self.job.story()}"
            time.sleep(poll_s)

    def until_stepping(self, *, steps: int, standby: bool, limit_s: float = START_LIMIT_S) -> Row:
        """RUNNING, so many steps done by this generation, its standby ready; the status then."""
        status: Row = {}

        def ready() -> bool:
            nonlocal status
            status = self.status()
            if status.get("state") != "RUNNING":
                return False
            if standby and not (status.get("standby") or {}).get("ready"):
                return False
            self.metrics.read()
            return len(self.rows_of(status["generation"])) >= steps

        self.until("steady steps", ready, limit_s, 0.2)
        return status

    def rows_of(self, generation: int) -> list[Row]:
        """The metrics of one generation, in order."""
        found = []
        for row in reversed(self.metrics.rows):
            if row["generation"] != generation:
                break
            found.append(row)
        return found[::-1]

    def rows_until(self, at: float) -> list[Row]:
        """The metrics of the generation that trained at a time, up to then, without its first."""
        rows = [row for row in self.metrics.rows if row["at"] < at]
        return [row for row in rows if row["generation"] == rows[-1]["generation"]][1:]

    def stop(self) -> int:
        """End the job at once; the daemon's exit status."""
        self.read()
        with contextlib.suppress(EverstepError):
            ask(self.job.run_dir, {"command": "stop", "now": True})
        return self.daemon.exit_status()


@contextlib.contextmanager
def folder_of(name: str, *, keep: bool) -> Iterator[Path]:
    """A temporary folder, told of if it is kept."""
    folder = Path(tempfile.mkdtemp(prefix=f"everstep-{name}-"))
    try:
        yield folder
    finally:
        if keep:
            note(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def supervised(folder: Path, **settings: Any) -> Iterator[Supervised]:
    """A running job; at the end it is stopped, must replay, and may leave nothing."""
    measure_this_tree()
    run = Supervised(folder, **settings)
    try:
        run.start()
        yield run
        run.stop()
        run.job.must_be_sound()
    finally:
        run.job.end()


def measure_this_tree() -> None:
    """Daemons and workers import what lies beside this file, whatever is installed."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
