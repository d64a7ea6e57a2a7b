"""A daemon that `ray job submit` has started, in the working directory that Ray has copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import PATIENCE_S, Numbers, RayHead

full = pytest.mark.full

_UPLOAD = """
import sys, logging, ray
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
found = upload_working_dir_if_needed({"working_dir": sys.argv[2]}, False, sys.argv[3])
print("answer", found["working_dir"])
"""


def upload(head: RayHead, folder: Path, scratch: Path) -> str:
    """Put a working directory into the cluster, as `ray job submit` does; its address there."""
    told = subprocess.run(
        [sys.executable, "-c", _UPLOAD, head.address, folder, scratch],
        env={**os.environ, **head.variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    (line,) = (one for one in told.stdout.splitlines() if one.startswith("answer "))
    return line.removeprefix("answer ")


@full
def test_a_job_that_was_submitted_trains_a_task_of_its_own_and_recovers(
    job: MakeJob,
    undisturbed: Numbers,
    ray_head: RayHead,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runtime environments were in conflict, and placing the slots failed three times."""
    tiny = job(**{"cluster.address": "auto", "recovery.snapshot_every_steps": 1})
    uploaded = upload(ray_head, tiny.folder, tmp_path)
    submitted = {"runtime_env": {"working_dir": uploaded}, "metadata": {}}
    monkeypatch.setenv("RAY_ADDRESS", ray_head.address)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(submitted))
    daemon = tiny.start()
    daemon.until_committed()
    assert "working_dir_files" in str(Path(f"/proc/{daemon.slot(1).pid}/cwd").readlink())
    daemon.strike(1)
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1


@full
def test_a_job_that_was_submitted_may_have_a_ray_of_its_own(
    job: MakeJob, undisturbed: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default address its own Ray was asked for a package of the other cluster's."""
    tiny = job()
    submitted = {"runtime_env": {"working_dir": "gcs://_ray_pkg_ef64e1dfb303af0e.zip"}}
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(submitted))
    assert tiny.start().exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0
