"""metrics.jsonl grows for months; what a run needs of it stays small."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from supervisor.record.metrics import METRICS_FILE, StepSums, last_row

Row = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / METRICS_FILE


def add(path: Path, *rows: Row) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def row(generation: int, step: int, step_s: float = 1.0) -> Row:
    return {"generation": generation, "step": step, "step_s": step_s, "at": 1.0, "loss": 2.0}


def test_the_end_of_a_long_run_reads_no_row_twice(tmp_path: Path, path: Path) -> None:
    """A million steps took 11.7 s of a blocked loop and 2.3 GB; ten million killed the daemon."""
    line = json.dumps(row(1, 7)) + "\n"
    path.write_text(line * 100_000)
    tracemalloc.start()
    sums = StepSums(tmp_path)
    add(path, row(1, 100_000))
    sums.read()
    assert last_row(tmp_path) == row(1, 100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2
    assert sums.useful_s == 1.0
    assert sums.last == row(1, 100_000)


def test_the_higher_generation_wins_a_step(tmp_path: Path, path: Path) -> None:
    """What was done twice counts once; a torn line counts not at all."""
    sums = StepSums(tmp_path)
    add(path, row(1, 0, 1.0), row(1, 1, 9.0), row(1, 2, 9.0), row(2, 1, 2.0), row(1, 3, 9.0))
    with path.open("a") as file:
        file.write('{"generation": 3, "st')
    sums.read()
    assert sums.useful_s == 3.0
    assert sums.goodput(6.0) == 0.5
    assert sums.goodput(0.0) is None
    with path.open("a") as file:
        file.write('ep": 2, "step_s": 4.0}\nno row\n')
    sums.read()
    assert sums.useful_s == 7.0


def test_what_an_earlier_daemon_saw_is_not_counted(tmp_path: Path, path: Path) -> None:
    """Goodput is the share of this run's own time; its last row may still be an earlier one."""
    add(path, row(1, 5))
    sums = StepSums(tmp_path)
    sums.read()
    assert (sums.useful_s, sums.last) == (0.0, None)
    assert last_row(tmp_path) == row(1, 5)
    add(path, row(2, 3), row(2, 4))
    sums.read()
    assert sums.useful_s == 2.0
    add(path, row(3, 1))  # back to before all that this daemon saw
    sums.read()
    assert sums.useful_s == 1.0


def test_any_order_of_recoveries_adds_up(tmp_path: Path, path: Path) -> None:
    """The sum is that of a table by step, however often a run went back."""
    chance = random.Random(4)
    sums, table, step = StepSums(tmp_path), dict[int, float](), 0
    for generation in range(1, 60):
        step = chance.randrange(0, step + 1)
        table = {done: seconds for done, seconds in table.items() if done < step}
        for _ in range(chance.randrange(1, 30)):
            table[step] = float(chance.randrange(1, 9))
            add(path, row(generation, step, table[step]))
            step += 1
        if generation % 7 == 0:
            sums.read()
    sums.read()
    assert sums.useful_s == sum(table.values())


def test_a_run_without_rows_has_none(tmp_path: Path) -> None:
    """A job that failed before its first step."""
    sums = StepSums(tmp_path)
    sums.read()
    assert (sums.last, last_row(tmp_path)) == (None, None)


def test_steps_that_no_save_holds_are_counted(tmp_path: Path, path: Path) -> None:
    """A drain that is cut off loses steps, and the result did not say how many."""
    sums = StepSums(tmp_path)
    assert sums.beyond(0) == 0
    add(path, *(row(1, step) for step in range(50, 94)))
    sums.read()
    assert sums.beyond(50) == 44
    assert sums.beyond(94) == sums.beyond(100) == 0
