"""Snapshots: the training state in node-local shared memory, where it outlives its process.

The format, and the reading of it; `trainer.state.snapshot_writer` writes. No jax at import: slot
and daemon list snapshots too. Which one counts is not known here, that is the supervisor's to say.

A rank owns three data buffers. A manifest, published by rename when the copy is complete, names the
buffer, and is removed before that buffer is written again: what is listed is whole. Where ranks
hold parts of a state, each publishes its own, and a step counts when all parts of it are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.compute.pieces import (
    Assembly,
    Index,
    NotHeld,
    Piece,
    Wanted,
    check_forms,
    extent,
    form,
    holds_all,
    is_needed,
    parse_form,
    whole,
)
from trainer.host.private_directories import run_name

SHARED_MEMORY = Path("/dev/shm")
VERSION = 2
_MANIFEST_LIMIT = 1 << 24  # bytes
_DIRECTORY = re.compile(r"everstep-(\d+)-[0-9a-f]{16}")
_MANIFEST = re.compile(r"g(\d+)-s(\d+)-r(\d+)\.json")
FILE = re.compile(r"g(\d+)-(?:s\d+-r(\d+)\.json|r(\d+)-b\d\.data)(?:\.tmp)?")

Meta = dict[str, Any]


class SnapshotError(Exception):
    """The directory is not one that we may use, or a snapshot cannot be written."""


class SnapshotRejected(Exception):
    """A snapshot that must not be used: missing, incomplete, or not what was written."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """One published manifest: `step` steps are finished in it.

    The snapshot of a step is whole where one `replica` has all its parts, 0 to `parts` - 1.
    """

    generation: int
    step: int
    rank: int
    replica: int
    part: int
    parts: int
    path: Path


def directory_of(run_dir: Path | str) -> Path:
    """Where the snapshots of a job lie on each node, by its absolute run directory and our uid.

    Part of it is the run's random name: another user cannot make it first.
    """
    return named_directory(run_dir, run_name(Path(run_dir)))


def named_directory(run_dir: Path | str, name: str) -> Path:
    """The same for a name that the run has not been given yet."""
    return SHARED_MEMORY / f"everstep-{os.getuid()}-{_digest(run_dir)[: 16 - len(name)]}{name}"


def directories_of(run_dir: Path | str) -> list[Path]:
    """Those of whatever directory was at this path before."""
    return [
        path
        for path in SHARED_MEMORY.glob(f"everstep-{os.getuid()}-{_digest(run_dir)[:8]}*")
        if _DIRECTORY.fullmatch(path.name)
    ]


def _digest(run_dir: Path | str) -> str:
    return hashlib.sha256(str(run_dir).encode()).hexdigest()


def list_snapshots(directory: Path | str) -> list[SnapshotInfo]:
    """The published manifests, newest step first; by structure, values are not looked at.

    Leaves out what cannot be read, is incomplete, or lies in a directory that is not ours.
    """
    directory = Path(directory)
    found = []
    with contextlib.suppress(OSError, SnapshotError):
        check_directory(directory)
        for path in directory.iterdir():
            if _MANIFEST.fullmatch(path.name):
                with contextlib.suppress(SnapshotRejected):
                    found.append(_info(_read_manifest(path), path))
    return sorted(found, key=lambda info: (-info.step, -info.generation, info.replica, info.part))


def load_pieces(
    directory: Path | str,
    generation: int,
    step: int,
    *,
    forms: Mapping[str, str] | None = None,
    wanted: Wanted | None = None,
    run: str | None = None,
) -> tuple[Assembly, Meta]:
    """What is wanted of each leaf (None: all), verified, and the meta.

    Tries every rank that holds it all, then every replica with all its parts. Every byte that is
    used is copied and its checksum verified. Raises `SnapshotRejected` that names what is wrong
    with each.
    """
    directory = Path(directory)
    wrong: list[str] = []
    try:
        check_directory(directory)
    except (OSError, SnapshotError) as error:
        raise SnapshotRejected(directory, str(error)) from error
    bodies: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(directory.glob(f"g{generation}-s{step}-r*.json")):
        try:
            body = _read_manifest(path)
            if run is not None and body["run"] != run:
                raise SnapshotRejected(path, f"it belongs to another run, {body['run']}")
            bodies.append((path, body))
        except SnapshotRejected as error:
            wrong.append(f"{path.name}: {error.reason}")
    for chosen in _choices(bodies, wanted):
        try:
            found = {leaf["name"]: leaf["form"] for _, body in chosen for leaf in body["leaves"]}
            if forms is not None and (flaw := check_forms(found, forms)):
                raise SnapshotRejected(chosen[0][0], flaw)
            pieces = [piece for path, body in chosen for piece in _pieces(path, body, wanted)]
            return Assembly(pieces), dict(chosen[0][1]["meta"])
        except SnapshotRejected as error:
            wrong.append(f"{Path(error.path).name}: {error.reason}")
    text = "; ".join(wrong)
    if not wrong and bodies:
        body = bodies[0][1]
        there = sorted({int(one["part"]) for _, one in bodies})
        text = f"of its {body['parts']} parts only {there} are here"
    text = text or f"no snapshot of generation {generation}, step {step} is here"
    raise SnapshotRejected(directory, text)


def load(
    directory: Path | str, generation: int, step: int, target: Any, run: str | None = None
) -> tuple[Any, Meta]:
    """Read all of a snapshot for a state like `target` (numpy arrays; values do not matter).

    Raises `SnapshotRejected`.
    """
    import jax

    from trainer.compute.step import named_leaves

    leaves = dict(named_leaves(target))
    forms = {name: form(leaf.dtype, leaf.shape) for name, leaf in leaves.items()}
    held, meta = load_pieces(directory, generation, step, forms=forms, run=run)
    try:
        values = [held.read(name, whole(leaf.shape)) for name, leaf in leaves.items()]
    except NotHeld as error:
        raise SnapshotRejected(directory, str(error)) from error
    return jax.tree.unflatten(jax.tree.structure(target), values), meta


def discard(directory: Path | str, generation: int, step: int) -> None:
    """Make a snapshot unfindable, on this node. Its memory comes back with `sweep`."""
    for path in Path(directory).glob(f"g{generation}-s{step}-r*.json"):
        path.unlink(missing_ok=True)


def sweep(directory: Path | str) -> None:
    """Remove the directory and its memory, if it is there.

    Raises `SnapshotError` where its name, owner, or anything in it is not ours.
    """
    directory = Path(directory)
    named = _DIRECTORY.fullmatch(directory.name)
    if named is None or int(named[1]) != os.getuid():
        raise SnapshotError(f"{directory} is not named as a snapshot directory of this user")
    try:
        check_directory(directory)
    except FileNotFoundError:
        return
    files = list(directory.iterdir())
    if foreign := [file for file in files if not FILE.fullmatch(file.name)]:
        raise SnapshotError(f"{foreign[0]} is no file of ours; {directory} is left alone")
    for file in files:
        file.unlink(missing_ok=True)
    directory.rmdir()


def crc32(values: NDArray[np.uint8]) -> int:
    """Return the checksum of bytes, as a snapshot's header has it."""
    return zlib.crc32(values.data)


