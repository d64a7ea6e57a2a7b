"""A run directory is ours alone, knows which one it is, and what of a record is its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from supervisor.cluster.own_servers import EmbeddedRay, EmbeddedRedis
from supervisor.console.control import ADDRESS_FILE, Control, ask
from supervisor.daemon.lock import acquire, read_holder
from supervisor.disk.run_directory import (
    EMBEDDED_MARK,
    Watch,
    end_strays,
    identity_record,
    open_directory,
    settle,
    store_name,
    why_short_lived,
    why_unusable,
)
from supervisor.errors import AlreadyRunning, DiskError
from trainer.host.private_directories import short_directory, socket_path, touch_sockets
from trainer.slot.child import RUN
from trainer.state.snapshot import directory_of

NOBODY = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")


@contextlib.contextmanager
def process(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **variables}) as running:
        time.sleep(0.05)  # until it is `sleep`
        yield running
        running.kill()


# --- whose it is --------------------------------------------------------------------------------


@root_only
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Root ran Python files that lay there."""
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    os.chown(run_dir, NOBODY, NOBODY)
    with pytest.raises(DiskError, match=r"belongs to user 65534.*job\.run_dir"):
        acquire(run_dir)
    assert list(run_dir.iterdir()) == []


@root_only
def test_what_another_user_has_put_there_is_named(tmp_path: Path) -> None:
    """The directory was open to all for a while."""
    (tmp_path / "embedded.json").write_text("{}")
    os.chown(tmp_path / "embedded.json", NOBODY, NOBODY)
    with pytest.raises(DiskError, match=r"embedded\.json belongs to user 65534; remove it"):
        acquire(tmp_path)


@pytest.mark.parametrize("name", ["lock", "journal.jsonl", "supervisor.log", "embedded.json"])
def test_a_file_that_is_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    """The target of `lock` was truncated."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    (run_dir / name).symlink_to(precious)
    with pytest.raises(DiskError, match="is a symbolic link"):
        acquire(run_dir)
    assert precious.read_text() == "years of work"


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    """A link to a directory is how one gives them more room."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "checkpoints").symlink_to(tmp_path / "disk")
    open_directory(tmp_path / "job")


def test_a_directory_that_others_could_enter_is_closed(tmp_path: Path) -> None:
    """`mkdir -p runs/first` before the first start leaves it open to all."""
    (tmp_path / "job").mkdir(mode=0o755)
    open_directory(tmp_path / "job")
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["a_file/runs/job", "/proc/nowhere/job"])
def test_a_place_that_cannot_be_used_is_known_before_anything_is_made(
    tmp_path: Path, place: str
) -> None:
    """`check` said that the settings were fine, and the start ended with status 4."""
    (tmp_path / "a_file").touch()
    assert "cannot be used" in why_unusable(tmp_path / place)
    assert why_unusable(tmp_path / "new" / "job") == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["a_file"]


def test_a_run_in_rays_copy_of_a_working_directory_is_said_to_be_lost(tmp_path: Path) -> None:
    """`ray job submit` with a relative job.run_dir: no later submission found the checkpoints."""
    copy = "session_latest/runtime_resources/working_dir_files/_ray_pkg_ef64e1dfb303af0e"
    assert "set job.run_dir to an absolute path" in why_short_lived(tmp_path / copy / "runs/first")
    assert why_short_lived(tmp_path / "runs/first") == ""


