"""Executes a Ray Dataset once, in its own order, into Parquet files.

`python -m trainer.data.ray_source`, started by `trainer.data.ray_parts`: a process of its own
with a Ray of its own, since on the job's Ray the slots hold the CPUs that the dataset would wait
for. Never imports jax.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.cache_files import write_table
from trainer.data.documents import columns_of
from trainer.data.ray_parts import MARK, STATUS_NO_RAY
from trainer.settings import SettingsError

PART_BYTES = 64 << 20
"""A part is closed when it holds this much, uncompressed."""

_ROWS_AT_ONCE = 4096
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute what the arguments name; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.data.ray_source", description=__doc__)
    parser.add_argument("name", metavar="MODULE:FUNCTION", help="returns a ray.data.Dataset")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="an empty folder")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="column of the text")
    parser.add_argument(
        "--address", default="local", metavar="HOST:PORT", help='a cluster; default: "local"'
    )
    options = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if options.address != "local":
            _execute(options.name, options.out, options.text_key, options.address, {})
            return 0
        temporary = Path(tempfile.gettempdir()) / f"everstep-ray-{_digest_of(options.out)}"
        shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed
        temporary.mkdir(mode=0o700)
        try:
            _keep_private(temporary)
            local = {"_temp_dir": str(temporary), "include_dashboard": False}
            _execute(options.name, options.out, options.text_key, "local", local)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except _NoRay as error:
        print(error, file=sys.stderr)
        return STATUS_NO_RAY
    return 0


class _NoRay(Exception):
    """Ray could not be started or reached: nothing that the user's function has done."""


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise SettingsError(f"{name}: the module has no function {function!r}")
    return found  # type: ignore[no-any-return]


def _keep_private(folder: Path) -> None:
    """Loopback and a token, before Ray is imported: it listens everywhere and trusts everybody."""
    token = folder / "token"
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, secrets.token_hex(32).encode())
    os.close(descriptor)
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )


def _execute(name: str, out: Path, text_key: str, address: str, options: Mapping[str, Any]) -> None:
    function = _function(name)
    import ray
    import ray.data

    module = sys.modules[name.partition(":")[0]]
    if Path(module.__file__ or "").is_relative_to(Path.cwd()):
        # The nodes of a cluster do not have the user's module: its functions travel whole.
        ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        ray.init(address=address, **options)
    except Exception as error:
        raise _NoRay(f"Ray at {address!r} cannot be used: {error}") from error
    try:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True  # else whichever block is ready first
        context.enable_progress_bars = False
        dataset = function()
        if not isinstance(dataset, ray.data.Dataset):
            kind = type(dataset).__name__
            raise SettingsError(f"{name}: returned {kind}, expected a ray.data.Dataset")
        tables = dataset.iter_batches(batch_size=_ROWS_AT_ONCE, batch_format="pyarrow")
        parts = [
            {"name": path.name, "rows": rows, "sha256": _digest_of_file(path)}
            for path, rows in _write(tables, name, out, text_key)
        ]
    finally:
        ray.shutdown()
    if not parts:
        raise SettingsError(f"{name}: the dataset has no rows")
    write_table(out / MARK, {"dataset": name, "parts": parts})


def _write(
    tables: Iterable[Any], name: str, out: Path, text_key: str
) -> Iterator[tuple[Path, int]]:
    """Write tables to files of about `PART_BYTES`; each file with its number of rows."""
    import pyarrow.parquet

    writer, rows, size, number = None, 0, 0, 0
    path, schema = out, None
    for table in tables:
        if not table.num_rows:
            continue
        table = table.select(columns_of(table.schema.names, text_key, name))
        schema = schema or table.schema
        if writer is None:
            path = out / f"part-{number:05}.parquet"
            writer = pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
        writer.write_table(table.cast(schema))
        rows, size = rows + table.num_rows, size + table.nbytes
        if size >= PART_BYTES:
            writer.close()
            yield path, rows
            writer, rows, size, number = None, 0, 0, number + 1
    if writer is not None:
        writer.close()
        yield path, rows


def _digest_of(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
