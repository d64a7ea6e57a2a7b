"""When a checkpoint is due."""

from __future__ import annotations

import math

import pytest

from trainer.state.checkpoint_interval import EVERY_MAX_S, EVERY_MIN_S, Pace


def saves_of(pace: Pace, steps: int, step_s: float, cost_s: float) -> list[int]:
    found = []
    for done in range(1, steps + 1):
        if pace.due(done, step_s):
            pace.saved(done, cost_s)
            found.append(done)
    return found


def test_a_fixed_interval_counts_steps_from_the_seed() -> None:
    """After a resume the same steps are saved as in an undisturbed run."""
    pace = Pace(4, 1e9)
    pace.start(6)
    assert [done for done in range(7, 20) if pace.due(done, 1.0)] == [8, 12, 16]


@pytest.mark.parametrize(("cost_s", "failure_every_s"), [(1.0, 3600.0), (10.0, 86400.0)])
def test_auto_is_the_optimum_of_young_and_daly(cost_s: float, failure_every_s: float) -> None:
    """Too often wastes the time that too seldom loses."""
    pace = Pace("auto", failure_every_s)
    saves = saves_of(pace, 6000, 1.0, cost_s)
    wanted = math.sqrt(2 * cost_s * failure_every_s)
    assert EVERY_MIN_S < wanted < EVERY_MAX_S
    assert saves[-1] - saves[-2] == round(wanted)
    assert saves[0] == 30, "the first one comes early"


def test_auto_stays_within_its_bounds() -> None:
    """A save that costs nothing, or a cluster that never fails, is no reason for extremes."""
    assert saves_of(Pace("auto", 60.0), 200, 1.0, 1e-6)[1:3] == [60, 90]
    rare = saves_of(Pace("auto", 1e9), 8000, 1.0, 100.0)
    assert rare[2] - rare[1] == EVERY_MAX_S


def test_ranks_that_hold_parts_follow_what_they_agreed_on() -> None:
    """Parts of two steps are no checkpoint."""
    pace = Pace("auto", 3600.0)
    pace.follow(7)
    assert saves_of(pace, 30, 1.0, 1.0) == [7, 14, 21, 28]
