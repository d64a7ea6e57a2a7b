"""How long a job stands still when one of its processes fails, stage by stage.

Runs the default job under the real daemon and strikes ranks of it, one after another, each time
when the next rung of the ladder is ready. `total` runs from the strike to the end of the first new
step, `S` is the median step in the last seconds before it (with nothing else to do: the next
generation stands by already), `excess` is `total - S`. `redone` counts finished steps that had to
be done again; the step in flight is not among them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from supervisor.fsm.events import FAILURES
from tests.benchmarks.bare import Bare
from tests.benchmarks.foreign import Foreign
from tests.benchmarks.report import (
    circumstances,
    note,
    parser_of,
    print_circumstances,
    print_table,
    summary,
    write_json,
)
from tests.benchmarks.supervised import ENDLESS, Row, Supervised, Tail, folder_of, supervised
from trainer.config import TrainerSettings

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
DRILLS = ("raise", "segfault", "exit")
STAGES = (
    ("notice", ()),
    ("evidence", ("evidence_collected",)),
    ("proof", ("workers_gone", "exit_unproven")),
    ("backoff", ("deadline_passed",)),
    ("select", ("restore_point_selected",)),
    ("start", ("slots_placed", "workers_started")),
    ("load", ("workers_restored",)),
)
"""Each stage ends with the last of these events; the step ends the last one."""
STEADY_STEPS = 30
TYPICAL_S, TYPICAL_STEPS = 3.0, 8
"""How far before a strike, and how many steps at least, S is taken from."""
ALONE_S = 2.0
ALONE_CORES = 0.15
"""What others may use, on average over so many seconds, on a machine that counts as ours."""
RECOVERY_LIMIT_S = 120.0
_FAILURES = {kind.name for kind in FAILURES}


def measure(
    folder: Path,
    *,
    kills: int,
    fault: str,
    ranks: list[int],
    standby: str,
    snapshot_every: int | str,
    settle_s: float,
    seed: int,
    patience_s: float = 0.0,
    verify: bool = False,
) -> list[Row]:
    """Strike `kills` times, the ranks in turn; a row a strike.

    With `verify` the loss of every step must be that of an undisturbed run, to the last bit.
    """
    chance = random.Random(seed)
    settings = {
        "recovery.standby": standby,
        "recovery.snapshot_every_steps": snapshot_every,
    }
    rows = []
    with supervised(folder, **settings) as run:
        for number, rank in zip(range(kills), itertools.cycle(ranks), strict=False):
            run.until_stepping(steps=STEADY_STEPS, standby=standby == "generation")
            # At no fixed distance from a step, a checkpoint or an evaluation.
            time.sleep(settle_s + chance.uniform(0.0, 1.0))
            foreign = _until_alone(run, patience_s)
            time.sleep(chance.uniform(0.0, 0.5))
            rows.append({**_strike(run, fault, rank), "foreign": foreign})
            note(
                f"strike {number + 1} of {kills}, rank {rank}: "
                + ", ".join(
                    f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in rows[-1].items()
                    if key not in ("rank", "fault", "at")
                )
            )
    if verify:
        _verify(folder / "undisturbed", run.metrics.rows)
    return rows


def _until_alone(run: Supervised, patience_s: float) -> float:
    """Wait a while for others to leave the cores alone; how many they used at last."""
    deadline = time.monotonic() + patience_s
    while True:
        foreign = Foreign(run.job.processes)
        time.sleep(ALONE_S)
        cores = foreign.cores()
        if cores < ALONE_CORES or time.monotonic() >= deadline:
            return cores


def _verify(folder: Path, rows: list[Row]) -> None:
    steps = rows[-1]["step"] + 1
    note(f"{steps} steps without supervisor, to compare")
    settings = TrainerSettings(steps=ENDLESS["trainer.steps"]).model_dump(mode="json")
    bare = Bare(folder, settings=settings, steps=steps)
    try:
        bare.wait(3600)
    finally:
        bare.end()
    undisturbed = {row["step"]: row["loss"] for row in Tail(bare.rows).read()}
    wrong = [row for row in rows if row["loss"] != undisturbed[row["step"]]]
    assert not wrong, f"{len(wrong)} losses differ, the first: {wrong[0]}"
    generations = rows[-1]["generation"]
    print(
        f"the losses of all {len(rows)} steps of {generations} generations are bit for bit those "
        f"of an undisturbed run of {steps} steps"
    )


def _strike(run: Supervised, fault: str, rank: int) -> Row:
    status = run.until_stepping(steps=STEADY_STEPS, standby=False)
    generation = status["generation"]
    run.read()
    before = len(run.journal.rows)
    if fault in SIGNALS:
        pid = next(one["pid"] for one in status["workers"] if one["rank"] == rank)
        at = time.time()
        os.kill(pid, SIGNALS[fault])
    else:
        at = time.time()
        run.daemon.order(rank, fault)

    def stepped() -> bool:
        run.read()
        return bool(run.metrics.rows) and run.metrics.rows[-1]["generation"] > generation

    run.until("new step", stepped, RECOVERY_LIMIT_S, 0.02)
    if fault not in SIGNALS:
        at = run.job.struck_at(generation, rank)
    time.sleep(0.1)  # the journal's line of the first step comes a little later
    run.read()
    records = run.journal.rows[before:]
    return {"rank": rank, "fault": fault, "at": at, **_split(run, records, generation, at)}


def _split(run: Supervised, records: list[Row], generation: int, at: float) -> Row:
    """Where the time went: seconds by stage, and what was lost."""
    first = next(row for row in run.metrics.rows if row["generation"] > generation)
    old = [row for row in run.metrics.rows if row["generation"] == generation]
    steps = [row["step_s"] for row in old]
    recent = [row["step_s"] for row in old if row["at"] > at - TYPICAL_S]
    typical_s = statistics.median(
        recent if len(recent) >= TYPICAL_STEPS else steps[-TYPICAL_STEPS:]
    )
    moves = [record for record in records if record["kind"] == "move"]
    moves = [move for move in moves if move["event"]["at"] <= first["at"]]
    split: Row = {}
    reached = at
    for stage, names in STAGES:
        ends = [m["event"]["at"] for m in moves if _ends(m, names)]
        end = (ends[0] if stage == "notice" else ends[-1]) if ends else reached
        split[stage] = max(0.0, end - reached)
        reached = max(reached, end)
    split["step"] = first["at"] - reached
    opened = [m for m in moves if m["target"] == "DRAINING" != m["source"]]
    events = [m["event"] for m in moves]
    effects = [effect["effect"] for m in moves for effect in m["effects"]]
    restored = [e for e in events if e["event"] == "restore_point_selected"]
    return {
        "event": opened[0]["event"]["event"] if opened else None,
        "incidents": len(opened),
        "rung": "standby" if "PromoteStandby" in effects else "slots",
        "restored": restored[-1]["kind"] if restored else None,
        "total": first["at"] - at,
        "S": typical_s,
        "excess": first["at"] - at - typical_s,
        "redone": old[-1]["step"] + 1 - first["step"],
        **split,
    }


def _ends(move: Row, names: tuple[str, ...]) -> bool:
    event = move["event"]
    if names:
        # Of the deadlines only the backoff is time in which nothing happens.
        return event["event"] in names and event.get("id", "backoff") == "backoff"
    return event["event"] in _FAILURES


def print_rows(title: str, rows: list[Row]) -> None:
    """A table of the stages, and one of the ranks."""
    stages = [name for name, _ in STAGES] + ["step", "total", "S", "excess"]
    used = [name for name in stages if any(row[name] for row in rows)]
    table = []
    for name in used:
        found = summary([row[name] for row in rows])
        table.append([name, found["median"], found["p95"], found["max"]])
    print_table(title, ["seconds", "median", "p95", "max"], table)
    table = []
    for rank in sorted({row["rank"] for row in rows}):
        mine = [row for row in rows if row["rank"] == rank]
        total, excess = (summary([row[name] for row in mine]) for name in ("total", "excess"))
        redone = [row["redone"] for row in mine]
        table.append(
            [
                f"rank {rank}",
                len(mine),
                *(one[name] for one in (total, excess) for name in ("median", "p95")),
                statistics.median(redone),
                max(redone),
            ]
        )
    columns = ["strikes", "total median", "p95", "excess median", "p95", "redone median", "max"]
    print_table("", ["", *columns], table)
    alone = [row for row in rows if row["foreign"] < ALONE_CORES]
    busy = statistics.median(row["foreign"] for row in rows)
    print(f"others used {busy:.2f} cores (median); alone in {len(alone)} of {len(rows)} strikes")
    if 0 < len(alone) < len(rows):
        total, excess = (summary([row[name] for row in alone]) for name in ("total", "excess"))
        print(
            f"of these: total median {total['median']:.3f} p95 {total['p95']:.3f}, "
            f"excess median {excess['median']:.3f} p95 {excess['p95']:.3f}"
        )
    for name in ("event", "rung", "restored", "incidents"):
        values = [row[name] for row in rows]
        counted = ", ".join(f"{value}: {values.count(value)}" for value in dict.fromkeys(values))
        print(f"{name}: {counted}")


def summarize(rows: list[Row]) -> dict[str, Any]:
    """The summaries of all figures, over all ranks."""
    numbers = ("total", "S", "excess", "redone", "step", *(name for name, _ in STAGES))
    return {name: summary([row[name] for row in rows]) for name in numbers}


def main() -> None:
    """Measure, print, write."""
    parser = parser_of("recovery", __doc__)
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--fault", choices=(*SIGNALS, *DRILLS), default="kill")
    parser.add_argument("--ranks", default="0,1", help="struck in turn; default 0,1")
    parser.add_argument("--standby", choices=("generation", "spares", "none"), default="generation")
    parser.add_argument("--snapshot-every", default="1", metavar="STEPS", help='a number or "auto"')
    parser.add_argument(
        "--settle", type=float, metavar="S", help="seconds between ready and strike"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_patience(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the loss of every step with an undisturbed run",
    )
    options = parser.parse_args()
    facts = circumstances()
    with folder_of("recovery", keep=options.keep) as folder:
        rows = measure(
            folder,
            kills=options.kills,
            fault=options.fault,
            ranks=[int(rank) for rank in options.ranks.split(",")],
            standby=options.standby,
            snapshot_every=every(options.snapshot_every),
            settle_s=default_settle_s(options),
            seed=options.seed,
            verify=options.verify,
            patience_s=options.patience,
        )
    title = (
        f"{options.kills} times {options.fault}, standby {options.standby}, "
        f"snapshots every {options.snapshot_every}"
    )
    print_rows(title, rows)
    print_circumstances(facts)
    write_json(
        options.json,
        {"benchmark": "recovery", **facts, "summary": summarize(rows), "strikes": rows},
    )


def add_patience(parser: argparse.ArgumentParser) -> None:
    """For a machine that one is not alone on."""
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="wait so long before each strike for a moment in which others use no core",
    )


def every(text: str) -> int | str:
    """Of `--snapshot-every`."""
    return text if text == "auto" else int(text)


def default_settle_s(options: argparse.Namespace) -> float:
    """A standby says when it is ready; spares do not, and need some seconds of both cores."""
    if options.settle is not None:
        return float(options.settle)
    return {"generation": 1.0, "spares": 12.0, "none": 4.0}[options.standby]


if __name__ == "__main__":
    main()
