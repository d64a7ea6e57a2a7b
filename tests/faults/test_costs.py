"""What supervision costs a job that nothing happens to."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import run

full = pytest.mark.full

ROOT = Path(__file__).parents[2]


@full
def test_the_default_job_takes_its_first_step_within_half_a_minute(job: MakeJob) -> None:
    """A newcomer's first minute: Ray, Redis, two workers, a compiled step."""
    first = job()
    shutil.copy(ROOT / "job.toml", first.folder)
    first.run_dir = first.folder / "runs" / "first"
    daemon = first.start()
    took_s = daemon.until("first_step_taken")["at"] - daemon.started_at
    first.figures.add("start of the daemon to the first step, default job (s)", took_s)
    assert took_s < 30.0
    assert run(first, "stop", "--now").returncode == 0
    assert daemon.exit_status() == 5


@full
def test_watching_a_running_job_costs_little(job: MakeJob) -> None:
    """The daemon shares its machine with those who train."""
    tiny = job(**{"trainer.options.pace_s": 0.5})
    daemon = tiny.start()
    daemon.until_step(2)
    process = psutil.Process(daemon.pid)
    before = process.cpu_times()
    began = time.monotonic()
    daemon.until_step(42)
    after = process.cpu_times()
    share = (after.user + after.system - before.user - before.system) / (time.monotonic() - began)
    memory_mb = process.memory_info().rss / 2**20
    tiny.figures.add("share of a core that the daemon takes", share)
    tiny.figures.add("memory of the daemon (MB)", memory_mb)
    daemon.signal(2)
    assert daemon.exit_status() == 75
    assert share < 0.05
    assert memory_mb < 200
