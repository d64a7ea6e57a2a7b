"""How much memory a device will need, before anything is started: `check --memory` asks for it.

Compiles the job's own step for as many devices as it will have, all of them pretended by one CPU
process, and reads what XLA says about it. An accelerator's compiler may choose other buffers.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from trainer.config import TrainerSettings
from trainer.host.environment import worker_environment
from trainer.host.printable import make_tolerant, printable
from trainer.settings import Section, SettingsError, read_settings

LIMIT_S = 900.0
"""For a compilation; a large model on a small machine takes its time."""


class _Settings(Section):
    """What is needed of a job's settings."""

    model_config = ConfigDict(extra="ignore")

    trainer: TrainerSettings = Field(default_factory=TrainerSettings)


def environment_for(devices: int) -> dict[str, str]:
    """The environment of a process that pretends to have so many devices."""
    env = worker_environment(1, 0, os.environ)
    env["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    return env


def predict(settings: TrainerSettings, config_dir: Path) -> dict[str, Any]:
    """Bytes a device: of the state, and at the peak of a step, on all devices that jax has here.

    Raises `SettingsError` or `TaskError` as a start would.
    """
    import jax

    from trainer.compute import step
    from trainer.state.snapshot_writer import BUFFERS_MIN
    from trainer.task import Context
    from trainer.training.find_task import load_task

    layout = step.make_layout(settings.mesh)
    task = load_task(Context.alone(settings, config_dir, feed=layout.feed))
    shapes = step.shapes_of(task, layout, settings.seed)
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for _, leaf in step.named_leaves(shapes.state)
    )
    found = step.compile_shapes(task, layout, shapes).train.memory_analysis()  # type: ignore[attr-defined]
    peak = found.argument_size_in_bytes + found.temp_size_in_bytes
    peak += found.output_size_in_bytes - found.alias_size_in_bytes
    mesh = {name: int(size) for name, size in layout.mesh.shape.items()}
    return {
        "devices": jax.device_count(),
        "mesh": mesh,
        "state": int(state),
        "peak": int(peak),
        "snapshots": BUFFERS_MIN * int(state),  # of one device, in the memory of its host
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prediction as JSON; the exit status."""
    make_tolerant()
    parser = argparse.ArgumentParser(prog="python -m trainer.predict_memory", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        settings, _ = read_settings(_Settings, options.config, options.set)
        config_dir = (options.config.parent if options.config else Path()).resolve()
        print(json.dumps(predict(settings.trainer, config_dir)))
    except SettingsError as error:
        print(printable("\n".join(error.problems)), file=sys.stderr)
        return error.exit_status
    except Exception as error:  # the task's own code may raise whatever it likes
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
