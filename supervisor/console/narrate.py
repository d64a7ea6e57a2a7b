"""The journal told to people: one move, one line. It adds nothing that is not in the record."""

import json
from collections.abc import Mapping
from typing import Any

from supervisor.console.display import clock
from trainer.host.printable import one_line, printable

_LONGEST = 160  # characters of one detail
_TRACEBACK_LINES = 6  # of what was raised, the last ones


def tell(record: Mapping[str, Any]) -> str | None:
    """The line for a record of the journal, or None for those that are no decision."""
    kind = record.get("kind")
    if kind == "header" and record.get("part", 1) > 1:
        return None  # the same run goes on in another file
    if kind == "header":
        return f"--- epoch {record.get('epoch')}: a daemon takes the job"
    if kind != "move":
        return None
    event = dict(record.get("event") or {})
    name, at = event.pop("event", "?"), event.pop("at", None)
    traceback: list[str] = []
    if name == "slots_placed":
        event = _on_hosts(event)
    if isinstance(error := event.get("error"), Mapping):
        event["error"] = f"{error.get('type')}: {error.get('message')}"
        event["raised_at"] = error.get("frame")
        traceback = str(error.get("traceback") or "").splitlines()[-_TRACEBACK_LINES:]
    source, target = record.get("source"), record.get("target")
    states = str(source) if source == target else f"{source} → {target}"
    words = [f"{clock(at):8}  {states:<28} {name}"]
    words += [f"{key}={_short(value)}" for key, value in event.items() if _says(value)]
    lines = [" ".join(words).rstrip()]
    lines += [f"{'':10}| {one_line(line, _LONGEST)}" for line in traceback]
    if record.get("why"):
        lines.append(f"{'':10}because {one_line(record['why'])}")
    effects = [_effect(effect) for effect in record.get("effects") or ()]
    if effects:
        lines.append(f"{'':10}then    {', '.join(effects)}")
    for effect in record.get("effects") or ():
        if isinstance(effect, Mapping) and effect.get("remedy"):
            lines.append(f"{'':10}to do   {one_line(effect['remedy'])}")
    return printable("\n".join(lines))


def _on_hosts(event: dict[str, Any]) -> dict[str, Any]:
    """The slots by the names of their hosts: an id of Ray tells nobody where to look."""
    hosts = {node: f"{host} ({address})" for node, host, address in event.pop("hosts", ())}
    slots = [
        f"rank {rank} on {hosts.get(node, node)}, pid {pid}"
        for rank, node, pid in event.pop("slots", ())
    ]
    return {**event, "slots": "; ".join(slots)}


def _says(value: object) -> bool:
    return value is not None and value not in ("", [], {}, ())


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return one_line(text, _LONGEST)


def _effect(effect: object) -> str:
    if not isinstance(effect, Mapping):
        return str(effect)
    details = dict(effect)
    name = details.pop("effect", "?")
    details.pop("remedy", None)  # a line of its own
    inside = ", ".join(f"{key}={_short(value)}" for key, value in details.items() if _says(value))
    return f"{name}({inside})" if inside else str(name)
