"""Checkpoints on disk, through Orbax: saved in the background, read back, verified, refused.

Rank 0 alone writes, from a host copy that it holds in whole, and every rank reads by itself: so no
save and no restore ever waits for a peer. Knows neither which checkpoint counts nor how many stay.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.step import Host, named_leaves
from trainer.task import TaskError

FINISHED_MARK = "commit_success.txt"
SAVE_WAIT_S = 60.0
"""How long the loop waits for the save before it, at most."""

Meta = dict[str, Any]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint that does not exist; training goes on without it."""

    step: int
    error: str


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
        data = np.ascontiguousarray(leaf).tobytes()
        by_leaf[name] = hashlib.sha256(data).hexdigest()
        forms[name] = _form(leaf)
        total.update(f"{name}\0{forms[name]}\0".encode())
        total.update(data)
    return by_leaf, forms, total.hexdigest()


class Saver:
    """Writes checkpoints in a thread of its own, one at a time.

    `on_outcome` is called from that thread for each checkpoint that was asked for. Orbax's own
    asynchronous mode would tell of an error only when the next save begins, and would wait for
    peers that may be dead.
    """

    def __init__(
        self, job_dir: Path, generation: int, on_outcome: Callable[[Committed | SaveFailed], None]
    ) -> None:
        self._job_dir, self._generation, self._on_outcome = job_dir, generation, on_outcome
        self._work: queue.SimpleQueue[tuple[int, Host, Meta]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()
        self._last_committed = -1
        self._last_error = ""

    def save(self, step: int, host: Host, meta: Meta) -> None:
        """Begin to save; waits for the save before this one, at most `SAVE_WAIT_S`.

        A step that is committed is not saved again; one that failed is.
        """
        if not self.wait():
            text = f"the save before it did not end within {SAVE_WAIT_S:.0f} s"
            self._on_outcome(SaveFailed(step=step, error=text))
            return
        if step == self._last_committed:
            return
        self._idle.clear()
        self._work.put((step, host, meta))

    def wait(self, timeout_s: float = SAVE_WAIT_S) -> bool:
        """Until no save is running; False when the time is up."""
        return self._idle.wait(timeout_s)

    def require(self, step: int) -> None:
        """Wait until no save is running. Raises `NotSaved` if this step is not committed then."""
        if not self.wait():
            raise NotSaved(f"the save of step {step} did not end within {SAVE_WAIT_S:.0f} s")
        if step != self._last_committed:
            text = f"step {step} could not be saved: {self._last_error}"
            raise NotSaved(text, may_pass=any(sign in text for sign in _DISK_SIGNS))

    def _run(self) -> None:
        while True:
            step, host, meta = self._work.get()
            try:
                outcome: Committed | SaveFailed = self._save(step, host, meta)
                self._last_committed = step
            except Exception as error:  # whatever it was, it is reported and training goes on
                text = f"{type(error).__name__}: {error}"
                outcome = SaveFailed(step=step, error=text[:2000])
                self._last_error = outcome.error
            self._on_outcome(outcome)
            self._idle.set()

    def _save(self, step: int, host: Host, meta: Meta) -> Committed:
        started = time.monotonic()
        path = directory_of(self._job_dir, self._generation, step)
        by_leaf, forms, total = digests(host)
        full = {**meta, "digests": by_leaf, "leaves": forms, "params_digest": total}
        try:
            _write(path, host, full)
            _flush(path)
            if digests(_read_state(path, host))[2] != total:
                raise OSError(f"{path} does not read back as it was written")
        except BaseException:
            _discard(path)
            raise
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        seconds = time.monotonic() - started
        return Committed(step=step, path=str(path), seconds=seconds, bytes=size)


def load(path: Path, target: Host) -> tuple[Host, Meta]:
    """Read a checkpoint for a state like `target` (numpy arrays; their values do not matter).

    Raises `CheckpointRejected` where the files are not what was saved, and `TaskError` where they
    are but the task's state has another form by now.
    """
    if not (path / FINISHED_MARK).is_file():
        raise CheckpointRejected(path, f"not finished: {FINISHED_MARK} is missing")
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
    for name, form in saved.items():
        if forms.get(name) != form:
            raise CheckpointRejected(path, f"leaf {name} is {forms.get(name)}, saved as {form}")
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
    wanted = {name: _form(leaf) for name, leaf in named_leaves(target)}
    for name in sorted(set(wanted) | set(saved)):
        if wanted.get(name) != saved.get(name):
            raise TaskError(
                f"the state has another form than the checkpoint {path}: leaf {name} is "
                f"{wanted.get(name, 'missing')} now and was {saved.get(name, 'missing')} then; "
                "take back the change to the model or the task, or use another run_dir"
            )


def _form(leaf: Any) -> str:
    return f"{leaf.dtype.name}[{','.join(str(one) for one in leaf.shape)}]"


def _blank(leaf: Any) -> Any:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _reason(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {str(error)[:500]}"


def _checkpointer() -> Any:
    """A checkpointer of this process alone, whatever its rank."""
    import orbax.checkpoint as ocp

    rank = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"rank-{rank}"
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


def _write(path: Path, host: Host, meta: Meta) -> None:
    import orbax.checkpoint as ocp

    path.parent.mkdir(parents=True, exist_ok=True)
    _checkpointer().save(
        path,
        args=ocp.args.Composite(state=ocp.args.StandardSave(host), meta=ocp.args.JsonSave(meta)),
    )


def _discard(path: Path) -> None:
    """A failed save must neither be taken for a good one nor fill the disk of the next."""
    with contextlib.suppress(OSError):
        (path / FINISHED_MARK).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _read_meta(path: Path) -> Meta:
    import orbax.checkpoint as ocp

    restored = _checkpointer().restore(path, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
    return dict(restored.meta)


def _read_state(path: Path, target: Host) -> Host:
    import orbax.checkpoint as ocp

    blank = jax.tree.map(_blank, target)
    restored = _checkpointer().restore(
        path, args=ocp.args.Composite(state=ocp.args.StandardRestore(blank))
    )
    return jax.tree.map(lambda _, leaf: np.asarray(leaf), target, restored.state)


def _flush(path: Path) -> None:
    """To the disk itself: files first, then the folders that name them."""
    for one in sorted(path.rglob("*"), reverse=True):
        _fsync(one)
    _fsync(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
