"""What `status` answers is what the files say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from supervisor.console.display import progress
from supervisor.console.status import activity, snapshot
from supervisor.daemon.roster import Roster
from tests.sim.run import simulate
from tests.sim.world import Fault, Script
from trainer.wire.heartbeat import BeatMessage


@pytest.fixture
def ended(tmp_path: Path) -> Any:
    return simulate(tmp_path / "journal.jsonl", Script(steps=60))


def look(sim: Any, **given: Any) -> dict[str, Any]:
    late = BeatMessage(
        generation=1, rank=0, pid=1, seq=1, beats=1, phase="step", step=58, loss=2.5, step_s=0.1
    )
    about = {"name": "first", "steps": 60, "epoch": 1, "started_at": 0.0}

    async def picture() -> dict[str, Any]:
        return snapshot(
            sim.daemon,
            **{"beats": {(1, 0): late}, "changed": (), "drills": False, **about, **given},
        )

    return asyncio.run(picture())


def test_the_last_picture_shows_what_the_result_says(ended: Any) -> None:
    """A complete job was shown at step 58 of 60, with the loss of step 58."""
    result = {"step": 60, "loss": 2.25, "held_out_loss": None, "reason": "all steps are done"}
    shown = look(ended, result=result)
    assert (shown["state"], shown["step"], shown["loss"]) == ("COMPLETED", 60, 2.25)
    assert shown["reason"] == "all steps are done"


def test_what_the_workers_said_last_counts_before_the_result_is_written(ended: Any) -> None:
    """The picture is drawn while the job drains."""
    assert look(ended)["step"] == ended.event("training_completed")["step"] == 60


def test_a_worker_is_found_by_the_name_and_address_of_its_host(ended: Any) -> None:
    """The node of a worker was an id of Ray, and after an adoption not even that."""
    (event,) = (m["event"] for m in ended.moves if m["event"]["event"] == "slots_placed")
    assert event["hosts"] == [["node", "node-a", "10.0.0.1"]]
    ended.daemon.performers.rosters[ended.daemon.job.active] = Roster(
        generation=1, world_size=2, restoring=False
    )
    rows = look(ended)["workers"]
    assert [(row["node"], row["host"], row["address"]) for row in rows] == [
        ("node", "node-a", "10.0.0.1")
    ] * 2


def test_before_the_first_step_nothing_is_known_of_steps(ended: Any) -> None:
    """During starts the panel said "0.000 s a step", "0 tokens/s", and step -1 of each worker."""
    beat = BeatMessage(
        generation=1, rank=0, pid=1, seq=1, beats=1, phase="compile", step=-1, tokens_per_s=0.0
    )
    ended.daemon.performers.rosters[1] = Roster(generation=1, world_size=2, restoring=False)
    shown = look(ended, beats={(1, 0): beat})
    assert shown["workers"][0]["step"] is None
    assert (shown["step_s"], shown["tokens_per_s"], shown["time_left_s"]) == (None, None, None)
    assert not {"step_s", "tokens_per_s"} & progress(shown).keys()


def test_what_a_start_is_doing_is_said(tmp_path: Path) -> None:
    """Twenty seconds passed without a word, and a newcomer ended what was about to begin."""
    seen: dict[float, Any] = {}

    def note(at: float) -> Any:
        return lambda daemon, _: seen.update({at: activity(daemon)})

    fault = Fault(kind="kill", step=25)
    sim = simulate(
        tmp_path / "journal.jsonl",
        Script(faults=[fault]),
        meddle={at: note(at) for at in (2.0, 6.5, 11.0, 13.5)},
    )
    usual = "; a first start usually takes 15 to 30 s"
    assert seen[2.0] == f"Ray starts, and places 2 slots{usual}"
    assert seen[6.5] == f"the workers join each other{usual}"
    assert seen[11.0] is None
    assert seen[13.5]
    assert "usually" not in seen[13.5]
    recovered = look(sim)["incident"]
    assert recovered["steps_redone"] == 5
    assert recovered["recovered_s"] == sim.daemon.chronicle.recoveries()[0]["total_s"] > 3
