"""Compiled programs on disk, so that later generations neither trace nor compile.

A program is stored under the digest of what was lowered. The first generation of a run of the
machine traces, and notes which program the run has; its later generations load that one. Rank 0
writes, every rank reads. A file is unpickled only if nobody else could have written it and its
digest is right; if anything is wrong with it, the program is traced and compiled.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import stat
import sysconfig
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import structlog

from trainer.compute.step import Layout, Programs, Shapes, lower, named_leaves
from trainer.host.atomic_write import write_whole
from trainer.task import Task

log = structlog.get_logger()

VERSION = 3
KEPT = 8
"""Files that stay in the folder, the newest: world sizes and settings come and go."""
DRAFT_S = 3600.0
"""How old a draft must be to be that of a process that died; writing one takes seconds."""

_HEADER_LIMIT = 1 << 12  # bytes
_TRAINER = Path(__file__).resolve().parents[1]
_VARIABLES = ("JAX_", "XLA_", "NPROC", "LIBTPU_", "TF_", "OMP_", "CUDA_VISIBLE", "NVIDIA_TF32")
_WHERE_ONLY = ("JAX_COORDINATOR_", "CUDA_VISIBLE")  # says where, not what


class ExecutableRejected(Exception):
    """A file that must not be loaded; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The programs to run, the digest of what was lowered, and whether it was traced just now."""

    programs: Programs
    digest: str
    traced: bool


def choose(
    folder: Path,
    task: Task,
    layout: Layout,
    shapes: Shapes,
    described: Mapping[str, Any],
    run: int = 0,
) -> Chosen:
    """The programs for these shapes; `described` is whatever else decides what they compute.

    `run` numbers the run of the machine. Within one, the program that it began with is loaded: it
    is what an undisturbed run would go on with, whatever a trace would give now. Raises only what
    tracing and compiling raise.
    """
    key = key_of(task, layout, shapes, described)
    noted = _read_note(_note_path(folder, key))
    if noted is not None and noted.run == run:
        programs = _load_if_sound(folder, key, noted.program, layout, shapes)
        if programs is not None:
            return Chosen(programs=programs, digest=noted.program, traced=False)
    started = time.monotonic()
    lowered = lower(task, layout, shapes)
    digest = lowered.digest()
    seconds = round(time.monotonic() - started, 3)
    log.info("program traced", program=digest[:12], run=run, seconds=seconds)
    leads = task.context.rank == 0
    if leads and noted != (now := _Note(run=run, program=digest)):
        _write_note(_note_path(folder, key), now)
    programs = _load_if_sound(folder, key, digest, layout, shapes)
    if programs is None:
        programs = lowered.compile()
        if leads:
            path = path_of(folder, key, digest)
            threading.Thread(
                target=_store_or_say, args=(path, programs), name="store", daemon=True
            ).start()
    return Chosen(programs=programs, digest=digest, traced=True)


def path_of(folder: Path, key: str, digest: str) -> Path:
    """Where a program lies: under what it needs, and what it is."""
    return folder / f"{key}.{digest}.bin"


def key_of(task: Task, layout: Layout, shapes: Shapes, described: Mapping[str, Any]) -> str:
    """SHA-256 over all that a compiled program needs beside the program itself.

    Versions (the sources of this package are one), flags, processor, devices, settings, shapes.
    """
    context = task.context
    parts = {
        "version": VERSION,
        "described": described,
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_VARIABLES) and not name.startswith(_WHERE_ONLY)
        },
        "config": {name: str(value) for name, value in jax.config.values.items()},
        "installed": _installed(),
        "sources": _sources(),
        "world_size": context.world_size,
        "mesh": {name: int(size) for name, size in layout.mesh.shape.items()},
        "devices": [int(device.id) for device in layout.mesh.devices.flat],
        "settings": context.settings.model_dump(mode="json"),
        "state": _described(shapes.state),
        "batch": _described(shapes.batch),
        "held_out": None if shapes.held_out is None else _described(shapes.held_out),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def store(path: Path, programs: Programs) -> None:
    """Write the programs, there in whole or not at all, and keep the folder small.

    Raises `OSError`, and what JAX raises for a program that it cannot serialise.
    """
    from jax.experimental import serialize_executable

    compiled: tuple[Any, ...] = (programs.train, programs.evaluate, programs.compare)
    found = [None if one is None else serialize_executable.serialize(one) for one in compiled]
    payload = pickle.dumps(found)
    header = {
        "version": VERSION,
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb", opener=_owner_only) as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)  # a full disk needs the room
        raise
    _forget_old(path.parent)


def load(path: Path, layout: Layout, shapes: Shapes) -> Programs:
    """Read programs that `store` wrote.

    Raises `FileNotFoundError` where there are none and `ExecutableRejected` where they are not fit.
    """
    from jax.experimental import serialize_executable

    payload = _read(path)
    try:
        loaded = [
            None if one is None else serialize_executable.deserialize_and_load(*one)
            for one in pickle.loads(payload)  # noqa: S301 - `_read` accepts files of this user only
        ]
        train, evaluate, compare = loaded
    except Exception as error:  # unpickling and XLA raise whatever they like
        text = f"{path} cannot be loaded: {type(error).__name__}: {str(error)[:500]}"
        raise ExecutableRejected(text) from error
    there = (train is not None, evaluate is not None, compare is not None)
    if train is None or there != (True, shapes.held_out is not None, shapes.compared):
        raise ExecutableRejected(f"{path} holds other programs than the task has")
    return Programs(
        layout=layout,
        state=shapes.state,
        batch_rows=shapes.batch_rows,
        train=train,
        evaluate=evaluate,
        compare=compare,
        guarded=shapes.guarded,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """Which program the run of the machine has that traced last."""

    run: int
    program: str


def _note_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _read_note(path: Path) -> _Note | None:
    try:
        with path.open("rb") as file:
            _require_ours(path, file.fileno())
            noted = json.loads(file.read(_HEADER_LIMIT))
        return _Note(run=int(noted["run"]), program=_digest(noted["program"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ExecutableRejected) as error:
        log.warning("program_note_refused", path=str(path), why=str(error))
        return None


def _write_note(path: Path, note: _Note) -> None:
    """Without it later generations trace too, and are compared by their restore points."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, json.dumps(asdict(note)) + "\n")
    except OSError as error:
        log.warning("program_note_not_written", path=str(path), why=str(error))


