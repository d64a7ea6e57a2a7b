"""What the documents show of tasks and loops runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "docs" / "own-model.md"
BLOCK = re.compile(
    r"```python\n(# (my_\w+)\.py, and in job\.toml: \[trainer\] (task = [^\n]*)\n.*?)```", re.DOTALL
)
LINES_MAX = {"my_task": 25, "my_loop": 20}


def test_the_page_shows_a_task_and_a_loop() -> None:
    """The tests below would pass on none."""
    blocks = {name: code for code, name, _ in BLOCK.findall(PAGE.read_text())}
    assert blocks.keys() == LINES_MAX.keys()
    for name, code in blocks.items():
        assert len(code.splitlines()) <= LINES_MAX[name]


@pytest.mark.parametrize("block", BLOCK.findall(PAGE.read_text()), ids=lambda one: one[1])
def test_the_code_of_the_page_trains(tmp_path: Path, block: tuple[str, str, str]) -> None:
    """The first thing that a user copies must run, and learn."""
    code, name, setting = block
    (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "job.toml").write_text(f"[trainer]\n{setting}\nsteps = 100\n")
    line = [sys.executable, "-m", "trainer", "--config", str(tmp_path / "job.toml")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(one) for one in re.findall(r"^step \d+ loss (\S+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < 0.2 * losses[0]
