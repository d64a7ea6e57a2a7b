"""Slots on a real Ray, one head for all tests here: placing, deaths, leftovers, the end."""

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from supervisor.cluster import ray_api
from supervisor.cluster.own_servers import EmbeddedRay, authenticate
from supervisor.cluster.ray_api import Node, addresses_elsewhere, rank_order, shortage
from supervisor.cluster.ray_cluster import RayCluster
from supervisor.cluster.slots import (
    ClusterError,
    PlacementTimedOut,
    SlotSilent,
    SlotsSetAside,
    StartFailed,
)
from tests.hold import held
from trainer.host.processes import look
from trainer.slot.child import RUN, SLOT, machine

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

STAND_IN = Path(__file__).parents[2] / "trainer" / "stand_in.py"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The settings of section [cluster], as far as they are read."""

    address: str = "local"
    workers: int = 2
    cpus_per_worker: float = 1.0
    gpus_per_worker: int = 0
    resources_per_worker: Mapping[str, float] = field(default_factory=dict)
    placement: str = "pack"
    placement_timeout_s: float = 60.0


class Story:
    """A cluster and all that it told, with the time of each."""

    def __init__(self, run_dir: Path, *, epoch: int = 1, **needs: Any) -> None:
        self.cluster_lost: list[str] = []
        self.records: list[tuple[float, dict[str, Any]]] = []
        self.lost: list[tuple[float, tuple[int, ...], str, bool]] = []
        self.stale: list[str] = []
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)  # as the daemon's lock has
        self.cluster = RayCluster(
            Needs(**needs),
            run_dir,
            epoch,
            lambda record: self.records.append((time.monotonic(), record)),
            lambda *loss: self.lost.append((time.monotonic(), *loss)),
            on_cluster_lost=self.cluster_lost.append,
            on_stale=self.stale.append,
            command=[sys.executable, str(STAND_IN)],
        )

    def specs(self, generation: int, **fields: Any) -> list[dict[str, Any]]:
        return [
            {
                "generation": generation,
                "run_dir": str(self.run_dir),
                "config_dir": str(self.run_dir),
                "beat_file": str(self.run_dir / "beats" / f"g{generation}-r{rank}"),
                **fields,
            }
            for rank in range(2)
        ]

    async def until(self, report: str, rank: int, generation: int = 1) -> dict[str, Any]:
        wanted = {"report": report, "rank": rank, "generation": generation}
        return await self._until(
            lambda: [one for _, one in self.records if wanted.items() <= one.items()]
        )

    async def until_lost(self) -> tuple[float, tuple[int, ...], str, bool]:
        return await self._until(lambda: self.lost)

    async def _until(self, look: Callable[[], list[T]]) -> T:
        async with asyncio.timeout(10):
            while not look():
                await asyncio.sleep(0.001)
        return look()[0]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of the one head; the environment that Ray reads comes and goes with it."""
    before = dict(os.environ)
    directory = tmp_path_factory.mktemp("runs") / "first"
    authenticate(directory)
    yield directory
    EmbeddedRay(directory).stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def story(run_dir: Path, loop: asyncio.Runner) -> Iterator[Story]:
    shutil.rmtree(run_dir / "logs", ignore_errors=True)  # every test starts with generation 1
    story = Story(run_dir)
    loop.run(story.cluster.connect())
    yield story
    loop.run(story.cluster.sweep())
    loop.run(story.cluster.disconnect(stop_head=False))


@pytest.fixture
def run(loop: asyncio.Runner) -> Run[Any]:
    return loop.run


def is_gone(pid: int) -> bool:
    row = look(pid)
    return row is None or not row.is_alive


async def await_gone(*pids: int) -> None:
    async with asyncio.timeout(5):
        while not all(map(is_gone, pids)):
            await asyncio.sleep(0.005)


def node(name: str, alive: bool = True, **resources: float) -> Node:
    return Node(id=name, address=name, is_alive=alive, resources=resources)


