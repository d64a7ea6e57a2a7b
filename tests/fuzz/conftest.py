"""Fresh seeds for every test run, printed so that a failure can be repeated."""

from __future__ import annotations

import os
import random

import pytest

FIRST = int(os.environ.get("EVERSTEP_SEED") or random.SystemRandom().randrange(2**32))


@pytest.fixture
def first_seed() -> int:
    """The first seed of this run."""
    return FIRST


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the seeds, whatever the verdict."""
    terminalreporter.write_line(f"random walks: EVERSTEP_SEED={FIRST} repeats them")
