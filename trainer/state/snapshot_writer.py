"""Takes snapshots: the loop copies, a thread checks, publishes, and keeps the pace.

A step is worth more than a snapshot: no error of the disk ends training, and "auto" takes no more
of the loop's time than its share. Which snapshot is used is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import queue
import statistics
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np
from numpy.typing import NDArray

from trainer.compute.pieces import Index, Piece
from trainer.state.snapshot import FILE, VERSION, Meta, SnapshotError, check_directory, crc32

BUFFERS, BUFFERS_MIN = 3, 2
"""One is written while another one holds the last snapshot; a third lets slower ranks be."""
RETRY_S = 60.0
"""How long after a failure the next snapshot is tried."""
AUTO_SHARE_MAX = 0.01
"""What "auto" lets snapshots cost, as a share of the step time."""
AUTO_INTERVAL_MAX = 1000

_AUTO_SHARE_AIM = 0.8 * AUTO_SHARE_MAX

_ALIGNMENT = 64
_WAIT_S = 5.0  # for the snapshot before, where each is asked for
_MEASURED = 16  # takes that the typical cost is drawn from
_SETTLED = 3  # takes after which the interval is told
_STEPS_REMEMBERED = 64

SnapshotOutcome = Union["Interval", "SnapshotFailed", "SnapshotsResumed"]

Leaves = Sequence[Piece]
"""What this process holds of the state, in tree order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContext:
    """Whose snapshots a writer publishes. `run` is the absolute run directory of the job."""

    run: str
    generation: int
    rank: int
    world_size: int
    replica: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """What a snapshot typically costs, in seconds.

    `blocking_s`: of the loop; `background_s`: processor time of the thread; `age_s`: from the call
    to publication. Takes that had to allocate a buffer first do not count.
    """

    blocking_s: float
    background_s: float
    age_s: float
    bytes: int
    published: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What "auto" settled on: a snapshot every so many steps, each costing `cost_s`."""

    every_steps: int
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFailed:
    """A snapshot that does not exist; training goes on without it."""

    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsResumed:
    """The first snapshot after one that failed."""

    step: int


class SnapshotWriter:
    """Publishes the snapshots of one rank; the loop copies (or not), a thread does the rest.

    `on_published` hears of each step, `on_outcome` of an interval and of failures; both from any
    thread. Errors of the disk never reach the loop: a snapshot is worth less than a step.
    """

    def __init__(
        self,
        directory: Path | str,
        context: SnapshotContext,
        every_steps: int | Literal["auto"],
        *,
        on_published: Callable[[int], None] = lambda step: None,
        on_outcome: Callable[[SnapshotOutcome], None] = lambda outcome: None,
        background_counts: bool = True,
    ) -> None:
        self._directory, self._context = Path(directory), context
        self._every_steps = every_steps
        self._on_published, self._on_outcome = on_published, on_outcome
        self._pace = _Pace(background_counts)
        self._buffers: dict[int, _Buffer] = {}
        self._layout: _Layout | None = None
        self._copies = 0
        self._rotation = BUFFERS  # less where there is no room for all
        self._published = 0
        self._skipped = 0
        self._last_step = -1
        self._told: Interval | None = None
        self._failing = False
        self._retry_at = -math.inf
        self._agreed: int | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    @property
    def cost(self) -> SnapshotCost:
        """What snapshots cost so far."""
        blocking, background, age = self._pace.typical()
        return SnapshotCost(
            blocking_s=blocking,
            background_s=background,
            age_s=age,
            bytes=0 if self._layout is None else self._layout.bytes,
            published=self._published,
            skipped=self._skipped,
        )

    def due(self, step: int, step_s: float) -> bool:
        """Whether the state after `step` finished steps should be taken; call it once a step."""
        self._pace.step_took(step_s)
        if self._every_steps == 0 or time.monotonic() < self._retry_at:
            return False
        if self._every_steps != "auto":
            return step % self._every_steps == 0
        if self._agreed is not None:
            return step % self._agreed == 0
        if self._last_step >= 0 and step - self._last_step < self._pace.interval:
            return False
        if not self._idle.is_set():
            self._skipped += 1
            return False
        return True

    @property
    def interval(self) -> int:
        """What "auto" makes of what this process has seen."""
        return self._pace.interval

    def follow(self, interval: int) -> None:
        """Take every so many steps by "auto" from now on, whatever this process has seen.

        Parts of one snapshot are of one step: those who hold them must agree.
        """
        self._agreed = interval

    def take(self, step: int, leaves: Leaves, meta: Meta, *, volatile: bool) -> None:
        """Take the state; waits for the snapshot before this one to be published.

        `volatile`: the arrays change or go when the loop goes on, so that they are copied here.
        Otherwise they may still be on their way from a device, and the thread copies them.
        """
        started = time.monotonic()
        if not self._idle.wait(_WAIT_S):
            self._skipped += 1
            return
        new = self._copies < BUFFERS
        self._last_step = step
        try:
            job = _Job(
                step=step,
                leaves=() if volatile else tuple(leaves),
                meta=meta,
                buffer=self._free_buffer(leaves),
                started=started,
                new=new,
            )
            if volatile:
                job.buffer.fill(leaves)
        except (OSError, SnapshotError) as error:
            self._failed(step, error)
            return
        job.blocking_s = time.monotonic() - started
        self._copies += 1
        self._idle.clear()
        self._work.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Until what was taken is published or has failed; False when the time is up."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """End the thread after what it is at. The files stay: they are what a snapshot is for."""
        self._work.put(None)
        self._thread.join(_WAIT_S)

    def _free_buffer(self, leaves: Leaves) -> _Buffer:
        if self._layout is None:
            self._layout = _Layout.of(leaves)
        self._layout.check(leaves)
        number = self._copies % self._rotation
        buffer = self._buffers.get(number)
        if buffer is None or not buffer.path.exists():  # someone may have swept too early
            _make_directory(self._directory)
            name = f"g{self._context.generation}-r{self._context.rank}-b{number}.data"
            try:
                buffer = self._buffers[number] = _Buffer(self._directory / name, self._layout)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                buffer = self._do_with_less(self._layout.bytes, error)
        buffer.forget()
        return buffer

    def _do_with_less(self, size: int, error: OSError) -> _Buffer:
        """The oldest of the buffers that are there, if they are enough to go round."""
        there = len(self._buffers)
        if there >= BUFFERS_MIN and self._copies >= there:
            self._rotation = there
            return self._buffers[self._copies % there]
        found = os.statvfs(self._directory)
        raise SnapshotError(
            f"{error.strerror}: {self._directory} has room for {there} of {BUFFERS} buffers of "
            f"{size} bytes, {found.f_bavail * found.f_frsize} bytes are free; snapshots of this "
            f"rank need {BUFFERS_MIN * size} bytes, better {BUFFERS * size}"
        ) from error

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                self._publish(job)
            except Exception as error:  # whatever it was, it is reported and training goes on
                self._failed(job.step, error)
            self._idle.set()

    def _publish(self, job: _Job) -> None:
        began = time.thread_time()
        if job.leaves:
            job.buffer.fill(job.leaves)
        context = self._context
        name = f"g{context.generation}-s{job.step}-r{context.rank}.json"
        body = {
            "version": VERSION,
            "run": context.run,
            "generation": context.generation,
            "step": job.step,
            "world_size": context.world_size,
            "rank": context.rank,
            "replica": context.replica,
            "part": context.part,
            "parts": context.parts,
            "data": job.buffer.path.name,
            "bytes": job.buffer.layout.bytes,
            "meta": job.meta,
            "leaves": job.buffer.leaves(),
        }
        job.buffer.manifest = _write_manifest(self._directory / name, body)
        age = time.monotonic() - job.started
        self._published += 1
        if self._failing:
            self._failing = False
            self._on_outcome(SnapshotsResumed(step=job.step))
        self._on_published(job.step)
        # Of parts, the others' are out as well by then: a copy waits for the one before it.
        if self._published == (2 if context.parts == 1 else 4):
            self._remove_lower()
        spent = time.thread_time() - began
        self._pace.snapshot_cost(job.blocking_s, spent, age, new=job.new)
        self._tell_interval()

    def _remove_lower(self) -> None:
        """Generations before this one have nothing left that is newer than ours.

        All ranks have stepped by now, so that none is still loading.
        """
        for path in self._directory.iterdir():
            file = FILE.fullmatch(path.name)
            if file is not None and int(file[1]) < self._context.generation:
                path.unlink(missing_ok=True)

    def _tell_interval(self) -> None:
        if self._every_steps != "auto" or self._pace.measured < _SETTLED:
            return
        now = Interval(every_steps=self._agreed or self._pace.interval, cost_s=self._pace.cost_s())
        if self._told is None or now.every_steps != self._told.every_steps:
            self._told = now
            self._on_outcome(now)

    def _failed(self, step: int, error: Exception) -> None:
        """Tell it once, until a snapshot succeeds again; try again after a while."""
        self._retry_at = time.monotonic() + RETRY_S
        if not self._failing:
            self._failing = True
            text = f"{type(error).__name__}: {error}"
            self._on_outcome(SnapshotFailed(step=step, error=text[:2000]))


@dataclass(slots=True, kw_only=True)
class _Job:
    step: int
    leaves: Leaves
    meta: Meta
    buffer: _Buffer
    started: float
    new: bool
    blocking_s: float = 0.0


class _Pace:
    """How often "auto" may take a snapshot: as often as it stays below its share of the time.

    The first takes come one after the other until all buffers are allocated: what that costs would
    make a long interval, in which a generation that has just begun would have nothing of its own.
    Looked at again after each window of takes; in between, and while the share is between the two
    bounds, the interval stays: noise is not worth telling.
    """

    def __init__(self, background_counts: bool) -> None:
        self._background_counts = background_counts
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._costs: deque[tuple[float, float, float]] = deque(maxlen=_MEASURED)
        self._since = 0
        self.interval = 1
        self.measured = 0

    def step_took(self, seconds: float) -> None:
        self._steps.append(seconds)

    def snapshot_cost(self, blocking: float, background: float, age: float, *, new: bool) -> None:
        if new:
            return
        self._costs.append((blocking, background, age))
        self.measured += 1
        self._since += 1
        if self.measured <= _SETTLED or self._since >= _MEASURED:
            self._since = 0
            self._adjust()

    def typical(self) -> tuple[float, float, float]:
        """Means: blocking, background, age (seconds)."""
        costs = list(self._costs)
        if not costs:
            return 0.0, 0.0, 0.0
        blocking, background, age = (statistics.fmean(one) for one in zip(*costs, strict=True))
        return blocking, background, age

    def cost_s(self) -> float:
        blocking, background, _ = self.typical()
        return blocking + (background if self._background_counts else 0.0)

    def _adjust(self) -> None:
        steps = list(self._steps)
        step_s = statistics.median(steps) if steps else 0.0
        if step_s <= 0.0:
            self.interval = AUTO_INTERVAL_MAX
            return
        share = self.cost_s() / step_s
        wanted = min(AUTO_INTERVAL_MAX, max(1, math.ceil(share / _AUTO_SHARE_AIM)))
        if share / self.interval > AUTO_SHARE_MAX or wanted < self.interval:
            self.interval = wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where each leaf lies in a buffer."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    forms: tuple[str, ...]
    indexes: tuple[Index, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, leaves: Leaves) -> _Layout:
        offsets, end = [], 0
        for piece in leaves:
            offsets.append(end)
            end += -(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(
            keys=tuple(piece.key for piece in leaves),
            names=tuple(piece.name for piece in leaves),
            forms=tuple(piece.form for piece in leaves),
            indexes=tuple(piece.index for piece in leaves),
            offsets=tuple(offsets),
            sizes=tuple(piece.values.nbytes for piece in leaves),
            bytes=max(end, _ALIGNMENT),
        )

    def check(self, leaves: Leaves) -> None:
        if [piece.key for piece in leaves] != list(self.keys):
            raise SnapshotError("the state has other leaves than at the first snapshot")


class _Buffer:
    """A data file, allocated in full before it is mapped: a full disk is an error, no SIGBUS."""

    def __init__(self, path: Path, layout: _Layout) -> None:
        self.path, self.layout = path, layout
        self.manifest: Path | None = None
        path.unlink(missing_ok=True)  # ours alone: a new file, not one that a reader still maps
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, layout.bytes)
            # Not populated: `mmap` holds the interpreter for that, seconds for some gigabytes, in
            # which no heartbeat is sent. The copy that follows lets the other threads run.
            self._map = mmap.mmap(descriptor, layout.bytes, flags=mmap.MAP_SHARED)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def forget(self) -> None:
        """Withdraw the manifest before its bytes change."""
        if self.manifest is not None:
            self.manifest.unlink(missing_ok=True)
            self.manifest = None

    def fill(self, leaves: Leaves) -> None:
        """Copy the leaves in."""
        for place, piece in zip(self._places(), leaves, strict=True):
            values = np.asarray(piece.values)
            np.copyto(place.view(values.dtype).reshape(values.shape), values)

    def leaves(self) -> list[dict[str, Any]]:
        """Name, form, place and checksum of each leaf, for the manifest."""
        layout = self.layout
        columns = zip(
            layout.names,
            layout.forms,
            layout.indexes,
            layout.offsets,
            layout.sizes,
            self._places(),
            strict=True,
        )
        return [
            {
                "name": name,
                "form": kind,
                "index": index,
                "offset": offset,
                "bytes": size,
                "crc32": crc32(place),
            }
            for name, kind, index, offset, size, place in columns
        ]

    def _places(self) -> list[NDArray[np.uint8]]:
        pairs = zip(self.layout.offsets, self.layout.sizes, strict=True)
        return [self._bytes[offset : offset + size] for offset, size in pairs]


def _make_directory(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_directory(directory)


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_manifest(path: Path, body: Mapping[str, Any]) -> Path:
    """Two lines, the second the checksum of the first; there in whole or not at all."""
    text = json.dumps(body).encode()
    draft = path.with_name(f"{path.name}.tmp")
    with open(draft, "wb", opener=_owner_only) as file:
        file.write(b"%s\n%08x\n" % (text, zlib.crc32(text)))
    draft.rename(path)
    return path
