"""What a full disk does to lines of output: kept or dropped, never an error of the training."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from trainer.host.tolerant_output import LineFile, tolerant_text

FULL = os.strerror(errno.ENOSPC)


class Disk:
    """Takes so many more bytes of what `os.write` is given, and any if None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        write = os.write

        def limited(descriptor: int, data: bytes) -> int:
            if self.room is None:
                return write(descriptor, data)
            if self.room == 0:
                raise OSError(errno.ENOSPC, FULL)
            taken = write(descriptor, bytes(data)[: self.room])
            self.room -= taken
            return taken

        monkeypatch.setattr(os, "write", limited)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def whole_lines(path: Path) -> list[int]:
    """As a reader finds them: torn ones are passed over."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["step"])
        except ValueError:
            continue
    return found


def step(number: int) -> str:
    return json.dumps({"step": number})


def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(
    tmp_path: Path, disk: Disk
) -> None:
    """An OSError of the metrics ended a job that had nothing wrong with it."""
    path, news = tmp_path / "metrics.jsonl", list[str]()
    lines = LineFile(path, news.append)
    lines.append(step(0))
    disk.room = 0
    lines.append(step(1))
    lines.append(step(2))
    assert whole_lines(path) == [0]
    assert news == [f"{path}: {FULL}"]  # once
    disk.room = None
    lines.append(step(3))
    assert whole_lines(path) == [0, 1, 2, 3]
    assert news[1:] == [""]
    assert path.stat().st_mode & 0o777 == 0o600
    disk.room = 0
    lines.append(step(4))
    disk.room = None
    lines.flush()
    assert whole_lines(path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("room", range(1, 40))
def test_a_line_that_was_cut_off_is_never_taken_for_whole(
    tmp_path: Path, disk: Disk, room: int
) -> None:
    """The last bytes of a disk hold a part of a line, and the next line began in its middle."""
    path = tmp_path / "metrics.jsonl"
    lines = LineFile(path, lambda why: None)
    disk.room = room
    for number in range(4):
        lines.append(step(number))
    assert path.stat().st_size == min(room, 4 * len(step(0) + "\n"))
    disk.room = None
    lines.append(step(4))
    found = whole_lines(path)
    assert sorted(set(found)) == [0, 1, 2, 3, 4]
    assert len(found) <= 6  # one that lacked its newline alone is there twice, and equal


def test_of_what_waits_for_room_the_newest_is_kept(tmp_path: Path, disk: Disk) -> None:
    """Neither may a disk that stays full for a week fill the memory."""
    path = tmp_path / "metrics.jsonl"
    lines = LineFile(path, lambda why: None, kept_max=3)
    disk.room = 0
    for number in range(10):
        lines.append(step(number))
    disk.room = None
    lines.append(step(10))
    assert whole_lines(path) == [8, 9, 10]


def test_a_directory_that_is_gone_is_a_disk_that_refuses(tmp_path: Path) -> None:
    """Whatever the reason, training goes on."""
    news: list[str] = []
    LineFile(tmp_path / "missing" / "metrics.jsonl", news.append).append(step(0))
    assert news[0].endswith(os.strerror(errno.ENOENT))


def test_a_print_on_a_full_disk_is_dropped_and_the_next_one_is_there(
    tmp_path: Path, disk: Disk
) -> None:
    """`print` raised OSError in a user's train step."""
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    news: list[str] = []
    text, raw = tolerant_text(descriptor)
    raw.on_change = news.append
    print("first", file=text)
    disk.room = 0
    print("second \ud800", file=text)
    print("third", file=text, flush=True)
    disk.room = None
    print("fourth", file=text)
    assert (tmp_path / "log").read_text() == "first\nfourth\n"
    assert news == [FULL, ""]
    assert text.fileno() == descriptor
    os.close(descriptor)
