"""Replay: the recorded events through the same table, compared move by move; no performing."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.fsm.events import Event, UnreadableEvent
from supervisor.fsm.job import Job
from supervisor.fsm.machine import JobMachine, UnexpectedEvent, table_digest
from supervisor.record.journal import Record, read_history

MOVE_KEYS = ("event", "source", "target", "effects", "why", "raised")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay found. `difference` is empty if every line agrees; `state` is the last one."""

    moves: int
    segments: int
    state: str
    difference: str = ""
    notes: tuple[str, ...] = ()


class _Diverged(Exception):
    """The recorded line and the table disagree."""


def replay_file(path: Path) -> Report:
    """Replay a journal, with what has rolled over, or a trace.

    Raises DiskError or JournalDamaged if it cannot be read.
    """
    return replay(read_history(path))


def replay(records: Iterable[Record]) -> Report:
    """Replay records in order; stops at the first difference and describes both sides."""
    replayer = _Replayer()
    difference = ""
    try:
        for record in records:
            replayer.take(record)
        replayer.end()
    except _Diverged as error:
        difference = str(error)
    return Report(
        moves=replayer.moves,
        segments=replayer.segments,
        state=replayer.machine.job.state.name if replayer.machine else "",
        difference=difference,
        notes=tuple(replayer.notes),
    )


def rebuild(records: Iterable[Record]) -> Job | None:
    """The job that one segment leaves; None where another table wrote it, or they disagree."""
    replayer = _Replayer()
    try:
        for record in records:
            replayer.take(record)
        replayer.end()
    except _Diverged:
        return None
    return None if replayer.notes or replayer.machine is None else replayer.machine.job


class _Replayer:
    def __init__(self) -> None:
        self.machine: JobMachine | None = None
        self.moves = self.segments = 0
        self.notes: list[str] = []
        self._due: list[dict[str, Any]] = []
        self._fresh = False
        self._part = 0

    def take(self, record: Record) -> None:
        """One line of the journal."""
        kind, seq = record["kind"], record["seq"]
        if kind == "header":
            self._begin(record)
        elif kind == "job":
            self._job(seq, record["job"])
        elif kind == "move":
            self._move(seq, {key: record.get(key) for key in MOVE_KEYS})

    def end(self) -> None:
        """The file is over: nothing that the table raised may be missing."""
        if self._due:
            raise _Diverged(f"the end: the table goes on with {_show(self._due[0])}")

    def _begin(self, record: Record) -> None:
        self.end()
        before, self._part = self._part, record.get("part", self._part or 1)
        if "part" in record and before == self._part - 1:
            return  # the same run goes on in another file: its job must be the one we have
        self.segments += 1
        self._fresh = True
        if record["table"] != table_digest():
            self.notes.append(
                f"line {record['seq']}: written by table {record['table']}, "
                f"replayed by {table_digest()}"
            )

    def _job(self, seq: int, recorded: dict[str, Any]) -> None:
        if self._fresh:
            try:
                self.machine = JobMachine(Job.from_dict(recorded))
            except (KeyError, TypeError, ValueError) as error:
                raise _Diverged(f"line {seq}: not a job of this version: {error!r}") from None
            self._fresh = False
            return
        assert self.machine is not None
        ours = json.loads(json.dumps(self.machine.job.to_dict()))
        if ours != recorded:
            odd = [key for key in ours if ours[key] != recorded.get(key)]
            odd += [key for key in recorded if key not in ours]
            sides = "; ".join(f"{k}: {recorded.get(k)!r} or {ours.get(k)!r}" for k in odd)
            raise _Diverged(f"line {seq}: the job differs, recorded or replayed: {sides}")

    def _move(self, seq: int, recorded: dict[str, Any]) -> None:
        if not self._due:
            self._due = self._replayed(seq, recorded)
        ours = self._due.pop(0)
        self.moves += 1
        if ours != recorded:
            raise _Diverged(
                f"line {seq}:\n  recorded: {_show(recorded)}\n  the table says: {_show(ours)}"
            )

    def _replayed(self, seq: int, recorded: dict[str, Any]) -> list[dict[str, Any]]:
        if self.machine is None:
            raise _Diverged(f"line {seq}: a move before the job that it moves")
        try:
            moves = self.machine.handle(Event.from_dict(recorded["event"]))
        except (UnreadableEvent, UnexpectedEvent) as error:
            raise _Diverged(
                f"line {seq}:\n  recorded: {_show(recorded)}\n  the table says: {error}"
            ) from None
        return [json.loads(json.dumps(move.to_dict())) for move in moves]


def _show(move: dict[str, Any]) -> str:
    return json.dumps(move, sort_keys=True)
