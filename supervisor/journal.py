"""The journal: every decision as one line on disk, before anything acts on it.

A line is JSON with a sequence number, the daemon's epoch, a kind and a checksum. The journal does
not decide and does not act; it can be read by anything that reads JSON lines.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from supervisor.errors import DiskError

JOURNAL_FILE = "journal.jsonl"
SCHEMA = 1
KINDS = ("header", "move", "action", "job")

Record = dict[str, Any]


class JournalDamaged(DiskError):
    """A line that is not what was written; the text names file, line and what is wrong."""


def encode(record: Record) -> bytes:
    """One line: the record with the CRC-32 of its JSON text under `crc`."""
    text = _dump(record)
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def decode(line: bytes) -> Record:
    """The record of a line; raises ValueError with what is wrong."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict) or "crc" not in record:
        raise ValueError("not a line of a journal: it has no checksum")
    crc = record.pop("crc")
    if crc != f"{zlib.crc32(_dump(record).encode()):08x}":
        raise ValueError("the checksum does not match")
    if record.get("kind") not in KINDS:
        raise ValueError(f"unknown kind {record.get('kind')!r}")
    return record


def _dump(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=True)


def read_journal(path: Path) -> Iterator[Record]:
    """The records in order; a torn last line is left out, as `Journal` would truncate it.

    Raises JournalDamaged naming the line for damage anywhere else, a gap in the sequence, a
    foreign file or a future schema, and DiskError if there is no such file.
    """
    try:
        with path.open("rb") as file:
            for number, record, _ in _scan(path, file):
                _check_schema(path, number, record)
                yield record
    except FileNotFoundError:
        raise DiskError(f"{path} does not exist: no daemon has run here") from None
    except OSError as error:
        raise DiskError(f"{path} cannot be read: {error.strerror}") from error


def _check_schema(path: Path, number: int, record: Record) -> None:
    if number == 1 and record["kind"] != "header":
        raise JournalDamaged(f"{path}, line 1: a journal begins with a header")
    if record["kind"] == "header" and record.get("schema") != SCHEMA:
        raise JournalDamaged(
            f"{path}, line {number}: schema {record.get('schema')!r}; this version reads {SCHEMA}"
        )


def _scan(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Record, int]]:
    """(line number, record, offset of its end); stops before a torn last line."""
    offset, expected = 0, None
    torn: str | None = None
    for number, line in enumerate(lines, start=1):
        if torn is not None:
            raise JournalDamaged(f"{path}, line {number - 1}: {torn}")
        try:
            record = decode(line)
        except ValueError as error:
            torn = str(error)
            if line.endswith(b"\n"):
                # Whole lines are written at once, so this is no torn tail.
                raise JournalDamaged(f"{path}, line {number}: {torn}") from None
            continue
        if not line.endswith(b"\n"):
            return
        if expected is not None and record.get("seq") != expected:
            raise JournalDamaged(
                f"{path}, line {number}: sequence number {record.get('seq')!r}, not {expected}"
            )
        expected = record["seq"] + 1
        offset += len(line)
        yield number, record, offset


class Journal:
    """The daemon's hand on the journal. Opening truncates a torn last line and says so.

    `truncated` is the number of bytes that were cut off. Raises DiskError or JournalDamaged.
    """

    def __init__(self, path: Path, *, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self.records: list[Record] = []
        self.truncated = 0
        self._seq = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DiskError(f"{path} cannot be opened: {error.strerror}") from error
        self._end = self._recover()

    def _recover(self) -> int:
        end = 0
        with self.path.open("rb") as file:
            for number, record, offset in _scan(self.path, file):
                _check_schema(self.path, number, record)
                # Of earlier runs only the last segment can matter.
                if record["kind"] == "header":
                    self.records = []
                self.records.append(record)
                self._seq, end = record["seq"], offset
        size = os.fstat(self._descriptor).st_size
        if size > end:
            self.truncated = size - end
            os.ftruncate(self._descriptor, end)
        return end

    def append(self, records: Iterable[Record], *, durable: bool = True) -> None:
        """Write the records as one block; with `durable`, return only when the disk has them.

        Raises DiskError, with the file as long as before: nothing half-written stays behind.
        """
        lines, seq = [], self._seq
        for record in records:
            seq += 1
            lines.append(encode({"seq": seq, "epoch": self.epoch, **record}))
        block = b"".join(lines)
        try:
            written = os.pwrite(self._descriptor, block, self._end)
            if written != len(block):
                raise OSError(28, "the disk is full")
            if durable:
                os.fdatasync(self._descriptor)
        except OSError as error:
            self._cut()
            raise DiskError(f"{self.path} cannot be written: {error.strerror}") from error
        self._seq, self._end = seq, self._end + len(block)

    def _cut(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError:
            return  # The next append writes over it, and a start truncates it.

    def close(self) -> None:
        """Harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
