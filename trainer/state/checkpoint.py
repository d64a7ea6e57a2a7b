"""Checkpoints on disk, through Orbax: saved in the background, read back, verified, refused.

Where every rank holds the state in whole, rank 0 alone writes it. Where several hold it together,
each writes its part as a checkpoint of its own, `STEP/part-K-of-N`, and rank 0 finishes the step
when all are there. Every rank reads by itself. So no save and no restore makes the loop wait for a
peer. Knows neither which checkpoint counts nor how many stay.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.compute.pieces import (
    Assembly,
    Index,
    NotHeld,
    Piece,
    Wanted,
    as_bytes,
    extent,
    form,
    holds_all,
    is_needed,
    parse_form,
    whole,
)
from trainer.compute.step import Host, assembly_of, named_leaves
from trainer.host.atomic_write import flush
from trainer.task import TaskError

FINISHED_MARK = "commit_success.txt"
SAVE_WAIT_S = 60.0
"""How long a save may show no progress before it is given up; and a part's wait for the others."""

_PROGRESS_LOOK_S = 0.5
_PROGRESS_BYTES = 1 << 16
"""Read or written by this process in between; less may be anything."""

VERIFIED, FAILED = ".verified", ".failed"
"""How a rank says beside its part that it is on the disk and was read back, or will never be."""

_LOOK_S = 0.02
_STORED_AS_BYTES = frozenset({"uint2", "uint4", "float8_e4m3"})
"""Types that TensorStore, to which Orbax writes, does not know; a byte an element in numpy."""

_PART = re.compile(r"part-\d+-of-\d+")

Meta = dict[str, Any]
Content = Any
"""What a process saves: a host copy of the whole state, or the list of its pieces."""

