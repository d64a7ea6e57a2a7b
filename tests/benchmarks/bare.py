"""One rank of plain JAX training: a loop around the trainer's own compiled programs, and no more.

The model, the optimizer, the text, the batches and the compilation are `trainer`'s, called
directly. No supervisor, Ray, Redis, heartbeat, snapshot, checkpoint or evaluation. Not for people:
the benchmarks start it, `Bare` starts all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from trainer.config import TrainerSettings
from trainer.host.environment import worker_environment
from trainer.host.processes import Identity, end, environment, look_at_all

MARK = "EVERSTEP_BARE_BENCHMARK"


class Bare:
    """All ranks of a bare job; rank 0 writes a line a step into `rows`."""

    def __init__(
        self, folder: Path, *, settings: dict[str, Any], steps: int, world_size: int = 2
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = folder / "rows.jsonl"
        self.mark = uuid.uuid4().hex
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [sys.executable, "-m", "tests.benchmarks.bare", coordinator, str(world_size)]
        self.processes = []
        for rank in range(world_size):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(rank), str(steps), str(self.rows), json.dumps(settings)],
                        env={**worker_environment(1, 0, os.environ), MARK: self.mark},
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # the scheduler groups by session, as in slots
                        stdout=log,
                        stderr=log,
                    )
                )

    def identities(self) -> list[Identity]:
        """Its living processes."""
        rows = look_at_all().values()
        return [
            row.identity
            for row in rows
            if row.is_alive and environment(row.identity.pid).get(MARK) == self.mark
        ]

    def wait(self, limit_s: float) -> None:
        """Until all steps are done; raises CalledProcessError if a rank failed."""
        for process in self.processes:
            if status := process.wait(limit_s):
                raise subprocess.CalledProcessError(status, process.args)

    def end(self) -> None:
        """Let nothing of it go on."""
        end(self.identities(), 10.0)
        for process in self.processes:
            process.wait()


def train(
    coordinator: str, world_size: int, rank: int, steps: int, rows: Path, settings: TrainerSettings
) -> None:
    """Join, compile, step."""
    from trainer.compute import step
    from trainer.host.environment import join_world
    from trainer.task import Context
    from trainer.training.find_task import load_task

    join_world(coordinator=coordinator, rank=rank, world_size=world_size, join_timeout_s=60)
    layout = step.make_layout(settings.mesh)
    task = load_task(
        Context(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            node_rank=0,
            generation=1,
            config_dir=str(rows.parent),
            settings=settings,
        )
    )
    programs = step.compile_programs(task, layout, settings.seed)
    state = step.initial_state(task, programs, settings.seed)
    with rows.open("a") if rank == 0 else open(os.devnull, "w") as file:  # noqa: PTH123
        for index in range(steps):
            started = time.monotonic()
            batch = step.place_rows(layout, task.batch(index))
            state, metrics = programs.train(state, batch)
            loss = float(metrics["loss"].addressable_data(0))
            seconds = time.monotonic() - started
            line = {"step": index, "loss": loss, "step_s": seconds, "at": time.time()}
            file.write(json.dumps(line) + "\n")
            file.flush()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bare", description=__doc__)
    parser.add_argument("coordinator")
    parser.add_argument("world_size", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("rows", type=Path)
    parser.add_argument("settings", help="trainer settings, JSON")
    options = parser.parse_args()
    settings = TrainerSettings.model_validate_json(options.settings)
    given = (options.coordinator, options.world_size, options.rank, options.steps, options.rows)
    train(*given, settings)
    os._exit(0)  # JAX's barriers at exit would wait for the others


if __name__ == "__main__":
    main()
