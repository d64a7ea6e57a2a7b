"""The files of the data cache: one way to write them, one to read them, for all of them.

A file of arrays is a line (the checksum of all that follows it, then a header) and the bytes of
the arrays. Nothing that is read is trusted: not its length, not its types, not its owner.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainer.host.atomic_write import flush
from trainer.host.json_text import parse_json
from trainer.settings import SettingsError

Arrays = Mapping[str, NDArray[Any]]

TYPES = ("|u1", "<u2", "<u4", "<i4", "<i8")
"""The only types of numbers in the cache."""

_CHECKSUM_DIGITS = 8


class CacheDamaged(ValueError):
    """A file is not what was written."""


def owner_only(path: str, flags: int) -> int:
    """For `open`: a file that only its owner may read."""
    return os.open(path, flags, 0o600)


def check_owner(path: Path, found: os.stat_result) -> None:
    """Raise `SettingsError` for what others could have written."""
    if found.st_uid not in (os.getuid(), 0):
        raise SettingsError(
            f"[trainer.data] cache: {path} belongs to the user {found.st_uid}, who could have put "
            "anything there; name a cache of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(
            f"[trainer.data] cache: others than its owner may write to {path}; run chmod -R go-w "
            "on the cache, or name another"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file that nobody else could have written. Raises `SettingsError`, and OSError."""
    with path.open("rb") as opened:
        check_owner(path, os.fstat(opened.fileno()))
        yield opened


def _read(path: Path) -> bytes:
    with _opened(path) as opened:
        return opened.read()


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write one-dimensional arrays, there in whole or not at all. Raises OSError."""
    flat = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = json.dumps([[name, one.dtype.str, len(one)] for name, one in flat.items()]).encode()
    pieces: list[bytes | memoryview] = [b" " + header + b"\n"]
    pieces += [one.view(np.uint8).data for one in flat.values() if len(one)]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    _write(path, [b"%08x" % checksum, *pieces])


def read_arrays(path: Path, **expected: str) -> dict[str, NDArray[Any]]:
    """The arrays of these names and types, not to be written to.

    Raises `CacheDamaged` for anything but what `write_arrays` wrote, and OSError.
    """
    data = _read(path)
    body = memoryview(data)[_CHECKSUM_DIGITS:]
    end = data.find(b"\n")
    if end < 0 or data[:_CHECKSUM_DIGITS] != b"%08x" % zlib.crc32(body):
        raise CacheDamaged(path.name)
    try:
        header = parse_json(data[_CHECKSUM_DIGITS:end])
        found = {name: (kind, size) for name, kind, size in header}
    except (ValueError, TypeError):
        raise CacheDamaged(path.name) from None
    if {name: kind for name, (kind, _) in found.items()} != expected:
        raise CacheDamaged(path.name)
    arrays = {}
    at = end + 1
    for name, (kind, size) in found.items():
        if kind not in TYPES or type(size) is not int or not 0 <= size <= len(data):
            raise CacheDamaged(path.name)
        arrays[name] = np.frombuffer(data, kind, size, at) if size else np.zeros(0, kind)
        at += arrays[name].nbytes
    if at != len(data):
        raise CacheDamaged(path.name)
    return arrays


def map_array(path: Path, kind: str, size: int) -> NDArray[Any]:
    """A file of plain numbers, mapped. Raises `CacheDamaged` where it has another length."""
    if kind not in TYPES:
        raise CacheDamaged(path.name)
    with _opened(path) as opened:
        if os.fstat(opened.fileno()).st_size != size * np.dtype(kind).itemsize:
            raise CacheDamaged(path.name)
        if not size:
            return np.zeros(0, kind)
        # A plain view: slicing a memmap costs more than the row that is cut out.
        return np.memmap(opened, kind, "r", shape=(size,)).view(np.ndarray)


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum, there in whole or not at all. Raises OSError."""
    _write(path, [json.dumps({**table, "checksum": _checksum(table)}, indent=1).encode()])


def read_table(path: Path) -> dict[str, Any]:
    """What `write_table` wrote. Raises `CacheDamaged` for anything else, and OSError."""
    try:
        table = parse_json(_read(path))
    except ValueError as error:
        raise CacheDamaged(f"{path.name}: {error}") from None
    if not isinstance(table, dict) or table.pop("checksum", None) != _checksum(table):
        raise CacheDamaged(path.name)
    return table


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # other ranks write too
    try:
        with open(draft, "wb", opener=owner_only) as opened:
            opened.writelines(pieces)
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(path)
        flush(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def is_count(value: object) -> bool:
    """Whether this can be a number of things in the cache."""
    return type(value) is int and 0 <= value < 1 << 62


def blocks_of(size: int, block: int) -> int:
    """How many blocks so many bytes make."""
    return math.ceil(size / block)


def _checksum(table: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(table, sort_keys=True, default=str).encode()):08x}"
