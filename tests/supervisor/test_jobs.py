"""The jobs in deploy/jobs can be started as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.config import Settings
from trainer.settings import read_settings

JOBS = sorted((Path(__file__).parents[2] / "deploy" / "jobs").glob("*.toml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_that_comes_with_the_source_has_valid_settings(path: Path) -> None:
    """An example that ends with status 2 is the first thing that a user sees."""
    settings, _ = read_settings(Settings, path)
    assert settings.job.name == path.stem
    root = path.parents[2]
    assert (path.parent / settings.job.run_dir).resolve() == root / "runs"
    assert (path.parent / settings.trainer.data.cache).resolve() == root / "runs" / ".data"


def test_there_are_jobs() -> None:
    """A test over an empty list passes."""
    assert "finetune-smollm2" in [path.stem for path in JOBS]