def _digest(text: Any) -> str:
    """It becomes part of a path: nothing but a digest may."""
    if not (isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text)):
        raise ValueError(f"{text!r} is not a SHA-256 digest")
    return text


def _load_if_sound(
    folder: Path, key: str, digest: str, layout: Layout, shapes: Shapes
) -> Programs | None:
    started = time.monotonic()
    try:
        programs = load(path_of(folder, key, digest), layout, shapes)
    except FileNotFoundError:
        log.info("executable compiled: none is stored", program=digest[:12])
    except ExecutableRejected as error:
        why = str(error)
        log.warning("executable compiled: the stored one is refused", program=digest[:12], why=why)
    else:
        seconds = round(time.monotonic() - started, 3)
        log.info("executable loaded", program=digest[:12], seconds=seconds)
        return programs
    return None


def _store_or_say(path: Path, programs: Programs) -> None:
    """In a thread: a program that cannot be stored costs the next generation a compilation."""
    started = time.monotonic()
    try:
        store(path, programs)
    except Exception as error:  # such as NotImplementedError for a program with constants
        log.warning("executable not stored", why=f"{type(error).__name__}: {str(error)[:500]}")
        return
    seconds = round(time.monotonic() - started, 3)
    log.info("executable stored", path=str(path), bytes=path.stat().st_size, seconds=seconds)


def _read(path: Path) -> bytes:
    """The payload, if its file is ours alone and its digest is right."""
    with path.open("rb") as file:
        _require_ours(path, file.fileno())
        line = file.readline(_HEADER_LIMIT)
        payload = file.read()
    try:
        header = json.loads(line)
        version, size, digest = header["version"], header["bytes"], header["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ExecutableRejected(f"{path} has no readable header") from error
    if version != VERSION:
        raise ExecutableRejected(f"{path} has version {version}, not {VERSION}")
    if len(payload) != size or hashlib.sha256(payload).hexdigest() != digest:
        raise ExecutableRejected(f"{path} has another digest than when written")
    return payload


def _require_ours(path: Path, descriptor: int) -> None:
    """Raises ExecutableRejected where another could have written the file, or renamed it here."""
    for found in (os.fstat(descriptor), path.parent.stat()):
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ExecutableRejected(f"{path} is not ours alone (owner {found.st_uid})")


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _forget_old(folder: Path) -> None:
    """Keep the newest files; drafts of the dead go too."""
    with contextlib.suppress(FileNotFoundError):  # another generation tidies up as well
        for kind in ("*.bin", "*.json"):
            dated = sorted(folder.glob(kind), key=lambda file: file.stat().st_mtime, reverse=True)
            for old in dated[KEPT:]:
                old.unlink(missing_ok=True)
        for draft in folder.glob(".*.bin.*"):
            if draft.stat().st_mtime < time.time() - DRAFT_S:  # else somebody may be writing it
                draft.unlink(missing_ok=True)


def _described(tree: Any) -> list[list[str]]:
    """Structure and form of a pytree of shapes; keys of another generator are another dtype."""
    leaves = [
        [name, str(leaf.dtype), str(leaf.shape), str(leaf.sharding)]
        for name, leaf in named_leaves(tree)
    ]
    return [[str(jax.tree.structure(tree))], *leaves]


def _installed() -> list[str]:
    """Name and version of every installed distribution, as its folder tells them."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    found = {one.name for folder in folders for one in Path(folder).glob("*.dist-info")}
    return sorted(found)


def _sources() -> list[tuple[str, str]]:
    """Name and digest of every source of this package."""
    return sorted(
        (str(file.relative_to(_TRAINER)), hashlib.sha256(file.read_bytes()).hexdigest())
        for file in _TRAINER.rglob("*.py")
    )
