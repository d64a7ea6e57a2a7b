"""Commands as a user gives them: what they print, and the status they end with."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from supervisor.cli import main
from supervisor.console.control import Answer, Control, Request
from supervisor.daemon.lock import acquire
from supervisor.disk.incidents import write_summary
from supervisor.errors import AlreadyRunning
from supervisor.record.journal import encode

COMMANDS = ("run", "check", "status", "events", "replay", "graph", "runs", "stop", "fault")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text("[job]\nname = 'mine'\n[trainer]\nsteps = 40\n")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    return path


def move(seq: int, event: dict[str, Any], source: str, target: str) -> bytes:
    record = {"seq": seq, "epoch": 1, "kind": "move", "source": source, "target": target}
    return encode({**record, "event": event, "effects": [], "why": "so it is", "raised": False})


def write_journal(run_dir: Path) -> Path:
    path = run_dir / "journal.jsonl"
    header = {"seq": 1, "epoch": 1, "kind": "header", "schema": 1, "table": "of old"}
    path.write_bytes(
        encode(header)
        + move(2, {"event": "slots_placed", "at": 1.0}, "PROVISIONING", "INITIALIZING")
        + move(
            3,
            {"event": "checkpoint_committed", "at": 2.0, "generation": 4, "step": 20},
            "RUNNING",
            "RUNNING",
        )
    )
    return path


@contextmanager
def daemon(run_dir: Path, handler: Callable[[Request], Answer]) -> Iterator[None]:
    """Something that holds the lock and answers, until it is told to stop."""
    ready, ending = threading.Event(), threading.Event()

    async def serve() -> None:
        over = asyncio.Event()

        async def answer(request: Request) -> Answer:
            if request["command"] == "stop":
                over.set()
            return handler(request)

        control = Control(run_dir, answer)
        await control.start()
        ready.set()
        while not over.is_set() and not ending.is_set():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)  # the answer is on its way
        await control.close()

    def live() -> None:
        with acquire(run_dir):
            asyncio.run(serve())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        ending.set()
        thread.join(10)
        assert not thread.is_alive()


def fake_run(monkeypatch: pytest.MonkeyPatch, run: Callable[..., int]) -> None:
    """Put a daemon in place that ends at once."""
    module = types.ModuleType("supervisor.assembly")

    async def run_daemon(*arguments: object, **options: object) -> int:
        return run(*arguments, *options.items())

    module.run_daemon = run_daemon  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "supervisor.assembly", module)


@pytest.mark.parametrize(
    ("arguments", "settings", "is_json"),
    [
        ([], "", False),
        (["--log", "json"], "", True),
        ([], "[control]\nlog = 'json'\n", True),
        (["--plain"], "[control]\nlog = 'json'\n", False),
    ],
)
def test_the_end_is_printed_as_asked_for(
    config: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    settings: str,
    is_json: bool,
) -> None:
    """Into a pipe there was JSON only, without the traceback and without a last line."""

    def fail(*_: object) -> int:
        result = {"state": "FAILED", "exit_status": 4, "reason": "it broke", "step": 20}
        result |= {"traceback": 'File "my_task.py", line 3'}
        (run_dir / "result.json").write_text(json.dumps(result))
        return 4

    fake_run(monkeypatch, fail)
    config.write_text(config.read_text() + settings)
    assert main([*arguments, "--config", str(config)]) == 4
    out = capsys.readouterr().out
    if is_json:
        line = json.loads(out.splitlines()[-1])
        assert (line["event"], line["level"], line["step"]) == ("job_ended", "error", 20)
        assert "my_task.py" in line["traceback"]
    else:
        assert "FAILED at step 20: it broke" in out
        assert 'File "my_task.py", line 3' in out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help without an example is read twice and tried three times."""
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert "example:\n  python -m supervisor" in capsys.readouterr().out


def test_looking_imports_neither_ray_nor_jax(config: Path) -> None:
    """`status` took four seconds, and every monitoring script with it."""
    code = (
        "import sys; from supervisor.cli import main; "
        f"main(['check', '--config', {str(config)!r}]); main(['status', '--config', "
        f"{str(config)!r}]); sys.exit(bool({{'ray', 'jax', 'orbax'}} & set(sys.modules)))"
    )
    imported = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert imported.returncode == 0


