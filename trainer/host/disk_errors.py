"""What the errno of a failed access means, for the whole project: one table.

Whatever is not in it may be over at the next try: a disk that stumbles, a server of files that
starts again.
"""

from __future__ import annotations

import errno

from trainer.settings import SettingsError

WRONG_PLACE = frozenset(
    {
        *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
        *(errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
        *(errno.ENODEV, errno.ENXIO, errno.EXDEV, errno.EFBIG, errno.EOPNOTSUPP),
    }
)
"""The path, the rights or the kind of file are wrong: it stays so until somebody changes them."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""It stays so until somebody makes room."""


class DataUnavailable(Exception):
    """Nobody's mistake: the next start may succeed."""


def may_pass(error: BaseException) -> bool:
    """Whether the same access may succeed at the next try. Without an errno it never does."""
    code = getattr(error, "errno", None)
    return isinstance(error, OSError) and code is not None and code not in WRONG_PLACE | NO_ROOM


def refusal(message: str, error: BaseException) -> Exception:
    """What to raise for a file that cannot be read: it is retried if the error may pass."""
    return DataUnavailable(message) if may_pass(error) else SettingsError(message)


def reason(error: BaseException) -> str:
    """The error in words."""
    return str(getattr(error, "strerror", None) or error)