@pytest.mark.parametrize(
    ("bundle", "workers", "placement", "living", "answer"),
    [
        ({"CPU": 1.0}, 2, "pack", [node("a", CPU=2.0)], None),
        ({"CPU": 2.0}, 2, "pack", [node("a", CPU=2.0)], "needs 4 CPUs, the cluster has 2"),
        (
            {"CPU": 1.0, "GPU": 1.0},
            2,
            "pack",
            [node("a", CPU=8.0)],
            "needs 2 GPUs, the cluster has 0",
        ),
        ({"TPU": 4.0}, 2, "spread", [node("a", TPU=4.0)], "needs 8 TPU, the cluster has 4"),
        (
            {"CPU": 2.0},
            3,
            "pack",
            [node("a", CPU=3.0), node("b", CPU=3.0)],
            "needs 3 slots of 2 CPUs, the cluster's nodes can hold 2",
        ),
        (
            {"CPU": 1.0},
            2,
            "strict_spread",
            [node("a", CPU=8.0)],
            "needs 2 nodes with 1 CPUs each (strict_spread), the cluster has 1",
        ),
        ({"CPU": 1.0}, 2, "strict_spread", [node("a", CPU=1.0), node("b", CPU=1.0)], None),
    ],
)
def test_a_job_that_can_never_fit_is_told_what_is_missing(
    bundle: dict[str, float], workers: int, placement: str, living: list[Node], answer: str | None
) -> None:
    """Never feasible and not now look the same from outside: both wait for ever."""
    assert shortage(bundle, workers, placement, living) == answer


def test_a_node_on_another_host_is_told_from_one_more_on_this() -> None:
    """The job's own Redis listens on loopback: workers elsewhere would beat in vain, for ever."""
    here = [node("127.0.0.1"), node("::1")]
    assert addresses_elsewhere(here) == []
    assert addresses_elsewhere([*here, node("203.0.113.7"), node("2001:db8::7")]) == [
        "2001:db8::7",
        "203.0.113.7",
    ]


def test_a_cluster_of_several_hosts_is_refused_where_redis_is_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: asyncio.Runner
) -> None:
    """The workers elsewhere would beat in vain, and be judged by half of what there is to see."""
    nodes = [node("127.0.0.1", CPU=8.0), node("203.0.113.7", CPU=8.0)]
    monkeypatch.setattr(ray_api, "nodes", lambda: nodes)
    ours, others = (
        RayCluster(Needs(), tmp_path, 1, print, print, why_one_host=why)
        for why in ("Redis is on loopback", "")
    )
    told = str(loop.run(ours.shortage()))
    assert told == "cannot run on a cluster with 203.0.113.7: Redis is on loopback"
    assert loop.run(others.shortage()) is None
    del nodes[1]
    assert loop.run(ours.shortage()) is None


def test_ranks_go_by_node_then_by_device() -> None:
    """Neighbours in rank talk most; Ray hands out nodes and devices in any order."""
    at = ["b", "a", "b", "a", "b"]
    devices = [["10"], ["1"], ["9"], ["0"], []]
    assert rank_order(at, devices) == [4, 2, 0, 3, 1]


