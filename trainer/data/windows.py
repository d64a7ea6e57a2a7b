"""Text as bytes in memory: which part is held out, which windows of it a step trains on.

The quick way for a text of some megabytes: no tokenizer, no cache, numpy only.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import DataSettings
from trainer.data.documents import decoded
from trainer.data.files import READ_ERRORS, find_files, open_file, size_of, unreadable
from trainer.settings import SettingsError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The bytes to train on and those held out, with a digest of both."""

    train: Bytes
    held_out: Bytes
    files: int
    digest: str


def read_text(settings: DataSettings, config_dir: str) -> Text:
    """Read the files in the order of their names; hold out the tail of each.

    Of the standard library `bytes_max` are read; relative paths start at the settings file. Raises
    `SettingsError` where there is nothing to read, too little for one sequence or more than that.
    """
    files = find_files(settings, "text", config_dir)
    if settings.path and (size := sum(map(size_of, files))) > settings.bytes_max:
        raise SettingsError(
            f"[trainer.data] path = {list(settings.path)}: {size} bytes of text are more than "
            f"bytes_max = {settings.bytes_max}; to train on all of it, set bytes_max = {size}"
        )
    pieces: list[bytes] = []
    left = settings.bytes_max
    for file in files:
        if left <= 0:
            break
        with open_file(file) as opened:
            try:
                pieces.append(opened.read(left))
            except READ_ERRORS as error:
                raise unreadable(file, "text", error) from None
        if settings.path:
            decoded(pieces[-1], file, 0)
        left -= len(pieces[-1])
    cuts = [len(one) - int(len(one) * settings.held_out_fraction) for one in pieces]
    train = b"".join(one[:cut] for one, cut in zip(pieces, cuts, strict=True))
    held_out = b"".join(one[cut:] for one, cut in zip(pieces, cuts, strict=True))
    if min(len(train), len(held_out)) <= settings.sequence_length:
        raise SettingsError(
            f"[trainer.data] path = {list(settings.path)}: {len(train)} bytes to train on and "
            f"{len(held_out)} held out are too few for sequence_length = "
            f"{settings.sequence_length}; give more text or shorter sequences"
        )
    digest = hashlib.sha256(train)
    digest.update(held_out)
    return Text(
        train=np.frombuffer(train, np.uint8),
        held_out=np.frombuffer(held_out, np.uint8),
        files=len(pieces),
        digest=digest.hexdigest(),
    )


class Windows:
    """Rows that start at random places of a text of bytes; a `Source`."""

    def __init__(
        self, text: Text, settings: DataSettings, *, seed: int, held_out_batches: int
    ) -> None:
        self.text = text
        self._seed, self._held_out_batches = seed, held_out_batches
        self._count, self._length = settings.batch_size, settings.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in a step over all ranks."""
        return self._count * self._length

    def train_rows(self, step: int, rows: slice) -> dict[str, Bytes]:
        """ "tokens" uint8 `[rows, length + 1]`."""
        starts = self._starts(step)[rows]
        return {"tokens": _windows(self.text.train, starts, self._length)}

    def held_out_rows(self, index: int, rows: slice) -> dict[str, Bytes]:
        """ "tokens" uint8 `[rows, length + 1]`, spread evenly over what is held out."""
        tokens = held_out_rows(
            self.text,
            index=index,
            batches=self._held_out_batches,
            count=self._count,
            length=self._length,
        )
        return {"tokens": tokens[rows]}

    def sample_ids(self, step: int) -> list[int]:
        """Where in the text the rows start."""
        starts: list[int] = self._starts(step).tolist()
        return starts

    def position(self, step: int) -> dict[str, int]:
        """Windows are drawn with replacement: an epoch is as many bytes as the text has."""
        epoch = step * self.tokens_per_step // len(self.text.train)
        return {"epoch": epoch, "samples": step * self._count}

    def facts(self) -> dict[str, Any]:
        """The text by its digest, and its unigram entropy in nats a byte."""
        return {
            "text_sha256": self.text.digest,
            "text_bytes": len(self.text.train) + len(self.text.held_out),
            "text_files": self.text.files,
            "unigram_entropy": unigram_entropy(self.text),
        }

    def _starts(self, step: int) -> NDArray[np.int64]:
        return _draw(self.text, seed=self._seed, step=step, count=self._count, length=self._length)


def train_rows(text: Text, *, seed: int, step: int, count: int, length: int) -> Bytes:
    """The global batch of a step: uint8 `[count, length + 1]`."""
    starts = _draw(text, seed=seed, step=step, count=count, length=length)
    return _windows(text.train, starts, length)


def held_out_rows(text: Text, *, index: int, batches: int, count: int, length: int) -> Bytes:
    """Held-out batch `index` of `batches`, spread evenly over the text: `[count, length + 1]`."""
    places = index * count + np.arange(count, dtype=np.int64)
    starts = places * (len(text.held_out) - length) // (batches * count)
    return _windows(text.held_out, starts, length)


def unigram_entropy(text: Text) -> float:
    """Entropy of a byte of the text drawn at random, in nats.

    The best that a model can reach which ignores all context.
    """
    counts = np.bincount(text.train, minlength=256) + np.bincount(text.held_out, minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return math.fsum(float(one) for one in -shares * np.log(shares))


def _draw(text: Text, *, seed: int, step: int, count: int, length: int) -> NDArray[np.int64]:
    # The raw stream of Philox, keyed by seed and step, is fixed for ever; numpy's distributions on
    # top of it are not.
    draws = np.random.Philox(key=(seed << 64) | step).random_raw(count)
    return (draws % np.uint64(len(text.train) - length)).astype(np.int64)


def _windows(data: Bytes, starts: NDArray[np.int64], length: int) -> Bytes:
    rows: Bytes = data[starts[:, None] + np.arange(length + 1)]
    return rows
