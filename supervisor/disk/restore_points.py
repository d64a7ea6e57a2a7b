"""Which checkpoint a job may start from: read off the disk, set aside when bad, retired when old.

Structure only: what Orbax (0.12.8, COMMIT_FILE mode) leaves of a finished save. Contents are for
the workers to verify by digest. Imports neither orbax nor jax. `checkpoints` itself may be a
symbolic link to another disk, as for the workers; below it no link is followed.

    <run_dir>/<job>/checkpoints/generation-N/STEP    a save, finished or not
                                             STEP/part-K-of-N    of a state in parts: one a rank
                                quarantine/NAME      set aside, with NAME.reason.txt beside it
                                trash/NAME           renamed away, about to be deleted
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.host.atomic_write import flush

KEEP_MIN = 2
QUARANTINED_MAX = 8
"""Older ones are deleted by `prune`: evidence must not fill the disk that saves go to."""

COMMIT_MARKER = "commit_success.txt"  # written last of all
STEP_METADATA = "_CHECKPOINT_METADATA"
ITEMS = ("meta", "state")
ESSENTIAL_FILES = ("meta/metadata", "state/_METADATA", "state/manifest.ocdbt")
META_BYTES_MAX = 64 * 2**20

_GENERATION = re.compile(r"generation-(0|[1-9][0-9]*)")
_PART = re.compile(r"part-(0|[1-9][0-9]*)-of-([1-9][0-9]*)")
_STEP = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """A state that can be loaded: `step` is the number of finished steps."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    generation: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Something under `checkpoints/` that is no restore point, and why.

    `unfinished` says that its save never ended, which is the ordinary trace of a killed worker.
    """

    path: Path
    reason: str
    unfinished: bool = False


class _Flaw(Exception):
    def __init__(self, reason: str, *, unfinished: bool = False) -> None:
        super().__init__(reason)
        self.unfinished = unfinished


def find(run_dir: Path, accepted: Collection[int] | None = None) -> list[RestorePoint]:
    """All restore points, newest first: by step, then by generation.

    `run_dir` is `<run_dir>/<job>`; `accepted` are the generations that the journal made active,
    None for any. Raises OSError where the disk cannot be read: that is not "there are none".
    """
    return survey(run_dir, accepted)[0]


def survey(
    run_dir: Path, accepted: Collection[int] | None = None
) -> tuple[list[RestorePoint], list[Rejected]]:
    """Like `find`, with everything that was passed over and the reason for each."""
    points: list[RestorePoint] = []
    rejected: list[Rejected] = []
    for entry in _entries(run_dir, rejected):
        try:
            point = _examine(entry)
            if accepted is not None and point.generation not in accepted:
                raise _Flaw(f"generation {point.generation} was never active")
        except _Flaw as flaw:
            rejected.append(Rejected(path=entry, reason=str(flaw), unfinished=flaw.unfinished))
        except FileNotFoundError:
            # Retention deletes beside us. What goes is no restore point; the disk is well.
            rejected.append(Rejected(path=entry, reason="it went while it was looked at"))
        else:
            points.append(point)
    points.sort(key=lambda point: (point.step, point.generation), reverse=True)
    return points, rejected


def flaw(run_dir: Path, generation: int, step: int) -> str:
    """Why a checkpoint is no restore point, "" if it is one. Raises OSError."""
    try:
        _examine(run_dir / "checkpoints" / f"generation-{generation}" / str(step))
    except _Flaw as found:
        return str(found)
    except FileNotFoundError:
        return "it is not on the disk any more"
    return ""


def quarantine(point: RestorePoint, reason: str) -> Path:
    """Set a bad one aside, where no search looks, with its reason in a file; returns where.

    Raises OSError; a point that is already gone is a FileNotFoundError.
    """
    return _set_aside(point.path, reason)


def quarantine_above(run_dir: Path, step: int, reason: str) -> list[Path]:
    """Set aside whatever lies above the target of a rollback, finished or not, of any generation.

    For a moment without a living generation: a save that is under way would be torn away.
    """
    doomed = [
        entry
        for entry in _entries(run_dir, [])
        if (claimed := re.match(r"[0-9]+", entry.name)) and int(claimed[0]) > step
    ]
    return [_set_aside(entry, reason) for entry in doomed]


def prune(
    run_dir: Path,
    keep: int,
    verified: Collection[tuple[int, int]],
    spared: Collection[tuple[int, int]] = (),
) -> list[RestorePoint]:
    """Delete what is older than the `keep` newest verified points; returns what went.

    `verified` holds (generation, step) of saves that were read back and found equal; those in
    `spared` stay, however old they are. With fewer
    than `keep` of them on the disk nothing is deleted. Unfinished saves are left alone: one may be
    under way. Raises ValueError for a `keep` below 2, OSError where the disk refuses.
    """
    if keep < KEEP_MIN:
        raise ValueError(f"keep = {keep}: at least {KEEP_MIN} verified checkpoints must stay")
    points = find(run_dir)
    good = [point for point in points if (point.generation, point.step) in verified]
    doomed = [] if len(good) < keep else [p for p in points if p.step < good[keep - 1].step]
    doomed = [point for point in doomed if (point.generation, point.step) not in spared]
    for point in doomed:
        _discard(run_dir, point.path)
    _empty_trash(run_dir)
    _bound_quarantine(run_dir)
    return doomed


def sweep_unfinished(run_dir: Path, live: Collection[int] = ()) -> list[Path]:
    """Delete the remains of saves that never ended and of deletions that were cut short.

    Generations in `live` are left alone. Finished saves that are damaged stay where they are.
    """
    _, rejected = survey(run_dir)
    live_names = {f"generation-{generation}" for generation in live}
    doomed = [
        one.path for one in rejected if one.unfinished and one.path.parent.name not in live_names
    ]
    for path in doomed:
        _discard(run_dir, path)
    _empty_trash(run_dir)
    return doomed


# --- reading --------------------------------------------------------------------------------------


def _entries(run_dir: Path, rejected: list[Rejected]) -> Iterator[Path]:
    """What lies in the directories of the generations; strangers on the way are rejected."""
    root = run_dir / "checkpoints"
    if not os.path.lexists(root):
        return
    # A link whose disk is not mounted raises here: that is not "there are none".
    for directory in sorted(root.iterdir()):
        if directory.name in ("quarantine", "trash"):
            continue
        if not _GENERATION.fullmatch(directory.name):
            rejected.append(Rejected(path=directory, reason="not the directory of a generation"))
        elif _is_directory(directory, rejected):
            yield from sorted(directory.iterdir())


def _is_directory(path: Path, rejected: list[Rejected]) -> bool:
    """Whether it is a directory itself: a symbolic link to one is refused, absence is not told."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        return True
    what = "a symbolic link" if stat.S_ISLNK(mode) else "not a directory"
    rejected.append(Rejected(path=path, reason=f"{what}; checkpoints are never looked for there"))
    return False


