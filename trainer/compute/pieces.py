"""Parts of arrays by their place in the whole: what one process holds of a sharded state.

Snapshots and checkpoints keep pieces, and put the pieces together that another mesh needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = tuple[tuple[int, int], ...]
"""Start and stop by axis."""

Read = Callable[[str, Index], NDArray[Any]]
"""Values of a leaf, by its name, at a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Values `[stop - start by axis]` of the leaf `name`, whose whole has `shape`."""

    name: str
    shape: tuple[int, ...]
    index: Index
    values: Any

    @property
    def key(self) -> str:
        """Unique among the pieces of one process; the leaf's own name if it is whole."""
        if self.index == whole(self.shape):
            return self.name
        return f"{self.name}@{'_'.join(f'{start}-{stop}' for start, stop in self.index)}"

    @property
    def form(self) -> str:
        """Dtype and shape of the whole: "float32[2,3]"."""
        return form(self.values.dtype, self.shape)


class NotHeld(Exception):
    """No piece holds what is asked for; the text names leaf and place."""


class Assembly:
    """Leaves put together out of pieces."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def read(self, name: str, index: Index) -> NDArray[Any]:
        """The values at this place, without a copy where one piece holds them all.

        Raises `NotHeld`.
        """
        for piece in self._pieces.get(name, ()):
            if _overlap(piece.index, index) == index:
                return np.asarray(piece.values)[_slices(index, piece.index)]
        return self._gather(name, index)

    def leaves(self) -> Iterator[Piece]:
        """Each leaf in whole. Raises `NotHeld`."""
        for name, pieces in self._pieces.items():
            shape = pieces[0].shape
            values = self.read(name, whole(shape))
            yield Piece(name=name, shape=shape, index=whole(shape), values=values)

    def _gather(self, name: str, index: Index) -> NDArray[Any]:
        held = self._pieces.get(name, [])
        if not held:
            raise NotHeld(f"leaf {name} is missing")
        values = np.empty(extent(index), held[0].values.dtype)
        there = np.zeros(values.shape, bool)
        for piece in held:
            common = _overlap(piece.index, index)
            if common is not None:
                place = _slices(common, index)
                values[place] = np.asarray(piece.values)[_slices(common, piece.index)]
                there[place] = True
        if not there.all():
            raise NotHeld(f"leaf {name} is not held in whole at {index}")
        return values


def whole(shape: Sequence[int]) -> Index:
    """The place of all of an array."""
    return tuple((0, int(length)) for length in shape)


def extent(index: Index) -> tuple[int, ...]:
    """The shape of what lies at a place."""
    return tuple(stop - start for start, stop in index)


def index_of(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """A place as start and stop, from slices that may leave both out."""
    return tuple(
        (0 if one.start is None else int(one.start), length if one.stop is None else int(one.stop))
        for one, length in zip(slices, shape, strict=True)
    )


def as_bytes(values: Any) -> memoryview:
    """The bytes of an array, flat, as a view where its memory is contiguous.

    Hashing it lets other threads run; `tobytes` would copy it and hold the interpreter meanwhile.
    """
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def form(dtype: Any, shape: Sequence[int]) -> str:
    """Dtype and shape as text: "float32[2,3]"."""
    return f"{np.dtype(dtype).name}[{','.join(str(length) for length in shape)}]"


def parse_form(text: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape out of what `form` made; raises `ValueError` or `TypeError`."""
    kind, _, shape = text.partition("[")
    return np.dtype(kind), tuple(int(one) for one in shape.rstrip("]").split(",") if one)


Wanted = Mapping[str, tuple[Index, ...]]
"""Places by the name of the leaf."""


def holds_all(held: Iterable[tuple[str, Index]], wanted: Wanted) -> bool:
    """Whether each place that is wanted lies within a single one of those held."""
    places: dict[str, list[Index]] = {}
    for name, index in held:
        places.setdefault(name, []).append(index)
    return all(
        any(_overlap(one, index) == index for one in places.get(name, ()))
        for name, indexes in wanted.items()
        for index in indexes
    )


def is_needed(name: str, index: Index, wanted: Wanted | None) -> bool:
    """Whether a piece has anything of what is wanted (None: all is)."""
    return wanted is None or any(_overlap(index, one) is not None for one in wanted.get(name, ()))


def check_forms(found: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """What is wrong with the first leaf that is not of the form wanted, by name."""
    for name in sorted(set(found) | set(wanted)):
        if found.get(name) != wanted.get(name):
            return (
                f"leaf {name} is {found.get(name, 'missing')} in it, "
                f"{wanted.get(name, 'missing')} in the state"
            )
    return None


def _overlap(first: Index, second: Index) -> Index | None:
    if first == second:
        return first
    common = tuple(
        (max(one[0], other[0]), min(one[1], other[1]))
        for one, other in zip(first, second, strict=True)
    )
    return None if any(start >= stop for start, stop in common) else common


def _slices(index: Index, within: Index) -> tuple[slice, ...]:
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(index, within, strict=True)
    )
