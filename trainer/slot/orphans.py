"""Workers that no daemon has been heard of for: when they are orphans, and how they end.

The slots of a generation agree by files under its logs, since nobody is there to coordinate them:
all must have heard nothing; then rank 0 names the last step, all finish it, the state is saved, and
everything ends. No jax, no Ray: a slot imports it.

    logs/generation-N/orphans/gathered-R.json  stop-0.json  acknowledged-R.json  ended-0.json
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trainer.host.atomic_write import write_whole

T = TypeVar("T")
Report = dict[str, Any]

TICK_S = 1.0
PAUSE_S = 5.0  # between two ticks: then we were frozen ourselves, and may have missed any word
CANARY_S = 2.0  # a living daemon renews it several times meanwhile
GATHER_S = 120.0  # until all others have noticed too
ACKNOWLEDGE_S = 60.0  # others hear of the last step through a file system
SAVE_S = 600.0  # for the last step and its save
_POLL_S = 0.05


class Trainee(Protocol):
    """The child of this slot that holds a state."""

    def is_alive(self) -> bool:
        """Whether its process runs."""
        ...

    def order(self, **order: Any) -> None:
        """Give it an order; one that has ended takes none, without an error."""
        ...

    def report(self, *kinds: str) -> Report | None:
        """Its last report of these kinds, if there was one."""
        ...


class Vigil:
    """Whether a daemon is heard of: by its orders, or by the canary that it renews in the store.

    `canary` reads that, None where it is not there or the store is out of reach. A slot that lives
    is itself the sign that Ray can be reached: it ends with a raylet that has lost its head for a
    minute. `after_s` of 0 means that nobody is ever an orphan.
    """

    def __init__(
        self,
        after_s: float,
        canary: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.after_s = after_s
        self._canary, self._clock = canary, clock
        self._heard_at = self._looked_at = clock()
        self._seen: tuple[str | None, float] | None = None

    def heard(self) -> None:
        """A daemon gave an order, or asked."""
        self._heard_at = self._clock()

    def is_over(self) -> bool:
        """Whether there was no sign for too long; to be asked every `TICK_S`."""
        now = self._clock()
        if now - self._looked_at > PAUSE_S:
            self.heard()
        self._looked_at = now
        if self.after_s <= 0 or now - self._heard_at < self.after_s:
            self._seen = None
            return False
        canary = self._canary()
        if self._seen is None or (canary is not None and canary != self._seen[0]):
            if self._seen is not None:
                self.heard()
            self._seen = (canary, now)
        return now - self._seen[1] >= CANARY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The ranks of one generation, and where they leave word for one another."""

    directory: Path
    rank: int
    world_size: int

    def tell(self, word: str, **facts: Any) -> None:
        """Leave word, whole or not at all. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._path(word, self.rank), json.dumps(facts))

    def take_back(self, word: str) -> None:
        """As if it had never been told."""
        self._path(word, self.rank).unlink(missing_ok=True)

    def told(self, word: str, rank: int) -> Report | None:
        """What a rank told; None where it has not, yet."""
        try:
            found = json.loads(self._path(word, rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def all_told(self, word: str) -> bool:
        """Whether every rank but 0, which leads, has told it."""
        return all(self.told(word, rank) is not None for rank in range(1, self.world_size))

    def _path(self, word: str, rank: int) -> Path:
        return self.directory / f"{word}-{rank}.json"


def crew_of(run_dir: Path, generation: int, rank: int, world_size: int) -> Crew:
    """`run_dir` is `<run_dir>/<job>`."""
    directory = run_dir / "logs" / f"generation-{generation}" / "orphans"
    return Crew(directory=directory, rank=rank, world_size=world_size)


def how_they_ended(run_dir: Path, generation: int) -> Report | None:
    """What rank 0 left word of, for the next daemon; None where they did not end as orphans.

    `after_s`, `at`, `step` and `saved` (whether that step is on the disk), and `completed`: the
    report of a job that had finished, or None.
    """
    told = crew_of(run_dir, generation, 0, 1).told("ended", 0)
    keys = {"after_s", "at", "step", "saved", "completed"}
    return told if told is not None and keys <= told.keys() else None


def gather(crew: Crew, trainee: Trainee, vigil: Vigil) -> bool:
    """Wait until all ranks have heard nothing; False where this one has heard something.

    One whose process ends meanwhile has nothing left to wait for, and who waits in vain for another
    goes on: its process is dead, or it will hear of this. Raises OSError.
    """
    crew.tell("gathered", at=time.time())
    deadline = time.monotonic() + GATHER_S
    while not (crew.all_told("gathered") and crew.told("gathered", 0) is not None):
        if not trainee.is_alive() or time.monotonic() >= deadline:
            return True
        time.sleep(TICK_S)
        if not vigil.is_over():
            crew.take_back("gathered")
            return False
    return True


def save(crew: Crew, trainee: Trainee) -> Report | None:
    """Finish the step, save and stop, as all the others do. The last word of rank 0, or None."""
    if crew.rank == 0:
        return _lead(crew, trainee)
    _follow(crew, trainee)
    return crew.told("ended", 0)


def _lead(crew: Crew, trainee: Trainee) -> Report | None:
    trainee.order(order="stop", go_wait_s=ACKNOWLEDGE_S)
    said = _await(lambda: trainee.report("stopping", "saved"), trainee, SAVE_S)
    if said is not None and said["report"] == "stopping":
        crew.tell("stop", step=said["after_step"])
        _await(lambda: crew.all_told("acknowledged") or None, trainee, ACKNOWLEDGE_S)
        trainee.order(order="go")
        said = _await(lambda: trainee.report("saved"), trainee, SAVE_S)
    return said


def _follow(crew: Crew, trainee: Trainee) -> None:
    def next_word() -> bool | None:
        return any(crew.told(word, 0) is not None for word in ("stop", "ended")) or None

    _await(next_word, trainee, SAVE_S)
    stop = crew.told("stop", 0)
    if stop is not None and crew.told("ended", 0) is None:
        trainee.order(order="stop_after", step=stop["step"])
        if _await(lambda: trainee.report("acknowledged"), trainee, ACKNOWLEDGE_S):
            crew.tell("acknowledged", step=stop["step"])
    _await(lambda: crew.told("ended", 0), trainee, SAVE_S)


def _await(found: Callable[[], T | None], trainee: Trainee, limit_s: float) -> T | None:
    """What `found` finds before the trainee ends and the time is over; None else."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        alive = trainee.is_alive()
        if (what := found()) is not None:
            return what
        if not alive:
            return None
        time.sleep(_POLL_S)
    return None


