"""Where sockets and other short-lived things of a run lie: below /tmp, for their owner only.

Not in the run directory, since the path of a Unix socket has at most 107 bytes; not in TMPDIR,
which may be long; not below /run/user, which is removed when its user logs out.
"""

import contextlib
import hashlib
import os
import stat
from pathlib import Path


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


def short_directory() -> Path:
    """The directory of this user, made if it is missing. Raises OSError."""
    return private_directory(Path("/tmp") / f"everstep-{os.getuid()}")


def socket_path(run_dir: Path, name: str = "") -> Path:
    """Where a socket of this run is, whatever the length of `run_dir`: 50 bytes or so."""
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return Path("/tmp") / f"everstep-{os.getuid()}" / f"{digest}{name}.sock"


def remove_sockets(run_dir: Path) -> None:
    """Remove all sockets of this run, once nothing of it lives. Raises OSError."""
    path = socket_path(run_dir)
    for one in path.parent.glob(f"{path.stem}*.sock"):
        one.unlink(missing_ok=True)
