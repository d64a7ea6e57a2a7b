"""Where the parts of a real daemon are put together and, at the end, taken down again.

It connects; what happens is decided in `fsm` and done by the performers.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from supervisor.cluster.own_servers import EmbeddedRay, EmbeddedRedis, authenticate
from supervisor.cluster.ray_cluster import RayCluster
from supervisor.cluster.user_code import RunCode
from supervisor.config import Settings, job_directory
from supervisor.console.control import Answer, Control, Request
from supervisor.console.display import Display
from supervisor.console.drills import Drills
from supervisor.console.preflight import must_be_ready
from supervisor.console.status import snapshot
from supervisor.console.status_from_files import log_tail, rank_log
from supervisor.daemon.adoption import (
    Inheritance,
    bring_down,
    go_on,
    inherit,
    leaving_workers_alone,
)
from supervisor.daemon.checked_commits import CheckedCommits
from supervisor.daemon.disk_problems import Troubles
from supervisor.daemon.lock import Lock, acquire
from supervisor.daemon.loop import Clock, Daemon, header_of
from supervisor.daemon.performers import Performers, start_of
from supervisor.daemon.roster import silence
from supervisor.daemon.signals import Signals
from supervisor.disk.run_directory import Watch, settle, store_name, why_short_lived
from supervisor.disk.run_files import RESULT_FILE, RunFiles
from supervisor.errors import (
    DeveloperError,
    DiskError,
    EverstepError,
    RunDirectoryLost,
    Superseded,
)
from supervisor.fsm import effects as x
from supervisor.fsm import events as e
from supervisor.fsm.job import Limits
from supervisor.fsm.states import TERMINAL, State
from supervisor.health.store import (
    Deadlines,
    HeartbeatMonitor,
    RedisStore,
    StoreUnavailable,
    Suspicion,
    watch,
)
from supervisor.health.store_address import address_of, take_password
from supervisor.record.journal import JOURNAL_FILE, Journal
from supervisor.record.metrics import StepSums, last_row
from supervisor.record.previous_run import (
    Past,
    job_after,
    past_of,
    past_on_disk,
    run_after,
    why_nothing_is_trained,
)
from supervisor.record.settings_in_force import InForce, digest_of, keep, recall, steps_before
from trainer.host.private_directories import remove_sockets, touch_sockets
from trainer.slot.orphans import how_they_ended
from trainer.state.snapshot import SnapshotError, sweep
from trainer.state.snapshot import directory_of as snapshot_directory
from trainer.wire.heartbeat import BeatMessage, canary_key
from trainer.wire.spec import DEFAULT_FAILURE_EVERY_S
from trainer.wire.store_address import StoreAddress

log = structlog.get_logger(__name__)

SAFE_STATES = {"", *(state.name for state in TERMINAL)}
REDIS_RETRY_S = 1.0
LOOPBACK_ONLY = (
    'heartbeats.redis_url = "local" is a redis-server on the loopback of the daemon\'s host, which '
    'they cannot reach; name one that all can, redis_url = "redis://HOST:PORT"'
)
EPOCH_LOOK_S = 1.0
CODE_LOOK_S = 5.0
TOUCH_EVERY_S = 3600.0  # what removes old files from /tmp counts in days
STEPS_LOOK_S = 5.0
_BEFORE_TRAINING = (State.PROVISIONING, State.INITIALIZING, State.RESTORING)
TAKE_DOWN_LIMIT_S = 30.0


async def run_daemon(
    settings: Settings,
    origins: Mapping[str, str],
    config_path: Path,
    terminal: bool,
    *,
    take_over: bool = False,
    keep_code: bool = False,
) -> int:
    """Run the job of these settings to its end; returns the exit status.

    With `take_over` a daemon that holds the job on this machine is ended first; with `keep_code` a
    new run goes on with the copy of the user's code that the last one had. Raises
    AlreadyRunning, Superseded, DiskError, ClusterUnusable, or DeveloperError with the story of a
    bug.
    """
    run_dir = job_directory(settings.job, config_path)
    with acquire(run_dir, take_over=take_over) as lock:
        settle(run_dir)
        password = take_password()
        journal = Journal(run_dir / JOURNAL_FILE, epoch=lock.epoch)
        if journal.truncated:
            log.warning("journal_truncated", bytes=journal.truncated, why="a torn last line")
        past = past_of(journal.records) if journal.records else _past_on_disk(run_dir)
        inherited, in_force = _agree(run_dir, settings, inherit(journal.records))
        is_complete = past.state == State.COMPLETED.name and inherited is None
        if is_complete and (message := _nothing_left(run_dir, settings)):
            log.info("already_completed", message=message)
            if terminal:
                print(message)
            return 0
        if inherited is None:
            must_be_ready(settings, config_path.resolve().parent, password)
        first = _Assembly(
            in_force.settings or settings,
            config_path,
            run_dir,
            lock,
            journal,
            past,
            inherited,
            terminal,
            in_force.changed,
        )
        status = await first.run(following=settings, password=password, keep_code=keep_code)
        if status is not None:
            return status
        # Its workers are gone: from here on the changed settings count, in a run of their own.
        journal = Journal(run_dir / JOURNAL_FILE, epoch=lock.epoch)
        past = past_of(journal.records)
        second = _Assembly(settings, config_path, run_dir, lock, journal, past, None, terminal, ())
        stops = first.daemon.stops
        status = await second.run(following=settings, password=password, stops=stops)
        assert status is not None, "nothing has changed meanwhile"
        return status


def _nothing_left(run_dir: Path, settings: Settings) -> str:
    """Return what to say of a job that is complete; "" if it is to train longer than it did."""
    steps, before = settings.trainer.steps, steps_before(run_dir)
    if before is not None and steps > before:
        log.info("goes_on", message=f"complete at {before} steps, and trainer.steps = {steps} now")
        return ""
    beyond = ""
    if before is not None and steps < before:
        beyond = f" at {before} steps, beyond trainer.steps = {steps}"
    return f"{settings.job.name} is complete{beyond}; nothing is left to do ({run_dir})"


def _agree(
    run_dir: Path, settings: Settings, inherited: Inheritance | None
) -> tuple[Inheritance | None, InForce]:
    """What to go on with, under which settings: workers that train keep those they began with."""
    if inherited is None:
        return None, InForce(settings=settings)
    in_force = recall(run_dir, inherited.settings_digest, settings)
    if inherited.job.state in TERMINAL:  # only its last orders are left: nothing starts any more
        return inherited, InForce(settings=in_force.settings or settings)
    if in_force.settings is None:
        why = "it is not known what its workers were started with"
    elif in_force.changed and inherited.job.state in _BEFORE_TRAINING:
        why = "its workers have not begun to train"
    else:
        if in_force.changed:
            consequence = "they count from the next restart of the workers"
            log.warning("settings_changed", keys=in_force.changed, consequence=consequence)
        return inherited, in_force
    consequence = f"they count at once, in a new run: {why}"
    log.warning("settings_changed", keys=in_force.changed or None, consequence=consequence)
    return None, InForce(settings=settings)


class _Assembly:
    def __init__(
        self,
        settings: Settings,
        config_path: Path,
        run_dir: Path,
        lock: Lock,
        journal: Journal,
        past: Past,
        inherited: Inheritance | None,
        terminal: bool,
        changed: tuple[str, ...],
    ) -> None:
        self.changed = changed
        self.settings, self.run_dir, self.lock, self.past = settings, run_dir, lock, past
        self.inherited = inherited
        self.run_number = run_after(past)
        self.config_path = config_path.resolve()
        self.config_dir = self.config_path.parent
        self.store_name = store_name(run_dir)
        self.code = RunCode(settings.trainer.task, self.config_dir, run_dir, self.run_number)
        self.terminal = terminal
        self.started_at = time.time()
        self.following = settings
        self.password = ""
        self.is_renewed = False
        self.signals = Signals(lambda number: self.daemon.interrupt(number))
        self.beats: dict[tuple[int, int], BeatMessage] = {}
        self.steps_done = StepSums(run_dir)
        self.result: dict[str, Any] = {}
        self.troubles = Troubles()
        self.embedded_redis: EmbeddedRedis | None = None
        self._mending: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()
        self.clock = Clock(wall=self.started_at, not_before=_last_at(journal))
        self.clock()  # it runs from its first reading on: now, not when Redis has started
        self.snapshots = snapshot_directory(run_dir)
        self.directory = Watch(run_dir)
        self.drills = Drills(settings.drills_allowed, settings.cluster.workers)
        if settings.cluster.address == "local":
            authenticate(run_dir)
        deadlines = settings.deadlines
        self.monitor = HeartbeatMonitor(
            Deadlines(deadlines, every_s=settings.heartbeats.every_s),
            lease_s=settings.heartbeats.lease_s,
            every_s=settings.heartbeats.every_s,
        )
        self.commits = CheckedCommits(
            run_dir, is_known=self._knows_commit, forward=self._take_report
        )
        self.cluster = RayCluster(
            settings.cluster,
            run_dir,
            lock.epoch,
            self.commits.take,
            self._on_slot_lost,
            on_cluster_lost=self._on_cluster_lost,
            why_one_host=LOOPBACK_ONLY if settings.heartbeats.redis_url == "local" else "",
            on_stale=self._on_stale,
            fence=lock.check,
            orphan_after_s=settings.recovery.orphan_after_s,
        )
        self.daemon = Daemon(
            job=inherited.job if inherited else job_after(past, self._limits()),
            journal=journal,
            clock=self.clock,
            header=header_of(
                job=settings.job.name,
                limits=asdict(self._limits()),
                settings_digest=digest_of(settings),
                run=self.run_number,
            ),
            performers_of=self._performers,
            fence=lock.check,
            renews=bool(changed),
        )

    # What the run begins with

    def _limits(self) -> Limits:
        settings, budgets = self.settings, self.settings.budgets
        return Limits(
            failures_max=budgets.failures_max,
            startup_failures_max=budgets.startup_failures_max,
            node_failures_max=settings.cluster.node_failures_max,
            preemptions_max=budgets.preemptions_max,
            rollbacks_max=settings.trainer.guards.rollbacks_max,
            window_s=budgets.window_s,
            no_progress_max=budgets.no_progress_max,
            same_error_max=budgets.same_error_max,
            backoff_base_s=budgets.backoff_base_s,
            backoff_max_s=budgets.backoff_max_s,
            last_call_s=settings.recovery.last_call_s,
            drain_s=settings.deadlines.drain_s,
            capacity_wait_s=settings.cluster.capacity_wait_s,
            checkpoints_kept=settings.checkpoint.keep,
            standby=settings.recovery.standby,
            seed=settings.trainer.seed,
        )

    def _performers(self, daemon: Daemon) -> Performers:
        settings = self.settings
        self.redis = StoreAddress(host="127.0.0.1", port=0)
        return Performers(
            workers=settings.cluster.workers,
            drain_s=settings.deadlines.drain_s,
            placement_timeout_s=settings.cluster.placement_timeout_s,
            capacity_wait_s=settings.cluster.capacity_wait_s,
            job=self.store_name,
            cluster=self.cluster,
            monitor=self.monitor,
            disk=RunFiles(self.run_dir),
            timers=daemon.timers,
            clock=self.clock,
            spec_of=self._spec,
            faults_of=self.drills.armed_for,
            result_of=self._result,
            on_outcome=daemon.post,
            on_action=daemon.note_action,
            on_bug=daemon.note_bug,
            on_change=daemon.wake,
            on_connected=self.signals.catch,
            fence=self.lock.check,
        )

    def _spec(self, effect: x.StartWorkers | x.PrepareStandby, rank: int) -> dict[str, Any]:
        """What the worker of a rank is told; the cluster adds what only it knows."""
        settings = self.settings
        return {
            "job": self.store_name,
            "run_dir": str(self.run_dir),
            "config_dir": str(self.config_dir),
            "code_dir": str(self.code.directory or ""),
            "generation": effect.generation,
            "epoch": self.lock.epoch,
            "role": "standby" if isinstance(effect, x.PrepareStandby) else "active",
            "rank": rank,
            "world_size": settings.cluster.workers,
            "beat_file": str(
                self.run_dir / "logs" / f"generation-{effect.generation}" / f"rank-{rank}.beat"
            ),
            "trainer": settings.trainer.model_dump(mode="json"),
            "checkpoint": settings.checkpoint.model_dump(mode="json"),
            **start_of(effect),
            "failure_every_s": self._failure_every_s(),
            "run": self.run_number,
            "snapshots": {
                "directory": str(self.snapshots),
                "every_steps": settings.recovery.snapshot_every_steps,
            },
            "heartbeat": {**asdict(self.redis), "every_s": settings.heartbeats.every_s},
            "drills": settings.drills_allowed,
            "faults": self.drills.armed_for(rank),
        }

    def _failure_every_s(self) -> float:
        """Mean time between failures as far as it was seen, with one assumed before the run."""
        seen_s = self.clock() - self.started_at + DEFAULT_FAILURE_EVERY_S
        failures = max(0, self.daemon.job.incidents - self.past.incidents)
        return round(seen_s / (1 + failures), 3)

    async def _result(self, effect: x.WriteResult) -> dict[str, Any]:
        await asyncio.to_thread(self.steps_done.read)
        last = self.steps_done.last or await asyncio.to_thread(last_row, self.run_dir) or {}
        daemon, job = self.daemon, self.daemon.job
        rows = daemon.chronicle.recoveries()
        step = job.result.get("step", max(job.committed_step, 0))
        self.result = {
            "state": effect.state,
            "exit_status": effect.exit_status,
            "reason": effect.reason,
            **(await self._why_failed(effect) if effect.state == State.FAILED.name else {}),
            "step": step,
            "steps_lost": self.steps_done.beyond(step),
            "params_digest": job.result.get("params_digest"),
            "loss": job.result.get("loss", last.get("loss")),
            "held_out_loss": job.result.get("held_out_loss"),
            "generations": job.generation,
            "failures": len(rows),
            "recoveries": rows,
            "goodput": self.steps_done.goodput(self.clock() - self.started_at),
        }
        return self.result

    async def _why_failed(self, effect: x.WriteResult) -> dict[str, Any]:
        """What a person needs who has nothing but this: the error, the log's end, what to do."""
        job = self.daemon.job
        found = {"traceback": self.daemon.chronicle.traceback, "remedy": effect.remedy or None}
        if job.incident is None or job.incident.generation != job.active:
            return found  # it failed for another reason
        log_file = rank_log(job.active, min(job.incident.ranks, default=0))
        tail = await asyncio.to_thread(log_tail, self.run_dir / log_file)
        return {**found, "log": log_file, "log_tail": tail}

    # What comes in from outside

    def _knows_commit(self, generation: int, step: int) -> bool:
        known = self.daemon.job.verified
        return any(of == generation and newest >= step for of, newest in known)

    def _take_report(self, record: dict[str, Any]) -> None:
        if record.get("report") == "drill":
            self.drills.struck(str(record.get("id")))
        roster = self.daemon.performers.rosters.get(record.get("generation", 0))
        if roster is None:
            log.info("late_word", generation=record.get("generation"), report=record.get("report"))
            return
        try:
            self.troubles.hear(record, self.clock())
            found = roster.take(record, self.clock())
        except (KeyError, TypeError, ValueError) as error:
            log.error("report_unreadable", record=record, why=repr(error))
            return
        for event in found:
            self.daemon.post(event)

    def _on_slot_lost(self, ranks: tuple[int, ...], why: str, node_lost: bool) -> None:
        kind = e.NodeLost if node_lost else e.SlotLost
        generation = self.daemon.job.active
        self.daemon.post(kind(at=self.clock(), generation=generation, ranks=ranks, why=why))

    def _on_cluster_lost(self, why: str) -> None:
        self.daemon.performers.forget_cluster()
        self.daemon.post(e.ClusterLost(at=self.clock(), why=why))

    def _on_stale(self, why: str) -> None:
        self.daemon.look_at_epoch()  # its own files may know who it is
        self.daemon.note_superseded(
            Superseded(f"{why}; this daemon ends without touching anything else")
        )

    def _on_suspicion(self, suspicion: Suspicion) -> None:
        standby = suspicion.generation == self.daemon.job.standby
        self.daemon.post(silence(suspicion, self.clock(), standby=standby))

    def _on_store_lost(self, why: str) -> None:
        self.blind_at = self.clock()
        self.daemon.post(e.HeartbeatStoreLost(at=self.blind_at, why=why))
        if self.embedded_redis is not None and (self._mending is None or self._mending.done()):
            self._mending = asyncio.create_task(self._mend_redis(self.embedded_redis))

    async def _mend_redis(self, server: EmbeddedRedis) -> None:
        """Our own server comes back at its old address, so that the workers find it."""
        while self.monitor.is_blind and not self._ends.is_set():
            try:
                if not server.is_alive():
                    await self._restart_redis(server)
            except (OSError, EverstepError) as error:  # a full disk: again, until there is space
                log.error("redis_not_restarted", why=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), REDIS_RETRY_S)

    async def _end_mending(self) -> None:
        """To its end, not in its midst: what it starts must not be left behind."""
        self._ends.set()
        if self._mending is not None:
            await self._mending

    async def _restart_redis(self, server: EmbeddedRedis) -> None:
        address = await asyncio.to_thread(server.ensure)
        if address == self.redis:
            log.info("redis_restarted", port=address.port)
            return
        # Its old port was taken. Who started before beats in vain, and is judged by its slot.
        log.warning("redis_moved", port=address.port, consequence="slots bear witness until then")
        self.redis = address
        await self.store.move(address)

    def _on_store_recovered(self) -> None:
        blind_s = round(self.clock() - self.blind_at, 3)
        self.daemon.post(e.HeartbeatStoreRecovered(at=self.clock(), blind_s=blind_s))

    def _on_standstill(self, seconds: float) -> None:
        event = e.StandstillEnded(at=self.clock(), seconds=round(seconds, 1))
        self.daemon.post(event)

    def _on_beats(self, beats: Mapping[tuple[int, int], BeatMessage]) -> None:
        self.beats = dict(beats)

    # What operators ask

    def _snapshot(self) -> dict[str, Any]:
        return snapshot(
            self.daemon,
            name=self.settings.job.name,
            steps=self.settings.trainer.steps,
            epoch=self.lock.epoch,
            started_at=self.started_at,
            beats=self.beats,
            changed=self.changed,
            code_changed=self.code.changed,
            drain_warning=self.daemon.drain_warning,
            disk=self.troubles.rows((self.daemon.job.active, self.daemon.job.standby)),
            drills=self.settings.drills_allowed,
            result=self.result,
            every_steps={
                "snapshot": self.settings.recovery.snapshot_every_steps,
                "checkpoint": self.settings.checkpoint.every_steps,
            },
        )

    async def _answer(self, request: Request) -> Answer:
        match request["command"]:
            case "status":
                return {"ok": True, **self._snapshot()}
            case "stop":
                now = bool(request.get("now"))
                event = e.StopRequested(at=self.clock(), by="operator", now=now)
                self.daemon.post(event)
                warning = "" if now else self.daemon.drain_warning
                return {"ok": True, **({"message": warning} if warning else {})}
            case "fault":
                return await self._order_drill(request)
            case other:
                return {"ok": False, "error": f"unknown command {other!r}"}

    async def _order_drill(self, request: Request) -> Answer:
        active, rank = self.daemon.job.active, request.get("rank")
        beat = self.beats.get((active, rank)) if isinstance(rank, int) else None
        return await self.drills.order(
            request,
            self.cluster,
            active,
            at_step=beat.step if beat else -1,
            steps=self.settings.trainer.steps,
        )

    # The run

    async def run(
        self, *, following: Settings, password: str, stops: int = 0, keep_code: bool = False
    ) -> int | None:
        """The exit status; None where the job goes on in another segment, under `following`.

        `password` is the store's, where the environment held one. `stops` are the signals that an
        assembly before this one had heard. `keep_code`: see `run_daemon`.
        """
        self.following, self.password = following, password
        self.signals.catch()
        self.daemon.repeat_interrupts(stops)
        if self.inherited is None:
            (self.run_dir / RESULT_FILE).unlink(missing_ok=True)
        self._say_what_begins()
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self._take_down)
                await self._connect_redis(stack)
                control = Control(self.run_dir, self._answer)
                await control.start()
                stack.push_async_callback(self._stop_listening, control)
                self._show(stack)
                self._spawn(stack, self._look_at_epoch())
                self._spawn(stack, self._keep_house(control))
                self._spawn(stack, self._follow_steps())
                status = await self._run(stack, keep_code=keep_code)
                self.is_renewed = status is None
            if status is not None:
                self.signals.settle(status)
            return status
        except DeveloperError as error:
            if lost := self.directory.look() or self.directory.look():
                raise lost from error  # which explains whatever went wrong with its files
            raise
        finally:
            self.daemon.journal.close()

    async def _run(self, stack: AsyncExitStack, *, keep_code: bool) -> int | None:
        await self._open_code(keep=keep_code)
        self._spawn(stack, self._look_at_code())
        if self.inherited is not None:
            return await self._go_on(self.inherited, stack)
        if self.past.state not in SAFE_STATES:
            # A daemon vanished: what it left must be gone before anything is chosen or started.
            await bring_down(self.daemon, self.past)
        await self._sweep_saves()
        try:
            keep(self.run_dir, self.settings, self.config_path)
        except OSError as error:
            raise DiskError(f"{self.run_dir} cannot be written: {error.strerror}") from error
        self._watch(stack)
        return await self.daemon.run(after=self.past.state)

    async def _open_code(self, *, keep: bool) -> None:
        try:
            await asyncio.to_thread(self.code.open, keep=keep)
        except OSError as error:
            raise DiskError(f"the code of the run cannot be copied: {error}") from error
        if self.code.unsearched:
            folders = [str(folder) for folder in self.code.unsearched[:5]]
            consequence = "too many files: what is edited in these folders counts at once"
            log.warning("code_not_copied", folders=folders, consequence=consequence)

    async def _look_at_code(self) -> None:
        """Edits of the user's code are named, as changed settings are."""
        why = ""
        while True:
            try:
                news = await asyncio.to_thread(self.code.look)
            except OSError as error:  # a folder that is being moved, or a disk that is away
                if why != (why := str(error)):
                    log.warning("code_not_compared", why=why)
                news = ()
            if news:
                consequence = "they count from the next run, after a stop"
                log.warning("code_changed", files=news, consequence=consequence)
            await asyncio.sleep(CODE_LOOK_S)

    async def _look_at_epoch(self) -> None:
        while True:
            await asyncio.sleep(EPOCH_LOOK_S)
            self.daemon.look_at_epoch()

    async def _follow_steps(self) -> None:
        """Little at a time, so that the end of a long run has little left to read."""
        while True:
            await asyncio.sleep(STEPS_LOOK_S)
            await asyncio.to_thread(self.steps_done.read)

    async def _keep_house(self, control: Control) -> None:
        """Notice what becomes of the run directory and of /tmp under a job of weeks."""
        touch_at = 0.0
        while True:
            await asyncio.sleep(EPOCH_LOOK_S)
            if (lost := await asyncio.to_thread(self.directory.look)) is not None:
                self.daemon.note_superseded(lost)
            try:
                await asyncio.to_thread(self.lock.check)
            except Superseded as error:  # what is in /tmp by that name is another daemon's
                self.daemon.note_superseded(error)
                return
            await control.mend()
            if time.monotonic() >= touch_at:
                touch_at = time.monotonic() + TOUCH_EVERY_S
                await asyncio.to_thread(self._touch)

    def _touch(self) -> None:
        touch_sockets(self.run_dir)
        if self.settings.cluster.address == "local":
            EmbeddedRay(self.run_dir).touch()

    @property
    def _is_superseded(self) -> bool:
        """Whether another daemon has what this one would end."""
        why = self.daemon.superseded
        return why is not None and not isinstance(why, RunDirectoryLost)

    async def _stop_listening(self, control: Control) -> None:
        await control.close(leave=self._is_superseded)

    def _say_what_begins(self) -> None:
        past = self.past
        if past.state:
            log.info(
                "job_resumed" if past.committed_step >= 0 else "job_restarted",
                after=past.state,
                committed_step=past.committed_step,
                next_generation=past.generation + 1,
                run_dir=str(self.run_dir),
            )
        else:
            log.info("job_begins", name=self.settings.job.name, run_dir=str(self.run_dir))
        if why := why_short_lived(self.run_dir):
            log.warning("run_dir_is_temporary", why=why)
        if message := why_nothing_is_trained(past, self.settings.trainer.steps):
            log.warning("nothing_is_trained", message=message)

    async def _connect_redis(self, stack: AsyncExitStack) -> None:
        heartbeats = self.settings.heartbeats
        if heartbeats.redis_url == "local":
            self.embedded_redis = EmbeddedRedis(self.run_dir)
            self.redis = await asyncio.to_thread(self.embedded_redis.ensure)
        else:
            self.redis = address_of(heartbeats, self.config_dir, self.password)
        self.store = RedisStore(job=self.store_name, address=self.redis)
        stack.push_async_callback(self._leave_store, self.store)
        self.daemon.performers.store = self.store

    async def _leave_store(self, store: RedisStore) -> None:
        """Take the canary away: a store that others share keeps nothing of this job."""
        if self._is_superseded:
            await store.close()
            return
        with suppress(StoreUnavailable):
            await store.delete([canary_key(self.store_name)])
        await store.close()

    def _show(self, stack: AsyncExitStack) -> None:
        display = Display(self._snapshot, terminal=self.terminal)
        task = asyncio.create_task(display.run())

        async def end() -> None:
            display.stop()
            await task

        stack.push_async_callback(end)

    async def _go_on(self, inherited: Inheritance, stack: AsyncExitStack) -> int | None:
        with leaving_workers_alone(self.daemon):
            await self.daemon.performers.connect()
        self._watch(stack)
        ended = how_they_ended(self.run_dir, inherited.job.active)
        return await go_on(self.daemon, inherited, epoch=self.lock.epoch, ended=ended)

    def _watch(self, stack: AsyncExitStack) -> None:
        store = self.daemon.performers.store
        assert store is not None
        self._spawn(
            stack,
            watch(
                job=self.store_name,
                monitor=self.monitor,
                store=store,
                witness=self.cluster.witness,
                every_s=self.settings.heartbeats.every_s,
                on_suspicion=self._on_suspicion,
                on_store_lost=self._on_store_lost,
                on_store_recovered=self._on_store_recovered,
                on_beats=self._on_beats,
                on_standstill=self._on_standstill,
            ),
        )

    def _spawn(self, stack: AsyncExitStack, watch: Coroutine[Any, Any, None]) -> None:
        """Let something watch until the end; one that breaks is a bug."""
        watcher = asyncio.create_task(watch)
        watcher.add_done_callback(self._watcher_ended)

        async def end() -> None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

        stack.push_async_callback(end)

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self.daemon.note_bug(error)

    async def _sweep_saves(self) -> None:
        """Nobody lives, so what is unfinished now stays so.

        Snapshots count only if a daemon vanished: a job that ended left none that matter.
        """
        try:
            if self.past.state in SAFE_STATES:
                await asyncio.to_thread(sweep, self.snapshots)
        except (OSError, SnapshotError) as error:
            log.warning("snapshots_not_swept", why=str(error))
        try:
            for path in await RunFiles(self.run_dir).sweep_unfinished():
                log.info("unfinished_save_deleted", path=str(path))
        except OSError as error:
            log.warning("unfinished_saves_not_deleted", why=str(error))

    async def _take_down(self) -> None:
        """End what this daemon started, and nothing else; each step whatever the others do."""
        await _bounded("redis", self._end_mending)
        if self._is_superseded:
            await _bounded("calls", self.daemon.performers.call_off)
            await _bounded("ray", self._leave_ray)
            return
        for name, step in (
            ("calls", self.daemon.performers.call_off),
            ("slots", self._release_slots),
            ("ray", self._leave_ray),
            ("redis", self._stop_redis),
            ("sockets", self._remove_sockets),
        ):
            await _bounded(name, step)

    async def _release_slots(self) -> None:
        """A run that goes on in another one needs its snapshots."""
        await self.cluster.release(forget=not self.is_renewed)

    async def _leave_ray(self) -> None:
        own = self.settings.cluster.address == "local" and not self._is_superseded
        kept = self.is_renewed and self.following.cluster.address == "local"
        await self.cluster.disconnect(stop_head=own and not kept)

    async def _remove_sockets(self) -> None:
        """A slot that was killed has left that of its last coordinator."""
        await asyncio.to_thread(remove_sockets, self.run_dir)

    async def _stop_redis(self) -> None:
        kept = self.is_renewed and self.following.heartbeats.redis_url == "local"
        if self.embedded_redis is not None and not kept:
            await asyncio.to_thread(self.embedded_redis.stop)


async def _bounded(name: str, step: Callable[[], Any]) -> None:
    try:
        async with asyncio.timeout(TAKE_DOWN_LIMIT_S):
            await step()
    except (TimeoutError, OSError, EverstepError) as error:
        log.error("not_taken_down", what=name, why=str(error) or repr(error))


def _past_on_disk(run_dir: Path) -> Past:
    try:
        past = past_on_disk(run_dir)
    except OSError as error:
        raise DiskError(f"{run_dir} cannot be read: {error}") from error
    if past.state:
        log.warning(
            "journal_missing",
            consequence="the job goes on from what else is on the disk, with fresh budgets",
            committed_step=past.committed_step,
            next_generation=past.generation + 1,
        )
    return past


def _last_at(journal: Journal) -> float:
    for record in reversed(journal.records):
        if record["kind"] == "move":
            return float(record["event"]["at"])
        if record["kind"] == "header":
            return float(record.get("at", 0.0))
    return 0.0
