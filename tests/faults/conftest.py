"""One undisturbed run a session, jobs that clean up after themselves, and figures at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import STEPS, Figures, Job, Machine, Numbers, RayHead, Store
from trainer.host.processes import environment
from trainer.slot.child import RUN

MakeJob = Callable[..., Job]

_figures = Figures()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured."""
    if not _figures.rows:
        return
    terminalreporter.section("figures")
    for name, value, note in _figures.rows:
        terminalreporter.write_line(f"{name:<58} {value:8.3f}  {note}")


@pytest.fixture(scope="session")
def figures() -> Figures:
    return _figures


@pytest.fixture
def job(tmp_path: Path, figures: Figures) -> Iterator[MakeJob]:
    """Makes the test's job; at the end its journal must replay and nothing may be left."""
    made: list[Job] = []

    def make(**settings: Any) -> Job:
        made.append(Job(tmp_path / f"job-{len(made) + 1}", figures, **settings))
        return made[-1]

    yield make
    try:
        for one in made:
            one.must_be_sound()
    finally:
        for one in made:
            one.end()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A redis-server that others use too; at the end no key of ours may be in it."""
    store = Store(tmp_path)
    try:
        yield store
        assert store.client().keys("everstep:*") == []
    finally:
        store.kill()


@pytest.fixture
def ray_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """A Ray cluster that others use too; at the end nothing of ours may be in it."""
    head = RayHead(tmp_path)
    for name, text in head.variables.items():
        monkeypatch.setenv(name, text)
    try:
        yield head
        assert head.ours() == []
        children = [one.pid for one in head.processes() if RUN in environment(one.pid)]
        assert children == []
    finally:
        head.end()


@pytest.fixture
def other_machine(ray_head: RayHead) -> Iterator[Machine]:
    """A second host of that cluster, as far as processes go: a pid namespace of its own."""
    machine = Machine(ray_head)
    try:
        yield machine
    finally:
        machine.end()


@pytest.fixture
def redis_server(store: Store) -> str:
    """The URL of a redis-server that is not the job's own."""
    return store.url


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> Numbers:
    """What the job computes when nothing happens to it."""
    job = Job(tmp_path_factory.mktemp("undisturbed"), figures)
    try:
        daemon = job.start()
        first = daemon.until("first_step_taken")
        figures.add(
            "start of the daemon to the first step, tiny job (s)", first["at"] - daemon.started_at
        )
        assert daemon.exit_status() == 0
        job.must_be_sound()
        numbers = job.numbers()
        assert list(numbers.losses) == list(range(STEPS))
        assert len(numbers.held_out_losses) == STEPS // 10
        assert len(set(numbers.losses.values())) == STEPS  # every step does something
        assert job.result()["failures"] == 0
        return numbers
    finally:
        job.end()
