"""The user's code on a cluster of two nodes that share no file but the run directory."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cluster import ray_api
from supervisor.cluster.own_servers import authenticate
from supervisor.cluster.user_code import RunCode
from tests.supervisor.cluster.test_ray_cluster import Story


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Two raylets as two nodes, a CPU each; with a token, since Ray reads the mode once."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    authenticate(tmp_path)
    ray_api.forget_token()

    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster.address
    ray_api.disconnect()
    cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray gives it no type
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.full
def test_a_module_beside_the_settings_is_on_every_node(address: str, tmp_path: Path) -> None:
    """Without it the second node says ModuleNotFoundError, or worse, imports an old copy."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "users_task.py").write_text("NAME = 'sent'\n")
    (here / "data.bin").write_bytes(b"x" * 4096)
    run_dir = tmp_path / "runs" / "first"
    run_dir.mkdir(parents=True)
    with asyncio.Runner() as runner:
        code = RunCode("users_task:Task", here, run_dir, 1)
        code.open()
        story = Story(run_dir, address=address, placement="strict_spread")
        runner.run(story.cluster.connect())
        try:
            slots = runner.run(story.cluster.place(1, 60.0))
            assert len({slot.node_id for slot in slots}) == 2
            shutil.rmtree(here)  # as if it had never been on these nodes
            specs = story.specs(1, config_dir=str(here), code_dir=str(code.directory))
            runner.run(story.cluster.start(1, specs))
            for rank in range(2):
                runner.run(story.cluster.order(1, rank, {"order": "tell"}))
                told = runner.run(story.until("told", rank))
                found = Path(told["cwd"])
                assert (found / "users_task.py").read_text() == "NAME = 'sent'\n"
                assert not (found / "data.bin").exists()
        finally:
            runner.run(story.cluster.sweep())
            runner.run(story.cluster.disconnect(stop_head=False))
