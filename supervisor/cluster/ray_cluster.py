"""The cluster on Ray: slots are actors, and ranks are their children.

It decides nothing: what it sees goes to callbacks on the event loop, what it is asked for it does
in bounded time, or raises ClusterError. It never unpickles the answer of a slot, and imports Ray
only once connected.
"""

import asyncio
import contextlib
import json
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from supervisor.cluster import ray_api
from supervisor.cluster.own_servers import EmbeddedRay
from supervisor.cluster.slots import (
    ClusterError,
    ClusterNeeds,
    Exit,
    PlacementTimedOut,
    Record,
    Slot,
    SlotDied,
    SlotRefused,
    SlotSilent,
    SlotsSetAside,
    Snapshot,
    StaleEpoch,
    StartFailed,
)
from supervisor.errors import EverstepError
from trainer.host.atomic_write import write_whole
from trainer.host.private_directories import IDENTITY_FILE
from trainer.host.processes import Identity
from trainer.slot.actor import COMMAND, POLL_S
from trainer.slot.child import end_generation, end_orphans, log_path, log_tail, machine
from trainer.state.snapshot import SnapshotInfo, discard, list_snapshots, sweep
from trainer.state.snapshot import directory_of as snapshot_directory

T = TypeVar("T")

_CONNECT_LIMIT_S = 60.0
_DISCONNECT_LIMIT_S = 15.0
_ORDER_LIMIT_S = 5.0
_START_LIMIT_S = 15.0
_EVIDENCE_LIMIT_S = 2.0
_WITNESS_LIMIT_S = 1.0
_PROBE_LIMIT_S = 1.0
_REMOVAL_LIMIT_S = 15.0
_TABLE_LIMIT_S = 5.0
_DOUBT_PAUSE_S = 0.25
_SAME_MOMENT_S = 0.02  # deaths this close together are told as one
_PLACEMENT_PAUSE_S = 0.05
_HEAD_PATIENCE_S = 20.0  # with another's head: it may come back, and training goes on meanwhile
_LOOK_LIMIT_S = 2.0
_LEAVE_AFTER_S = 30.0
_ASIDE_S = 30.0  # then a node where processes could not be ended is tried again
_PATIENCE_S = 5.0  # with a slot that does not answer to `kill`
_THREADS = 4  # Ray's calls may hang with its head; more would hang in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aside:
    """A node that is not used until `until` (seconds of the loop), and why."""

    why: str
    is_here: bool
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    """A process of a rank and generation that may live: `child`, or what bears its marks."""

    why: str
    machine: str
    slot: Identity
    child: Identity | None


