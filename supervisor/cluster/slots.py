"""The cluster as the daemon sees it: slots, what their children report, how they end; plain data.

What a cluster must be able to do, and how it may fail; real or simulated, it decides nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from supervisor.errors import EverstepError

Record = dict[str, Any]


class ClusterError(EverstepError):
    """Ray, or a slot, did not do what it was told. The text says which and why."""


class PlacementTimedOut(ClusterError):
    """The slots that were asked for did not come in time."""


class SlotsSetAside(ClusterError):
    """Slots came to lie beside processes that cannot be ended: their nodes are used no more."""


class SlotDied(ClusterError):
    """The slot's process is gone, and its children with it."""


class SlotSilent(ClusterError):
    """The slot did not answer in time: a doubt, not a death."""


class SlotRefused(ClusterError):
    """The slot lives, and does not carry out this order."""


class StaleEpoch(SlotRefused):
    """The slot serves a daemon of a later epoch: ours is over."""


class ClusterOutOfReach(ClusterError):
    """Ray, or a slot, gave no answer to a daemon that came back: it ends, and changes nothing."""

    exit_status = 75


class StartFailed(ClusterError):
    """Some ranks could not be started. What was started is left for `kill`."""

    def __init__(self, ranks: tuple[int, ...], why: str) -> None:
        super().__init__(why)
        self.ranks = ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one rank. `started_at`: seconds after the boot of its machine."""

    rank: int
    node_id: str
    host: str
    address: str
    pid: int
    started_at: float
    local_rank: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a rank's process ended: a status, or a signal's name; both None where nobody saw it."""

    rank: int
    status: int | None
    signal: str | None
    log_tail: tuple[str, ...]
    stacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A complete snapshot: its parts cover the state over the slots that are there."""

    generation: int
    step: int
    path: str


class ClusterNeeds(Protocol):
    """The part of the settings that is read here: section [cluster]."""

    @property
    def address(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def cpus_per_worker(self) -> float: ...
    @property
    def gpus_per_worker(self) -> int: ...
    @property
    def resources_per_worker(self) -> Mapping[str, float]: ...
    @property
    def placement(self) -> str: ...
    @property
    def placement_timeout_s(self) -> float: ...


class Cluster(Protocol):
    """What the daemon needs of a cluster. Every wait is bounded; failures are ClusterErrors."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots that were placed or adopted last, by rank."""

    async def connect(self) -> None:
        """Reach the cluster, the job's own head started if need be."""

    async def sweep(self) -> list[str]:
        """End what an earlier daemon of this run left: names of slots and groups."""

    async def shortage(self) -> str | None:
        """Why the cluster, were it empty, could not hold the job; None where it could."""

    async def place(self, placement: int, timeout_s: float) -> tuple[Slot, ...]:
        """Slots for all ranks, in rank order: by node, then by device."""

    async def adopt(self, placement: int) -> dict[int, dict[int, int]] | None:
        """Take over the slots that an earlier daemon placed; their children by generation, rank.

        None if a slot is missing, or is about to end by itself. Raises ClusterError while that
        is in doubt; then nothing has changed, and it can be asked again. What the children have
        reached is reported first, as records, and then their news.
        """

    async def start(self, generation: int, specs: Sequence[dict[str, Any]]) -> dict[int, int]:
        """Start a generation, spec by spec in rank order; the pid of each rank."""

    async def order(self, generation: int, rank: int, order: dict[str, Any]) -> None:
        """Pass an order on to one rank."""

    async def signal(self, generation: int, rank: int, name: str) -> None:
        """Send one rank a signal: a drill."""

    async def kill(
        self, generation: int, timeout_s: float, *, last_words: bool = False
    ) -> tuple[tuple[Exit, ...], tuple[str, ...]]:
        """End a generation: how its ranks ended, and what could not be proven gone in time.

        With `last_words` the living say where they stand first, within milliseconds.
        """

    async def prove(self) -> tuple[str, ...]:
        """What `kill` could not prove gone and is proven now, in the words of `kill`; told once."""

    async def snapshots(self) -> list[Snapshot]:
        """The complete snapshots that the slots hold."""

    async def discard_snapshot(self, generation: int, step: int) -> None:
        """Remove a snapshot wherever it is held."""

    async def discard_snapshots_above(self, step: int) -> None:
        """Remove all snapshots above a step, whole or not. Raises ClusterError while in doubt."""

    async def prepare_spares(self) -> None:
        """Have a process with JAX imported wait in every slot, for the next start."""

    async def evidence(self, generation: int) -> dict[int, dict[str, Any]]:
        """Stacks, log tail and state of every rank; `error` where there is none."""

    async def witness(self, generation: int, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
        """What the slots see of these ranks; a rank that is missing gave no answer."""

    async def release(self, *, forget: bool = True) -> None:
        """Give the slots back to the cluster; with `forget` the snapshots in memory too."""

    async def disconnect(self, stop_head: bool) -> None:
        """Leave the cluster; end the head if it is the job's own and that is wanted."""
