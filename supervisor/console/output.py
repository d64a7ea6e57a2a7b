"""What the daemon prints and logs, written by threads: a reader that stops reading stops no loop.

A stream holds a bounded amount of text for its thread to write. What does not fit, or cannot be
written, is dropped and counted. Nothing here raises for a slow, closed or full destination.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, cast

PENDING_BYTES_MAX = 1 << 20
DRAIN_S = 5.0
"""How long the end of a run waits for its reader; its exit status must not wait for ever."""

Notice = Callable[[int], str]
"""The line that reports how many writes were lost."""


def _lines_lost(count: int) -> str:
    return f"[{count} lines of output were lost: they could not be written in time]\n"


def log_lines_lost(count: int) -> str:
    """Report lost lines as a line of a log in JSON."""
    return f'{{"event": "log_lines_lost", "count": {count}}}\n'


class BackgroundStream(io.TextIOBase):
    """A text stream on a file descriptor that never blocks its writer and never fails.

    What is written up to a flush or the end of a line goes out whole or not at all. The stream
    owns `descriptor`. Text that `encoding` lacks is replaced.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        encoding: str = "utf-8",
        pending_max: int = PENDING_BYTES_MAX,
        notice: Notice = _lines_lost,
    ) -> None:
        self._descriptor, self._encoding = descriptor, encoding
        self._pending_max, self.notice = pending_max, notice
        self._partial: list[str] = []
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._lost = 0
        self._changed = threading.Condition()
        # A daemon thread: one that is stuck in a write does not keep the process.
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    # The part that a stream must have

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """How text becomes bytes."""
        return self._encoding

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor that the thread writes to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a person may be reading."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Take the text; whole lines are handed to the thread."""
        with self._changed:
            self._partial.append(text)
            if text.endswith("\n"):
                self._hand_over()
        return len(text)

    def flush(self) -> None:
        """Hand what was written to the thread; does not wait for it."""
        with self._changed:
            self._hand_over()

    # What is beyond that

    @property
    def is_behind(self) -> bool:
        """Whether the reader has not yet taken all; a picture of now can then be left out."""
        with self._changed:
            return self._pending_bytes > 0

    @property
    def lost(self) -> int:
        """Writes that were dropped since the last one that went through."""
        return self._lost

    def drain(self, limit_s: float = DRAIN_S) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        self.flush()
        give_up_at = time.monotonic() + limit_s
        with self._changed:
            return self._changed.wait_for(
                lambda: self._pending_bytes == 0, max(0.0, give_up_at - time.monotonic())
            )

    def _hand_over(self) -> None:
        data = "".join(self._partial).encode(self._encoding, "replace")
        self._partial.clear()
        if not data:
            return
        if self._pending_bytes + len(data) > self._pending_max:
            self._lost += 1
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending))
                data = self._pending.popleft()
                lost = self._lost
            try:
                if lost:
                    self._write(self.notice(lost).encode(self._encoding, "replace"))
                    with self._changed:
                        self._lost -= lost
                self._write(data)
            except OSError:  # full, closed by its reader, or a terminal that has gone
                with self._changed:
                    self._lost += 1
            with self._changed:
                self._pending_bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # whoever shares the terminal has made it non-blocking
                select.select([], [self._descriptor], [])


@contextlib.contextmanager
def appended(path: Path) -> Iterator[TextIO]:
    """A stream that appends lines to a log file of its owner's. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    stream = BackgroundStream(os.open(path, flags, 0o600), notice=log_lines_lost)
    try:
        yield cast(TextIO, stream)
    finally:
        stream.drain()


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Let threads write what this process prints; at the end wait a moment for its reader."""
    before = sys.stdout, sys.stderr
    streams = [_in_background(sys.stdout), _in_background(sys.stderr)]
    sys.stdout, sys.stderr = (
        stream or as_before for stream, as_before in zip(streams, before, strict=True)
    )
    try:
        yield
    finally:
        give_up_at = time.monotonic() + DRAIN_S
        for stream in streams:
            if stream is not None:
                stream.drain(give_up_at - time.monotonic())
        sys.stdout, sys.stderr = before


def _in_background(stream: object) -> BackgroundStream | None:
    """None for what is not a file, such as the stream of a test."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        stream.flush()
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):
        return None
    return BackgroundStream(descriptor, encoding=stream.encoding)


@contextlib.contextmanager
def errors_beside(path: Path) -> Iterator[None]:
    """Send what libraries write to a terminal's standard error to a file instead.

    Ray's C++ threads write there. In the midst of a picture that helps no reader, and a terminal
    that has stopped would stop them.
    """
    if not os.isatty(2):
        yield
        return
    before = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