def test_wrong_settings_end_with_2_and_one_line_a_mistake(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All mistakes at once, each with its key, value and remedy."""
    config.write_text("[trainer]\nstep = 3\n[heartbeats]\nlease_s = 40\n")
    for command in ([], ["check"]):
        assert main([*command, "--config", str(config)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert "did you mean trainer.steps?" in lines[0]
        assert "drain_s" in lines[1]
    assert main(["check", "--json", "--config", str(config)]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "problems": lines}


def test_a_check_and_a_start_say_the_same_of_a_place_that_cannot_be_used(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` said that the settings were fine; the start ended with 4, as if it had failed."""
    (config.parent / "runs").touch()
    for command in ([], ["check"]):
        assert main([*command, "--config", str(config)]) == 2
        assert "job.run_dir" in capsys.readouterr().err.splitlines()[-1]


def test_check_says_what_is_in_force_and_why(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options may stand before or after the command."""
    arguments = ["--config", str(config), "check", "--set", "trainer.seed=7"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for start, origin in (("steps = 40", "file"), ("seed = 7", "--set"), ("keep = 3", "default")):
        assert any(
            line.startswith(start) and line.endswith(f"# {origin}") for line in text.splitlines()
        )
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["settings"]["trainer.seed"] == {"value": 7, "origin": "--set"}
    assert answer["run_dir"] == str(config.parent / "runs" / "mine")


def test_check_prints_a_file_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is the default job."""
    assert main(["check", "--defaults"]) == 0
    assert capsys.readouterr().out == (ROOT / "job.toml").read_text()


def test_status_asks_the_daemon(
    config: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While there is one, its word counts."""
    snapshot = {"state": "RUNNING", "generation": 2, "step": 7, "supervisor": {"pid": 1}}
    with daemon(run_dir, lambda _: {"ok": True, **snapshot}):
        assert main(["status", "--json", "--config", str(config)]) == 0
        assert json.loads(capsys.readouterr().out) == snapshot
        assert main(["status", "--run", str(run_dir)]) == 0
        assert "RUNNING" in capsys.readouterr().out


def test_status_reads_the_files_when_the_daemon_is_gone(
    config: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `kill -9` of the daemon the first question is how far the job was."""
    write_journal(run_dir)
    torn = '{"step": 25, "gen'
    incident = {"number": 3, "event": "worker_crashed", "cause": "worker", "ranks": [1]}
    incident |= {"victims": [0], "story": "rank 1 ended by SIGKILL"}
    write_summary(run_dir, 3, {**incident, "opened_at": 7.0, "error": ""})
    (run_dir / "metrics.jsonl").write_text(f'{{"step": 24, "generation": 4, "loss": 2.5}}\n{torn}')
    assert main(["status", "--json", "--config", str(config)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["supervisor"] is None
    assert (answer["state"], answer["generation"], answer["step"]) == ("RUNNING", 4, 25)
    assert answer["incident"] == {**incident, "at": 7.0, "frame": None}
    assert answer["restore_point"] == {"kind": "checkpoint", "step": 20, "verified": True}
    assert answer["loss"] == 2.5
    assert answer["last_event"]["event"] == "checkpoint_committed"
    assert main(["status", "--run", str(run_dir)]) == 0
    assert "no supervisor is running" in capsys.readouterr().out


def test_commands_on_a_job_that_never_ran_say_so(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback, and not a zero that a script takes for success."""
    for command in (["status"], ["events"], ["replay"], ["stop"], ["fault", "--rank=0"]):
        kind = ["--kind", "kill"] if command[0] == "fault" else []
        assert main([*command, *kind, "--config", str(config)]) == 1
        assert str(config.parent / "runs" / "mine") in capsys.readouterr().err
    assert not (config.parent / "runs").exists()


def test_a_job_that_cannot_be_read_hides_no_other(
    config: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One directory of a colleague's among them, and `runs` listed nothing."""
    write_journal(run_dir)
    (run_dir.parent / "another" / "journal.jsonl").mkdir(parents=True)
    assert main(["runs", "--json", "--config", str(config)]) == 0
    another, mine = json.loads(capsys.readouterr().out)
    assert (another["job"], another["state"]) == ("another", None)
    assert another["problem"]
    assert (mine["job"], mine["problem"]) == ("mine", None)
    assert main(["runs", "--config", str(config)]) == 0
    assert "not readable" in capsys.readouterr().out


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_files_of_another_user_are_refused_with_their_owner(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lock: Permission denied` told neither why, nor whom to ask."""
    write_journal(run_dir)
    command = ["status", "--run", str(run_dir)]
    assert main(command) == 0
    os.seteuid(65534)
    try:
        assert main(command) == 1
    finally:
        os.seteuid(0)
    said = capsys.readouterr().err
    assert "Permission denied; " in said
    assert "belongs to user 0" in said


def test_events_are_told_or_given_to_programs(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal itself stays the only record; this is its reader."""
    write_journal(run_dir)
    assert main(["events", "--run", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "PROVISIONING → INITIALIZING" in text
    assert "because so it is" in text
    assert main(["events", "--json", "--run", str(run_dir)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["seq"] for record in records] == [1, 2, 3]


def test_followed_events_appear_as_they_are_written(run_dir: Path) -> None:
    """Each once, also when the journal begins after the command."""
    command = [sys.executable, "-m", "supervisor", "events", "--follow", "--json"]
    reader = subprocess.Popen(
        [*command, "--run", str(run_dir)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert reader.stdout is not None
        path = write_journal(run_dir)
        seen = [json.loads(reader.stdout.readline())["seq"] for _ in range(3)]
        with path.open("ab") as file:
            file.write(move(4, {"event": "worker_crashed", "at": 3.0}, "RUNNING", "DRAINING"))
        seen.append(json.loads(reader.stdout.readline())["seq"])
        assert seen == [1, 2, 3, 4]
    finally:
        reader.kill()
        reader.communicate()


def test_a_closed_pipe_is_no_error(run_dir: Path) -> None:
    """`events | head -1` printed a traceback of its own."""
    path = write_journal(run_dir)
    with path.open("ab") as file:
        for seq in range(4, 3000):
            file.write(move(seq, {"event": "x", "at": 1.0}, "RUNNING", "RUNNING"))
    line = f"{sys.executable} -m supervisor events --run {run_dir} | head -1"
    done = subprocess.run(
        ["bash", "-c", line], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("--- epoch 1")
    assert done.stderr == ""


@pytest.mark.parametrize("option", ["--version", "--help", "check --help"])
def test_help_and_version_into_a_closed_pipe_are_no_error(option: str) -> None:
    """`--version` into `head -0` ended with a traceback."""
    code = (
        "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); "
        f"from supervisor.cli import main; sys.exit(main({option.split()!r}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")


def test_replay_of_a_journal_that_the_table_contradicts_ends_with_1(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that compares must be able to see the difference without reading."""
    path = write_journal(run_dir)
    assert main(["replay", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]


def test_the_graph_is_made_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A drawing by hand is out of date with the first new row."""
    assert main(["graph"]) == 0
    assert "PROVISIONING --> INITIALIZING" in capsys.readouterr().out
    assert main(["graph", "--json"]) == 0
    assert "stateDiagram" in json.loads(capsys.readouterr().out)["markdown"]


def test_stop_waits_for_the_end_and_tells_it(
    config: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that stops a job and copies its files must not copy half of them."""
    requests: list[Request] = []

    def handler(request: Request) -> Answer:
        requests.append(request)
        result = {"state": "STOPPED", "step": 9, "reason": "asked by an operator"}
        (run_dir / "result.json").write_text(json.dumps(result))
        return {"ok": True}

    with daemon(run_dir, handler):
        assert main(["stop", "--config", str(config)]) == 0
    assert requests == [{"command": "stop", "now": False}]
    said = capsys.readouterr().out
    assert "STOPPED at step 9: asked by an operator" in said
    assert "The command that started it goes on from there." in said


def test_stop_gives_up_in_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every wait is bounded; the order itself stands."""
    with acquire(run_dir):
        started = time.monotonic()

        async def story() -> int:
            async def accept(_: Request) -> Answer:
                return {"ok": True}

            control = Control(run_dir, accept)
            await control.start()
            arguments = ["stop", "--now", "--timeout", "0.2", "--run", str(run_dir)]
            status = await asyncio.to_thread(main, arguments)
            await control.close()
            return status

        assert asyncio.run(story()) == 1
        assert time.monotonic() - started < 5
    assert "still runs after 0.2 s" in capsys.readouterr().err


def test_a_fault_reaches_the_daemon_or_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drill that was refused must not look like one that did no harm."""
    requests: list[Request] = []

    def handler(request: Request) -> Answer:
        requests.append(request)
        if request["rank"] == 9:
            return {"ok": False, "error": "there is no rank 9"}
        return {"ok": True}

    base = ["fault", "--run", str(run_dir), "--kind", "kill"]
    with daemon(run_dir, handler):
        assert main([*base, "--rank", "1", "--phase", "checkpoint"]) == 0
        assert capsys.readouterr().out == "Rank 1: kill in phase checkpoint.\n"
        assert main([*base, "--rank", "9"]) == 1
        assert capsys.readouterr().err == "there is no rank 9\n"
    assert requests[0] == {
        "command": "fault",
        "rank": 1,
        "kind": "kill",
        "phase": "checkpoint",
        "step": None,
        "seconds": None,
    }


def test_a_run_ends_with_the_status_of_its_daemon(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is what a scheduler acts on; the settings arrive with their origins."""
    seen: list[Any] = []

    def run(*arguments: Any) -> int:
        seen.extend(arguments)
        return 75

    fake_run(monkeypatch, run)
    assert main(["--config", str(config), "--set", "trainer.steps=50", "--take-over"]) == 75
    settings, origins, config_path, terminal, *given = seen
    assert dict(given) == {"take_over": True, "keep_code": False}
    assert settings.trainer.steps == 50
    assert origins["trainer.steps"] == "--set"
    assert config_path == config
    assert terminal is False


def test_a_bug_and_another_daemon_have_their_own_statuses(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler must not requeue a bug for ever, nor a job that runs elsewhere."""

    def bug(*_: Any) -> int:
        raise ValueError("an invalid move")

    def taken(*_: Any) -> int:
        raise AlreadyRunning("another daemon runs this job: pid 7")

    fake_run(monkeypatch, bug)
    assert main(["--config", str(config)]) == 70
    assert "ValueError: an invalid move" in capsys.readouterr().err
    fake_run(monkeypatch, taken)
    assert main(["--config", str(config)]) == 73
    assert capsys.readouterr().err == "another daemon runs this job: pid 7\n"


@pytest.mark.parametrize("arguments", [["statsu"], ["--nonsense"], ["fault", "--kind", "kill"]])
def test_a_command_that_does_not_exist_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the usage, not a traceback."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
