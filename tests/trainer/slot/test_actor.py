"""The slot: what it passes on, what it refuses, and that nothing of a child outlives it."""

import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.host.processes import environment, is_alive, look
from trainer.slot import orphans
from trainer.slot.actor import RECORDS_KEPT, ResilientWorker
from trainer.slot.child import GENERATION, RUN, SLOT, machine
from trainer.wire.heartbeat import Beat

STAND_IN = Path(__file__).parents[1] / "stand_in.py"
EPOCH = 3


def spec_in(run_dir: Path, /, generation: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "generation": generation,
        "rank": 1,
        "run_dir": str(run_dir),
        "config_dir": str(run_dir),
        "beat_file": str(run_dir / "beats" / f"g{generation}"),
        **spec,
    }


class Slot:
    """A `ResilientWorker` in this process, without Ray: text in, plain data out."""

    def __init__(self, run_dir: Path, command: list[str]) -> None:
        self.run_dir = run_dir
        self.worker = ResilientWorker("first", str(run_dir), 1.0, 0, command)
        self.after = 0

    def call(self, method: str, *arguments: Any, epoch: int = EPOCH) -> dict[str, Any]:
        answer = json.loads(getattr(self.worker, method)(epoch, *arguments))
        assert isinstance(answer, dict)
        return answer

    def start(self, generation: int = 1, **spec: Any) -> int:
        answer = self.call("start", json.dumps(self.spec(generation, **spec)))
        assert "error" not in answer
        return int(answer["pid"])

    def spec(self, generation: int = 1, **spec: Any) -> dict[str, Any]:
        return spec_in(self.run_dir, generation, **spec)

    def order(self, generation: int, **order: Any) -> dict[str, Any]:
        return self.call("order", generation, json.dumps(order))

    def until(self, report: str) -> dict[str, Any]:
        """The next record of this kind; those before it are passed over."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            answer = self.call("watch", self.after)
            for record in answer["records"]:
                self.after = record["seq"]
                if record["report"] == report:
                    return dict(record)
        raise AssertionError(f"no {report!r} within 20 s")


@pytest.fixture
def make_slot(tmp_path: Path) -> Iterator[Callable[..., Slot]]:
    made: list[Slot] = []

    def make(*command: str) -> Slot:
        made.append(Slot(tmp_path, list(command) or [sys.executable, str(STAND_IN)]))
        return made[-1]

    yield make
    survivors = [slot.call("end", 5.0, False, epoch=10**9)["survivors"] for slot in made]
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # a slot adopts orphans; these tests do not
    assert survivors == [[]] * len(made)


@pytest.fixture
def slot(make_slot: Callable[..., Slot]) -> Slot:
    return make_slot()


def await_gone(pid: int, limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while (row := look(pid)) is not None and row.is_alive:
        assert time.monotonic() < deadline, f"pid {pid} is still there"
        time.sleep(0.005)


def test_a_killed_child_is_told_with_its_signal_within_a_tenth_of_a_second(slot: Slot) -> None:
    """Ray takes 20 to 35 ms for a death and tells no signal; here both come from the kernel."""
    pid = slot.start()
    assert slot.until("started")["pid"] == pid
    told: list[tuple[float, dict[str, Any]]] = []
    watch = threading.Thread(target=lambda: told.append((time.monotonic(), slot.until("exit"))))
    watch.start()
    time.sleep(0.1)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    watch.join()
    assert time.monotonic() - killed_at < 0.1
    _, record = told[0]
    assert (record["signal"], record["status"], record["pid"]) == ("SIGKILL", None, pid)
    assert (record["generation"], record["rank"]) == (1, 1)
    assert record["log_tail"] == ["rank 1 of generation 1 has started"]


def test_an_early_exit_is_told_with_its_status_after_all_that_was_reported(slot: Slot) -> None:
    """A worker that exits 0 before the job is done must not pass for one that finished."""
    slot.start()
    slot.order(1, order="flood", reports=300)
    slot.order(1, order="exit", status=0)
    assert slot.until("completed")
    record = slot.until("exit")
    assert (record["status"], record["signal"]) == (0, None)


def test_the_culprit_of_a_segmentation_fault_is_named_by_its_signal(slot: Slot) -> None:
    """The victim's error comes first and is louder; the signal tells the culprit."""
    slot.start()
    slot.order(1, order="segfault")
    assert slot.until("exit")["signal"] == "SIGSEGV"


