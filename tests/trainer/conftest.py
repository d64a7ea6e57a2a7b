"""Worlds of real processes, and the undisturbed run that others are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainer.harness import Report, World, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What a run gave that nothing disturbed."""

    losses: dict[int, float]
    completed: tuple[Report, ...]
    job_dir: Path
    kinds: tuple[list[str], ...]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    write_text(tmp_path)
    world = World(tmp_path / "tiny")
    yield world
    world.end()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder)
    world = World(folder / "tiny")
    try:
        ranks = world.launch()
        completed = tuple(rank.until("completed") for rank in ranks)
        yield Undisturbed(
            losses=world.losses(),
            completed=completed,
            job_dir=world.job_dir,
            kinds=tuple(rank.kinds() for rank in ranks),
        )
    finally:
        world.end()