@root_only
def test_a_place_of_another_user_is_known_beforehand(tmp_path: Path) -> None:
    """A colleague's settings file, used as it is, names the colleague's directory."""
    os.chown(tmp_path, NOBODY, NOBODY)
    assert "belongs to user 65534" in why_unusable(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- which one it is ----------------------------------------------------------------------------


def test_a_copy_neither_uses_nor_ends_the_servers_of_the_original(tmp_path: Path) -> None:
    """The copy used the original's Redis and Ray, and killed both at its end."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    with acquire(original):
        settle(original)
    server, other = EmbeddedRedis(original), EmbeddedRedis(copy)
    try:
        address = server.ensure()
        shutil.copytree(original, copy)
        assert not other.is_alive()
        other.stop()
        assert server.is_alive()
        with acquire(copy):
            settle(copy)
        assert other.ensure().port != address.port
        other.stop()
        assert server.is_alive()
        assert directory_of(copy) != directory_of(original)
        names = [
            json.loads((one / "identity.json").read_text())["name"] for one in (original, copy)
        ]
        assert len(set(names)) == 2
    finally:
        server.stop()
        other.stop()


def test_the_name_in_a_copied_lock_is_nobodys(tmp_path: Path) -> None:
    """--take-over on a copy, just locked by another, read the original's daemon there."""
    with acquire(tmp_path / "original"), process() as daemon:
        holder = read_holder(tmp_path / "original")
        assert holder is not None
        shutil.copytree(tmp_path / "original", tmp_path / "copy")
        told = json.loads((tmp_path / "copy" / "lock").read_text())
        stat = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        told |= {"pid": daemon.pid, "after_boot_s": int(stat[19]) / os.sysconf("SC_CLK_TCK")}
        (tmp_path / "copy" / "lock").write_text(json.dumps(told))
        hold = f"flock {tmp_path}/copy/lock sleep 600"
        with subprocess.Popen(["bash", "-c", f"exec {hold}"], start_new_session=True) as taker:
            time.sleep(0.2)
            with pytest.raises(AlreadyRunning, match="nobody's name stands there"):
                acquire(tmp_path / "copy", take_over=True)
            os.killpg(taker.pid, signal.SIGKILL)
        assert daemon.poll() is None


@pytest.mark.parametrize("part", ["redis", "ray"])
def test_a_record_that_was_handed_over_ends_and_removes_nothing(tmp_path: Path, part: str) -> None:
    """`embedded.json` deleted any directory and killed listed pids."""
    precious = tmp_path / "precious" / "0123abcd"
    precious.mkdir(parents=True)
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    with process() as bystander:
        stat = Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()
        pair = [bystander.pid, int(stat[19]) / os.sysconf("SC_CLK_TCK")]
        record = {
            "mark": "00",
            "path": str(run_dir),
            "temp_dir": str(precious),
            "address": "h:1",
            "port": 1,
            "password": "x",
            "processes": {"redis-server": pair, "gcs_server": pair, "raylet": pair},
        }
        kept = {"directory": identity_record(run_dir), part: record}
        (run_dir / "embedded.json").write_text(json.dumps(kept))
        server = EmbeddedRedis(run_dir) if part == "redis" else EmbeddedRay(run_dir)
        assert not server.is_alive()
        server.stop()
        assert bystander.poll() is None
    assert precious.is_dir()


@pytest.mark.parametrize("moved", [True, False])
def test_a_server_is_ended_though_its_directory_is_gone(tmp_path: Path, moved: bool) -> None:
    """It was known by a file that was no longer where it had been."""
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    server = EmbeddedRedis(run_dir)
    address = server.ensure()
    successor = EmbeddedRedis(run_dir)
    assert successor.ensure() == address  # of a daemon that has adopted it
    if moved:
        run_dir.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(run_dir)
    started = time.monotonic()
    successor.stop()
    assert time.monotonic() - started < 5
    assert not server.is_alive()
    assert not run_dir.exists()
    server.stop()


def test_what_a_deleted_directory_of_this_path_has_left_is_ended(tmp_path: Path) -> None:
    """After kill -9 of the daemon and rm -rf the old workers trained on, unseen."""
    run_dir = tmp_path / "job"
    with acquire(run_dir):
        settle(run_dir)
    old = EmbeddedRedis(run_dir)
    old.ensure()
    snapshots = directory_of(run_dir)
    snapshots.mkdir(mode=0o700)
    with process(**{RUN: str(run_dir)}) as worker, process(**{RUN: f"{run_dir}2"}) as other:
        shutil.rmtree(run_dir)
        with acquire(run_dir):
            settle(run_dir)
        assert worker.wait(5) == -signal.SIGKILL
        assert not old.is_alive()
        old.stop()  # reaps what another has ended
        assert other.poll() is None
        assert not snapshots.exists()
    with process(**{RUN: str(run_dir)}) as worker:
        with acquire(run_dir):  # after kill -9 alone they are adopted
            settle(run_dir)
        assert worker.poll() is None


def test_what_has_overwritten_its_environment_is_ended_with_its_session(tmp_path: Path) -> None:
    """One start in four, an agent of the old Ray lived on for a minute: its title hid its mark."""
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    mark = f"{os.getpid():08x}" * 4
    session = short_directory(run_dir) / mark[:8]
    session.mkdir(mode=0o700)
    variables = {RUN: str(run_dir), EMBEDDED_MARK: mark}
    hidden = ["env", "-i", "bash", "-c", "sleep 600 & echo $!; wait"]
    with (
        subprocess.Popen(
            ["bash", "-c", '"$@" & wait', "bash", *hidden],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
        ) as raylet,
        (session / "agent.log").open("wb") as log,
        subprocess.Popen(["env", "-i", "sleep", "600"], stdout=log) as agent,
        subprocess.Popen(["env", "-i", "sleep", "600"]) as other,
    ):
        assert raylet.stdout is not None
        below = psutil.Process(int(raylet.stdout.readline()))
        end_strays(run_dir)
        assert raylet.wait(5) == agent.wait(5) == -signal.SIGKILL
        assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE
        assert other.poll() is None
        assert not session.exists()
        other.kill()


def test_a_directory_that_was_moved_or_replaced_is_noticed_on_the_second_look(
    tmp_path: Path,
) -> None:
    """The job went on in a new folder of the old name, then ended with status 70."""
    run_dir, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    run_dir.mkdir()
    watch = Watch(run_dir)
    assert watch.look() is None
    run_dir.rename(elsewhere)
    assert watch.look() is None  # a file system over a network may err once
    lost = watch.look()
    assert lost is not None
    assert lost.exit_status == 4
    assert "moved or deleted" in str(lost)
    run_dir.mkdir()
    assert "is another directory now" in str(watch.look())
    run_dir.rmdir()
    elsewhere.rename(run_dir)
    assert watch.look() is None


# --- what lies in /tmp and /dev/shm -------------------------------------------------------------


def test_a_directory_that_was_emptied_is_noticed_on_the_second_look(tmp_path: Path) -> None:
    """`rm -rf` met a file that was written meanwhile: the job trained on without a journal."""
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "identity.json").touch()
    watch = Watch(tmp_path)
    (tmp_path / "journal.jsonl").rename(tmp_path / "journal.1.jsonl")  # as it rolls over
    assert (watch.look(), watch.look()) == (None, None)
    (tmp_path / "identity.json").unlink()
    assert watch.look() is None
    assert "has lost its files" in str(watch.look())


