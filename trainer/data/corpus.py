"""From the settings to rows of tokenised documents: what is read, held out, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.config import DataSettings
from trainer.data import ray_parts
from trainer.data.cache_files import CacheDamaged, read_table, write_table
from trainer.data.documents import read_records, read_texts, records_of
from trainer.data.encoding import Part
from trainer.data.files import cache_of, find_files, note_of, unreadable
from trainer.data.rows import PackedRows, Packing
from trainer.data.store import DataDamaged, Store, open_or_build, open_store
from trainer.data.tokenizer import BytesTokenizer, Tokenizer
from trainer.settings import SettingsError

_STORE_VERSION = 2
"""Another one where the same files give other tokens."""


def open_rows(
    settings: DataSettings,
    kind: str,
    tokenizer: Tokenizer,
    config_dir: Path,
    *,
    seed: int,
    held_out_batches: int,
    tick: Callable[[], None],
    ray_address: str,
) -> PackedRows:
    """See `trainer.data.source.open_source`; `kind` is the format."""
    cache = cache_of(settings, config_dir)
    if kind == "ray":
        train, held_out = (
            ray_parts.executed(names, config_dir, cache, settings.text_key, tick, ray_address)
            for names in (settings.path, settings.held_out_path)
        )
    else:
        train = find_files(settings, kind, config_dir)
        held_out = (
            find_files(settings, kind, config_dir, held_out=True) if settings.held_out_path else []
        )
    shared = set(train) & set(held_out)
    if shared:
        raise SettingsError(
            f"[trainer.data] held_out_path: {min(shared)} is trained on as well; name other data, "
            "or leave held_out_path out"
        )

    def parts() -> Iterator[Part]:
        if kind == "ray":
            ray_parts.verify([*train, *held_out])
        return _parts(settings, kind, tokenizer, train, held_out)

    key = _key(settings, kind, tokenizer, train, held_out)
    store = open_or_build(cache, key, tokenizer.vocabulary, parts, tick)
    _remember(_note_of(settings, tokenizer, config_dir), {"key": key, "kind": kind})
    return _packed(store, settings, kind, tokenizer, seed, held_out_batches)


def open_remembered(
    settings: DataSettings,
    tokenizer: Tokenizer,
    config_dir: Path,
    *,
    seed: int,
    held_out_batches: int,
) -> PackedRows | None:
    """What the last start with the same settings has tokenised, whatever became of the files.

    None where there is nothing. Raises `SettingsError` for a cache that is somebody else's.
    """
    try:
        note = read_table(_note_of(settings, tokenizer, config_dir))
        key, kind = note["key"], note["kind"]
        if not isinstance(key, str) or Path(key).name != key:
            return None
        store = open_store(cache_of(settings, config_dir) / key)
    except (OSError, CacheDamaged, KeyError, DataDamaged):
        return None
    return _packed(store, settings, str(kind), tokenizer, seed, held_out_batches)


def _note_of(settings: DataSettings, tokenizer: Tokenizer, config_dir: Path) -> Path:
    """Where it says which store these settings led to."""
    ending = hashlib.sha256(f"{_STORE_VERSION} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
    return note_of(settings, config_dir, ending)


def _remember(note: Path, found: Mapping[str, str]) -> None:
    try:
        if read_table(note) == found:
            return
    except (OSError, CacheDamaged):
        pass
    with contextlib.suppress(OSError):  # a cache that is only read will do
        write_table(note, found)


def _packed(
    store: Store,
    settings: DataSettings,
    kind: str,
    tokenizer: Tokenizer,
    seed: int,
    held_out_batches: int,
) -> PackedRows:
    return PackedRows(
        store,
        _packing(settings, kind),
        settings,
        seed=seed,
        held_out_batches=held_out_batches,
        byte_tokens=isinstance(tokenizer, BytesTokenizer),
    )


def _packing(settings: DataSettings, kind: str) -> Packing:
    if settings.packing == "auto":
        return "stream" if kind == "text" else "documents"
    return settings.packing


def _key(
    settings: DataSettings,
    kind: str,
    tokenizer: Tokenizer,
    train: Sequence[Path],
    held_out: Sequence[Path],
) -> str:
    """The same for what gives the same tokens; files are known by name, size and time."""
    described = {
        "version": _STORE_VERSION,
        "kind": kind,
        "tokenizer": tokenizer.fingerprint,
        "text_key": settings.text_key,
        "bytes_max": _bytes_max(settings),
        "held_out_fraction": None if held_out else settings.held_out_fraction,
        "train": [_identity(file) for path in train for file in _inside(path)],
        "held_out": [_identity(file) for path in held_out for file in _inside(path)],
    }
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def _identity(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise unreadable(file, "data", error) from None
    return str(file), found.st_size, found.st_mtime_ns


def _inside(path: Path) -> list[Path]:
    """The file itself, or what a folder of a saved dataset holds."""
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.rglob("*") if one.is_file())


def _bytes_max(settings: DataSettings) -> int | None:
    """Only the standard library is cut short: it stands in for data, and is longer than a demo."""
    return None if settings.path else settings.bytes_max


def _parts(
    settings: DataSettings,
    kind: str,
    tokenizer: Tokenizer,
    train: Sequence[Path],
    held_out: Sequence[Path],
) -> Iterator[Part]:
    def read(files: Sequence[Path], fraction: float) -> Iterator[Part]:
        if kind == "text":
            limit = _bytes_max(settings)
            return read_texts(files, tokenizer, held_out_fraction=fraction, bytes_max=limit)
        records = records_of(kind, files, settings.text_key)
        return hold_out(read_records(records, tokenizer, settings.text_key), fraction)

    yield from read(train, 0.0 if held_out else settings.held_out_fraction)
    for part in read(held_out, 0.0) if held_out else ():
        yield replace(part, held_out=True)


def hold_out(parts: Iterable[Part], fraction: float) -> Iterator[Part]:
    """Mark that fraction of whole documents, spread evenly, as held out; one at the very least."""
    held_out, last = fraction == 0.0, None
    for number, part in enumerate(parts, 1):
        if last is not None:
            yield last
        last = replace(part, held_out=int(number * fraction) > int((number - 1) * fraction))
        held_out = held_out or last.held_out
    if last is not None:
        yield last if held_out else replace(last, held_out=True)
