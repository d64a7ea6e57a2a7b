"""What cannot be written now, since when and why, as workers and the daemon itself tell.

For people to see in `status`; nothing is decided by it.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

ROWS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """`what`: metrics, log, beat, checkpoint, snapshots; `since` in seconds since the epoch."""

    what: str
    generation: int
    rank: int
    since: float
    why: str


class Troubles:
    """Those of the moment."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], Trouble] = {}

    def hear(self, record: dict[str, Any], at: float) -> None:
        """Take in a report of a worker, if it is about a disk."""
        match record["report"]:
            case "disk":
                self._note(record, str(record["what"]), str(record["why"]), at)
            case "checkpoint_failed":
                self._note(record, "checkpoint", str(record["error"]), at)
            case "checkpoint_committed":
                self._note(record, "checkpoint", "", at)

    def rows(self, generations: Collection[int | None]) -> list[dict[str, Any]]:
        """Those of these generations, the oldest first; what others said is over with them."""
        self._open = {key: one for key, one in self._open.items() if key[1] in generations}
        ordered = sorted(self._open.values(), key=lambda one: (one.since, one.rank))
        return [asdict(one) for one in ordered[:ROWS_MAX]]

    def _note(self, record: dict[str, Any], what: str, why: str, at: float) -> None:
        key = (what, int(record["generation"]), int(record["rank"]))
        if not why:
            self._open.pop(key, None)
        elif key not in self._open:
            self._open[key] = Trouble(
                what=what, generation=key[1], rank=key[2], since=at, why=why[:500]
            )
