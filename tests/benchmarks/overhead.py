"""What supervision costs a step in steady state, against plain JAX in the same minute.

The bare loop (`tests.benchmarks.bare`) and a supervised job both live, and run by turns: while one
runs for a few seconds, every process of the other is stopped (SIGSTOP), its daemon, Ray, Redis and
standby included. A pair is a supervised turn and the mean of the bare turns on both sides of it, so
that what drifts meets both. No longer rest: JAX ends a world that stood still for its heartbeat
timeout. Counted is the time from the end of one step to the end of the next:
snapshots, metrics and whatever else the loop does lie in it. Evaluations and checkpoints are off.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.bare import Bare
from tests.benchmarks.foreign import Foreign
from tests.benchmarks.recovery import ALONE_CORES
from tests.benchmarks.report import (
    circumstances,
    note,
    parser_of,
    print_circumstances,
    print_table,
    summary,
    write_json,
)
from tests.benchmarks.supervised import (
    ENDLESS,
    START_LIMIT_S,
    Row,
    Supervised,
    Tail,
    folder_of,
    supervised,
)
from trainer.config import TrainerSettings
from trainer.host.processes import Identity, send

VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {"recovery.snapshot_every_steps": "auto"},
    "every": {"recovery.snapshot_every_steps": 1},
}
STEADY: dict[str, Any] = {"checkpoint.every_steps": 1_000_000, "trainer.evaluate_every_steps": 0}
ENOUGH = 10
"""Pairs in which others left the cores alone; with fewer, all pairs are counted."""
STEPS_MIN = 5
"""Fewer in a turn make no median."""
THAW_S = 0.4
"""After a turn begins, until its steps count: what was stopped catches up."""


class Turns:
    """Something that steps, and can be stopped and let go on as a whole."""

    def __init__(self, rows: Tail, identities: Callable[[], list[Identity]], first: int) -> None:
        self.rows, self._identities, self._first = rows, identities, first
        self._stopped: list[Identity] = []

    def stop(self) -> None:
        """Stop all its processes, the one that watches the others first."""
        found = self._identities()
        self._stopped = sorted(found, key=lambda one: one.pid != self._first)
        for one in self._stopped:
            send(one, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on, the one that watches the others last."""
        for one in reversed(self._stopped):
            send(one, signal.SIGCONT)
        self._stopped = []

    def turn(self, seconds: float) -> list[float]:
        """Run for so long; the periods of the steps (seconds)."""
        self.go_on()
        began = time.time() + THAW_S
        time.sleep(seconds + THAW_S)
        self.stop()
        ends = [row["at"] for row in self.rows.read() if row["at"] >= began]
        return [after - before for before, after in itertools.pairwise(ends)]


def measure(
    folder: Path, variant: str, *, pairs: int, turn_s: float, warm_s: float, patience_s: float
) -> Row:
    """Bare and supervised by turns; rows of pairs, and what the daemon's processes took."""
    settings = {**STEADY, **VARIANTS[variant]}
    with supervised(folder / variant, **settings) as run:
        run.until_stepping(steps=30, standby=True)
        time.sleep(warm_s)  # the interval of "auto" settles
        bare = _start_bare(folder / f"{variant}-bare")
        try:
            return _alternate(run, bare, variant, pairs, turn_s, patience_s)
        finally:
            bare.end()


def _start_bare(folder: Path) -> Bare:
    steps = ENDLESS["trainer.steps"]
    settings = TrainerSettings(steps=steps).model_dump(mode="json")
    bare = Bare(folder, settings=settings, steps=steps)
    deadline = time.monotonic() + START_LIMIT_S
    while len(Tail(bare.rows).read()) < 30:
        assert time.monotonic() < deadline, f"no steps; see {folder}"
        time.sleep(0.2)
    return bare


