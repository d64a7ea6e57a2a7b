"""What is left of an abandoned job is ended, unless a daemon is there after all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.cluster.own_servers import RECORD_FILE, EmbeddedRedis
from supervisor.daemon.lock import acquire, is_held
from supervisor.end_abandoned import end_leftovers
from supervisor.errors import AlreadyRunning


def test_the_store_of_an_abandoned_job_is_ended(tmp_path: Path) -> None:
    """Its workers have saved and ended; a server for nobody stayed for weeks."""
    server = EmbeddedRedis(tmp_path)
    server.ensure()
    end_leftovers(tmp_path)
    assert not server.is_alive()
    server.stop()  # reaps what another has ended
    assert json.loads((tmp_path / RECORD_FILE).read_text())["redis"] is None
    assert not is_held(tmp_path)
    end_leftovers(tmp_path)  # there is nothing left, and that is fine


def test_a_daemon_that_is_there_keeps_what_it_has(tmp_path: Path) -> None:
    """It was started in the very moment in which its orphans ended."""
    redis = EmbeddedRedis(tmp_path)
    redis.ensure()
    try:
        with acquire(tmp_path), pytest.raises(AlreadyRunning):
            end_leftovers(tmp_path)
        assert redis.is_alive()
    finally:
        redis.stop()
