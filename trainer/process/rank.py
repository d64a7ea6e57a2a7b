"""The JAX process of one rank and generation: `python -m trainer.process --reports FD --orders FD`.

With `--spare` it imports all that it will need, and is told later which rank it is.
Reads its spec and orders as JSON lines from one descriptor, writes reports as JSON lines to the
other, and ends only by a signal, by `os._exit`, or with its parent: never through JAX's barriers at
exit. Both descriptors are its own: no process that the task starts or forks reads or reports.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import math
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import structlog

from trainer.host.processes import die_with_parent, raise_file_limit
from trainer.host.tolerant_output import ERROR_SUFFIX, Tolerant, tolerant_text
from trainer.process.drills import Drills
from trainer.process.forked_copy import Aside
from trainer.wire import heartbeat
from trainer.wire.faults import Fault, FaultError
from trainer.wire.heartbeat import Beat, BeatSender
from trainer.wire.spec import RestorePoint, SpecError, WorkerSpec, read_skips

log = structlog.get_logger()

DISK_NEWS_EVERY_S = 60.0
Skips = tuple[tuple[int, int], ...]

GO_WAIT_S = 5.0
"""How long rank 0 waits, between two steps, for the others to know where to stop."""

RETRACE_AFTER_S, RETRACE_LIMIT_S = 5.0, 600.0
"""How long a standby is left alone before its program is traced again, for comparison, and how long
that may take: it gets only the time of a processor that nobody else wants."""

_STARTED = time.monotonic()
_START_PHASES = frozenset({"initialize", "compile", "restore"})


class Reports:
    """The pipe to the slot: one write per report, from any thread of this process alone."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # a program that the task starts must not have it
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, report: str, **fields: Any) -> None:
        """Write one report; a reader that is gone ends the process. Silent in a forked copy."""
        if os.getpid() != self._pid:
            return
        line = json.dumps({"report": report, "at": time.time(), **fields}) + "\n"
        with self._lock:
            try:
                os.write(self._descriptor, line.encode())
            except BrokenPipeError:
                os._exit(1)


class DiskNews:
    """What cannot be written, told once a minute at most, and when it can be again."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._told: dict[str, float] = {}
        self._lasting: set[str] = set()

    def tell(self, what: str, why: str) -> None:
        """`why` is "" when it can be written again."""
        now = time.monotonic()
        if why and now - self._told.get(what, -math.inf) >= DISK_NEWS_EVERY_S:
            self._told[what] = now
            self._lasting.add(what)
            self._reports.send("disk", what=what, why=why)
        elif not why and what in self._lasting:
            self._lasting.discard(what)
            self._reports.send("disk", what=what, why="")


class WorkerBeat(Beat):
    """A beat that also reports the phases of a start, and triggers drills in the phase they name.

    A forked copy of the process has no part in it: one that comes back into the loop ends here,
    since it would train, write and save as the rank does.
    """

    def __init__(self, path: str, reports: Reports, drills: Drills) -> None:
        super().__init__(path)
        self._reports, self._drills = reports, drills
        self._pid = os.getpid()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase; see `Beat.enter`."""
        if os.getpid() != self._pid:
            print(
                f"pid {os.getpid()} was forked by the task of pid {self._pid} and came back into "
                "its loop: end such a process by os._exit, or use multiprocessing",
                file=sys.stderr,
            )
            os._exit(1)
        super().enter(phase, step)
        if phase in _START_PHASES:
            self._reports.send("phase", phase=phase)
        self._drills.entered(phase, self.step)

    def tick(self) -> None:
        """See `Beat.tick`; a forked copy makes no progress for its rank."""
        if os.getpid() == self._pid:
            super().tick()


class Orders:
    """What the slot asked for; filled by a thread, looked at by the loop between two steps."""

    def __init__(self) -> None:
        self.stop_asked = threading.Event()
        self.go = threading.Event()
        self.go_wait_s = GO_WAIT_S
        self.standby: queue.SimpleQueue[tuple[bool, RestorePoint | None, Skips]] = (
            queue.SimpleQueue()
        )
        """(whether it is promoted, where to start, what to leave out); before that it may be told
        what to load."""
        self.promoted = False
        self.stop_after: int | None = None


