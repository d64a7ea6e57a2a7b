"""The user's own code beside the settings file, collected to be sent to every node of a cluster.

It finds and copies files; the sending is Ray's. What is installed on the nodes is not its concern.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.settings import SettingsError

BYTES_MAX = 32 << 20
ENTRIES_MAX = 20_000
"""Of files and folders looked at: who keeps settings in a home directory shall not wait for it."""

_NEVER = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Python files below `root`, and whatever lies in its packages; `files` are relative."""

    root: Path
    files: tuple[Path, ...]

    def copy_to(self, directory: Path) -> None:
        """Put the same tree into an empty directory; what vanished meanwhile is left out."""
        for file in self.files:
            target = directory / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(self.root / file, target)
            except FileNotFoundError:
                continue


def collect(task: str, config_dir: Path, run_dir: Path) -> Code | None:
    """The code that the task of the settings may import; None where it is not beside them.

    All `.py` files, and every file inside of a package (a folder with `__init__.py`), but for
    hidden folders, virtual environments and `run_dir`. Raises `SettingsError` where it is too much.
    """
    module = task.partition(":")[0].partition(".")[0]
    if ":" not in task or not (
        (config_dir / f"{module}.py").is_file() or (config_dir / module).is_dir()
    ):
        return None
    files = sorted(_find(task, config_dir, run_dir))
    sizes = {file: (config_dir / file).stat().st_size for file in files}
    if (total := sum(sizes.values())) > BYTES_MAX:
        largest = max(files, key=lambda file: sizes[file])
        raise SettingsError(
            f"[trainer] task = {task!r}: the Python files and packages in {config_dir} are sent to "
            f"every node, and have {total / 1e6:.0f} MB, above the limit of {BYTES_MAX / 1e6:.0f}; "
            f"the largest is {largest} ({sizes[largest] / 1e6:.0f} MB). Move the settings and the "
            "code that they need into a folder of their own, or data out of packages"
        )
    return Code(root=config_dir, files=tuple(files))


def _find(task: str, config_dir: Path, run_dir: Path) -> Iterator[Path]:
    seen = 0
    packages: set[Path] = set()
    for name, folders, files in os.walk(config_dir):
        folder = Path(name)
        seen += len(folders) + len(files)
        if seen > ENTRIES_MAX:
            raise SettingsError(
                f"[trainer] task = {task!r}: the code beside the settings is sent to every node, "
                f"and {config_dir} holds more than {ENTRIES_MAX} files; move the settings and the "
                "code that they need into a folder of their own"
            )
        folders[:] = sorted(one for one in folders if _may_hold_code(folder / one, run_dir))
        if folder.parent in packages or "__init__.py" in files:
            packages.add(folder)
        wanted = files if folder in packages else [one for one in files if one.endswith(".py")]
        yield from (
            (folder / one).relative_to(config_dir) for one in wanted if (folder / one).is_file()
        )


def _may_hold_code(folder: Path, run_dir: Path) -> bool:
    return not (
        folder.name.startswith(".")
        or folder.name in _NEVER
        or folder.resolve() in (run_dir, *run_dir.parents)
        or (folder / "pyvenv.cfg").exists()
    )