# How Orbax, TensorStore and Python say so.
_DISK_SIGNS = tuple(os.strerror(one) for one in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class CheckpointRejected(Exception):
    """A checkpoint that must not be used: unreadable, incomplete, or not what was saved."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


class NotSaved(Exception):
    """A state that had to be on the disk is not there; the text says which, and why.

    `may_pass`: the disk was full or read-only, which somebody may change.
    """

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that lies on disk, was read back, and equals what was saved."""

    step: int
    path: str
    seconds: float
    bytes: int
    agreed_step: int = -1  # All replicas agreed when so many steps were finished; -1: not compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint that does not exist; training goes on without it.

    `disk_is_fine`: as many bytes could be written there afterwards.
    """

    step: int
    error: str
    disk_is_fine: bool = False


def directory_of(job_dir: Path, generation: int, step: int) -> Path:
    """Where the state after `step` finished steps lies."""
    return job_dir / "checkpoints" / f"generation-{generation}" / str(step)


def digests(host: Host) -> tuple[dict[str, str], dict[str, str], str]:
    """Of a host copy: SHA-256 by leaf, form ("float32[2,3]") by leaf, and the digest of all.

    The last is a SHA-256 over name, dtype, shape and bytes of the leaves in tree order: it does not
    depend on how many processes hold the state.
    """
    by_leaf: dict[str, str] = {}
    forms: dict[str, str] = {}
    total = hashlib.sha256()
    for name, leaf in named_leaves(host):
        data = as_bytes(leaf)
        by_leaf[name] = hashlib.sha256(data).hexdigest()
        forms[name] = form(leaf.dtype, leaf.shape)
        total.update(f"{name}\0{forms[name]}\0".encode())
        total.update(data)
    return by_leaf, forms, total.hexdigest()


class Saver:
    """Writes checkpoints in a thread of its own, one at a time.

    `on_outcome` is called from that thread for each checkpoint that was asked for; of several parts
    only the first tells of a commit, which is that of all. Orbax's own
    asynchronous mode would tell of an error only when the next save begins, and would wait for
    peers that may be dead.
    """

    def __init__(
        self,
        job_dir: Path,
        generation: int,
        on_outcome: Callable[[Committed | SaveFailed], None],
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._job_dir, self._generation, self._on_outcome = job_dir, generation, on_outcome
        self._part, self._parts = part, parts
        self._work: queue.SimpleQueue[tuple[int, Content, Meta]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()
        self._last_committed = -1
        self._last_error = ""
        self._attempts: Counter[int] = Counter()
        self.on_progress: Callable[[], None] = lambda: None
        """Called by a thread that waits for a save, as long as that goes on."""

    def save(self, step: int, content: Content, meta: Meta) -> None:
        """Begin to save; waits for the save before this one, as long as that goes on.

        A step that is committed is not saved again; one that failed is.
        """
        if not self.wait():
            text = f"the save before it made no progress for {SAVE_WAIT_S:.0f} s"
            self._on_outcome(SaveFailed(step=step, error=text))
            return
        if step == self._last_committed:
            return
        self._idle.clear()
        self._work.put((step, content, meta))

    def wait(self) -> bool:
        """Until no save is running; False if it shows no progress for `SAVE_WAIT_S`."""
        seen, since = _bytes_moved(), time.monotonic()
        while not self._idle.wait(_PROGRESS_LOOK_S):
            now = _bytes_moved()
            if now - seen >= _PROGRESS_BYTES:
                seen, since = now, time.monotonic()
                self.on_progress()
            elif time.monotonic() - since > SAVE_WAIT_S:
                return False
        return True

    def require(self, step: int) -> None:
        """Wait until no save is running. Raises `NotSaved` if this step is not committed then."""
        if not self.wait():
            raise NotSaved(f"the save of step {step} made no progress for {SAVE_WAIT_S:.0f} s")
        if step != self._last_committed:
            text = f"step {step} could not be saved: {self._last_error}"
            raise NotSaved(text, may_pass=any(sign in text for sign in _DISK_SIGNS))

    def _run(self) -> None:
        while True:
            step, content, meta = self._work.get()
            outcome: Committed | SaveFailed | None
            try:
                if self._parts == 1:
                    outcome = self._save(step, content, meta)
                else:
                    outcome = self._save_part(step, content, meta)
                self._last_committed = step
            except Exception as error:  # whatever it was, it is reported and training goes on
                text = f"{type(error).__name__}: {error}"
                outcome = SaveFailed(
                    step=step,
                    error=text[:2000],
                    disk_is_fine=_takes(self._job_dir, _size_of(content)),
                )
                self._last_error = outcome.error
            if outcome is not None:
                self._on_outcome(outcome)
            self._idle.set()

    def _save(self, step: int, host: Host, meta: Meta) -> Committed:
        started = time.monotonic()
        path = directory_of(self._job_dir, self._generation, step)
        by_leaf, forms, total = digests(host)
        full = {**meta, "digests": by_leaf, "leaves": forms, "params_digest": total}
        try:
            _write(path, host, full)
            _flush_tree(path)
            if digests(_read_state(path, host))[2] != total:
                raise OSError(f"{path} does not read back as it was written")
        except BaseException:
            _discard(path)
            raise
        return _committed(step, path, started)

    def _save_part(self, step: int, pieces: list[Piece], meta: Meta) -> Committed | None:
        started = time.monotonic()
        path = directory_of(self._job_dir, self._generation, step)
        own = path / _part_name(self._part, self._parts)
        self._attempts[step] += 1
        try:
            _write_pieces(own, pieces, meta)
            _mark(own.with_suffix(VERIFIED))
            if self._part > 0:
                return None
            self._await_parts(path, step)
            _mark(path / FINISHED_MARK)
        except BaseException as error:
            (path / FINISHED_MARK).unlink(missing_ok=True)
            own.with_suffix(VERIFIED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                _mark(self._failed(own, step), f"{type(error).__name__}: {error}"[:1000])
            _discard(own)
            raise
        return _committed(step, path, started)

    def _await_parts(self, path: Path, step: int) -> None:
        """Until the other ranks' parts are written and read back; raises OSError if one is not."""
        there, deadline = -1, time.monotonic() + SAVE_WAIT_S
        for part in range(1, self._parts):
            name = path / _part_name(part, self._parts)
            while not name.with_suffix(VERIFIED).is_file():
                if (failed := self._failed(name, step)).exists():
                    raise OSError(f"{name} was not saved: {failed.read_text()}")
                if time.monotonic() > deadline:
                    if (now := _size(path)) == there:
                        raise OSError(f"{name} made no progress for {SAVE_WAIT_S:.0f} s")
                    there, deadline = now, time.monotonic() + SAVE_WAIT_S
                time.sleep(_LOOK_S)

    def _failed(self, part: Path, step: int) -> Path:
        """The mark of this attempt: those of earlier ones, which all ranks made, say nothing."""
        return part.with_suffix(f"{FAILED}-{self._attempts[step]}")


def commit(job_dir: Path, generation: int, step: int, pieces: list[Piece], meta: Meta) -> Path:
    """Write a whole state without knowing its tree, read it back, and finish it; its path.

    One that is finished stays as it is. Raises what Orbax and the disk raise, with nothing left.
    """
    path = directory_of(job_dir, generation, step)
    if (path / FINISHED_MARK).is_file():
        return path
    _discard(path)  # what a process that was killed has left
    try:
        _write_pieces(path / _part_name(0, 1), pieces, meta)
        _mark(path / FINISHED_MARK)
    except BaseException:
        _discard(path)
        raise
    return path


def _write_pieces(own: Path, pieces: list[Piece], meta: Meta) -> None:
    """Raises OSError if what is on the disk is not what was written."""
    values = {piece.key: piece.values for piece in pieces}
    described = [
        {
            "key": piece.key,
            "name": piece.name,
            "form": piece.form,
            "index": piece.index,
            "sha256": _sha256(piece.values),
        }
        for piece in pieces
    ]
    own.parents[2].mkdir(exist_ok=True)  # `checkpoints`, one above what `_write` makes
    _write(own, values, {**meta, "pieces": described})
    _flush_tree(own)
    read = _read_state(own, values)
    if any(_sha256(read[one["key"]]) != one["sha256"] for one in described):
        raise OSError(f"{own} does not read back as it was written")


def _size_of(content: Host | list[Piece]) -> int:
    leaves = jax.tree.leaves(
        [piece.values for piece in content] if isinstance(content, list) else content
    )
    return sum(int(leaf.nbytes) for leaf in leaves)


def _takes(job_dir: Path, size: int) -> bool:
    """Whether the disk of the checkpoints has room for so many bytes."""
    try:
        folder = job_dir / "checkpoints"
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else job_dir) as probe:
            os.posix_fallocate(probe.fileno(), 0, max(1, size))
            os.fsync(probe.fileno())
    except OSError:
        return False
    return True


