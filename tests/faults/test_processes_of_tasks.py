"""Tasks with processes of their own under the daemon, and a kill in between."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import SHARED_MEMORY, Job

LOADERS = """
import multiprocessing
from multiprocessing import shared_memory

import numpy as np

from paced import ROWS, WIDTH, Paced


def draw(task):
    seed, step, row = task
    return np.random.default_rng([seed, step, row]).normal(size=WIDTH).astype(np.float32)


class Pooled(Paced):
    \"\"\"Its rows come from a pool, by way of shared memory that it never gives back.\"\"\"

    method = "fork"

    def start(self):
        self.pool = multiprocessing.get_context(self.method).Pool(2)
        self.shared = shared_memory.SharedMemory(create=True, size=4 * WIDTH * ROWS)
        with multiprocessing.get_context(self.method).Pool(1) as pool:
            pool.map(draw, [(0, 0, 0)])

    def _rows(self, number):
        tasks = [(self.seed, number, row) for row in range(ROWS)]
        rows = np.ndarray((ROWS, WIDTH), np.float32, self.shared.buf)
        rows[:] = self.pool.map(draw, tasks)
        return rows[self.context.rows(ROWS)].copy()


class Spawned(Pooled):
    method = "spawn"


class Loaded(Paced):
    \"\"\"Its rows come from the worker processes of a grain loader.\"\"\"

    def start(self):
        self.rows, self.next = None, -1

    def _rows(self, number):
        if number >> 32:  # held out
            return super()._rows(number)
        if number != self.next:
            self.rows, self.next = self._loader(number), number
        self.next += 1
        return next(self.rows)[self.context.rows(ROWS)]

    def _loader(self, first):
        import grain
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain asks for it where absl does not run the program
        rows = grain.MapDataset.range(first * ROWS, self.context.settings.steps * ROWS)
        return iter(
            rows.map(lambda row: draw((0, 0, int(row))))
            .batch(ROWS)
            .to_iter_dataset()
            .mp_prefetch(grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=1))
        )


class Mapped(Paced):
    \"\"\"Its rows are made at the start by two processes of Hugging Face's `map`.\"\"\"

    def start(self):
        import datasets

        datasets.disable_progress_bars()
        table = datasets.Dataset.from_dict({"step": list(range(self.context.settings.steps))})
        made = table.map(rows_of_step, num_proc=2)
        self.rows = np.asarray(made["rows"], np.float32)

    def _rows(self, number):
        if number >> 32:
            return super()._rows(number)
        return self.rows[number][self.context.rows(ROWS)]


def rows_of_step(one):
    return {"rows": [draw((0, one["step"], row)) for row in range(ROWS)]}
"""


def made(job: MakeJob, kind: str, **settings: Any) -> Job:
    one = job(**{"trainer.task": f"loaders:{kind}", "trainer.steps": 30, **settings})
    (one.folder / "loaders.py").write_text(LOADERS)
    return one


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("psm_*")}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Pooled", "Spawned", "Loaded", "Mapped"])
def test_a_kill_of_a_rank_with_processes_of_its_own_costs_no_bit_and_leaves_nothing(
    job: MakeJob, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Data loaders hung in their first fork; killed at once with their rank, the helper of
    multiprocessing could not give their shared memory back."""
    if kind == "Mapped":
        pytest.importorskip("datasets", reason="of the extra [reference]")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    before = segments()
    calm = made(job, kind)
    assert calm.start().exit_status() == 0
    struck = made(job, kind)
    daemon = struck.start()
    daemon.until_step(12)
    daemon.strike(1, signal.SIGKILL)
    assert daemon.exit_status() == 0
    assert struck.result()["failures"] == 1
    struck.must_equal(calm.numbers())
    assert segments() == before


def test_files_with_the_names_of_others_modules_hide_nothing(job: MakeJob) -> None:
    """A `trainer.py` or `queue.py` beside the settings killed every worker before its first report,
    and the job went on trying."""
    tiny = job(**{"trainer.steps": 5})
    for name in ("trainer", "queue", "random", "json"):
        Path(tiny.folder / f"{name}.py").write_text("raise SystemExit('taken for another')\n")
    assert tiny.start().exit_status() == 0
    assert tiny.result()["failures"] == 0
