"""Packed records in a job that is struck, and a Ray Dataset whose reader is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Job

full = pytest.mark.full

PACKED: dict[str, Any] = {
    "trainer.task": "language_model",
    "trainer.steps": 150,
    "trainer.model.layers": 1,
    "trainer.model.width": 16,
    "trainer.model.heads": 2,
    "trainer.model.key_value_heads": 1,
    "trainer.model.hidden": 24,
    "trainer.data.path": ["pairs.jsonl"],
    "trainer.data.batch_size": 4,
    "trainer.data.sequence_length": 24,
}

DATASET = """
import time
import ray.data

def slow():
    return ray.data.range(1000, override_num_blocks=8).map(text)

def text(row):
    time.sleep(0.5)
    return {"text": str(row["id"])}

def raises():
    return ray.data.range(10).map(lambda row: {"text": 1 / (row["id"] - 5)})
"""


def write_pairs(folder: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(300)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(job: MakeJob) -> Job:
    one = job(**PACKED)
    write_pairs(one.folder)
    return one


@full
def test_a_kill_costs_no_bit_of_a_job_on_packed_records(job: MakeJob) -> None:
    """Data that repeats or is skipped after a recovery changes the result (ray#37633)."""
    calm = made(job)
    assert calm.start().exit_status() == 0
    struck = made(job)
    daemon = struck.start()
    daemon.until("first_step_taken")
    daemon.strike(1, signal.SIGKILL)
    assert daemon.exit_status() == 0
    assert struck.result()["recoveries"]
    assert struck.numbers() == calm.numbers()


@full
def test_a_malformed_record_ends_the_job_with_status_4_and_its_place(job: MakeJob) -> None:
    """No retry can change it."""
    bad = made(job)
    (bad.folder / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\nno json\n')
    assert bad.start().exit_status() == 4
    assert "pairs.jsonl:2: is not JSON" in bad.result()["reason"]
    assert len(bad.events("workers_started")) == 1


@full
def test_a_reader_that_is_killed_takes_its_ray_along(tmp_path: Path) -> None:
    """What a rank starts must end with it, and the next start begins anew.

    Ray's agents try for a minute to report the death of their raylet to a head that is dead too.
    """
    (tmp_path / "users_slow.py").write_text(DATASET)
    config = tmp_path / "job.toml"
    config.write_text('[trainer.data]\nformat = "ray"\npath = "users_slow:slow"\n')
    short = tempfile.mkdtemp(prefix="es-")  # Ray's sockets need a short path
    reader = subprocess.Popen(
        [sys.executable, "-m", "trainer.data", "--config", str(config)],
        start_new_session=True,
        env={**os.environ, "TMPDIR": short},
    )
    try:
        deadline = time.monotonic() + 60
        while not any("Agent" in name for name in _names_below(reader.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        below = psutil.Process(reader.pid).children(recursive=True)
    finally:
        reader.kill()
        reader.wait()
    _, alive = psutil.wait_procs(below, timeout=120)
    shutil.rmtree(short)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert not list((tmp_path / "runs/.data").glob("ray-*/parts.json"))


@full
def test_what_the_users_function_raises_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It runs in a task of Ray, on whatever node."""
    (tmp_path / "users_slow.py").write_text(DATASET)
    config = tmp_path / "job.toml"
    config.write_text('[trainer.data]\nformat = "ray"\npath = "users_slow:raises"\n')
    assert subprocess.call([sys.executable, "-m", "trainer.data", "--config", str(config)]) == 2
    said = capfd.readouterr().err
    assert 'path = "users_slow:raises": the Ray Dataset could not be executed' in said
    assert "ZeroDivisionError" in said


def _names_below(pid: int) -> list[str]:
    names = []
    for one in psutil.Process(pid).children(recursive=True):
        try:
            names.append(one.name())
        except psutil.Error:
            continue
    return names
