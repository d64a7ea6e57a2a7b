"""Prepare a job's data ahead of its start: `python -m trainer.data --config job.toml`.

Executes the Ray Dataset, tokenises, packs, and says what came of it. A start does the same where
it was not done, but then its workers wait.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ConfigDict, Field

from trainer.config import TASK_OF_THE_HOUSE, TrainerSettings
from trainer.data.source import open_source
from trainer.data.tokenizer import BytesTokenizer, Tokenizer
from trainer.host.disk_errors import DataUnavailable
from trainer.host.environment import PASSWORD_VARIABLE
from trainer.host.printable import make_tolerant, printable
from trainer.settings import Section, SettingsError, read_settings

EXAMPLE = """example:
  python -m trainer.data --config job.toml --ray-address 10.0.0.1:6379
"""


class _Settings(Section):
    """What the data need of a job's settings; other tables are the supervisor's."""

    model_config = ConfigDict(extra="ignore")

    trainer: TrainerSettings = Field(default_factory=TrainerSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare what the arguments name; the exit status."""
    os.umask(0o077)  # whatever a run leaves is its owner's
    make_tolerant()
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting"
    )
    parser.add_argument(
        "--ray-address",
        default="local",
        metavar="HOST:PORT",
        help="the cluster that a Ray Dataset is executed on; default: this machine",
    )
    options = parser.parse_args(arguments)
    os.environ.pop(PASSWORD_VARIABLE, None)  # a Ray Dataset is a function of the user's
    try:
        settings, _ = read_settings(_Settings, options.config, options.set)
        config_dir = (options.config.parent if options.config else Path()).resolve()
        source = open_source(
            settings.trainer.data,
            _tokenizer(settings.trainer, config_dir),
            config_dir,
            seed=settings.trainer.seed,
            held_out_batches=settings.trainer.evaluate_batches,
            ray_address=options.ray_address,
        )
    except SettingsError as error:
        for problem in error.problems:
            print(printable(problem), file=sys.stderr)
        return 2
    except DataUnavailable as error:
        print(printable(error), file=sys.stderr)
        return 1
    for name, value in source.facts().items():
        print(printable(f"{name}: {value}"))
    return 0


def _tokenizer(settings: TrainerSettings, config_dir: Path) -> Tokenizer:
    if settings.task != TASK_OF_THE_HOUSE:
        raise SettingsError(
            f"[trainer] task = {settings.task!r}: opens its data itself; only those of the task "
            f"{TASK_OF_THE_HOUSE!r} can be prepared"
        )
    if not settings.model.pretrained:
        return BytesTokenizer()
    from trainer.language.pretrained.model import open_pretrained

    return open_pretrained(settings.model.pretrained, config_dir).read_tokenizer()
