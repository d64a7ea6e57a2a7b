"""`python -m trainer` trains without a supervisor, and goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.trainer.harness import TINY, write_text


def settings_file(folder: Path) -> Path:
    write_text(folder)
    lines = ['[job]\nname = "solo"\nrun_dir = "out"\n[cluster]\nworkers = 2\n[trainer]']
    lines += [f"{name} = {json.dumps(TINY[name])}" for name in TINY if name not in TABLES]
    for table in TABLES:
        lines.append(f"[trainer.{table}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in TINY[table].items()]
    path = folder / "job.toml"
    path.write_text("\n".join([*lines, "[checkpoint]\nevery_steps = 4\nkeep = 2"]))
    return path


TABLES = ("model", "data", "optimizer")


def run(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", "--config", str(config), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def digest(output: str) -> str:
    return output.split("params_digest ")[1].split()[0]


def test_training_alone_goes_on_from_its_checkpoint_to_the_same_end(tmp_path: Path) -> None:
    """The path for debugging a task must compute what the supervised one does."""
    config = settings_file(tmp_path)
    whole = run(config)
    assert whole.returncode == 0, whole.stderr
    alone = tmp_path / "out" / "solo" / "alone"
    kept = sorted(path.name for path in (alone / "checkpoints" / "generation-1").iterdir())
    assert kept == ["12", "8"]
    (alone / "checkpoints" / "generation-1" / "12").rename(tmp_path / "moved")
    resumed = run(config)
    assert "from step 8" in resumed.stdout
    assert digest(resumed.stdout) == digest(whole.stdout)
    rows = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    assert [(row["generation"], row["step"]) for row in rows[12:]] == [
        (2, step) for step in range(8, 12)
    ]
    assert [row["loss"] for row in rows[8:12]] == [row["loss"] for row in rows[12:]]


def test_a_mistake_in_the_settings_ends_with_status_2_and_its_remedy(tmp_path: Path) -> None:
    """The same words as from the supervisor."""
    config = settings_file(tmp_path)
    done = run(config, "--set", "trainer.step=5")
    assert done.returncode == 2
    assert "steps" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(config, "--set", 'trainer.data.path=["gone.txt"]')
    assert done.returncode == 2
    assert "gone.txt does not exist" in done.stderr