def leave_cluster(afterwards: Sequence[str]) -> None:
    """End this slot's process. The first of a placement is the last to go: it gives that back.

    `afterwards` is a command that outlives it, to end what else no daemon is there for; it is given
    the pid of the slot, which ends before.
    """
    try:
        import ray
        import ray.util

        name = ray.get_runtime_context().get_actor_name() or ""
        placement, _, index = name.rpartition(":")
        if index == "0":
            _await_others(ray, name, f"{placement}:")
            if afterwards:
                _start_apart(afterwards)
            if (group := ray.util.get_current_placement_group()) is not None:
                ray.util.remove_placement_group(group)
    finally:
        os._exit(0)


def _start_apart(command: Sequence[str]) -> None:
    """With our pid, in a session of its own, without the marks by which Ray's processes end."""
    own = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("RAY_") and name != "EVERSTEP_EMBEDDED"
    }
    subprocess.Popen(
        [*command, str(os.getpid())],
        env=own,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _await_others(ray: Any, name: str, prefix: str) -> None:
    deadline = time.monotonic() + 2 * SAVE_S
    while time.monotonic() < deadline:
        actors = ray.util.list_named_actors(all_namespaces=True)
        if not any(a["name"].startswith(prefix) and a["name"] != name for a in actors):
            return
        time.sleep(TICK_S)
