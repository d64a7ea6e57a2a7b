"""Workers without a daemon: when they are orphans, and how they save and end without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.slot import orphans
from trainer.slot.orphans import Crew, Report, Vigil, crew_of, gather, how_they_ended, save


class Watch:
    """A clock, a canary, and a vigil that is asked every second."""

    def __init__(self, after_s: float = 30.0) -> None:
        self.now = 0.0
        self.canary: Callable[[], str | None] = lambda: None
        self.vigil = Vigil(after_s, lambda: self.canary(), lambda: self.now)

    def over_within(self, seconds: float) -> float | None:
        """When the vigil is over, None if it is not."""
        for _ in range(round(seconds)):
            self.now += 1.0
            if self.vigil.is_over():
                return self.now
        return None


def test_orphans_are_those_that_hear_of_nobody_for_long_enough() -> None:
    """Workers of a daemon that nobody started again trained on for a month (skypilot#9672)."""
    watch = Watch()
    assert watch.over_within(25) is None
    watch.vigil.heard()
    over = watch.over_within(100)
    assert over is not None
    assert 55.0 <= over <= 55.0 + orphans.CANARY_S + 1.0


def test_a_canary_that_is_renewed_is_a_daemon_that_lives() -> None:
    """It cannot reach the slots, and it is there."""
    watch = Watch()
    watch.canary = lambda: str(watch.now)
    assert watch.over_within(500) is None
    watch.canary = lambda: "7"  # what the last one wrote, and it is not renewed
    assert watch.over_within(100) is not None


def test_a_slot_that_was_frozen_itself_has_missed_every_word() -> None:
    """A suspended host must not end its jobs when it wakes."""
    watch = Watch()
    assert watch.over_within(20) is None
    watch.now += 3600.0
    assert watch.over_within(29) is None
    assert watch.over_within(10) is not None


def test_never_is_never() -> None:
    """0 turns it off."""
    assert Watch(after_s=0.0).over_within(10_000) is None


class Rank:
    """A trainee that follows the protocol of `trainer.process`; a step takes a while."""

    def __init__(self, crew: Crew, *, finished: bool = False, dies: bool = False) -> None:
        self.crew, self.finished, self.dies = crew, finished, dies
        self.orders: list[Report] = []
        self.said: list[Report] = []
        self.alive = True
        if finished:
            self.said.append({"report": "completed", "step": 60, "params_digest": "d" * 64})

    def is_alive(self) -> bool:
        return self.alive

    def order(self, **order: Any) -> None:
        self.orders.append(order)
        match order["order"]:
            case "stop" if self.finished:
                self.said.append({"report": "saved", "step": 60})
            case "stop" if self.dies:
                self.alive = False
            case "stop":
                self.said.append({"report": "stopping", "after_step": 41})
            case "stop_after":
                self.said.append({"report": "acknowledged"})
            case "go":
                self.said.append({"report": "saved", "step": 42})

    def report(self, *kinds: str) -> Report | None:
        return next((one for one in reversed(self.said) if one["report"] in kinds), None)


hurried = pytest.mark.usefixtures("in_a_hurry")


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "TICK_S", 0.01)
    monkeypatch.setattr(orphans, "GATHER_S", 2.0)
    monkeypatch.setattr(orphans, "CANARY_S", 0.0)
    monkeypatch.setattr(orphans, "_POLL_S", 0.005)


def silent() -> Vigil:
    """Nobody was ever heard of."""
    vigil = Vigil(1e-9, lambda: None)
    time.sleep(0.01)
    return vigil


def crews(run_dir: Path, world_size: int = 3) -> list[Crew]:
    return [crew_of(run_dir, 4, rank, world_size) for rank in range(world_size)]


def all_at_once(acts: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@hurried
def test_all_ranks_stop_after_the_step_that_rank_0_names(tmp_path: Path) -> None:
    """Like `stop`, with files in place of a daemon; no rank runs past the step that is saved."""
    ranks = [Rank(crew) for crew in crews(tmp_path)]
    last: dict[int, Report | None] = {}

    def live(rank: Rank) -> None:
        assert gather(rank.crew, rank, silent())
        last[rank.crew.rank] = save(rank.crew, rank)
        if rank.crew.rank == 0:
            rank.crew.tell("ended", step=42, saved=True, completed=None, at=1.0, after_s=9.0)

    all_at_once([lambda rank=rank: live(rank) for rank in ranks])  # type: ignore[misc]
    assert [order["order"] for order in ranks[0].orders] == ["stop", "go"]
    for follower in ranks[1:]:
        assert follower.orders == [{"order": "stop_after", "step": 41}]
    assert last[0] == {"report": "saved", "step": 42}
    ended = how_they_ended(tmp_path, 4)
    assert ended is not None
    assert ended["step"] == 42
    assert how_they_ended(tmp_path, 5) is None


@hurried
def test_a_finished_job_is_told_as_finished(tmp_path: Path) -> None:
    """It committed and waits; there is no step to agree on."""
    (crew,) = crews(tmp_path, 1)
    rank = Rank(crew, finished=True)
    assert gather(crew, rank, silent())
    assert save(crew, rank) == {"report": "saved", "step": 60}
    assert rank.report("completed") is not None


@hurried
def test_a_rank_that_ends_while_it_should_save_is_not_waited_for(tmp_path: Path) -> None:
    """Whatever else has gone wrong without a daemon, the slots end."""
    (crew,) = crews(tmp_path, 1)
    rank = Rank(crew, dies=True)
    assert gather(crew, rank, silent())
    begun = time.monotonic()
    assert save(crew, rank) is None
    assert time.monotonic() - begun < 5


@hurried
def test_who_hears_of_a_daemon_while_it_gathers_goes_on(tmp_path: Path) -> None:
    """One slot's silence is not the job's."""
    crew, *_ = crews(tmp_path)
    vigil = silent()
    threading.Timer(0.1, lambda: setattr(vigil, "after_s", 1e9)).start()
    assert not gather(crew, Rank(crew), vigil)
    assert crew.told("gathered", 0) is None


@hurried
def test_a_rank_without_a_slot_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """Its node may be gone, and no daemon is there to say so."""
    crew, *_ = crews(tmp_path)
    assert gather(crew, Rank(crew), silent())


def test_what_is_half_written_is_not_read(tmp_path: Path) -> None:
    """The next daemon must not take COMPLETED from a torn file."""
    crew, *_ = crews(tmp_path)
    crew.tell("ended", step=1)
    assert how_they_ended(tmp_path, 4) is None
    (crew.directory / "ended-0.json").write_text('{"step": 4')
    assert how_they_ended(tmp_path, 4) is None
