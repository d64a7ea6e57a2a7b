"""The settings that the workers of a run were started with, kept for the daemons that come later.

A run goes on under them until its workers start anew; nothing is decided here. The password of a
store is never written: it counts as it is now.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from supervisor.config import Settings, effective
from supervisor.health.store_address import masked
from trainer.host.atomic_write import write_whole

SETTINGS_FILE = "settings.json"
_COUNTS_AT_ONCE = "control.log"  # it is the daemon's alone: no worker waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """What a run goes on under. `changed` are the keys whose new values wait for new workers.

    `settings` is None where it is not known what the workers were started with.
    """

    settings: Settings | None
    changed: tuple[str, ...] = ()


def digest_of(settings: Settings) -> str:
    """Names settings in the header of a journal; not the password, for guesses to be tried on."""
    return hashlib.sha256(json.dumps(_table(settings), sort_keys=True).encode()).hexdigest()[:16]


def keep(run_dir: Path, settings: Settings, config_path: Path) -> None:
    """Write down what workers are about to be started with, and by which file. Raises OSError."""
    table = _table(settings)
    kept = {"digest": digest_of(settings), "config": str(config_path), "settings": table}
    write_whole(run_dir / SETTINGS_FILE, json.dumps(kept, indent=2) + "\n")


def recall(run_dir: Path, digest: str, now: Settings) -> InForce:
    """What a run whose header bears `digest` was started with, beside the settings of now."""
    if digest == digest_of(now):
        return InForce(settings=now)
    try:
        kept = json.loads((run_dir / SETTINGS_FILE).read_text(encoding="utf-8"))
        if kept["digest"] != digest:
            return InForce(settings=None)
        found = kept["settings"]
        url = found["heartbeats"]["redis_url"]
        if url == masked(now.heartbeats.redis_url):
            found["heartbeats"]["redis_url"] = now.heartbeats.redis_url
        elif "***" in url:
            return InForce(settings=None)  # of another server, whose password is not known any more
        former = Settings.model_validate(found)
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return InForce(settings=None)
    return InForce(settings=former, changed=_changes(former, now))


def steps_before(run_dir: Path) -> int | None:
    """Return the `trainer.steps` that the last workers were started with; None if unknown."""
    return kept_before(run_dir).steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Of the settings that the last workers were started with, what a look at a run needs."""

    config: str | None = None
    steps: int | None = None
    orphan_after_s: float = 0.0


def kept_before(run_dir: Path) -> Kept:
    """Read it, as far as it is known."""
    try:
        kept = json.loads((run_dir / SETTINGS_FILE).read_text(encoding="utf-8"))
        settings = kept["settings"]
        return Kept(
            config=str(kept["config"]) if "config" in kept else None,
            steps=int(settings["trainer"]["steps"]),
            orphan_after_s=float(settings["recovery"]["orphan_after_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Kept()


def _changes(former: Settings, now: Settings) -> tuple[str, ...]:
    then, new = effective(former, {}), effective(now, {})
    return tuple(
        key for key in new if key != _COUNTS_AT_ONCE and then[key]["value"] != new[key]["value"]
    )


def _table(settings: Settings) -> dict[str, Any]:
    table = settings.model_dump(mode="json")
    table["heartbeats"]["redis_url"] = masked(settings.heartbeats.redis_url)
    section, _, key = _COUNTS_AT_ONCE.partition(".")
    del table[section][key]
    return table
