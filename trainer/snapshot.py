"""Snapshots: the training state in node-local shared memory, where it outlives its process.

The format, and the reading of it; `trainer.snapshot_writer` writes. No jax at import: slot and
daemon list snapshots too. Which one counts is not known here, that is the supervisor's to say.

A rank owns three data buffers. A manifest, published by rename when the copy is complete, names the
buffer, and is removed before that buffer is written again: what is listed is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARED_MEMORY = Path("/dev/shm")
VERSION = 1
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
    """Where the snapshots of a job lie on each node, by its absolute run directory and our uid."""
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()
    return SHARED_MEMORY / f"everstep-{os.getuid()}-{digest[:16]}"


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


def load_leaves(
    directory: Path | str, generation: int, step: int, run: str | None = None
) -> tuple[dict[str, tuple[str, NDArray[np.uint8]]], Meta]:
    """Form and bytes of each leaf, verified, and the meta; tries every replica that is here.

    Raises `SnapshotRejected` that names what is wrong with each.
    """
    directory = Path(directory)
    wrong: list[str] = []
    try:
        check_directory(directory)
    except (OSError, SnapshotError) as error:
        raise SnapshotRejected(directory, str(error)) from error
    for path in sorted(directory.glob(f"g{generation}-s{step}-r*.json")):
        try:
            return _load_part(path, generation, step, run)
        except SnapshotRejected as error:
            wrong.append(f"{path.name}: {error.reason}")
    text = "; ".join(wrong) or f"no snapshot of generation {generation}, step {step} is here"
    raise SnapshotRejected(directory, text)


def load(
    directory: Path | str, generation: int, step: int, target: Any, run: str | None = None
) -> tuple[Any, Meta]:
    """Read a snapshot for a state like `target` (numpy arrays; their values do not matter).

    Every byte is copied and its checksum verified. Raises `SnapshotRejected`.
    """
    import jax

    from trainer.step import named_leaves

    found, meta = load_leaves(directory, generation, step, run)
    wanted = {name: form_of(leaf) for name, leaf in named_leaves(target)}
    for name in sorted(set(wanted) | set(found)):
        form = found[name][0] if name in found else "missing"
        if wanted.get(name, "missing") != form:
            text = f"leaf {name} is {form} in it, {wanted.get(name, 'missing')} in the state"
            raise SnapshotRejected(directory, text)
    leaves = [
        found[name][1].view(leaf.dtype).reshape(leaf.shape) for name, leaf in named_leaves(target)
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), meta


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
    return zlib.crc32(values.data)


def form_of(leaf: Any) -> str:
    return f"{leaf.dtype.name}[{','.join(str(one) for one in leaf.shape)}]"


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


def _load_part(
    path: Path, generation: int, step: int, run: str | None
) -> tuple[dict[str, tuple[str, NDArray[np.uint8]]], Meta]:
    body = _read_manifest(path)
    if (body["generation"], body["step"]) != (generation, step):
        raise SnapshotRejected(path, f"it is of {body['generation']}, step {body['step']}")
    if run is not None and body["run"] != run:
        raise SnapshotRejected(path, f"it belongs to another run, {body['run']}")
    if body["parts"] != 1:
        raise SnapshotRejected(path, f"it is one of {body['parts']} parts")
    data = np.empty(body["bytes"], np.uint8)
    try:
        with (path.parent / Path(body["data"]).name).open("rb", buffering=0) as file:
            if file.readinto(data.data) != len(data):
                raise SnapshotRejected(path, "its data is shorter than written")
        found: dict[str, tuple[str, NDArray[np.uint8]]] = {}
        for leaf in body["leaves"]:
            values = data[leaf["offset"] : leaf["offset"] + leaf["bytes"]]
            if len(values) != leaf["bytes"] or crc32(values) != leaf["crc32"]:
                text = f"leaf {leaf['name']} has another checksum than when written"
                raise SnapshotRejected(path, text)
            found[leaf["name"]] = (leaf["form"], values)
        return found, dict(body["meta"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        text = f"its data cannot be read: {type(error).__name__}: {error}"
        raise SnapshotRejected(path, text) from error
