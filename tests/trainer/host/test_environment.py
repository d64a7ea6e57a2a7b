"""What decides the bits is fixed for workers and told when it differs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.host.environment import describe_environment, differences, worker_environment


def test_a_worker_has_its_own_number_of_threads_and_no_proxies() -> None:
    """XLA's sums depend on the threads; gRPC may hang on a proxy (jax#22995)."""
    base = {"PATH": "/bin", "https_proxy": "http://x", "NO_PROXY": "y", "SLURM_JOB_ID": "3"}
    env = worker_environment(1.0, 0, base)
    assert env["NPROC"] == env["OMP_NUM_THREADS"] == "1"
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["PATH"] == "/bin"
    assert not {"https_proxy", "NO_PROXY", "SLURM_JOB_ID"} & set(env)
    assert worker_environment(0.5, 0, {})["NPROC"] == "1"
    assert worker_environment(4.0, 0, {})["NPROC"] == "4"


def test_the_operators_flags_win_over_ours() -> None:
    """Flags are part of what decides the bits: none may be lost, none doubled."""
    mine = "--xla_cpu_collective_timeout_seconds=9 --xla_cpu_max_isa=AVX2"
    assert worker_environment(1, 0, {"XLA_FLAGS": mine})["XLA_FLAGS"] == mine
    assert "JAX_PLATFORMS" not in worker_environment(1, 1, {})


def test_memory_is_taken_in_huge_pages_unless_the_operator_says_otherwise() -> None:
    """Other tunables of the operator stay beside it."""
    name = "GLIBC_TUNABLES"
    assert worker_environment(1, 0, {})[name] == "glibc.malloc.hugetlb=1"
    others = "glibc.malloc.check=3:glibc.malloc.hugetlb=0"
    assert worker_environment(1, 0, {name: others})[name] == others
    both = "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    assert worker_environment(1, 0, {name: "glibc.malloc.check=3"})[name] == both
    assert worker_environment(1, 0, {name: both})[name] == both


def test_on_gpus_no_process_takes_all_the_memory_unless_told_to() -> None:
    """A standby lives on the same devices as the generation that trains."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    assert worker_environment(1, 1, {})[name] == "false"
    assert worker_environment(1, 1, {name: "true"})[name] == "true"
    assert name not in worker_environment(1, 0, {})


def test_a_worker_gets_no_secret_of_its_starter() -> None:
    """`check --memory` runs the user's task, which could read the password of the store."""
    secrets = {"EVERSTEP_REDIS_PASSWORD": "x", "RAY_AUTH_TOKEN": "x", "RAY_AUTH_TOKEN_PATH": "/x"}
    assert worker_environment(1, 0, {**secrets, "HOME": "/"}).keys() & secrets.keys() == set()


def test_only_what_differs_is_told() -> None:
    """A resumed run on another machine may not be exact, and that must be said."""
    then = {"jax": "1", "threads": "1", "gone": 5}
    now = {"jax": "1", "threads": "2", "new": 6}
    assert differences(then, then) == []
    assert differences(then, now) == [
        "threads: 1 when saved, 2 now",
        "gone: 5 when saved,  now",
        "new:  when saved, 6 now",
    ]


def test_the_environment_names_versions_threads_and_processor() -> None:
    """These are recorded in every restore point."""
    found = describe_environment()
    assert {"jax", "jaxlib", "threads", "xla_flags", "processor", "devices"} <= set(found)


@pytest.mark.parametrize(
    "module",
    [
        "trainer.host.environment",
        "trainer.wire.heartbeat",
        "trainer.wire.spec",
        "trainer.process.failures",
        "trainer.state.snapshot",
        "trainer.slot.actor",
    ],
)
def test_what_slots_and_supervisor_import_brings_no_jax(module: str) -> None:
    """The daemon stays below 200 MB, and a slot starts in a moment."""
    code = f"import {module}, sys; print([m for m in ('jax', 'orbax', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
