"""What a control group says of memory: how much there is, and whether the kernel killed for it.

Reads version 2 and version 1 of the kernel's interface, in a container as well. Where there is
neither, nothing is known, and nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number that no machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """The control group of memory that a process is in. `top` is where its hierarchy is mounted."""

    directory: Path
    top: Path
    is_v1: bool

    @classmethod
    def of(cls, pid: int, *, proc: Path = Path("/proc")) -> Self | None:
        """Its group now; None where that is not to be found out."""
        try:
            lines = (proc / str(pid) / "cgroup").read_text().splitlines()
            mounts = (proc / "self" / "mountinfo").read_text().splitlines()
        except OSError:
            return None
        for is_v1, root, top in _mounts(mounts):
            for line in lines:
                _, controllers, path = line.split(":", 2)
                if ("memory" in controllers.split(",")) if is_v1 else not controllers:
                    below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else "."
                    group = cls(directory=top / below, top=top, is_v1=is_v1)
                    if group.kills() is not None:
                        return group
        return None

    def kills(self) -> int | None:
        """How many of its processes the kernel has ended for want of memory; None if unknown."""
        try:
            text = (self.directory / self._name("memory.oom_control", "memory.events")).read_text()
        except OSError:
            return None
        for line in text.splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                return int(number)
        return None

    def limit(self) -> tuple[int, int] | None:
        """The narrowest limit that holds for it: bytes used at most, and allowed; None if none."""
        found: list[tuple[int, int]] = []
        for folder in (self.directory, *self.directory.parents):
            allowed = _number(folder / self._name("memory.limit_in_bytes", "memory.max"))
            if allowed is not None and allowed < _UNLIMITED:
                used = _number(folder / self._name("memory.max_usage_in_bytes", "memory.peak"))
                found.append((allowed, allowed if used is None else min(used, allowed)))
            if folder == self.top:
                break
        if not found:
            return None
        allowed, used = min(found)
        return used, allowed

    def _name(self, v1: str, v2: str) -> str:
        return v1 if self.is_v1 else v2


def _mounts(lines: list[str]) -> Iterator[tuple[bool, Path, Path]]:
    """Whether it is of version 1, which part of the hierarchy is mounted, and where."""
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, top = before.split(" ")[3:5]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield kind == "cgroup", Path(root), Path(top)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
