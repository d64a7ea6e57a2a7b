"""The rows of a Ray Dataset as Parquet files: executed once, read by every later start.

This side knows no Ray: a process of its own (`trainer.ray_source`) executes, and is not started
where the files are there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.data.store import DataUnavailable, locked, new_directory
from trainer.settings import SettingsError

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
        if not (folder / MARK).is_file():
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(cache / f"{folder.name}.lock", tick):
                if not (folder / MARK).is_file():
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
    """Compare the parts with their digests; raises `SettingsError` that names a damaged one."""
    for folder in dict.fromkeys(part.parent for part in parts):
        for one in _read_mark(folder):
            with (folder / one["name"]).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != one["sha256"]:
                raise SettingsError(
                    f"{folder / one['name']}: is not what was written; remove the folder "
                    f"{folder.name}, and the next start executes the Ray Dataset anew"
                )


def _read_mark(folder: Path) -> list[dict[str, str]]:
    try:
        parts: list[dict[str, str]] = json.loads((folder / MARK).read_text())["parts"]
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"{folder / MARK}: cannot be read: {error}; remove the folder {folder.name}, and the "
            "next start executes the Ray Dataset anew"
        ) from None
    return parts


def _execute(
    arguments: Sequence[str], config_dir: Path, log: Path, tick: Callable[[], None]
) -> None:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.ray_source", *arguments],
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
