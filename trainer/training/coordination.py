"""Where ranks of a generation leave word for one another: JAX's coordination service.

It lives as long as the generation, and is no collective: that is just what may hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Board(Protocol):
    """What each rank wrote last."""

    def write(self, rank: int, text: str) -> None:
        """Replaces what this rank wrote before."""

    def read(self) -> Mapping[int, str]:
        """By rank; of those that have written."""


class Coordination:
    """The board of this generation for one `subject`. Needs a world of more than one."""

    def __init__(self, subject: str) -> None:
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._prefix = f"everstep/{subject}/"

    def write(self, rank: int, text: str) -> None:
        """See `Board.write`."""
        self._client.key_value_set(f"{self._prefix}{rank}", text, allow_overwrite=True)

    def read(self) -> Mapping[int, str]:
        """See `Board.read`."""
        found: Sequence[tuple[str, str]] = self._client.key_value_dir_get(self._prefix)
        return {int(name.rpartition("/")[2]): text for name, text in found}
