"""Where the heartbeats of a job go, out of its settings, a file and the environment.

The password may come from any of the three; it is never shown, and no child inherits it.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from supervisor.errors import ClusterUnusable
from trainer.host.environment import PASSWORD_VARIABLE
from trainer.wire.store_address import StoreAddress

SCHEMES = ("redis", "rediss")
_PASSWORD_BYTES_MAX = 4096


class StoreSettings(Protocol):
    """The part of the settings that is read here: section [heartbeats]."""

    @property
    def redis_url(self) -> str: ...
    @property
    def redis_password_file(self) -> str: ...
    @property
    def redis_ca_file(self) -> str: ...


def fault_of(url: str) -> str | None:
    """What is wrong with a URL, without repeating any of it; None where it is fine."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may hold the password
        return "is no URL; write redis://[USER:PASSWORD@]HOST:PORT"
    if parts.scheme not in SCHEMES:
        return 'must be "local", or start with redis:// or, for TLS, rediss://'
    if not parts.hostname:
        return "names no host; write redis://[USER:PASSWORD@]HOST:PORT"
    if port == 0 or parts.query or parts.fragment:
        return "holds more than a host, a port and a database; write redis://HOST:PORT/DATABASE"
    if not (parts.path in ("", "/") or parts.path[1:].isdecimal()):
        return "names a database that is no number; write redis://HOST:PORT/0"
    return None


def take_password(environment: MutableMapping[str, str] = os.environ) -> str:
    """What EVERSTEP_REDIS_PASSWORD holds, "" if nothing; from then on no child inherits it."""
    return environment.pop(PASSWORD_VARIABLE, "")


def address_of(settings: StoreSettings, config_dir: Path, given: str = "") -> StoreAddress:
    """The address of a store that is not the job's own.

    The password is that of the URL, else of the file, else the one `given` in the environment.
    Raises ClusterUnusable where a file cannot be read.
    """
    parts = urlsplit(settings.redis_url)
    ca_file = ""
    if settings.redis_ca_file:
        path = config_dir / settings.redis_ca_file
        _read(path, "redis_ca_file", None)
        ca_file = str(path.resolve())
    password = unquote(parts.password or "")
    if not password and settings.redis_password_file:
        path = config_dir / settings.redis_password_file
        password = _read(path, "redis_password_file", _PASSWORD_BYTES_MAX).strip()
    return StoreAddress(
        host=parts.hostname or "",
        port=parts.port or 6379,
        username=unquote(parts.username or "") or None,
        password=password or given or None,
        db=int(parts.path[1:] or 0),
        tls=parts.scheme == "rediss",
        ca_file=ca_file,
    )


def masked(url: str) -> str:
    """The URL without its password."""
    try:
        parts: SplitResult = urlsplit(url)
        if parts.password is None:
            return url
    except ValueError:
        return "***"
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


def _read(path: Path, key: str, limit: int | None) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(limit or -1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ClusterUnusable(f"heartbeats.{key}: {path} cannot be read ({why})") from error
