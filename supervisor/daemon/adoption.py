"""Going on where a daemon vanished: the job from its journal, the workers from their slots.

Training has not stopped meanwhile, and nobody pays for the restart.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from supervisor.cluster.slots import ClusterError, ClusterOutOfReach
from supervisor.daemon.loop import Daemon
from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Job
from supervisor.fsm.states import TERMINAL, State
from supervisor.record.journal import Record
from supervisor.record.pending import unfinished
from supervisor.record.previous_run import Past
from supervisor.record.replay import rebuild

log = structlog.get_logger(__name__)

ADOPTION_LIMIT_S = 60.0
ADOPTION_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a daemon that vanished left: the job as it was, and what it had ordered."""

    job: Job
    pending: list[x.Effect]
    settings_digest: str


def inherit(records: Sequence[Record]) -> Inheritance | None:
    """Read the last segment of a journal.

    None where nothing is left to go on with, or another version of the table wrote it: then the
    next run drains what it finds and restores in a segment of its own.
    """
    job = rebuild(records)
    if job is None or job.active == 0:  # it had not even begun
        return None
    try:
        pending = unfinished(records, job)
    except (KeyError, TypeError):
        return None
    if job.state in TERMINAL and not pending:
        return None
    return Inheritance(job=job, pending=pending, settings_digest=str(records[0].get("settings")))


@contextmanager
def leaving_workers_alone(daemon: Daemon) -> Iterator[None]:
    """End the daemon, and nothing else, if the cluster is out of reach while it takes over.

    Raises ClusterOutOfReach, or Superseded if a newer daemon has the job.
    """
    try:
        yield
    except ClusterError as error:
        why = f"the cluster is out of reach: {error}"
        remedy = "whatever trains was left alone, and the same command goes on with it"
        daemon.note_superseded(ClusterOutOfReach(f"{why}; {remedy}"))
        assert daemon.superseded is not None
        raise daemon.superseded from error


async def bring_down(daemon: Daemon, past: Past) -> None:
    """End what an earlier daemon left that nobody can go on with: another table, other settings.

    Workers that train save first, if they can: the next run restores what they had reached. Raises
    ClusterOutOfReach if that cannot be asked for, or something cannot be proven gone.
    """
    performers = daemon.performers
    with leaving_workers_alone(daemon):
        await performers.connect()
        if past.state == State.RUNNING.name:
            children = await _adopt(daemon, past.placement)
            if children is not None and len(children.get(past.active, ())) == performers.workers:
                outcome = await performers.save_stray(past.active)
                told = outcome.to_dict()
                log.info("drained_for_a_new_run", outcome=told.pop("event"), **told)
            await performers.cluster.release(forget=False)
        await performers.sweep()
    daemon.forget_rumours()


async def _adopt(daemon: Daemon, placement: int) -> dict[int, dict[int, int]] | None:
    """Take over the slots; see `Cluster.adopt`. Ask again while there is doubt: it is no death.

    Raises ClusterError after ADOPTION_LIMIT_S, or at the second signal to stop.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ADOPTION_LIMIT_S
    while True:
        try:
            return await daemon.performers.cluster.adopt(placement)
        except ClusterError as error:
            over = loop.time() > deadline or daemon.stops > 1
            if over or daemon.superseded is not None:
                raise
            log.warning("slots_not_adopted_yet", why=str(error), retry_s=ADOPTION_PAUSE_S)
        await asyncio.sleep(ADOPTION_PAUSE_S)


async def go_on(
    daemon: Daemon,
    inherited: Inheritance,
    *,
    epoch: int,
    ended: Mapping[str, Any] | None = None,
) -> int | None:
    """Adopt what lives and run the job to its end; see `Daemon.run`.

    `ended` is how workers ended that were orphans. The cluster must be connected. Raises
    ClusterOutOfReach if it does not answer, or leftovers cannot be proven gone.
    """
    job, performers = inherited.job, daemon.performers
    performers.inherit(job)
    children = None
    has_slots = job.slots_placed and job.state not in TERMINAL
    with leaving_workers_alone(daemon):
        if has_slots:
            children = await _adopt(daemon, job.placement)
        if children is None:
            await performers.sweep()
    if children is not None:
        performers.watch_over(job, children)
    adopted = tuple(
        (generation, rank, pid)
        for generation, ranks in sorted((children or {}).items())
        if generation in (job.active, job.standby)
        for rank, pid in sorted(ranks.items())
    )
    if has_slots and children is None:
        for event in _without_slots(job, ended, daemon.clock()):
            daemon.post(event)
    restarted = e.SupervisorRestarted(
        at=daemon.clock(), epoch=epoch, adopted=adopted, slots=children is not None
    )
    return await daemon.go_on(restarted, inherited.pending)


def _without_slots(job: Job, ended: Mapping[str, Any] | None, at: float) -> Iterator[e.Event]:
    """What it means that no slot is left: orphans that finished or saved, or a loss."""
    common: dict[str, Any] = {"at": at, "generation": job.active}
    if ended is None:
        yield e.SlotsVanished(**common, why="gone when the daemon came back")
        return
    done = ended["completed"]
    if done is None:
        saved = f"step {ended['step']} is saved" if ended["saved"] else "nothing was saved"
        why = f"no daemon was heard of for {ended['after_s']:g} s; {saved}"
        yield e.WorkersOrphaned(**common, step=int(ended["step"]), why=why)
        return
    if job.state is State.INITIALIZING:
        yield e.WorkersInitialized(**common, step=job.restore_step)
    elif job.state is State.RESTORING:
        yield e.WorkersRestored(**common, step=job.restore_step)
    yield e.TrainingCompleted(
        **common,
        step=int(done["step"]),
        params_digest=str(done["params_digest"]),
        loss=done.get("loss"),
        held_out_loss=done.get("held_out_loss"),
    )
