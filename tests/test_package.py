"""What is relied on by name: modules that commands start, modules of users, parts of the wheel.

A file that moves breaks them not where it is moved, but on another machine, at the next start.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.util
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("supervisor", "trainer")
SOURCES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
COMMAND = re.compile(r"python -m ((?:supervisor|trainer)\b(?:\.\w+)*)")

PUBLIC = {
    "trainer": ["load"],
    "trainer.free_loop": ["Worker"],
    "trainer.saved": ["load"],
    "trainer.task": ["Batch", "Context", "State", "Task", "TaskError"],
}
"""What the code of users imports: named in the README or in deploy/examples."""


def modules_started(tree: ast.AST) -> Iterator[str]:
    """The modules of this project that stand behind "-m" in a list of arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
            for flag, module in itertools.pairwise(words):
                if flag == "-m" and isinstance(module, str) and module.startswith(PACKAGES):
                    yield module


def modules_named(text: str) -> set[str]:
    """The modules of this project that a text says to start."""
    return set(COMMAND.findall(text))


def is_a_command(module: str) -> bool:
    """Whether `python -m` starts it."""
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{module}.__main__")
    if found is None or found.origin is None:
        return False
    return 'if __name__ == "__main__":' in Path(found.origin).read_text()


def test_every_process_that_the_code_starts_has_a_module() -> None:
    """A slot names the module of its child in a list of strings: an import checker reads past it.

    The one that ends an abandoned job is started when no daemon is left to report it.
    """
    started = {name for path in SOURCES for name in modules_started(ast.parse(path.read_text()))}
    assert len(started) >= 5
    assert {name for name in started if not is_a_command(name)} == set()


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("deploy/**/*.*")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_command_that_a_text_names_exists(path: Path) -> None:
    """A help text or a page that names a module which moved sends its reader to an error."""
    named = modules_named(path.read_text()) if path.suffix != ".pyc" else set()
    assert {name for name in named if not is_a_command(name)} == set()


@pytest.mark.parametrize("module", PUBLIC)
def test_what_the_code_of_users_imports_is_where_it_was(module: str) -> None:
    """A job that trained for a month is resumed with a newer version: its own module must load."""
    there = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(there, name)] == []


def test_the_list_of_public_modules_is_what_the_pages_show() -> None:
    """An import that an example shows is a promise to keep it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "deploy").rglob("*.py"))]
    shown = {
        (module, name.strip())
        for page in pages
        for module, names in re.findall(
            r"^\s*from (trainer[\w.]*) import ([\w, ]+)", page.read_text(), re.MULTILINE
        )
        for name in names.split(",")
    }
    assert shown
    assert {(module, name) for module, name in shown if name not in PUBLIC.get(module, [])} == set()


def test_every_folder_of_modules_is_in_the_wheel() -> None:
    """A new folder that no list names would be missing on every machine but the developer's."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rule = settings["tool"]["setuptools"]["packages"]["find"]
    assert rule["namespaces"] is False  # else __pycache__ is a package
    folders = {path.parent for path in SOURCES}
    assert {str(folder) for folder in folders if not (folder / "__init__.py").exists()} == set()
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {
        name
        for name in names
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in rule["include"])
    } == set()
    others = [one.name for one in ROOT.iterdir() if one.is_dir() and one.name not in PACKAGES]
    assert [
        (name, pattern)
        for name in others
        for pattern in rule["include"]
        if fnmatch.fnmatchcase(name, pattern)
    ] == []
