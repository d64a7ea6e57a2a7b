"""What a run amounts to: recoveries with their split, and goodput. It only reads."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

from supervisor.record.journal import Record

ROWS_KEPT = 1000  # recoveries of one run

# Each stage of a recovery ends with the first of its events after the failure.
_STAGES = (
    ("evidence_s", ("evidence_collected",)),
    ("kill_s", ("workers_gone", "exit_unproven")),
    ("select_s", ("restore_point_selected",)),
    ("place_s", ("slots_placed",)),
    ("start_s", ("workers_started",)),
    ("load_s", ("workers_restored", "workers_initialized")),
    ("step_s", ("first_step_taken",)),
)


class Chronicle:
    """What a run amounts to so far, told move by move, so that no move need be kept."""

    def __init__(self, told: Mapping[str, Any] | None = None) -> None:
        """`told` is what another one answered to `to_dict`."""
        self._rows: list[dict[str, Any]] = [dict(row) for row in (told or {}).get("rows", ())]
        self.traceback: str | None = (told or {}).get("traceback")

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """Of one segment of a journal, which may begin where that rolled over."""
        chronicle = cls()
        for record in records:
            chronicle.take(record)
        return chronicle

    def take(self, record: Record) -> None:
        """One line of the journal."""
        if record["kind"] == "job" and "told" in record:
            before = Chronicle(record["told"])
            self._rows, self.traceback = before._rows, before.traceback
        if record["kind"] != "move":
            return
        event, name = record["event"], record["event"]["event"]
        error = event.get("error")
        if isinstance(error, dict) and event.get("primary", True):
            self.traceback = error.get("traceback") or self.traceback
        elif name == "worker_crashed" and event["phase"] == "launch":
            self.traceback = event["detail"] or self.traceback
        opened = record["target"] == "DRAINING" and record["source"] != "DRAINING"
        if opened and name not in ("training_completed", "stop_requested"):
            self._rows = [*self._rows, _row(event)][-ROWS_KEPT:]
        elif self._rows and self._rows[-1]["total_s"] is None:
            _advance(self._rows[-1], event)

    def recovery_from(self, opened_at: float, step: int) -> dict[str, Any]:
        """What the incident that opened then, in that step, has cost; empty while it lasts.

        `recovered_s` runs to the end of the first new step; `steps_redone` is None if unknown.
        """
        row = self._rows[-1] if self._rows else None
        if row is None or row["total_s"] is None or row["at"] < opened_at:
            return {}
        redone = max(0, step - row["resumed_step"]) if step >= 0 else None
        recovered_s = round(row["at"] + row["total_s"] - opened_at, 3)
        return {"recovered_s": recovered_s, "steps_redone": redone}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for a journal that rolls over."""
        return {"rows": [dict(row) for row in self._rows], "traceback": self.traceback}

    def recoveries(self) -> list[dict[str, Any]]:
        """A row an incident: who, why, and where the seconds went.

        `total_s` runs from the failure to the end of the first new step; it is None, like the
        stages that were not reached, while the job has not recovered.
        """
        return [{key: row[key] for key in row if key != "_at"} for row in self._rows]


def recoveries(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The recoveries of these records; see `Chronicle.recoveries`."""
    return Chronicle.of(records).recoveries()


def _row(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "event": event["event"],
        "ranks": event.get("ranks", []),
        "generation": event.get("generation"),
        "step": event.get("step"),
        "phase": event.get("phase"),
        "at": event["at"],
        "_at": event["at"],
        "resumed_step": None,
        "total_s": None,
    }


def _advance(row: dict[str, Any], event: dict[str, Any]) -> None:
    for stage, names in _STAGES:
        if event["event"] in names:
            row[stage] = round(row.get(stage, 0.0) + event["at"] - row["_at"], 4)
            row["_at"] = event["at"]
    if event["event"] in ("retry_granted", "deadline_passed"):
        row["backoff_s"] = round(row.get("backoff_s", 0.0) + event["at"] - row["_at"], 4)
        row["_at"] = event["at"]
    if event["event"] == "first_step_taken":
        row["resumed_step"] = event["step"]
        row["total_s"] = round(event["at"] - row["at"], 4)
