"""Which files hold the data, and in which format: by their names; what is in them is not judged."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from trainer.config import DataSettings
from trainer.settings import SettingsError

_SKIPPED_OF_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
_MARKS_OF_DATASETS = ("state.json", "dataset_dict.json")
"""What Hugging Face's `save_to_disk` leaves in the folder of a split, and of several splits."""


def format_of(settings: DataSettings, config_dir: str | Path) -> str:
    """The format of the data: the one that is set, else the one that the names tell.

    Raises `SettingsError` where they tell of several.
    """
    if settings.format != "auto":
        return settings.format
    found = {_format_of(Path(config_dir) / Path(one).expanduser()) for one in settings.path}
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
    suffixes = _SUFFIXES.get(kind, settings.suffixes)
    found: list[Path] = []
    for name in paths:
        path = Path(config_dir) / Path(name).expanduser()
        if path.is_file() and kind != "dataset":
            found.append(path)
        elif path.is_dir():
            found += [path] if kind == "dataset" else _of_folder(key, path, suffixes)
        else:
            raise SettingsError(f"[trainer.data] {key}: {path} {_what_is_wrong(path, kind)}")
    return found


def open_file(file: Path) -> BinaryIO:
    """Open for reading; raises `SettingsError` where that is not allowed or there is none."""
    try:
        return file.open("rb")
    except OSError as error:
        raise unreadable(file, "text", error) from None


def size_of(file: Path) -> int:
    """In bytes; raises `SettingsError`."""
    try:
        return file.stat().st_size
    except OSError as error:
        raise unreadable(file, "text", error) from None


def unreadable(file: Path, kind: str, error: object) -> SettingsError:
    """What to say of a file that is not what its name promises."""
    reason = getattr(error, "strerror", None) or str(error)
    return SettingsError(
        f"{file}: cannot be read as {kind}: {reason}; check it, or take it out of "
        "[trainer.data] path"
    )


def _format_of(path: Path) -> str:
    for kind, suffixes in _SUFFIXES.items():
        if path.name.endswith(suffixes):
            return kind
    if not path.is_dir():
        return "text"
    if any((path / mark).is_file() for mark in _MARKS_OF_DATASETS):
        return "dataset"
    kinds = [kind for kind, suffixes in _SUFFIXES.items() if _inside(path, suffixes)]
    return " and ".join(kinds) if kinds else "text"


def _of_folder(key: str, path: Path, suffixes: Sequence[str]) -> list[Path]:
    found = _inside(path, tuple(suffixes))
    if not found:
        raise SettingsError(
            f"[trainer.data] {key}: {path} holds no file that ends in {', '.join(suffixes)}; "
            "name the files, or change suffixes (of text) or format"
        )
    return found


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
    root: Path, suffixes: tuple[str, ...], skipped: frozenset[str] = frozenset()
) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [one for one in folders if one not in skipped and not one.startswith(".")]
        found += [Path(folder) / one for one in names if one.endswith(suffixes)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