@pytest.mark.parametrize("before", ["SIGSTOP", "SIGTERM", None])
def test_a_child_that_is_stopped_or_deaf_to_sigterm_is_gone_in_bounded_time(
    slot: Slot, before: str | None
) -> None:
    """A stopped process takes Ray 5 s; one that ignores SIGTERM kept its port and file lock."""
    pid = slot.start()
    slot.until("started")
    if before is not None:
        assert slot.call("signal", 1, before) == {"pid": pid}
        time.sleep(0.05)
    began = time.monotonic()
    answer = slot.call("kill", 1, 5.0, False)
    assert time.monotonic() - began < 0.5
    assert answer["exit"]["signal"] == "SIGKILL"
    assert answer["survivors"] == []
    assert look(pid) is None  # reaped, not merely dead


@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("how", ["kill", "death"])
def test_what_a_child_has_started_ends_with_it(slot: Slot, own_session: bool, how: str) -> None:
    """Data loaders outlived a killed worker and held its memory and devices."""
    pid = slot.start()
    slot.order(1, order="grandchild", own_session=own_session)
    grandchild = slot.until("spawned")["pid"]
    if how == "death":
        os.kill(pid, signal.SIGKILL)
        slot.until("exit")
    assert slot.call("kill", 1, 5.0, False)["survivors"] == []
    assert look(grandchild) is None


def test_two_generations_stand_side_by_side_and_end_apart(slot: Slot) -> None:
    """A standby is a second child of the slot; the end of the first must not touch it."""
    first, second = slot.start(1), slot.start(2)
    slot.order(2, order="grandchild", own_session=True)
    grandchild = slot.until("spawned")
    assert grandchild["generation"] == 2
    assert slot.call("kill", 1, 5.0, False)["exit"]["pid"] == first
    assert json.loads(slot.worker.witness(2))["alive"]
    row = look(grandchild["pid"])
    assert row is not None
    assert row.is_alive
    assert slot.call("kill", 2, 5.0, False)["exit"]["pid"] == second


def test_a_child_that_never_was_is_gone(slot: Slot) -> None:
    """A generation whose start failed on some ranks is brought down like any other."""
    assert slot.call("kill", 7, 5.0, False) == {"exit": None, "survivors": [], "stacks": ""}


def test_orders_of_an_earlier_daemon_are_refused(slot: Slot) -> None:
    """A daemon that was taken for dead wakes up and must not end its successor's workers."""
    slot.start()
    assert slot.call("order", 1, '{"order": "hello"}', epoch=EPOCH + 1)["pid"]
    for method, *arguments in [
        ("reserve_address", 2, "127.0.0.1"),
        ("start", json.dumps(slot.spec(2))),
        ("watch", 0),
        ("order", 1, '{"order": "exit", "status": 1}'),
        ("signal", 1, "SIGKILL"),
        ("kill", 1, 5.0, False),
        ("end", 5.0, False),
        ("evidence", 1),
    ]:
        assert "stale epoch 3" in slot.call(str(method), *arguments)["error"]
    assert json.loads(slot.worker.witness(1))["alive"]


def test_the_poll_of_an_earlier_daemon_ends_when_its_successor_speaks(slot: Slot) -> None:
    """Polls of daemons that are gone would fill the slot's threads."""
    answers: list[dict[str, Any]] = []
    poll = threading.Thread(target=lambda: answers.append(slot.call("watch", 0)))
    poll.start()
    time.sleep(0.1)
    slot.call("end", 0.0, False, epoch=EPOCH + 1)
    poll.join(2.0)
    assert not poll.is_alive()
    assert "stale epoch" in answers[0]["error"]


def test_no_secret_is_in_a_childs_arguments_or_environment(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both can be read by every process of the user, and end up in bug reports."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere/secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:8080")
    slot.start(heartbeat={"password": "swordfish"})
    slot.order(1, order="tell")
    told = slot.until("told")
    assert "swordfish" not in json.dumps(told)
    assert "/somewhere/secret" not in json.dumps(told)
    assert "HTTPS_PROXY" not in told["environment"]
    assert told["environment"]["NPROC"] == "1"
    assert told["environment"]["JAX_PLATFORMS"] == "cpu"
    assert told["cwd"] == str(slot.run_dir)


