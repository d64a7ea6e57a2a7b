"""Scalars for TensorBoard, beside metrics.jsonl; what is done again replaces what was there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.settings import SettingsError


class Board:
    """Event files in a folder, from step `first` on.

    Raises `SettingsError` where the writer is not installed.
    """

    def __init__(self, folder: Path, first: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise SettingsError(
                "[trainer] tensorboard = true needs the package tensorboardX: "
                "pip install 'everstep[dashboard]'"
            ) from error
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(folder), purge_step=first, flush_secs=2)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """One point of each curve; `at` in seconds since 1970."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=at)

    def close(self) -> None:
        """All that was written is in the file."""
        self._writer.close()
