"""Whose fault it is, and what to show of it."""

from __future__ import annotations

import asyncio
import inspect
import types
from pathlib import Path
from typing import Any

import pytest

import trainer
import trainer.data
from trainer.host import quirks
from trainer.host.environment import AddressTaken, JoinFailed
from trainer.language import model, optimizer
from trainer.language.task import LanguageModel
from trainer.process import failures
from trainer.process.drills import DrillError
from trainer.settings import SettingsError
from trainer.task import TaskError


class JaxRuntimeError(RuntimeError):
    """Stands for jax's own."""


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def raised_natively(error: Exception) -> BaseException:
    """As compiled code raises it: where Python code called it, without a `raise`."""
    loop = asyncio.new_event_loop()
    future: asyncio.Future[None] = asyncio.Future(loop=loop)
    future.set_exception(error)
    try:
        future.result()
    except BaseException as caught:
        return caught
    finally:
        loop.close()
    raise AssertionError("nothing was raised")


def raised_in(path: Path, code: str) -> BaseException:
    path.write_text(code)
    try:
        exec(compile(code, str(path), "exec"), {})  # noqa: S102 - a task in a file of its own
    except BaseException as caught:
        return caught
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1"),
        JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"),
        JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out"),
    ],
)
def test_a_collective_that_lost_its_peer_is_a_victim(error: Exception) -> None:
    """The same failure comes as two types and in many words."""
    caught = raised_natively(error)
    assert failures.lost_a_peer(caught)
    assert not failures.describe(caught).user


def test_an_error_that_a_lost_peer_led_to_is_a_victims_too() -> None:
    """A training loop that wraps what its step raised hid the cause, and was blamed."""
    cause = raised_natively(JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: closed by peer"))
    wrapped = RuntimeError("step 7 failed")
    wrapped.__cause__ = cause
    assert failures.lost_a_peer(wrapped)
    while_handled = KeyError("row")
    while_handled.__context__ = cause
    assert failures.lost_a_peer(while_handled)
    while_handled.__suppress_context__ = True  # raise … from None
    assert not failures.lost_a_peer(while_handled)


@pytest.mark.parametrize(
    "text",
    ["Timed out waiting for my data server", "UNKNOWN: Gloo all-reduce failed: closed by peer"],
)
def test_the_words_of_a_users_error_make_no_victim_of_it(tmp_path: Path, text: str) -> None:
    """A server of the user's own timed out, and the search for a culprit went on."""
    caught = raised_in(tmp_path / "mine.py", f"raise ValueError({text!r})")
    assert not failures.lost_a_peer(caught)
    assert failures.describe(caught).user


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes (3, 4) and (5,) cannot be multiplied"),
        JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        JaxRuntimeError("INTERNAL: CpuCallback error: Connection closed by peer"),
        KeyError("Connection closed by peer"),
        DrillError("this error was ordered by a drill"),
    ],
)
def test_an_error_outside_a_collective_is_a_culprit(error: Exception) -> None:
    """A culprit that is taken for a victim lets the search go on for ever."""
    assert not failures.lost_a_peer(raised_natively(error))


def test_only_what_fails_in_the_join_is_a_failed_start(tmp_path: Path) -> None:
    """An HTTP server of the user's on a taken port was no event at all while the job ran."""
    assert failures.could_not_start(AddressTaken("in use"))
    assert failures.could_not_start(JoinFailed("UNKNOWN: Failed to start RPC server"))
    code = "raise OSError(98, 'Address already in use')"
    assert not failures.could_not_start(raised_in(tmp_path / "mine.py", code))


def test_the_abort_of_a_process_without_its_coordinator_is_read_from_its_log() -> None:
    """Such a SIGABRT is no crash of its own (skypilot#10256)."""
    line = (
        "F1129 client.h:80] Terminating process because the JAX distributed service detected "
        "fatal errors. This most likely indicates that another task died"
    )
    assert quirks.aborted_for_a_peer(["something", line])
    assert not quirks.aborted_for_a_peer(["Fatal Python error: Aborted"])
    quoted = "my logger: the JAX distributed service detected fatal errors, said rank 0"
    assert not quirks.aborted_for_a_peer([quoted])


