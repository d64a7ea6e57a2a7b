"""The job's own Redis and Ray head: private, found again, and ended exactly."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from supervisor.cluster.own_servers import EmbeddedRay, EmbeddedRedis, authenticate
from supervisor.disk.run_directory import identity_record
from supervisor.errors import ClusterUnusable, DiskError
from trainer.wire.store_address import StoreAddress


def client(address: StoreAddress, password: str | None) -> redis.Redis:
    return redis.Redis(
        host=address.host,
        port=address.port,
        password=password,
        socket_timeout=2,
        retry=Retry(NoBackoff(), 0),
    )


def recorded(run_dir: Path, part: str) -> dict[str, psutil.Process]:
    record = json.loads((run_dir / "embedded.json").read_text())[part]
    return {name: psutil.Process(pid) for name, (pid, _) in record["processes"].items()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    yield server
    server.stop()


def test_redis_answers_to_its_password_only(tmp_path: Path, server: EmbeddedRedis) -> None:
    """Anyone on the machine could write heartbeats of a worker that hangs."""
    address = server.ensure()
    assert client(address, address.password).ping()
    with pytest.raises(redis.AuthenticationError):
        client(address, None).ping()
    with pytest.raises(redis.AuthenticationError):
        client(address, "guess").ping()
    (process,) = recorded(tmp_path, "redis").values()
    assert address.password is not None
    assert address.password not in " ".join(process.cmdline())
    assert address.password not in json.dumps(process.environ())
    assert {one.laddr.ip for one in process.net_connections() if one.status == "LISTEN"} == {
        "127.0.0.1"
    }
    assert stat.S_IMODE((tmp_path / "embedded.json").stat().st_mode) == 0o600
    assert address.password not in (tmp_path / "redis.log").read_text()


@pytest.mark.parametrize("name", ['a "quoted" one', "back\\slash\\", "runs [v2]", "a\nline", "#*?"])
def test_redis_starts_whatever_its_run_directory_is_called(tmp_path: Path, name: str) -> None:
    """A quotation mark in run_dir broke its configuration, and its log was empty."""
    run_dir = tmp_path / name
    run_dir.mkdir()
    server = EmbeddedRedis(run_dir)
    try:
        address = server.ensure()
        assert client(address, address.password).ping()
        assert "Ready to accept connections" in (run_dir / "redis.log").read_text()
    finally:
        server.stop()


def test_a_redis_that_does_not_start_is_shown_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message ended with nothing."""
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho Fatal: no such option >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ClusterUnusable, match="Fatal: no such option"):
        EmbeddedRedis(tmp_path).ensure()