def _alternate(
    run: Supervised, bare: Bare, variant: str, pairs: int, turn_s: float, patience_s: float
) -> Row:
    watched = Turns(run.metrics, run.job.processes, run.daemon.pid)
    plain = Turns(Tail(bare.rows), bare.identities, bare.processes[0].pid)
    status = run.status()
    kinds = kinds_of(run, status)
    watched.stop()
    plain.stop()
    used: dict[str, float] = dict.fromkeys(kinds.values(), 0.0)
    found: list[dict[str, float]] = []
    ran_s, number = 0.0, 0

    def ours() -> list[Identity]:
        return run.job.processes() + bare.identities()

    try:
        deadline = time.monotonic() + patience_s
        before = plain.turn(turn_s)
        while sum(pair["foreign"] < ALONE_CORES for pair in found) < pairs:
            if len(found) >= pairs and time.monotonic() > deadline:
                break
            number += 1
            foreign = Foreign(ours)
            spent = _cpu_s(kinds)
            supervised_turn = watched.turn(turn_s)
            ran_s += turn_s + THAW_S
            for kind, seconds in _cpu_s(kinds).items():
                used[kind] += seconds - spent[kind]
            after_it = plain.turn(turn_s)
            assert all(one.poll() is None for one in bare.processes), f"a rank died: {bare.rows}"
            around, before = (before, after_it), after_it
            if min(map(len, (*around, supervised_turn))) < STEPS_MIN:
                note(f"{variant}: pair {number} left out: the machine is too busy")
                continue
            found.append({**_pair(around, supervised_turn), "foreign": foreign.cores()})
            note(
                f"{variant}: pair {number} for {pairs}: "
                + ", ".join(f"{k} {v:.4f}" for k, v in found[-1].items())
            )
    finally:
        watched.go_on()
        plain.go_on()
    time.sleep(1.0)
    after = run.status()
    assert after.get("generation") == status["generation"], f"not steady{run.job.story()}"
    run.read()
    standby = [m["event"] for m in run.moves() if m["event"]["event"] == "standby_ready"]
    alone = [pair for pair in found if pair["foreign"] < ALONE_CORES]
    return {
        "pairs": alone if len(alone) >= min(pairs, ENOUGH) else found,
        "pairs_tried": number,
        "processes": _processes(kinds, used, ran_s),
        "standby": standby[-1] if standby else None,
        "snapshot_interval": snapshot_interval(run, status["generation"]),
    }


def _pair(around: tuple[list[float], list[float]], watched: list[float]) -> dict[str, float]:
    bare_median = statistics.fmean(map(statistics.median, around))
    medians = bare_median, statistics.median(watched)
    means = statistics.fmean(map(statistics.fmean, around)), statistics.fmean(watched)
    return {
        "bare_median_s": medians[0],
        "median_s": medians[1],
        "ratio": medians[1] / medians[0],
        "bare_mean_s": means[0],
        "mean_s": means[1],
        "ratio_of_means": means[1] / means[0],
    }


def kinds_of(run: Supervised, status: Row) -> dict[int, str]:
    """What each process of a job is, by pid."""
    active = {worker["pid"] for worker in status["workers"]}
    standby = {worker["pid"] for worker in (status["standby"] or {}).get("workers", [])}
    kinds = {}
    for one in run.job.processes():
        words = psutil.Process(one.pid).cmdline()
        text = " ".join(words)
        if one.pid == run.daemon.pid:
            kinds[one.pid] = "daemon"
        elif one.pid in active:
            kinds[one.pid] = "workers that train"
        elif one.pid in standby:
            kinds[one.pid] = "standby"
        elif "redis-server" in text:
            kinds[one.pid] = "Redis"
        elif "ResilientWorker" in text:
            kinds[one.pid] = "slots"
        elif "trainer" in text:
            kinds[one.pid] = "other workers"
        else:
            kinds[one.pid] = "Ray's head"
    return kinds


def _cpu_s(kinds: dict[int, str]) -> dict[str, float]:
    used = dict.fromkeys(kinds.values(), 0.0)
    for pid, kind in kinds.items():
        if psutil.pid_exists(pid):
            times = psutil.Process(pid).cpu_times()
            used[kind] += times.user + times.system
    return used


