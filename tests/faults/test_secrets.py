"""Who may read what a run leaves, who may reach it, and where its secrets are not."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Daemon, Job, Store, run, until
from trainer.host.environment import PASSWORD_VARIABLE
from trainer.state.snapshot import directory_of

full = pytest.mark.full

STANDBY: dict[str, Any] = {
    "recovery.standby": "generation",
    "recovery.snapshot_every_steps": 1,
    "trainer.options.pace_s": 0.2,
    "trainer.steps": 10_000,  # each test stops it
}
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_run_is_its_owners_alone(job: MakeJob) -> None:
    """Any user of the machine read the losses, and could have run code as the one who trains."""
    tiny = job(**STANDBY)
    daemon = tiny.start()
    daemon.until_committed()
    daemon.until("standby_ready")
    daemon.strike(1)
    daemon.until("standby_ready", generation=3)
    secrets = [tiny.embedded("redis")["password"], (tiny.run_dir / "ray.token").read_text()]
    must_be_private(tiny.run_dir)
    must_be_private(directory_of(tiny.run_dir))
    must_listen_on_loopback_only(tiny)
    must_not_show(tiny, daemon, secrets)
    assert run(tiny, "stop").returncode == 0
    assert daemon.exit_status() == 5
    must_be_private(tiny.run_dir)


@full
@pytest.mark.parametrize("source", ["url", "file", "environment"])
def test_the_password_of_a_store_of_others_is_shown_nowhere(
    job: MakeJob, store: Store, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ps`, a log that is pasted into a report, the environment of a job that prints it."""
    bare = f"redis://127.0.0.1:{store.port}"
    given = {
        "url": {"heartbeats.redis_url": store.url},
        "file": {"heartbeats.redis_url": bare, "heartbeats.redis_password_file": "secret"},
        "environment": {"heartbeats.redis_url": bare},
    }[source]
    tiny = job(**{**STANDBY, **given})
    (tiny.folder / "secret").write_text(store.password)
    if source == "environment":
        monkeypatch.setenv(PASSWORD_VARIABLE, store.password)
    daemon = tiny.start()
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    daemon.until("standby_ready")
    assert store.client().keys("everstep:*:r1")
    store.process.kill()
    store.process.wait()
    daemon.until("heartbeat_store_lost")  # what went wrong is told in full, but for that
    store.start()
    daemon.until("heartbeat_store_recovered")
    must_not_show(tiny, daemon, [store.password])
    assert run(tiny, "stop", "--now").returncode == 0
    assert daemon.exit_status() == 5
    checked = run(tiny, "check")  # it asks the store, whose password has left this environment
    assert checked.returncode == (2 if source == "environment" else 0)
    assert store.password not in checked.stdout + checked.stderr


def must_be_private(folder: Path) -> None:
    """0700 and 0600, whoever of us has written it."""
    wrong = [
        f"{oct(mode)} {path}"
        for path in [folder, *folder.rglob("*")]
        if not path.is_symlink() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077
    ]
    assert not wrong, "\n".join(wrong)


def must_listen_on_loopback_only(tiny: Job) -> None:
    """Ray, Redis, JAX's coordinator, gloo between the ranks."""
    ours = {one.pid for one in tiny.processes()}
    listening = {
        (one.pid, one.laddr.ip, one.laddr.port)
        for one in psutil.net_connections(kind="inet")
        if one.pid in ours and one.status == psutil.CONN_LISTEN
    }
    assert len({pid for pid, _, _ in listening}) >= 6  # gcs, raylet, redis, the slots, the ranks
    outside = {
        f"{ip}:{port} {psutil.Process(pid).cmdline()[:4]}"
        for pid, ip, port in listening
        if ip not in LOOPBACK
    }
    assert not outside, outside


def must_not_show(tiny: Job, daemon: Daemon, secrets: list[str]) -> None:
    """Neither in processes but the daemon's first environment, nor in what is kept or answered."""
    until(lambda: len(tiny.processes()) > 6, "the processes of a run")
    texts = {}
    for one in tiny.processes():
        for what in ("cmdline", "environ"):
            if (one.pid, what) != (daemon.pid, "environ"):
                texts[f"{what} of {one.pid}"] = Path(f"/proc/{one.pid}/{what}").read_bytes()
    kept = {"ray.token", "embedded.json"}  # of mode 0600, for that purpose
    for path in tiny.run_dir.rglob("*"):
        # Links lead to files of the user, which are beside the settings anyway.
        if path.is_file() and not path.is_symlink() and path.name not in kept:
            texts[str(path)] = path.read_bytes()
    texts["what the daemon said"] = daemon.output.read_bytes()
    for command in (["status", "--json"], ["events", "--json"], ["check", "--json"]):
        texts[" ".join(command)] = run(tiny, *command).stdout.encode()
    shown = [where for where, text in texts.items() for one in secrets if one.encode() in text]
    assert not shown, shown
