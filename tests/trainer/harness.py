"""Real training processes without Ray: the harness plays the slot and the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.host.environment import worker_environment
from trainer.slot.actor import COMMAND

Report = dict[str, Any]

TINY: dict[str, Any] = {
    "steps": 12,
    "seed": 7,
    "evaluate_every_steps": 6,
    "evaluate_batches": 2,
    "model": {"layers": 1, "width": 16, "heads": 2, "key_value_heads": 1, "hidden": 24},
    "data": {"path": ["text.txt"], "batch_size": 4, "sequence_length": 16},
    "optimizer": {"warmup_steps": 3},
}
OWN: dict[str, Any] = {name: TINY[name] for name in TINY if name not in ("model", "optimizer")}
"""For a task of one's own, which has no use for the sizes of the built-in one."""
EVERY_FOUR = {"every_steps": 4, "keep": 2}
PATIENCE_S = 90.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_text(folder: Path) -> None:
    """A text that a tiny model can learn something from."""
    lines = [f"the square of {n} is {n * n}, and its half is {n / 2}\n" for n in range(600)]
    (folder / "text.txt").write_text("".join(lines))


class Rank:
    """One training process, its orders and its reports."""

    def __init__(self, spec: dict[str, Any] | None, log: Path, python_path: str = "") -> None:
        """Without a spec: a spare, which gets one as its first order."""
        self.log = log
        self.reports: list[Report] = []
        self._arrived: queue.SimpleQueue[Report] = queue.SimpleQueue()
        reading, writing = os.pipe()
        ordered, ordering = os.pipe()
        env = worker_environment(1, 0, os.environ)
        with log.open("wb") as opened:
            self.process = subprocess.Popen(
                [
                    *(*COMMAND, "--reports", str(writing)),
                    *("--orders", str(ordered)),
                    *([] if spec else ["--spare"]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=subprocess.STDOUT,
                pass_fds=(writing, ordered),
                start_new_session=True,
                env={**env, **({"PYTHONPATH": python_path} if python_path else {})},
            )
        os.close(writing)
        os.close(ordered)
        self._orders = os.fdopen(ordering, "wb")
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()
        if spec is not None:
            self.order(spec)

    def order(self, order: dict[str, Any]) -> None:
        """Write one JSON line to the process."""
        with contextlib.suppress(BrokenPipeError):  # it is dead; its reports say why
            self._orders.write((json.dumps(order) + "\n").encode())
            self._orders.flush()

    def hang_up(self) -> None:
        """Close the pipe of orders, as a slot that dies does."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def until(self, *kinds: str, where: Callable[[Report], bool] = lambda _: True) -> Report:
        """The next report of one of these kinds; "exit" comes when the process is gone."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                report = self._arrived.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kinds} within {PATIENCE_S} s{self._story()}") from None
            if report["report"] in kinds and where(report):
                return report
            if report["report"] == "exit":
                raise AssertionError(f"no {kinds}, the process ended{self._story()}")

    def kinds(self) -> list[str]:
        """The reports so far, by kind."""
        return [report["report"] for report in self.reports]

    def of(self, kind: str) -> list[Report]:
        """The reports of one kind so far."""
        return [report for report in self.reports if report["report"] == kind]

    def signal(self, number: int) -> None:
        """Send a signal; fine if the process is gone."""
        self.process.send_signal(number)  # knows of the thread that may be reaping it just now

    def end(self) -> None:
        """Kill, reap, and read what was still in the pipe."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.hang_up()
        self._reader.join(10)

    def _read(self, reading: int) -> None:
        with os.fdopen(reading) as lines:
            for line in lines:
                report = json.loads(line)
                self.reports.append(report)
                self._arrived.put(report)
        self._arrived.put({"report": "exit", "status": self.process.wait()})

    def _story(self) -> str:
        return f"\nreports: {self.reports}\nlog: {self.log.read_text()[-3000:]}"


class World:
    """Launches generations into one job directory and ends whatever it launched."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir
        self.config_dir = job_dir.parent
        self._ranks: list[Rank] = []
        job_dir.mkdir(parents=True, exist_ok=True)

    def launch(
        self,
        *,
        generation: int = 1,
        world_size: int = 2,
        trainer: dict[str, Any] | None = None,
        restore_point: dict[str, Any] | None = None,
        only: tuple[int, ...] | None = None,
        port: int | None = None,
        faults: dict[int, list[dict[str, Any]]] | None = None,
        **more: Any,
    ) -> list[Rank]:
        """Start the ranks of a generation (or `only` some of them)."""
        port = free_port() if port is None else port
        started = []
        for rank in range(world_size) if only is None else only:
            spec = {
                **self.spec(rank, generation=generation, world_size=world_size, port=port),
                "trainer": TINY if trainer is None else trainer,
                "restore_point": restore_point,
                "faults": (faults or {}).get(rank, []),
                **more,
            }
            started.append(Rank(spec, self.job_dir / f"log-{generation}-{rank}"))
        self._ranks += started
        return started

    def spec(self, rank: int, *, generation: int, world_size: int, port: int) -> dict[str, Any]:
        """What a rank of a tiny job is told."""
        return {
            "job": "tiny",
            "run_dir": str(self.job_dir),
            "generation": generation,
            "epoch": 1,
            "role": "active",
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "node_rank": 0,
            "coordinator": f"127.0.0.1:{port}",
            "config_dir": str(self.config_dir),
            "trainer": TINY,
            "checkpoint": EVERY_FOUR,
            "restore_point": None,
            "heartbeat": None,
            "beat_file": str(self.job_dir / f"beat-{generation}-{rank}"),
            "drills": True,
            "faults": [],
        }

    def spares(self, count: int = 2) -> list[Rank]:
        """Start processes that are told later whose rank they are."""
        started = [Rank(None, self.job_dir / f"log-spare-{number}") for number in range(count)]
        self._ranks += started
        return started

    def launch_in(self, spares: list[Rank], log_files: list[Path]) -> None:
        """Make spares the ranks of generation 1."""
        port = free_port()
        for rank, (spare, log) in enumerate(zip(spares, log_files, strict=True)):
            spec = self.spec(rank, generation=1, world_size=len(spares), port=port)
            spare.order({**spec, "log_file": str(log)})

    def end(self) -> None:
        """Leave no process behind."""
        for rank in self._ranks:
            rank.end()

    def losses(self) -> dict[int, float]:
        """Loss by step from metrics.jsonl; the highest generation wins."""
        best: dict[int, tuple[int, float]] = {}
        for line in (self.job_dir / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            known = best.get(row["step"], (-1, 0.0))
            if row["generation"] >= known[0]:
                best[row["step"]] = (row["generation"], row["loss"])
        return {step: loss for step, (_, loss) in sorted(best.items())}