def test_the_variables_of_the_settings_reach_a_child_and_its_spare(slot: Slot) -> None:
    """Exported for the daemon, they never reached the workers of a cluster: their Ray's count."""
    for number, variables in enumerate(({"A": "1"}, {"A": "2"}), 1):
        pid = slot.start(number, trainer={"env": variables})
        slot.until("started")
        assert environment(pid)["A"] == variables["A"]
        slot.call("prepare_spare")  # with the variables of before, when the second one starts
        assert environment(pid)["NPROC"] == "1"


def test_logs_are_for_their_owner_only_one_file_a_generation_and_rank(slot: Slot) -> None:
    """Logs of ranks and attempts in one file could not be told apart; some hold data."""
    for generation in (1, 2):
        slot.start(generation)
        slot.until("started")
        path = slot.run_dir / "logs" / f"generation-{generation}" / "rank-1.log"
        assert path.read_text() == f"rank 1 of generation {generation} has started\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_child_that_does_not_read_its_orders_never_holds_up_its_slot(slot: Slot) -> None:
    """A stopped child with a full pipe would block the thread that has to kill it."""
    slot.start()
    slot.order(1, order="deaf")
    slot.until("deaf")
    began = time.monotonic()
    answers = [slot.order(1, order="x" * 4000) for _ in range(20)]
    assert "does not read its orders" in answers[-1]["error"]
    assert slot.call("kill", 1, 5.0, False)["exit"]["signal"] == "SIGKILL"
    assert time.monotonic() - began < 1.0


def test_what_cannot_be_done_is_answered_with_the_reason(slot: Slot) -> None:
    """An exception that crosses Ray is pickled, and says nothing a person can act on."""
    missing = slot.spec(1, config_dir=str(slot.run_dir / "nowhere"))
    assert "nowhere is no directory" in slot.call("start", json.dumps(missing))["error"]
    assert "spec.rank is None" in slot.call("start", json.dumps(slot.spec(1, rank=None)))["error"]
    other = slot.spec(1, run_dir="/elsewhere")
    assert "/elsewhere" in slot.call("start", json.dumps(other))["error"]
    assert "never started" in slot.order(1, order="hello")["error"]
    slot.start(1)
    assert "SIGNOPE" in slot.call("signal", 1, "SIGNOPE")["error"]
    slot.call("kill", 1, 5.0, False)
    assert "has ended" in slot.order(1, order="hello")["error"]
    assert "has ended" in slot.call("signal", 1, "SIGKILL")["error"]


def test_a_second_order_to_start_is_taken_for_the_first(slot: Slot) -> None:
    """A daemon that vanished may have given the order and not lived to see the answer."""
    pid = slot.start(1)
    assert slot.start(1) == pid


def test_a_program_that_cannot_be_started_is_an_answer(make_slot: Callable[..., Slot]) -> None:
    """A broken installation on one node has to name itself."""
    slot = make_slot("/no/such/python")
    answer = slot.call("start", json.dumps(slot.spec()))
    assert "/no/such/python cannot be started" in answer["error"]