def _processes(kinds: dict[int, str], used: dict[str, float], ran_s: float) -> list[Row]:
    rows = []
    for kind in dict.fromkeys(kinds.values()):
        pids = [pid for pid, one in kinds.items() if one == kind and psutil.pid_exists(pid)]
        memory = [psutil.Process(pid).memory_full_info() for pid in pids]
        rows.append(
            {
                "kind": kind,
                "processes": len(pids),
                "cpu_percent": 100 * used[kind] / ran_s,
                "rss_mb": sum(one.rss for one in memory) / 1e6,
                "pss_mb": sum(one.pss for one in memory) / 1e6,
            }
        )
    return sorted(rows, key=lambda row: -float(row["cpu_percent"]))


def snapshot_interval(run: Supervised, generation: int) -> str | None:
    """What rank 0 said last of the interval of its snapshots, and of their cost."""
    lines = run.job.log(generation, 0).splitlines()
    said = [line for line in lines if "snapshot interval" in line]
    return said[-1] if said else None


def print_variant(variant: str, figures: Row, turn_s: float) -> None:
    """Two tables: pairs, and processes."""
    others = statistics.median(pair["foreign"] for pair in figures["pairs"])
    names = ("bare_median_s", "median_s", "ratio", "bare_mean_s", "mean_s", "ratio_of_means")
    table = []
    for name in names:
        values = [pair[name] for pair in figures["pairs"]]
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
        cells = [statistics.median(values), quartiles[0], quartiles[2], min(values), max(values)]
        table.append([name, *(f"{cell:.4f}" for cell in cells)])
    title = (
        f"snapshots {variant}, standby idle: {len(figures['pairs'])} pairs of turns of "
        f"{turn_s:g} s ({figures['pairs_tried']} tried; others used {others:.2f} cores)"
    )
    print_table(title, ["", "median", "1st quartile", "3rd quartile", "min", "max"], table)
    rows = figures["processes"]
    cells_of = [
        [
            row["kind"],
            row["processes"],
            *(f"{row[name]:.1f}" for name in ("cpu_percent", "rss_mb", "pss_mb")),
        ]
        for row in rows
    ]
    print_table("", ["processes", "number", "% of a core", "RSS MB", "PSS MB"], cells_of)
    if standby := figures["standby"]:
        print(f"the standby said: start_s {standby['start_s']}, memory_mb {standby['memory_mb']}")
    print(f"snapshots: {figures['snapshot_interval']}")


def main() -> None:
    """Measure, print, write."""
    parser = parser_of("overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=20, metavar="N")
    parser.add_argument("--turn", type=float, default=3.0, metavar="S", help="at most 4")
    parser.add_argument("--warm", type=float, default=20.0, metavar="S")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="go on so long for N pairs in which others use no core",
    )
    parser.add_argument("--variants", default="auto,every")
    options = parser.parse_args()
    facts = circumstances()
    # JAX's own heartbeat gives a stopped rank up after ten seconds.
    assert 0 < options.turn <= 4, "--turn must be at most 4"
    figures = {}
    with folder_of("overhead", keep=options.keep) as folder:
        for variant in options.variants.split(","):
            figures[variant] = measure(
                folder,
                variant,
                pairs=options.pairs,
                turn_s=options.turn,
                warm_s=options.warm,
                patience_s=options.patience,
            )
    for variant, found in figures.items():
        print_variant(variant, found, options.turn)
    print_circumstances(facts)
    ratios = {
        name: {
            key: summary([pair[key] for pair in found["pairs"]])
            for key in ("ratio", "ratio_of_means")
        }
        for name, found in figures.items()
    }
    write_json(
        options.json, {"benchmark": "overhead", **facts, "summary": ratios, "figures": figures}
    )


if __name__ == "__main__":
    main()
