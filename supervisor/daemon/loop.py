"""The daemon: one loop that takes facts in, writes down what the table says, and gives the orders.

The contract, in this order, for every event:

1. One event at a time goes to the machine, which is pure.
2. The moves are appended to the journal and are on the disk. While they cannot be, nothing is
   performed: the event waits, the operator is told, training goes on. A daemon whose epoch is
   over writes nothing, performs nothing, and ends.
3. One log line a move.
4. The effects go to the performers, unordered.
5. Every effect ends in an event, which comes back to 1. Nothing calls the machine sideways.
"""

import asyncio
import logging
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from supervisor.daemon.performers import Performers
from supervisor.daemon.timers import Timers
from supervisor.errors import DeveloperError, DiskError, EverstepError, JournalLost, Superseded
from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Job
from supervisor.fsm.machine import JobMachine, Move, UnexpectedEvent, table_digest
from supervisor.fsm.states import TERMINAL, State
from supervisor.record.journal import ROLL_BYTES, SCHEMA, Journal, Record
from supervisor.record.pending import Unfinished
from supervisor.record.recoveries import Chronicle

log = structlog.get_logger(__name__)

JOURNAL_RETRY_S = 1.0
STORY_LENGTH = 20
ONE_SIGNAL_S = 1.0
ROLL_RETRY_S = 60.0
_ENDED = ("", *(state.name for state in TERMINAL))
# What someone should look at although no worker was lost by it.
_WARNINGS = (
    e.BatchSkipped,
    e.CapacityMissing,
    e.CheckpointFailed,
    e.ClusterLost,
    e.DifferencesFound,
    e.ExitUnproven,
    e.HeartbeatStoreLost,
    e.HousekeepingFailed,
    e.LastSaveFailed,
    e.RestorePointRejected,
    e.RestorePointsUnreadable,
    e.SnapshotFailed,
    e.StandbyDisabled,
    e.StandbyLost,
)


class Clock:
    """Wall clock at the start plus monotonic time since: it never goes back, whatever NTP does."""

    def __init__(self, *, wall: float, not_before: float = 0.0) -> None:
        self._wall = max(wall, not_before)
        self._start: float | None = None

    def __call__(self) -> float:
        """Seconds since the epoch."""
        now = asyncio.get_running_loop().time()
        if self._start is None:
            self._start = now
        return round(self._wall + now - self._start, 6)


