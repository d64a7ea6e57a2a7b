"""The rows of a Ray Dataset as Parquet files: executed once, read by every later start.

This side knows no Ray: a process of its own (`trainer.data.ray_source`) executes, and is not
started where the files are there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import structlog

from trainer.data.cache_files import CacheDamaged, read_table
from trainer.data.store import locked, new_directory, set_aside
from trainer.host.disk_errors import DataUnavailable
from trainer.settings import SettingsError

log = structlog.get_logger()

MARK = "parts.json"
"""Written last: names the parts in order."""

STATUS_NO_RAY = 75
"""The exit status of the executing process where Ray failed, not the user's function."""

_POLL_S = 0.2
_TAIL_LINES = 12


def executed(
    names: Sequence[str],
    config_dir: Path,
    cache: Path,
    text_key: str,
    tick: Callable[[], None],
    address: str = "local",
) -> list[Path]:
    """The parts of the datasets that these "module:function" return, in order.

    `address`: where to execute what was not yet; "local": on this machine. Raises `SettingsError`
    with what the function raised, `DataUnavailable` where Ray fails or the process is killed.
    """
    found = []
    for name in names:
        folder = folder_of(name, config_dir, cache, text_key)
        if not _is_executed(folder):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(cache / f"{folder.name}.lock", tick):
                if not _is_executed(folder):
                    with new_directory(folder) as draft:
                        options = ["--out", str(draft), "--text-key", text_key]
                        command = [name, *options, "--address", address]
                        _execute(command, config_dir, cache / f"{folder.name}.log", tick)
        found += [folder / one["name"] for one in _read_mark(folder)]
    return found


def folder_of(name: str, config_dir: Path, cache: Path, text_key: str) -> Path:
    """Where the parts of a dataset lie: by its name and the text of its module.

    Data behind an unchanged function may change; to have it executed again, remove the folder.
    Raises `SettingsError` where there is no such module.
    """
    module = name.partition(":")[0]
    file = config_dir / Path(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        found = importlib.util.find_spec(module.partition(".")[0])
        if found is None:
            raise SettingsError(
                f'[trainer.data] path = "{name}": there is no module {module!r} in {config_dir} or '
                "among the installed packages; put it beside the settings file"
            )
        file = Path(found.origin or "")
    text = file.read_bytes() if file.is_file() else b""
    digest = hashlib.sha256(f"{name}\n{text_key}\n".encode() + text).hexdigest()[:16]
    return cache / f"ray-{digest}"


def verify(parts: Sequence[Path]) -> None:
    """Compare the parts with their digests; a damaged one is named by a `DataDamaged`.

    The folder is set aside then, and the next start executes the dataset anew.
    """
    for folder in dict.fromkeys(part.parent for part in parts):
        for one in _read_mark(folder):
            with (folder / one["name"]).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != one["sha256"]:
                raise set_aside(folder, one["name"], folder.stat().st_ino)


def _is_executed(folder: Path) -> bool:
    """Whether the parts are there; a mark that is damaged is none."""
    try:
        return bool(_read_mark(folder))
    except FileNotFoundError:
        return False
    except CacheDamaged as error:
        log.warning("ray_dataset_damaged", folder=str(folder), why=str(error))
        return False


def _read_mark(folder: Path) -> list[dict[str, str]]:
    parts = read_table(folder / MARK).get("parts")
    named = isinstance(parts, list) and all(
        isinstance(one, dict) and isinstance(one.get("sha256"), str) and _is_beside(one.get("name"))
        for one in parts
    )
    if not named:
        raise CacheDamaged(MARK)
    return cast("list[dict[str, str]]", parts)


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _execute(
    arguments: Sequence[str], config_dir: Path, log: Path, tick: Callable[[], None]
) -> None:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.data.ray_source", *arguments],
            cwd=config_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": _python_path(config_dir)},
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode == 0:
        return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    message = (
        f'[trainer.data] path = "{arguments[0]}": the Ray Dataset could not be executed '
        f"(status {process.returncode}; all of it in {log}):\n{tail}"
    )
    if process.returncode == STATUS_NO_RAY or process.returncode < 0:
        raise DataUnavailable(message)
    raise SettingsError(message)


def _python_path(config_dir: Path) -> str:
    """What can be imported here can be imported there."""
    return os.pathsep.join([str(config_dir), *(one for one in sys.path if one)])