def test_a_full_disk_does_not_keep_slots_from_being_placed(
    story: Story, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost while the disk is full: the job must go on, and its directory is known."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (story.run_dir / "identity.json").write_text("{}")
    monkeypatch.setattr("supervisor.cluster.ray_cluster.write_whole", full)
    run(story.cluster.place(1, 60))
    assert (story.run_dir / "identity.json").is_file()


def test_slots_start_a_generation_and_tell_a_death_within_a_tenth_of_a_second(
    story: Story, run: Run[Any]
) -> None:
    """The whole way: kernel, slot, Ray, event loop."""

    async def scenario() -> None:
        cluster = story.cluster
        assert await cluster.shortage() is None
        slots = await cluster.place(1, 60)
        assert [(one.rank, one.local_rank, one.node_rank) for one in slots] == [
            (0, 0, 0),
            (1, 1, 0),
        ]
        assert {(one.host, one.address) for one in slots} == {(socket.gethostname(), "127.0.0.1")}
        pids = await cluster.start(1, story.specs(1))
        told = await story.until("started", 0)
        assert told["pid"] == pids[0]
        assert told["coordinator"].startswith("unix:/tmp/everstep-")
        assert (await story.until("started", 1))["coordinator"] == told["coordinator"]
        killed_at = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        assert (await story.until("exit", 1))["signal"] == "SIGKILL"
        assert story.records[-1][0] - killed_at < 0.1
        assert not is_gone(pids[0])
        witness = await cluster.witness(1, [0, 1])
        assert [witness[rank]["alive"] for rank in (0, 1)] == [True, False]
        evidence = await cluster.evidence(1)
        assert "stand_in.py" in evidence[0]["stacks"]
        exits, unproven = await cluster.kill(1, 5.0)
        assert unproven == ()
        assert [(one.rank, one.signal) for one in exits] == [(0, "SIGKILL"), (1, "SIGKILL")]
        assert exits[0].log_tail[0] == "rank 0 of generation 1 has started"
        assert story.lost == []

    run(scenario())


def test_generations_follow_each_other_in_the_same_slots(story: Story, run: Run[Any]) -> None:
    """Recovery needs no scheduling by Ray: only processes change."""

    async def scenario() -> None:
        cluster = story.cluster
        slots = await cluster.place(1, 60)
        await cluster.start(1, story.specs(1))
        await cluster.start(2, story.specs(2))
        first = await cluster.kill(1, 5.0)
        assert len(first[0]) == 2
        await cluster.order(2, 1, {"order": "exit", "status": 7})
        assert (await story.until("exit", 1, 2))["status"] == 7
        exits, unproven = await cluster.kill(2, 5.0)
        assert [(one.status, one.signal) for one in exits] == [(None, "SIGKILL"), (7, None)]
        assert unproven == ()
        assert all(not is_gone(slot.pid) for slot in slots)
        assert await cluster.kill(3, 5.0) == ((), ())

    run(scenario())


def test_a_dead_slot_is_told_and_its_child_is_proven_gone(story: Story, run: Run[Any]) -> None:
    """Ray restarts nothing here: the daemon decides, once it knows that nothing is left."""

    async def scenario() -> None:
        cluster = story.cluster
        slots = await cluster.place(1, 60)
        pids = await cluster.start(1, story.specs(1))
        await cluster.order(1, 1, {"order": "grandchild", "own_session": True})
        grandchild = (await story.until("spawned", 1))["pid"]
        killed_at = time.monotonic()
        os.kill(slots[1].pid, signal.SIGKILL)
        at, ranks, why, node_lost = await story.until_lost()
        assert at - killed_at < 1.0
        assert (ranks, node_lost) == ((1,), False)
        assert "worker process has died" in why
        exits, unproven = await cluster.kill(1, 5.0)
        assert unproven == ()
        assert [(one.rank, one.signal) for one in exits] == [(0, "SIGKILL"), (1, None)]
        assert is_gone(pids[1])
        assert is_gone(grandchild)
        with pytest.raises(StartFailed, match="rank 1") as failure:
            await cluster.start(2, story.specs(2))
        assert failure.value.ranks == (1,)
        await cluster.kill(2, 5.0)
        again = await cluster.place(2, 60)
        assert {one.pid for one in again}.isdisjoint(one.pid for one in slots)
        await cluster.start(3, story.specs(3))
        assert (await story.until("started", 1, 3))["pid"]

    run(scenario())


def test_a_slot_that_does_not_answer_is_doubted_not_buried(story: Story, run: Run[Any]) -> None:
    """A slow answer was read as failure, and a healthy job recovered 24 times in a night."""

    async def scenario() -> None:
        cluster = story.cluster
        slots = await cluster.place(1, 60)
        pids = await cluster.start(1, story.specs(1))
        await story.until("started", 0)
        os.kill(slots[0].pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert set(await cluster.witness(1, [0, 1])) == {1}
            evidence = await cluster.evidence(1)
            assert evidence[0]["log_tail"] == ["rank 0 of generation 1 has started"]
            assert "did not answer" in evidence[0]["error"]
            assert time.monotonic() - began < 4
            exits, unproven = await cluster.kill(1, 0.5)
            assert unproven == ()  # on this machine it is ended and seen to be without its slot
            assert [(one.rank, one.signal) for one in exits] == [(0, None), (1, "SIGKILL")]
            assert is_gone(pids[0])
            with pytest.raises(SlotSilent):
                await cluster.order(1, 0, {"order": "hello"})
        finally:
            os.kill(slots[0].pid, signal.SIGCONT)
        assert (await story.until("exit", 0))["signal"] == "SIGKILL"
        assert len(await cluster.start(2, story.specs(2))) == 2
        assert story.lost == []

    run(scenario())


def test_slots_that_answer_late_are_asked_again_and_adopted(
    story: Story, run: Run[Any], run_dir: Path
) -> None:
    """One slot took 6 s to describe itself, and the daemon that came back ended them all."""

    async def scenario() -> None:
        slots = await story.cluster.place(1, 60)
        pids = await story.cluster.start(1, story.specs(1))
        successor = Story(run_dir, epoch=2)
        os.kill(slots[1].pid, signal.SIGSTOP)
        try:
            with pytest.raises(ClusterError, match="did not answer `describe`"):
                await successor.cluster.adopt(1)
        finally:
            os.kill(slots[1].pid, signal.SIGCONT)
        assert await successor.cluster.adopt(1) == {1: pids}
        assert not any(map(is_gone, pids.values()))
        assert successor.lost == []
        await successor.cluster.release()

    run(scenario())


def test_a_failed_start_names_its_ranks(story: Story, run: Run[Any]) -> None:
    """One rank missing out of a thousand has to have a name."""

    async def scenario() -> None:
        await story.cluster.place(1, 60)
        specs = story.specs(1)
        specs[1]["config_dir"] = "/nowhere"
        with pytest.raises(StartFailed, match=r"rank 1: .*/nowhere is no directory") as failure:
            await story.cluster.start(1, specs)
        assert failure.value.ranks == (1,)
        exits, unproven = await story.cluster.kill(1, 5.0)
        assert [one.rank for one in exits] == [0]
        assert unproven == ()

    run(scenario())


def test_a_placement_that_times_out_leaves_nothing_and_the_next_one_fits(
    story: Story, run: Run[Any], run_dir: Path, tmp_path: Path
) -> None:
    """A failed start that kept its reservation made every retry fail too."""
    other = Story(tmp_path / "other", address=EmbeddedRay(run_dir).ensure())

    async def scenario() -> None:
        await story.cluster.place(1, 60)
        with pytest.raises(PlacementTimedOut, match=r"2 slots did not come within 1 s$"):
            await other.cluster.place(1, 1.0)
        await story.cluster.release()
        assert len(await other.cluster.place(2, 60)) == 2
        await other.cluster.release()
        assert len(await story.cluster.place(2, 60)) == 2

    run(scenario())


def test_a_placement_that_can_never_be_says_so(story: Story, run: Run[Any], run_dir: Path) -> None:
    """The operator has to change the settings; waiting changes nothing."""
    greedy = Story(run_dir, workers=64)

    async def scenario() -> None:
        assert "needs 64 CPUs, the cluster has" in str(await greedy.cluster.shortage())
        with pytest.raises(PlacementTimedOut, match="needs 64 CPUs"):
            await greedy.cluster.place(1, 0.5)

    run(scenario())


def test_a_node_where_a_process_cannot_be_ended_is_used_no_more_until_it_is_gone(
    story: Story, run: Run[Any], run_dir: Path
) -> None:
    """A device that a dead generation still holds: the next one must not be put beside it."""
    dead = "1 1.0"  # no slot of this pid started then
    marks = {RUN: str(run_dir), SLOT: f"{machine()} {dead}"}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]

    async def scenario(pid: int) -> None:
        with pytest.raises(SlotsSetAside, match=f"where pid {pid} .* cannot be ended"):
            await story.cluster.place(1, 60)
        short = str(await story.cluster.shortage())
        assert short.startswith("needs 2 CPUs, the cluster has 0; set aside: ")
        assert f"pid {pid}" in short
        with pytest.raises(ClusterError, match=f"cannot be ended: pid {pid}"):
            await story.cluster.sweep()

    async def afterwards() -> None:
        assert await story.cluster.shortage() is None
        assert len(await story.cluster.place(2, 60)) == 2

    with subprocess.Popen(command, env={**os.environ, **marks}) as orphan:
        with held(orphan.pid):
            run(scenario(orphan.pid))
        orphan.wait(10)
    run(afterwards())


def test_a_process_in_doubt_is_proven_gone_once_it_has_ended(story: Story, run: Run[Any]) -> None:
    """The result of a job named a process that had ended an hour before the job did."""

    async def doubted() -> tuple[str, ...]:
        _, unproven = await story.cluster.kill(1, 0.3)
        assert await story.cluster.prove() == ()
        return unproven

    async def scenario() -> int:
        await story.cluster.place(1, 60)
        pids = await story.cluster.start(1, story.specs(1))
        await story.until("started", 1)
        return pids[1]

    pid = run(scenario())
    with held(pid):
        unproven = run(doubted())
        assert len(unproven) == 1
        assert f"pid {pid}" in unproven[0]
    run(await_gone(pid))
    assert run(story.cluster.prove()) == unproven
    assert run(story.cluster.prove()) == ()


def test_resources_come_back_each_time(story: Story, run: Run[Any]) -> None:
    """Removing a placement group is asynchronous: the next one found the cluster full."""

    async def scenario() -> None:
        for number in range(1, 5):
            slots = await story.cluster.place(number, 30)
            await story.cluster.start(number, story.specs(number))
        await story.cluster.release()
        await await_gone(*(slot.pid for slot in slots))

    run(scenario())


_DRIVER = """
import asyncio, json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from supervisor.cluster.own_servers import authenticate
authenticate(Path(sys.argv[2]))
from tests.supervisor.cluster.test_ray_cluster import Story

async def main():
    story = Story(Path(sys.argv[2]), epoch=5)
    await story.cluster.connect()
    await story.cluster.sweep()
    slots = await story.cluster.place(9, 60)
    pids = await story.cluster.start(1, story.specs(1))
    print(json.dumps([[slot.pid for slot in slots], list(pids.values())]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_what_a_killed_daemon_left_is_swept_by_the_next_and_by_no_earlier_one(
    story: Story, run: Run[Any], run_dir: Path
) -> None:
    """Orphans of a launcher that died held the devices, and two daemons fought over workers."""
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(ROOT), str(run_dir)], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        actors, children = json.loads(driver.stdout.readline())
        driver.kill()

    async def scenario() -> None:
        await asyncio.sleep(0.5)
        assert not any(map(is_gone, [*actors, *children]))
        with pytest.raises(ClusterError, match="stale epoch 1"):
            await story.cluster.sweep()
        assert not any(map(is_gone, [*actors, *children]))
        assert "this slot serves epoch" in story.stale[0]  # by which its daemon knows to end
        successor = Story(run_dir, epoch=6)
        swept = await successor.cluster.sweep()
        assert sorted(name.split(":", 3)[3] for name in swept) == [
            "group:9",
            "slot:9:0",
            "slot:9:1",
        ]
        await await_gone(*actors, *children)
        assert len(await successor.cluster.place(10, 60)) == 2
        await successor.cluster.release()
        assert await successor.cluster.sweep() == []

    run(scenario())


_LOSE_HEAD = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from supervisor.cluster.own_servers import EmbeddedRay, authenticate
authenticate(Path(sys.argv[2]))
from tests.supervisor.cluster.test_ray_cluster import Story

async def main():
    run_dir = Path(sys.argv[2])
    story = Story(run_dir)
    await story.cluster.connect()
    slots = await story.cluster.place(1, 60)
    await story.cluster.start(1, story.specs(1))
    record = json.loads((run_dir / "embedded.json").read_text())["ray"]["processes"]
    os.kill(record["gcs_server"][0], signal.SIGKILL)
    async with asyncio.timeout(10):
        while not story.cluster_lost:
            await asyncio.sleep(0.01)
    await story.cluster.disconnect(stop_head=True)
    again = Story(run_dir, epoch=2)
    await again.cluster.connect()
    await again.cluster.sweep()
    print(len(await again.cluster.place(2, 60)), story.cluster_lost, flush=True)
    await again.cluster.disconnect(stop_head=True)
    os._exit(0)

asyncio.run(main())
"""


def test_a_lost_head_is_told_and_a_new_one_serves_the_same_process(tmp_path: Path) -> None:
    """Ray's own code ends a driver 61 s after its head: by then we have left it."""
    result = subprocess.run(
        [sys.executable, "-c", _LOSE_HEAD, str(ROOT), str(tmp_path / "lost")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == '2 ["the job\'s own Ray head has died"]\n', result.stderr


def test_the_daemons_side_imports_neither_jax_nor_ray_before_it_connects() -> None:
    """Ray reads its token once, at import; jax would double the daemon."""
    code = "import sys, supervisor.cluster.ray_cluster\n"
    code += "print({'jax', 'ray', 'orbax'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "set()"


def test_a_connected_daemon_stays_idle(story: Story, run: Run[Any]) -> None:
    """Supervision must not take from the training what it is there to save."""

    async def scenario() -> None:
        await story.cluster.place(1, 60)
        await story.cluster.start(1, story.specs(1))
        await asyncio.sleep(0.5)
        me = psutil.Process()
        before = sum(me.cpu_times()[:2])
        await asyncio.sleep(3)
        assert (sum(me.cpu_times()[:2]) - before) / 3 < 0.05

    run(scenario())
