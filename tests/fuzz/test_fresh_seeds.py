"""A few walks from seeds that nobody has tried yet; what they find is a fault, not bad luck."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz import core, sim


@pytest.mark.parametrize(
    ("module", "walk", "count"),
    [("tests.fuzz.core", core.walk, 200), ("tests.fuzz.sim", sim.walk, 25)],
    ids=["core", "sim"],
)
def test_no_fresh_seed_breaks_a_promise(
    module: str, walk: Callable[[int], str], count: int, first_seed: int
) -> None:
    """Every fault of the order in which things happen was found by a seed, none by reading."""
    for seed in range(first_seed, first_seed + count):
        try:
            walk(seed)
        except Exception as error:
            error.add_note(f"once more: python -m {module} {seed}")
            raise
