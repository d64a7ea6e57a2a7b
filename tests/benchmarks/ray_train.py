"""The same SIGKILL on Ray Train V2's JaxTrainer, with the same model on the same cores.

Needs the extra `benchmarks`. `total` runs from the strike to the end of the first new step;
`redone` counts finished steps that had to be done again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.benchmarks.report import (
    circumstances,
    note,
    parser_of,
    print_circumstances,
    print_table,
    summary,
    write_json,
)
from tests.benchmarks.supervised import Row, Tail, folder_of, measure_this_tree
from trainer.config import TrainerSettings
from trainer.host.processes import Identity, end, environment, look_at_all

MARK = "EVERSTEP_RAY_TRAIN_BENCHMARK"
LIMIT_S = 240.0
STEPS_BETWEEN = 60
"""Steps from a restart to the next strike, at least; up to 20 more by chance."""


class Peer:
    """A JaxTrainer's run as processes of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.rows = Tail(folder / "rows-0.jsonl")
        self.started_at = time.time()
        settings = TrainerSettings(steps=1_000_000).model_dump(mode="json")
        # Ray's sockets need a short path.
        self.ray = Path(tempfile.mkdtemp(prefix="ray-"))
        facts = {"folder": str(folder), "settings": settings, "ray": str(self.ray)}
        config = json.dumps(facts)
        self.log = folder / "driver.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.ray_train_job", config],
                env={**_without_ray(), MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def until_step(self, step: int) -> None:
        """Wait until rank 0 has finished this step of its current life."""
        deadline = time.monotonic() + LIMIT_S
        while not self.rows.rows or self.rows.rows[-1]["step"] < step:
            self.read(deadline, f"step {step}")

    def read(self, deadline: float, what: str) -> None:
        """Take in new rows, or wait a little; raises AssertionError with the log's tail."""
        if not self.rows.read():
            tail = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"ended before {what}\n{tail}"
            assert time.monotonic() < deadline, f"no {what} in time\n{tail}"
            time.sleep(0.05)

    def strike(self, rank: int) -> Row:
        """SIGKILL a rank and wait for the first new step."""
        before = self.rows.rows[-1]
        life = [row["step_s"] for row in self.rows.rows if row["pid"] == before["pid"]]
        pid = int((self.folder / "pids" / f"rank-{rank}").read_text())
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while self.rows.rows[-1]["pid"] == before["pid"]:
            self.read(deadline, "new step")
        old = [row for row in self.rows.rows if row["pid"] == before["pid"]]
        new = next(row for row in self.rows.rows if row["at"] > at and row["pid"] != before["pid"])
        typical_s = statistics.median(life[1:])
        return {
            "rank": rank,
            "at": at,
            "total": new["at"] - at,
            "S": typical_s,
            "excess": new["at"] - at - typical_s,
            "redone": old[-1]["step"] + 1 - new["step"],
        }

    def end(self) -> None:
        """Let nothing of it go on."""
        for _ in range(3):
            found: list[Identity] = [
                row.identity
                for row in look_at_all().values()
                if row.is_alive and environment(row.identity.pid).get(MARK) == self.mark
            ]
            end(found, 10.0)
        self.process.wait()
        shutil.rmtree(self.ray, ignore_errors=True)


def measure(folder: Path, *, kills: int, seed: int = 0) -> Row:
    """Strike the ranks in turn, the last one first; seconds to the first step, and the strikes."""
    measure_this_tree()
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    peer = Peer(folder)
    strikes = []
    try:
        peer.until_step(1)
        first_step_s = peer.rows.rows[0]["at"] - peer.started_at
        for number, rank in zip(range(kills), itertools.cycle((1, 0)), strict=False):
            start = peer.rows.rows[-1]["start"]
            peer.until_step(start + STEPS_BETWEEN + chance.randrange(20))
            strikes.append(peer.strike(rank))
            note(
                f"Ray Train, strike {number + 1} of {kills}: {strikes[-1]['total']:.1f} s, "
                f"{strikes[-1]['redone']} steps redone"
            )
    finally:
        peer.end()
    return {"first_step_s": first_step_s, "strikes": strikes}


def _without_ray() -> dict[str, str]:
    """A cluster of its own, without the token of another."""
    return {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}


def print_peer(found: Row) -> None:
    """One table."""
    rows = []
    for name in ("total", "S", "excess", "redone"):
        figures = summary([row[name] for row in found["strikes"]])
        rows.append([name, *(float(figures[key]) for key in ("median", "min", "max"))])
    title = f"Ray Train V2 JaxTrainer, {len(found['strikes'])} SIGKILLs (redone: steps)"
    print_table(title, ["seconds", "median", "min", "max"], rows)
    print(f"start to the first step: {found['first_step_s']:.1f} s")


def main() -> None:
    """Measure, print, write."""
    parser = parser_of("ray_train", __doc__)
    parser.add_argument("--kills", type=int, default=4, metavar="N")
    options = parser.parse_args()
    facts = circumstances()
    with folder_of("ray-train", keep=options.keep) as folder:
        found = measure(folder, kills=options.kills)
    print_peer(found)
    print_circumstances(facts)
    write_json(options.json, {"benchmark": "ray_train", **facts, **found})


if __name__ == "__main__":
    main()
