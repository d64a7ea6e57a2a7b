"""What a task may do with processes of its own, as data loaders and tokenizers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import harness
from tests.trainer.harness import OWN, World
from trainer.wire.heartbeat import read_beat_file

MINE = """
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import jax.numpy as jnp
import numpy as np

from trainer.task import Task


def double(number):
    return 2 * number


class Mine(Task):
    def init(self, key):
        return {"w": jnp.zeros(2)}

    def batch(self, step):
        return np.full((2, 2), step, np.float32)

    def train_step(self, state, batch):
        return {"w": state["w"] + batch[0]}, {"loss": jnp.sum(state["w"])}


class Parallel(Mine):
    def start(self):
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            process = context.Process(target=double, args=(1,))
            process.start()
            process.join()
            assert process.exitcode == 0, process.exitcode
            with context.Pool(2) as pool:
                assert pool.map(double, range(4)) == [0, 2, 4, 6]
            with ProcessPoolExecutor(2, mp_context=context) as pool:
                assert list(pool.map(double, range(4))) == [0, 2, 4, 6]
            process = context.Process(target=time.sleep, args=(1000,))
            process.start()
            process.terminate()
            process.join()
            assert process.exitcode == -15, process.exitcode
        program = subprocess.Popen(["sleep", "1000"])
        program.terminate()
        assert program.wait() == -15
        self.reader = subprocess.Popen(["cat"])  # of whatever standard input there is
        assert self.reader.wait() == 0


class Forking(Mine):
    def batch(self, step):
        if step == 3:
            for end in (lambda: sys.exit(5), lambda: 1 / 0, lambda: None):
                pid = os.fork()
                if pid == 0:
                    self.context.tick()
                    end()
                    return super().batch(step)
                print("a copy ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return super().batch(step)
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    harness.write_text(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    world = World(tmp_path / "job")
    yield world
    world.end()


def task(name: str, **trainer: Any) -> dict[str, Any]:
    return {**OWN, "task": f"mine:{name}", "evaluate_every_steps": 0, **trainer}


def test_a_task_may_fork_spawn_and_terminate_processes(world: World) -> None:
    """Pools hung for ever: a fork closes its standard input, whose lock the thread of orders held,
    and SIGTERM was inherited as ignored. `cat` ate the orders."""
    (rank,) = world.launch(world_size=1, trainer=task("Parallel", steps=10**6))
    rank.until("stepped")
    os.kill(rank.process.pid, signal.SIGTERM)  # the rank itself is ended by SIGKILL only
    os.kill(rank.process.pid, signal.SIGINT)
    rank.order({"order": "stop"})
    assert rank.until("saved")["step"] > 0


def test_a_forked_copy_neither_reports_nor_beats_nor_trains_for_its_rank(world: World) -> None:
    """`if os.fork() == 0: sys.exit(0)` was reported as an error of the rank, which was fine."""
    (rank,) = world.launch(world_size=1, trainer=task("Forking", steps=6))
    assert rank.until("completed", "raised")["report"] == "completed"
    log = rank.log.read_text()
    assert [line for line in log.splitlines() if "a copy ended with" in line] == [
        "a copy ended with 5",
        "a copy ended with 1",
        "a copy ended with 1",
    ]
    assert "ZeroDivisionError" in log
    assert "came back into its loop" in log
    assert list(world.losses()) == list(range(6))
    assert read_beat_file(world.job_dir / "beat-1-0").phase == "wait"
    assert rank.of("saved") == rank.of("raised") == []


SIGNALLED = """
import os, signal, sys
from trainer.process.rank import _stay_at_signals
_stay_at_signals()
for _ in range(300):
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""


def test_a_copy_that_is_told_to_end_at_once_ends() -> None:
    """A pool's process was terminated within a fork: the signal was lost, and its rank waited for
    it for ever."""
    subprocess.run([sys.executable, "-c", SIGNALLED], check=True, timeout=60)
