"""Which files hold the data, and in which format: by their names; what is in them is not judged."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from trainer.config import DataSettings
from trainer.host.disk_errors import reason, refusal
from trainer.settings import SettingsError

log = structlog.get_logger()

EXTRA = "pip install 'everstep[finetune]'"
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a file may raise, a compressed one too."""

_SKIPPED_OF_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
_JSON = (".json",)
"""A file of that name is read as records; in a folder with other data it is about them."""

_COMPRESSED: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_MAGIC: Mapping[bytes, str] = {
    b"\x1f\x8b": "compressed by gzip; let its name end in .gz",
    b"BZh": "compressed by bzip2; let its name end in .bz2",
    b"\xfd7zXZ\x00": "compressed by xz; let its name end in .xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd, which is not read; unpack it",
    b"PK\x03\x04": "a zip archive, which is not read; unpack it",
    b"PAR1": "a Parquet file; let its name end in .parquet",
}
_MARKS_OF_DATASETS = ("state.json", "dataset_dict.json")
"""What Hugging Face's `save_to_disk` leaves in the folder of a split, and of several splits."""


def format_of(settings: DataSettings, config_dir: str | Path) -> str:
    """The format of the data: the one that is set, else the one that the names tell.

    Raises `SettingsError` where they tell of several.
    """
    if settings.format != "auto":
        return settings.format
    found = {
        _format_of(Path(config_dir) / Path(one).expanduser(), settings.suffixes)
        for one in settings.path
    }
    if len(found) > 1:
        raise SettingsError(
            f"[trainer.data] path = {list(settings.path)}: holds {' and '.join(sorted(found))}; "
            "a job reads one format: name files of one, or set format"
        )
    return found.pop() if found else "text"


def find_files(
    settings: DataSettings, kind: str, config_dir: str | Path, *, held_out: bool = False
) -> list[Path]:
    """The files (of `kind` "dataset": the folders) of the data, in a fixed order.

    Relative paths start at `config_dir`; a folder yields what it holds, sorted by name. Raises
    `SettingsError` where there is nothing.
    """
    key, paths = ("held_out_path", settings.held_out_path) if held_out else ("path", settings.path)
    if not paths:
        root = Path(sysconfig.get_path("stdlib"))
        return _inside(root, (".py",), _SKIPPED_OF_STDLIB)
    suffixes = tuple(_SUFFIXES.get(kind, settings.suffixes))
    found: list[Path] = []
    for name in paths:
        path = Path(config_dir) / Path(name).expanduser()
        if path.is_file() and kind != "dataset":
            found.append(path)
        elif path.is_dir():
            found += [path] if kind == "dataset" else _of_folder(key, path, suffixes, kind)
        else:
            raise DataMissing(f"[trainer.data] {key}: {path} {_what_is_wrong(path, kind)}")
    return found


def cache_of(settings: DataSettings, config_dir: Path) -> Path:
    """The folder of the tokenised data."""
    return config_dir / Path(settings.cache).expanduser()


def no_cache(place: object, error: OSError) -> SettingsError:
    """What to raise where the folder of the tokenised data cannot be written."""
    return SettingsError(
        f"[trainer.data] cache: {place} cannot be used: {error.strerror}; "
        "name a folder that can be written, with room for the tokenised data"
    )


def note_of(settings: DataSettings, config_dir: Path, tokenizer: str) -> Path:
    """The file that says which tokenised data these settings led to, with this tokenizer."""
    asked = settings.model_dump(
        mode="json",
        include={
            *("path", "format", "suffixes", "text_key", "bytes_max"),
            *("held_out_fraction", "held_out_path"),
        },
    )
    described = json.dumps([asked, str(config_dir)])
    name = hashlib.sha256(described.encode()).hexdigest()[:32]
    return cache_of(settings, config_dir) / f"{name}-{tokenizer}.latest"


def was_tokenised(settings: DataSettings, config_dir: Path) -> bool:
    """Whether a start with these settings has tokenised their data here, by any tokenizer."""
    pattern = note_of(settings, config_dir, "*")
    return any(pattern.parent.glob(pattern.name))


def plain_name(file: Path) -> str:
    """The name without what says that it is compressed."""
    return file.stem if file.suffix in _COMPRESSED else file.name


