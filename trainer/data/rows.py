"""Rows of tokenised documents in a shuffled order that can be entered at any step; a `Source`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.config import DataSettings
from trainer.data import plan
from trainer.data.cache_files import CacheDamaged, read_arrays, write_arrays
from trainer.data.files import EXTRA
from trainer.data.plan import Pieces, Plan
from trainer.data.store import Store, Tokens
from trainer.settings import SettingsError

Packing = Literal["stream", "documents", "none"]

_PLAN_VERSION = 2
"""Another one where the same store gives other rows."""


class PackedRows:
    """Every row once an epoch, in an order of `grain` that is another in each epoch.

    The global batch of a step is the next `batch_size` rows of this endless order, so that it may
    span two epochs; no rank ever has fewer rows than another.
    """

    def __init__(
        self,
        store: Store,
        packing: Packing,
        settings: DataSettings,
        *,
        seed: int,
        held_out_batches: int,
        byte_tokens: bool,
    ) -> None:
        """Raises `SettingsError` where the data are too few for one global batch."""
        self._store, self._packing, self._count = store, packing, settings.batch_size
        self._length, self._held_out_batches = settings.sequence_length, held_out_batches
        self._dtype = np.uint8 if byte_tokens else np.int32
        self._weighed = packing != "stream" or store.facts.masked
        self._train = self._plan("train", store.train)
        self._held_out = self._plan("held_out", store.held_out)
        self._refuse_too_few(settings)
        self._order = _shuffled(len(self._train), seed)

    @property
    def tokens_per_step(self) -> int:
        """Targets of a global batch, those that do not count included."""
        return self._count * self._length

    def train_rows(self, step: int, rows: slice) -> dict[str, NDArray[Any]]:
        """See `Rows`."""
        places = range(step * self._count, (step + 1) * self._count)[rows]
        return self._rows(self._store.train, self._train, self._ids(places))

    def held_out_rows(self, index: int, rows: slice) -> dict[str, NDArray[Any]]:
        """See `Rows`; the batches are spread evenly over what is held out.

        Where that is too little for them, each row is there once, and the rest of no weight.
        """
        places = range(index * self._count, (index + 1) * self._count)[rows]
        wanted, there = self._held_out_batches * self._count, len(self._held_out)
        if there < wanted:
            chosen = [place if place < there else None for place in places]
            return self._rows(self._store.held_out, self._held_out, chosen, weighed=True)
        spread = [place * there // wanted for place in places]
        return self._rows(self._store.held_out, self._held_out, spread)

    def sample_ids(self, step: int) -> list[int]:
        """The numbers of the rows in the plan."""
        return self._ids(range(step * self._count, (step + 1) * self._count))

    def position(self, step: int) -> dict[str, int]:
        """Whole passes over all rows, and rows drawn."""
        return {
            "epoch": step * self._count // len(self._train),
            "samples": step * self._count,
            "rows_an_epoch": len(self._train),
        }

    def facts(self) -> dict[str, Any]:
        """The data by their digest, what became of them, and their entropy in nats a token."""
        facts = self._store.facts
        return {
            "data_sha256": facts.digest,
            "data_documents": facts.train_documents,
            "data_tokens": facts.train_tokens,
            "data_rows": len(self._train),
            "data_packing": self._packing,
            "held_out_documents": facts.held_out_documents,
            "held_out_tokens": facts.held_out_tokens,
            "unigram_entropy": facts.entropy,
        }

    def _ids(self, places: range) -> list[int]:
        return [int(self._order[place]) for place in places]

    def _rows(
        self, tokens: Tokens, rows: Plan, chosen: Sequence[int | None], *, weighed: bool = False
    ) -> dict[str, NDArray[Any]]:
        """None: a row of no weight."""
        shape = (len(chosen), self._length + 1)
        ids = np.zeros(shape, self._dtype)
        segments = np.zeros(shape, np.int32)
        weights = np.zeros((len(chosen), self._length), np.float32)
        for index, row in enumerate(chosen):
            if row is None:
                continue
            at = 0
            first, last = int(rows.first[row]), int(rows.first[row + 1])
            for number, piece in enumerate(range(first, last), 1):
                start, size = int(rows.pieces.start[piece]), int(rows.pieces.length[piece])
                ids[index, at : at + size] = tokens.ids(start, start + size)
                segments[index, at : at + size] = number
                counts = tokens.counts(start + 1, start + size)
                weights[index, at : at + size - 1] = counts
                at += size
        batch: dict[str, NDArray[Any]] = {"tokens": ids}
        if self._weighed or weighed:
            batch["weights"] = weights
        if self._packing == "documents":
            batch["segments"] = segments
        return batch

    def _plan(self, half: str, tokens: Tokens) -> Plan:
        """The plan of one half, kept beside the tokens: a million documents take a second."""
        path = self._store.path / f"{half}-{self._packing}-{self._length}-{_PLAN_VERSION}.plan"
        try:
            return _kept_plan(path, len(tokens))
        except (OSError, CacheDamaged):
            made = _make_plan(self._packing, tokens, self._length)
        with contextlib.suppress(OSError):  # a cache that is only read will do
            pieces = made.pieces
            arrays = {"start": pieces.start, "length": pieces.length, "first": made.first}
            write_arrays(path, arrays)
        return made

    def _refuse_too_few(self, settings: DataSettings) -> None:
        rows, held_out = len(self._train), len(self._held_out)
        if rows >= self._count and held_out:
            return
        facts = self._store.facts
        found = (
            f"{facts.train_documents} documents of {facts.train_tokens} tokens to train on make "
            f"{rows} rows of sequence_length = {self._length}, and one step takes {self._count}"
            if rows < self._count
            else f"{facts.held_out_documents} held-out documents of {facts.held_out_tokens} tokens "
            f"make no row of sequence_length = {self._length}"
        )
        raise SettingsError(
            f"[trainer.data] path = {list(settings.path)}: {found}; give more data, a smaller "
            "batch_size or sequence_length, another held_out_fraction, or held-out data in "
            "held_out_path"
        )


def _kept_plan(path: Path, tokens: int) -> Plan:
    """Raises `CacheDamaged` for one that is of other tokens, and OSError."""
    kept = read_arrays(path, start="<i8", length="<i8", first="<i8")
    start, length, first = kept["start"], kept["length"], kept["first"]
    whole = len(start) == len(length) and len(first) and first[0] == 0 and first[-1] == len(start)
    if not whole or (np.diff(first) < 0).any():
        raise CacheDamaged(path.name)
    if len(start) and (start.min() < 0 or length.min() < 2 or (start + length).max() > tokens):
        raise CacheDamaged(path.name)
    return Plan(pieces=Pieces(start=start, length=length), first=first)


def _make_plan(packing: Packing, tokens: Tokens, length: int) -> Plan:
    if packing == "stream":
        pieces = plan.cut_stream(len(tokens), length)
    else:
        pieces = plan.cut_documents(tokens.ends, length)
    if tokens.masked:
        pieces = plan.that_count(pieces, tokens.counts(0, len(tokens)))
    return plan.pack(pieces, length + 1) if packing == "documents" else plan.one_each(pieces)


def _shuffled(rows: int, seed: int) -> Any:
    """The endless order of the rows: `order[place]`, shuffled anew every `rows` places."""
    try:
        import grain
    except ModuleNotFoundError:
        raise SettingsError(
            f"[trainer.data] path: data of this format need the package grain: {EXTRA}"
        ) from None
    # grain takes 32 bits, and seed + 1 in one epoch is seed in the next: spread them first.
    short = int.from_bytes(hashlib.sha256(f"order {seed}".encode()).digest()[:4], "little")
    return grain.MapDataset.range(rows).shuffle(seed=short).repeat()
