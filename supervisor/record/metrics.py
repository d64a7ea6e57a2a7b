"""metrics.jsonl, which grows with the run: only what is new is read, and only sums are kept."""

import json
import os
import threading
from array import array
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TAIL_BYTES = 64 * 1024
_PIECE_BYTES = 1 << 20


class StepSums:
    """The steps done since this object was made: the newest row, and the seconds that count.

    Of a step done twice the later row counts. Holds four bytes per step. `read` may be called from
    any thread and raises no OSError: rows that cannot be read now are read the next time.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        self._offset = _size(self._path)
        self._rest = b""
        self._first = 0
        self._seconds = array("f")
        self._generation = 0
        self._reading = threading.Lock()
        self.useful_s = 0.0
        self.last: dict[str, Any] | None = None

    def read(self) -> None:
        """Take in what was written since the last call."""
        with self._reading:
            try:
                with self._path.open("rb") as file:
                    file.seek(self._offset)
                    while piece := file.read(_PIECE_BYTES):
                        self._offset += len(piece)
                        *lines, self._rest = (self._rest + piece).split(b"\n")
                        for line in lines:
                            self._take(line)
            except OSError:
                return

    def goodput(self, elapsed_s: float) -> float | None:
        """The share of the time spent on steps that count."""
        return round(min(1.0, self.useful_s / elapsed_s), 4) if elapsed_s > 0 else None

    def beyond(self, step: int) -> int:
        """How many steps were done and are not among the first `step` ones."""
        return max(0, self._first + len(self._seconds) - step) if self._seconds else 0

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step, generation = int(row["step"]), int(row["generation"])
            seconds = float(row.get("step_s") or 0.0)
        except (ValueError, KeyError, TypeError):
            return
        if generation < self._generation:
            return  # written late by a generation that no longer counts
        self._generation, self.last = generation, row
        if not self._seconds or step < self._first:
            self._first, self.useful_s = step, 0.0
            del self._seconds[:]
        kept = step - self._first
        self.useful_s -= sum(self._seconds[kept:])
        del self._seconds[kept:]
        self._seconds.extend([0.0] * (kept - len(self._seconds)))  # of rows that no disk took
        self._seconds.append(seconds)
        self.useful_s += seconds


def last_row(run_dir: Path) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl. Raises OSError, but not where there is no such file."""
    path = run_dir / METRICS_FILE
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            return row
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
