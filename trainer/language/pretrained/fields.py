"""Typed values out of the settings that came with a model; what is wrong is said with its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.settings import SettingsError, show

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """A table of a file. Every method raises `SettingsError` that names file, key and value."""

    where: str
    table: Mapping[str, Any]

    def whole(self, key: str, default: Any = _NOTHING) -> int:
        """A positive whole number."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "must be a positive whole number")
        return value

    def number(self, key: str, default: Any = _NOTHING) -> float:
        """A positive number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, "must be a positive number")
        return float(value)

    def truth(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "must be true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """The key is missing, or has one of the values that we can compute."""
        value = self.table.get(key)
        if value is not None and value not in allowed:
            words = " or ".join(show(one) for one in allowed) or "nothing"
            raise self.wrong(key, f"is not supported here, only {words} is; use another model")

    def wrong(self, key: str, reason: str) -> SettingsError:
        """The error that says why a key is wrong."""
        value = self.table.get(key)
        shown = "null" if value is None else show(value)
        return SettingsError(f"{self.where}: {key} = {shown} {reason}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.table.get(key)
        if value is not None:
            return value
        if default is _NOTHING:
            raise SettingsError(
                f"{self.where}: {key} is missing; the file is no model's, or damaged"
            )
        return default
