"""Whether all ranks train the same code on the same data: digests, compared before compilation.

Nodes that keep their own copies may differ in one file, and training would go on without a word.
Ranks tell each other through `trainer.training.coordination`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.settings import SettingsError
from trainer.training.coordination import Board, Coordination

ENDS = "_sha256"
"""Facts of a task whose names end so must be the same on all ranks."""

CODE = "code_sha256"
"""Of the modules of the user's own."""

PROGRAM = "program_sha256"
"""Of what a rank traced: all must run the same."""

_POLLS_S = (0.005, 0.05)  # the first pause, the longest; doubled in between


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
    pause_s, longest_s = _POLLS_S
    while 0 not in (found := board.read()):
        tick()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
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
        if apart == [PROGRAM]:
            raise SettingsError(
                f"[trainer] task: rank {rank} has another program than rank 0 ({said}); what the "
                "task reads while it is traced (a file, an environment variable) must be the same "
                "on all nodes"
            )
        raise SettingsError(
            f"[trainer.data] path: rank {rank} has other data than rank 0 ({said}); give all nodes "
            "the same files, for example on a file system that they share"
        )


def compare_over_ranks(
    facts: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    tick: Callable[[], None],
    subject: str = "digests",
) -> None:
    """See `compare`; nothing to do in a world of one. Each `subject` is compared once."""
    if world_size > 1:
        compare(facts, Coordination(subject), rank, tick)