def test_only_the_users_frames_are_shown(tmp_path: Path) -> None:
    """The line that matters drowns in the frames of a library."""
    code = "import json\n\ndef parse():\n    return json.loads('{')\n\nparse()\n"
    report = failures.describe(raised_in(tmp_path / "mine.py", code))
    assert report.user
    assert report.frame == f"{tmp_path}/mine.py:4 in parse"
    assert "json/decoder.py" not in report.traceback
    assert report.traceback.splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_a_syntax_error_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    """Its own frames end where the import began."""
    report = failures.describe(raised_in(tmp_path / "mine.py", "x = 1\ny = = 2\n"))
    assert report.type == "SyntaxError"
    assert report.user
    assert "mine.py:2" in report.frame
    assert "y = = 2" in report.traceback


@pytest.mark.parametrize("error", [SettingsError("bad"), TaskError("bad")])
def test_settings_and_contracts_are_the_users_wherever_they_are_noticed(
    error: BaseException,
) -> None:
    """No retry mends a setting."""
    assert failures.describe(raised(error)).user


@pytest.mark.parametrize(
    ("code", "user"),
    [
        ("open('/nowhere/at/all')", True),
        ("raise OSError(5, 'Input/output error')", False),
        ("raise MemoryError", False),
        ("from trainer.data.store import DataDamaged as D; raise D('a bit')", False),
    ],
)
def test_a_failing_machine_is_not_the_users_fault(tmp_path: Path, code: str, user: bool) -> None:
    """An error of the disk may be gone at the next try; a missing file is not."""
    assert failures.describe(raised_in(tmp_path / "mine.py", code)).user is user


def test_the_code_of_an_installed_task_is_the_users_too() -> None:
    """A task may come from a package, whose folder lies among the libraries."""
    file = pytest.__file__
    assert file
    assert failures._is_users(file, failures._of_module("pytest"))
    assert not failures._is_users(file, ())


def test_a_report_stays_small() -> None:
    """It travels in one write through a pipe, into a journal and onto a screen."""
    report: dict[str, Any] = failures.describe(raised(ValueError("x" * 100_000))).to_dict()
    assert sum(len(str(value)) for value in report.values()) < 12_000
    assert "characters …" in report["message"]


def test_what_a_report_leaves_out_is_kept_elsewhere() -> None:
    """Of an exception with a text of 12 MB the middle was nowhere."""
    assert failures.whole_text(raised(ValueError("short"))) == ""
    long = "head " + "x" * 10_000 + " middle " + "y" * 10_000 + " tail"
    assert "middle" not in failures.describe(raised(ValueError(long))).message
    assert long in failures.whole_text(raised(ValueError(long)))


def raised_as_if_in(path: Path) -> BaseException:
    """An error with one frame, which lies in that file."""
    with pytest.raises(ValueError, match="x") as caught:
        types.FunctionType(compile("raise ValueError('x')", str(path), "exec"), {})()
    return caught.value.with_traceback(caught.tb.tb_next)


def test_of_all_our_modules_only_those_of_the_built_in_task_are_judged_as_a_users() -> None:
    """An error in our loop or in a save is ours, and a retry may mend it; one in what the built-in
    task computes or reads is its author's, as for any other task. Blame goes by folders."""
    package = Path(trainer.__file__).parent
    of_the_task = {
        Path(inspect.getfile(one)).resolve() for one in (LanguageModel, model, optimizer)
    } | {path.resolve() for path in Path(trainer.data.__file__).parent.rglob("*.py")}
    blamed = {
        path for path in package.rglob("*.py") if failures.describe(raised_as_if_in(path)).user
    }
    # Packages that only say what is in them raise nothing.
    assert {path for path in blamed ^ of_the_task if path.name != "__init__.py"} == set()
    assert len(of_the_task) > 10


def test_the_place_of_an_error_is_in_our_own_code_where_nothing_of_the_users_is() -> None:
    """Frames of libraries say little about what everstep was doing."""
    for path in Path(trainer.__file__).parent.rglob("*.py"):
        report = failures.describe(raised_as_if_in(path))
        assert report.frame.startswith(f"{path}:1 ")