def test_the_control_socket_of_a_later_daemon_is_left_alone(tmp_path: Path) -> None:
    """A frozen daemon that woke took the socket of its successor, and removed it at its end."""

    async def answer(request: dict[str, object]) -> dict[str, object]:
        return {"ok": True}

    async def story() -> None:
        first, second = Control(tmp_path, answer), Control(tmp_path, answer)
        await first.start()
        await second.start()
        for touch in (first.mend, first.close):
            await touch()
            assert await asyncio.to_thread(ask, tmp_path, {"command": "status"}) == {"ok": True}
        await second.close()

    open_directory(tmp_path)
    settle(tmp_path)
    asyncio.run(story())


@pytest.mark.parametrize("what", ["socket", "address"])
def test_a_control_socket_that_a_cleaner_removed_is_made_again(what: str, tmp_path: Path) -> None:
    """`status`, `stop` and `fault` said that no daemon ran."""
    path = socket_path(tmp_path) if what == "socket" else tmp_path / ADDRESS_FILE

    async def handler(request: dict[str, object]) -> dict[str, object]:
        return {"ok": True}

    async def story() -> None:
        control = Control(tmp_path, handler)
        await control.start()
        path.unlink()
        await control.mend()
        assert await asyncio.to_thread(ask, tmp_path, {"command": "status"})
        await control.close()
        await control.mend()
        assert not path.exists()

    asyncio.run(story())


