"""Whether all ranks train the same code on the same data: digests, compared before compilation.

Nodes that keep their own copies may differ in one file, and training would go on without a word.
Ranks tell each other through `trainer.coordination`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.coordination import Board, Coordination
from trainer.settings import SettingsError

ENDS = "_sha256"
"""Facts of a task whose names end so must be the same on all ranks."""

CODE = "code_sha256"
"""Of the modules of the user's own."""

_POLL_S = 0.05


def compare(
    facts: Mapping[str, Any], board: Board, rank: int, tick: Callable[[], None] = lambda: None
) -> None:
    """Compare this rank's digests with those of rank 0; waits for these, `tick` by `tick`.

    Raises `SettingsError` that names the ranks and the digests.
    """
    ours = {name: value for name, value in facts.items() if name.endswith(ENDS)}
    board.write(rank, json.dumps(ours))
    if rank == 0:
        return
    while 0 not in (found := board.read()):
        tick()
        time.sleep(_POLL_S)
    theirs = json.loads(found[0])
    apart = sorted(
        name for name in {*ours, *theirs} if ours.get(name, "none") != theirs.get(name, "none")
    )
    if apart:
        said = ", ".join(
            f"{name} is {ours.get(name, 'none')} here and {theirs.get(name, 'none')} there"
            for name in apart
        )
        if apart == [CODE]:
            raise SettingsError(
                f"[trainer] task: rank {rank} has other code than rank 0 ({said}); install the "
                "same version of it on all nodes, or put it beside the settings file"
            )
        raise SettingsError(
            f"[trainer.data] path: rank {rank} has other data than rank 0 ({said}); give all nodes "
            "the same files, for example on a file system that they share"
        )


def compare_over_ranks(
    facts: Mapping[str, Any], *, rank: int, world_size: int, tick: Callable[[], None]
) -> None:
    """See `compare`; nothing to do in a world of one."""
    if world_size > 1:
        compare(facts, Coordination("digests"), rank, tick)
