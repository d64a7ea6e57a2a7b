"""What a run goes on under when its daemon is started again with other settings."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.assembly import _agree
from supervisor.config import Settings
from supervisor.daemon.adoption import Inheritance
from supervisor.fsm.job import Job
from supervisor.fsm.states import TERMINAL, State
from supervisor.record.settings_in_force import SETTINGS_FILE, digest_of, keep, recall

SECRET = "redis://:hunter2@far-away:6379"


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


def test_the_same_settings_change_nothing(tmp_path: Path) -> None:
    """The usual restart; the file is not even needed."""
    now = settings(trainer={"steps": 40})
    found = recall(tmp_path, digest_of(now), now)
    assert (found.settings, found.changed) == (now, ())


def test_workers_keep_what_they_were_started_with_and_each_change_is_named(tmp_path: Path) -> None:
    """Whoever edits the file of a running job must be able to see what is not in force yet."""
    former = settings(trainer={"steps": 40}, heartbeats={"lease_s": 5.0})
    keep(tmp_path, former, tmp_path / "job.toml")
    assert stat.S_IMODE((tmp_path / SETTINGS_FILE).stat().st_mode) == 0o600
    now = settings(trainer={"steps": 50}, cluster={"workers": 4})
    found = recall(tmp_path, digest_of(former), now)
    assert found.settings == former
    assert found.changed == ("cluster.workers", "heartbeats.lease_s", "trainer.steps")


def test_a_password_is_never_written_and_counts_as_it_is_now(tmp_path: Path) -> None:
    """It is rotated while the job runs; the old one opens nothing any more."""
    former = settings(heartbeats={"redis_url": SECRET})
    keep(tmp_path, former, tmp_path / "job.toml")
    assert "hunter2" not in (tmp_path / SETTINGS_FILE).read_text()
    rotated = settings(heartbeats={"redis_url": SECRET.replace("hunter2", "new")})
    assert recall(tmp_path, digest_of(former), rotated).settings == rotated
    more = settings(heartbeats={"redis_url": SECRET}, trainer={"steps": 9})
    found = recall(tmp_path, digest_of(former), more)
    assert found.changed == ("trainer.steps",)
    assert found.settings == former
    other = settings(heartbeats={"redis_url": "redis://elsewhere:6379"})
    assert recall(tmp_path, digest_of(former), other).settings is None  # no way to the old one


@pytest.mark.parametrize("text", [None, "", "{}", '{"digest": "other"}', "[]", "{"])
def test_what_is_not_known_is_not_guessed(tmp_path: Path, text: str | None) -> None:
    """A file that is missing, torn, or of another run."""
    former = settings(trainer={"steps": 40})
    if text is not None:
        (tmp_path / SETTINGS_FILE).write_text(text)
    assert recall(tmp_path, digest_of(former), Settings()).settings is None


def test_settings_that_this_version_does_not_have_are_not_known(tmp_path: Path) -> None:
    """An upgrade may drop a key; what it meant is lost with it."""
    former = settings(trainer={"steps": 40})
    keep(tmp_path, former, tmp_path / "job.toml")
    kept = json.loads((tmp_path / SETTINGS_FILE).read_text())
    kept["settings"]["trainer"]["no_such_key"] = 1
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(kept))
    assert recall(tmp_path, digest_of(former), Settings()).settings is None


@pytest.mark.parametrize("state", State)
def test_only_workers_that_train_or_are_brought_down_go_on_as_they_began(
    tmp_path: Path, state: State
) -> None:
    """Those that are just being started are started as the settings say now."""
    former, now = settings(trainer={"steps": 40}), settings(trainer={"steps": 50})
    keep(tmp_path, former, tmp_path / "job.toml")
    left = Inheritance(job=Job(state=state), pending=[], settings_digest=digest_of(former))
    inherited, in_force = _agree(tmp_path, now, left)
    if state in (State.PROVISIONING, State.INITIALIZING, State.RESTORING):
        assert inherited is None
        assert (in_force.settings, in_force.changed) == (now, ())
    else:
        assert inherited is left
        changed = () if state in TERMINAL else ("trainer.steps",)
        assert (in_force.settings, in_force.changed) == (former, changed)
    unknown = replace(left, settings_digest="f" * 16)
    went_on = _agree(tmp_path, now, unknown)[0] is not None
    assert went_on is (state in TERMINAL)  # its last orders must be done, whoever gave them
    assert _agree(tmp_path, now, None)[0] is None
