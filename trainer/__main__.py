"""Train alone, without Ray, Redis or a supervisor: `python -m trainer --config job.toml`.

The way to debug a task: one process, plain tracebacks, `breakpoint()` works. Nothing recovers it;
the same command goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from trainer.config import CheckpointSettings, TrainerSettings
from trainer.environment import worker_environment
from trainer.settings import Section, SettingsError, read_settings

EXAMPLE = """example:
  python -m trainer --config job.toml --set trainer.steps=20
"""


class _JobSettings(Section):
    """Where the files go; the rest of the table is the supervisor's."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(default="first", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    run_dir: str = Field(default="runs", min_length=1)


class _Settings(Section):
    """What training alone needs of a job's settings; other tables are the supervisor's."""

    model_config = ConfigDict(extra="ignore")

    job: _JobSettings = Field(default_factory=_JobSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the settings, train to the end; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget earlier runs and start from the seed"
    )
    options = parser.parse_args(arguments)
    try:
        settings, _ = read_settings(_Settings, options.config, options.set)
        return _train(settings, options.config, fresh=options.fresh)
    except SettingsError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 2


def _train(settings: _Settings, config: Path | None, *, fresh: bool) -> int:
    # The same threads and flags as a worker of one core per rank; before jax is imported.
    os.environ.update(worker_environment(os.cpu_count() or 1, 0, os.environ))
    from trainer import checkpoint
    from trainer.heartbeat import Beat
    from trainer.loop import ModelTrainer
    from trainer.task import Context

    config_dir = (config.parent if config else Path()).resolve()
    job_dir = config_dir / settings.job.run_dir / settings.job.name / "alone"
    if fresh and job_dir.exists():
        shutil.rmtree(job_dir)
    job_dir.mkdir(parents=True, exist_ok=True)
    newest = checkpoint.finished(job_dir)
    restored = newest[0] if newest else None
    keep = settings.checkpoint.keep

    def told(outcome: Any) -> None:
        if isinstance(outcome, checkpoint.SaveFailed):
            print(f"checkpoint {outcome.step} failed: {outcome.error}", file=sys.stderr)
            return
        for _, _, old in checkpoint.finished(job_dir)[keep:]:
            shutil.rmtree(old)

    trainer = ModelTrainer(
        context=Context(
            rank=0,
            world_size=1,
            local_rank=0,
            node_rank=0,
            generation=1 + max((generation for _, generation, _ in newest), default=0),
            config_dir=str(config_dir),
            settings=settings.trainer,
        ),
        checkpoints=settings.checkpoint,
        job_dir=job_dir,
        beat=Beat(job_dir / "beat"),
        restore_from=restored[2] if restored else None,
        on_outcome=told,
    )
    trainer.connect()
    ready = trainer.prepare()
    print(f"{settings.trainer.task} in {job_dir}, from step {ready.step}")
    for name, value in ready.facts.items():
        print(f"{name}: {value}")
    for line in ready.differences:
        print(f"not as when it was saved: {line}")
    for report in trainer.run():
        held_out = "" if report.held_out_loss is None else f" held out {report.held_out_loss:.4f}"
        if held_out or report.step % 10 == 0:
            rate = f"{report.tokens_per_s:,.0f} tokens/s"
            print(f"step {report.step} loss {report.loss:.4f}{held_out} {rate}", flush=True)
    finish = trainer.finish()
    print(f"complete at step {finish.step}: loss {finish.loss}, held out {finish.held_out_loss}")
    print(f"params_digest {finish.params_digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
