"""Text from outside is shown, and does nothing else."""

from __future__ import annotations

import time

import pytest

from trainer.host.printable import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größer → 模型 👍", "größer → 模型 👍"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x07\x00\x7f\x9b", "\\x1b[2J\\x07\\x00\\x7f\\x9b"),
        ("back\rover\b", "back\\rover\\x08"),
        ("a\u202eb\u2028c", "a\\u202eb\\u2028c"),
        ("half \ud800", "half \\ud800"),
        ("file-\udcff", "file-\\udcff"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str) -> None:
    """A tensor, a metric or a host whose name holds escape codes acted on the terminal."""
    assert printable(text) == shown


def test_a_text_of_megabytes_is_one_line_at_once() -> None:
    """An exception's text of 12 MB is looked at twice a second."""
    text = "first\n\n  second\x1b " + "word " * 3_000_000
    began = time.process_time()
    line = one_line(text, 50)
    assert time.process_time() - began < 0.05
    assert line == "first second\\x1b word word word word word word ..."
    assert one_line("short", 5) == "short"
    assert one_line(None) == "None"
    assert one_line("") == ""
