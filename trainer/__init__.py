"""The JAX side of everstep. It never imports the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(run_dir: Path | str, step: int | None = None, like: Any = None) -> Any:
    """The state that a job has saved, as numpy arrays; see `trainer.saved.load`."""
    from trainer import saved  # it needs JAX, which a slot must not load

    return saved.load(run_dir, step, like)
