"""Where log lines go: facts as JSON lines, to stdout or, while a display owns it, to a file.

A log line may be lost when its sink is full or closed; it may never stop the daemon.
"""

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog

LOG_FILE = "supervisor.log"


class Sink:
    """A text stream that drops what cannot be written and says later how much that was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost_lines = 0

    def msg(self, line: str) -> None:
        """Write one line; a failure is counted and told with the next line that goes through."""
        try:
            if self.lost_lines:
                self._stream.write(f'{{"event": "log_lines_lost", "count": {self.lost_lines}}}\n')
            self._stream.write(line + "\n")
            self._stream.flush()
            self.lost_lines = 0
        except (OSError, ValueError):  # full, closed by its reader, or closed by us
            self.lost_lines += 1

    log = debug = info = warning = warn = error = critical = exception = fatal = msg


def configure(run_dir: Path | None = None) -> None:
    """Send all log lines to stdout, or with `run_dir` (`<run_dir>/<job>`) to its supervisor.log.

    Raises OSError when the file cannot be opened.
    """
    stream = sys.stdout
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        stream = (run_dir / LOG_FILE).open("a", encoding="utf-8")
    sink = Sink(stream)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: sink,
        cache_logger_on_first_use=False,
    )
    # Its every trigger is a debug line; the moves say the same better.
    logging.getLogger("transitions").setLevel(logging.WARNING)