def _examine(path: Path) -> RestorePoint:
    """The restore point at `path`; raises `_Flaw` with the first thing that is wrong with it."""
    mode = path.lstat().st_mode
    if ".orbax-checkpoint-tmp" in path.name:
        raise _Flaw("a save that was never finished", unfinished=True)
    if stat.S_ISLNK(mode):
        raise _Flaw("a symbolic link")
    if not stat.S_ISDIR(mode) or not _STEP.fullmatch(path.name):
        raise _Flaw("not a directory named by its step")
    if not _holds(path / COMMIT_MARKER):
        raise _Flaw(f"no {COMMIT_MARKER}: the save was never finished", unfinished=True)
    for folder in _parts(path) or (path,):
        _examine_items(folder, path)
    generation = int(path.parent.name.removeprefix("generation-"))
    return RestorePoint(step=int(path.name), generation=generation, path=path)


def _parts(path: Path) -> list[Path]:
    """The folders of a checkpoint in parts, a rank's each; empty for one that lies in one piece."""
    named = [found for one in path.iterdir() if (found := _PART.fullmatch(one.name))]
    parts = max((int(one[2]) for one in named), default=0)
    there = {int(one[1]) for one in named if int(one[2]) == parts}
    if missing := set(range(parts)) - there:
        raise _Flaw(f"part-{min(missing)}-of-{parts} is missing")
    return [path / f"part-{part}-of-{parts}" for part in range(parts)]


