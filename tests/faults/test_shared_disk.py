"""Nodes that do not have the run directory: they would write where nobody reads."""

from __future__ import annotations

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import Machine, RayHead

full = pytest.mark.full


@full
def test_a_node_without_the_run_directory_is_refused_before_the_first_step(
    job: MakeJob, ray_head: RayHead, redis_server: str
) -> None:
    """Three commits, COMPLETED, status 0: and on the daemon's host there were no checkpoints."""
    tiny = job(
        **{
            "cluster.address": ray_head.address,
            "cluster.placement": "strict_spread",
            "heartbeats.redis_url": redis_server,
        }
    )
    tiny.run_dir.mkdir(parents=True)
    node = Machine(ray_head, lacks=tiny.run_dir.parent)
    try:
        daemon = tiny.start()
        assert daemon.exit_status() == 4
    finally:
        node.end()
    result = tiny.result()
    assert f"{tiny.run_dir} is not the run directory of this job" in result["reason"]
    assert "job.run_dir must be on a file system that all nodes share" in result["reason"]
    assert result["step"] == 0
    assert tiny.events("workers_started") == []
    assert not [path for path in tiny.run_dir.iterdir() if path.name.startswith(".mark-")]
