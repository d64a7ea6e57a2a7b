"""Run a script in virtual time with the real daemon; the journal it leaves is a trace."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from supervisor.daemon.adoption import bring_down, go_on, inherit
from supervisor.daemon.loop import Clock, Daemon, header_of
from supervisor.daemon.performers import Performers, start_of
from supervisor.daemon.roster import silence
from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Limits
from supervisor.fsm.states import TERMINAL
from supervisor.health.store import Deadlines, HeartbeatMonitor, Suspicion, watch
from supervisor.record.journal import ROLL_BYTES, Journal, Record, read_history
from supervisor.record.previous_run import job_after, past_of
from tests.sim.world import Script, SimCluster, SimDisk, SimStore
from tests.supervisor.virtual import AUTO, VirtualLoop

SAFE_STATES = {state.name for state in TERMINAL}
JOB = "sim"
EVERY_S = 0.25
LEASE_S = 3.0
LIMIT_S = 100_000.0


@dataclass
class Sim:
    """A finished run."""

    status: int | None
    daemon: Daemon
    cluster: SimCluster
    disk: SimDisk
    store: SimStore
    records: list[Record]
    virtual_s: float

    @property
    def moves(self) -> list[Record]:
        return [record for record in self.records if record["kind"] == "move"]

    @property
    def names(self) -> list[str]:
        """The events in order."""
        return [move["event"]["event"] for move in self.moves]

    @property
    def states(self) -> list[str]:
        """The states as they were entered."""
        entered = ["PROVISIONING"]
        for move in self.moves:
            if move["target"] != entered[-1]:
                entered.append(move["target"])
        return entered

    def event(self, name: str) -> dict[str, Any]:
        """The first event of this name."""
        return next(move["event"] for move in self.moves if move["event"]["event"] == name)


Meddling = Callable[[Daemon, SimCluster], Any]


class Killed(BaseException):
    """SIGKILL of the daemon, right after a line of its journal."""


class MortalJournal(Journal):
    """A journal whose daemon dies as soon as line `last` is on the disk."""

    last = 10**9

    def append(self, records: Iterable[Record], *, durable: bool = True) -> None:
        super().append(records, durable=durable)
        if self._seq >= self.last:
            raise Killed


def simulate(
    path: Path,
    script: Script,
    *,
    limits: Limits | None = None,
    meddle: dict[float, Meddling] | None = None,
    epoch: int = 1,
    disk: SimDisk | None = None,
    die_after: int | None = None,
    dead_s: float = 2.0,
    roll_bytes: int = ROLL_BYTES,
    fence: Callable[[], None] = lambda: None,
    renews: bool = False,
    limit_s: float = LIMIT_S,
) -> Any:
    """Run to the end; a Sim. `meddle` maps virtual seconds to what is done to (daemon, cluster).

    With `die_after` the daemon is killed after that line and another starts `dead_s` later; None
    if there was nothing left to do for it. With `renews` that one goes on only until workers must
    be started anew, and the rest is a run of its own. Raises TimeoutError after `limit_s`.
    """
    loop = VirtualLoop()

    async def lives() -> Sim | None:
        kept = disk or SimDisk(script)
        kept.script = script
        cluster = SimCluster(script, kept)
        given = (path, script, limits or Limits(), cluster, kept)
        one = functools.partial(life, *given, roll_bytes=roll_bytes, fence=fence)
        try:
            if die_after is None:
                return await one(meddle or {}, epoch)
            try:
                return await one(meddle or {}, epoch, die_after)
            except Killed:
                await asyncio.sleep(dead_s)
                now = loop.time()
                # Who finds no daemon asks again.
                later = {max(at - now, 0.1): what for at, what in (meddle or {}).items()}
                records = Journal(path, epoch=0).records
                if inherit(records) is None and past_of(records).state in SAFE_STATES:
                    return None
                sim = await one(later, epoch + 1, renews=renews)
                return sim if sim.status is not None else await one({}, epoch + 1, anew=True)
        finally:
            await cluster.end_all()

    try:
        return loop.run_until_complete(asyncio.wait_for(lives(), limit_s))
    finally:
        loop.close()


async def life(
    path: Path,
    script: Script,
    limits: Limits,
    cluster: SimCluster,
    disk: SimDisk,
    meddle: dict[float, Meddling],
    epoch: int,
    die_after: int = 10**9,
    *,
    roll_bytes: int,
    fence: Callable[[], None],
    renews: bool = False,
    anew: bool = False,
) -> Sim:
    """One daemon, from its start to its end or its death."""
    store = SimStore(JOB, cluster)
    monitor = HeartbeatMonitor(
        Deadlines(SimpleNamespace(**AUTO), every_s=EVERY_S), lease_s=LEASE_S, every_s=EVERY_S
    )
    journal = MortalJournal(path, epoch=epoch)
    journal.last = die_after
    past = past_of(journal.records)
    inherited = None if anew else inherit(journal.records)
    clock = Clock(wall=1_000_000.0 * epoch)
    blind_at = 0.0

    def performers_of(daemon: Daemon) -> Performers:
        return Performers(
            workers=script.workers,
            drain_s=limits.drain_s,
            placement_timeout_s=60.0,
            capacity_wait_s=limits.capacity_wait_s,
            job=JOB,
            cluster=cluster,
            store=store,
            monitor=monitor,
            disk=disk,
            timers=daemon.timers,
            clock=clock,
            spec_of=_spec,
            result_of=_result,
            on_outcome=daemon.post,
            on_action=daemon.note_action,
            on_bug=daemon.note_bug,
            on_change=daemon.wake,
            fence=fence,
        )

    daemon = Daemon(
        job=inherited.job if inherited else job_after(past, limits),
        journal=journal,
        clock=clock,
        header=header_of(job=JOB, limits=asdict(limits), settings_digest="0" * 16, run=1),
        performers_of=performers_of,
        roll_bytes=roll_bytes,
        fence=fence,
        renews=renews,
    )

    def take(record: Record) -> None:
        roster = daemon.performers.rosters.get(record["generation"])
        for event in roster.take(record, clock()) if roster else []:
            daemon.post(event)

    def lose(ranks: tuple[int, ...], why: str, node_lost: bool) -> None:
        kind = e.NodeLost if node_lost else e.SlotLost
        daemon.post(kind(at=clock(), generation=daemon.job.active, ranks=ranks, why=why))

    def suspect(found: Suspicion) -> None:
        standby = found.generation == daemon.job.standby
        daemon.post(silence(found, clock(), standby=standby))

    def lost(why: str) -> None:
        nonlocal blind_at
        blind_at = clock()
        daemon.post(e.HeartbeatStoreLost(at=blind_at, why=why))

    def recovered() -> None:
        blind_s = round(clock() - blind_at, 3)
        daemon.post(e.HeartbeatStoreRecovered(at=clock(), blind_s=blind_s))

    cluster.on_record, cluster.on_slot_lost = take, lose
    watcher = asyncio.create_task(
        watch(
            job=JOB,
            monitor=monitor,
            store=store,
            witness=cluster.witness,
            every_s=EVERY_S,
            on_suspicion=suspect,
            on_store_lost=lost,
            on_store_recovered=recovered,
            on_beats=lambda beats: None,
            on_standstill=lambda seconds: None,
        )
    )
    loop = asyncio.get_running_loop()
    meddlings = [
        loop.call_later(seconds, what, daemon, cluster) for seconds, what in meddle.items()
    ]
    try:
        if inherited:
            status = await go_on(daemon, inherited, epoch=epoch, ended=script.orphans_ended)
        else:
            if past.state not in {"", *SAFE_STATES}:
                await bring_down(daemon, past)
            status = await daemon.run(after=past.state)
        if status is None:
            await daemon.performers.call_off()
            await cluster.release(forget=False)
    finally:
        cluster.on_record = lambda _: None
        cluster.on_slot_lost = lambda *_: None
        for meddling in meddlings:
            meddling.cancel()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        daemon.timers.clear()
        await daemon.performers.call_off()
        journal.close()
    return Sim(
        status=status,
        daemon=daemon,
        cluster=cluster,
        disk=disk,
        store=store,
        records=list(read_history(path)),
        virtual_s=loop.time(),
    )


async def _result(effect: x.WriteResult) -> dict[str, Any]:
    return effect.to_dict()


def _spec(effect: x.StartWorkers | x.PrepareStandby, rank: int) -> dict[str, Any]:
    role = "standby" if isinstance(effect, x.PrepareStandby) else "active"
    return {"rank": rank, "role": role, **start_of(effect)}