def _examine_items(folder: Path, path: Path) -> None:
    """What Orbax wrote into a folder of the checkpoint at `path`; raises `_Flaw`."""
    found = _load(folder, STEP_METADATA)
    items = found.get("item_handlers")
    missing = [name for name in ITEMS if not isinstance(items, dict) or name not in items]
    if missing:
        raise _Flaw(f"{STEP_METADATA} does not name the item {missing[0]}")
    for name in ITEMS:
        if not stat.S_ISDIR(_mode(folder / name)):
            raise _Flaw(f"the item {name} is missing")
    for name in ESSENTIAL_FILES:
        if not _holds(folder / name):
            raise _Flaw(f"{name} is missing or empty")
    data = folder / "state" / "d"
    if not stat.S_ISDIR(_mode(data)) or not any(data.iterdir()):
        raise _Flaw("state/d holds no data")
    _load(folder, "state/_METADATA")
    said = _load(folder, "meta/metadata")
    generation = int(path.parent.name.removeprefix("generation-"))
    for name, expected in (("step", int(path.name)), ("generation", generation)):
        if said.get(name) != expected:
            raise _Flaw(f"the item meta says {name} {said.get(name)!r}, its path {expected}")


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _holds(path: Path) -> bool:
    """Whether it is a file, itself and not by a link, that is not empty."""
    return stat.S_ISREG(_mode(path)) and path.lstat().st_size > 0


def _load(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(_read_bounded(path / name))
    except FileNotFoundError as error:
        raise _Flaw(f"{name} is missing") from error
    except ValueError as error:
        raise _Flaw(f"{name} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise _Flaw(f"{name} is damaged: no JSON object")
    return found


def _read_bounded(path: Path) -> bytes:
    """A small file; raises ValueError for one that cannot be what it should be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a file")
        data = file.read(META_BYTES_MAX + 1)
    if len(data) > META_BYTES_MAX:
        raise ValueError(f"longer than {META_BYTES_MAX} bytes")
    return data


# --- moving and deleting --------------------------------------------------------------------------


def _set_aside(path: Path, reason: str) -> Path:
    root = _own_directory(path.parent.parent / "quarantine")
    name = _free_name(root, f"{path.parent.name}-{path.name}")
    target = root / name
    path.lstat()
    # The reason first: a thing set aside without one would be a riddle.
    (root / f"{name}.reason.txt").write_text(f"{reason[:10_000]}\n", encoding="utf-8")
    path.rename(target)
    flush(path.parent)
    flush(root)
    return target


def _discard(run_dir: Path, path: Path) -> None:
    """Rename away, to be deleted there: what is half deleted must never look like a checkpoint."""
    trash = _own_directory(run_dir / "checkpoints" / "trash")
    target = trash / _free_name(trash, f"{path.parent.name}-{path.name}")
    path.rename(target)
    flush(path.parent)


def _delete(path: Path) -> None:
    """Delete a tree or a link, never what a link points to."""
    if stat.S_ISDIR(_mode(path)):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _empty_trash(run_dir: Path) -> None:
    trash = run_dir / "checkpoints" / "trash"
    if stat.S_ISDIR(_mode(trash)):
        for left in list(trash.iterdir()):
            _delete(left)


def _bound_quarantine(run_dir: Path) -> None:
    root = run_dir / "checkpoints" / "quarantine"
    if not stat.S_ISDIR(_mode(root)):
        return
    held = [one for one in root.iterdir() if not one.name.endswith(".reason.txt")]
    held.sort(key=lambda one: one.lstat().st_ctime_ns)
    for one in held[:-QUARANTINED_MAX]:
        _delete(one)


def _own_directory(path: Path) -> Path:
    """Make a directory, refusing one that is only a link to somewhere else."""
    path.mkdir(exist_ok=True)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(f"{path} is a symbolic link")
    return path


def _free_name(root: Path, name: str) -> str:
    tried, number = name, 1
    while os.path.lexists(root / tried) or os.path.lexists(root / f"{tried}.reason.txt"):
        number += 1
        tried = f"{name}.{number}"
    return tried
