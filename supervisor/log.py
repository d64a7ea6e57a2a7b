"""How log lines look: for people, or as JSON for programs; nothing here decides what is logged.

A daemon that draws a panel logs to a file, always as JSON; elsewhere its lines go to stdout.
"""

import logging
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from supervisor.console.output import BackgroundStream, log_lines_lost
from trainer.host.printable import one_line, printable

LOG_FILE = "supervisor.log"
Format = Literal["plain", "json"]

_LONGEST = 400  # characters of one value on a plain line
_MULTILINE = ("traceback", "exception", "stack")


def configure(stream: TextIO, form: Format = "json") -> None:
    """Send all log lines to a stream, in one of two forms."""
    if form == "json" and isinstance(stream, BackgroundStream):
        stream.notice = log_lines_lost
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(_JSON if form == "json" else _PLAIN),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    # Its every trigger is a debug line; the moves say the same better.
    logging.getLogger("transitions").setLevel(logging.WARNING)


def _shorten(logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Leave out what has no value, and let no text fill the screen."""
    kept = {key: value for key, value in line.items() if value not in (None, "", [], (), {})}
    return {
        key: value if key in _MULTILINE else one_line(_joined(value), _LONGEST)
        for key, value in kept.items()
    }


def _joined(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return str(value)


def _to_printable(logger: Any, method: str, line: str) -> str:
    return printable(line)


_JSON: tuple[Any, ...] = (
    structlog.processors.dict_tracebacks,
    structlog.processors.JSONRenderer(default=str),
)
_PLAIN: tuple[Any, ...] = (
    structlog.processors.format_exc_info,
    _shorten,
    structlog.dev.ConsoleRenderer(
        colors=False,
        pad_event_to=24,
        sort_keys=False,
        exception_formatter=structlog.dev.plain_traceback,
    ),
    _to_printable,
)
