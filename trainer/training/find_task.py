"""Find and build what `[trainer] task` names: the built-in task, or a user's class or function.

It imports the user's code, and raises whatever that raises.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config import TASK_OF_THE_HOUSE, refuse_without_effect
from trainer.settings import SettingsError
from trainer.task import Context, Task, TaskError, place_of


def load_task(context: Context) -> Task:
    """Import and build the task that the settings name.

    Raises `SettingsError` where there is no such class, and whatever the user's own code raises.
    """
    found = find(context)
    if isinstance(found, type) and issubclass(found, Task):
        _check_class(found)
        return found(context)
    raise SettingsError(
        f"[trainer] task = {context.settings.task!r} is a function, a loop of your own, and "
        "not a subclass of trainer.task.Task, which is needed here"
    )


_ZIP = f"python{sys.version_info.major}{sys.version_info.minor}"

_CALLS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("context",),
    "start": (),
    "init": ("key",),
    "batch": ("step",),
    "train_step": ("state", "batch"),
    "evaluate": ("state", "batch"),
    "held_out_batch": ("index",),
    "position": ("step",),
    "logical_axes": ("name", "shape"),
    "frozen": ("name",),
    "initial_values": (),
    "facts": (),
}


def _check_class(found: type[Task]) -> None:
    """Raise `TaskError` for methods that are missing, or that cannot be called as `Task` says.

    Python's own error for these has no line of the user's in it.
    """
    where = f"{sys.modules[found.__module__].__file__}: class {found.__name__}"
    if missing := sorted(found.__abstractmethods__):
        raise TaskError(f"{where} lacks {', '.join(missing)}, which trainer.task.Task wants")
    for name, arguments in _CALLS.items():
        method = getattr(found, name)
        if method is getattr(Task, name) or not inspect.isfunction(method):
            continue
        try:
            inspect.signature(method).bind(found, *arguments)
        except TypeError as error:
            raise TaskError(
                f"{place_of(method)} is called as {name}({', '.join(arguments)}): {error}"
            ) from None


def _import_from(place: str) -> None:
    """Have the user's modules found before all others of their names, but for the standard library.

    A `queue.py` or `random.py` beside the settings would break what imports the real one later.
    """
    home = Path(sysconfig.get_path("stdlib"))
    homes = {str(home), str(home / "lib-dynload"), str(home.parent / f"{_ZIP}.zip")}
    homes.add(sysconfig.get_path("platstdlib"))
    first = [entry for entry in sys.path if entry in homes]
    rest = [entry for entry in sys.path if entry not in homes and entry != place]
    sys.path[:] = [*first, place, *rest]


def find(context: Context) -> type[Task] | Callable[..., Any]:
    """Import what the settings name: a subclass of `Task`, or the function of a free loop.

    Raises `SettingsError` where there is no such module, or it has neither under that name, and
    whatever importing it raises.
    """
    name = context.settings.task
    if name == TASK_OF_THE_HOUSE:
        from trainer.language.task import LanguageModel

        return LanguageModel
    module_name, _, own = name.partition(":")
    place = context.code_dir or context.config_dir
    _import_from(place)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise SettingsError(
            f"[trainer] task = {name!r}: no module {module_name!r} in {place} or "
            "among the installed packages; put it beside the settings file"
        ) from None
    found = getattr(module, own, None)
    if isinstance(found, type):
        if issubclass(found, Task):
            if not found.reads_all_settings:
                refuse_without_effect(context.settings)
            return found
    elif callable(found):
        refuse_without_effect(context.settings)
        return found  # type: ignore[no-any-return]
    raise SettingsError(
        f"[trainer] task = {name!r}: {module.__file__} has no class {own!r} that subclasses "
        "trainer.task.Task, and no such function"
    )
