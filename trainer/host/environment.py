"""What decides the bits besides the program: threads, instruction set, flags, devices, versions.

The one place that knows what differs between vendors. jax is imported inside functions only: the
slot calls `worker_environment` and must stay small.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PASSWORD_VARIABLE = "EVERSTEP_REDIS_PASSWORD"
"""Holds the password of a Redis of the user's own, for the daemon alone: no child inherits it."""

COLLECTIVE_TIMEOUT_S = 300  # a rank may wait this long for a peer that restores or saves slowly
HEARTBEAT_TIMEOUT_S = 10
HEARTBEAT_TIMEOUT_ON_ONE_HOST_S = 7 * 86400
"""Nothing is learned from it there: the kernel tells of every death, the supervisor of a hang. And
a machine that was suspended, or a container that was frozen, wakes to ranks that are overdue."""
SHUTDOWN_TIMEOUT_S = 5
UNIX = "unix:"
"""What the address of a coordinator on one host begins with. It knows no password: a process of
another user that joins it as rank 1 displaces that rank. A directory of mode 0700 keeps it out."""

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""A step takes its working memory anew and gives it back. In pages of 4 KiB that took a third of
the processor's time: 14,000 faults for 54 MB a step. glibc before 2.35 ignores it."""

_SCHEDULER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_")


class JoinFailed(Exception):
    """The ranks of a generation could not be joined; another attempt, at another port, may do."""


class AddressTaken(JoinFailed):
    """The coordinator cannot use its address; another one will do."""


def worker_environment(cpus: float, gpus: int, base_env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training process on `cpus` cores and `gpus` devices.

    The number of threads is fixed, since XLA's sums depend on it. Proxies are dropped: gRPC between
    ranks may hang on them. So are secrets: it is no part of Ray and needs no password of a store.
    What the operator says (XLA flags, tunables of glibc) stays and wins.
    """
    env = {name: value for name, value in base_env.items() if not _is_unwanted(name)}
    flags = env.get("XLA_FLAGS", "").split()
    ours = [f"--xla_cpu_collective_timeout_seconds={COLLECTIVE_TIMEOUT_S}"]
    if gpus:
        ours.append("--xla_gpu_deterministic_ops=true")
    named = {flag.partition("=")[0] for flag in flags}
    flags += [flag for flag in ours if flag.partition("=")[0] not in named]
    env["XLA_FLAGS"] = " ".join(flags)
    env["NPROC"] = env["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
    env["PYTHONUNBUFFERED"] = "1"
    tunables = [one for one in env.get(_TUNABLES, "").split(":") if one]
    if not any(one.startswith("glibc.malloc.hugetlb=") for one in tunables):
        env[_TUNABLES] = ":".join([*tunables, _HUGE_PAGES])
    if gpus:
        # The generation that stands by lives on the same devices: nobody may take all of them.
        env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        env["JAX_PLATFORMS"] = "cpu"
    return env


def _is_unwanted(name: str) -> bool:
    return (
        name == PASSWORD_VARIABLE
        or name.lower().endswith("_proxy")
        or name.startswith((*_SCHEDULER_PREFIXES, "RAY_"))
    )


def join_world(*, coordinator: str, rank: int, world_size: int, join_timeout_s: float) -> None:
    """Join `world_size` processes at `coordinator`; a world of one needs no joining.

    `coordinator` is "host:port", or "unix:PATH" where all ranks are on one host: gRPC replaces a
    socket that is left there. Raises `JoinFailed`; on rank 0 `AddressTaken` if another process
    uses the port.

    JAX ends the process with SIGABRT when a peer does not come. Its limit lies well behind
    `join_timeout_s`, so that the caller's own watchdog speaks first.
    """
    import jax

    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    if world_size == 1:
        return
    if rank == 0:
        if not coordinator.startswith(UNIX):
            _refuse_taken_address(coordinator)
    else:
        _await_coordinator(coordinator, join_timeout_s)
    on_one_host = coordinator.startswith(UNIX)
    timeout_s = HEARTBEAT_TIMEOUT_ON_ONE_HOST_S if on_one_host else HEARTBEAT_TIMEOUT_S
    try:
        _listen_only_at(_own_address(coordinator))
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=world_size,
            process_id=rank,
            cluster_detection_method="deactivate",
            initialization_timeout=int(join_timeout_s) + 60,
            heartbeat_timeout_seconds=timeout_s,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
            coordinator_bind_address=coordinator if rank == 0 else None,
        )
    except (OSError, RuntimeError) as error:
        raise JoinFailed(f"rank {rank} could not join at {coordinator}: {error}") from error


def _own_address(coordinator: str) -> str:
    """Of this machine, where the coordinator's sees it: loopback if all ranks are on this one."""
    if coordinator.startswith(UNIX):
        return "127.0.0.1"
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # nothing is sent
        return str(probe.getsockname()[0])


def _listen_only_at(address: str) -> None:
    """Let the collectives on CPUs (gloo, which knows no password) listen at one address.

    By itself it takes what the host's name resolves to: an outer address though all ranks are here,
    or a loopback that no other host reaches. jax 0.10.2 has no setting for it; what it calls has.
    """
    from jax._src import xla_bridge

    library: Any = xla_bridge._jax  # type: ignore[attr-defined]  # a module of jaxlib
    make = library.make_gloo_tcp_collectives
    if not isinstance(make, functools.partial):
        library.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def _await_coordinator(address: str, timeout_s: float) -> None:
    """Until somebody listens there, or the time is up; JAX's own first retry comes a second late.

    The join itself finds out who it is that listens.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with _connection(address):
                return
        except OSError:
            time.sleep(0.005)


def _connection(address: str) -> socket.socket:
    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=1.0)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(1.0)
        connection.connect(address.removeprefix(UNIX))
    except OSError:
        connection.close()
        raise
    return connection


def _refuse_taken_address(address: str) -> None:
    """Raise `AddressTaken` where JAX would end with SIGSEGV, or share a port with another world.

    gRPC binds with SO_REUSEPORT: a second coordinator would start beside a living one. A socket
    that only holds the port for this generation neither listens nor hinders.
    """
    host, _, port = address.rpartition(":")
    place = (host.strip("[]"), int(port))
    try:
        socket.create_connection(place, timeout=1.0).close()
    except OSError:
        pass  # nobody listens, as it should be
    else:
        raise AddressTaken(f"the coordinator's address {address} is in use by another process")
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind(place)
        except OSError as error:
            raise AddressTaken(f"the coordinator's address {address}: {error.strerror}") from error


def describe_environment() -> dict[str, Any]:
    """What restore points record about the numeric environment; imports jax and its devices."""
    import jax
    import jaxlib.version
    import numpy as np

    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "threads": os.environ.get("NPROC", f"not fixed, {os.cpu_count()} cores"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def device_memory_bytes() -> int | None:
    """The most that any local device had in use so far; None where devices do not tell (CPU)."""
    import jax

    told = [device.memory_stats() for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in told if one and "peak_bytes_in_use" in one]
    return max(peaks, default=None)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each entry that is not equal; "" stands for an entry that was not there."""
    names = [*then, *(name for name in now if name not in then)]
    return [
        f"{name}: {then.get(name, '')} when saved, {now.get(name, '')} now"
        for name in names
        if then.get(name, "") != now.get(name, "")
    ]


def _processor() -> str:
    """The model, and a digest of the instruction set, which decides what XLA emits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = " ".join(sorted(found.get("flags", found.get("Features", "")).split()))
    digest = hashlib.sha256(flags.encode()).hexdigest()[:12]
    return f"{found.get('model name', platform.processor())} (flags {digest})"
