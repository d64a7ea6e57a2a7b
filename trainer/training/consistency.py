"""Whether all ranks of a free loop do the same: as many steps, and the same metrics in each.

A rank that ends early leaves the others in a collective for ever, and one that reports other
metrics is doing something else. Ranks tell each other through `trainer.training.coordination`.
Costs the loop nothing but an assignment a step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from trainer.task import TaskError
from trainer.training.coordination import Board, Coordination

EVERY_S = 0.5
GRACE_S = 5.0
"""How long a rank may be in a step that others have left for good: it may be about to leave it."""

_MARKED_EARLY, _MARKED_EVERY = (1, 4, 16), 64
"""After which of its steps, counted from its start, a rank says what it has reported so far."""

_MARKS_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a rank reported in one step, and a digest of what it reported up to there."""

    names: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one rank says of itself: `begun` steps so far, `ended` after so many (-1: not yet)."""

    rank: int
    begun: int = 0
    ended: int = -1
    marks: dict[int, Mark] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Account:
        """The opposite of `to_json`."""
        raw = json.loads(text)
        marks = {
            int(index): Mark(names=tuple(one["names"]), digest=one["digest"])
            for index, one in raw.pop("marks").items()
        }
        return cls(**raw, marks=marks)


def complaint(accounts: Iterable[Account]) -> str:
    """What is uneven between ranks, naming them; "" if nothing is."""
    found = sorted(accounts, key=lambda one: one.rank)
    ended = [one for one in found if one.ended >= 0]
    for first in ended:
        apart = [
            one for one in found if one.ended not in (-1, first.ended) or one.begun > first.ended
        ]
        if apart:
            others = ", ".join(
                f"rank {one.rank} {'ended after' if one.ended >= 0 else 'has begun'} "
                f"{one.ended if one.ended >= 0 else one.begun}"
                for one in apart
            )
            return f"rank {first.rank} ended after {first.ended} steps, but {others}"
    for index in sorted({index for one in found for index in one.marks}):
        marked = [one for one in found if index in one.marks]
        for one in marked[1:]:
            ours, theirs = marked[0].marks[index], one.marks[index]
            if ours.names != theirs.names:
                return (
                    f"in step {index} rank {marked[0].rank} reported {_list(ours.names)}, "
                    f"rank {one.rank} {_list(theirs.names)}"
                )
            if ours.digest != theirs.digest:
                return (
                    f"some step up to {index} had other metrics on rank {marked[0].rank} than on "
                    f"rank {one.rank}"
                )
    return ""


class Ledger:
    """The account of one rank, kept by the loop, published and compared by a thread.

    Rank 0 compares all accounts all the time, the others only once they have ended.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        every_s: float = EVERY_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._board, self._rank, self._world_size = board, rank, world_size
        self._every_s, self._grace_s = every_s, grace_s
        self._begun, self._ended, self._steps = 0, -1, 0
        self._digest = hashlib.sha256()
        self._marks: dict[int, Mark] = {}
        self._lock = threading.Lock()
        self._complaint = ""
        self._over = threading.Event()
        threading.Thread(target=self._keep, name="evenness", daemon=True).start()

    def begin(self, index: int) -> None:
        """Step `index` begins."""
        self._begun = index + 1

    def end(self, index: int, names: Iterable[str]) -> None:
        """Step `index` is over, and reported these metrics.

        Raises `TaskError` where a rank was found to do otherwise.
        """
        reported = tuple(sorted(names))
        self._digest.update(f"{index}:{','.join(reported)};".encode())
        self._steps += 1
        if self._steps in _MARKED_EARLY or self._steps % _MARKED_EVERY == 0:
            self._mark(index, reported)
        if self._complaint:
            raise TaskError(f"the ranks do not do the same: {self._complaint}")

    def finish(self, steps: int, tick: Callable[[], None]) -> None:
        """Wait until all ranks have ended, `tick` by `tick`; raises `TaskError` as `end` does."""
        self._mark(steps, ())
        self._begun = self._ended = steps
        patient_until = time.monotonic() + self._grace_s
        while True:
            accounts = self._exchange()
            may_leave = time.monotonic() < patient_until
            judged = [one for one in accounts if one.ended >= 0] if may_leave else accounts
            if found := complaint(judged):
                raise TaskError(f"the ranks do not do the same: {found}")
            if sum(one.ended >= 0 for one in accounts) == self._world_size:
                self._over.set()
                return
            tick()
            time.sleep(min(0.05, self._every_s))

    def _mark(self, index: int, names: tuple[str, ...]) -> None:
        with self._lock:
            kept = list(self._marks.items())[-_MARKS_KEPT + 1 :]
            mark = Mark(names=names, digest=self._digest.hexdigest()[:16])
            self._marks = {**dict(kept), index: mark}

    def _account(self) -> Account:
        with self._lock:
            return Account(
                rank=self._rank, begun=self._begun, ended=self._ended, marks=dict(self._marks)
            )

    def _exchange(self) -> list[Account]:
        """Publish, and read what all have published; empty where nobody can be asked now."""
        with contextlib.suppress(Exception):  # of a peer that is gone JAX itself will tell
            self._board.write(self._rank, self._account().to_json())
            return [Account.from_json(text) for text in self._board.read().values()]
        return []

    def _keep(self) -> None:
        while not self._over.wait(self._every_s):
            if self._rank == 0:
                training = [one for one in self._exchange() if one.ended < 0]
                self._complaint = self._complaint or complaint(training)
                continue
            with contextlib.suppress(Exception):
                self._board.write(self._rank, self._account().to_json())


def open_ledger(rank: int, world_size: int) -> Ledger | None:
    """The ledger of this process; None where it is alone."""
    if world_size == 1:
        return None
    return Ledger(Coordination("steps"), rank, world_size)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
