"""Train alone, without Ray, Redis or a supervisor: `python -m trainer --config job.toml`.

The way to debug a task: one process, plain tracebacks, `breakpoint()` works. Nothing recovers it;
the same command goes on from the newest checkpoint. `generate` and `export` as first word do
something with the model of the job instead; they have their own --help.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from trainer.config import CheckpointSettings, TrainerSettings
from trainer.host.atomic_write import write_whole
from trainer.host.environment import PASSWORD_VARIABLE, worker_environment
from trainer.host.printable import make_tolerant, printable
from trainer.settings import Section, SettingsError, read_settings

EXAMPLE = """example:
  python -m trainer --config job.toml --set trainer.steps=20
"""
EXAMPLE_GENERATE = """example:
  python -m trainer generate --config job.toml --prompt "def main("
"""
EXAMPLE_EXPORT = """example:
  python -m trainer export --config job.toml --out exported
  python -m trainer export --config job.toml --format npz --out state.npz
"""


COMPLETE = "complete.json"
"""In the directory of a job that trains alone: how it ended, once it did by itself."""


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
    """Read the settings and do what was asked for; the exit status."""
    make_tolerant()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["generate"]:
            return _generate(given[1:])
        if given[:1] == ["export"]:
            return _export(given[1:])
        return _train(given)
    except SettingsError as error:
        for problem in error.problems:
            print(printable(problem), file=sys.stderr)
        return 2


def _parser(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m trainer{command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting"
    )
    return parser


def _read(options: argparse.Namespace) -> tuple[_Settings, Path, Path]:
    """The settings, the folder that relative paths start at, and the job's own."""
    settings, _ = read_settings(_Settings, options.config, options.set)
    config_dir = (options.config.parent if options.config else Path()).resolve()
    # The same threads and flags as a worker of one core per rank; before jax is imported.
    variables = {**os.environ, **settings.trainer.env}
    os.environ.update(worker_environment(os.cpu_count() or 1, 0, variables))
    os.environ.pop(PASSWORD_VARIABLE, None)  # the user's task runs here
    return settings, config_dir, config_dir / settings.job.run_dir / settings.job.name


def _generate(arguments: Sequence[str]) -> int:
    parser = _parser(" generate", "Let the model of a job go on from a text.", EXAMPLE_GENERATE)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what it goes on from")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says to it")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="at most; default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 = the likeliest each time (default)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; default: 0")
    _add_untrained(parser)
    options = parser.parse_args(arguments)
    settings, config_dir, job_dir = _read(options)
    from trainer.language import model
    from trainer.language.generate import generate
    from trainer.language.trained import read_trained

    found = read_trained(settings.trainer, config_dir, job_dir, untrained=options.untrained)
    tokenizer = found.task.tokenizer
    prompt = tokenizer.encode(options.prompt)
    if options.chat:
        asked = tokenizer.conversation([{"role": "user", "content": options.prompt}], reply=True)
        ((prompt, _),) = tokenizer.encode_many([asked])
    print(printable(f"from the {found.source}"), file=sys.stderr, flush=True)
    ids: list[int] = []
    shown = "" if options.chat else options.prompt
    show = printable if sys.stdout.isatty() else str  # a file gets what the model said
    print(show(shown), end="", flush=True)
    written = ""
    for token in generate(
        found.task.architecture,
        found.params,
        prompt,
        count=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        ends=tokenizer.ends,
        compute=model.Compute(dtype=settings.trainer.model.compute_dtype),
    ):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may need more tokens than there are yet
            print(show(text[len(written) :]), end="", flush=True)
            written = text
    print(show(tokenizer.decode(ids)[len(written) :]))
    return 0


def _export(arguments: Sequence[str]) -> int:
    parser = _parser(
        " export",
        "Write the model of a job as others read it: config.json, model.safetensors and\n"
        "tokenizer.json, low-rank additions added. It can be named as `pretrained` again.\n"
        "With --format the whole state of a job of any task, as one file of arrays.",
        EXAMPLE_EXPORT,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="a new folder; --format: a new file"
    )
    parser.add_argument("--format", choices=["npz", "safetensors"], help="one file, any task")
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --format: of that step; default: the newest"
    )
    _add_untrained(parser)
    options = parser.parse_args(arguments)
    if options.format:
        return _export_state(options)
    if options.step is not None:
        parser.error("--step needs --format")
    settings, config_dir, job_dir = _read(options)
    from trainer.data.tokenizer import SubwordTokenizer, bytes_as_subwords
    from trainer.language.pretrained.export import export
    from trainer.language.trained import read_trained

    found = read_trained(settings.trainer, config_dir, job_dir, untrained=options.untrained)
    tokenizer = found.task.tokenizer
    if not isinstance(tokenizer, SubwordTokenizer):
        tokenizer = bytes_as_subwords()
    export(options.out, found.task.architecture, found.params, tokenizer)
    print(f"{options.out}: the model from the {found.source}")
    return 0


