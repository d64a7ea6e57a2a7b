"""Parameters as lazy views of tensors in files: only the slice that is asked for is read.

What a tensor must be called and how it must look is checked here, whatever the format of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.config import MATRICES
from trainer.language.architecture import STACKED, Architecture
from trainer.settings import SettingsError

Floats = NDArray[np.float32]

_SHOWN = 6  # mistakes of one kind that are told one by one

_TRANSPOSED = frozenset({*MATRICES, "head"})
"""Files hold these as `[out, in]`, the model as `[in, out]`."""


class Tensor(Protocol):
    """One tensor of a file."""

    @property
    def where(self) -> str:
        """The file it lies in."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file has it: `[out, in]` or `[length]`."""

    @property
    def problem(self) -> str | None:
        """Why its values cannot be used, if so: a type that is not known."""

    def read(self, index: tuple[slice, ...]) -> Floats:
        """A slice of it, as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A parameter of the model: one tensor, or those of all blocks stacked.

    Has `shape` and `dtype`, and gives numpy where it is indexed by a tuple of slices.
    """

    tensors: tuple[Tensor, ...]
    stacked: bool
    transposed: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what is read, whatever the file holds."""
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it."""
        inner = self.tensors[0].shape
        inner = inner[::-1] if self.transposed else inner
        return (len(self.tensors), *inner) if self.stacked else inner

    def __getitem__(self, index: tuple[slice, ...]) -> Floats:
        if not self.stacked:
            return self._one(self.tensors[0], index)
        chosen = self.tensors[index[0]]
        shape = [
            len(range(*one.indices(length))) for one, length in zip(index, self.shape, strict=True)
        ]
        found = np.empty(shape, np.float32)
        for place, tensor in enumerate(chosen):
            found[place] = self._one(tensor, index[1:])
        return found

    def _one(self, tensor: Tensor, index: tuple[slice, ...]) -> Floats:
        if self.transposed:
            return np.ascontiguousarray(tensor.read(index[::-1]).T)
        return tensor.read(index)

    def whole(self) -> Floats:
        """All of it."""
        return self[tuple(slice(0, length) for length in self.shape)]


def names_of(architecture: Architecture, patterns: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of the tensors of each parameter, block by block."""
    return {
        name: [patterns[name].format(block) for block in range(architecture.layers)]
        if name in STACKED
        else [patterns[name]]
        for name in architecture.shapes
    }


def check_blocks(architecture: Architecture, tensors: int, where: str) -> None:
    """Before a name is made for each tensor of each block. Raises `SettingsError`."""
    if architecture.layers > tensors:
        raise SettingsError(
            f"{where}: the settings of the model say {architecture.layers} blocks, but only "
            f"{tensors} tensors are there in all; the files are of different models"
        )


def gather(
    architecture: Architecture,
    patterns: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    ignored: Iterable[str] = (),
) -> dict[str, Value]:
    """A value for each parameter.

    Raises `SettingsError` that tells all that is missing, superfluous, of another shape or of a
    type that cannot be read. `ignored` are ends of names that mean nothing to the model.
    """
    check_blocks(architecture, len(tensors), where)
    wanted = names_of(architecture, patterns)
    flat = [name for names in wanted.values() for name in names]
    problems = _told(
        f"{where}: tensor {{}} is missing; the files are incomplete or of another model",
        sorted(set(flat) - set(tensors)),
    )
    ends = tuple(ignored)
    extra = sorted(name for name in set(tensors) - set(flat) if not name.endswith(ends or ("\0",)))
    problems += _told(
        f"{where}: tensor {{}} has no place in the model; it is of an architecture that is not "
        "supported, or the settings beside it are of another model",
        extra,
    )
    values: dict[str, Value] = {}
    for name, parts in wanted.items():
        found = [tensors[part] for part in parts if part in tensors]
        value = Value(tensors=tuple(found), stacked=name in STACKED, transposed=name in _TRANSPOSED)
        values[name] = value
        shape = architecture.shapes[name]
        inner = shape[1:] if value.stacked else shape
        inner = inner[::-1] if value.transposed else inner
        problems += _looks(parts, tensors, inner)
    if problems:
        raise SettingsError(*problems)
    return values


def _looks(
    parts: Sequence[str], tensors: Mapping[str, Tensor], shape: tuple[int, ...]
) -> list[str]:
    problems = []
    for part in parts:
        tensor = tensors.get(part)
        if tensor is None:
            continue
        if tensor.shape != shape:
            problems.append(
                f"{tensor.where}: tensor {part} has the shape {list(tensor.shape)}, the model "
                f"needs {list(shape)}; the files are of different models"
            )
        elif tensor.problem is not None:
            problems.append(f"{tensor.where}: tensor {part} {tensor.problem}")
    return problems[:_SHOWN]


def _told(text: str, names: Sequence[str]) -> list[str]:
    told = [text.format(name) for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        told[-1] += f" (and {len(names) - _SHOWN} more)"
    return told
