"""Output that a full or read-only disk cannot turn into an error of the training.

`LineFile` keeps what it could not write and writes it later; `Tolerant` drops it and counts.
Neither knows what the lines mean.
"""

from __future__ import annotations

import errno
import io
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERROR_SUFFIX = ".error"
"""Of the file beside a rank's log that holds the whole text of a very long exception."""

KEPT_MAX = 100_000
_AT_ONCE = 1000

OnChange = Callable[[str], None]
"""Told why nothing can be written, and "" when it can again."""


class LineFile:
    """Lines appended to a file of their owner's, each whole or not at all.

    While the disk refuses them, the last `kept_max` are kept in memory. A fragment that it took is
    closed by a newline, so that it is a line of its own, which readers pass over.
    """

    def __init__(self, path: Path, on_change: OnChange, *, kept_max: int = KEPT_MAX) -> None:
        self._path, self._on_change = path, on_change
        self._kept: deque[bytes] = deque(maxlen=kept_max)
        self._torn = False
        self._failing = False

    def append(self, line: str) -> None:
        """Write a line, and those before it that are still to be written. Never raises OSError."""
        self._kept.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Try once more to write what is still to be written. Never raises OSError."""
        try:
            while self._kept:
                self._write()
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._on_change(f"{self._path}: {error.strerror}")
            return
        if self._failing:
            self._failing = False
            self._on_change("")

    def _write(self) -> None:
        lines = [self._kept[index] for index in range(min(_AT_ONCE, len(self._kept)))]
        data = b"\n" * self._torn + b"".join(lines)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = written - self._torn
        for line in lines:
            if left < len(line):
                break
            left -= len(line)
            self._kept.popleft()
        self._torn = left > 0


class Tolerant(io.RawIOBase):
    """A file descriptor for `print` and logs: what cannot be written is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._failing = False
        self.on_change: OnChange = lambda why: None

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor, for those who write to it by themselves."""
        return self._descriptor

    def write(self, data: Any) -> int:
        """All of it, or nothing, or what fits; it is as good as written in any case."""
        size = memoryview(data).nbytes
        why = ""
        try:
            os.write(self._descriptor, data)
        except OSError as error:
            why = str(error.strerror)
        if bool(why) != self._failing:
            self._failing = bool(why)
            self.on_change(why)
        return size


def tolerant_text(descriptor: int) -> tuple[io.TextIOWrapper, Tolerant]:
    """A text stream on a descriptor that flushes each line and cannot fail, and its raw end."""
    raw = Tolerant(descriptor)
    text = io.TextIOWrapper(
        io.BufferedWriter(raw, buffer_size=1 << 16),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )
    return text, raw