def _export_state(options: argparse.Namespace) -> int:
    """Whatever the task, and without it."""
    if options.untrained:
        raise SettingsError("--untrained: only what a job has saved can be written with --format")
    _, _, job_dir = _read(options)
    from trainer import saved
    from trainer.state import checkpoint

    try:
        path = saved.find(job_dir, options.step)
        leaves, meta = checkpoint.load_leaves(path)
        saved.write(options.out, options.format, leaves, {"step": str(meta["step"])})
    except (OSError, checkpoint.CheckpointRejected) as error:
        raise SettingsError(str(error)) from None
    print(printable(f"{options.out}: {len(leaves)} arrays from the checkpoint {path}"))
    return 0


def _add_untrained(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--untrained", action="store_true", help="as it was before the first step of the job"
    )


def _train(arguments: Sequence[str]) -> int:
    parser = _parser("", __doc__, EXAMPLE)
    parser.add_argument(
        "--fresh", action="store_true", help="forget earlier runs and start from the seed"
    )
    options = parser.parse_args(arguments)
    settings, config_dir, supervised = _read(options)
    from trainer.state import checkpoint
    from trainer.task import Context
    from trainer.training.free_loop import FreeLoop, trainer_for
    from trainer.training.guards import BatchSkipped
    from trainer.wire.heartbeat import Beat

    os.umask(0o077)  # whatever a run leaves is its owner's
    job_dir = supervised / "alone"
    if options.fresh and job_dir.exists():
        shutil.rmtree(job_dir)
    job_dir.mkdir(parents=True, exist_ok=True)
    newest = checkpoint.finished(job_dir)
    restored = newest[0] if newest else None
    if restored and (lines := _lines_if_complete(job_dir, restored[0], settings.trainer.steps)):
        print("\n".join([*lines, "nothing is left to do; --fresh begins anew"]))
        return 0
    keep = settings.checkpoint.keep

    def told(outcome: Any) -> None:
        if isinstance(outcome, checkpoint.SaveFailed):
            text = f"checkpoint {outcome.step} failed: {outcome.error}"
            print(printable(text), file=sys.stderr)
        elif isinstance(outcome, BatchSkipped):
            text = f"step {outcome.step} left out: {outcome.metric} was {outcome.value}"
            print(printable(text))
        elif isinstance(outcome, checkpoint.Committed):
            for _, _, old in checkpoint.finished(job_dir)[keep:]:
                shutil.rmtree(old)

    def tell_ready(ready: Any) -> None:
        print(f"{settings.trainer.task} in {job_dir}, from step {ready.step}")
        for name, value in ready.facts.items():
            print(printable(f"{name}: {value}"))
        for line in ready.differences:
            print(printable(f"not as when it was saved: {line}"))

    def tell_step(report: Any) -> bool:
        held_out = "" if report.held_out_loss is None else f" held out {report.held_out_loss:.4f}"
        if held_out or report.step % 10 == 0:
            rate = f" {report.tokens_per_s:,.0f} tokens/s" if report.tokens_per_s else ""
            print(f"step {report.step} loss {report.loss:.4f}{held_out}{rate}", flush=True)
        return False

    trainer = trainer_for(
        context=Context.alone(
            settings.trainer,
            config_dir,
            generation=1 + max((generation for _, generation, _ in newest), default=0),
        ),
        checkpoints=settings.checkpoint,
        job_dir=job_dir,
        beat=Beat(job_dir / "beat"),
        restore_from=restored[2] if restored else None,
        on_outcome=told,
    )
    if isinstance(trainer, FreeLoop):
        trainer.build()
        point = restored[2] if restored else None
        finish = trainer.follow(functools.partial(trainer.restore, point), tell_ready, tell_step)
        assert finish is not None, "nobody gives orders here"
    else:
        tell_ready(trainer.prepare())
        for report in trainer.run():
            tell_step(report)
        finish = trainer.finish()
    lines = [
        f"complete at step {finish.step}: loss {finish.loss}, held out {finish.held_out_loss}",
        f"params_digest {finish.params_digest}",
    ]
    done = {"step": finish.step, "steps": settings.trainer.steps, "lines": lines}
    write_whole(job_dir / COMPLETE, json.dumps(done))
    print("\n".join(lines))
    return 0


def _lines_if_complete(job_dir: Path, step: int, steps: int) -> list[str]:
    """What the last run said at its end, if it ended by itself at this checkpoint.

    A loop of the user's own may have left early; only more steps than it knew of begin it again.
    """
    try:
        done = json.loads((job_dir / COMPLETE).read_bytes())
    except (FileNotFoundError, ValueError):
        return []
    return list(done["lines"]) if (done["step"], done["steps"]) == (step, steps) else []


if __name__ == "__main__":
    sys.exit(main())