class Worker:
    """One rank: starts, trains, reports, obeys."""

    def __init__(self, spec: WorkerSpec, reports: Reports, disk: DiskNews) -> None:
        self.spec, self.reports, self.disk = spec, reports, disk
        self._pid = os.getpid()
        self._point = spec.restore_point
        self._stepped = self._has_retraced = False
        self.orders = Orders()
        self.drills = Drills(self._announce)
        self.beat = WorkerBeat(spec.beat_file, reports, self.drills)
        if self.beat.no_file:
            disk.tell("beat", self.beat.no_file)
        for fault in spec.faults:
            self._arm(fault)

    def run(self) -> None:
        """Train to the end, or to the stop; then wait. Every error is reported, none escapes."""
        try:
            self._train()
        except BaseException as error:  # reported in full: the process ends with it
            if os.getpid() != self._pid:
                _end_forked(error)
            try:
                self._report_error(error)
            finally:
                os._exit(1)  # whatever happens: JAX's barriers at exit would hold the process
        while True:  # the slot ends this process when it sees fit
            self.orders.stop_asked.wait()
            self.orders.stop_asked.clear()
            self.reports.send("saved", step=self._done)

    def obey(self, lines: IO[bytes]) -> None:
        """Read orders until the slot is gone; then there is nobody to train for."""
        for line in lines:
            try:
                self._obey(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                log.warning("order refused", order=line.decode(errors="replace"), why=str(error))
        os._exit(0)

    def _train(self) -> None:
        self.beat.enter("initialize")
        self._send_beats()
        watchdog = threading.Timer(self.spec.join_timeout_s, self._join_timed_out)
        watchdog.daemon = True
        watchdog.start()
        from trainer.host import environment

        environment.join_world(
            coordinator=self.spec.coordinator,
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            join_timeout_s=self.spec.join_timeout_s,
        )
        from trainer.compute.step import make_layout

        layout = make_layout(self.spec.trainer.mesh)
        watchdog.cancel()
        trainer = self._trainer(layout)
        trainer.build()
        from trainer.training.free_loop import FreeLoop

        if isinstance(trainer, FreeLoop):
            self._follow(trainer)
        else:
            self._tell_ready(self._start(trainer))
            self._drive(trainer)

    def _start(self, trainer: Any) -> Any:
        """Have it hold its starting state, when its time has come."""
        if self.spec.role == "standby":
            return self._stand_by(trainer)
        return trainer.restore(self._point)

    def _tell_ready(self, ready: Any) -> None:
        self.reports.send(
            "ready",
            step=ready.step,
            environment=dict(ready.environment),
            differences=list(ready.differences),
            unigram_entropy=ready.facts.get("unigram_entropy"),
            parameters=ready.facts.get("parameters"),
        )
        log.info("ready", step=ready.step, differences=list(ready.differences))

    def _stand_by(self, trainer: Any) -> Any:
        """Do what can be done before there is a state, then wait for the order to take over.

        What to load may be told before the promotion, while the generation that trained is ended.
        """
        if self.orders.standby.empty():
            trainer.warm_up()
            self._say_standing_by()
        loaded: tuple[RestorePoint | None, Any] | None = None
        while True:
            promoted, point, skips = self._next_order(trainer)
            trainer.skip(skips)
            if promoted:
                self._point = point
                return loaded[1] if loaded and loaded[0] == point else trainer.restore(point)
            loaded = self._preload(trainer, point)
            self.beat.enter("wait")

    def _say_standing_by(self) -> None:
        self.beat.enter("wait")
        seconds = round(time.monotonic() - _STARTED, 3)
        self.reports.send("standing_by", seconds=seconds, rss_bytes=_resident_bytes())
        log.info("standing by", seconds=seconds)

    def _next_order(self, trainer: Any) -> tuple[bool, RestorePoint | None, Skips]:
        """Wait for it; where it stays quiet, the program is traced again, once per node.

        By a copy of this process, which is ended by the first order: would the task be traced now
        as it was for this run?
        """
        if self.spec.local_rank != 0 or not trainer.may_retrace or self._has_retraced:
            return self.orders.standby.get()
        try:
            return self.orders.standby.get(timeout=RETRACE_AFTER_S)
        except queue.Empty:
            self._has_retraced = True
        copy = Aside(functools.partial(_retraced, trainer))
        threading.Thread(target=self._report_retraced, args=(copy,), daemon=True).start()
        try:
            return self.orders.standby.get()
        finally:
            copy.end()

    def _report_retraced(self, copy: Aside) -> None:
        started = time.monotonic()
        difference = copy.answer(RETRACE_LIMIT_S)
        seconds = round(time.monotonic() - started, 3)
        log.info("program_retraced", difference=difference, seconds=seconds)
        if difference is not None:
            self.reports.send("program_retraced", difference=difference, seconds=seconds)

    def _await_turn(self, loop: Any) -> None:
        """Stand by where nothing may be done ahead."""
        self._say_standing_by()
        promoted = False
        while not promoted:
            promoted, self._point, skips = self.orders.standby.get()
            loop.skip(skips)

    def _preload(
        self, trainer: Any, point: RestorePoint | None
    ) -> tuple[RestorePoint | None, Any] | None:
        """A restore point that is damaged is told of when it counts."""
        try:
            return point, trainer.restore(point)
        except Exception as error:
            if not _is_rejection(error):
                raise
            log.warning("not loaded ahead", why=str(error))
            return None

    def _trainer(self, layout: Any) -> Any:
        from trainer.task import Context
        from trainer.training.free_loop import trainer_for

        spec = self.spec
        return trainer_for(
            layout=layout,
            context=Context(
                rank=spec.rank,
                world_size=spec.world_size,
                local_rank=spec.local_rank,
                node_rank=spec.node_rank,
                generation=spec.generation,
                config_dir=spec.config_dir,
                code_dir=spec.code_dir,
                settings=spec.trainer,
                tick=self.beat.tick,
            ),
            checkpoints=spec.checkpoint,
            job_dir=Path(spec.run_dir),
            beat=self.beat,
            restore_from=spec.restore_point,
            on_outcome=self._report_outcome,
            snapshots=spec.snapshots,
            executables=Path(spec.run_dir) / "executables",
            run=spec.run,
            skips=spec.skips,
            failure_every_s=spec.failure_every_s,
        )

    def _drive(self, trainer: Any) -> None:
        self.drills.flip_bit = trainer.flip_bit
        with self._numbers_watched():
            for report in trainer.run():
                if self._after(trainer, report):
                    return
            self._complete(trainer.finish())

    @contextlib.contextmanager
    def _numbers_watched(self) -> Iterator[None]:
        from trainer.training.guards import NumbersDiverged, ReplicasDiverged

        try:
            yield
        except (NumbersDiverged, ReplicasDiverged) as error:
            self._tell_of_the_numbers(error)
            threading.Event().wait()  # the supervisor decides, and ends this process

    def _tell_of_the_numbers(self, error: Any) -> None:
        self.beat.enter("wait")
        log.error("the numbers went wrong", why=str(error))
        if anomaly := getattr(error, "anomaly", None):
            self.reports.send(
                "numbers_diverged",
                step=error.step,
                batch=error.batch,
                metric=anomaly.metric,
                value=str(anomaly.value),
                policy=anomaly.policy,
                why=anomaly.why,
            )
        else:
            self.reports.send(
                "replicas_diverged",
                step=error.step,
                agreed_step=error.agreed_step,
                ranks=list(error.ranks),
                why=error.why,
            )

    def _follow(self, loop: Any) -> None:
        """A loop of the user's own drives itself, and asks between its steps."""
        start = functools.partial(self._start, loop)
        if self.spec.role == "standby" and not loop.runs_ahead:
            self._await_turn(loop)
            start = functools.partial(loop.restore, self._point)
        after = functools.partial(self._after, loop)
        with self._numbers_watched():
            finish = loop.follow(start, self._tell_ready, after)
            if finish is not None:
                self._complete(finish)

    def _after(self, trainer: Any, report: Any) -> bool:
        """What a finished step gives rise to; whether it was the last before a stop."""
        if not self._stepped:
            self._stepped = True
            from trainer.host import environment

            self.reports.send(
                "stepped",
                step=report.step,
                rss_bytes=_resident_bytes(),
                device_bytes=environment.device_memory_bytes(),
            )
        if report.held_out_loss is not None:
            log.info("evaluated", step=report.step, held_out_loss=report.held_out_loss)
        self._agree_on_stop(report.step + 1)
        stop_after = self.orders.stop_after
        if stop_after is None or report.step < stop_after or not trainer.holds_state:
            return False
        self._done = trainer.save(wait=True)
        self.beat.enter("wait")
        self.reports.send("saved", step=self._done)
        self.orders.stop_asked.clear()
        return True

    def _complete(self, finish: Any) -> None:
        self._done = finish.step
        self.beat.enter("wait")
        self.reports.send(
            "completed",
            step=finish.step,
            params_digest=finish.params_digest,
            loss=_finite(finish.loss),
            held_out_loss=_finite(finish.held_out_loss),
            unigram_entropy=finish.facts.get("unigram_entropy"),
        )
        log.info("completed", step=finish.step, params_digest=finish.params_digest)

    def _agree_on_stop(self, following: int) -> None:
        """On rank 0, when a stop was asked for: name the last step, let the others hear of it.

        They cannot finish that step before this rank has done its part, so none runs past it.
        """
        last = following >= self.spec.trainer.steps
        if self.spec.rank or last or not self.orders.stop_asked.is_set():
            return
        self.orders.stop_asked.clear()
        self.reports.send("stopping", after_step=following)
        self.beat.enter("wait")
        if self.spec.world_size == 1 or self.orders.go.wait(self.orders.go_wait_s):
            self.orders.stop_after = following
        else:
            log.warning("stop called off: the others were not told", after_step=following)
        self.orders.go.clear()

    def _obey(self, order: Mapping[str, Any]) -> None:
        kind = order["order"]
        if kind == "stop":
            self.orders.go_wait_s = float(order.get("go_wait_s", GO_WAIT_S))
            self.orders.stop_asked.set()
        elif kind == "go":
            self.orders.go.set()
        elif kind == "stop_after":
            self.orders.stop_after = int(order["step"])
            self.orders.stop_asked.set()
            self.reports.send("acknowledged", order=kind)
        elif kind in ("preload", "promote"):
            self._take_over(order, promoted=kind == "promote")
        elif kind == "fault":
            self._arm(Fault.from_dict(order))
        else:
            raise ValueError(f"order is {kind!r}, which this version does not know")

    def _take_over(self, order: Mapping[str, Any], *, promoted: bool) -> None:
        if self.spec.role != "standby" or self.orders.promoted:
            raise ValueError("only a standby can be promoted, and only once")
        given = order["restore_point"]
        point = None
        if given is not None:
            point = RestorePoint.from_dict("order.restore_point", given)
        if promoted and self.spec.drills and "faults" in order:
            self.drills.replace([Fault.from_dict(fault) for fault in order["faults"]])
        skips = read_skips("order.skips", order.get("skips", ()))
        self.orders.promoted = promoted
        self.orders.standby.put((promoted, point, skips))

    def _arm(self, fault: Fault) -> None:
        if not self.spec.drills:
            log.warning("fault refused: this job allows no drills", id=fault.id, kind=fault.kind)
            return
        self.drills.order(fault)

    def _announce(self, fault: Fault) -> None:
        log.warning("drill", id=fault.id, kind=fault.kind, phase=self.beat.phase)
        self.reports.send("drill", id=fault.id, kind=fault.kind)

    def _send_beats(self) -> None:
        store = self.spec.heartbeat
        if store is None:
            return
        BeatSender(
            self.beat,
            key=heartbeat.beat_key(self.spec.job, self.spec.generation, self.spec.rank),
            generation=self.spec.generation,
            rank=self.spec.rank,
            every_s=store.every_s,
            connect=heartbeat.connect(store),
        ).start()

    def _join_timed_out(self) -> None:
        """Speak before JAX does: it would end the process with SIGABRT, and no word."""
        text = f"not all ranks joined within join_timeout_s = {self.spec.join_timeout_s:g} s"
        error = {"type": "JoinTimedOut", "message": text, "frame": "", "traceback": text}
        self._send_raised({**error, "user": False}, self.beat.phase, startup=True)
        os._exit(1)

    def _report_outcome(self, outcome: Any) -> None:
        from trainer.state.checkpoint import Committed
        from trainer.state.snapshot_writer import Interval, SnapshotFailed, SnapshotsResumed
        from trainer.training.guards import BatchSkipped
        from trainer.training.task_loop import CheckpointInterval, MetricsChanged

        if isinstance(outcome, MetricsChanged):
            self.disk.tell("metrics", outcome.why)
            return
        if isinstance(outcome, Interval):
            cost_s = round(outcome.cost_s, 6)
            log.info("snapshot interval", every_steps=outcome.every_steps, cost_s=cost_s)
            self.reports.send("snapshot_interval", every_steps=outcome.every_steps, cost_s=cost_s)
        elif isinstance(outcome, SnapshotFailed):
            log.warning("snapshot failed", step=outcome.step, error=outcome.error)
            self.reports.send("snapshot_failed", step=outcome.step, error=outcome.error)
            self.disk.tell("snapshots", outcome.error)
        elif isinstance(outcome, SnapshotsResumed):
            self.disk.tell("snapshots", "")
        elif isinstance(outcome, BatchSkipped):
            told = {"metric": outcome.metric, "value": str(outcome.value)}
            log.warning("step left out", step=outcome.step, **told)
            self.reports.send("batch_skipped", step=outcome.step, **told)
        elif isinstance(outcome, CheckpointInterval):
            cost_s = round(outcome.cost_s, 6)
            log.info("checkpoint interval", every_steps=outcome.every_steps, cost_s=cost_s)
            self.reports.send("checkpoint_interval", every_steps=outcome.every_steps, cost_s=cost_s)
        elif isinstance(outcome, Committed):
            self.reports.send(
                "checkpoint_committed",
                step=outcome.step,
                path=outcome.path,
                seconds=round(outcome.seconds, 4),
                bytes=outcome.bytes,
                agreed_step=outcome.agreed_step,
            )
        else:
            log.warning("checkpoint failed", step=outcome.step, error=outcome.error)
            self.reports.send(
                "checkpoint_failed",
                step=outcome.step,
                error=outcome.error,
                disk_is_fine=outcome.disk_is_fine,
            )

    def _report_error(self, error: BaseException) -> None:
        from trainer.process import failures

        if _is_rejection(error):
            point = self._point
            assert point is not None, "nothing else can be rejected"
            log.error("restore rejected", why=str(error))
            self.reports.send(
                "restore_rejected",
                path=point.path,
                reason=error.reason,  # type: ignore[attr-defined]
                kind=point.kind,
                step=point.step,
                generation=point.generation,
            )
            return
        report = failures.describe(error, self.spec.trainer.task)
        self._keep_whole_text(error)
        self._send_raised(
            self._as_edited(report.to_dict()),
            self.beat.phase_of(error),
            collective=failures.lost_a_peer(error),
            startup=failures.could_not_start(error),
        )
        log.error("raised", error=report.message, exc_info=error)

    def _keep_whole_text(self, error: BaseException) -> None:
        """Beside the log, where the daemon finds it for its incident."""
        from trainer.process import failures

        text = failures.whole_text(error).encode("utf-8", "replace")
        if not text:
            return
        path = Path(self.spec.beat_file).with_suffix(ERROR_SUFFIX)
        try:
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(text[: failures.ERROR_BYTES_MAX])  # unflushed: recovery waits for us
        except OSError as refused:
            log.warning("error_text_not_kept", why=str(refused))

    def _as_edited(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """The same with the paths of the user's files, not of the copy that this run has."""
        copy, original = f"{self.spec.code_dir}/", f"{self.spec.config_dir}/"
        if not self.spec.code_dir:
            return dict(error)
        return {
            key: value.replace(copy, original) if isinstance(value, str) else value
            for key, value in error.items()
        }

    def _send_raised(
        self,
        error: Mapping[str, Any],
        phase: str,
        *,
        collective: bool = False,
        startup: bool = False,
    ) -> None:
        self.reports.send(
            "raised",
            error=dict(error),
            phase=phase,
            step=self.beat.step if self.beat.step >= 0 else None,
            collective=collective,
            startup=startup,
        )


def _retraced(trainer: Any) -> str:
    try:
        return str(trainer.retrace())
    except Exception as error:  # what it reads may be gone by now; this run does not need it
        return f"traced program: it cannot be traced any more ({error})"


def _is_rejection(error: BaseException) -> bool:
    # By name: the modules that define them import jax.
    of_ours = type(error).__module__.startswith("trainer.")
    return of_ours and type(error).__name__ in ("CheckpointRejected", "SnapshotRejected")


def main() -> None:
    """Become a rank: tie this process to its parent, read the spec, run."""
    _die_with_parent()
    os.umask(0o077)  # whatever a run leaves is its owner's
    streams = _tolerate_full_disks()
    _log_plainly()
    arguments = argparse.ArgumentParser(prog="python -m trainer.process", description=__doc__)
    arguments.add_argument("--reports", type=int, required=True, metavar="FD")
    arguments.add_argument("--orders", type=int, required=True, metavar="FD")
    arguments.add_argument("--spare", action="store_true", help="import first, then wait")
    options = arguments.parse_args()
    reports = Reports(options.reports)
    disk = DiskNews(reports)
    for stream in streams:
        stream.on_change = functools.partial(disk.tell, "log")
    faulthandler.enable(all_threads=False)  # short: the tail of the log must show the cause
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _stay_at_signals()
    raise_file_limit()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a drill's SIGSEGV leaves no core file
    os.set_inheritable(options.orders, False)
    orders = os.fdopen(options.orders, "rb")
    if options.spare:
        reports.send("started", pid=os.getpid())
        _import_everything()
    line = orders.readline()
    if not line:
        os._exit(0)
    if not options.spare:
        reports.send("started", pid=os.getpid())
    try:
        spec = WorkerSpec.from_json(line.decode())
    except (SpecError, FaultError) as error:
        log.error("spec refused", why=str(error))
        text = {"type": type(error).__name__, "message": str(error), "frame": "", "user": False}
        reports.send(
            "raised",
            error={**text, "traceback": str(error)},
            phase="initialize",
            step=None,
            collective=False,
            startup=False,
        )
        os._exit(1)
    if options.spare:
        _move_in(spec, disk)
    worker = Worker(spec, reports, disk)
    threading.Thread(target=worker.obey, args=(orders,), name="orders", daemon=True).start()
    worker.run()


_DEFAULTS: Mapping[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


def _stay_at_signals() -> None:
    """Let SIGTERM and SIGINT end what the task starts or forks, but not this process.

    Workers are ended by SIGKILL only. A signal that is ignored would stay ignored in every program
    that the task starts; one that has a handler is reset by exec, and here after a fork.
    """
    for number in _DEFAULTS:
        signal.signal(number, _stay)
        signal.siginterrupt(number, False)  # libraries are not used to interrupted calls
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_release_signals, after_in_child=_restore_signals
    )


def _stay(number: int, frame: Any) -> None:
    """Do nothing; the handler itself is what counts."""


_masks = threading.local()


def _hold_signals() -> None:
    """Around a fork: Python forgets in the copy what came before its handlers were restored."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFAULTS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _restore_signals() -> None:
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) is _stay:  # the task may have a handler of its own
            signal.signal(number, default)
    _release_signals()


def _end_forked(error: BaseException) -> None:
    """End a forked copy of the process as Python would, but without its exit handlers.

    JAX's are for the rank, which goes on.
    """
    status = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        traceback.print_exception(error)
    os._exit(status & 0xFF)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no NaN


def _import_everything() -> None:
    """What any rank imports; no device may be touched before the world is joined."""
    import redis  # noqa: F401

    from trainer.state import checkpoint

    checkpoint.import_orbax()
    log.info("spare: everything is imported", seconds=round(time.monotonic() - _STARTED, 3))


def _move_in(spec: WorkerSpec, disk: DiskNews) -> None:
    """From here on a spare writes and stands where a process of that generation would."""
    from trainer.slot.child import GENERATION, open_log

    os.chdir(spec.config_dir)
    os.environ[GENERATION] = str(spec.generation)  # by which what it starts will be found
    if spec.log_file is None:
        return
    descriptor, no_log = open_log(Path(spec.log_file))
    if no_log:
        disk.tell("log", no_log)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _tolerate_full_disks() -> list[Tolerant]:
    """`print` on a full disk would end the training with OSError, in the user's code or in ours."""
    sys.stdout, out = tolerant_text(1)
    sys.stderr, err = tolerant_text(2)
    return [out, err]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _log_plainly() -> None:
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    structlog.configure(processors=[structlog.processors.add_log_level, stamp, plain])


def _die_with_parent() -> None:
    die_with_parent()
    if os.getsid(0) != os.getpid() and os.getpgid(0) != os.getpid():
        os.setsid()
