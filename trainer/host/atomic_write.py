"""A file that is there in whole or not at all, for its owner only, whatever the disk does.

It neither makes directories nor reads.
"""

import os
import tempfile
from pathlib import Path

_PROBE_BYTES = 65536


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash, or a full disk, leaves the old one or the new one.

    Raises OSError; then no draft is left, which would take the room of what follows.
    """
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        flush(path.parent)  # the name too, not only what is behind it
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Put a file, or the names in a directory, on the disk itself. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Put all files below a folder, and their names, on the disk itself; links are left out.

    Raises OSError.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            flush(path)
    flush(folder)


def try_to_write(folder: Path) -> None:
    """Raise the OSError that a write below the folder would meet, though it be still to be made.

    Tried in the folder, or its nearest parent that is there, with a file without a name.
    """
    # Unlike those of Path, this one answers no where a parent may not be looked into.
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        file.write(bytes(_PROBE_BYTES))