def test_a_later_daemon_finds_the_living_redis_and_ends_it(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    """The daemon was killed; its successor must not start a second one, nor leave the first."""
    address = server.ensure()
    (process,) = recorded(tmp_path, "redis").values()
    successor = EmbeddedRedis(tmp_path)
    assert successor.is_alive()
    assert successor.ensure() == address
    successor.stop()
    assert process.status() == psutil.STATUS_ZOMBIE  # ours to reap: it was our child
    assert not successor.is_alive()
    successor.stop()


def test_a_redis_that_died_comes_back_where_the_workers_look_for_it(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    """Workers keep the address they were started with."""
    address = server.ensure()
    (process,) = recorded(tmp_path, "redis").values()
    process.kill()
    process.wait()
    assert not server.is_alive()
    assert server.ensure() == address
    assert client(address, address.password).ping()


def test_a_port_that_was_taken_meanwhile_is_given_up(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Between the death of a server and its return anybody may take its port."""
    address = server.ensure()
    (process,) = recorded(tmp_path, "redis").values()
    process.kill()
    process.wait()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((address.host, address.port))
        squatter.listen()
        again = server.ensure()
    assert again.port != address.port
    assert client(again, again.password).ping()


def test_a_process_that_got_the_pid_of_ours_is_left_alone(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    """After a week the recorded pid is somebody's editor."""
    with subprocess.Popen(["sleep", "600"]) as bystander:
        path = tmp_path / "embedded.json"
        processes = {"redis-server": [bystander.pid, 1.0]}
        record = {"mark": "00", "port": 1, "password": "x", "processes": processes}
        path.write_text(json.dumps({"directory": identity_record(tmp_path), "redis": record}))
        server.stop()
        assert bystander.poll() is None
        bystander.kill()


def test_what_was_started_before_it_could_be_recorded_is_ended(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    """A daemon that is killed while it starts its head leaves processes without a record."""
    environment = {**os.environ, "EVERSTEP_EMBEDDED": "0123abcd"}
    with subprocess.Popen(["sleep", "600"], env=environment) as orphan:
        record = {"mark": "0123abcd", "port": 1, "password": "x", "processes": {}}
        kept = {"directory": identity_record(tmp_path), "redis": record}
        (tmp_path / "embedded.json").write_text(json.dumps(kept))
        time.sleep(0.05)
        server.stop()
        assert orphan.wait(5) == -signal.SIGKILL


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    """Guessing which processes are ours would end somebody else's."""
    (tmp_path / "embedded.json").write_text("{")
    with pytest.raises(DiskError, match=r"embedded\.json is damaged"):
        EmbeddedRedis(tmp_path).ensure()
    (tmp_path / "embedded.json").unlink()


def test_the_token_of_a_head_that_is_gone_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be known to whoever handed the directory over."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "former")
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "former")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")  # of `ray job submit`
    path = tmp_path / "ray.token"
    authenticate(tmp_path)
    token = path.read_text()
    authenticate(tmp_path)
    assert path.read_text() != token
    assert len(path.read_text()) == len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(path)
    assert not {"RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR"} & set(os.environ)


_INTRUDE = """
import os, sys
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64)
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_NUM_REDIS_GET_RETRIES="1")
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except BaseException as error:
    print(type(error).__name__)
"""


def test_the_head_is_private_found_again_and_ended_with_all_that_is_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray listens on all interfaces without a token: any neighbour could run code as us."""
    for name in ("MODE", "TOKEN_PATH", "TOKEN"):
        monkeypatch.setenv(f"RAY_AUTH_{name}", "former")  # and given back afterwards
    head = EmbeddedRay(tmp_path)
    address = head.ensure()
    try:
        token = (tmp_path / "ray.token").read_text()
        authenticate(tmp_path)  # a later daemon, which the living head must not refuse
        assert (tmp_path / "ray.token").read_text() == token
        assert EmbeddedRay(tmp_path).ensure() == address
        record = json.loads((tmp_path / "embedded.json").read_text())["ray"]
        temp_dir = Path(record["temp_dir"])
        processes = recorded(tmp_path, "ray")
        everything = {
            one for root in processes.values() for one in [root, *root.children(recursive=True)]
        }
        assert {"gcs_server", "raylet"} <= set(processes)
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in everything
            for connection in process.net_connections()
            if connection.status == "LISTEN"
        }
        assert listening == {"127.0.0.1"}
        assert stat.S_IMODE(temp_dir.parent.stat().st_mode) == 0o700
        assert max(len(str(path)) for path in temp_dir.rglob("sockets/*")) <= 107
        assert all(token not in " ".join(one.cmdline()) for one in everything)
        intruder = subprocess.run(
            [sys.executable, "-c", _INTRUDE, address],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Authentication" in intruder.stdout + intruder.stderr
        with (temp_dir / "agent.log").open("wb") as log:  # a title has overwritten its mark
            hidden = subprocess.Popen(["env", "-i", "sleep", "600"], stdout=log)
        processes["gcs_server"].kill()
        deadline = time.monotonic() + 5
        while head.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        head.stop()
    assert hidden.wait(5) == -signal.SIGKILL
    assert not any(one.is_running() and one.status() != "zombie" for one in everything)
    assert not temp_dir.exists()
    assert not head.is_alive()


_RAY_THAT_TELLS = """
def main():
    try:
        import grpc
    except ImportError:
        raise SystemExit("without grpc")
    raise SystemExit("with grpc")

if __name__ == "__main__":
    main()
"""


def test_the_head_starts_as_if_grpc_were_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside TensorBoard or ray[default] no job started: Ray refused the port of its client server.

    Without that port it opens the server, to everybody.
    """
    for module, text in (
        *(("grpc", ""), ("ray", ""), ("ray.scripts", "")),
        ("ray.scripts.scripts", _RAY_THAT_TELLS),
    ):
        package = tmp_path / "site" / module.replace(".", "/")
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
        (package / "__main__.py").write_text(f"from {module} import *\nglobals()['main']()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with pytest.raises(ClusterUnusable, match="without grpc"):
        EmbeddedRay(tmp_path / "run").ensure()


def test_a_head_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken Ray installation has to show what it said, not a time-out."""
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "nonsense")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ClusterUnusable, match=r"ray-start\.log"):
        EmbeddedRay(tmp_path).ensure()
    assert json.loads((tmp_path / "embedded.json").read_text())["ray"] is None
