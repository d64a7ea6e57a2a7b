"""The user's code on its way to the nodes: what goes along, what stays, and what is too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import shipping
from supervisor.shipping import collect
from trainer.settings import SettingsError


def write(folder: Path, *names: str, text: str = "") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def collected(folder: Path, task: str = "mine:Task") -> list[str]:
    code = collect(task, folder, folder / "runs" / "first")
    assert code is not None
    return [str(file) for file in code.files]


def test_code_goes_along_and_data_and_runs_stay(tmp_path: Path) -> None:
    """A run directory grows to hundreds of gigabytes beside a module of a hundred lines."""
    write(tmp_path, "job.toml", "mine.py", "helper.py", "data.bin", "texts/a.txt", "tools/b.py")
    write(tmp_path, "package/__init__.py", "package/words.json", "package/deep/tree.bin")
    write(tmp_path, "runs/first/code.py", ".git/hook.py", "__pycache__/mine.py")
    write(tmp_path, "env/pyvenv.cfg", "env/lib/big.py")
    assert collected(tmp_path) == [
        "helper.py",
        "mine.py",
        "package/__init__.py",
        "package/deep/tree.bin",
        "package/words.json",
        "tools/b.py",
    ]


def test_a_copy_has_the_same_tree(tmp_path: Path) -> None:
    """Imports of a package must work there as they do here."""
    write(tmp_path / "here", "mine.py", "package/__init__.py", "package/deep/part.py", text="x = 1")
    code = collect("package.deep.part:Task", tmp_path / "here", tmp_path / "runs")
    assert code is not None
    (tmp_path / "here" / "mine.py").unlink()  # deleted by an editor meanwhile
    (tmp_path / "there").mkdir()
    code.copy_to(tmp_path / "there")
    copied = sorted(str(one.relative_to(tmp_path / "there")) for one in _files(tmp_path / "there"))
    assert copied == ["package/__init__.py", "package/deep/part.py"]
    assert (tmp_path / "there/package/deep/part.py").read_text() == "x = 1"


def _files(folder: Path) -> list[Path]:
    return [one for one in folder.rglob("*") if one.is_file()]


@pytest.mark.parametrize("task", ["language_model", "installed.package:Task"])
def test_what_is_not_beside_the_settings_is_not_sent(tmp_path: Path, task: str) -> None:
    """The task of the house is installed on every node, and so may be the user's."""
    write(tmp_path, "other.py")
    assert collect(task, tmp_path, tmp_path / "runs") is None


def test_too_much_is_refused_with_the_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node would fetch it at every start."""
    monkeypatch.setattr(shipping, "BYTES_MAX", 2_000_000)
    write(tmp_path, "mine.py")
    write(tmp_path, "mine/__init__.py", "mine/weights.bin", text="x" * 3_000_000)
    with pytest.raises(SettingsError, match=r"have 6 MB, above the limit of 2; the largest is"):
        collect("mine:Task", tmp_path, tmp_path / "runs")


def test_a_home_directory_is_no_place_for_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking through all of it would take minutes, silently."""
    monkeypatch.setattr(shipping, "ENTRIES_MAX", 5)
    write(tmp_path, "mine.py", *(f"photos/{number}.jpg" for number in range(9)))
    with pytest.raises(SettingsError, match="more than 5 files"):
        collect("mine:Task", tmp_path, tmp_path / "runs")
