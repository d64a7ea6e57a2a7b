"""The picture of a job: whatever is known is shown, whatever is not is left out."""

import asyncio
import io
from typing import Any

from rich.console import Console
from structlog.testing import capture_logs

from supervisor.console.display import Display, duration, fitted, render

SNAPSHOT: dict[str, Any] = {
    "job": "first",
    "state": "RUNNING",
    "generation": 3,
    "step": 120,
    "steps": 600,
    "workers": [
        {"rank": 0, "pid": 41, "node": "a", "phase": "step", "step": 120, "beat_age_s": 0.11},
        {"rank": 1, "pid": 42, "node": "a", "phase": "step", "step": 120, "beat_age_s": 0.12},
    ],
    "standby": None,
    "restore_point": {"kind": "checkpoint", "step": 100, "verified": True},
    "budgets": {"worker": {"spent": 1, "limit": 10}, "startup": {"spent": 0, "limit": 3}},
    "supervisor": {"pid": 40, "epoch": 2, "started_at": 1.0},
    "incident": {"number": 1, "story": "rank 1 was killed by SIGKILL"},
    "loss": 2.31,
    "held_out_loss": 2.4567,
    "unigram_entropy": 4.1,
    "tokens_per_s": 12345.0,
    "step_s": 0.21,
    "time_left_s": 80.0,
    "uptime_s": 130.0,
    "last_event": {"event": "checkpoint_committed", "at": 1.0, "why": "a later restore point"},
    "hint": "another terminal: fault",
}


