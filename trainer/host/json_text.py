"""JSON out of files that others wrote: whatever is wrong with it is a `ValueError`."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value; raises `ValueError` with one line that says what is wrong.

    Python has limits of its own, of digits and of depth, and says so in other ways than JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.colno} of line {error.lineno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None
    except ValueError:
        raise ValueError("a number with more than 4300 digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
