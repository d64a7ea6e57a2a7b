"""The rows of a Ray Dataset as Parquet files: executed once, read by every later start.

This side knows no Ray: a process of its own (`trainer.ray_source`) executes, and is not started
where the files are there.
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

from trainer.data.store import locked, new_directory
from trainer.settings import SettingsError

MARK = "parts.json"
"""Written last: names the parts in order."""

_POLL_S = 0.2
_TAIL_LINES = 12


def executed(
    names: Sequence[str], config_dir: Path, cache: Path, tick: Callable[[], None]
) -> list[Path]:
    """The parts of the datasets that these "module:function" return, in order.

    Raises `SettingsError` with what the function raised.
    """
    return [part for name in names for part in _parts(name, config_dir, cache, tick)]


def folder_of(name: str, config_dir: Path, cache: Path) -> Path:
    """Where the parts of a dataset lie: by its name and the text of its module.

    Data behind an unchanged function may change; to have it executed again, remove the folder.
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
        text = name.encode()
    else:
        text = file.read_bytes()
    digest = hashlib.sha256(name.encode() + b"\n" + text).hexdigest()[:16]
    return cache / f"ray-{digest}"


def _parts(name: str, config_dir: Path, cache: Path, tick: Callable[[], None]) -> list[Path]:
    folder = folder_of(name, config_dir, cache)
    if not (folder / MARK).is_file():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(cache / f"{folder.name}.lock", tick):
            if not (folder / MARK).is_file():
                with new_directory(folder) as draft:
                    _execute(name, config_dir, draft, cache / f"{folder.name}.log", tick)
    return sorted(folder.glob("part-*.parquet"))


def _execute(name: str, config_dir: Path, out: Path, log: Path, tick: Callable[[], None]) -> None:
    command = [sys.executable, "-m", "trainer.ray_source", name, "--out", str(out)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--die-with-parent"],
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
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise SettingsError(
            f'[trainer.data] path = "{name}": could not be executed (status '
            f"{process.returncode}; all of it in {log}):\n{tail}"
        )


def _python_path(config_dir: Path) -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(config_dir), *([given] if given else [])])