def load(path: Path, target: Host) -> tuple[Host, Meta]:
    """Read all of a checkpoint for a state like `target` (numpy arrays; values do not matter).

    Raises as `load_pieces`.
    """
    held, meta = load_pieces(path, target)
    try:
        return _whole(held, target), meta
    except NotHeld as error:
        raise CheckpointRejected(path, str(error)) from error


def load_pieces(path: Path, target: Host, wanted: Wanted | None = None) -> tuple[Assembly, Meta]:
    """What is wanted of each leaf (None: all) of a state like `target`, and the meta.

    Raises `CheckpointRejected` where the files are not what was saved, and `TaskError` where they
    are but the task's state has another form by now.
    """
    if not (path / FINISHED_MARK).is_file():
        raise CheckpointRejected(path, f"not finished: {FINISHED_MARK} is missing")
    if any(path.glob("part-*-of-*")):
        return _load_parts(path, target, wanted)
    host, meta = _load_whole(path, target)
    return assembly_of(host), meta


def load_leaves(path: Path) -> tuple[dict[str, Any], Meta]:
    """All leaves (numpy) by their dotted names, and the meta, of whatever task saved them.

    Raises `CheckpointRejected` where the files are not what was saved.
    """
    if not (path / FINISHED_MARK).is_file():
        raise CheckpointRejected(path, f"not finished: {FINISHED_MARK} is missing")
    if any(path.glob("part-*-of-*")):
        metas = _read_metas(path)
        held = Assembly(_read_pieces(path, metas, None))
        rest = {name: value for name, value in metas[0][1].items() if name != "pieces"}
        return {piece.name: piece.values for piece in held.leaves()}, rest
    try:
        meta = _read_meta(path)
        saved: dict[str, str] = meta["leaves"]
        by_leaf: dict[str, str] = meta["digests"]
        stored = dict(named_leaves(_read_stored(path)))
        blank = {name: _blank(*_whole_of(form)) for name, form in saved.items()}
        leaves = {name: _loaded(blank[name], stored[name]) for name in saved}
    except Exception as error:
        raise CheckpointRejected(path, _reason("it cannot be read", error)) from error
    for name, values in leaves.items():
        if _sha256(values) != by_leaf.get(name):
            raise CheckpointRejected(path, f"leaf {name} has another digest than when saved")
    return leaves, meta


def _whole_of(form: str) -> tuple[Any, Index]:
    dtype, shape = parse_form(form)
    return dtype, whole(shape)


def digest_of(path: Path, target: Host) -> str:
    """The digest of all of a checkpoint, whoever holds which part of it; see `digests`."""
    return digests(load(path, target)[0])[2]


def _whole(held: Assembly, target: Host) -> Host:
    leaves = [held.read(name, whole(leaf.shape)) for name, leaf in named_leaves(target)]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _load_parts(path: Path, target: Host, wanted: Wanted | None) -> tuple[Assembly, Meta]:
    metas = _read_metas(path)
    found = {one["name"]: one["form"] for _, meta in metas for one in meta["pieces"]}
    _check_forms(path, found, target)
    rest = {name: value for name, value in metas[0][1].items() if name != "pieces"}
    return Assembly(_read_pieces(path, _needed(metas, wanted), wanted)), rest


