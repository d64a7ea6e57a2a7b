"""Where sockets and other short-lived things of a run lie: below /tmp, for their owner only.

Not in the run directory, since the path of a Unix socket has at most 107 bytes; not in TMPDIR,
which may be long; not below /run/user, which is removed when its user logs out.
"""

import contextlib
import hashlib
import json
import os
import stat
from pathlib import Path

IDENTITY_FILE = "identity.json"  # in the run directory; the supervisor writes it


def private_directory(path: Path) -> Path:
    """Make `path` with mode 0700, or check that it is a directory that only we can enter.

    Raises OSError: a directory in /tmp that another user has made first is not to be trusted.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(0, "it is not a directory of ours with mode 0700", str(path))
    return path


def run_name(run_dir: Path) -> str:
    """The random name of a run, which no other user can guess; "" before it was given one."""
    try:
        name = json.loads((run_dir / IDENTITY_FILE).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) and name.isalnum() and len(name) <= 16 else ""


def tmp_directory(name: str = "") -> Path:
    """Of this user, or the one of a run that is used if another user has made that first."""
    return Path("/tmp") / f"everstep-{os.getuid()}{name and '-'}{name}"


def is_usable(path: Path) -> bool:
    """Whether it is ours alone, or can be made so."""
    try:
        status = path.lstat()
    except OSError:
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def short_directory(run_dir: Path) -> Path:
    """The directory for what is short-lived, made if it is missing. Raises OSError."""
    return private_directory(_short_directory(run_dir))


def _short_directory(run_dir: Path) -> Path:
    """The user's own, or that of the run if another user had made the other, or removed it since.

    One run keeps to one directory, or its later processes would not find what the earlier made.
    """
    path, own = tmp_directory(), tmp_directory(run_name(run_dir))
    return path if is_usable(path) and not (own.exists() and is_usable(own)) else own


def socket_path(run_dir: Path, name: str = "") -> Path:
    """Where a socket of this run is, whatever the length of `run_dir`: 60 bytes or so."""
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return _short_directory(run_dir) / f"{digest}{name}.sock"


def touch_sockets(run_dir: Path) -> None:
    """Let them look new to whatever removes old files from /tmp."""
    directory = _short_directory(run_dir)
    for path in (directory, *directory.glob("*.sock")):
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def remove_sockets(run_dir: Path) -> None:
    """Remove all sockets of this run, once nothing of it lives. Raises OSError."""
    path = socket_path(run_dir)
    for one in path.parent.glob(f"{path.stem}*.sock"):
        one.unlink(missing_ok=True)
    if path.parent != tmp_directory():
        with contextlib.suppress(OSError):  # something else of the run is still there
            path.parent.rmdir()
