"""What a second user of the machine can put where commands look, and what comes of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from supervisor.cli import main
from supervisor.console.control import ADDRESS_FILE, ask
from supervisor.disk.run_directory import settle
from supervisor.errors import NotRunning
from trainer.host import private_directories
from trainer.host.private_directories import (
    remove_sockets,
    run_name,
    short_directory,
    tmp_directory,
)
from trainer.state.snapshot import directory_of

COMMANDS = (
    ["status"],
    ["status", "--json"],
    ["events"],
    ["replay"],
    ["stop", "--timeout", "1"],
    ["fault", "--rank", "0", "--kind", "kill"],
)
NOBODY = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
FILES = ("journal.jsonl", "result.json", "metrics.jsonl", "control", "lock", "identity.json")
HOSTILE = {"a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("name", [*FILES, "incidents/0001/incident.json"])
def test_nothing_in_a_directory_of_another_user_holds_a_command_or_fills_its_memory(
    tmp_path: Path, name: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An administrator asked for the status of a user's job, and `status` never came back."""
    path = tmp_path / "first" / name
    path.parent.mkdir(parents=True)
    make: Callable[[Path], None] = HOSTILE[what]
    make(path)
    for command in COMMANDS:
        assert main([*command, "--run", str(tmp_path / "first")]) == 1
        assert f"{path} is neither a file nor a directory" in capsys.readouterr().err


def test_a_job_that_cannot_be_read_hides_none_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file that was no journal, in a directory that others share, and `runs` listed nothing."""
    ended = {"state": "COMPLETED", "step": 60}
    for name in ("ours", "pipe", "text", "\x1b[2J"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(ended))
    os.mkfifo(tmp_path / "pipe" / "control")
    (tmp_path / "text" / "journal.jsonl").write_text("no journal\n")
    assert main(["runs", "--run", str(tmp_path / "pipe")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ours" in told
    assert "\x1b" not in told
    assert told.count("COMPLETED") == 2
    assert told.count("not readable") == 2
    assert main(["runs", "--json", "--run", str(tmp_path / "ours")]) == 0
    rows = {row["job"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ours"]["state"] == "COMPLETED"
    assert rows["ours"]["problem"] is None
    assert "neither a file nor a directory" in rows["pipe"]["problem"]
    assert "journal.jsonl, line 1" in rows["text"]["problem"]
    assert rows["text"]["state"] is None


@root_only
def test_a_name_that_others_have_read_and_taken_is_not_used_again(tmp_path: Path) -> None:
    """They had seen it in /dev/shm: from the next start on the job took no snapshots."""
    settle(tmp_path)
    squatted = directory_of(tmp_path)
    squatted.mkdir()
    try:
        os.chown(squatted, NOBODY, NOBODY)
        settle(tmp_path)
        assert directory_of(tmp_path) != squatted
    finally:
        squatted.rmdir()


@root_only
def test_a_name_that_is_not_needed_may_be_taken(tmp_path: Path) -> None:
    """A daemon that came back gave its living workers another name, and did not find them."""
    settle(tmp_path)
    name = run_name(tmp_path)
    squatted = tmp_directory(name)
    squatted.mkdir()
    try:
        os.chown(squatted, NOBODY, NOBODY)
        settle(tmp_path)
        assert run_name(tmp_path) == name
    finally:
        squatted.rmdir()


@root_only
def test_a_squatter_in_tmp_that_leaves_moves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets made until then were neither touched nor, at the end, removed."""
    monkeypatch.setattr(
        private_directories, "tmp_directory", lambda name="": tmp_path / f"tmp{name and '-'}{name}"
    )
    settle(tmp_path)
    (tmp_path / "tmp").mkdir()
    os.chown(tmp_path / "tmp", NOBODY, NOBODY)
    place = short_directory(tmp_path)
    assert place != tmp_path / "tmp"
    (tmp_path / "tmp").rmdir()
    assert short_directory(tmp_path) == place
    remove_sockets(tmp_path)
    assert not place.exists()
    assert short_directory(tmp_path) == tmp_path / "tmp"


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_what_answers_in_place_of_a_daemon_may_not_talk_for_ever(
    tmp_path: Path, pause_s: float
) -> None:
    """`status` on a directory of another user filled the memory, or waited for the next byte."""
    path = short_directory(tmp_path) / f"endless-{os.getpid()}.sock"
    (tmp_path / ADDRESS_FILE).write_text(str(path))

    def talk() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            while True:
                connection.sendall(b"x" if pause_s else b"x" * (1 << 16))
                time.sleep(pause_s)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        talker = threading.Thread(target=talk)
        talker.start()
        try:
            with pytest.raises(NotRunning):
                ask(tmp_path, {"command": "status"}, timeout_s=0.1)
        finally:
            path.unlink()
            talker.join()