def test_records_are_bounded_and_what_was_dropped_is_counted(slot: Slot) -> None:
    """A child that reports without end, while no daemon watches, must not fill the memory."""
    slot.start()
    slot.until("started")
    seen = slot.after
    slot.order(1, order="flood", reports=RECORDS_KEPT + 1000)
    slot.order(1, order="exit", status=5)
    deadline = time.monotonic() + 20
    while json.loads(slot.worker.describe())["children"][0]["exit"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    total = 1 + RECORDS_KEPT + 1000 + 2  # started, the flood, completed, exit
    answer = slot.call("watch", seen)
    assert answer["lost"] == total - RECORDS_KEPT - seen
    assert slot.until("exit")["seq"] == total


def test_what_a_child_has_reached_is_told_however_long_it_has_reported_since(slot: Slot) -> None:
    """After six hours of reports `ready` had left the window: a daemon that came back then believed
    nothing that the rank said, and the job never ended."""
    slot.start()
    slot.order(1, order="ready")
    slot.until("ready")
    slot.order(1, order="flood", reports=RECORDS_KEPT + 1000)
    slot.order(1, order="exit", status=5)
    deadline = time.monotonic() + 20
    while (child := json.loads(slot.worker.describe())["children"][0])["exit"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told = [(record["report"], record["generation"], record["rank"]) for record in child["reached"]]
    assert told == [("ready", 1, 1), ("completed", 1, 1), ("exit", 1, 1)]
    assert "ready" not in {record["report"] for record in slot.call("watch", 0)["records"]}


def test_a_line_that_is_no_report_is_told_as_such(slot: Slot) -> None:
    """A library that writes to every descriptor must not break the reports after it."""
    slot.start()
    slot.order(1, order="garbage")
    assert slot.until("unreadable")["text"] == "no report"
    slot.order(1, order="hello")
    assert slot.until("acknowledged")["order"] == "hello"


def test_evidence_shows_where_a_child_is(slot: Slot) -> None:
    """ "What is it hanging on?" can be asked only before it is killed."""
    slot.start()
    slot.order(1, order="deaf")
    slot.until("deaf")
    evidence = slot.call("evidence", 1)
    assert "stand_in.py" in evidence["stacks"]
    assert "in _obey" in evidence["stacks"]
    assert evidence["state"] in ("R", "S")
    assert evidence["log_tail"][0] == "rank 1 of generation 1 has started"


def test_evidence_of_a_stopped_child_comes_without_its_help(slot: Slot) -> None:
    """A stopped process answers no signal; it must stay stopped, and be seen all the same."""
    slot.start()
    slot.until("started")
    slot.call("signal", 1, "SIGSTOP")
    time.sleep(0.05)
    evidence = slot.call("evidence", 1)
    assert evidence["state"] == "T"
    assert "stand_in.py" in evidence["stacks"]
    assert json.loads(slot.worker.witness(1))["state"] == "T"


def test_asking_for_stacks_does_not_hurt_a_child_that_cannot_give_them(
    make_slot: Callable[..., Slot],
) -> None:
    """SIGUSR1 ends a process that has not come to register its handler yet."""
    slot = make_slot("/bin/sh", "-c", "sleep 600")
    slot.start()
    evidence = slot.call("evidence", 1)
    assert "no stacks" in evidence["stacks"]
    assert json.loads(slot.worker.witness(1))["alive"]


def test_the_witness_reads_the_loops_own_account(slot: Slot) -> None:
    """Redis may be gone, or its writer stuck: a verdict of a hang needs a second opinion."""
    slot.start()
    before = json.loads(slot.worker.witness(1))
    assert (before["alive"], before["seq"]) == (True, None)
    beat = Beat(slot.run_dir / "beats" / "g1")
    beat.enter("step", 7)
    seen = json.loads(slot.worker.witness(1))
    assert (seen["phase"], seen["step"]) == ("step", 7)
    beat.tick()
    assert json.loads(slot.worker.witness(1))["seq"] == seen["seq"] + 1


_COORDINATE = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(sys.argv[1], 1, 0, coordinator_bind_address=sys.argv[1],
                           cluster_detection_method="deactivate", initialization_timeout=20)
print(len(jax.devices()))
jax.distributed.shutdown()
"""


def test_a_reserved_port_is_the_coordinators_and_nobody_elses(slot: Slot) -> None:
    """A port that was probed and let go was taken before the coordinator bound it."""
    address = slot.call("reserve_address", 1, "127.0.0.1")["address"]
    port = int(address.removeprefix("127.0.0.1:"))
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.1", port))
    result = subprocess.run(
        [sys.executable, "-c", _COORDINATE, address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.strip() == "1", result.stderr
    assert slot.call("reserve_address", 2, "127.0.0.1")["address"] != address
    slot.call("kill", 1, 5.0, False)
    with socket.socket() as next_one:
        next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        next_one.bind(("127.0.0.1", port))
    slot.call("kill", 2, 5.0, False)


_CONNECT = """
import os, socket, sys
os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_no_other_user_reaches_a_coordinator_on_one_host(slot: Slot) -> None:
    """Whoever joined it on loopback as rank 1 displaced that rank, and in a loop ended the job."""
    path = slot.call("reserve_address", 1, "")["address"].removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as coordinator:
        coordinator.bind(path)
        coordinator.listen()
        stranger = [sys.executable, "-c", _CONNECT, path]
        told = subprocess.run(stranger, check=False, capture_output=True, text=True, timeout=30)
        assert told.stdout.strip() == "PermissionError"
        with socket.socket(socket.AF_UNIX) as rank:
            rank.connect(path)
    slot.call("kill", 1, 5.0, False)
    assert not Path(path).exists()


def test_a_child_outlives_the_thread_that_asked_for_it(slot: Slot) -> None:
    """For the kernel the parent whose death is awaited is the thread that forked."""
    pids: list[int] = []
    asker = threading.Thread(target=lambda: pids.append(slot.start()))
    asker.start()
    asker.join()
    slot.until("started")
    time.sleep(0.2)
    row = look(pids[0])
    assert row is not None
    assert row.is_alive


_OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.trainer.slot.test_actor import *
slot = Slot(Path(sys.argv[2]), [sys.executable, str(STAND_IN)])
print(slot.start(), flush=True)
slot.order(1, order="grandchild", own_session=True)
print(slot.until("spawned")["pid"], flush=True)
time.sleep(600)
"""


def test_a_child_dies_with_its_slot_and_the_next_slot_ends_the_rest(
    tmp_path: Path, make_slot: Callable[..., Slot]
) -> None:
    """Workers whose launcher was killed went on training, and held the devices."""
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, root, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        child, grandchild = int(owner.stdout.readline()), int(owner.stdout.readline())
        row = look(grandchild)
        assert row is not None
        owner.kill()
    await_gone(child, 1.0)
    assert is_alive(row.identity)
    slot = make_slot()
    assert json.loads(slot.worker.describe())["orphans"] == []
    assert not is_alive(row.identity)


def test_a_slot_needs_neither_jax_nor_ray() -> None:
    """Slots are as many as devices, and stay: 140 MB each would be for nothing."""
    code = "import sys, trainer.slot.actor; print({'jax', 'ray', 'orbax'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "set()"


@pytest.fixture
def make_lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ResilientWorker]:
    """Makes slots that end half a second after the last word of a daemon; `told` is then filled."""
    for name, seconds in (("TICK_S", 0.05), ("CANARY_S", 0.1), ("_POLL_S", 0.01)):
        monkeypatch.setattr(orphans, name, seconds)

    def make() -> ResilientWorker:
        command = [sys.executable, str(STAND_IN)]
        return ResilientWorker(
            "first", str(tmp_path), 1.0, 0, command, 0.5, ["end"], leave=told.extend
        )

    told: list[str] = []
    make.told = told  # type: ignore[attr-defined]
    return make


@pytest.mark.parametrize("ready", [True, False])
def test_a_slot_that_no_daemon_speaks_to_ends_its_child_and_itself(
    make_lonely: Any, tmp_path: Path, ready: bool
) -> None:
    """The child saves first, if it holds a state."""
    worker = make_lonely()
    spec = spec_in(tmp_path, rank=0, world_size=1, job="first")
    pid = json.loads(worker.start(EPOCH, json.dumps(spec)))["pid"]
    try:
        for _ in range(5):  # it is spoken to
            time.sleep(0.2)
            worker.watch(EPOCH, 0) if ready else worker.snapshots(EPOCH)
            assert make_lonely.told == []
        if ready:
            worker.order(EPOCH, 1, json.dumps({"order": "ready"}))
        await_gone(pid, 20.0)
        deadline = time.monotonic() + 20.0
        while make_lonely.told != ["end"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ended = orphans.how_they_ended(tmp_path, 1)
        if ready:
            assert ended is not None
            assert (ended["saved"], ended["step"], ended["completed"]) == (True, 4, None)
        else:
            assert ended is None
        assert json.loads(worker.describe())["leaving"] is True
    finally:
        worker.end(10**9, 5.0, False)
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def test_a_slot_ends_what_a_lost_slot_of_its_machine_has_left(slot: Slot) -> None:
    """Only a probe on the node itself proves that a rank of a lost slot is gone."""
    marks = {RUN: str(slot.run_dir), GENERATION: "1", SLOT: f"{machine()} 1 1.0"}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={**os.environ, **marks}) as left:
        row = look(left.pid)
        assert row is not None
        never = (1, 1.0)  # a slot of this pid, which had no child of its own
        assert slot.call("probe", 2, *never, *never)["survivors"] == []
        assert left.poll() is None  # another generation's
        slot.call("probe", 1, *never, left.pid, row.identity.started_at)
        assert left.wait(5) == -signal.SIGKILL
        assert slot.call("probe", 1, *never, *never)["survivors"] == []
