"""A worker's word about a disk: the daemon looks itself before a checkpoint counts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from supervisor.daemon.checked_commits import CheckedCommits
from tests.supervisor.disk.test_restore_points import checkpoint


def report(kind: str, rank: int = 0, **facts: Any) -> dict[str, Any]:
    return {"report": kind, "generation": 1, "rank": rank, **facts}


def passed(run_dir: Path, *records: dict[str, Any], known: int = -1) -> list[dict[str, Any]]:
    """What comes through, in order."""
    found: list[dict[str, Any]] = []

    async def run() -> None:
        commits = CheckedCommits(
            run_dir, is_known=lambda _, step: step <= known, forward=found.append, limit_s=0.3
        )
        for record in records:
            commits.take(record)
        async with asyncio.timeout(5):
            while len(found) < len(records):
                await asyncio.sleep(0.01)

    asyncio.run(run())
    return found


def test_a_checkpoint_on_another_disk_does_not_count(tmp_path: Path) -> None:
    """Three commits, COMPLETED, status 0: and on the daemon's host there was no checkpoint."""
    (found,) = passed(tmp_path, report("checkpoint_committed", step=5, path="/elsewhere"))
    assert found["report"] == "checkpoint_failed"
    assert f"the daemon does not find below {tmp_path}: " in found["error"]


def test_a_checkpoint_that_is_there_counts_and_keeps_its_place(tmp_path: Path) -> None:
    """What a rank reports after its commit must not be heard before it; other ranks do not wait."""
    checkpoint(tmp_path, 1, 5)
    committed, completed = report("checkpoint_committed", step=5), report("completed", step=5)
    other = report("exit", 1)
    assert passed(tmp_path, committed, completed, other) == [other, committed, completed]


def test_a_commit_that_was_accepted_before_is_not_looked_for_again(tmp_path: Path) -> None:
    """Slots repeat their reports to a daemon that comes back, and retention has deleted some."""
    old = report("checkpoint_committed", step=5)
    assert passed(tmp_path, old, known=7) == [old]


def test_the_end_of_a_rank_waits_for_no_disk(tmp_path: Path) -> None:
    """A worker killed right after its commit would be noticed seconds late on a slow disk."""
    lost, ended = report("checkpoint_committed", step=5), report("exit", signal=9)
    found = passed(tmp_path, lost, ended)
    assert [record["report"] for record in found] == ["exit", "checkpoint_failed"]


def test_an_end_that_is_explained_comes_after_its_reason(tmp_path: Path) -> None:
    """A process that ends after its last step would count as crashed."""
    checkpoint(tmp_path, 1, 5)
    records = [report("checkpoint_committed", step=5), report("completed", step=5), report("exit")]
    assert passed(tmp_path, *records) == records
