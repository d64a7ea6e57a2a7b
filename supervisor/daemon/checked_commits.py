"""Reports of workers on their way in: a checkpoint counts once the daemon has seen it itself.

A worker may have written to a disk that only its own node has. The reports of a rank stay in order.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.disk import restore_points

Record = dict[str, Any]

LOOK_LIMIT_S = 5.0
"""For the disk to answer, and for the news of a file to arrive on file systems that are shared."""

URGENT = frozenset({"exit", "raised"})
"""Reports of an end: a recovery waits for them, and never for a disk..."""

EXPLAINED_BY = frozenset({"completed", "saved"})
"""...unless what explains the end is still waiting."""

_PAUSE_S = 0.1


class CheckedCommits:
    """Passes reports on to `forward`; one that reports a commit waits until that was looked at.

    `is_known(generation, step)` says whether a commit has been accepted before: slots repeat their
    reports to a daemon that comes back, and retention may have deleted it since.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_known: Callable[[int, int], bool],
        forward: Callable[[Record], None],
        limit_s: float = LOOK_LIMIT_S,
    ) -> None:
        self._run_dir, self._is_known, self._forward = run_dir, is_known, forward
        self._limit_s = limit_s
        self._waiting: dict[tuple[Any, Any], deque[Record]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, record: Record) -> None:
        """Forward a report, at once unless it, or one before it of its rank, has to be checked."""
        rank = (record.get("generation"), record.get("rank"))
        if rank in self._waiting and not self._may_overtake(record, rank):
            self._waiting[rank].append(record)
        elif rank not in self._waiting and self._is_unchecked(record):
            self._waiting[rank] = deque([record])
            task = asyncio.create_task(self._work(rank))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._forward(record)

    def _may_overtake(self, record: Record, rank: tuple[Any, Any]) -> bool:
        explained = any(waiting["report"] in EXPLAINED_BY for waiting in self._waiting[rank])
        return record["report"] in URGENT and not explained

    async def _work(self, rank: tuple[Any, Any]) -> None:
        records = self._waiting[rank]
        try:
            while records:
                record = records.popleft()
                self._forward(await self._checked(record) if self._is_unchecked(record) else record)
        finally:
            del self._waiting[rank]

    def _is_unchecked(self, record: Record) -> bool:
        if record.get("report") != "checkpoint_committed" or type(record.get("step")) is not int:
            return False
        return not self._is_known(int(record["generation"]), record["step"])

    async def _checked(self, record: Record) -> Record:
        generation, step = int(record["generation"]), record["step"]
        deadline = asyncio.get_running_loop().time() + self._limit_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    why = await asyncio.to_thread(_flaw, self._run_dir, generation, step)
                    if not why:
                        return record
                    await asyncio.sleep(_PAUSE_S)
            except TimeoutError:
                why = f"the disk did not answer within {self._limit_s:g} s"
            if asyncio.get_running_loop().time() >= deadline - _PAUSE_S:
                error = (
                    f"rank {record['rank']} reported a checkpoint that the daemon does not find "
                    f"below {self._run_dir}: {why}"
                )
                return {**record, "report": "checkpoint_failed", "error": error}


def _flaw(run_dir: Path, generation: int, step: int) -> str:
    try:
        return restore_points.flaw(run_dir, generation, step)
    except OSError as error:
        return str(error)
