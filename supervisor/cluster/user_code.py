"""The user's code beside the settings file, copied once when a run of the machine opens.

All generations of the run use the copy: what is edited meanwhile counts from the next run. What is
installed is not its concern, and no module is imported.
"""

import filecmp
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.host.atomic_write import flush, flush_tree

BYTES_MAX = 32 << 20
"""Of files in packages that are not Python: larger ones are linked, not copied."""

ENTRIES_MAX = 20_000
"""Files and folders after which no deeper folder is searched: what lies there is linked."""

COPIES_KEPT = 2
_NEVER = frozenset({"__pycache__", "node_modules", "site-packages"})
_OF_A_RUN = ("journal.jsonl", "lock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What lies below `root`: `files` to be copied, `links` to what stays there; relative paths.

    `unsearched` are folders that were not looked into, since there are too many files.
    """

    root: Path
    files: tuple[Path, ...]
    links: tuple[Path, ...]
    unsearched: tuple[Path, ...] = ()

    def copy_to(self, directory: Path) -> None:
        """Put the same tree into an empty directory; what vanished meanwhile is left out."""
        for file in self.files:
            target = directory / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(self.root / file, target)
                target.chmod(target.stat().st_mode & 0o700)  # for its owner only, as all of a run
            except FileNotFoundError:
                continue
        for link in self.links:
            (directory / link).parent.mkdir(parents=True, exist_ok=True)
            (directory / link).symlink_to(self.root / link)


def copy_of(run_dir: Path, run: int) -> Path:
    """Where the code of a run lies."""
    return run_dir / "code" / f"run-{run}"


def open_copy(code: Code, run_dir: Path, run: int, *, keep: bool = False) -> Path:
    """Copy the code for a run, unless that is done; with `keep` the last run's copy is taken over.

    It is there in whole or not at all, and older copies are deleted. Raises OSError.
    """
    target = copy_of(run_dir, run)
    if target.is_dir():
        return target
    draft = target.with_name(f"{target.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    before = _copies(run_dir)
    draft.parent.mkdir(mode=0o700, exist_ok=True)
    if keep and before:
        shutil.copytree(before[-1], draft, symlinks=True)
    else:
        draft.mkdir(mode=0o700)
        code.copy_to(draft)
    flush_tree(draft)
    draft.rename(target)
    flush(target.parent)
    for old in _copies(run_dir)[:-COPIES_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def changed_since(copy: Path, root: Path) -> tuple[str, ...]:
    """The copied files that are not below `root` as they are in the copy; relative, in order."""
    return tuple(
        sorted(str(file) for file in _files(copy) if not _is_same(copy / file, root / file))
    )


def is_beside(task: str, config_dir: Path) -> bool:
    """Whether the task's module lies beside the settings; else it is installed, or ours."""
    module = task.partition(":")[0].partition(".")[0]
    return ":" in task and (
        (config_dir / f"{module}.py").is_file() or (config_dir / module).is_dir()
    )


def find_code(config_dir: Path, run_dir: Path) -> Code:
    """The code beside the settings that a task may import.

    Copied are all `.py` files, and what lies in packages (folders with `__init__.py`), but for
    hidden folders, virtual environments and run directories. Everything else is linked.
    """
    found = _Search(config_dir, run_dir)
    files = [*found.sources, *_small_enough(config_dir, found.package_data)]
    kept = set(files) | {folder for file in files for folder in file.parents}
    links = (
        entry
        for folder, entries in found.entries.items()
        if folder in kept or folder == Path()
        for entry in entries
        if entry not in kept
    )
    return Code(
        root=config_dir,
        files=tuple(sorted(files)),
        links=tuple(sorted(links)),
        unsearched=tuple(sorted(found.unsearched)),
    )


class RunCode:
    """The code of one run: the copy that its workers import, and what was edited since.

    Everything here reads or writes the disk, and belongs in a thread.
    """

    def __init__(self, task: str, config_dir: Path, run_dir: Path, run: int) -> None:
        self._task, self._config_dir = task, config_dir
        self._run_dir, self._run = run_dir, run
        self.directory: Path | None = None
        self.unsearched: tuple[Path, ...] = ()
        self.changed: tuple[str, ...] = ()

    def open(self, *, keep: bool = False) -> None:
        """Copy the code, unless this run has its copy already; see `open_copy`."""
        target = copy_of(self._run_dir, self._run)
        if not target.is_dir():
            if not is_beside(self._task, self._config_dir):
                return
            code = find_code(self._config_dir, self._run_dir)
            open_copy(code, self._run_dir, self._run, keep=keep)
            self.unsearched = code.unsearched
        self.directory = target

    def look(self) -> tuple[str, ...]:
        """Compare the copy with what it was made from; the files that changed since last asked."""
        if self.directory is None:
            return ()
        changed = changed_since(self.directory, self._config_dir)
        news = tuple(file for file in changed if file not in self.changed)
        self.changed = changed
        return news


class _Search:
    """Looks through a folder, the nearest first; all paths are relative to it."""

    def __init__(self, root: Path, run_dir: Path) -> None:
        self.sources: list[Path] = []
        self.package_data: list[Path] = []
        self.entries: dict[Path, list[Path]] = {}  # by folder, but for what is never linked
        self._root, self._run_dir = root, run_dir
        self._seen_folders: set[tuple[int, int]] = set()
        level, seen = [(Path(), False)], 0
        while level and seen <= ENTRIES_MAX:  # each level as a whole: data may lie beside code
            below: list[tuple[Path, bool]] = []
            for folder, in_package in level:
                inside = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
                seen += len(inside)
                is_package = in_package or any(entry.name == "__init__.py" for entry in inside)
                below += ((path, is_package) for path in self._take(folder, inside, is_package))
            level = below
        self.unsearched = [folder for folder, _ in level]

    def _take(
        self, folder: Path, inside: Iterable[os.DirEntry[str]], in_package: bool
    ) -> Iterator[Path]:
        """Sort the entries of a folder; the folders to be searched."""
        entries = self.entries[folder] = []
        for entry in inside:
            path = folder / entry.name
            if entry.is_dir():
                if entry.name == "__pycache__" or self._is_of_a_run(self._root / path):
                    continue
                entries.append(path)
                if self._may_hold_code(entry):
                    yield path
                continue
            entries.append(path)
            if entry.is_file() and entry.name.endswith(".py"):
                self.sources.append(path)
            elif entry.is_file() and in_package:
                self.package_data.append(path)

    def _may_hold_code(self, entry: os.DirEntry[str]) -> bool:
        if entry.name.startswith(".") or entry.name in _NEVER:
            return False
        found = entry.stat()
        identity = (found.st_dev, found.st_ino)
        if identity in self._seen_folders or not os.access(entry.path, os.R_OK | os.X_OK):
            return False
        self._seen_folders.add(identity)
        return not (Path(entry.path) / "pyvenv.cfg").exists()

    def _is_of_a_run(self, folder: Path) -> bool:
        """This job's own, another job's beside it, or what holds them."""
        if folder.resolve() in (self._run_dir, *self._run_dir.parents):
            return True
        return all((folder / name).is_file() for name in _OF_A_RUN)


def _small_enough(root: Path, files: list[Path]) -> Iterator[Path]:
    """The smallest, up to the limit."""
    total = 0
    for size, file in sorted(((root / file).stat().st_size, file) for file in files):
        total += size
        if total > BYTES_MAX:
            return
        yield file


def _copies(run_dir: Path) -> list[Path]:
    """Those that are there in whole, the oldest run first."""
    folder = run_dir / "code"
    found = (
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"run-(\d+)", path.name))
    )
    return [path for _, path in sorted(found)]


def _files(copy: Path) -> Iterator[Path]:
    for name, _, files in os.walk(copy):
        if Path(name).name == "__pycache__":
            continue
        for file in files:
            path = Path(name) / file
            if not path.is_symlink():
                yield path.relative_to(copy)


def _is_same(copied: Path, original: Path) -> bool:
    try:
        return filecmp.cmp(copied, original)  # by size and time first, which the copy has kept
    except OSError:
        return False
