"""The user's code of a run: what is copied, what is linked, and what was edited since."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisor.cluster import user_code
from supervisor.cluster.user_code import RunCode, copy_of, find_code, is_beside


def write(folder: Path, *names: str, text: str = "") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def opened(folder: Path, run: int = 1, *, keep: bool = False) -> RunCode:
    code = RunCode("mine:Task", folder, folder / "runs" / "first", run)
    (folder / "runs" / "first").mkdir(parents=True, exist_ok=True)
    code.open(keep=keep)
    return code


def copied(folder: Path) -> list[str]:
    return [str(file) for file in find_code(folder, folder / "runs" / "first").files]


def test_code_is_copied_and_data_and_runs_are_not(tmp_path: Path) -> None:
    """A run directory grows to hundreds of gigabytes beside a module of a hundred lines."""
    write(tmp_path, "job.toml", "mine.py", "helper.py", "data.bin", "texts/a.txt", "tools/b.py")
    write(tmp_path, "package/__init__.py", "package/words.json", "package/deep/tree.bin")
    write(tmp_path, "runs/first/code.py", ".git/hook.py", "__pycache__/mine.py")
    write(tmp_path, "other/second/journal.jsonl", "other/second/lock", "other/second/code.py")
    write(tmp_path, "env/pyvenv.cfg", "env/lib/big.py")
    assert copied(tmp_path) == [
        "helper.py",
        "mine.py",
        "package/__init__.py",
        "package/deep/tree.bin",
        "package/words.json",
        "tools/b.py",
    ]


def test_a_copy_is_for_its_owner_only(tmp_path: Path) -> None:
    """Modules are open to all where they are edited; whatever a run leaves is not."""
    write(tmp_path, "mine.py", "tool.py")
    (tmp_path / "mine.py").chmod(0o664)
    (tmp_path / "tool.py").chmod(0o755)
    opened(tmp_path)
    copy = copy_of(tmp_path / "runs" / "first", 1)
    modes = [(copy / name).stat().st_mode & 0o777 for name in ("mine.py", "tool.py")]
    assert modes == [0o600, 0o700]


def test_what_lies_beside_the_code_is_found_beside_its_copy(tmp_path: Path) -> None:
    """`Path(__file__).with_name("words.txt")` must work in the copy as it did before."""
    write(tmp_path, "mine.py", "words.txt", "texts/a.txt", "tools/b.py", "tools/c.bin", text="x")
    write(tmp_path, "runs/first/metrics.jsonl")
    directory = opened(tmp_path).directory
    assert directory is not None
    for name in ("words.txt", "texts/a.txt", "tools/c.bin"):
        assert (directory / name).read_text() == "x"
    links = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_symlink())
    assert links == ["texts", "tools/c.bin", "words.txt"]
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_run_keeps_its_copy_and_names_what_was_edited(tmp_path: Path) -> None:
    """The first recovery ran the old code and the second the new one; the loss jumped."""
    write(tmp_path, "mine.py", "helper.py", text="x = 1")
    first = opened(tmp_path)
    assert first.directory is not None
    assert first.look() == ()
    write(tmp_path, "mine.py", text="x = 2")
    (tmp_path / "helper.py").unlink()
    os.utime(tmp_path / "mine.py", ns=(1, 1))
    assert first.look() == ("helper.py", "mine.py")
    assert first.look() == ()
    assert first.changed == ("helper.py", "mine.py")
    again = opened(tmp_path)  # a daemon that adopts the run
    assert again.directory == first.directory
    assert (first.directory / "mine.py").read_text() == "x = 1"
    assert again.look() == ("helper.py", "mine.py")
    write(tmp_path, "mine.py", "helper.py", text="x = 1")
    again.look()
    assert again.changed == ()


def test_a_new_run_copies_anew_unless_it_is_to_keep_the_code(tmp_path: Path) -> None:
    """A requeue by a scheduler is a new run, and a person may be editing meanwhile."""
    write(tmp_path, "mine.py", "words.txt", text="x = 1")
    opened(tmp_path, 1)
    write(tmp_path, "mine.py", text="x = 2")
    kept = opened(tmp_path, 4, keep=True).directory
    assert kept is not None
    assert (kept / "mine.py").read_text() == "x = 1"
    assert (kept / "words.txt").is_symlink()
    new = opened(tmp_path, 7).directory
    assert new is not None
    assert (new / "mine.py").read_text() == "x = 2"
    assert not copy_of(tmp_path / "runs" / "first", 1).exists()
    assert kept.exists()


def test_a_copy_that_was_cut_short_is_made_anew(tmp_path: Path) -> None:
    """A daemon may die in the midst of it."""
    write(tmp_path, "mine.py", text="x = 1")
    write(tmp_path, "runs/first/code/run-1.new/stale.py")
    directory = opened(tmp_path).directory
    assert directory is not None
    assert [path.name for path in directory.iterdir()] == ["mine.py"]


def test_a_run_whose_module_is_deleted_goes_on_with_its_copy(tmp_path: Path) -> None:
    """What a run began with is all that it needs."""
    write(tmp_path, "mine.py")
    first = opened(tmp_path)
    (tmp_path / "mine.py").unlink()
    assert opened(tmp_path).directory == first.directory is not None


@pytest.mark.parametrize("task", ["language_model", "installed.package:Task"])
def test_what_is_not_beside_the_settings_is_not_copied(tmp_path: Path, task: str) -> None:
    """The built-in task is installed on every node, and so may be the user's."""
    write(tmp_path, "other.py")
    assert not is_beside(task, tmp_path)


def test_large_data_in_a_package_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of gigabytes in a package would be copied at each start."""
    monkeypatch.setattr(user_code, "BYTES_MAX", 2_000)
    write(tmp_path, "mine/__init__.py", "mine/words.json")
    write(tmp_path, "mine/weights.bin", text="x" * 3_000)
    directory = opened(tmp_path).directory
    assert directory is not None
    assert (directory / "mine" / "weights.bin").is_symlink()
    assert not (directory / "mine" / "words.json").is_symlink()


def test_of_a_folder_of_many_files_what_is_near_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand images beside the code are no reason to refuse it, or to wait."""
    monkeypatch.setattr(user_code, "ENTRIES_MAX", 8)
    write(tmp_path, "mine.py", "tools/b.py", *(f"photos/{number}.jpg" for number in range(9)))
    write(tmp_path, "photos/deep/c.py")
    code = opened(tmp_path)
    assert code.directory is not None
    assert (code.directory / "tools" / "b.py").is_file()
    assert (code.directory / "photos").is_symlink()
    assert [str(folder) for folder in code.unsearched] == ["photos/deep"]


def test_a_linked_folder_that_leads_back_is_searched_once(tmp_path: Path) -> None:
    """A loop of links would never end."""
    write(tmp_path, "mine.py", "tools/b.py")
    (tmp_path / "tools" / "back").symlink_to(tmp_path / "tools")
    assert copied(tmp_path) == ["mine.py", "tools/b.py"]


def test_a_copy_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a run went on with modules of its own that were empty."""
    write(tmp_path, "mine.py", "package/__init__.py", text="x = 1")
    flushed: set[str] = set()
    true = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        true(descriptor)

    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            assert {"mine.py", "__init__.py", "package", self.name} <= flushed
            flushed.add("checked")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    assert opened(tmp_path).directory is not None
    assert "checked" in flushed