class RayCluster:
    """The slots of one job on Ray.

    `run_dir` is `<run_dir>/<job>`. `on_record` gets each record of a slot's `watch`, with
    `generation` and `rank`; `on_slot_lost` the ranks of slots that died, why, and whether their
    node did; `on_cluster_lost` why the job's own head, or the table of nodes, is out of reach;
    `on_stale` what a slot said that serves a later daemon. All are called on the event loop.
    `fence` raises Superseded once there is one: it is asked before anything is ended by name.
    `why_one_host` says what a cluster of several hosts would lack, "" if nothing.
    `command` is what slots run as a child.
    """

    def __init__(
        self,
        settings: ClusterNeeds,
        run_dir: Path,
        epoch: int,
        on_record: Callable[[Record], None],
        on_slot_lost: Callable[[tuple[int, ...], str, bool], None],
        *,
        on_cluster_lost: Callable[[str], None] | None = None,
        why_one_host: str = "",
        on_stale: Callable[[str], None] = lambda why: None,
        fence: Callable[[], None] = lambda: None,
        orphan_after_s: float = 0.0,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir.resolve()
        self._snapshots = snapshot_directory(self._run_dir)
        self._epoch = epoch
        self._on_record = on_record
        self._on_slot_lost = on_slot_lost
        self._on_cluster_lost = on_cluster_lost
        self._why_one_host = why_one_host
        self._on_stale, self._fence = on_stale, fence
        self._orphan_after_s = orphan_after_s
        self._command = list(command)
        self._prefix = ray_api.prefix(self._run_dir)
        self._head = EmbeddedRay(self._run_dir) if settings.address == "local" else None
        self._free_threads = asyncio.Semaphore(_THREADS)
        self._slots: tuple[Slot, ...] = ()
        self._actors: tuple[Any, ...] = ()
        self._machines: tuple[str, ...] = ()
        self._dead: dict[int, str] = {}
        self._silent: set[int] = set()
        self._aside: dict[str, _Aside] = {}
        self._started: dict[int, dict[int, Identity]] = {}
        self._doubts: dict[tuple[int, int], _Doubt] = {}  # by generation and rank
        self._watches: list[asyncio.Task[None]] = []
        self._guard: asyncio.Task[None] | None = None
        self._is_lost = False
        self._news: dict[tuple[str, bool], list[int]] = {}

    async def connect(self) -> None:
        """Start or find the head, then connect. Raises ClusterUnusable or ClusterError.

        After the loss of a cluster: its slots are dead, and `kill` proves their children gone. The
        head of another's cluster is waited for then, as long as for slots.
        """
        self._forget("its cluster was lost")
        address = self._settings.address
        if self._head is not None:
            address = await self._in_thread(_CONNECT_LIMIT_S, self._head.ensure)
        elif self._is_lost:
            with contextlib.suppress(ClusterError):  # Ray's code would end us while we wait
                await self._in_thread(_DISCONNECT_LIMIT_S, ray_api.disconnect)
            await self._await_head(address, self._settings.placement_timeout_s)
        await self._in_thread(_CONNECT_LIMIT_S, ray_api.connect, address)
        self._is_lost = False
        if self._on_cluster_lost is not None:
            self._guard = self._spawn(self._watch_cluster(self._on_cluster_lost))

    async def sweep(self) -> list[str]:
        """End leftovers of this run by exact name; their names. Raises ClusterError otherwise."""
        found = await self._in_thread(_TABLE_LIMIT_S, ray_api.find_slots, f"{self._prefix}slot:")
        endings = (
            self._ask(
                name, actor, "end", self._epoch, _ORDER_LIMIT_S, False, limit_s=_ORDER_LIMIT_S + 1
            )
            for name, actor in found.items()
        )
        # One that does not answer is killed like the others, and its children die with it.
        answers = await asyncio.gather(*endings, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, SlotRefused)]
        if refused:
            raise refused[0]
        self._fence()
        await self._in_thread(_TABLE_LIMIT_S, ray_api.kill_slots, list(found.values()))
        removed = await self._remove()
        await self._end_orphans()
        return [*found, *removed]

    async def shortage(self) -> str | None:
        """Compares with all that the living nodes have, in use or not, but for those set aside."""
        table = await self._in_thread(_TABLE_LIMIT_S, ray_api.nodes)
        await self._take_back_nodes()
        living = [node for node in table if node.is_alive]
        if self._why_one_host and (away := ray_api.addresses_elsewhere(living)):
            return f"cannot run on a cluster with {', '.join(away[:4])}: {self._why_one_host}"
        workers, kind = self._settings.workers, self._settings.placement
        usable = [node for node in living if node.id not in self._aside]
        short = ray_api.shortage(self._bundle(), workers, kind, usable)
        if short and self._aside:
            short += f"; set aside: {'; '.join(one.why for one in self._aside.values())}"
        return short

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Those that were placed or adopted last, by rank."""
        return self._slots

    async def place(self, placement: int, timeout_s: float) -> tuple[Slot, ...]:
        """Place the slots anew. Whatever way it fails, nothing of it is left.

        Raises PlacementTimedOut, ClusterError, or SlotsSetAside after which it may be tried again.
        """
        await self.release(forget=False)
        try:
            async with asyncio.timeout(timeout_s):
                await self._place(placement)
        except TimeoutError:
            await self._give_back()
            short = await self.shortage()
            reason = f"; the cluster is too small: it {short}" if short else ""
            raise PlacementTimedOut(
                f"{self._settings.workers} slots did not come within {timeout_s:.0f} s{reason}"
            ) from None
        except BaseException:
            await self._give_back()
            raise
        self._watches = [self._spawn(self._watch(slot.rank)) for slot in self._slots]
        return self._slots

    async def adopt(self, placement: int) -> dict[int, dict[int, int]] | None:
        """By exact name. Raises ClusterError while Ray, or a slot that lives, does not answer."""
        name = f"{self._prefix}group:{placement}"
        group = await self._in_thread(_TABLE_LIMIT_S, ray_api.find_group, name)
        if group is None:
            return None
        at = await self._in_thread(_TABLE_LIMIT_S, ray_api.group_nodes, group)
        prefix = f"{self._prefix}slot:{placement}:"
        found = await self._in_thread(_TABLE_LIMIT_S, ray_api.find_slots, prefix)
        names = [f"{prefix}{index}" for index in range(self._settings.workers)]
        if at is None or not all(name in found for name in names):
            return None
        actors = [found[name] for name in names]
        questions = (
            self._ask(name, actor, "describe", limit_s=_ORDER_LIMIT_S)
            for name, actor in zip(names, actors, strict=True)
        )
        outcomes = await asyncio.gather(*questions, return_exceptions=True)
        if any(isinstance(outcome, SlotDied) for outcome in outcomes):
            return None
        answers = [_or_raise(outcome) for outcome in outcomes]
        if any(answer.get("leaving") for answer in answers):  # as an orphan, on its own
            return None
        self._settle(actors, answers, at, await self._addresses())
        children: dict[int, dict[int, int]] = {}
        for child in (child for answer in answers for child in answer["children"]):
            # Before the news of the watches, and after those who will hear it are ready.
            for record in child.get("reached", ()):  # a slot of an earlier version has none
                asyncio.get_running_loop().call_soon(self._on_record, record)
            generation, rank, pid = child["generation"], child["rank"], child["pid"]
            identity = Identity(pid=pid, started_at=child["started_at"])
            self._started.setdefault(generation, {})[rank] = identity
            children.setdefault(generation, {})[rank] = pid
        self._watches = [self._spawn(self._watch(slot.rank)) for slot in self._slots]
        return children

    async def start(self, generation: int, specs: Sequence[dict[str, Any]]) -> dict[int, int]:
        """Start all ranks at once. Sets `coordinator`, `rank`, `local_rank` and `node_rank`.

        Raises StartFailed naming the ranks; `kill` then ends those that did start.
        """
        if len(specs) != len(self._slots):
            raise ClusterError(f"{len(specs)} specs for {len(self._slots)} slots")
        coordinator = await self._reserve_address(generation)
        started: dict[int, Identity] = {}
        self._started[generation] = started

        async def start_one(slot: Slot) -> None:
            own = {"rank": slot.rank, "local_rank": slot.local_rank, "node_rank": slot.node_rank}
            spec = {**specs[slot.rank], **own, "coordinator": coordinator}
            answer = await self._tell(slot.rank, "start", json.dumps(spec), limit_s=_START_LIMIT_S)
            started[slot.rank] = Identity(pid=answer["pid"], started_at=answer["started_at"])

        # In rank order: rank 0, whom all others join, is asked first.
        outcomes = await asyncio.gather(*map(start_one, self._slots), return_exceptions=True)
        _raise_start_failed(dict(enumerate(outcomes)))
        return {rank: started[rank].pid for rank in sorted(started)}

    async def order(self, generation: int, rank: int, order: dict[str, Any]) -> None:
        """Raises ClusterError where the rank has ended, or does not read its orders."""
        await self._tell(rank, "order", generation, json.dumps(order))

    async def signal(self, generation: int, rank: int, name: str) -> None:
        """Raises ClusterError where the rank has ended."""
        await self._tell(rank, "signal", generation, name)

    async def kill(
        self, generation: int, timeout_s: float, *, last_words: bool = False
    ) -> tuple[tuple[Exit, ...], tuple[str, ...]]:
        """Never raises for a slot that is dead or silent: it is told among the unproven."""
        kills = (self._kill(slot, generation, timeout_s, last_words) for slot in self._slots)
        outcomes = await asyncio.gather(*kills)
        exits = tuple(end for end, _ in outcomes if end is not None)
        unproven = tuple(why for _, why in outcomes if why is not None)
        for slot, (_, why) in zip(self._slots, outcomes, strict=True):
            if why is not None:
                self._doubts[generation, slot.rank] = _Doubt(
                    why=why,
                    machine=self._machines[slot.rank],
                    slot=Identity(pid=slot.pid, started_at=slot.started_at),
                    child=self._started.get(generation, {}).get(slot.rank),
                )
        if not unproven:
            self._started.pop(generation, None)
        return exits, unproven

    async def prove(self) -> tuple[str, ...]:
        """Looks on this machine, and asks a slot on each other one. Never raises."""
        asked = list(self._doubts.items())
        answers = await asyncio.gather(
            *(self._is_proven(generation, doubt) for (generation, _), doubt in asked)
        )
        proven = [key for (key, _), is_proven in zip(asked, answers, strict=True) if is_proven]
        return tuple(self._doubts.pop(key).why for key in proven)

    async def _is_proven(self, generation: int, doubt: _Doubt) -> bool:
        """Whether nothing of it is left on its machine; what is left is sent SIGKILL again."""
        there = [
            slot.rank
            for slot in self._slots
            if self._machines[slot.rank] == doubt.machine and slot.rank not in self._dead
        ]
        try:
            self._fence()
            if doubt.machine == machine():
                arguments = (self._run_dir, generation, doubt.slot, doubt.child, 0.0)
                return not await self._in_thread(_PROBE_LIMIT_S, end_generation, *arguments)
            if not there:
                return False
            child = doubt.child or doubt.slot
            marks = (doubt.slot.pid, doubt.slot.started_at, child.pid, child.started_at)
            answer = await self._tell(
                there[0], "probe", generation, *marks, group="evidence", limit_s=_PROBE_LIMIT_S
            )
        except EverstepError:
            return False
        return not answer["survivors"]

    async def snapshots(self) -> list[Snapshot]:
        """Where all slots are on this machine, no slot is asked."""
        if all(one == machine() for one in self._machines):
            directory = self._snapshots
            found = await self._in_thread(_ORDER_LIMIT_S, list_snapshots, directory)
            held = [(one, str(directory)) for one in found]
        else:
            questions = (self._tell(slot.rank, "snapshots") for slot in self._slots)
            answers = await asyncio.gather(*questions, return_exceptions=True)
            held = [
                (SnapshotInfo(**{**one, "rank": slot.rank}), str(one["path"]))
                for slot, answer in zip(self._slots, answers, strict=True)
                if not isinstance(answer, BaseException)
                for one in answer["snapshots"]
            ]
        return _complete(held)

    async def discard_snapshot(self, generation: int, step: int) -> None:
        """On this machine, and wherever there are slots."""
        directory = self._snapshots
        await self._in_thread(_ORDER_LIMIT_S, discard, directory, generation, step)
        if any(one != machine() for one in self._machines):
            await asyncio.gather(
                *(
                    self._tell(slot.rank, "discard_snapshot", generation, step)
                    for slot in self._slots
                    if slot.rank not in self._dead
                )
            )

    async def discard_snapshots_above(self, step: int) -> None:
        """On this machine, and wherever there are slots: each that lives must answer."""
        directory = self._snapshots
        found = await self._in_thread(_ORDER_LIMIT_S, list_snapshots, directory)
        doomed = {(one.generation, one.step) for one in found}
        if any(one != machine() for one in self._machines):
            living = [slot.rank for slot in self._slots if slot.rank not in self._dead]
            answers = await asyncio.gather(*(self._tell(rank, "snapshots") for rank in living))
            held = [one for answer in answers for one in answer["snapshots"]]
            doomed |= {(one["generation"], one["step"]) for one in held}
        for generation, at in sorted(doomed):
            if at > step:
                await self.discard_snapshot(generation, at)

    async def prepare_spares(self) -> None:
        """In all slots at once. Raises ClusterError."""
        await asyncio.gather(*(self._tell(slot.rank, "prepare_spare") for slot in self._slots))

    async def evidence(self, generation: int) -> dict[int, dict[str, Any]]:
        """All ranks in parallel, at most 2 s. Never raises."""

        async def collect(rank: int) -> dict[str, Any]:
            try:
                return await self._tell(rank, "evidence", generation, limit_s=_EVIDENCE_LIMIT_S)
            except ClusterError as error:
                return {
                    "stacks": "",
                    "log_tail": log_tail(log_path(self._run_dir, generation, rank), lines=200),
                    "state": None,
                    "beat": {},
                    "error": str(error),
                }

        ranks = [slot.rank for slot in self._slots]
        return dict(zip(ranks, await asyncio.gather(*map(collect, ranks)), strict=True))

    async def witness(self, generation: int, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
        """All in parallel, at most 1 s. Never raises."""
        asked = sorted(ranks)
        questions = (
            self._ask(
                f"slot {rank}",
                self._actors[rank],
                "witness",
                generation,
                group="evidence",
                limit_s=_WITNESS_LIMIT_S,
            )
            for rank in asked
        )
        answers = await asyncio.gather(*questions, return_exceptions=True)
        return {
            rank: answer
            for rank, answer in zip(asked, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    async def release(self, *, forget: bool = True) -> None:
        """End children, actors and group, and wait until all are gone. Raises ClusterError."""
        if self._actors:
            await self._end_slots(forget)
        if forget:
            await self._in_thread(_ORDER_LIMIT_S, sweep, self._snapshots)
            await self._end_orphans()

    async def _end_slots(self, forget: bool) -> None:
        self._stop_watching()
        endings = (
            self._tell(slot.rank, "end", _ORDER_LIMIT_S, forget, limit_s=_ORDER_LIMIT_S + 1)
            for slot in self._slots
            if slot.rank not in self._dead
        )
        await asyncio.gather(*endings, return_exceptions=True)
        await self._give_back()

    async def disconnect(self, stop_head: bool) -> None:
        """Slots that were not released live on, unless the head ends."""
        self._forget("the daemon has left the cluster")
        head = self._head if stop_head else None
        if head is not None and self._is_lost:
            await self._in_thread(_DISCONNECT_LIMIT_S, head.stop)
        # Where Ray hangs at this, the process that ends next does not need it.
        with contextlib.suppress(ClusterError):
            await self._in_thread(_DISCONNECT_LIMIT_S, ray_api.disconnect)
        if head is not None and not self._is_lost:
            await self._in_thread(_DISCONNECT_LIMIT_S, head.stop)

    # Placing

    def _bundle(self) -> dict[str, float]:
        own = {"CPU": self._settings.cpus_per_worker, "GPU": float(self._settings.gpus_per_worker)}
        wanted = {**own, **self._settings.resources_per_worker}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    async def _place(self, number: int) -> None:
        settings, bundle = self._settings, self._bundle()
        group = await self._in_thread(
            _TABLE_LIMIT_S,
            ray_api.create_group,
            f"{self._prefix}group:{number}",
            bundle,
            settings.workers,
            settings.placement,
            list(self._aside),
        )
        while (at := await self._in_thread(_TABLE_LIMIT_S, ray_api.group_nodes, group)) is None:
            await asyncio.sleep(_PLACEMENT_PAUSE_S)
        arguments = {
            "job": self._run_dir.name,
            "run_dir": str(self._run_dir),
            "cpus": settings.cpus_per_worker,
            "gpus": settings.gpus_per_worker,
            "command": self._command,
            "orphan_after_s": self._orphan_after_s,
            "afterwards": [
                sys.executable,
                "-P",
                "-m",
                "supervisor.end_abandoned",
                str(self._run_dir),
            ]
            if self._head is not None
            else [],
        }
        creations = (
            self._in_thread(
                _TABLE_LIMIT_S,
                ray_api.create_slot,
                f"{self._prefix}slot:{number}:{index}",
                group,
                index,
                bundle,
                arguments,
            )
            for index in range(settings.workers)
        )
        # All of them ended, well or not, before anything is cleaned up.
        created = await asyncio.gather(*creations, return_exceptions=True)
        actors = [_or_raise(one) for one in created]
        questions = (
            self._ask(f"slot {index}", actor, "describe", limit_s=None)
            for index, actor in enumerate(actors)
        )
        told = await asyncio.gather(*questions)
        self._set_aside(at, told)
        await self._require_shared(at, told, actors)
        self._settle(actors, told, at, await self._addresses())

    def _set_aside(self, at: list[str], told: Sequence[dict[str, Any]]) -> None:
        """A new slot has tried to end what dead ones left on its node; what it could not stays."""
        until = asyncio.get_running_loop().time() + _ASIDE_S
        found = {}
        for node, one in zip(at, told, strict=True):
            if one["orphans"]:
                pids = ", ".join(map(str, one["orphans"]))
                why = f"{one['host']}, where pid {pids} of an earlier generation cannot be ended"
                found[node] = _Aside(why=why, is_here=one["machine"] == machine(), until=until)
        self._aside |= found
        if found:
            raise SlotsSetAside("; ".join(one.why for one in found.values()))

    async def _require_shared(
        self, at: list[str], told: Sequence[dict[str, Any]], actors: Sequence[Any]
    ) -> None:
        """Set nodes aside that do not have the run directory: they would write where nobody reads.

        Each slot is asked for a mark that was written here just now. Raises SlotsSetAside.
        """
        mark, text = self._run_dir / f".mark-{secrets.token_hex(8)}", secrets.token_hex(16)
        try:
            await self._in_thread(_ORDER_LIMIT_S, write_whole, mark, text)
        except ClusterError:  # a full disk must not keep a job from going on
            mark = self._run_dir / IDENTITY_FILE
            text = await self._in_thread(_ORDER_LIMIT_S, mark.read_text)
        try:
            questions = (
                self._ask(f"slot {index}", actor, "read_mark", self._epoch, mark.name, limit_s=10.0)
                for index, actor in enumerate(actors)
            )
            answers = await asyncio.gather(*questions)
        finally:
            if mark.name != IDENTITY_FILE:
                await self._in_thread(_ORDER_LIMIT_S, mark.unlink, True)  # it may be gone
        until = asyncio.get_running_loop().time() + _ASIDE_S
        found = {
            node: _Aside(
                why=(
                    f"{slot['host']}, where {self._run_dir} is not the run directory of this job "
                    f"({answer.get('why') or 'it holds something else'}); job.run_dir must be on a "
                    "file system that all nodes share"
                ),
                is_here=False,
                until=until,
            )
            for node, slot, answer in zip(at, told, answers, strict=True)
            if answer["text"] != text
        }
        self._aside |= found
        if found:
            raise SlotsSetAside("; ".join(one.why for one in found.values()))

    async def _take_back_nodes(self) -> None:
        """Where nothing is left any more, or nobody can tell but a new slot."""
        if any(one.is_here for one in self._aside.values()):
            limit_s = _ORDER_LIMIT_S
            left = await self._in_thread(limit_s, end_orphans, self._run_dir, 0.0)
            if not left:
                self._aside = {node: one for node, one in self._aside.items() if not one.is_here}
        now = asyncio.get_running_loop().time()
        self._aside = {
            node: one for node, one in self._aside.items() if one.is_here or one.until > now
        }

    async def _addresses(self) -> dict[str, str]:
        table = await self._in_thread(_TABLE_LIMIT_S, ray_api.nodes)
        return {node.id: node.address for node in table}

    def _settle(
        self,
        actors: Sequence[Any],
        told: Sequence[dict[str, Any]],
        at: list[str],
        addresses: Mapping[str, str],
    ) -> None:
        """Give the slots their ranks; the order depends on nodes and devices alone."""
        order = ray_api.rank_order(at, [one["gpus"] for one in told])
        node_ranks = {node: rank for rank, node in enumerate(dict.fromkeys(at[i] for i in order))}
        places = [at[index] for index in order]
        self._actors = tuple(actors[index] for index in order)
        self._machines = tuple(told[index]["machine"] for index in order)
        self._dead = {}
        self._slots = tuple(
            Slot(
                rank=rank,
                node_id=places[rank],
                host=told[index]["host"],
                address=addresses.get(places[rank], ""),
                pid=told[index]["pid"],
                started_at=told[index]["started_at"],
                local_rank=places[:rank].count(places[rank]),
                node_rank=node_ranks[places[rank]],
            )
            for rank, index in enumerate(order)
        )

    async def _give_back(self) -> None:
        """End what bears our names, whatever of it there is."""
        self._fence()
        found = await self._in_thread(_TABLE_LIMIT_S, ray_api.find_slots, f"{self._prefix}slot:")
        await self._in_thread(_TABLE_LIMIT_S, ray_api.kill_slots, list(found.values()))
        await self._remove()
        self._slots, self._actors, self._machines = (), (), ()

    async def _remove(self) -> list[str]:
        limit_s = _REMOVAL_LIMIT_S
        await self._in_thread(limit_s + 1, ray_api.await_no_slots, f"{self._prefix}slot:", limit_s)
        return await self._in_thread(
            limit_s + 1, ray_api.remove_groups, f"{self._prefix}group:", limit_s
        )

    async def _end_orphans(self) -> None:
        """What slots that are dead left on this machine; on another its next slot does that."""
        left = await self._in_thread(_ORDER_LIMIT_S + 1, end_orphans, self._run_dir, _ORDER_LIMIT_S)
        if left:
            pids = ", ".join(str(one.pid) for one in left)
            raise ClusterError(f"processes of this run cannot be ended: pid {pids}")

    async def _reserve_address(self, generation: int) -> str:
        host = ""
        if len({slot.node_id for slot in self._slots}) > 1:
            host = self._slots[0].address
        try:
            answer = await self._tell(0, "reserve_address", generation, host)
        except ClusterError as error:
            raise StartFailed((0,), f"rank 0 has no address for the others: {error}") from error
        return str(answer["address"])

    # Ending

    async def _kill(
        self, slot: Slot, generation: int, timeout_s: float, last_words: bool
    ) -> tuple[Exit | None, str | None]:
        """How a rank ended, or why that is not known."""
        where = f"rank {slot.rank} of generation {generation} on {slot.host}"
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            turn_s = min(left_s, _PATIENCE_S)
            try:
                answer = await self._tell(
                    slot.rank, "kill", generation, turn_s, last_words, limit_s=turn_s + 1
                )
            except (SlotDied, SlotSilent) as error:
                if self._machines[slot.rank] == machine():
                    return await self._end_here(slot, generation, left_s, where)
                doubt = f"{where}: {error}"
                if isinstance(error, SlotDied):
                    return None, doubt
            except ClusterError as error:
                return None, f"{where}: {error}"
            else:
                if not answer["survivors"]:
                    end = answer["exit"]
                    return end and _exit(slot.rank, end, answer["stacks"]), None
                pids = ", ".join(map(str, answer["survivors"]))
                doubt = f"{where}: pid {pids} still there {timeout_s:.1f} s after SIGKILL"
            if left_s <= turn_s:
                return None, doubt

    async def _end_here(
        self, slot: Slot, generation: int, timeout_s: float, where: str
    ) -> tuple[Exit | None, str | None]:
        """End a rank on this machine without its slot, which is dead or does not answer."""
        if generation not in self._started:
            return None, None
        self._fence()
        owner = Identity(pid=slot.pid, started_at=slot.started_at)
        child = self._started[generation].get(slot.rank)
        arguments = (self._run_dir, generation, owner, child, timeout_s)
        left = await self._in_thread(timeout_s + 1, end_generation, *arguments)
        if left:
            return None, f"{where}: pid {', '.join(str(one.pid) for one in left)} still there"
        tail = log_tail(log_path(self._run_dir, generation, slot.rank), lines=20)
        return Exit(rank=slot.rank, status=None, signal=None, log_tail=tuple(tail)), None

    # Watching

    async def _watch(self, rank: int) -> None:
        after = 0
        while True:
            try:
                answer = await self._tell(rank, "watch", after, group="watch", limit_s=POLL_S + 10)
            except SlotDied as error:
                node_lost = "its node has died" in str(error)
                self._lose(rank, str(error), node_lost or await self._is_node_lost(rank))
                return
            except StaleEpoch:
                return  # the slot is another daemon's
            except SlotRefused as error:
                self._lose(rank, str(error), False)
                return
            except ClusterError as error:
                self._silent.add(rank)
                if await self._is_node_lost(rank):
                    self._lose(rank, str(error), True)
                    return
                await asyncio.sleep(_DOUBT_PAUSE_S)
                continue
            self._silent.discard(rank)
            if answer["lost"]:
                first = {key: answer["records"][0][key] for key in ("generation", "rank")}
                self._on_record({"report": "lost", "count": answer["lost"], **first})
            for record in answer["records"]:
                self._on_record(record)
            after = answer["last"]

    def _forget(self, why: str) -> None:
        """No slot can be asked any more."""
        self._silent.clear()
        self._stop_watching()
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None
        self._dead = {slot.rank: why for slot in self._slots}

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.cancel()
        self._watches = []

    async def _is_node_lost(self, rank: int) -> bool:
        """What the table of nodes says; where that cannot be had, it is not known to be lost."""
        # The one node of a head of our own is lost with it, which /proc tells. A call that waits
        # for a dead head would outlive the connection: Ray's own code ends this process after 60 s,
        # or as soon as a new head answers it at the old address.
        if self._head is not None or not await self._is_head_alive():
            return False
        try:
            table = await self._in_thread(_TABLE_LIMIT_S, ray_api.nodes)
        except ClusterError:
            return False
        node_id = self._slots[rank].node_id
        return not any(node.is_alive for node in table if node.id == node_id)

    def _lose(self, rank: int, why: str, node_lost: bool) -> None:
        self._dead[rank] = why
        if not self._news:
            asyncio.get_running_loop().call_later(_SAME_MOMENT_S, self._tell_losses)
        where = self._slots[rank].node_id if node_lost else ""
        self._news.setdefault((where, node_lost), []).append(rank)

    def _tell_losses(self) -> None:
        news, self._news = self._news, {}
        for (_, node_lost), ranks in news.items():
            self._on_slot_lost(tuple(sorted(ranks)), self._dead[ranks[0]], node_lost)

    async def _watch_cluster(self, on_lost: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        seen_at, patience_s = loop.time(), 0.0 if self._head else _HEAD_PATIENCE_S
        while True:
            await asyncio.sleep(1.0)
            # One that is only slow is alive: its port is open. What it answers is not asked.
            if await self._is_head_alive():
                seen_at = loop.time()
            elif loop.time() - seen_at > min(patience_s, 3.0 if self._silent else patience_s):
                break  # where slots are out of reach too, nothing trains that could be harmed
        self._is_lost = True
        on_lost("the job's own Ray head has died" if self._head else "nobody listens for Ray")
        # Ray's own code ends this process 61 s after the head, so we have to leave before. Until
        # then slots that live may still be told to end their children.
        await asyncio.sleep(_LEAVE_AFTER_S)
        self._stop_watching()
        self._dead = {slot.rank: "its cluster was lost" for slot in self._slots}
        await self._in_thread(_DISCONNECT_LIMIT_S, ray_api.disconnect)

    async def _is_head_alive(self) -> bool:
        if self._head is not None:
            return self._head.is_alive()
        host, _, port = self._settings.address.rpartition(":")
        try:
            async with asyncio.timeout(_LOOK_LIMIT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _await_head(self, address: str, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self._is_head_alive():
            if asyncio.get_running_loop().time() > deadline:
                raise ClusterError(f"no Ray head came back at {address} within {timeout_s:.0f} s")
            await asyncio.sleep(1.0)

    # Asking

    async def _tell(
        self,
        rank: int,
        method: str,
        *arguments: Any,
        group: str = "orders",
        limit_s: float = _ORDER_LIMIT_S,
    ) -> dict[str, Any]:
        """Give a slot an order, with our epoch."""
        if rank >= len(self._actors):
            raise ClusterError(f"there is no slot for rank {rank}")
        if rank in self._dead:
            raise SlotDied(self._dead[rank])
        if method == "evidence":
            group = "evidence"
        return await self._ask(
            f"the slot of rank {rank}",
            self._actors[rank],
            method,
            self._epoch,
            *arguments,
            group=group,
            limit_s=limit_s,
        )

    async def _ask(
        self,
        name: str,
        actor: Any,
        method: str,
        *arguments: Any,
        group: str = "orders",
        limit_s: float | None,
    ) -> dict[str, Any]:
        import ray.exceptions

        try:
            reference = getattr(actor, method).options(concurrency_group=group).remote(*arguments)
            async with asyncio.timeout(limit_s):  # `wait_for` of 3.11 may swallow a cancellation
                answer = json.loads(await reference)
        except TimeoutError:
            raise SlotSilent(f"{name} did not answer `{method}` within {limit_s} s") from None
        except ray.exceptions.ActorUnavailableError as error:
            raise SlotSilent(f"{name} is out of reach: {_first_line(error)}") from error
        except ray.exceptions.RayActorError as error:
            raise SlotDied(f"{name} has died: {_reason(error)}") from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{name}: {_first_line(error)}") from error
        if "error" in answer:
            said = f"{name} refuses `{method}`: {answer['error']}"
            if not answer.get("stale"):
                raise SlotRefused(said)
            self._on_stale(said)
            raise StaleEpoch(said)
        return dict(answer)

    async def _in_thread(self, limit_s: float, call: Callable[..., T], *arguments: Any) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await self._run_in_thread(call, arguments)
        except (EverstepError, asyncio.CancelledError):
            raise
        except TimeoutError as error:
            said = str(error) or f"no answer within {limit_s} s"
            raise ClusterError(f"Ray: {call.__name__}: {said}") from error
        except Exception as error:  # Ray raises of every kind when its head is out of reach
            text = f"{type(error).__name__}: {_first_line(error)}"
            raise ClusterError(f"Ray: {call.__name__}: {text}") from error

    async def _run_in_thread(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """In a thread that the interpreter does not wait for at its end, should it hang."""
        loop = asyncio.get_running_loop()
        await self._free_threads.acquire()
        outcome: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            self._free_threads.release()
            if outcome.done():  # nobody waits any more
                return
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]  # it is a T without error

        def run() -> None:
            result, error = None, None
            try:
                result = call(*arguments)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=run, name=call.__name__, daemon=True).start()
        return await outcome

    def _spawn(self, watch: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(watch)
        task.add_done_callback(_raise_in_loop)
        return task


def _raise_in_loop(task: asyncio.Task[None]) -> None:
    """A watch that breaks is a bug, and must not end unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "a watch of the cluster broke", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)


