"""What an exception means to those who must act: the user, the operator, or a peer's doctor.

Tells a user's mistake from ours, and the victim of a lost peer from the culprit. No jax here.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.data.store import DataUnavailable
from trainer.drills import DrillError
from trainer.environment import AddressTaken
from trainer.settings import SettingsError
from trainer.task import TaskError

_TEXT_MAX = 6000
_FRAMES_MAX = 12
ERROR_BYTES_MAX = 64 << 20

# How a collective says that its peer is gone: by dispatch, by the result, by the service.
_LOST_PEER = (
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "coordination service",
    "Socket closed",
    "Barrier timed out",
    "DEADLINE_EXCEEDED",
)
_LOST_PEER_TYPES = frozenset({"ValueError", "JaxRuntimeError", "XlaRuntimeError", "RuntimeError"})
_ABORTED_FOR_A_PEER = "the JAX distributed service detected fatal errors"
_PORT_TAKEN = ("Failed to start RPC server", "Address already in use", "Failed to add port")

_TRAINER = Path(__file__).resolve().parent
_OF_THE_TASK = tuple(str(_TRAINER / name) for name in ("tasks", "model.py", "data", "optimizer.py"))
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An exception as text: `frame` is the innermost one of the user's code, else of ours.

    `user`: raised by the task's code or by the settings, before anything of ours failed.
    """

    type: str
    message: str
    frame: str
    traceback: str
    user: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def describe(error: BaseException, task: str = "") -> ErrorReport:
    """Shorten an exception to the frames of whoever can act.

    What lies neither in this package nor among the installed libraries is the user's code, and so
    is the module of `task` ("module:Class"), wherever it is installed.
    """
    roots = _of_module(task.partition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_users(frame.filename, roots)]
    ours = [frame for frame in frames if _lies_in(frame.filename, (str(_TRAINER),))]
    if isinstance(error, SyntaxError) and error.filename:
        place = traceback.FrameSummary(error.filename, error.lineno or 0, "<module>")
        theirs = [*theirs, place] if _is_users(error.filename, roots) else theirs
    shown = theirs or ours or list(frames)
    innermost = shown[-1] if shown else None
    final = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_list(shown[-_FRAMES_MAX:])) + final
    return ErrorReport(
        type=type(error).__name__,
        message=_cut(str(error), _TEXT_MAX // 2),
        frame=f"{innermost.filename}:{innermost.lineno} in {innermost.name}" if innermost else "",
        traceback=_cut(text, _TEXT_MAX),
        user=_is_users_fault(error, bool(theirs)),
    )


def whole_text(error: BaseException) -> str:
    """What a report had to leave out of an exception; empty if it left out nothing."""
    if len(str(error)) <= _TEXT_MAX // 2:
        return ""
    return "".join(traceback.format_exception(error))


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process did: a victim, no culprit."""
    if type(error).__name__ not in _LOST_PEER_TYPES:
        return False
    return any(sign in str(error) for sign in _LOST_PEER)


def aborted_for_a_peer(log_tail: Iterable[str]) -> bool:
    """Whether a SIGABRT came from JAX because another process is gone: the log's last lines tell.

    Without process 0 JAX ends every other process within 0.1 s, whatever it is doing.
    """
    return any(_ABORTED_FOR_A_PEER in line for line in log_tail)


def could_not_start(error: BaseException) -> bool:
    """Whether the coordinator's port was taken: nobody's fault, another port will do."""
    return isinstance(error, AddressTaken) or any(sign in str(error) for sign in _PORT_TAKEN)


def _is_users_fault(error: BaseException, in_their_code: bool) -> bool:
    if isinstance(error, SettingsError | TaskError):
        return True
    if isinstance(error, DrillError | MemoryError | DataUnavailable) or lost_a_peer(error):
        return False
    if isinstance(error, OSError):
        by_name = FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError
        return in_their_code and isinstance(error, by_name)
    return in_their_code


def _is_users(filename: str, roots: tuple[str, ...]) -> bool:
    if filename.startswith("<"):
        return False
    if _lies_in(filename, _OF_THE_TASK):
        return True
    if _lies_in(filename, (str(_TRAINER),)):
        return False
    return _lies_in(filename, roots) or not _lies_in(filename, _LIBRARIES)


def _of_module(name: str) -> tuple[str, ...]:
    """Where the code of a module's top package lies, if it is loaded."""
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    if file is None:
        return ()
    path = Path(file).resolve()
    return (str(path.parent if path.name == "__init__.py" else path),)


def _lies_in(filename: str, roots: tuple[str, ...]) -> bool:
    path = str(Path(filename).resolve())
    return any(path == root or path.startswith(f"{root}/") for root in roots if root)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[… {len(text) - length} characters …]\n{text[-half:]}"
