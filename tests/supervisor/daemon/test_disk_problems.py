"""What `status` says about disks: what, since when, why; and no longer than it lasts."""

from __future__ import annotations

from typing import Any

from supervisor.daemon.disk_problems import Troubles
from supervisor.daemon.roster import Roster
from supervisor.fsm import events as e


def record(report: str, rank: int = 0, generation: int = 1, **facts: Any) -> dict[str, Any]:
    return {"report": report, "generation": generation, "rank": rank, **facts}


def test_a_disk_that_refuses_is_shown_since_its_first_refusal_until_it_takes_again() -> None:
    """An operator must see that metrics are not written, and since when."""
    troubles = Troubles()
    troubles.hear(record("disk", what="log", why="full", rank=1), 10.0)
    troubles.hear(record("disk", what="log", why="still full", rank=1), 20.0)
    troubles.hear(record("checkpoint_failed", step=4, error="OSError: full"), 15.0)
    rows = troubles.rows((1, None))
    assert [(row["what"], row["rank"], row["since"], row["why"]) for row in rows] == [
        ("log", 1, 10.0, "full"),
        ("checkpoint", 0, 15.0, "OSError: full"),
    ]
    troubles.hear(record("disk", what="log", why="", rank=1), 30.0)
    troubles.hear(record("checkpoint_committed", step=8), 30.0)
    assert troubles.rows((1, None)) == []


def test_what_a_dead_generation_said_is_over_with_it() -> None:
    """It can no longer say that it is well again."""
    troubles = Troubles()
    troubles.hear(record("disk", what="metrics", why="full"), 10.0)
    assert troubles.rows((2, 3)) == []
    assert troubles.rows((1,)) == []


def test_the_journal_has_the_trouble_once_and_not_its_end() -> None:
    """`events` must tell it too; nothing is decided by it."""
    roster = Roster(generation=1, world_size=2, restoring=False)
    (event,) = roster.take(record("disk", what="metrics", why="x.jsonl: full"), 5.0)
    assert isinstance(event, e.HousekeepingFailed)
    assert (event.action, event.error) == ("to write the metrics of rank 0", "x.jsonl: full")
    assert roster.take(record("disk", what="metrics", why=""), 6.0) == []
    assert roster.take(record("disk", what="snapshots", why="full"), 6.0) == []  # told already
