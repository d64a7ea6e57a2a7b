"""What every benchmark does with its figures: it sums up, prints tables and writes JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "ray", "orbax-checkpoint", "redis")


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, median, 95th percentile, least and greatest; empty for no values."""
    if not values:
        return {}
    return {
        "count": len(values),
        "median": statistics.median(values),
        "p95": percentile(values, 95),
        "min": min(values),
        "max": max(values),
    }


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A command line with what all benchmarks take."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--keep", action="store_true", help="keep the temporary folder with journal and logs"
    )
    return parser


def circumstances() -> dict[str, Any]:
    """Where and on what the figures were taken; `load` before anything was started."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": [Path(sys.argv[0]).stem, *sys.argv[1:]],
        "commit": commit.stdout.strip() or None,
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the figures where the command line said."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=str) + "\n", encoding="utf-8")


def note(text: str) -> None:
    """Progress, for whoever waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """The first column is text, the others are figures."""
    if title:
        print(title)
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    width = None if sys.stdout.isatty() else 130
    Console(width=width).print(table)


def print_circumstances(facts: Mapping[str, Any]) -> None:
    """One line under the tables."""
    what = ", ".join(f"{name} {facts[name]}" for name in ("python", *PACKAGES))
    print(
        f"{facts['cpus']} cores of {facts['processor']}; {what}; commit {facts['commit']}; "
        f"load before the start {facts['load']:.2f}"
    )


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
