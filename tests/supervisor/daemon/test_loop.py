"""The loop keeps its contract: written before done, one at a time, a bug ends with its story."""

from __future__ import annotations

import ast
import asyncio
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.daemon.loop import Clock, Daemon, _merged
from supervisor.errors import DeveloperError, DiskError, JournalLost, Superseded
from supervisor.fsm import events as e
from supervisor.record.journal import Journal, read_journal
from supervisor.record.replay import replay_file
from tests.sim.run import simulate
from tests.sim.world import Fault, Script, SimCluster
from tests.supervisor.virtual import VirtualLoop

ROOT = Path(__file__).parents[3]


def test_nothing_is_performed_before_its_line_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An effect whose order is in no journal would be done twice by the next daemon."""
    path = tmp_path / "journal.jsonl"
    written: list[str] = []
    real_append = Journal.append

    def append(self: Journal, records: Any, *, durable: bool = True) -> None:
        batch = list(records)
        real_append(self, batch, durable=durable)
        written.extend(
            effect["effect"]
            for record in batch
            if record["kind"] == "move" and durable
            for effect in record["effects"]
        )

    launched: list[str] = []
    from supervisor.daemon.performers import Performers

    real_launch = Performers.launch

    def launch(self: Performers, effect: Any) -> None:
        launched.append(type(effect).__name__)
        assert written.count(launched[-1]) >= launched.count(launched[-1])
        real_launch(self, effect)

    monkeypatch.setattr(Journal, "append", append)
    monkeypatch.setattr(Performers, "launch", launch)
    sim = simulate(path, Script(faults=[Fault(kind="kill", step=15)]))
    assert sim.status == 0
    assert sorted(launched) == sorted(written)
    assert "RestoreWorkers" in launched


def test_while_the_journal_cannot_be_written_nothing_is_done_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk for ten seconds: the crash waits, then the story goes on with no line missing."""
    path = tmp_path / "journal.jsonl"
    real_append = Journal.append
    refused: list[float] = []

    def append(self: Journal, records: Any, *, durable: bool = True) -> None:
        now = asyncio.get_running_loop().time()
        if 10.0 <= now < 20.0:
            refused.append(now)
            raise DiskError("the disk is full")
        real_append(self, records, durable=durable)

    monkeypatch.setattr(Journal, "append", append)
    sim = simulate(path, Script(faults=[Fault(kind="kill", step=15)]))
    assert sim.status == 0
    assert refused
    kill_calls = [call for call in sim.cluster.calls if call.startswith("kill")]
    assert kill_calls == ["kill 1", "kill 2"]
    crash = sim.event("worker_crashed")["at"]
    gone = sim.event("workers_gone")["at"]
    assert crash < 1_000_012
    assert gone > 1_000_020
    assert replay_file(path).difference == ""


def test_a_daemon_that_can_write_nothing_ends_at_the_second_signal_and_leaves_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk Ctrl-C did nothing, however often: only SIGKILL was left."""
    path = tmp_path / "journal.jsonl"
    real_append = Journal.append

    def append(self: Journal, records: Any, *, durable: bool = True) -> None:
        if asyncio.get_running_loop().time() >= 10.0:
            raise DiskError("the disk is full")
        real_append(self, records, durable=durable)

    calls: list[str] = []

    def interrupt(daemon: Daemon, cluster: SimCluster) -> None:
        calls[:] = cluster.calls
        daemon.interrupt(signal.SIGINT)

    monkeypatch.setattr(Journal, "append", append)
    with pytest.raises(JournalLost, match=r"the disk is full; .* the workers go on") as caught:
        simulate(path, Script(steps=10_000), meddle={12.0: interrupt, 20.0: interrupt})
    assert caught.value.exit_status == 75
    assert not [call for call in calls if call.startswith(("kill", "release"))]


def test_a_signal_twice_within_a_second_is_one(tmp_path: Path) -> None:
    """A terminal that closes sends SIGHUP twice, 0.1 ms apart: the last save was lost."""

    def hang_up(daemon: Daemon, cluster: SimCluster) -> None:
        daemon.interrupt(signal.SIGHUP)
        daemon.interrupt(signal.SIGHUP)

    path = tmp_path / "journal.jsonl"
    sim = simulate(path, Script(steps=10_000), meddle={12.0: hang_up})
    assert sim.status == 75
    moves = [record["event"] for record in read_journal(path) if record["kind"] == "move"]
    assert [event["now"] for event in moves if event["event"] == "stop_requested"] == [False]
    assert [event for event in moves if event["event"] == "workers_saved"]


def test_a_daemon_whose_epoch_is_over_writes_nothing_and_orders_nothing(tmp_path: Path) -> None:
    """It was frozen while another took the job over; a crash is the first thing it hears of."""
    path = tmp_path / "journal.jsonl"
    asked: list[float] = []

    def fence() -> None:
        asked.append(asyncio.get_running_loop().time())
        if asked[-1] >= 10.0:
            raise Superseded("epoch 1 is over: pid 7 runs this job now")

    ended: list[list[str]] = []

    class Watched(SimCluster):
        async def end_all(self) -> None:
            ended.append(list(self.calls))
            await super().end_all()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.sim.run.SimCluster", Watched)
        with pytest.raises(Superseded, match="pid 7") as caught:
            simulate(path, Script(faults=[Fault(kind="kill", step=15)]), fence=fence)
    assert caught.value.exit_status == 73
    assert max(asked) < 11.0  # the next checkpoint would have been its next line
    assert ended == [["connect", "place 1", "start 1"]]
    moves = [record for record in read_journal(path) if record["kind"] == "move"]
    assert all(move["event"]["at"] < 1_000_010 for move in moves)


def test_a_daemon_whose_orders_slots_refuse_ends_at_once(tmp_path: Path) -> None:
    """They serve a later one, of whom its own files know nothing: they are a copy."""
    path = tmp_path / "journal.jsonl"
    why = Superseded("the slot of rank 0 refuses `watch`: it serves epoch 7")
    calls: list[str] = []

    def refuse(daemon: Daemon, cluster: SimCluster) -> None:
        calls.extend(cluster.calls)
        daemon.note_superseded(why)
        daemon.post(e.SlotLost(at=daemon.clock(), generation=1, ranks=(0,), why="refused"))

    with pytest.raises(Superseded, match="epoch 7"):
        simulate(path, Script(), meddle={12.0: refuse})
    moves = [record for record in read_journal(path) if record["kind"] == "move"]
    assert "slot_lost" not in [move["event"]["event"] for move in moves]
    assert calls == ["connect", "place 1", "start 1"]


def test_a_bug_ends_the_daemon_with_its_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 70 and a text that can be reported as it is; never a crash loop."""
    path = tmp_path / "journal.jsonl"

    async def broken(self: Any, keep: int, verified: Any, spared: Any) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    from tests.sim.world import SimDisk

    monkeypatch.setattr(SimDisk, "prune", broken)
    with pytest.raises(DeveloperError) as caught:
        simulate(path, Script())
    text = str(caught.value)
    assert caught.value.exit_status == 70
    assert "checkpoint_committed: RUNNING → RUNNING" in text
    assert "nobody foresaw this" in text
    last = list(read_journal(path))[-1]
    assert last["action"] == "bug"
    assert "ZeroDivisionError" in last["error"]


