"""The header of a GGUF file: metadata, and where each tensor lies.

`gguf`'s own reader makes an array of every token and takes seconds, and every worker of every
generation reads the header; the values of tensors are that package's business all the same.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.host.disk_errors import refusal
from trainer.settings import SettingsError

_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_DEPTH_MAX = 8  # of lists in lists in the metadata; the format knows of none that deep
_ELEMENTS_MAX = 1 << 26  # of a list in the metadata; more is damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies, and how; `shape` in the order of numpy, `start` in bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Any]
    places: Mapping[str, Place]


def read_header(path: Path) -> GgufFile:
    """What the file says of itself. Raises `SettingsError` where it is damaged or cut short."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise refusal(f"{path}: cannot be read: {error}", error) from None
    cursor = _Cursor(data.data, str(path))
    if bytes(data[:4]) != b"GGUF":
        raise SettingsError(f"{path}: is no GGUF file (it does not begin with GGUF)")
    cursor.take("I")
    version = cursor.take("I")
    if version not in _VERSIONS:
        raise SettingsError(f"{path}: is GGUF of version {version}; only 2 and 3 are read")
    tensors, keys = cursor.take("Q"), cursor.take("Q")
    metadata = {cursor.text(): cursor.value() for _ in range(keys)}
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise SettingsError(f"{path}: general.alignment = {alignment!r} is damaged")
    start = -(-cursor.at // alignment) * alignment
    places = {
        name: Place(shape=shape, kind=kind, start=start + offset)
        for name, shape, kind, offset in infos
    }
    return GgufFile(path=path, metadata=metadata, places=places)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dimensions = cursor.take("I")
    if not 1 <= dimensions <= 4:
        raise cursor.damaged()
    shape = tuple(cursor.take("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.take("I"), cursor.take("Q")


class _Cursor:
    """Reads the header from front to back."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data, self._where = data, where
        self.at = 0

    def take(self, letter: str) -> Any:
        """A number, little-endian."""
        layout = struct.Struct(f"<{letter}")
        try:
            (value,) = layout.unpack_from(self._data, self.at)
        except struct.error:
            raise self.damaged() from None
        self.at += layout.size
        return value

    def text(self) -> str:
        """A length and so many bytes of UTF-8."""
        end = self.take("Q") + self.at
        if end > len(self._data):
            raise self.damaged()
        try:
            text = str(self._data[self.at : end], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged() from None
        self.at = end
        return text

    def value(self, kind: int | None = None, depth: int = 0) -> Any:
        """A value of the metadata, after its type."""
        kind = self.take("I") if kind is None else kind
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth > _DEPTH_MAX:
            raise self.damaged()
        inner, count = self.take("I"), self.take("Q")
        if count > _ELEMENTS_MAX:
            raise self.damaged()
        if inner in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[inner]}")
            if self.at + layout.size > len(self._data):
                raise self.damaged()
            values = list(layout.unpack_from(self._data, self.at))
            self.at += layout.size
            return values
        return [self.value(inner, depth + 1) for _ in range(count)]

    def damaged(self) -> SettingsError:
        """The error that says so."""
        return SettingsError(
            f"{self._where}: is cut short or damaged at byte {self.at} of its header; fetch it anew"
        )
