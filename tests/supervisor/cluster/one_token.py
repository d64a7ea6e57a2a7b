"""One token for all clusters of a test process: Ray reads it once, and never again."""

from __future__ import annotations

import secrets
from pathlib import Path

from supervisor.cluster.own_servers import TOKEN_FILE, authenticate

TOKEN = secrets.token_hex(32)


def authenticate_once(directory: Path) -> None:
    """Let this process speak to a head of `directory`, as a daemon does that speaks to one only."""
    authenticate(directory)
    (directory / TOKEN_FILE).write_text(TOKEN)
