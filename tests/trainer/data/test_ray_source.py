"""A Ray Dataset as a source: executed once, in its own order, and never on the way of a restart."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer.config import DataSettings
from trainer.data import ray_parts, ray_source
from trainer.data.cache_files import write_table
from trainer.data.source import Source, open_source
from trainer.data.store import DataDamaged
from trainer.data.tokenizer import BytesTokenizer
from trainer.host.disk_errors import DataUnavailable
from trainer.settings import SettingsError

MODULE = """
import time

import ray.data

def squares():
    return ray.data.range(400, override_num_blocks=4).map_batches(slow).map(text)

def slow(batch):
    time.sleep(1.0 if batch["id"][0] == 0 else 0.0)  # the first block is ready last
    return batch

def text(row):
    return {"prompt": f"{row['id']} squared is ", "completion": str(row["id"] ** 2), "other": 1}
"""
SMALL = "number = 5\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users_data.py").write_text(MODULE)
    (tmp_path / "users_small.py").write_text(SMALL)
    return tmp_path


def open_(folder: Path, name: str = "users_data:squares", **more: Any) -> Source:
    settings = DataSettings.model_validate(
        {"path": name, "format": "ray", "batch_size": 4, "sequence_length": 32, **more}
    )
    return open_source(settings, BytesTokenizer(), folder, seed=1, held_out_batches=1)


def write_parts(folder: Path, count: int = 2) -> Path:
    """What an execution would have left, of 40 rows a part."""
    import pyarrow as pa

    out = ray_parts.folder_of("users_data:squares", folder, folder / "runs/.data", "text")
    out.mkdir(parents=True)
    tables = [
        pa.Table.from_pylist([{"prompt": "a", "completion": f"b{part}{n}"} for n in range(40)])
        for part in range(count)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_source, "PART_BYTES", 1)  # a part for each table
        parts = [
            {"name": path.name, "rows": rows, "sha256": ray_source._digest_of_file(path)}
            for path, rows in ray_source._write(tables, "squares", out, "text")
        ]
    write_table(out / ray_parts.MARK, {"parts": parts})
    return out


def test_parts_that_are_there_are_read_and_nothing_is_executed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart that waits for a cluster to do the same again is no recovery."""
    write_parts(folder)
    monkeypatch.setattr(ray_parts, "_execute", None)
    source = open_(folder)
    assert source.facts()["data_documents"] + source.facts()["held_out_documents"] == 80
    (folder / "users_data.py").write_text("# other code, other data\n" + MODULE)
    with pytest.raises(TypeError):
        open_(folder)


def test_a_damaged_part_is_named_and_the_dataset_executed_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet itself would read some flipped bits without a word."""
    out = write_parts(folder)
    content = bytearray((out / "part-00001.parquet").read_bytes())
    content[20] ^= 1
    (out / "part-00001.parquet").write_bytes(content)
    with pytest.raises(DataDamaged, match=r"part-00001\.parquet: is not what was written"):
        open_(folder)
    monkeypatch.setattr(ray_parts, "_execute", None)
    with pytest.raises(TypeError):
        open_(folder)


@pytest.mark.parametrize("content", [b"", b"{", b'{"parts": []}', b'{"parts": 5, "checksum": ""}'])
def test_a_dataset_whose_list_of_parts_is_damaged_is_executed_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """A node lost its power, the list was empty, and somebody had to delete it by hand."""
    (write_parts(folder) / ray_parts.MARK).write_bytes(content)
    monkeypatch.setattr(ray_parts, "_execute", None)
    with pytest.raises(TypeError):
        open_(folder)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("users_nowhere:squares", "there is no module 'users_nowhere'"),
        ("users_small:missing", "the module has no function 'missing'"),
        ("users_small:number", "the module has no function 'number'"),
    ],
)
def test_a_dataset_that_is_not_there_is_named(folder: Path, name: str, complaint: str) -> None:
    """Before a minute is spent on starting Ray."""
    with pytest.raises(SettingsError, match=complaint):
        open_(folder, name)
    assert not list((folder / "runs").glob(".data/*.partial"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(1, SettingsError), (ray_parts.STATUS_NO_RAY, DataUnavailable), (-9, DataUnavailable)],
)
def test_only_what_the_function_did_is_the_users_mistake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[Exception]
) -> None:
    """A Ray that does not start on a busy machine may do so at the next try."""
    script = folder / "python"
    end = f"exit {status}" if status > 0 else f"kill {status} $$"
    script.write_text(f"#!/bin/sh\necho the last words\n{end}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(kind, match=f"status {status};(.|\n)*the last words"):
        open_(folder)


def test_a_ray_dataset_is_executed_once_in_its_own_order(folder: Path) -> None:
    """Ray yields whichever block is ready first, and cannot resume where it was."""
    source = open_(folder, packing="none")
    assert source.facts()["data_documents"] == 380
    (out,) = (folder / "runs/.data").glob("ray-*/")
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(out / "part-00000.parquet").to_pylist()
    assert rows == [{"prompt": f"{n} squared is ", "completion": str(n * n)} for n in range(400)]
    written = (out / "part-00000.parquet").stat().st_mtime_ns
    assert open_(folder, packing="none").sample_ids(7) == source.sample_ids(7)
    assert (out / "part-00000.parquet").stat().st_mtime_ns == written
    deadline = time.monotonic() + 10.0  # those that Ray left to end by themselves
    while ours := [one for one in psutil.process_iter() if _is_of(one, folder)]:
        assert time.monotonic() < deadline, [one.as_dict(["pid", "cmdline"]) for one in ours]
        time.sleep(0.05)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process of Ray that this execution started is left."""
    try:
        return process.pid != os.getpid() and bool(process.cwd() == str(folder))
    except psutil.Error:
        return False