class Daemon:
    """One run of a job, from `job_started` to a terminal state.

    `performers_of(daemon)` makes the performers, whose callbacks are methods of the daemon. `fence`
    raises Superseded once a newer daemon has the job. A journal of more than `roll_bytes` rolls
    over in a quiet moment. With `renews` the run ends where workers would be started anew: others
    settings count for them, and a run of its own.
    """

    def __init__(
        self,
        *,
        job: Job,
        journal: Journal,
        clock: Clock,
        header: dict[str, Any],
        performers_of: Callable[["Daemon"], Performers],
        fence: Callable[[], None] = lambda: None,
        roll_bytes: int = ROLL_BYTES,
        renews: bool = False,
    ) -> None:
        self.machine = JobMachine(job)
        self.journal = journal
        self.clock = clock
        self.header = header
        self.timers = Timers(self._ring)
        self.performers = performers_of(self)
        self.last_move: Move | None = None
        self.chronicle = Chronicle.of(journal.records)
        for record in journal.records:
            if record["kind"] == "move":
                self._note_save(record["event"])
        self.journal_lost_since: float | None = None
        self.superseded: EverstepError | None = None
        """Why this daemon ends and leaves everything as it is."""
        self._inbox: deque[e.Event] = deque()
        self._awake = asyncio.Event()
        self._actions: list[dict[str, Any]] = []
        self._bug: BaseException | None = None
        self.stops = 0
        self._interrupted_at = -ONE_SIGNAL_S
        self._fence = fence
        self._unfinished = Unfinished()
        self._roll_bytes = roll_bytes
        self._roll_again_at = 0.0
        self._renews, self._is_renewed = renews, False
        moves = [record for record in journal.records if record["kind"] == "move"]
        self._trail: deque[Record] = deque(moves[-STORY_LENGTH:], STORY_LENGTH)

    @property
    def job(self) -> Job:
        """The facts as of now; to be read only."""
        return self.machine.job

    # Ways in

    def post(self, event: e.Event) -> None:
        """Put a fact into the inbox; from the loop's thread only."""
        self._inbox.append(event)
        self._awake.set()

    def note_action(self, record: dict[str, Any]) -> None:
        """An effect ended: a line of the journal, no decision."""
        self._actions.append({"kind": "action", **record})
        self._awake.set()

    def note_bug(self, error: BaseException) -> None:
        """Something that nobody foresaw: the daemon ends with its story."""
        self._bug = self._bug or error
        self._awake.set()

    def note_superseded(self, why: EverstepError) -> None:
        """A newer daemon has the job, or none can act: this one ends and touches nothing."""
        self.superseded = self.superseded or why
        self._awake.set()

    def look_at_epoch(self) -> None:
        """Notice a newer daemon although nothing happens that would be written."""
        try:
            self._fence()
        except Superseded as error:
            self.note_superseded(error)

    def wake(self) -> None:
        """Something changed that may let the run end."""
        self._awake.set()

    @property
    def drain_warning(self) -> str:
        """What a stop will probably lose; empty if its last save fits into `drain_s`."""
        save_s, drain_s = self.performers.save_s, self.performers.drain_s
        if save_s <= drain_s:
            return ""
        return (
            f"a save took {save_s:.1f} s and deadlines.drain_s is {drain_s:g} s: the last one may "
            f"be cut off, and the steps after {max(0, self.job.committed_step)} be lost"
        )

    def _note_save(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint_committed":
            self.performers.note_save(float(event["duration_s"]))

    def interrupt(self, number: int) -> None:
        """A signal: the first asks for a drain, the second for the end at once.

        What arrives within a second of the last one repeats it: a terminal that closes sends
        SIGHUP twice, and a session manager SIGTERM and SIGHUP.
        """
        at = self.clock()
        if at - self._interrupted_at < ONE_SIGNAL_S:
            log.info("signal_repeated", signal=signal.Signals(number).name)
            return
        self._interrupted_at = at
        self.stops += 1
        log.warning("signal_received", signal=signal.Signals(number).name, times=self.stops)
        if warning := self.drain_warning:
            log.warning("drain_is_short", why=warning)
        self._stop()

    def repeat_interrupts(self, stops: int) -> None:
        """Heed as many signals as the run before this one had received."""
        for self.stops in range(1, stops + 1):
            self._stop()

    def _stop(self) -> None:
        self.post(e.StopRequested(at=self.clock(), by="signal", now=self.stops > 1))

    def forget_rumours(self) -> None:
        """Whatever workers of an earlier run have said before this one begins."""
        self._inbox = deque(
            event for event in self._inbox if not isinstance(event, e.GenerationEvent)
        )

    def _ring(self, deadline: x.SetDeadline) -> None:
        self.post(e.DeadlinePassed(at=self.clock(), id=deadline.id, owner=deadline.owner))

    # The loop

    async def run(self, *, after: str) -> int | None:
        """Run the job to its end and return the exit status.

        None where the run is over and the job is not: it goes on in another one. `after` says how
        the previous run ended; where it did not, its recoveries are this one's too. Raises
        DeveloperError with the story of a bug, or Superseded.
        """
        job = self._job_record()
        if after in _ENDED:
            self.chronicle = Chronicle()
        else:
            job["told"] = self.chronicle.to_dict()
        self._trail.clear()
        await self._commit([self.header, job])
        self._inbox.appendleft(e.JobStarted(at=self.clock(), after=after))
        return await self._loop()

    async def go_on(
        self, restarted: e.SupervisorRestarted, pending: Sequence[x.Effect]
    ) -> int | None:
        """Go on where a daemon vanished, in its segment; see `run`.

        `pending` is what it had ordered and not seen done.
        """
        self.header = self.journal.records[0]
        self._unfinished = Unfinished(self.journal.records)
        await self._take(restarted)
        for effect in pending:
            self.performers.launch(effect)
        return await self._loop()

    async def _loop(self) -> int | None:
        self.journal.records = []  # they have been read, and may be many
        while self._bug is None:
            if self.superseded is not None:
                raise self.superseded
            if self._is_renewed:
                await self._write_actions()
                return None
            if self._inbox:
                await self._take(_merged(self._inbox))
            elif self._actions:
                await self._write_actions()
            elif self.job.state in TERMINAL and not self.performers.busy:
                return self.job.exit_status
            else:
                self._awake.clear()
                await self._awake.wait()
        raise DeveloperError(await self._story(self._bug))

    async def _take(self, event: e.Event) -> None:
        before = self.machine.job
        try:
            moves = self.machine.handle(event)
        except UnexpectedEvent as error:
            self.note_bug(error)
            return
        records = [{"kind": "move", **move.to_dict()} for move in moves]
        if self.job.state is State.RUNNING and before.state is not State.RUNNING:
            records.append(self._job_record())
        await self._commit(records)
        for record in records:
            if record["kind"] == "move":
                self.chronicle.take(record)
                self._note_save(record["event"])
                self._trail.append(record)
        self.timers.end_owners(self.job.owner)
        for move in moves:
            self.last_move = move
            _tell(move, self.job)
            if self._renews and move.target is State.RESTORING is not move.source:
                self._is_renewed = True  # what is ordered here is for the next run to do
                break
            for effect in move.effects:
                self.performers.launch(effect)
        self._roll_over()
        # Performers begin before the next event is taken, not after a busy inbox.
        await asyncio.sleep(0)

    async def _commit(self, records: list[dict[str, Any]]) -> None:
        """Return when the disk has the records; until then nothing else happens here."""
        actions, self._actions = self._actions, []
        while True:
            self.look_at_epoch()
            if self.superseded is not None:
                raise self.superseded
            try:
                self.journal.append([*actions, *records])
                break
            except DiskError as error:
                if self.journal_lost_since is None:
                    self.journal_lost_since = self.clock()
                    log.error("journal_lost", why=str(error), consequence="no order is given")
                if self.stops > 1:
                    self.note_superseded(
                        JournalLost(
                            f"{error}; so nothing can be stopped in order: the daemon ends, the "
                            "workers go on, and the same command goes on with them"
                        )
                    )
                    continue
                await asyncio.sleep(JOURNAL_RETRY_S)
        for record in (*actions, *records):
            self._unfinished.take(record)
        if self.journal_lost_since is not None:
            log.warning("journal_recovered", lost_s=round(self.clock() - self.journal_lost_since))
            self.journal_lost_since = None

    async def _write_actions(self) -> None:
        """Actions are no decisions: they may wait for the next line that must be on the disk."""
        self.look_at_epoch()
        if self.superseded is not None:
            return
        actions, self._actions = self._actions, []
        try:
            self.journal.append(actions, durable=False)
        except DiskError as error:
            log.warning("action_not_recorded", why=str(error))
            return
        for record in actions:
            self._unfinished.take(record)

    def _roll_over(self) -> None:
        """A long journal goes on in a new file, which begins with all that its next reader needs.

        What was ordered and not yet done goes along, as do the recoveries so far.
        """
        quiet = self.job.state is State.RUNNING and not self._inbox
        limit = self._roll_bytes if quiet else 4 * self._roll_bytes
        if self.journal.size < limit or self.clock() < self._roll_again_at:
            return
        self.look_at_epoch()
        if self.superseded is not None:
            return
        try:
            own = {key: self.header[key] for key in self.header if key not in ("seq", "epoch")}
            pending = [effect.to_dict() for effect in self._unfinished.of(self.job)]
            job = {**self._job_record(), "pending": pending, "told": self.chronicle.to_dict()}
            self.journal.roll({**own, "at": self.clock()}, job)
            self._unfinished = Unfinished([job])
        except DiskError as error:
            self._roll_again_at = self.clock() + ROLL_RETRY_S
            log.error("journal_not_rolled_over", why=str(error), retry_s=ROLL_RETRY_S)
        else:
            log.info("journal_rolled_over", part=self.journal.part)

    def _job_record(self) -> dict[str, Any]:
        return {"kind": "job", "job": self.job.to_dict()}

    async def _story(self, bug: BaseException) -> str:
        """The bug, what led to it, and where it came from: fit to be reported as it is."""
        trail = [
            f"  {move['event']['event']}: {move['source']} → {move['target']}"
            for move in self._trail
        ]
        where = "".join(traceback.format_exception(bug)).strip()
        story = "\n".join(["a bug of everstep; the last moves were:", *trail, where])
        record = {"kind": "action", "action": "bug", "outcome": "failed", "error": story}
        try:
            self.journal.append([*self._actions, {**record, "at": self.clock()}])
        except DiskError as error:
            log.error("journal_lost", why=str(error))
        return story


def header_of(
    *, job: str, limits: dict[str, Any], settings_digest: str, run: int
) -> dict[str, Any]:
    """The line that opens a segment of the journal."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        "job_name": job,
        "table": table_digest(),
        "limits": limits,
        "settings": settings_digest,
        "run": run,
    }


def _merged(inbox: deque[e.Event]) -> e.Event:
    """The next event; a thousand equal deaths in a row are one."""
    event = inbox.popleft()
    while inbox and isinstance(event, e.WorkerCrashed | e.SlotLost | e.NodeLost):
        other = inbox[0]
        if type(other) is not type(event):
            break
        assert isinstance(other, e.WorkerCrashed | e.SlotLost | e.NodeLost)
        same = replace(other, at=event.at, ranks=event.ranks)
        if isinstance(same, e.WorkerCrashed) and isinstance(event, e.WorkerCrashed):
            same = replace(same, detail=event.detail, step=event.step)
        if same != event:
            break
        event = replace(event, ranks=tuple(sorted({*event.ranks, *other.ranks})))
        inbox.popleft()
    return event


def _level(move: Move) -> int:
    """Return a level that alarms can use: errors end the job, warnings are incidents and such."""
    is_verdict = isinstance(move.event, e.RetryBudgetExhausted | e.RetryRuledOut)
    if is_verdict or move.target is State.FAILED is not move.source:
        return logging.ERROR
    opened = move.target is State.DRAINING is not move.source
    ordered = isinstance(move.event, e.StopRequested | e.TrainingCompleted)
    is_stale = move.why.startswith("stale")
    if (opened and not ordered) or (isinstance(move.event, _WARNINGS) and not is_stale):
        return logging.WARNING
    return logging.INFO


def _tell(move: Move, job: Job) -> None:
    facts = {
        key: value
        for key, value in move.event.to_dict().items()
        if key not in ("event", "at", "generation", "error", "slots", "hosts", "exits", "why")
    }
    if isinstance(move.event, e.SlotsPlaced):
        facts["hosts"] = [f"{host} ({address})" for _, host, address in move.event.hosts]
    error = getattr(move.event, "error", None)
    if error is not None:
        facts["error"] = error if isinstance(error, str) else error.get("message")
    if said := getattr(move.event, "why", ""):
        facts["because"] = said
    log.log(
        _level(move),
        move.event.name,
        source=move.source.name,
        target=move.target.name,
        generation=getattr(move.event, "generation", job.active),
        effects=[type(effect).__name__ for effect in move.effects],
        why=move.why,
        **facts,
    )