def _read_pieces(path: Path, metas: list[tuple[Path, Meta]], wanted: Wanted | None) -> list[Piece]:
    """What is wanted of these parts; raises `CheckpointRejected`."""
    pieces: list[Piece] = []
    for own, meta in metas:
        entries = meta["pieces"]
        blank = {one["key"]: _blank(parse_form(one["form"])[0], _index(one)) for one in entries}
        try:
            state = _read_state(own, blank)
        except Exception as error:
            raise CheckpointRejected(path, _reason(f"{own.name} cannot be read", error)) from error
        for one in entries:
            name, index, values = one["name"], _index(one), state[one["key"]]
            if not is_needed(name, index, wanted):
                continue
            if _sha256(values) != one["sha256"]:
                text = f"leaf {name} of {own.name} has another digest than when saved"
                raise CheckpointRejected(path, text)
            shape = parse_form(one["form"])[1]
            pieces.append(Piece(name=name, shape=shape, index=index, values=values))
    return pieces


def _read_metas(path: Path) -> list[tuple[Path, Meta]]:
    """Folder and meta of every part; raises `CheckpointRejected` if one is not there."""
    folders = {one.name: one for one in path.iterdir() if one.is_dir()}
    parts = max(int(name.rpartition("-")[2]) for name in folders if _PART.fullmatch(name))
    found = []
    for part in range(parts):
        own = folders.get(_part_name(part, parts))
        if own is None:
            raise CheckpointRejected(path, f"{_part_name(part, parts)} is missing")
        try:
            meta = _read_meta(own)
            step = int(meta["step"])
            for one in meta["pieces"]:
                str(one["key"]), str(one["form"]), _index(one), str(one["sha256"])
        except Exception as error:
            text = _reason(f"the meta item of {own.name} cannot be read", error)
            raise CheckpointRejected(path, text) from error
        if path.name != str(step):
            raise CheckpointRejected(path, f"the meta item of {own.name} says step {step}")
        found.append((own, meta))
    return found


def _needed(metas: list[tuple[Path, Meta]], wanted: Wanted | None) -> list[tuple[Path, Meta]]:
    """One part that holds all that is wanted, else every part."""
    for own, meta in metas:
        held = ((one["name"], _index(one)) for one in meta["pieces"])
        if wanted is not None and holds_all(held, wanted):
            return [(own, meta)]
    return metas


def _index(entry: Mapping[str, Any]) -> Index:
    return tuple((int(start), int(stop)) for start, stop in entry["index"])


def _blank(dtype: Any, index: Index) -> Any:
    return np.broadcast_to(np.zeros((), dtype), extent(index))


def _load_whole(path: Path, target: Host) -> tuple[Host, Meta]:
    try:
        meta = _read_meta(path)
        saved: dict[str, str] = meta["leaves"]
        by_leaf: dict[str, str] = meta["digests"]
        step = int(meta["step"])
    except Exception as error:
        raise CheckpointRejected(path, _reason("its meta item cannot be read", error)) from error
    if step < 0 or set(saved) != set(by_leaf):
        raise CheckpointRejected(path, "its meta item contradicts itself")
    if path.name != str(step):
        raise CheckpointRejected(path, f"its meta item says step {step}")
    _check_forms(path, saved, target)
    try:
        host = _read_state(path, target)
    except Exception as error:
        raise CheckpointRejected(path, _reason("its arrays cannot be read", error)) from error
    found, forms, _ = digests(host)
    for name, kind in saved.items():
        if forms.get(name) != kind:
            raise CheckpointRejected(path, f"leaf {name} is {forms.get(name)}, saved as {kind}")
        if found[name] != by_leaf[name]:
            raise CheckpointRejected(path, f"leaf {name} has another digest than when saved")
    return host, meta


def finished(job_dir: Path) -> list[tuple[int, int, Path]]:
    """What lies finished on disk, newest first: step, generation, path. Digests are not checked."""
    found = []
    for mark in (job_dir / "checkpoints").glob(f"generation-*/*/{FINISHED_MARK}"):
        number, step = mark.parent.parent.name.removeprefix("generation-"), mark.parent.name
        if number.isdecimal() and step.isdecimal():
            found.append((int(step), int(number), mark.parent))
    return sorted(found, reverse=True)


def import_orbax() -> None:
    """Orbax takes a while to import; a thread may do it while something else compiles."""
    import orbax.checkpoint  # noqa: F401


