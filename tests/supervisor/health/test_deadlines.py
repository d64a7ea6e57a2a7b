"""Deadlines: fixed by settings, or learned."""

import math

import pytest

from supervisor.health.deadlines import DEFAULTS_S, FIRST_STEP_S, FLOORS_S
from tests.supervisor.virtual import deadlines


def test_a_number_in_the_settings_overrides_what_was_learned() -> None:
    """An operator who wrote `step_s = 7` must get seven seconds, not what a formula likes."""
    limits = deadlines(step_s=7.0)
    limits.learn(0, {"step": (30.0, 40.0)})
    assert limits.limit_s("step") == 7.0
    assert limits.limit_s("compile") == DEFAULTS_S["compile"]


@pytest.mark.parametrize(
    ("durations", "expected_s"),
    [
        ((0.001, 0.001), 1.0),  # the floor
        ((0.3, 0.4), 1.5),  # five medians
        ((0.3, 2.0), 4.0),  # twice the recent maximum
        ((0.2, 0.2), 1.1),  # three medians, and the number is sampled twice in between
    ],
)
def test_the_deadline_of_a_step_follows_its_median_and_its_recent_maximum(
    durations: tuple[float, float], expected_s: float
) -> None:
    """A fixed step deadline is either blind for small models or alarmed by large ones."""
    limits = deadlines()
    limits.learn(0, {"step": durations})
    limits.learn(1, {"step": (0.001, 0.001)})
    assert limits.limit_s("step") == pytest.approx(expected_s)


def test_a_first_step_has_more_time_than_any_step_after_it() -> None:
    """The first step after a compilation connects gloo and allocates; it has no median yet."""
    limits = deadlines()
    assert limits.limit_s("step") == FIRST_STEP_S
    limits.learn(0, {"step": (0.1, 0.1)})
    assert limits.limit_s("step", warm=False) == FIRST_STEP_S
    assert limits.limit_s("step") < 2.0


@pytest.mark.parametrize("phase", ["restore", "evaluate", "checkpoint"])
def test_other_phases_may_take_ten_times_the_longest_seen(phase: str) -> None:
    """A save that takes six times longer than usual is slow, not hung (NVRx on saves)."""
    limits = deadlines()
    assert limits.limit_s(phase, warm=False) == DEFAULTS_S[phase]
    limits.learn(0, {phase: (50.0, 50.0)})
    limits.learn(1, {phase: (0.1, 0.1)})
    assert limits.limit_s(phase) == 500.0


def test_a_process_that_does_something_for_the_first_time_gets_the_first_default() -> None:
    """A peer whose part of the save is short says nothing about rank 0, which commits it."""
    limits = deadlines()
    limits.learn(1, {"checkpoint": (0.1, 0.1)})
    assert limits.limit_s("checkpoint", warm=False) == DEFAULTS_S["checkpoint"]
    assert limits.limit_s("checkpoint", warm=True) == FLOORS_S["checkpoint"]


@pytest.mark.parametrize("phase", ["initialize", "compile"])
def test_a_warm_start_does_not_make_the_next_cold_one_a_hang(phase: str) -> None:
    """A generation that found its executable cached says nothing about one that must compile."""
    limits = deadlines()
    limits.learn(0, {phase: (0.2, 0.2)})
    assert limits.limit_s(phase) == DEFAULTS_S[phase]


def test_waiting_has_no_deadline_and_nonsense_teaches_nothing() -> None:
    """A rank that is done waits for as long as the others need."""
    limits = deadlines()
    limits.learn(0, {"evaluate": (math.nan, math.inf), "step": (math.inf, 1.0)})
    assert limits.limit_s("wait") == math.inf
    assert limits.limit_s("evaluate", warm=False) == DEFAULTS_S["evaluate"]
    assert limits.limit_s("step") == FIRST_STEP_S


def test_a_smaller_generation_forgets_the_ranks_it_no_longer_has() -> None:
    """One slow node that left must not slow down the detection of hangs for ever."""
    limits = deadlines()
    limits.learn(0, {"step": (0.3, 0.3)})
    limits.learn(3, {"step": (9.0, 9.0)})
    limits.forget_ranks_from(2)
    assert limits.limit_s("step") == pytest.approx(1.5)


def test_a_committed_save_is_learned_from() -> None:
    """A save of 45 s was taken for a hang after 30 s, although the one before had taken as long."""
    limits = deadlines()
    limits.learn(0, {"checkpoint": (0.1, 0.1)})
    assert limits.limit_s("checkpoint") == FLOORS_S["checkpoint"]
    limits.learn_save(45.0)
    assert limits.limit_s("checkpoint") == 450.0
