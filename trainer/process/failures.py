"""What an exception means to those who must act: the user, the operator, or a peer's doctor.

Tells a user's mistake from ours, and the victim of a lost peer from the culprit: by type, by the
place that raised it, and by the form of a native status, never by words that anybody may use. No
jax here.
"""

from __future__ import annotations

import dis
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.host.disk_errors import WRONG_PLACE, DataUnavailable
from trainer.host.environment import JoinFailed
from trainer.process.drills import DrillError
from trainer.settings import SettingsError
from trainer.task import TaskError

_TEXT_MAX = 6000
_FRAMES_MAX = 12
ERROR_BYTES_MAX = 64 << 20

_LOST_PEER = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|UNAVAILABLE|UNKNOWN): "
)
"""The status with which JAX's runtime ends what waited for a peer that is gone: a collective at
dispatch or with its result, a barrier or a key of the coordination service (jax 0.10.2). Others
say what is wrong in this process: INTERNAL a callback's error, RESOURCE_EXHAUSTED its memory."""

_TRAINER = Path(__file__).resolve().parents[1]
_OF_THE_TASK = tuple(
    str(_TRAINER / name)
    for name in ("language/task.py", "language/model.py", "language/optimizer.py", "data")
)
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
    if isinstance(error, TaskError) and not theirs and error.__cause__ is not None:
        caused = traceback.extract_tb(error.__cause__.__traceback__)
        theirs = [frame for frame in caused if _is_users(frame.filename, roots)]
    ours = [frame for frame in frames if _lies_in(frame.filename, (str(_TRAINER),))]
    if isinstance(error, SyntaxError) and error.filename:
        place = traceback.FrameSummary(error.filename, error.lineno or 0, "<module>")
        theirs = [*theirs, place] if _is_users(error.filename, roots) else theirs
    shown = theirs or ours or list(frames)
    innermost = shown[-1] if shown else None
    final = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_list(shown[-_FRAMES_MAX:])) + final
    frame = f"{innermost.filename}:{innermost.lineno} in {innermost.name}" if innermost else ""
    if isinstance(error, TaskError) and error.frame:
        frame = error.frame
    return ErrorReport(
        type=type(error).__name__,
        message=_cut(str(error), _TEXT_MAX // 2),
        frame=frame,
        traceback=_cut(text, _TEXT_MAX),
        user=_is_users_fault(error, bool(theirs)),
    )


def whole_text(error: BaseException) -> str:
    """What a report had to leave out of an exception; empty if it left out nothing."""
    if len(str(error)) <= _TEXT_MAX // 2:
        return ""
    return "".join(traceback.format_exception(error))


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process did: a victim, no culprit.

    So is whatever was raised because of such an error, or while it was handled.
    """
    return any(_is_of_a_lost_peer(one) for one in _with_causes(error))


def could_not_start(error: BaseException) -> bool:
    """Whether the ranks could not be joined: nobody's fault, another port may do."""
    return isinstance(error, JoinFailed)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: BaseException | None = error
    while left is not None and id(left) not in seen:
        seen.add(id(left))
        yield left
        left = left.__cause__ or (None if left.__suppress_context__ else left.__context__)


def _is_of_a_lost_peer(error: BaseException) -> bool:
    """Raised by JAX's runtime (as one of two types), with the status of something that waited."""
    is_jaxs = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if not (is_jaxs or type(error) is ValueError) or not _is_native(error):
        return False
    return _LOST_PEER.match(str(error)) is not None


def _is_native(error: BaseException) -> bool:
    """Whether compiled code raised it, or Python code of JAX: no `raise` of anybody else's."""
    place = error.__traceback__
    if place is None:
        return False
    while place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code
    if str(place.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("jax", "jaxlib"):
        return True
    return dis.opname[code.co_code[place.tb_lasti]] != "RAISE_VARARGS"


def _is_users_fault(error: BaseException, in_their_code: bool) -> bool:
    if isinstance(error, SettingsError | TaskError):
        return True
    if isinstance(error, DrillError | MemoryError | DataUnavailable) or lost_a_peer(error):
        return False
    if isinstance(error, OSError):
        return in_their_code and error.errno in WRONG_PLACE
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
