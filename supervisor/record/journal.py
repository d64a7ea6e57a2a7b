"""The journal: every decision as one line on disk, before anything acts on it.

A line is JSON with a sequence number, the daemon's epoch, a kind and a checksum. A long journal
rolls over: the file becomes journal.N.jsonl, and a new one begins with all that the next daemon
needs. Nothing is decided here; it can be read by anything that reads JSON lines.
"""

import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from supervisor.errors import DiskError
from trainer.host.atomic_write import flush

JOURNAL_FILE = "journal.jsonl"
SCHEMA = 1
KINDS = ("header", "move", "action", "job")
ROLL_BYTES = 8 << 20  # some ten thousand lines
ARCHIVES_KEPT = 8

Record = dict[str, Any]


_NEWER = "use the version of everstep that wrote it"
_MEND = (
    "put an intact copy in its place, or move it away: the job then goes on from its newest "
    "checkpoint, with a journal of its own"
)


class JournalDamaged(DiskError):
    """A line that is not what was written; the text names file, line, what is wrong, what to do."""

    def __init__(self, path: Path, line: int, wrong: str, remedy: str = _MEND) -> None:
        super().__init__(f"{path}, line {line}: {wrong}; nothing was done with it: {remedy}")


def encode(record: Record) -> bytes:
    """One line: the record with the CRC-32 of its JSON text under `crc`."""
    text = _dump(record)
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def decode(line: bytes) -> Record:
    """The record of a line; raises ValueError with what is wrong."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
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


def read_history(path: Path, *, after: int = 0) -> Iterator[Record]:
    """What `read_journal` reads, and before it what has rolled over and is still kept.

    `after` leaves out what has a sequence number up to it. Raises what `read_journal` raises.
    """
    records = read_journal(path)
    first = next(records, None)
    if first is None:
        return
    if first["seq"] > after + 1:
        for number, archive in archives(path):
            # One that a roll-over left when it died has the number of the file that still counts.
            if number < first.get("part", 1):
                yield from (record for record in read_journal(archive) if record["seq"] > after)
    for record in (first, *records):
        if record["seq"] > after:
            yield record


def last_segment(path: Path) -> list[Record]:
    """The records of the last run, its header first; empty where there is none."""
    segment: list[Record] = []
    for record in read_journal(path):
        if record["kind"] == "header":
            segment = []
        segment.append(record)
    return segment


def archives(path: Path) -> list[tuple[int, Path]]:
    """The files that rolled over, with their numbers, the oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}\.([1-9]\d*){re.escape(path.suffix)}")
    found = ((name.fullmatch(one.name), one) for one in path.parent.iterdir())
    return sorted((int(match[1]), one) for match, one in found if match)


def _check_schema(path: Path, number: int, record: Record) -> None:
    if number == 1 and record["kind"] != "header":
        raise JournalDamaged(path, 1, "a journal begins with a header")
    if record["kind"] == "header" and record.get("schema") != SCHEMA:
        wrong = f"schema {record.get('schema')!r}; this version reads {SCHEMA}"
        raise JournalDamaged(path, number, wrong, _NEWER)


def _scan(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Record, int]]:
    """(line number, record, offset of its end); stops before a torn last line."""
    offset, expected = 0, None
    torn: str | None = None
    for number, line in enumerate(lines, start=1):
        if torn is not None:
            raise JournalDamaged(path, number - 1, torn)
        try:
            record = decode(line)
        except ValueError as error:
            torn = str(error)
            if line.endswith(b"\n"):
                # Whole lines are written at once, so this is no torn tail.
                raise JournalDamaged(path, number, torn) from None
            continue
        if not line.endswith(b"\n"):
            return
        if expected is not None and record.get("seq") != expected:
            wrong = f"sequence number {record.get('seq')!r}, not {expected}"
            raise JournalDamaged(path, number, wrong)
        expected = record["seq"] + 1
        offset += len(line)
        yield number, record, offset


class Journal:
    """The daemon's hand on the journal. Opening leaves out a torn last line, and says so.

    `truncated` is the number of bytes that were left out, `records` the last segment, `part` the
    number that the file will have when it rolls over. Raises DiskError or JournalDamaged.
    """

    def __init__(self, path: Path, *, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self.records: list[Record] = []
        self.truncated = 0
        self.part = 1
        self._seq = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = self._recover(path.read_bytes() if path.exists() else b"")
            # A file of our own under the old name: should the daemon before us live on somewhere,
            # what it writes goes to a file that nobody reads.
            self._descriptor = _write_file(path, text)
        except OSError as error:
            raise DiskError(f"{path} cannot be opened: {error.strerror}") from error
        self._end = len(text)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._end

    def _recover(self, text: bytes) -> bytes:
        end = 0
        for number, record, offset in _scan(self.path, io.BytesIO(text)):
            _check_schema(self.path, number, record)
            if number == 1:
                self.part = record.get("part", 1)
            # Of earlier runs only the last segment can matter.
            if record["kind"] == "header":
                self.records = []
            self.records.append(record)
            self._seq, end = record["seq"], offset
        self.truncated = len(text) - end
        return text[:end]

    def roll(self, header: Record, job: Record) -> None:
        """Begin a new file with these two records; the old one stays as journal.N.jsonl.

        May die after any step. Raises DiskError with everything as it was: also where the file is
        another's by now, which must not be replaced.
        """
        following = {**header, "part": self.part + 1}
        records = [following, job]
        block = b"".join(
            encode({"seq": self._seq + number, "epoch": self.epoch, **record})
            for number, record in enumerate(records, start=1)
        )
        try:
            if os.fstat(self._descriptor).st_ino != self.path.stat().st_ino:
                raise OSError(116, "it is another daemon's by now")
            whole = os.pread(self._descriptor, self._end, 0)
            os.close(_write_file(_archive(self.path, self.part), whole))
            descriptor = _write_file(self.path, block)
        except OSError as error:
            raise DiskError(f"{self.path} cannot roll over: {error.strerror}") from error
        os.close(self._descriptor)
        self._descriptor, self._end = descriptor, len(block)
        self._seq, self.part = self._seq + len(records), self.part + 1
        for number, old in archives(self.path):
            if number < self.part - ARCHIVES_KEPT:
                old.unlink(missing_ok=True)

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


def _archive(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _write_file(path: Path, text: bytes) -> int:
    """A file that is there whole or not at all, by a rename; its descriptor."""
    temporary = path.with_name(f"{path.name}.new")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if os.pwrite(descriptor, text, 0) != len(text):
            raise OSError(28, "the disk is full")
        os.fsync(descriptor)
        temporary.replace(path)
        flush(path.parent)  # the rename itself
    except BaseException:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return descriptor