def text_of(snapshot: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(render(snapshot))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_look_tells_how_the_job_is_doing() -> None:
    """State, progress, losses, the last restore point and what went wrong, in one panel."""
    text = text_of(SNAPSHOT)
    for words in (
        "first",
        "RUNNING  generation 3  up 0:02:10",
        "120 of 600",
        "20 %",
        "0:01:20 left",
        "loss 2.3100  held-out 2.4567 (unigram entropy 4.1000)  12,345 tokens/s",
        "checkpoint of step 100  20 steps ago",
        "worker 1 of 10",
        "1: rank 1 was killed by SIGKILL",
        "checkpoint_committed",
        "0.1 s ago",
        "another terminal",
    ):
        assert words in text
    assert "startup" not in text  # nothing of that budget is spent
    assert "no supervisor" not in text


def test_what_is_not_known_is_left_out() -> None:
    """Right after its start a job has neither steps nor workers."""
    assert "unknown" in text_of({})
    text = text_of({"state": "PROVISIONING", "supervisor": {"pid": 1}, "workers": [{"rank": 0}]})
    assert "None" not in text
    assert "PROVISIONING" in text


def test_how_much_a_failure_may_cost_is_on_the_screen() -> None:
    """ "auto" is no answer: how many steps would be done again is."""
    every = {"snapshot": 3, "checkpoint": 50}
    assert "snapshot every 3 steps, checkpoint every 50 steps" in text_of(
        {**SNAPSHOT, "every_steps": every}
    )
    text = text_of({**SNAPSHOT, "every_steps": {"snapshot": "auto", "checkpoint": "auto"}})
    assert "every" not in text


def test_what_an_operator_must_know_is_on_the_screen() -> None:
    """A supervisor that was blind for a night looked like one that had nothing to report."""
    text = text_of({**SNAPSHOT, "heartbeat_store_lost_since": 1.0, "retry_in_s": 4.0})
    assert "hangs are not noticed" in text
    assert "the next retry is in 4 s" in text
    assert "nothing is decided" in text_of({"journal_lost_since": 1.0})
    told = text_of({"settings_changed": ["trainer.steps", "cluster.workers"]})
    assert "counting when workers start anew: trainer.steps, cluster.workers" in told
    assert "DRAINING to recover" in text_of({"state": "DRAINING", "purpose": "recover"})


def test_of_many_workers_those_behind_are_shown() -> None:
    """A thousand healthy rows hide the one that hangs."""
    workers = [{"rank": rank, "step": 9, "beat_age_s": 0.1} for rank in range(1000)]
    workers[777] = {"rank": 777, "step": 8, "beat_age_s": 7.0}
    text = text_of({**SNAPSHOT, "workers": workers})
    assert "777" in text
    assert "and 992 more" in text
    assert len(text.splitlines()) < 30


def test_a_failed_job_shows_where_it_failed_and_what_to_do() -> None:
    """The panel of a job with an error in the user's own code named neither file nor line."""
    text = text_of(
        {
            **SNAPSHOT,
            "state": "FAILED",
            "reason": f"rank 1 raised ValueError at /{'long/' * 30}my_task.py:12 in step 5: no",
            "log": "logs/generation-3/rank-1.log",
            "log_tail": [f"line {number} of the log" for number in range(12)],
            "remedy": "mend my_task.py:12; then give the same command again",
        }
    )
    unbroken = "".join(text.replace("│", "").split())
    assert f"/{'long/' * 30}my_task.py:12" in unbroken
    assert "logs/generation-3/rank-1.log ends with" in text
    assert "line 11 of the log" in text
    assert "line 2 of the log" not in text
    assert "mend my_task.py:12; then" in text


def test_no_text_acts_on_the_terminal_or_fills_it() -> None:
    """An exception of 12 MB with escape codes made 385 lines, some of them invisible."""
    evil = "\x1b]0;owned\x07\x1b[2J first line\nsecond\x9b31m \u202egnp " + "A" * 12_000_000
    named = {**SNAPSHOT["workers"][0], "node": "host\x1b[8m", "phase": "st\x1bep"}
    text = text_of(
        {
            **SNAPSHOT,
            "reason": evil,
            "incident": {"number": 1, "story": evil},
            "last_event": {"event": "worker_raised", "at": 1.0, "why": evil},
            "disk": [{"what": evil, "rank": 1, "since": 1.0, "why": evil}],
            "workers": [named],
        }
    )
    assert not [one for one in text if one != "\n" and not one.isprintable()]
    assert "first line second" in text
    assert "host\\x1b[8m" in text
    assert len(text.splitlines()) < 45


def test_an_incident_that_is_over_shows_what_it_cost() -> None:
    """It stayed on the screen as if it lasted; what people ask is how long, and what was lost."""
    incident = {"number": 1, "story": "rank 1 ended by SIGKILL", "recovered_s": 0.31}
    text = text_of({**SNAPSHOT, "incident": {**incident, "steps_redone": 1}})
    assert "rank 1 ended by SIGKILL  recovered in 0.3 s, 1 step redone" in text
    text = text_of({**SNAPSHOT, "incident": {**incident, "steps_redone": None}})
    assert "recovered in 0.3 s" in text
    assert "redone" not in text


def test_the_panel_fits_into_80_by_24_and_less_whatever_it_holds() -> None:
    """Its lower border and the workers were cut off where texts were long."""
    wordy = "an event with much to say " * 20
    workers = [{"rank": rank, "step": 9, "phase": "step", "pid": 7} for rank in range(9)]
    snapshot = {
        **SNAPSHOT,
        "workers": workers,
        "incident": {"number": 1, "story": wordy},
        "last_event": {"event": "worker_raised", "at": 1.0, "why": wordy},
        "attention": wordy,
        "standby": {"generation": 4, "ready": True, "memory_mb": 744.0, "start_s": 4.4},
        "activity": "the workers join each other",
    }
    for width, height in ((80, 24), (60, 22), (120, 40)):
        console = Console(file=io.StringIO(), width=width, height=height)
        console.print(fitted(snapshot, console))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert len(lines) < height
        assert lines[0].startswith("╭")
        assert lines[-1].startswith("╰")
        assert any("120 of 600" in line for line in lines)


def test_after_a_resize_the_screen_is_drawn_anew() -> None:
    """A terminal wraps the lines of the old picture: the new one was drawn into its middle."""
    console = Console(file=io.StringIO(), width=110, height=40, force_terminal=True)

    async def story() -> None:
        display = Display(lambda: SNAPSHOT, terminal=True, console=console, every_s=0.01)
        task = asyncio.create_task(display.run())
        await asyncio.sleep(0.05)
        assert isinstance(console.file, io.StringIO)
        assert "\x1b[2J" not in console.file.getvalue()
        console.width = 70
        await asyncio.sleep(0.05)
        display.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(story())
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\x1b[2J\x1b[H") == 1


def test_on_a_terminal_the_last_picture_stays() -> None:
    """The end of a job must be on the screen when the command returns."""
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    snapshot = dict(SNAPSHOT)

    async def story() -> None:
        display = Display(lambda: snapshot, terminal=True, console=console, every_s=0.01)
        task = asyncio.create_task(display.run())
        await asyncio.sleep(0.05)
        snapshot["state"] = "COMPLETED"
        display.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(story())
    assert isinstance(console.file, io.StringIO)
    assert "RUNNING" in console.file.getvalue()
    assert "COMPLETED" in console.file.getvalue().rpartition("everstep")[2]


def test_elsewhere_progress_is_a_log_line_when_there_is_some() -> None:
    """A log file of a week must not consist of equal lines."""
    snapshot = {**SNAPSHOT, "held_out_loss": None, "activity": "the workers join each other"}

    async def story() -> None:
        display = Display(lambda: snapshot, terminal=False, progress_s=0.01)
        task = asyncio.create_task(display.run())
        await asyncio.sleep(0.1)
        snapshot["step"] = 121
        await asyncio.sleep(0.1)
        display.stop()
        await asyncio.wait_for(task, 5)

    with capture_logs() as lines:
        asyncio.run(story())
    assert [line["step"] for line in lines] == [120, 121]
    assert lines[0]["event"] == "progress"
    assert lines[0]["loss"] == 2.31
    assert lines[0]["activity"] == "the workers join each other"
    assert "held_out_loss" not in lines[0]  # what is not known is no fact


def test_a_picture_that_cannot_be_drawn_does_not_reach_the_job() -> None:
    """A closed terminal ended a training run of three days."""

    def broken() -> dict[str, Any]:
        raise OSError("the terminal is gone")

    with capture_logs() as lines:
        asyncio.run(Display(broken, terminal=True, console=Console(file=io.StringIO())).run())
    assert [line["event"] for line in lines] == ["display_lost"]


def test_durations_are_read_at_a_glance() -> None:
    """Seconds beyond a minute are arithmetic for the reader."""
    assert [duration(s) for s in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]