def _raise_start_failed(outcomes: Mapping[int, BaseException | None]) -> None:
    failed = {rank: error for rank, error in outcomes.items() if error is not None}
    for error in failed.values():
        if not isinstance(error, ClusterError):
            raise error
    if failed:
        text = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise StartFailed(tuple(failed), text)


def _or_raise(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _complete(held: Sequence[tuple[SnapshotInfo, str]]) -> list[Snapshot]:
    """Those of which some replica is there with all its parts."""
    parts: dict[tuple[int, int, int], set[int]] = {}
    wanted: dict[tuple[int, int, int], int] = {}
    paths: dict[tuple[int, int], str] = {}
    for one, path in held:
        replica = (one.generation, one.step, one.replica)
        parts.setdefault(replica, set()).add(one.part)
        wanted[replica] = one.parts
        paths[one.generation, one.step] = path
    whole = {replica[:2] for replica, there in parts.items() if len(there) == wanted[replica]}
    return [
        Snapshot(generation=generation, step=step, path=paths[generation, step])
        for generation, step in sorted(whole)
    ]


def _exit(rank: int, record: Mapping[str, Any], stacks: str) -> Exit:
    return Exit(
        rank=rank,
        status=record["status"],
        signal=record["signal"],
        log_tail=tuple(record["log_tail"]),
        stacks=stacks,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _reason(error: BaseException) -> str:
    """The one sentence of Ray's long text that says why."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in lines[0]:
        return f"it could not be created: {lines[-1]}"
    told = [line for line in lines if line.startswith(("The actor is", "The actor died because"))]
    return (told or lines)[-1].partition(". ")[0]
