"""`python -m trainer` trains without a supervisor, and goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.trainer.harness import TINY, write_text
from trainer.language.generate import generate
from trainer.language.pretrained.model import open_pretrained


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


def run(
    config: Path, *more: str, command: str = "", **options: str
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "trainer", *([command] if command else [])]
    line += ["--config", str(config), *more]
    line += [word for name, value in options.items() for word in (f"--{name}", value)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def digest(output: str) -> str:
    return output.split("params_digest ")[1].split(maxsplit=1)[0]


def test_training_alone_goes_on_from_its_checkpoint_to_the_same_end(tmp_path: Path) -> None:
    """The path for debugging a task must compute what the supervised one does."""
    config = settings_file(tmp_path)
    whole = run(config)
    assert whole.returncode == 0, whole.stderr
    alone = tmp_path / "out" / "solo" / "alone"
    kept = sorted(path.name for path in (alone / "checkpoints" / "generation-1").iterdir())
    assert kept == ["12", "8"]
    assert not [one for one in (tmp_path / "out").rglob("*") if one.stat().st_mode & 0o077]
    (alone / "checkpoints" / "generation-1" / "12").rename(tmp_path / "moved")
    resumed = run(config)
    assert "from step 8" in resumed.stdout
    assert digest(resumed.stdout) == digest(whole.stdout)
    rows = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    assert [(row["generation"], row["step"]) for row in rows[12:]] == [
        (2, step) for step in range(8, 12)
    ]
    assert [row["loss"] for row in rows[8:12]] == [row["loss"] for row in rows[12:]]
    export_and_listen(config, tmp_path / "taken")


LEAVES = """
import jax.numpy as jnp


def train(worker):
    w = worker.restore(jnp.zeros(2))
    for step in worker.steps():
        worker.report(loss=1.0)
        worker.checkpoint(w)
        if step >= 2:
            break
"""


def test_a_loop_that_left_early_has_nothing_left_to_do(tmp_path: Path) -> None:
    """Each start of it did one step more."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    config = tmp_path / "job.toml"
    config.write_text('[job]\nname = "solo"\n[trainer]\ntask = "leaves:train"\nsteps = 9\n')
    first = run(config)
    assert "complete at step 3" in first.stdout, first.stderr
    again = run(config)
    assert (again.returncode, digest(again.stdout)) == (0, digest(first.stdout))
    assert "complete at step 3" in again.stdout
    assert "nothing is left to do" in again.stdout
    longer = run(config, "--set", "trainer.steps=12")
    assert "complete at step 4" in longer.stdout


def export_and_listen(config: Path, folder: Path) -> None:
    """What a user does next: take the model away, and see that it is the one that was trained."""
    done = run(config, command="export", out=str(folder))
    assert done.returncode == 0, done.stderr
    assert "generation-2/12" in done.stdout
    found = open_pretrained(str(folder), "/")
    assert found.architecture.vocabulary == 256
    params = {name: value.whole() for name, value in found.values.items()}
    ids = list(b"the square")
    made = list(generate(found.architecture, params, ids, count=8))
    said = run(config, command="generate", prompt="the square", tokens="8")
    assert said.returncode == 0, said.stderr
    assert said.stdout.rstrip("\n") == bytes(ids + made).decode(errors="replace").rstrip("\n")


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


def test_data_that_are_prepared_ahead_are_their_owners(tmp_path: Path) -> None:
    """Files of prepared data could be read by every user of the machine."""
    pairs = [json.dumps({"prompt": f"{n} ", "completion": f"{n * n} " * 9}) for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    config = tmp_path / "job.toml"
    config.write_text(
        '[trainer.data]\npath = ["pairs.jsonl"]\ncache = "cache"\nbatch_size = 2\n'
        "sequence_length = 16\n"
    )
    line = [sys.executable, "-m", "trainer.data", "--config", str(config)]
    told = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    written = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if path.stat().st_mode & 0o077]
