"""Draw one recovery as it happened: the default job, SIGKILL of rank 1, an SVG.

Every block and mark is a line of that run's metrics and journal; nothing is drawn by hand.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from tests.benchmarks.report import ROOT, note
from tests.benchmarks.supervised import Row, Supervised, folder_of, supervised

TARGET = ROOT / "deploy" / "docs" / "recovery.svg"
BEFORE_S, AFTER_S = 0.6, 0.9
WIDTH, LEFT, LANE, BLOCK = 860, 130, 34, 22
EVENTS = {
    "worker_crashed": "the slot reports the signal",
    "workers_gone": "every process of the generation is proven gone",
    "restore_point_selected": "the newest snapshot is chosen",
    "workers_restored": "the standby holds its state",
    "first_step_taken": "the first new step is done",
}
COLOURS = {"old": "#7a8ca3", "new": "#2f7d4f", "kill": "#b3261e", "text": "#4a4a4a"}
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    'font-family="sans-serif" font-size="12">'
)


def strike(folder: Path) -> tuple[float, list[Row], list[Row]]:
    """Kill rank 1 of the default job once; when, and the metrics and moves of that run."""
    settings = {"recovery.standby": "generation", "recovery.snapshot_every_steps": 1}
    with supervised(folder, **settings) as run:
        status = run.until_stepping(steps=20, standby=True)
        time.sleep(1.0)
        run.read()
        pid = next(one["pid"] for one in status["workers"] if one["rank"] == 1)
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        _until_two_steps(run, status["generation"])
        time.sleep(AFTER_S)
        run.read()
        return at, run.metrics.rows, run.moves()


def _until_two_steps(run: Supervised, generation: int) -> None:
    def stepped() -> bool:
        run.read()
        return int(run.metrics.rows[-1]["generation"]) > generation

    run.until("new step", stepped, 60.0, 0.02)


def draw(at: float, metrics: list[Row], moves: list[Row]) -> str:
    """The SVG of a strike `at` (seconds since the epoch)."""
    scale = (WIDTH - LEFT - 10) / (BEFORE_S + AFTER_S)

    def x(moment: float) -> float:
        return LEFT + (moment - at + BEFORE_S) * scale

    generation = min(row["generation"] for row in metrics)
    marks = list(_marks(at, moves))
    height = 3 * LANE + 24 + 18 * (len(marks) + 1)
    parts = [
        _HEAD.format(width=WIDTH, height=height),
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_lane(0, "training"),
        *_lane(1, "standby"),
    ]
    for row in metrics:
        began, ended = row["at"] - row["step_s"], row["at"]
        if ended < at - BEFORE_S or began > at + AFTER_S:
            continue
        old = row["generation"] == generation
        left, right = max(x(began), LEFT), min(x(ended), WIDTH - 10)
        parts.append(
            f'<rect x="{left:.1f}" y="{8 if old else 8 + LANE}" width="{right - left - 1:.1f}" '
            f'height="{BLOCK}" fill="{COLOURS["old" if old else "new"]}"/>'
            f'<text x="{left + 3:.1f}" y="{23 if old else 23 + LANE}" fill="#fff" font-size="10">'
            f"{row['step']}</text>"
        )
    bottom = 2 * LANE + 14
    for number, (moment, text, colour) in enumerate(marks):
        y = bottom + 18 * (number + 1)
        parts.append(
            f'<line x1="{x(moment):.1f}" y1="4" x2="{x(moment):.1f}" y2="{y - 4}" '
            f'stroke="{colour}" stroke-width="1"/>'
            f'<text x="{x(moment) + 4:.1f}" y="{y}" fill="{colour}">'
            f"{1000 * (moment - at):.0f} ms: {escape(text)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _marks(at: float, moves: list[Row]) -> Iterator[tuple[float, str, str]]:
    yield at, "SIGKILL of rank 1", COLOURS["kill"]
    for move in moves:
        event = move["event"]
        if event["at"] >= at and event["event"] in EVENTS:
            yield event["at"], EVENTS[event["event"]], COLOURS["text"]
            if event["event"] == "first_step_taken":
                return


def _lane(number: int, name: str) -> Iterator[str]:
    y = 8 + number * LANE
    yield f'<text x="8" y="{y + 15}" fill="{COLOURS["text"]}">{name}</text>'
    yield (
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{BLOCK}" fill="#f0f0f0"/>'
    )


def main() -> None:
    """Run, draw, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.picture", description=__doc__)
    parser.add_argument("--write", type=Path, default=TARGET, metavar="FILE")
    options = parser.parse_args()
    with folder_of("picture", keep=False) as folder:
        at, metrics, moves = strike(folder)
    options.write.parent.mkdir(parents=True, exist_ok=True)
    options.write.write_text(draw(at, metrics, moves), encoding="utf-8")
    note(f"written: {options.write}")


if __name__ == "__main__":
    main()
