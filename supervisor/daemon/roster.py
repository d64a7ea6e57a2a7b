"""What the workers of one generation said, as events. It performs nothing and reads no clock."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from supervisor.fsm import events as e
from supervisor.fsm.incident import KILLED_FOR_MEMORY
from supervisor.health.monitor import Suspicion
from trainer.host.quirks import aborted_for_a_peer
from trainer.slot.actor import STATES

Record = dict[str, Any]

_LINES_OF_A_LAUNCH = 12

# What only a generation that trains can say.
_TRAINING = (
    "stepped",
    "checkpoint_committed",
    "checkpoint_failed",
    "snapshot_failed",
    "numbers_diverged",
    "replicas_diverged",
    "batch_skipped",
    "completed",
)


class Roster:
    """The ranks of one generation: who is ready, who saved, who ended, and what that means.

    `restoring` says whether this start is a recovery. While it stands by (`standby`) all that a
    generation can say is that it is ready or lost; `promote` ends that. What only a training
    generation can say is held back until all ranks are ready, since slots report on separate ways.
    """

    def __init__(
        self, *, generation: int, world_size: int, restoring: bool, standby: bool = False
    ) -> None:
        self.generation = generation
        self.world_size = world_size
        self.restoring = restoring
        self.standby = standby
        self.ending = False  # An order to end was given: exits are no news.
        self.said: dict[str, dict[int, Record]] = {}
        # "launch": its interpreter has not come as far as to report.
        self.phases: dict[int, str] = dict.fromkeys(range(world_size), "launch")
        self._held: list[Record] = []
        self._taken: set[tuple[int, int]] = set()  # (rank, seq) of reports in STATES
        self._differences: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether every rank holds its starting state."""
        return len(self.said.get("ready", {})) == self.world_size

    async def until(self, happened: Callable[["Roster"], bool]) -> None:
        """Wait until `happened`; the caller sets the bound."""
        while not happened(self):
            self._changed.clear()
            await self._changed.wait()

    def promote(self) -> None:
        """From now on it speaks as the active generation does."""
        self.standby, self.restoring = False, True

    def take(self, record: Record, at: float) -> list[e.Event]:
        """The events that one report or exit amounts to, often none. `at` in seconds.

        A slot reports to a new daemon what its child has reached, and then its news, in which some
        of that may stand again: a record that was taken changes nothing.
        """
        self._changed.set()
        kind, rank = str(record["report"]), int(record["rank"])
        if kind in STATES and (seq := record.get("seq")) is not None:
            if (rank, seq) in self._taken:
                return []
            self._taken.add((rank, seq))
        if kind == "started" and self.phases[rank] == "launch":
            self.phases[rank] = "initialize"
        if kind == "phase":
            self.phases[rank] = str(record["phase"])
            return []
        if kind == "disk":
            return _disk_trouble(record, rank, at)
        first = rank not in self.said.setdefault(kind, {})
        self.said[kind][rank] = record
        if kind == "program_retraced":
            difference = str(record["difference"])
            return self._differing([difference] if difference else [], at)
        if self.standby:
            return [] if self.ending else self._standing_by(record, kind, rank, at)
        if kind in _TRAINING:
            self._held.append(record)
            return list(self._training(at))
        if kind == "ready" and first:
            return self._ready(record, at)
        if kind == "restore_rejected":
            path, why = str(record["path"]), str(record["reason"])
            return [
                e.RestorePointRejected(
                    at=at, generation=self.generation, ranks=(rank,), path=path, why=why
                )
            ]
        if kind == "raised":
            return [self._raised(record, rank, at)]
        if kind == "exit":
            return self._exited(record, rank, at)
        return []

    def _ready(self, record: Record, at: float) -> list[e.Event]:
        """What is not as it was is found before the steps that it may change."""
        found = self._differing([str(line) for line in record.get("differences", ())], at)
        if not self.is_ready:
            return found
        ready = e.WorkersRestored if self.restoring else e.WorkersInitialized
        every_rank = ready(at=at, generation=self.generation, step=int(record["step"]))
        return [*found, every_rank, *self._training(at)]

    def _differing(self, lines: list[str], at: float) -> list[e.Event]:
        """Each line once, whichever rank found it first."""
        news = tuple(line for line in lines if line not in self._differences)
        self._differences |= set(news)
        if not news:
            return []
        return [e.DifferencesFound(at=at, generation=self.generation, differences=news)]

    def _standing_by(self, record: Record, kind: str, rank: int, at: float) -> list[e.Event]:
        common: dict[str, Any] = {"at": at, "generation": self.generation}
        if kind == "standing_by":
            said = self.said[kind].values()
            if len(said) < self.world_size:
                return []
            memory_mb = sum(float(one.get("rss_bytes", 0)) for one in said) / 1e6
            start_s = max(float(one.get("seconds", 0)) for one in said)
            return [
                e.StandbyReady(**common, start_s=round(start_s, 3), memory_mb=round(memory_mb, 1))
            ]
        if kind == "raised":
            error = record["error"]
            why = f"rank {rank} raised {error.get('type')}: {error.get('message')}"
            why += f" ({error['frame']})" if error.get("frame") else ""
        elif kind == "exit":
            how = record.get("signal") or f"status {record.get('status')}"
            why = f"rank {rank} ended by {how}"
            if record.get("signal") == "SIGKILL" and (detail := _detail(record, [], "wait")):
                why += f": {detail}"
        else:
            return []
        return [e.StandbyLost(**common, ranks=(rank,), why=why)]

    def _training(self, at: float) -> Iterator[e.Event]:
        if not self.is_ready:
            return
        held, self._held = self._held, []
        for record in held:
            common: dict[str, Any] = {"at": at, "generation": self.generation}
            step = int(record["step"])
            match record["report"]:
                case "stepped" if len(self.said["stepped"]) == 1:
                    yield e.FirstStepTaken(**common, step=step)
                case "checkpoint_committed":
                    yield e.CheckpointCommitted(
                        **common,
                        step=step,
                        path=str(record["path"]),
                        duration_s=round(float(record["seconds"]), 3),
                        agreed_step=int(record.get("agreed_step", -1)),
                    )
                case "snapshot_failed":
                    yield e.SnapshotFailed(**common, step=step, error=str(record["error"]))
                case "checkpoint_failed":
                    yield e.CheckpointFailed(
                        **common,
                        step=step,
                        error=str(record["error"]),
                        disk_is_fine=bool(record.get("disk_is_fine")),
                    )
                case "numbers_diverged" if len(self.said["numbers_diverged"]) == 1:
                    yield e.NumbersDiverged(
                        **common,
                        step=step,
                        batch=int(record["batch"]),
                        metric=str(record["metric"]),
                        value=str(record["value"]),
                        policy=str(record["policy"]),
                        why=str(record["why"]),
                    )
                case "replicas_diverged" if len(self.said["replicas_diverged"]) == 1:
                    yield e.ReplicasDiverged(
                        **common,
                        step=step,
                        ranks=tuple(int(rank) for rank in record["ranks"]),
                        agreed_step=int(record["agreed_step"]),
                        why=str(record["why"]),
                    )
                case "batch_skipped" if record["rank"] == 0:
                    yield e.BatchSkipped(
                        **common,
                        step=step,
                        metric=str(record["metric"]),
                        value=str(record["value"]),
                    )
                case "completed" if record["rank"] == 0:
                    yield e.TrainingCompleted(
                        **common,
                        step=step,
                        params_digest=str(record["params_digest"]),
                        loss=record.get("loss"),
                        held_out_loss=record.get("held_out_loss"),
                    )

    def _raised(self, record: Record, rank: int, at: float) -> e.Event:
        common: dict[str, Any] = {"at": at, "generation": self.generation, "ranks": (rank,)}
        error = dict(record["error"])
        # A rank that was ready has started: nothing that it says later is a failure to start.
        is_starting = rank not in self.said.get("ready", {})
        if is_starting and record.get("startup"):
            return e.InitializationFailed(
                **common, error=f"{error.get('type')}: {error.get('message')}"
            )
        phase, secondary = str(record["phase"]), bool(record.get("collective"))
        if is_starting and phase == "restore" and not secondary:
            return e.RestoreFailed(**common, error=error)
        return e.WorkerRaised(
            **common, error=error, phase=phase, step=_step(record), primary=not secondary
        )

    def _exited(self, record: Record, rank: int, at: float) -> list[e.Event]:
        explained = ("raised", "restore_rejected", "completed")
        if self.ending or any(rank in self.said.get(kind, {}) for kind in explained):
            return []
        tail = [str(line) for line in record.get("log_tail", [])]
        phase = str(record.get("phase") or self.phases[rank])
        return [
            e.WorkerCrashed(
                at=at,
                generation=self.generation,
                ranks=(rank,),
                status=record.get("status"),
                signal=record.get("signal"),
                phase=phase,
                step=_step(record),
                primary=not (record.get("signal") == "SIGABRT" and aborted_for_a_peer(tail)),
                detail=_detail(record, tail, phase),
            )
        ]


