"""A copy of a process that computes something beside it, and is in nobody's way."""

from __future__ import annotations

import os
import threading
import time

from trainer.process.forked_copy import Aside


def test_a_copy_gives_its_text_and_is_reaped() -> None:
    """A zombie for each standby would add up."""
    copy = Aside(lambda: f"from {os.getpid()}")
    told = copy.answer(20.0)
    assert told is not None
    assert told.startswith("from ")
    assert told != f"from {os.getpid()}"
    assert not os.path.exists(f"/proc/{told.removeprefix('from ')}")  # noqa: PTH110


def hang() -> str:
    time.sleep(600)
    return "too late"


def test_a_copy_is_ended_at_once() -> None:
    """A recovery took twice as long while a thread of the standby was tracing."""
    copy = Aside(hang)
    answers: list[str | None] = []
    waiting = threading.Thread(target=lambda: answers.append(copy.answer(60.0)))
    waiting.start()
    copy.end()
    waiting.join(5.0)
    assert answers == [None]
    copy.end()  # it has ended: harmless


def test_a_copy_that_fails_or_hangs_gives_no_answer() -> None:
    """It is forked from a process with threads: what it waits for may never come."""
    assert Aside(lambda: str(1 / 0)).answer(20.0) is None
    assert Aside(hang).answer(0.2) is None
