"""Which code of the user's own is loaded, by digests: so that a resume can say what has changed.

Looks at modules that were imported; what an import would find now is not its concern.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_OURS = tuple(
    f"{Path(__file__).resolve().parents[2] / name}/" for name in ("trainer", "supervisor")
)
_INSTALLED = tuple(
    f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "purelib", "platlib")
)
_DIGITS = 12


def digests_of(task: str) -> dict[str, str]:
    """The first digits of SHA-256 of each module's file, by the module's name.

    Of all loaded modules that are neither installed nor of this package, and of the package that
    `task` ("module:name") is in, wherever it lies. A module without a file counts for nothing.
    """
    top = task.partition(":")[0].partition(".")[0] if ":" in task else ""
    found = {}
    for name, module in sys.modules.copy().items():
        origin = getattr(module, "__file__", None)
        if not isinstance(origin, str) or not origin.endswith(".py"):
            continue
        file = Path(origin).resolve()
        is_theirs = top != "" and name.partition(".")[0] == top
        if is_theirs or not str(file).startswith((*_OURS, *_INSTALLED)):
            try:
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS]
            except OSError:
                continue  # gone since it was imported
    return dict(sorted(found.items()))


def digest_of(code: Mapping[str, str]) -> str:
    """One digest of all."""
    text = "\n".join(f"{name} {digest}" for name, digest in code.items())
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
