"""Compiled programs on disk, so that later generations neither trace nor compile.

Rank 0 writes what it compiled, every rank reads it. A file is unpickled only if nobody but us could
have written it and its digest is right; whatever is wrong with it, the answer is to compile.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import structlog

from trainer.step import Layout, Programs, Shapes, compile_shapes, named_leaves
from trainer.task import Task

log = structlog.get_logger()

VERSION = 2
KEPT = 8
"""Files that stay in the folder, the newest: world sizes and settings come and go."""

_HEADER_LIMIT = 1 << 12  # bytes
_TRAINER = Path(__file__).resolve().parent
_VARIABLES = ("JAX_", "XLA_", "NPROC", "LIBTPU_", "TF_", "OMP_", "CUDA_VISIBLE", "NVIDIA_TF32")
_WHERE_ONLY = ("JAX_COORDINATOR_", "CUDA_VISIBLE")  # says where, not what


class ExecutableRejected(Exception):
    """A file that must not be loaded; the text says why."""


def load_or_compile(
    folder: Path, task: Task, layout: Layout, shapes: Shapes, described: Mapping[str, Any]
) -> Programs:
    """The programs for these shapes; `described` is whatever else decides what they compute.

    Raises only what compiling raises.
    """
    key = key_of(task, layout, shapes, described)
    started = time.monotonic()
    try:
        programs = load(folder / f"{key}.bin", layout, shapes)
        log.info("executable loaded", key=key[:12], seconds=round(time.monotonic() - started, 3))
        return programs
    except FileNotFoundError:
        log.info("executable compiled: none is stored", key=key[:12])
    except ExecutableRejected as error:
        log.warning("executable compiled: the stored one is refused", key=key[:12], why=str(error))
    programs = compile_shapes(task, layout, shapes)
    if task.context.rank == 0:
        threading.Thread(
            target=_store_or_say, args=(folder / f"{key}.bin", programs), name="store", daemon=True
        ).start()
    return programs


def key_of(task: Task, layout: Layout, shapes: Shapes, described: Mapping[str, Any]) -> str:
    """SHA-256 over all that invalidates a compiled program.

    Versions, flags, processor, devices, settings, shapes, and the sources of the task and of this
    package: tracing is skipped, so that changed code must change the key.
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
        "sources": sorted(_sources(task)),
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
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
            for one in pickle.loads(payload)
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
        for found in (os.fstat(file.fileno()), path.parent.stat()):
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
                raise ExecutableRejected(f"{path} is not ours alone (owner {found.st_uid})")
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


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _forget_old(folder: Path) -> None:
    """Keep the newest files; drafts of the dead go too."""
    with contextlib.suppress(FileNotFoundError):  # another generation tidies up as well
        dated = sorted(folder.glob("*.bin"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in [*dated[KEPT:], *folder.glob(".*.bin.*")]:
            old.unlink(missing_ok=True)


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


def _sources(task: Task) -> Iterator[tuple[str, str]]:
    """Name and digest of every source that may shape the programs.

    This package, what lies beside or below the task's module, and every loaded module that is not
    installed: a task may import its own helpers while it is traced.
    """
    files = set(_TRAINER.rglob("*.py"))
    top = sys.modules[type(task).__module__.partition(".")[0]]
    if (origin := getattr(top, "__file__", None)) is not None:
        beside = Path(origin).resolve().parent
        files |= set(beside.rglob("*.py") if hasattr(top, "__path__") else beside.glob("*.py"))
    libraries = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))
    for loaded in list(sys.modules.values()):
        origin = getattr(loaded, "__file__", None)
        if isinstance(origin, str) and not origin.startswith(libraries):
            files.add(Path(origin).resolve())
    for file in files:
        with contextlib.suppress(OSError):  # a module may name a file inside an archive
            yield str(file), hashlib.sha256(file.read_bytes()).hexdigest()