def _crash(rank: int, **given: Any) -> e.WorkerCrashed:
    facts: dict[str, Any] = {"status": None, "signal": "SIGKILL", "phase": "step", "step": 5}
    facts |= {"primary": True, "detail": "", "at": float(rank), "generation": 1}
    return e.WorkerCrashed(ranks=(rank,), **{**facts, **given})


def test_a_thousand_deaths_at_once_are_one_event() -> None:
    """One incident fits on one screen."""
    from collections import deque

    inbox: deque[e.Event] = deque(_crash(rank) for rank in range(1000))
    inbox.append(_crash(7, signal="SIGSEGV"))
    event = _merged(inbox)
    assert isinstance(event, e.WorkerCrashed)
    assert event.ranks == tuple(range(1000))
    assert len(inbox) == 1


def test_deaths_that_differ_stay_apart() -> None:
    """The one that died of SIGSEGV is the culprit; it must not drown among the others."""
    from collections import deque

    inbox: deque[e.Event] = deque([_crash(0), _crash(1, signal="SIGSEGV"), _crash(2)])
    first = _merged(inbox)
    assert isinstance(first, e.WorkerCrashed)
    assert first.ranks == (0,)


def test_the_clock_never_goes_back() -> None:
    """A daemon that starts after its host's clock was set back must not write the past."""
    loop = VirtualLoop()

    async def readings() -> list[float]:
        clock = Clock(wall=1000.0, not_before=5000.0)
        first = clock()
        await asyncio.sleep(2.5)
        return [first, clock()]

    try:
        assert loop.run_until_complete(readings()) == [5000.0, 5002.5]
    finally:
        loop.close()


def test_a_wall_clock_that_jumps_changes_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NTP step of an hour must neither end a lease nor stretch a deadline (CASES 25)."""

    def script() -> Script:
        faults = [Fault(kind="stuck", step=12), Fault(kind="kill", generation=2, step=25)]
        return Script(faults=faults)

    steady = simulate(tmp_path / "steady.jsonl", script())
    true_time, calls = time.time, itertools.count()
    # An hour ahead, an hour back, at each look.
    monkeypatch.setattr(time, "time", lambda: true_time() + 3600 * (-1) ** next(calls))
    jumpy = simulate(tmp_path / "jumpy.jsonl", script())
    assert "progress_stalled" in steady.names
    assert jumpy.names == steady.names
    assert [move["event"]["at"] for move in jumpy.moves] == [
        move["event"]["at"] for move in steady.moves
    ]


def test_the_daemon_imports_neither_jax_nor_orbax() -> None:
    """They would cost 160 MB and three seconds in a process that only decides."""
    code = (
        "import sys, supervisor.assembly, supervisor.cli, supervisor.cluster.ray_api\n"
        "print([name for name in ('jax', 'jaxlib', 'orbax', 'tensorstore', 'flax', 'optax')"
        " if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


def test_the_trainer_never_imports_the_supervisor() -> None:
    """Imports point one way: a worker must run where no supervisor is installed."""
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "supervisor" for name in names), path
