"""A file that is there in whole or not at all, for its owner only, whatever the disk does.

It neither makes directories nor reads.
"""

import os
from pathlib import Path


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