def check_directory(directory: Path) -> None:
    """Raises `FileNotFoundError`, or `SnapshotError` where others could have a hand in it."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise SnapshotError(f"{directory} is no directory")
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SnapshotError(f"{directory} is not ours alone (owner {found.st_uid})")


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises `SnapshotRejected` where it is not what was written, or its data is not there."""
    try:
        with path.open("rb") as file:
            line, _, checksum = file.read(_MANIFEST_LIMIT).partition(b"\n")
        if b"%08x\n" % zlib.crc32(line) != checksum:
            raise SnapshotRejected(path, "its manifest has another checksum than when written")
        body = json.loads(line)
        version = body["version"]
        if version != VERSION:
            raise SnapshotRejected(path, f"its manifest has version {version}, not {VERSION}")
        info = _info(body, path)
        if path.name != f"g{info.generation}-s{info.step}-r{info.rank}.json":
            raise SnapshotRejected(path, "its manifest is of another snapshot than its name says")
        size = (path.parent / Path(body["data"]).name).stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"its manifest or data cannot be read: {type(error).__name__}: {error}"
        raise SnapshotRejected(path, text) from error
    if size < body["bytes"]:
        raise SnapshotRejected(path, f"its data has {size} bytes, {body['bytes']} were written")
    return dict(body)


def _info(body: Mapping[str, Any], path: Path) -> SnapshotInfo:
    numbers = ("generation", "step", "rank", "replica", "part", "parts")
    return SnapshotInfo(path=path, **{name: int(body[name]) for name in numbers})


_Chosen = list[tuple[Path, dict[str, Any]]]


def _choices(bodies: _Chosen, wanted: Wanted | None) -> Iterator[_Chosen]:
    """Manifests that together hold what is wanted: one alone, then whole replicas."""
    replicas: dict[int, _Chosen] = {}
    for path, body in bodies:
        replicas.setdefault(int(body["replica"]), []).append((path, body))
        held = ((leaf["name"], _index(leaf)) for leaf in body["leaves"])
        if body["parts"] == 1 or (wanted is not None and holds_all(held, wanted)):
            yield [(path, body)]
    for chosen in replicas.values():
        parts = {int(body["part"]) for _, body in chosen}
        if len(chosen) > 1 and parts == set(range(int(chosen[0][1]["parts"]))):
            yield chosen


def _read_all(file: FileIO, data: NDArray[np.uint8]) -> bool:
    """Fill `data`; False at an early end. One call reads 2 GiB at most (Linux)."""
    rest = data.data
    while rest:
        count = file.readinto(rest)
        if not count:
            return False
        rest = rest[count:]
    return True


def _index(leaf: Mapping[str, Any]) -> Index:
    return tuple((int(start), int(stop)) for start, stop in leaf["index"])


def _pieces(path: Path, body: Mapping[str, Any], wanted: Wanted | None) -> Iterator[Piece]:
    try:
        with (path.parent / Path(body["data"]).name).open("rb", buffering=0) as file:
            for leaf in body["leaves"]:
                name, index = leaf["name"], _index(leaf)
                if not is_needed(name, index, wanted):
                    continue
                data = np.empty(leaf["bytes"], np.uint8)
                file.seek(leaf["offset"])
                if not _read_all(file, data):
                    raise SnapshotRejected(path, "its data is shorter than written")
                if crc32(data) != leaf["crc32"]:
                    text = f"leaf {name} has another checksum than when written"
                    raise SnapshotRejected(path, text)
                kind, shape = parse_form(leaf["form"])
                values = data.view(kind).reshape(extent(index))
                yield Piece(name=name, shape=shape, index=index, values=values)
    except (OSError, KeyError, TypeError, ValueError) as error:
        text = f"its data cannot be read: {type(error).__name__}: {error}"
        raise SnapshotRejected(path, text) from error
