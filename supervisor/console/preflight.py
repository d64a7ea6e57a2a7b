"""What a start would find missing, found before anything is started: code, data, servers, devices.

Reads and connects, changes nothing, and imports neither jax nor the user's module.
"""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from supervisor.cluster.own_servers import head_cpus
from supervisor.config import ClusterSettings, Settings
from supervisor.errors import ClusterUnusable
from supervisor.health.store_address import address_of
from trainer.config import TrainerSettings, refuse_without_effect
from trainer.host.atomic_write import try_to_write
from trainer.settings import SettingsError
from trainer.state.snapshot import SHARED_MEMORY
from trainer.wire.heartbeat import connect

PROBE_S = 2.0
"""How long a server may take to accept a connection and to answer."""

_OUR_NAMES = ("supervisor", "trainer")
_PACKAGE = "__init__.py"


def problems(settings: Settings, config_dir: Path, password: str = "") -> Iterator[str]:
    """Yield what a start would fail on, each with the setting to change.

    `password` is that of the Redis, if the environment gave one.
    """
    yield from _of_task(settings.trainer, config_dir)
    if settings.cluster.address == "local":
        yield from _of_data(settings.trainer, config_dir)
        yield from _of_this_machine(settings)
    else:
        yield from _of_cluster(settings.cluster.address)
        yield from _of_submission(Path.cwd())
    if settings.heartbeats.redis_url != "local":
        yield from _of_redis(settings, config_dir, password)


def with_address(settings: Settings) -> Settings:
    """Return the settings with the address that "auto" stands for, here and now.

    Raises SettingsError if there is none, or RAY_ADDRESS is none that can be used.
    """
    if settings.cluster.address != "auto":
        return settings
    from supervisor.cluster.ray_api import address_here

    address = address_here()
    if not address:
        raise SettingsError(
            'cluster.address = "auto": RAY_ADDRESS is not set, and `ray start` has begun no '
            'cluster on this machine; set it to HOST:PORT of the head, or write "local" for a Ray '
            "of the job's own"
        )
    try:
        cluster = ClusterSettings.model_validate(
            {**settings.cluster.model_dump(), "address": address}
        )
    except ValidationError as error:
        raise SettingsError(
            f'cluster.address = "auto": RAY_ADDRESS = {address!r}: {error.errors()[0]["msg"]}'
        ) from None
    return settings.model_copy(update={"cluster": cluster})


def must_be_ready(settings: Settings, config_dir: Path, password: str = "") -> None:
    """Raise `SettingsError` with everything that a start would fail on."""
    if found := tuple(problems(settings, config_dir, password)):
        raise SettingsError(*found)


def _of_task(trainer: TrainerSettings, config_dir: Path) -> Iterator[str]:
    if trainer.is_builtin:
        return
    module, _, wanted = trainer.task.partition(":")
    setting = f"trainer.task = {trainer.task!r}"
    if "/" in module or module.endswith(".py"):
        name = Path(module).name.removesuffix(".py")
        yield f"{setting}: must name a module, not a file; did you mean {name}:{wanted}?"
        return
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in _OUR_NAMES:
        owner = "everstep" if top in _OUR_NAMES else "Python"
        yield f"{setting}: {top!r} is the name of a module of {owner} itself; rename yours"
        return
    try:
        file = find_module(module, config_dir)
    except ModuleNotFoundError as error:
        yield (
            f"{setting}: there is no module {error.name!r} in {config_dir} or among the installed "
            "packages; put it beside the settings file"
        )
        return
    if file is None or file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        yield f"{setting}: {file}:{error.lineno}: {error.msg}"
        return
    if any(_has_nothing_builtin(node, wanted) for node in tree.body):
        try:
            refuse_without_effect(trainer)
        except SettingsError as error:
            yield from error.problems
    names = _names(tree)
    if names is not None and wanted not in names:
        close = difflib.get_close_matches(wanted, names, 1)
        hint = f"; did you mean {module}:{close[0]}?" if close else ""
        yield f"{setting}: {file} defines no {wanted!r}{hint}"


def find_module(name: str, config_dir: Path) -> Path | None:
    """Return the file of a module beside the settings, found without importing anything.

    None if it is installed elsewhere or has no file. Raises ModuleNotFoundError with the part of
    the name that is missing.
    """
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [str(config_dir)])
    if spec is None and importlib.util.find_spec(top) is None:
        raise ModuleNotFoundError(f"no module {top!r}", name=top)
    found = top
    for part in rest if spec is not None else ():
        assert spec is not None
        found += f".{part}"
        places = spec.submodule_search_locations
        spec = importlib.machinery.PathFinder.find_spec(part, [*places]) if places else None
        if spec is None:
            raise ModuleNotFoundError(f"no module {found!r}", name=found)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _has_nothing_builtin(node: ast.stmt, wanted: str) -> bool:
    """Whether this defines the task as a loop, or as a class that inherits from `Task` alone."""
    if isinstance(node, ast.FunctionDef):
        return node.name == wanted
    if not isinstance(node, ast.ClassDef) or node.name != wanted:
        return False
    reads_all = any("reads_all_settings" in ast.unparse(line) for line in node.body)
    return not reads_all and [ast.unparse(base).split(".")[-1] for base in node.bases] == ["Task"]


