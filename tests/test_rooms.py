"""What may import what: read from the sources, nothing is imported.

A room is a folder of one of the two packages, or a module beside the folders.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("supervisor", "trainer")

ORDER = {
    "supervisor": [
        "errors", "fsm", "health", "config", "disk", "cluster", "record", "daemon", "console",
        "log", "end_abandoned", "assembly", "cli", "__main__",
    ],
    "trainer": [
        "settings", "config", "host", "wire", "task", "compute", "state", "slot", "data",
        "language", "training", "process", "saved", "free_loop", "predict_memory", "prepare_data",
        "__init__", "data.__main__", "process.__main__", "__main__",
    ],
}  # fmt: skip
"""The rooms of each package; each imports only those before it."""

SHARED = ("wire", "host", "slot", "settings", "config", "predict_memory", "state.snapshot")
"""What the supervisor may import of the trainer. Of `predict_memory` it asks how its process is
started; of `state.snapshot` where snapshots are and what their manifests say."""

EXCEPTIONS = {
    # A start must miss the same files as its workers would: one function says which hold the data.
    ("supervisor.console.preflight", "trainer.data.files"),
}
"""What breaks the rule above."""

NEVER_AT_IMPORT = {"jax", "jaxlib", "orbax", "optax", "ray"}
ENTRANCES = ("supervisor", "trainer.wire", "trainer.host", "trainer.slot", "trainer.config")
"""What a daemon or a slot imports: a daemon with jax takes twice the memory, a slot that imports it
could hold a device, and Ray must not be imported before its token is there."""


def modules() -> dict[str, Path]:
    """Every module of both packages by its name; a folder's `__init__` too."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = modules()


def imported(module: str, *, at_import: bool = False) -> Iterator[str]:
    """What a module imports, whole names: modules, or names within them.

    With `at_import` only what importing the module imports, and not what its functions do.
    """
    package = module.rpartition(".")[0].split(".")
    tree = ast.parse(MODULES[module].read_text())
    for node in executed(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            place = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{place}.{alias.name}" for alias in node.names)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed(child)


def module_of(name: str) -> str | None:
    """The module of this project that an imported name is, or lies in."""
    while name:
        for module in (name, f"{name}.__init__"):
            if module in MODULES:
                return module
        name = name.rpartition(".")[0]
    return None


def own_imports(module: str, *, at_import: bool = False) -> set[str]:
    """The modules of this project that a module imports."""
    found = {module_of(name) for name in imported(module, at_import=at_import)}
    return {one for one in found if one is not None and one != module}


def room_of(module: str) -> tuple[str, str]:
    """Package and room. What `python -m` starts by a folder's name is a room of its own."""
    package, _, inner = module.partition(".")
    return package, inner if inner.endswith("__main__") else inner.partition(".")[0]


def lies_in(module: str, places: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one of these folders."""
    return f"{module}.".startswith(tuple(f"{place}." for place in places))


def test_there_are_rooms_for_all_modules_and_modules_in_all_rooms() -> None:
    """The tests below would pass on none."""
    found = {room_of(module) for module in MODULES} - {("supervisor", "__init__")}
    assert found == {(package, room) for package, rooms in ORDER.items() for room in rooms}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_rooms_that_stand_before_its_own(module: str) -> None:
    """Two rooms that import each other are one room, and cannot be understood or tested alone."""
    package, room = room_of(module)
    if (package, room) == ("supervisor", "__init__"):
        allowed: list[str] = []
    else:
        allowed = ORDER[package][: ORDER[package].index(room) + 1]
    used = {room_of(one) for one in own_imports(module)}
    assert {name for own, name in used if own == package} - {*allowed, "__init__"} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Within a room too: which of them is complete would depend on which was imported first."""
    open_now: list[str] = []
    done: set[str] = set()

    def walk(module: str) -> None:
        assert module not in open_now, " -> ".join([*open_now[open_now.index(module) :], module])
        if module not in done:
            open_now.append(module)
            for other in sorted(own_imports(module)):
                walk(other)
            done.add(open_now.pop())

    for module in MODULES:
        walk(module)
    assert len(done) > 100


def test_the_trainer_never_imports_the_supervisor() -> None:
    """A rank must start, train and be tested where no daemon is."""
    assert [
        (module, name)
        for module in MODULES
        if module.startswith("trainer.")
        for name in imported(module)
        if name.partition(".")[0] == "supervisor"
    ] == []


def test_the_supervisor_imports_of_the_trainer_only_what_both_share() -> None:
    """The daemon outlives versions of what it starts, and must not load what only a rank needs."""
    used = {
        (module, other)
        for module in MODULES
        if module.startswith("supervisor.")
        for other in own_imports(module)
        if other.startswith("trainer.") and not lies_in(other, [f"trainer.{one}" for one in SHARED])
    }
    assert used == EXCEPTIONS


def test_the_core_imports_nothing_of_the_rest() -> None:
    """Replay needs the table alone; what else the core may import is in the test of the table."""
    core = [module for module in MODULES if module.startswith("supervisor.fsm.")]
    assert len(core) > 5
    for module in core:
        assert {room_of(other) for other in own_imports(module)} <= {("supervisor", "fsm")}


def test_neither_daemon_nor_slot_imports_jax_or_ray_with_what_it_imports() -> None:
    """Through any number of modules in between."""
    left = [module for module in MODULES if lies_in(module, ENTRANCES)]
    seen: dict[str, str] = dict.fromkeys(left, "")
    while left:
        module = left.pop()
        packages = {name.partition(".")[0] for name in imported(module, at_import=True)}
        assert not packages & NEVER_AT_IMPORT, f"{module}, imported by {seen[module] or 'itself'}"
        for other in own_imports(module, at_import=True) - set(seen):
            seen[other] = module
            left.append(other)


@pytest.mark.parametrize("room", ["supervisor", "trainer.wire", "trainer.slot"])
def test_some_rooms_do_not_import_jax_later_either(room: str) -> None:
    """What only one function imports costs as much once it was called."""
    assert [
        (module, name)
        for module in MODULES
        if module.startswith(f"{room}.")
        for name in imported(module)
        if name.partition(".")[0] in {"jax", "jaxlib", "orbax", "optax"}
    ] == []


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in MODULES.values()}),
    ids=lambda folder: str(folder.relative_to(ROOT)),
)
def test_every_folder_says_what_it_does_and_what_it_may_not(folder: Path) -> None:
    """The place of a change is found by these and by the names of files, or by a search of all."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text is not None
    assert len(text.split()) >= 10


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tests_have_the_rooms_of_what_they_test(package: str) -> None:
    """A test is found where its module is."""
    folders = {path.parent.name for path in (ROOT / "tests" / package).glob("*/test_*.py")}
    assert folders
    assert {name for name in folders if not (ROOT / package / name).is_dir()} == set()
