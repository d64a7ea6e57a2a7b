"""The tables and the diagram of state_machine.md, drawn from the transition table."""

from typing import Any

from .events import EVENTS
from .machine import TABLE
from .states import TERMINAL, State

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def render() -> str:
    """The generated block, in Markdown with one mermaid diagram; ends with a newline."""
    return "\n".join(["", *_diagram(), "", *_states(), "", *_events(), "", *_rows(), ""])


def insert(text: str) -> str:
    """`text` with what stands between its markers replaced; raises ValueError without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n{render()}\n{END}{tail}"


def _all() -> list[tuple[str, Any]]:
    return [
        (event.name, row)
        for event in TABLE.events.values()
        for rows in event.transitions.values()
        for row in rows
    ]


def _guard(row: Any) -> str:
    return ", ".join(condition.func for condition in row.conditions)


def _diagram() -> list[str]:
    edges: dict[tuple[str, str], list[str]] = {}
    for name, row in _all():
        if row.dest and row.dest != row.source:
            names = edges.setdefault((row.source, row.dest), [])
            if name not in names:
                names.append(name)
    lines = ["```mermaid", "stateDiagram-v2", f"  [*] --> {State.PROVISIONING.name}"]
    for (source, dest), names in edges.items():
        lines.append(f"  {source} --> {dest}: {' / '.join(names)}")
    lines += [f"  {state.name} --> [*]" for state in State if state in TERMINAL]
    return [*lines, "```"]


def _states() -> list[str]:
    rows = [f"| {state.name} | {state.value} |" for state in State]
    return ["| State | Meaning |", "| --- | --- |", *rows]


def _events() -> list[str]:
    rows = []
    for name, kind in EVENTS.items():
        sentence = " ".join((kind.__doc__ or "").split())
        rows.append(f"| `{name}` | {sentence} |")
    return ["| Event | What it says |", "| --- | --- |", *rows]


def _rows() -> list[str]:
    merged: dict[tuple[str, str, str, str, str], list[str]] = {}
    for name, row in _all():
        actions = ", ".join(call.func if hasattr(call, "func") else call for call in row.after)
        key = (name, row.dest or "-", _guard(row) or "-", actions or "-", row.why)
        sources = merged.setdefault(key, [])
        if row.source not in sources:
            sources.append(row.source)
    lines = [
        f"| `{name}` | {', '.join(sources)} | {dest} | {guard} | {actions} | {why} |"
        for (name, dest, guard, actions, why), sources in merged.items()
    ]
    head = "| Event | In | Goes to | If | Does | Why |"
    return [head, "| --- | --- | --- | --- | --- | --- |", *lines]