def _check_forms(path: Path, saved: dict[str, str], target: Host) -> None:
    wanted = {name: form(leaf.dtype, leaf.shape) for name, leaf in named_leaves(target)}
    for name in sorted(set(wanted) | set(saved)):
        if wanted.get(name) != saved.get(name):
            raise TaskError(
                f"the state has another form than the checkpoint {path}: leaf {name} is "
                f"{wanted.get(name, 'missing')} now and was {saved.get(name, 'missing')} then; "
                "take back the change to the model or the task, or use another run_dir"
            )


def _reason(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {str(error)[:500]}"


def _checkpointer() -> Any:
    """A checkpointer that takes this process for the only one, whatever its rank."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.multihost import multihost

    # Orbax (0.12.8) writes numpy arrays on process 0 only, without a word on the others, and
    # tells through JAX's coordinator, by a mere count of saves, which folders it has made.
    multihost.process_index, multihost.process_count = _zero, _one
    multihost.is_jax_distributed_client_initialized = _no
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="alone"
    )
    atomicity = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(
            multiprocessing_options=alone, atomicity_options=atomicity
        ),
        state=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        meta=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone, atomicity_options=atomicity)


def _zero() -> int:
    return 0


def _one() -> int:
    return 1


def _no() -> bool:
    return False


def _write(path: Path, host: Host, meta: Meta) -> None:
    import orbax.checkpoint as ocp

    for folder in (path.parent.parent, path.parent):  # not a run directory that was deleted
        folder.mkdir(exist_ok=True)
    state = ocp.args.StandardSave(jax.tree.map(_stored, host))
    with _plain(path) as plain:
        args = ocp.args.Composite(state=state, meta=ocp.args.JsonSave(meta))
        _checkpointer().save(plain, args=args)


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """The same place under a name that Orbax reads as it is written.

    It takes brackets for a pattern, and a backslash for a separator.
    """
    if not set("[]*?\\") & set(str(path)):
        yield path
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}") / path.name
    finally:
        os.close(folder)


def _stored(leaf: Any) -> Any:
    """What stands on the disk for a leaf that Orbax (0.12.8) cannot write; others as they are."""
    if leaf.size == 0:
        return np.zeros(1, np.uint8)
    return leaf.view(np.uint8) if leaf.dtype.name in _STORED_AS_BYTES else leaf


def _loaded(target: Any, stored: Any) -> Any:
    """The leaf for which `_stored` wrote this."""
    if target.size == 0:
        return np.empty(target.shape, target.dtype)
    values = np.asarray(stored)
    return values.view(target.dtype) if target.dtype.name in _STORED_AS_BYTES else values


def _committed(step: int, path: Path, started: float) -> Committed:
    seconds = time.monotonic() - started
    return Committed(step=step, path=str(path), seconds=seconds, bytes=_size(path))


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _bytes_moved() -> int:
    """What this process has read and written so far, by whichever thread; 0 where none says it."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines()[:2])


def _part_name(part: int, parts: int) -> str:
    return f"part-{part}-of-{parts}"


def _sha256(values: Any) -> str:
    return hashlib.sha256(as_bytes(values)).hexdigest()


def _mark(path: Path, text: str = "done") -> None:
    """A file that says something by being there, on the disk itself."""
    path.write_text(f"{text}\n")
    flush(path)
    flush(path.parent)


def _discard(path: Path) -> None:
    """A failed save must neither be taken for a good one nor fill the disk of the next."""
    with contextlib.suppress(OSError):
        (path / FINISHED_MARK).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _read_meta(path: Path) -> Meta:
    import orbax.checkpoint as ocp

    with _plain(path) as plain:
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return dict(_checkpointer().restore(plain, args=args).meta)


def _read_state(path: Path, target: Host) -> Host:
    import orbax.checkpoint as ocp

    blank = jax.tree.map(_stored_blank, target)
    with _plain(path) as plain:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(blank))
        restored = _checkpointer().restore(plain, args=args)
    return jax.tree.map(_loaded, target, restored.state)


def _read_stored(path: Path) -> Any:
    """What stands on the disk, as a tree of dicts and lists, without knowing what it was."""
    import orbax.checkpoint as ocp

    with _plain(path) as plain:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return _checkpointer().restore(plain, args=args).state


def _stored_blank(leaf: Any) -> Any:
    if leaf.size == 0:
        return _stored(leaf)
    dtype = np.uint8 if leaf.dtype.name in _STORED_AS_BYTES else leaf.dtype
    return _blank(dtype, whole(leaf.shape))


def _flush_tree(path: Path) -> None:
    """To the disk itself: files first, then the folders that name them."""
    for one in sorted(path.rglob("*"), reverse=True):
        flush(one)
    flush(path)
    flush(path.parent)
