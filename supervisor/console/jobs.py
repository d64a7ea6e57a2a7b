"""The directories of jobs below one place: listed, and set aside when a job starts over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from supervisor.console.status_from_files import recorded_status
from supervisor.daemon.lock import acquire, is_held
from supervisor.disk.run_directory import require_plain_files
from supervisor.errors import DiskError, EverstepError, OperatorError
from supervisor.fsm.states import TERMINAL

_COLUMNS = ("state", "generation", "step", "loss")


def list_jobs(parent: Path) -> list[dict[str, Any]]:
    """Return name, state, generation, step and loss of each job below `parent`, by name.

    A job that a daemon runs has `running` set. What is no job's directory is left out. `problem`
    says why a job's files could not be read; the others are listed all the same.
    """
    rows = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name.startswith(".") or not path.is_dir():  # no job's name begins so
            continue
        known, is_running, problem = dict.fromkeys(_COLUMNS), False, None
        try:
            require_plain_files(path)
            if (found := recorded_status(path)) is None:
                continue
            known = {key: found[key] for key in _COLUMNS}
            is_running = is_held(path)
        except (OSError, EverstepError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        row = {"job": path.name, **known, "running": is_running, "run_dir": str(path)}
        rows.append({**row, "problem": problem})
    return rows


def set_aside(run_dir: Path) -> Path | None:
    """Move the directory of a job that has ended to a name that is free, and return that.

    None if there is no such directory. Raises AlreadyRunning, OperatorError if workers of the job
    may still live, or DiskError.
    """
    if not run_dir.is_dir():
        return None
    with acquire(run_dir):
        found = recorded_status(run_dir)
        if found and found["state"] not in {state.name for state in TERMINAL}:
            raise OperatorError(
                f"{run_dir}: its last daemon ended in {found['state']}, and its workers may still "
                "train; run the same command without --fresh to go on with them, `stop` it, and "
                "start over then"
            )
        target = next(
            path
            for number in range(1, 1_000_000)
            if not (path := run_dir.with_name(f"{run_dir.name}.{number}")).exists()
        )
        try:
            return run_dir.rename(target)
        except OSError as error:
            raise DiskError(f"{run_dir} cannot be moved to {target}: {error.strerror}") from error