def _names(tree: ast.Module) -> set[str] | None:
    """All names that a module may bind; None if that cannot be told from its text."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    unclear = {"*", "__getattr__"} & names or any(
        isinstance(node, ast.Call) and ast.unparse(node.func) in ("globals", "exec", "setattr")
        for node in ast.walk(tree)
    )
    return None if unclear else names


def _of_data(trainer: TrainerSettings, config_dir: Path) -> Iterator[str]:
    if not trainer.is_builtin or trainer.data.format == "ray":
        return
    from trainer.data.files import (
        DataMissing,
        cache_of,
        find_files,
        format_of,
        no_cache,
        was_tokenised,
    )
    from trainer.host.disk_errors import DataUnavailable, may_pass

    for held_out in (False, True):
        if held_out and not trainer.data.held_out_path:
            continue
        try:
            find_files(
                trainer.data, format_of(trainer.data, config_dir), config_dir, held_out=held_out
            )
        except DataMissing as error:
            if not was_tokenised(trainer.data, config_dir):  # then that will do
                yield from error.problems
        except SettingsError as error:
            yield from error.problems
        except DataUnavailable:
            return  # no mistake: the workers try again
    if was_tokenised(trainer.data, config_dir) or not _is_tokenised(trainer, config_dir):
        return
    cache = cache_of(trainer.data, config_dir)
    try:
        try_to_write(cache)
    except OSError as error:
        if not may_pass(error):
            yield from no_cache(cache, error).problems


def _is_tokenised(trainer: TrainerSettings, config_dir: Path) -> bool:
    """Whether a start keeps tokenised data; a model of bytes reads its texts as they are."""
    from trainer.data.files import format_of

    try:
        is_text = format_of(trainer.data, config_dir) == "text"
    except SettingsError:
        return False  # which has been said
    return not is_text or bool(trainer.model.pretrained)


def _of_this_machine(settings: Settings) -> Iterator[str]:
    cluster = settings.cluster
    cpus, wanted = head_cpus(), cluster.workers * cluster.cpus_per_worker
    if wanted > cpus:
        yield (
            f"cluster.workers = {cluster.workers} x cluster.cpus_per_worker = "
            f"{cluster.cpus_per_worker:g} needs {wanted:g} CPUs, this machine has {cpus}; lower "
            f"workers, set cpus_per_worker to {_share(cpus, cluster.workers)} or less, or name "
            "a cluster in cluster.address"
        )
    if wanted_gpus := cluster.workers * cluster.gpus_per_worker:
        from supervisor.cluster.ray_api import gpus_here

        if wanted_gpus > (gpus := gpus_here()):
            yield (
                f"cluster.workers = {cluster.workers} x cluster.gpus_per_worker = "
                f"{cluster.gpus_per_worker} needs {wanted_gpus} GPUs, this machine has {gpus}; "
                "lower either, or name a cluster in cluster.address"
            )
    snapshots = settings.recovery.snapshot_every_steps
    if snapshots != 0 and not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        yield (
            f"recovery.snapshot_every_steps = {snapshots!r}: snapshots go to {SHARED_MEMORY}, "
            "which cannot be written here; mount a tmpfs there, or set it to 0 (then every "
            "recovery goes back to a checkpoint)"
        )


def why_no_snapshots(settings: Settings, bytes_each: int) -> str:
    """Return that this machine has no room for the snapshots of its workers; "" if it has.

    `bytes_each`: of one device, as `check --memory` predicts it.
    """
    cluster = settings.cluster
    if settings.recovery.snapshot_every_steps == 0 or cluster.address != "local":
        return ""
    needed = cluster.workers * max(1, cluster.gpus_per_worker) * bytes_each
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed <= free:
        return ""
    return (
        f"Snapshots need {needed / 1e6:,.1f} MB in {SHARED_MEMORY}, {free / 1e6:,.1f} MB are free: "
        "the job would train without them, and every recovery go back to a checkpoint. Enlarge it "
        "(docker run --shm-size), or set recovery.snapshot_every_steps = 0"
    )


def _share(cpus: int, workers: int) -> str:
    return f"{int(cpus / workers * 100) / 100:g}"


def _of_cluster(address: str) -> Iterator[str]:
    host, _, port = address.rpartition(":")
    if fault := _why_closed(host.strip("[]"), int(port)):
        yield (
            f"cluster.address = {address!r}: {fault}; start the head of the cluster there, or "
            'write "local" for a Ray of the job\'s own'
        )


def _of_submission(folder: Path) -> Iterator[str]:
    """What `ray job submit --working-dir` puts first on the path of all workers of Ray."""
    try:
        submitted = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""))
        is_first = bool(submitted["runtime_env"]["working_dir"])
    except (ValueError, LookupError, TypeError):
        is_first = False
    if not is_first:
        return
    for owner, names in (("Python", sys.stdlib_module_names), ("everstep", _OUR_NAMES)):
        for name in sorted(names):
            file = next(filter(Path.is_file, (folder / f"{name}.py", folder / name / _PACKAGE)), "")
            if file:
                yield (
                    f"{file}: Ray's workers look into the submitted working directory first, and "
                    f"would take it for the module {name!r} of {owner} itself; rename it"
                )


def _of_redis(settings: Settings, config_dir: Path, password: str) -> Iterator[str]:
    try:
        address = address_of(settings.heartbeats, config_dir, password)
    except ClusterUnusable as error:
        yield str(error)
        return
    from redis import RedisError

    place = f"heartbeats.redis_url: {address.host}:{address.port}"
    if fault := _why_closed(address.host, address.port):
        yield f'{place}: {fault}; start the server, or write "local" for one of the job\'s own'
        return
    try:
        with connect(address)(PROBE_S) as client:
            client.ping()
    except (RedisError, OSError, UnicodeError) as error:
        yield f"{place} does not answer as a Redis should: {error}"


def _why_closed(host: str, port: int) -> str:
    """Return why nothing can be connected to; "" if it can."""
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except socket.gaierror:
        return f"the host {host!r} is not known"
    except TimeoutError:
        return f"no answer within {PROBE_S:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""
