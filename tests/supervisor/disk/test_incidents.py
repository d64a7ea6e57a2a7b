"""Evidence: for its owner only, whole or absent, bounded."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from supervisor.disk import incidents
from supervisor.disk.incidents import INCIDENTS_MAX, latest, write_evidence, write_summary


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def latest_of(run_dir: Path) -> dict[str, Any]:
    found = latest(run_dir)
    assert found is not None
    return found


def test_what_was_seen_of_every_rank_is_kept_for_the_owner_only(tmp_path: Path) -> None:
    """Stacks and logs may show data and paths of the user to everybody on the machine."""
    previous = os.umask(0)
    try:
        evidence: dict[int, Mapping[str, Any]] = {
            0: {"stacks": "in step\n", "log_tail": ["a", "b\n"], "state": "S", "beat": {"seq": 5}},
            1: {"error": "no answer within 2 s"},
        }
        where = write_evidence(tmp_path, 7, 3, evidence)
        write_summary(tmp_path, 7, {"cause": "worker_crashed"})
    finally:
        os.umask(previous)
    assert where == tmp_path / "incidents" / "0007"
    assert (where / "stacks-rank-0.txt").read_text() == "in step\n"
    assert (where / "log-rank-0.txt").read_text() == "a\nb\n"
    assert not (where / "stacks-rank-1.txt").exists()
    ranks = json.loads((where / "evidence-generation-3.json").read_text())["ranks"]
    assert ranks == {
        "0": {"state": "S", "beat": {"seq": 5}},
        "1": {"error": "no answer within 2 s"},
    }
    assert {mode(path) for path in where.iterdir()} == {0o600}
    assert mode(where) == mode(where.parent) == 0o700
    assert {path.name for path in where.iterdir() if path.name.startswith(".")} == set()


def test_the_latest_incident_is_told(tmp_path: Path) -> None:
    """`status` and `explain` begin with it."""
    assert latest(tmp_path) is None
    for number in (1, 2, 11):
        write_summary(tmp_path, number, {"cause": f"cause {number}"})
    found = latest_of(tmp_path)
    assert (found["number"], found["cause"]) == (11, "cause 11")
    assert found["path"].endswith("incidents/0011")


def test_a_summary_may_be_replaced_and_a_damaged_one_is_said_to_be(tmp_path: Path) -> None:
    """The daemon died between two incidents, or the disk was full."""
    write_summary(tmp_path, 1, {"cause": "unknown"})
    path = write_summary(tmp_path, 1, {"cause": "known"})
    assert latest_of(tmp_path)["cause"] == "known"
    path.write_text("{")
    assert "damaged" in latest_of(tmp_path)["error"]
    path.unlink()
    assert "no summary" in latest_of(tmp_path)["error"]


def test_a_second_generation_of_one_incident_does_not_overwrite_the_first(tmp_path: Path) -> None:
    """The first stacks are those of the cause; a rung of recovery that failed adds its own."""
    write_evidence(tmp_path, 1, 4, {0: {"stacks": "the cause"}})
    where = write_evidence(tmp_path, 1, 5, {0: {"stacks": "the rung"}})
    assert (where / "stacks-rank-0.txt").read_text() == "the cause"
    assert (where / "stacks-generation-5-rank-0.txt").read_text() == "the rung"


def test_an_exception_too_long_for_a_report_is_in_the_incident_in_whole(tmp_path: Path) -> None:
    """Of a text of 12 MB only head and tail existed anywhere."""
    left = tmp_path / "logs" / "generation-3" / "rank-1.error"
    left.parent.mkdir(parents=True)
    left.write_text("x" * 12_000_000)
    where = write_evidence(tmp_path, 1, 3, {0: {}, 1: {"stacks": "here"}})
    kept = where / "error-generation-3-rank-1.txt"
    assert kept.stat().st_size == 12_000_000
    assert not left.exists()
    write_evidence(tmp_path, 1, 3, {0: {}, 1: {"log_tail": "the last words"}})
    assert kept.stat().st_size == 12_000_000


def test_a_thousand_ranks_with_endless_logs_stay_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incident must not be what fills the disk; of a log its end matters."""
    monkeypatch.setattr(incidents, "INCIDENT_BYTES_MAX", 400_000)
    flood = {"stacks": "first\n" + "s" * 10_000, "log_tail": "l" * 10_000 + "\nlast"}
    where = write_evidence(tmp_path, 1, 1, dict.fromkeys(range(100), flood))
    assert sum(path.stat().st_size for path in where.iterdir()) < 450_000
    assert (where / "log-rank-99.txt").read_text().endswith("last")
    assert (where / "stacks-rank-99.txt").read_text().startswith("first")


def test_an_endless_summary_is_cut_and_stays_readable(tmp_path: Path) -> None:
    """An error message of a hundred megabytes has happened."""
    write_summary(tmp_path, 1, {"why": "x" * 2_000_000})
    found = latest_of(tmp_path)
    assert found["number"] == 1
    assert "too many" in found["error"]


def test_old_incidents_make_room_for_new_ones(tmp_path: Path) -> None:
    """Preemptions are not limited; their evidence is."""
    for number in range(1, INCIDENTS_MAX + 6):
        write_summary(tmp_path, number, {})
    kept = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert len(kept) == INCIDENTS_MAX
    assert kept[0] == "0006"


def test_text_that_is_no_unicode_does_not_stop_the_evidence(tmp_path: Path) -> None:
    """Logs hold whatever a library printed."""
    where = write_evidence(tmp_path, 1, 1, {0: {"log_tail": ["\udcff\x00 raw"]}})
    assert b"raw" in (where / "log-rank-0.txt").read_bytes()


def test_a_write_that_fails_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of the stacks."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_summary(tmp_path, 1, {"cause": "x"})
    assert list((tmp_path / "incidents" / "0001").iterdir()) == []
