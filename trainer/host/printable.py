"""Text from outside made safe for a terminal: an escape code in a name must not act on it.

Applied wherever text reaches a terminal; what is stored stays as it was.
"""

import contextlib
import io
import os
import sys
import unicodedata
from pathlib import Path

_KEPT = "\n\t"
# What changes the order or the lines in which a text is shown, and is no control character.
_LAYOUT = "\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def make_tolerant() -> None:
    """Let no character that a terminal's encoding lacks, nor a closed descriptor, end a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as we run
        elif isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")


def printable(text: object) -> str:
    """Return the text with control characters written as escapes; new lines and tabs stay."""
    shown = str(text)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(_escaped(character) for character in shown)


def one_line(text: object, longest: int = 400) -> str:
    """Return the text as one printable line of at most `longest` characters."""
    whole = str(text)
    # Of a text of megabytes no more is looked at than can be shown.
    shown = printable(" ".join(whole[: 4 * longest].split()))
    if len(shown) <= longest and len(whole) <= 4 * longest:
        return shown
    return f"{shown[: longest - 3]}..."


def _escaped(character: str) -> str:
    if character in _KEPT:
        return character
    if character in _LAYOUT or unicodedata.category(character) in ("Cc", "Cs"):
        return character.encode("unicode_escape").decode("ascii")
    return character
