"""Tokenised data on disk: written once as a whole, mapped into memory by every later start.

A store is a directory that appears by a rename, after everything in it is on the disk. Its files
are checked block by block when a block is first read: a damaged one is set aside and named.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from trainer.data.cache_files import (
    CacheDamaged,
    blocks_of,
    check_owner,
    is_count,
    map_array,
    owner_only,
    read_arrays,
    read_table,
    write_arrays,
    write_table,
)
from trainer.data.encoding import Part
from trainer.data.files import no_cache
from trainer.host.atomic_write import flush
from trainer.host.disk_errors import DataUnavailable, may_pass

log = structlog.get_logger()

BLOCK_BYTES = 1 << 16
"""What one checksum covers: a row costs the reading of one or two of these, the first time."""

_META = "store.json"
_PATIENCE_S = 0.2
_DAMAGED = "damaged-"
_DTYPES = ("|u1", "<u2", "<i4")
"""Of tokens, by the size of the vocabulary."""

Ids = NDArray[Any]


class DataDamaged(DataUnavailable):
    """A store is not what was written. It has been set aside: the next start makes it anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a store holds; `masked`: some tokens do not count. `entropy`: nats, of one token."""

    digest: str
    masked: bool
    train_documents: int
    train_tokens: int
    held_out_documents: int
    held_out_tokens: int
    entropy: float


class Tokens:
    """The documents of one half, train or held out, one after the other.

    `ends` int64 `[documents]`: where each ends. `counts(...)` is uint8, 1 for a token that counts.
    """

    def __init__(self, ids: _Checked, counts: _Checked | None, ends: NDArray[np.int64]) -> None:
        self._ids, self._counts = ids, counts
        self.ends = ends

    def __len__(self) -> int:
        return len(self._ids.values)

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count as targets."""
        return self._counts is not None

    def ids(self, start: int, stop: int) -> Ids:
        """Tokens; raises `DataDamaged`."""
        return self._ids.read(start, stop)

    def counts(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Which tokens count; raises `DataDamaged`."""
        if self._counts is None:
            return np.ones(stop - start, np.uint8)
        return self._counts.read(start, stop)


class _Checked:
    """A mapped file whose blocks are compared with their checksums when they are first read."""

    def __init__(self, store: Path, name: str, dtype: str, size: int) -> None:
        self._store, self._path = store, store / name
        self._inode = store.stat().st_ino
        self.values: Ids = map_array(self._path, dtype, size)
        self._sums: NDArray[np.uint32] = read_arrays(_sums_of(self._path), sums="<u4")["sums"]
        if len(self._sums) != blocks_of(self.values.nbytes, BLOCK_BYTES):
            raise CacheDamaged(_sums_of(self._path).name)
        self._seen = np.zeros(len(self._sums), bool)
        self._of_block = BLOCK_BYTES // self.values.itemsize

    def read(self, start: int, stop: int) -> Ids:
        for block in range(start // self._of_block, -(-stop // self._of_block)):
            if not self._seen[block]:
                self._check(block)
        return self.values[start:stop]

    def _check(self, block: int) -> None:
        first = block * self._of_block
        found = zlib.crc32(self.values[first : first + self._of_block].data)
        if found != self._sums[block]:
            what = f"{self._path.name}, byte {block * BLOCK_BYTES} and after"
            raise set_aside(self._store, what, self._inode)
        self._seen[block] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A finished store, open for reading."""

    path: Path
    facts: Facts
    train: Tokens
    held_out: Tokens


def open_or_build(
    cache: Path,
    key: str,
    vocabulary: int,
    parts: Callable[[], Iterator[Part]],
    tick: Callable[[], None],
) -> Store:
    """The store `key` in the folder `cache`; where it is not there, `parts` are written to it.

    One process of a machine writes, the others wait for it; a writer that dies is followed by the
    next. `tick` is called meanwhile. Raises `SettingsError` where `cache` cannot be written, or
    belongs to somebody else.
    """
    path = cache / key
    try:
        try:
            return open_store(path)
        except FileNotFoundError:
            pass
        except DataDamaged as error:
            log.warning("tokenised data damaged", why=str(error))
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(cache / f"{key}.lock", tick):
            if not (path / _META).is_file():
                with new_directory(path) as draft:
                    _write(draft, vocabulary, parts(), tick)
        return open_store(path)
    except OSError as error:
        if may_pass(error):
            raise  # a disk that stumbles may not at the next try
        raise no_cache(error.filename or path, error) from error


@contextlib.contextmanager
def locked(path: Path, tick: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that the kernel takes back from a process that dies; `tick` while waiting."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tick()
                time.sleep(_PATIENCE_S)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` as a whole if nothing is raised.

    The caller holds a lock: what an earlier writer left behind is removed.
    """
    draft = path.with_name(f"{path.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)  # it lacked its last file, or there would be no draft
    draft.mkdir(mode=0o700, parents=True)
    try:
        yield draft
        for file in draft.iterdir():
            flush(file)
        flush(draft)
        draft.rename(path)
        flush(path.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def set_aside(path: Path, what: str, inode: int) -> DataDamaged:
    """Move a damaged store away, if it still is the one of `inode`; the error to raise."""
    with contextlib.suppress(OSError):  # another rank was first
        if path.stat().st_ino == inode:
            path.rename(path.with_name(f"{path.name}.{_DAMAGED}{inode}"))
    return DataDamaged(
        f"{path}: {what}: is not what was written; it is set aside, and the next start makes it "
        "anew from the files of [trainer.data] path"
    )


class _Half:
    """Writes the tokens of one half."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        with contextlib.ExitStack() as files:
            self._ids, self._counts = (
                files.enter_context(open(folder / f"{name}.{kind}", "wb", opener=owner_only))
                for kind in ("tokens", "counts")
            )
            self._files = files.pop_all()
        self._folder, self._name, self._dtype = folder, name, dtype
        self.ends = array("q")
        self.size = 0
        self.masked = False

    def add(self, part: Part) -> None:
        ids = np.asarray(part.tokens, self._dtype)
        counts = np.ones(len(ids), np.uint8)
        if part.counts is not None:
            counts = np.asarray(part.counts, np.uint8)
            self.masked = self.masked or not counts.all()
        self._ids.write(ids.tobytes())
        self._counts.write(counts.tobytes())
        self.size += len(ids)
        if part.ends:
            self.ends.append(self.size)

    def close(self) -> None:
        """Close the files, whether they are whole or not."""
        self._files.close()

    def finish(self, *, masked: bool) -> None:
        """Close the files, and write what tells whether they are still the same."""
        self.close()
        write_arrays(_ends_of(self._folder, self._name), {"ends": np.asarray(self.ends, "<i8")})
        for kind in ("tokens", "counts"):
            file = self._folder / f"{self._name}.{kind}"
            if kind == "counts" and not masked:
                file.unlink()
                continue
            write_arrays(_sums_of(file), {"sums": np.asarray(list(_sums(file)), "<u4")})


def _write(draft: Path, vocabulary: int, parts: Iterator[Part], tick: Callable[[], None]) -> None:
    dtype = _dtype(vocabulary)
    digest = hashlib.sha256()
    seen = np.zeros(vocabulary, np.int64)
    ticked = time.monotonic()
    with (
        contextlib.closing(_Half(draft, "train", dtype)) as train,
        contextlib.closing(_Half(draft, "held_out", dtype)) as held_out,
    ):
        for part in parts:
            (held_out if part.held_out else train).add(part)
            ids = np.asarray(part.tokens, "<u4")
            kinds, times = np.unique(ids, return_counts=True)
            seen[kinds] += times
            counts = b"" if part.counts is None else np.asarray(part.counts, np.uint8).tobytes()
            digest.update(f"{len(ids)} {len(counts)} {part.held_out} {part.ends}\n".encode())
            digest.update(ids.tobytes())
            digest.update(counts)
            if time.monotonic() - ticked > _PATIENCE_S:
                tick()
                ticked = time.monotonic()
        masked = train.masked or held_out.masked
        for half in (train, held_out):
            half.finish(masked=masked)
    shares = seen[seen > 0] / max(1, seen.sum())
    facts = Facts(
        digest=digest.hexdigest(),
        masked=masked,
        train_documents=len(train.ends),
        train_tokens=train.size,
        held_out_documents=len(held_out.ends),
        held_out_tokens=held_out.size,
        entropy=round(float(-(shares * np.log(shares)).sum()), 9),
    )
    write_table(draft / _META, {"dtype": dtype, **asdict(facts)})


def open_store(path: Path) -> Store:
    """Raises `FileNotFoundError` where there is none, `DataDamaged` where there was one."""
    found = path.stat()
    check_owner(path, found)
    (path / _META).stat()
    try:
        table = read_table(path / _META)
        dtype, facts = table.pop("dtype"), _facts(table)
        train = _half(path, "train", dtype, facts.train_documents, facts.train_tokens, facts)
        held_out = _half(
            path, "held_out", dtype, facts.held_out_documents, facts.held_out_tokens, facts
        )
    except (CacheDamaged, KeyError, FileNotFoundError) as error:
        raise set_aside(path, f"{error}", found.st_ino) from None
    return Store(path=path, facts=facts, train=train, held_out=held_out)


def _facts(table: dict[str, Any]) -> Facts:
    kinds = {"digest": str, "masked": bool, "entropy": float}
    wanted = {one.name: kinds.get(one.name, int) for one in fields(Facts)}
    if {name: type(value) for name, value in table.items()} != wanted:
        raise CacheDamaged(_META)
    if not all(is_count(value) for value in table.values() if type(value) is int):
        raise CacheDamaged(_META)
    return Facts(**table)


def _half(path: Path, name: str, dtype: str, documents: int, size: int, facts: Facts) -> Tokens:
    ends: NDArray[np.int64] = read_arrays(_ends_of(path, name), ends="<i8")["ends"]
    rising = not len(ends) or (ends[0] >= 0 and ends[-1] <= size and (np.diff(ends) >= 0).all())
    if len(ends) != documents or not rising:
        raise CacheDamaged(_ends_of(path, name).name)
    if dtype not in _DTYPES:
        raise CacheDamaged(_META)
    return Tokens(
        _Checked(path, f"{name}.tokens", dtype, size),
        _Checked(path, f"{name}.counts", "|u1", size) if facts.masked else None,
        ends,
    )


def _dtype(vocabulary: int) -> str:
    bytes_, short, wide = _DTYPES
    return bytes_ if vocabulary <= 1 << 8 else short if vocabulary <= 1 << 16 else wide


def _ends_of(folder: Path, half: str) -> Path:
    return folder / f"{half}.ends"


def _sums_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.sums")


def _sums(file: Path) -> Iterable[int]:
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            yield zlib.crc32(block)
