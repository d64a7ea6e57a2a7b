"""The interface between data and a task, and the choice of what stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import structlog
from numpy.typing import NDArray

from trainer.config import DataSettings
from trainer.data.files import DataMissing, format_of
from trainer.data.tokenizer import BytesTokenizer, Tokenizer
from trainer.data.windows import Windows, read_text
from trainer.host.disk_errors import DataUnavailable, may_pass

log = structlog.get_logger()

Rows = dict[str, NDArray[Any]]
"""Rows of a batch, L = `sequence_length`; the first axis is the row.

"tokens": int32 `[n, L + 1]`, uint8 where the tokens are bytes. "weights": float32 `[n, L]`, 1 for a
target that counts; only where some do not. "segments": int32 `[n, L + 1]`, the number of the
document within the row, from 1, 0 = padding; only where a row holds several, none of which may see
another. Which of them there are is the same for all rows of a source.
"""


class Source(Protocol):
    """Rows by step. The order depends on data, seed and step only: any rank of any world agrees."""

    @property
    def tokens_per_step(self) -> int:
        """Targets of a global batch, those that do not count included."""

    def train_rows(self, step: int, rows: slice) -> Rows:
        """These rows of the global batch of a step."""

    def held_out_rows(self, index: int, rows: slice) -> Rows:
        """These rows of a held-out batch, the same at every evaluation."""

    def sample_ids(self, step: int) -> list[int]:
        """What the rows of the global batch of a step are, in order: equal ids, equal rows."""

    def position(self, step: int) -> Mapping[str, int]:
        """Where the order stands after `step` steps: whole "epoch"s, and "samples" drawn."""

    def facts(self) -> Mapping[str, Any]:
        """Digest and size of the data; plain JSON."""


def open_source(
    settings: DataSettings,
    tokenizer: Tokenizer,
    config_dir: str | Path,
    *,
    seed: int,
    held_out_batches: int,
    tick: Callable[[], None] = lambda: None,
    ray_address: str = "local",
) -> Source:
    """Open the data that the settings name; relative paths start at `config_dir`.

    What must be read, executed or tokenised first is kept in `settings.cache`, so that only the
    first start waits for it; `tick` is called while that goes on, and a Ray Dataset is executed at
    `ray_address`, by default on this machine. Where the files are gone or cannot be reached, what
    was tokenised of them before will do. Raises `SettingsError` for data that are missing,
    malformed, or too few for one global batch, and `DataUnavailable` where a retry may help.
    """
    try:
        return _open(
            settings,
            tokenizer,
            Path(config_dir),
            seed=seed,
            held_out_batches=held_out_batches,
            tick=tick,
            ray_address=ray_address,
        )
    except (DataMissing, DataUnavailable, OSError) as error:
        if isinstance(error, OSError) and not may_pass(error):
            raise
        from trainer.data.corpus import open_remembered

        found = open_remembered(
            settings, tokenizer, Path(config_dir), seed=seed, held_out_batches=held_out_batches
        )
        if found is None:
            raise
        log.warning("data_served_from_cache", why=str(error))
        return found


def _open(
    settings: DataSettings,
    tokenizer: Tokenizer,
    config_dir: Path,
    *,
    seed: int,
    held_out_batches: int,
    tick: Callable[[], None],
    ray_address: str,
) -> Source:
    kind = format_of(settings, config_dir)
    if _as_windows(settings, kind, tokenizer):
        text = read_text(settings, str(config_dir))
        return Windows(text, settings, seed=seed, held_out_batches=held_out_batches)
    from trainer.data.corpus import open_rows  # the default job needs none of it

    return open_rows(
        settings,
        kind,
        tokenizer,
        config_dir,
        seed=seed,
        held_out_batches=held_out_batches,
        tick=tick,
        ray_address=ray_address,
    )


def _as_windows(settings: DataSettings, kind: str, tokenizer: Tokenizer) -> bool:
    if kind != "text" or settings.packing != "auto" or settings.held_out_path:
        return False
    return isinstance(tokenizer, BytesTokenizer)
