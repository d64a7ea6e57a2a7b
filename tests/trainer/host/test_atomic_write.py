"""Small files that matter: the old one or the new one, never half of it, and no draft left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainer.host.atomic_write import write_whole


def test_the_new_text_replaces_the_old_for_its_owner_only(tmp_path: Path) -> None:
    """Passwords lie in some of them."""
    path = tmp_path / "record"
    path.write_text("old")
    path.chmod(0o644)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_text_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an epoch would be taken for a lower one; a draft would take the last room."""
    path = tmp_path / "epoch"
    write_whole(path, "7\n")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "8\n")
    assert path.read_text() == "7\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_draft_of_a_process_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    """It may have had any mode, and any content."""
    (tmp_path / "epoch.new").write_text("half")
    write_whole(tmp_path / "epoch", "1\n")
    assert [one.name for one in tmp_path.iterdir()] == ["epoch"]