def test_what_a_job_of_weeks_has_in_tmp_never_looks_old(tmp_path: Path) -> None:
    """After ten days a cleaner removed the sockets of Ray's session and of the daemon."""
    control = socket_path(tmp_path)
    session = short_directory(tmp_path) / f"{os.getpid():08x}"
    files = (session / "sockets" / "raylet", session / "session.json")
    record = {"directory": identity_record(tmp_path), "ray": {"temp_dir": str(session)}}
    (tmp_path / "embedded.json").write_text(json.dumps(record))
    try:
        files[0].parent.mkdir(parents=True)
        for path in (control, *files):
            path.touch()
        paths = (control, *files, session, files[0].parent)
        for path in paths:
            os.utime(path, (0, 0))
        EmbeddedRay(tmp_path).touch()
        touch_sockets(tmp_path)
        assert min(path.stat().st_mtime for path in paths) > time.time() - 60
        assert min(path.stat().st_atime for path in paths) > time.time() - 60
    finally:
        shutil.rmtree(session)
        control.unlink()


AS_A_VICTIM = """
import asyncio, concurrent.futures.thread, encodings.ascii, encodings.idna, os, sys
from pathlib import Path
from supervisor.console.control import Control, ask
from supervisor.daemon.lock import acquire
from supervisor.disk.run_directory import settle
from trainer.host.private_directories import short_directory
from trainer.state.snapshot import directory_of
os.setgid(54321)
os.setuid(54321)
run_dir = Path(sys.argv[1]) / "job"
before = directory_of(run_dir)

async def answer(request):
    return {"ok": True}

async def story():
    control = Control(run_dir, answer)
    await control.start()
    print("said", (await asyncio.to_thread(ask, run_dir, {"command": "status"}))["ok"])
    await control.close()

with acquire(run_dir):
    settle(run_dir)
    asyncio.run(story())
print("said", directory_of(run_dir) != before)
place = short_directory(run_dir)
print("said", oct(place.stat().st_mode & 0o777))
place.rmdir()
"""


@root_only
def test_a_squatter_in_tmp_or_shared_memory_stops_nobody(tmp_path: Path) -> None:
    """Another user made /tmp/everstep-UID first: status 4, and no way round."""
    squatted = Path("/tmp/everstep-54321")
    squatted.mkdir()
    os.chown(squatted, NOBODY, NOBODY)
    home = Path("/tmp") / f"victim-{os.getpid()}"
    home.mkdir()
    os.chown(home, 54321, 54321)
    try:
        command = [sys.executable, "-c", AS_A_VICTIM, str(home)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        said = [line for line in done.stdout.splitlines() if line.startswith("said ")]
        assert said == ["said True", "said True", "said 0o700"], done.stderr
    finally:
        squatted.rmdir()
        shutil.rmtree(home)


def test_jobs_of_one_name_share_no_key_of_a_store(tmp_path: Path) -> None:
    """Two users' jobs named "first" on one Redis hid each other's hangs."""
    places = [tmp_path / user / "runs" / "first" for user in ("one", "other")]
    for place in places:
        open_directory(place)
        settle(place)
    first, second = (store_name(place) for place in places)
    assert first != second
    assert first.startswith("first:")
    assert store_name(places[0]) == first
    settle(places[0])
    assert store_name(places[0]) == first
    shutil.rmtree(places[0])
    open_directory(places[0])
    settle(places[0])  # the same path, on another host or anew
    assert store_name(places[0]) != first
