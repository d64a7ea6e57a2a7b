"""Where the store of heartbeats is: for the daemon that reads it and the ranks that write to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """How to reach the store. `ca_file`: what signs the server's certificate; "": the system's."""

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: bool = False
    ca_file: str = ""
