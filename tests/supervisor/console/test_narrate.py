"""The journal told to people."""

from supervisor.console.narrate import tell


def test_a_move_is_told_with_its_reason_and_its_orders() -> None:
    """What happened, why, and what was done about it, without a look at the code."""
    text = tell(
        {
            "kind": "move",
            "event": {
                "event": "worker_crashed",
                "at": 0.5,
                "generation": 2,
                "ranks": [1],
                "signal": "SIGKILL",
                "status": None,
            },
            "source": "RUNNING",
            "target": "DRAINING",
            "effects": [{"effect": "collect_evidence", "generation": 2}, {"effect": "release"}],
            "why": "a primary cause closes the window",
        }
    )
    assert text is not None
    first, second, third = text.splitlines()
    assert first.endswith(
        "RUNNING → DRAINING           worker_crashed generation=2 ranks=[1] signal=SIGKILL"
    )
    assert second.strip() == "because a primary cause closes the window"
    assert third.strip() == "then    collect_evidence(generation=2), release"


def test_only_decisions_are_told() -> None:
    """Measurements of actions and copies of the job would bury them."""
    assert tell({"kind": "action"}) is None
    assert tell({"kind": "job", "job": {}}) is None
    assert tell({"kind": "header", "epoch": 3}) == "--- epoch 3: a daemon takes the job"


def test_of_an_exception_its_place_and_the_last_lines_are_told() -> None:
    """`events` cut it after 160 characters of JSON: no file, no line was left."""
    error = {"type": "ValueError", "message": "no " * 500, "frame": "task.py:7 in f"}
    error["traceback"] = "line\n" * 500 + "ValueError: no"
    event = {"event": "worker_raised", "at": 0, "error": error}
    text = tell({"kind": "move", "event": event, "source": "A", "target": "A", "effects": []})
    assert text is not None
    first, *lines = text.splitlines()
    assert "error=ValueError: no no" in first
    assert "raised_at=task.py:7 in f" in first
    assert len(text) < 600
    assert 1 < len(lines) < 8
    assert lines[-1].strip() == "| ValueError: no"


def test_a_name_with_escape_codes_stays_text() -> None:
    """`events` prints what hosts, metrics and exceptions are called."""
    text = tell(
        {
            "kind": "move",
            "event": {"event": "numbers_diverged", "at": 0.5, "metric": "a\x1b[2Jb\nc"},
            "source": "RUNNING",
            "target": "DRAINING",
            "effects": [{"effect": "kill", "why": "\x9b"}],
            "why": "two\nlines\x07",
        }
    )
    assert text is not None
    assert not [one for one in text if one != "\n" and not one.isprintable()]
    assert len(text.splitlines()) == 3


def test_slots_are_told_by_the_names_of_their_hosts() -> None:
    """On a cluster an operator read 56 hex digits, and no command leads from these to a machine."""
    node = "f" * 56
    event = {"event": "slots_placed", "at": 0.5, "slots": [[0, node, 41], [1, "e" * 56, 42]]}
    event["hosts"] = [[node, "node-a", "10.0.0.1"]]
    text = tell({"kind": "move", "event": event, "source": "A", "target": "B", "effects": []})
    assert text is not None
    assert "rank 0 on node-a (10.0.0.1), pid 41" in text
    assert node not in text
    assert "e" * 56 in text  # a journal of an earlier version knows no names


def test_the_end_of_a_failed_job_says_what_to_do() -> None:
    """Who had read why the job failed had to guess which line or setting to change."""
    effect = {"effect": "WriteResult", "state": "FAILED", "remedy": "mend task.py:7"}
    event = {"event": "retry_ruled_out", "at": 0}
    text = tell({"kind": "move", "event": event, "source": "A", "target": "B", "effects": [effect]})
    assert text is not None
    assert text.splitlines()[-1].strip() == "to do   mend task.py:7"