def silence(verdict: Suspicion, at: float, *, standby: bool) -> e.Event:
    """The monitor's verdict as an event; `standby` if it is on the generation that stands by."""
    if standby:
        why = f"{verdict.kind.replace('_', ' ')} in {verdict.phase}: {verdict.why}"
        return e.StandbyLost(at=at, generation=verdict.generation, ranks=verdict.ranks, why=why)
    common: dict[str, Any] = {
        "at": at,
        "generation": verdict.generation,
        "ranks": verdict.ranks,
        "phase": verdict.phase,
        "step": verdict.step,
        "silence_s": round(verdict.silence_s, 3),
        "why": verdict.why,
    }
    limit_s = round(verdict.deadline_s, 3)
    if verdict.kind == "heartbeat_lost":
        return e.HeartbeatLost(**common, lease_s=limit_s)
    return e.ProgressStalled(**common, stalled=verdict.stalled, deadline_s=limit_s)


def _step(record: Record) -> int:
    step = record.get("step")
    return -1 if step is None else int(step)


def _detail(record: Record, tail: list[str], phase: str) -> str:
    """Nobody who is killed from outside has a last word on it; of its memory the slot knows."""
    if record.get("signal") != "SIGKILL":
        return _last_words(tail, phase)
    memory = record.get("memory")
    if memory is None:
        return ""
    if not memory:
        return f"{KILLED_FOR_MEMORY}: the machine had none left"
    return f"{KILLED_FOR_MEMORY}: {_gb(memory['used'])} of {_gb(memory['limit'])} GB"


def _gb(size: int) -> str:
    """As `--memory=4g` counts; a limit below one has to be readable as well."""
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.3f}"


def _last_words(tail: list[str], phase: str) -> str:
    """The last line that says something, at most 200 characters; of a launch the last lines."""
    spoken = [line.rstrip()[:200] for line in tail if line.strip()]
    if phase == "launch":
        return "\n".join(spoken[-_LINES_OF_A_LAUNCH:])
    return spoken[-1].strip() if spoken else ""


def _disk_trouble(record: Record, rank: int, at: float) -> list[e.Event]:
    why, what = str(record["why"]), str(record["what"])
    if not why or what == "snapshots":  # of these SnapshotFailed tells
        return []
    action = f"to write the {what} of rank {rank}"
    return [e.HousekeepingFailed(at=at, action=action, error=why)]
