"""How log lines look: facts as JSON lines, to stdout or, while a display owns it, to a file."""

import logging
from typing import TextIO

import structlog

LOG_FILE = "supervisor.log"


def configure(stream: TextIO) -> None:
    """Send all log lines to a stream."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    # Its every trigger is a debug line; the moves say the same better.
    logging.getLogger("transitions").setLevel(logging.WARNING)
