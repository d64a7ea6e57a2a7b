"""What was seen of a failure, kept for people: incidents/NNNN/ with stacks, log tails, a summary.

Files are for their owner only, whole or absent, and bounded in size and number. Decides nothing;
what cannot be written raises OSError, for the caller to log: evidence never stops a recovery.

    incidents/NNNN/stacks-rank-R.txt  log-rank-R.txt  evidence-generation-N.json  incident.json
                   error-generation-N-rank-R.txt (of an exception too long for incident.json)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.host.tolerant_output import ERROR_SUFFIX

STACKS_BYTES_MAX = 256 * 1024  # a rank
LOG_BYTES_MAX = 128 * 1024  # a rank; its end is kept
INCIDENT_BYTES_MAX = 32 * 2**20  # all ranks together: with a thousand of them each gets less
SUMMARY_BYTES_MAX = 2**20
INCIDENTS_MAX = 200

_NUMBER = re.compile(r"[0-9]{4,}")


def write_evidence(
    run_dir: Path, number: int, generation: int, evidence: Mapping[int, Mapping[str, Any]]
) -> Path:
    """Write what the slots gathered, by rank: `stacks` and `log_tail` (texts, or lists of lines).

    All else that a rank's evidence holds (its state, its beat, an error in place of them) goes to
    evidence-generation-N.json. A further generation of the same incident does not overwrite the
    files of the first. Returns the incident's directory.
    """
    directory = _directory(run_dir, number)
    share = INCIDENT_BYTES_MAX // (2 * max(1, len(evidence)))
    rest: dict[str, dict[str, Any]] = {}
    for rank, found in sorted(evidence.items()):
        rest[str(rank)] = {k: v for k, v in found.items() if k not in ("stacks", "log_tail")}
        stacks, tail = _text(found.get("stacks")), _text(found.get("log_tail"))
        if stacks:
            path = _unused(directory, "stacks", generation, rank)
            _write(path, _head(stacks, min(STACKS_BYTES_MAX, share)))
        if tail:
            path = _unused(directory, "log", generation, rank)
            _write(path, _end(tail, min(LOG_BYTES_MAX, share)))
        _keep_error(run_dir, directory, generation, rank)
    _write_json(directory / f"evidence-generation-{generation}.json", {"ranks": rest})
    return directory


def _keep_error(run_dir: Path, directory: Path, generation: int, rank: int) -> None:
    """Give the incident the exception that was too long for a report, where a rank left one."""
    left = run_dir / "logs" / f"generation-{generation}" / f"rank-{rank}{ERROR_SUFFIX}"
    kept = directory / f"error-generation-{generation}-rank-{rank}.txt"
    if left.is_file() and not left.is_symlink() and not kept.exists():
        left.rename(kept)


def write_summary(run_dir: Path, number: int, summary: Mapping[str, Any]) -> Path:
    """Write (or replace) incident.json: the summary with its `number`; returns its path."""
    path = _directory(run_dir, number) / "incident.json"
    _write_json(path, {"number": number, **summary})
    return path


def latest(run_dir: Path) -> dict[str, Any] | None:
    """The summary of the newest incident, with `number` and `path`; None if there was none.

    Where its incident.json is missing or damaged, `error` says so in place of the rest.
    """
    numbers = _numbers(run_dir)
    if not numbers:
        return None
    path = run_dir / "incidents" / f"{numbers[-1]:04d}"
    about = {"number": numbers[-1], "path": str(path)}
    try:
        with (path / "incident.json").open("rb") as file:
            summary = json.loads(file.read(SUMMARY_BYTES_MAX + 1))
    except FileNotFoundError:
        return {**about, "error": "no summary was written yet"}
    except OSError as error:
        return {**about, "error": f"incident.json cannot be read: {error.strerror}"}
    except ValueError as error:
        return {**about, "error": f"incident.json is damaged: {error}"}
    return {**summary, **about} if isinstance(summary, dict) else {**about, "error": "damaged"}


def _numbers(run_dir: Path) -> list[int]:
    root = run_dir / "incidents"
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def _directory(run_dir: Path, number: int) -> Path:
    path = run_dir / "incidents" / f"{number:04d}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        path.mkdir(mode=0o700)
        for old in _numbers(run_dir)[:-INCIDENTS_MAX]:
            shutil.rmtree(path.parent / f"{old:04d}")
    return path


def _unused(directory: Path, what: str, generation: int, rank: int) -> Path:
    path = directory / f"{what}-rank-{rank}.txt"
    return directory / f"{what}-generation-{generation}-rank-{rank}.txt" if path.exists() else path


def _text(found: object) -> str:
    if isinstance(found, list | tuple):
        return "".join(f"{str(line).rstrip()}\n" for line in found)
    return "" if found is None else str(found)


def _head(text: str, limit: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= limit else data[:limit] + b"\n[cut here]\n"


def _end(text: str, limit: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= limit else b"[cut here]\n" + data[-limit:]


def _write_json(path: Path, found: Mapping[str, Any]) -> None:
    data = json.dumps(found, indent=1, default=str).encode("utf-8", "replace")
    if len(data) > SUMMARY_BYTES_MAX:
        kept = {key: found[key] for key in ("number",) if key in found}
        kept["error"] = f"{len(data)} bytes were too many; the journal has the facts"
        data = json.dumps(kept).encode()
    _write(path, data + b"\n")


def _write(path: Path, data: bytes) -> None:
    """Whole or absent: a reader never sees half a file, nor does the next start."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