def open_file(file: Path) -> BinaryIO:
    """Open for reading, unpacked; raises `SettingsError` where that is not possible."""
    try:
        with file.open("rb") as raw:
            start = raw.read(8)
        unpack = _COMPRESSED.get(file.suffix)
        if unpack is None:
            for magic, what in _MAGIC.items():
                if start.startswith(magic):
                    raise SettingsError(f"{file}: is {what}, or take it out of [trainer.data] path")
            return file.open("rb")
        return BufferedReader(unpack(file))
    except READ_ERRORS as error:
        raise unreadable(file, "text", error) from None


def size_of(file: Path) -> int:
    """In bytes, unpacked; raises `SettingsError`."""
    try:
        if file.suffix not in _COMPRESSED:
            return file.stat().st_size
        size = 0
        with open_file(file) as opened:
            while block := opened.read(1 << 20):
                size += len(block)
        return size
    except READ_ERRORS as error:
        raise unreadable(file, "text", error) from None


class DataMissing(SettingsError):
    """The files are not where the settings say."""


def unreadable(file: Path, kind: str, error: BaseException | str) -> Exception:
    """What to raise for a file that is not what its name promises, or cannot be read now."""
    why = error if isinstance(error, str) else reason(error)
    message = (
        f"{file}: cannot be read as {kind}: {why}; check it, or take it out of [trainer.data] path"
    )
    if isinstance(error, FileNotFoundError):
        return DataMissing(message)
    return SettingsError(message) if isinstance(error, str) else refusal(message, error)


def _format_of(path: Path, suffixes: Sequence[str]) -> str:
    name = plain_name(path)
    for kind, ends in _SUFFIXES.items():
        if name.endswith(ends):
            return kind
    if not path.is_dir():
        return "jsonl" if name.endswith(_JSON) else "text"
    if any((path / mark).is_file() for mark in _MARKS_OF_DATASETS):
        return "dataset"
    kinds = [kind for kind, ends in _SUFFIXES.items() if _inside(path, ends)]
    if not kinds and not _inside(path, tuple(suffixes)) and _inside(path, _JSON):
        return "jsonl"
    return " and ".join(kinds) if kinds else "text"


def _of_folder(key: str, path: Path, suffixes: tuple[str, ...], kind: str) -> list[Path]:
    found = _inside(path, suffixes, warn=True)
    if not found and kind == "jsonl":
        found = _inside(path, _JSON, warn=True)
    if not found:
        raise SettingsError(
            f"[trainer.data] {key}: {path} holds no file that ends in {', '.join(suffixes)}; "
            "name the files, or change suffixes (of text) or format"
        )
    for file in found:
        if _is_special(file):
            raise SettingsError(
                f"{file} is a pipe, a socket or a device; take it out of [trainer.data] {key}"
            )
    return found


def _is_special(file: Path) -> bool:
    """Whether to read it may wait for its writer, or never end."""
    try:
        return not stat.S_ISREG(file.stat().st_mode)
    except OSError:  # whatever reads it says why it cannot
        return False


def _what_is_wrong(path: Path, kind: str) -> str:
    if kind == "dataset" and path.is_file():
        return "is a file; name the folder that save_to_disk has made"
    if ":" in path.name:
        return 'does not exist; if it is a "module:function" of a Ray Dataset, set format = "ray"'
    return (
        "does not exist; name files or folders, or leave path out to train on the sources of "
        "Python's standard library"
    )


def _inside(
    root: Path,
    suffixes: tuple[str, ...],
    skipped: frozenset[str] = frozenset(),
    *,
    warn: bool = False,
) -> list[Path]:
    """The files of these names below a folder, compressed or not; links are followed."""
    found = []
    for folder, names in _folders(root, skipped, warn):
        found += [folder / one for one in names if plain_name(Path(one)).endswith(suffixes)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _folders(root: Path, skipped: frozenset[str], warn: bool) -> Iterator[tuple[Path, list[str]]]:
    """Each folder once, whatever links lead to it, with the names of its files."""
    seen: dict[tuple[int, int], str] = {}

    def is_new(folder: Path) -> bool:
        try:
            found = folder.stat()
        except OSError as error:
            raise unreadable(folder, "a folder of data", error) from None
        first = seen.setdefault((found.st_dev, found.st_ino), str(folder))
        if first != str(folder) and warn:
            log.warning("linked_folder_skipped", folder=str(folder), read_as=first)
        return first == str(folder)

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename or root), "a folder of data", error) from None

    is_new(root)
    for name, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        wanted = sorted(one for one in folders if one not in skipped and not one.startswith("."))
        folders[:] = [one for one in wanted if is_new(Path(name) / one)]
        yield Path(name), files
