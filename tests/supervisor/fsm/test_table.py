"""The table is total, names only what exists, and knows nothing of the world outside."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest
from transitions import Transition

import supervisor.fsm
from supervisor.fsm.events import EVENTS
from supervisor.fsm.job import Job
from supervisor.fsm.machine import TABLE, table_digest
from supervisor.fsm.render import insert
from supervisor.fsm.states import TERMINAL, State
from supervisor.fsm.table import IMPOSSIBLE, TRANSITIONS

PURE = Path(supervisor.fsm.__file__).parent
ALLOWED = {
    "transitions", "abc", "collections", "copy", "dataclasses", "enum", "hashlib", "json", "re",
    "typing", "zlib",
}  # fmt: skip


def rows() -> list[tuple[str, str, list[Transition]]]:
    """(event, source, rows in order) of the built table."""
    return [
        (event.name, source, found)
        for event in TABLE.events.values()
        for source, found in event.transitions.items()
        if found
    ]


def test_every_pair_of_event_and_state_is_a_row_or_impossible_and_never_both() -> None:
    """A pair that nobody thought of must be a decision, not an exception at night."""
    covered = {(EVENTS[name], State[source]) for name, source, _ in rows()}
    everything = set(itertools.product(EVENTS.values(), State))
    missing = {(event.name, state.name) for event, state in everything - covered - IMPOSSIBLE}
    assert missing == set()
    assert not covered & IMPOSSIBLE


def test_only_the_last_row_of_a_pair_has_no_guard() -> None:
    """A guarded last row could refuse an event; an unguarded earlier one hides those after it."""
    for name, source, found in rows():
        guarded = [bool(row.conditions) for row in found]
        assert guarded == [True] * (len(found) - 1) + [False], (name, source)


def test_every_name_in_the_table_is_a_method_of_the_job() -> None:
    """A misspelt action would be found only when its failure happens."""
    for row in TRANSITIONS:
        for name in [*row["conditions"], *row["before"], *row["after"]]:
            assert callable(getattr(Job, name)), name


def test_every_public_method_of_the_job_is_used_by_a_row() -> None:
    """A guard or action that no row names is dead code that looks alive."""
    used = {
        name
        for row in TRANSITIONS
        for key in ("conditions", "before", "after")
        for name in row[key]
    }
    methods = {
        name
        for name, member in inspect.getmembers(Job, inspect.isfunction)
        if not name.startswith("_") and name not in ("to_dict", "from_dict")
    }
    assert methods == used


def test_every_row_says_why() -> None:
    """The reason of a row is what the logs and `explain` tell a person."""
    assert all(row["why"] for row in TRANSITIONS)


def test_terminal_states_absorb_everything() -> None:
    """Nothing brings a run back to life; the same command opens a new one."""
    for row in TRANSITIONS:
        if any(state in TERMINAL for state in row["source"]):
            assert row["dest"] is None
            assert not row["after"]


def test_terminal_states_are_entered_from_draining_only() -> None:
    """Whatever ends a run, its workers are proven gone before."""
    for row in TRANSITIONS:
        if row["dest"] in TERMINAL:
            assert row["source"] == [State.DRAINING], row["trigger"]


@pytest.mark.parametrize("path", sorted(PURE.glob("*.py")), ids=lambda path: path.name)
def test_the_core_imports_neither_clock_nor_chance_nor_the_world(path: Path) -> None:
    """Replay promises that the same trace leads to the same moves."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] in ALLOWED


def test_the_description_of_the_machine_is_the_machine() -> None:
    """`python -m supervisor graph --write state_machine.md` refreshes the generated block."""
    path = Path(__file__).parents[3] / "state_machine.md"
    text = path.read_text()
    assert insert(text) == text


def test_the_digest_names_the_rows() -> None:
    """A journal of another table must be recognised as such."""
    before = table_digest()
    TRANSITIONS[0]["why"], kept = "another reason", TRANSITIONS[0]["why"]
    try:
        assert table_digest() != before
    finally:
        TRANSITIONS[0]["why"] = kept
    assert table_digest() == before


def test_the_digest_is_the_one_that_journals_out_there_carry() -> None:
    """Under another digest no journal is resumed as it is: a table that only looks the same after
    its functions were moved or renamed would bring every running job down once."""
    assert table_digest() == "450d7ea15e15d715"
