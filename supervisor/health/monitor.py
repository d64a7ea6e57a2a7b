"""Silence becomes a suspicion, and with a second witness's word a verdict.

Pure: heartbeats and the monotonic time at which they were read come in, suspicions go out. Nothing
here reads a clock, talks to Redis or trusts the clock of a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from supervisor.health.deadlines import Deadlines
from trainer.wire.heartbeat import BeatMessage

WITNESS_S = 1.5
"""The longest that the second witness may take; silence from it is an answer too.

More than the second that a slot is given, so that one that is mute does not cost the others' word.
"""

STANDSTILL_MIN_S = 5.0
"""Shorter gaps end no rank: JAX waits longer for its peers."""

_BEATS_OF_A_THAW = 4

FAILED_POLL_S = 1.5
"""The longest that a poll may take to fail."""

Member = tuple[int, int]
"""(generation, rank)."""

Kind = Literal["heartbeat_lost", "progress_stalled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """What the silence of some ranks looks like; a verdict once the second witness agreed.

    `ranks` are the culprits, `stalled` all ranks that are silent, victims included. `phase` and
    `step` are those of the first culprit. Of `silence_s`, `deadline_s` were allowed. `why` tells
    what was seen of each culprit.
    """

    kind: Kind
    generation: int
    ranks: tuple[int, ...]
    stalled: tuple[int, ...]
    phase: str
    step: int
    silence_s: float
    deadline_s: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What the supervisor knows of a rank now; ages in seconds, None before its first heartbeat."""

    rank: int
    pid: int | None
    phase: str
    step: int
    beat_age_s: float | None
    silence_s: float
    deadline_s: float
    path_broken: bool


@dataclass(slots=True, eq=False)
class _Track:
    """One rank: what it last said, and when that was first seen here."""

    rank: int
    beats_at: float
    seq_at: float
    ahead_at: float  # when it last had another rank behind it
    seen_at: float  # when there was last a word on it, of the store or of its slot
    here: bool = False  # its key was there at the last poll; if not, it is unknown, not silent
    message: BeatMessage | None = None
    beats: int = -1
    told_beats: int = -1  # by the slot: sends that may never have arrived
    seq: int = -1
    phase: str = "initialize"
    step: int = -1
    path_broken: bool = False
    save_s: float = 0.0  # what a last save was promised
    promoted: bool = False  # it was told to train: to wait on is no excuse any more
    unanswered_since: float | None = None
    testimony: Mapping[str, Any] | None = None

    def rearm(self, now: float) -> None:
        self.beats_at = self.seq_at = self.seen_at = now
        self.unanswered_since = None

    def leave_out(self, seconds: float) -> None:
        """Nobody looked for so long: this time is not silence, and what came before it stays."""
        self.beats_at += seconds
        self.seq_at += seconds
        self.ahead_at += seconds
        if self.unanswered_since is not None:
            self.unanswered_since += seconds

    def position(self) -> tuple[int, int]:
        """How far this rank is; in one generation the numbers of all ranks run alike."""
        return self.step, self.seq


class HeartbeatMonitor:
    """Judges armed generations by what changes and when, on the supervisor's own clock.

    The arrival of beats is liveness (`lease_s`); a change of the loop's number is progress (the
    deadline of its phase). All times are seconds of one monotonic clock, given by the caller.
    """

    def __init__(self, deadlines: Deadlines, *, lease_s: float, every_s: float) -> None:
        self._deadlines = deadlines
        self.lease_s = lease_s
        self._every_s = every_s
        self._pause_s = max(lease_s / 2, 2 * every_s)
        self._armed: dict[int, dict[int, _Track]] = {}
        self._seen_at: float | None = None
        self._missed = False  # the last poll failed
        self._blind = False
        self._gap_s = 0.0  # that this process saw, and whose cause is not known yet
        self._standstill_s = 0.0

    # --- arming -----------------------------------------------------------------------------------

    def arm(self, generation: int, ranks: Iterable[int], now: float) -> None:
        """Watch a generation from now on, knowing nothing of it; `initialize` counts from here."""
        tracks = {
            rank: _Track(rank=rank, beats_at=now, seq_at=now, ahead_at=now, seen_at=now)
            for rank in ranks
        }
        self._armed[generation] = tracks
        self._deadlines.forget_ranks_from(len(tracks))

    def promote(self, generation: int, ranks: Iterable[int], now: float) -> None:
        """The generation that stood by was told to load its state and train; arm it if need be.

        Until its first step the deadline of `restore` counts in `wait` too.
        """
        if generation not in self._armed:
            self.arm(generation, ranks, now)
        for track in self._armed[generation].values():
            track.promoted = True
            track.rearm(now)

    def promise_save(self, generation: int, seconds: float) -> None:
        """Take no silence in the last save of a generation for a hang, for so long."""
        for track in self._armed.get(generation, {}).values():
            track.save_s = seconds

    def learn_save(self, seconds: float) -> None:
        """Take in how long a checkpoint took to be committed."""
        self._deadlines.learn_save(seconds)

    def disarm(self, generation: int) -> None:
        """Stop watching a generation and forget all about it; no error if it was not watched."""
        self._armed.pop(generation, None)

    def rearm(self, now: float) -> None:
        """Every lease and deadline starts afresh; what is known of the ranks stays."""
        for track in self._tracks():
            track.rearm(now)
        self._seen_at = now

    def miss(self, now: float) -> None:
        """A poll failed: nobody was seen, and that is no silence. The caller was not paused."""
        if self._seen_at is not None and now - self._seen_at > self._pause_s + FAILED_POLL_S:
            self._gap_s += now - self._seen_at
            self.rearm(now)
        self._seen_at = now
        self._missed = True

    def blind(self) -> None:
        """The store is away, not for a poll only: the slots are asked instead."""
        self._blind = True

    def see(self) -> None:
        """The store is back for good."""
        self._blind = False

    @property
    def is_blind(self) -> bool:
        """Whether the store counts as lost, so that only the slots bear witness."""
        return self._blind

    def members(self) -> tuple[Member, ...]:
        """Who is watched: (generation, rank), in order."""
        return tuple((g, rank) for g in sorted(self._armed) for rank in self._armed[g])

    def view(self, generation: int, now: float) -> tuple[RankView, ...]:
        """What to show of each rank of a generation; empty if it is not watched."""
        armed = self._armed.get(generation)
        return tuple(self._view(track, now) for track in armed.values()) if armed else ()

    # --- what the heartbeats say ------------------------------------------------------------------

    def observe(
        self,
        now: float,
        beats: Mapping[Member, BeatMessage | None],
        *,
        read_at: float | None = None,
    ) -> list[Suspicion]:
        """Take in one poll and say who is silent: at most one suspicion a generation.

        `now` is when the poll was begun, `read_at` when its answer was there (default: `now`).
        None means that the key is missing, or holds nothing readable. A gap since the last call
        that is too long for a healthy caller starts every lease afresh. Time in which polls failed
        is left out, but what was silent before stays so: a store that fails now and then must not
        hide a hang.
        """
        read_at = now if read_at is None else read_at
        paused = self._seen_at is not None and read_at - self._seen_at > self._pause_s
        if paused and self._seen_at is not None:
            self._gap_s += read_at - self._seen_at
        if self._gap_s:
            self._explain_gap(beats)
        for (generation, rank), message in beats.items():
            armed = self._armed.get(generation)
            if armed and (track := armed.get(rank)):
                if self._missed:
                    track.leave_out(max(0.0, read_at - track.seen_at - self._every_s))
                track.seen_at = read_at
                self._hear(track, message, read_at)
        if paused:
            self.rearm(read_at)
        self._seen_at, self._missed = read_at, False
        found = (self._suspect(generation, now) for generation in sorted(self._armed))
        return [suspicion for suspicion in found if suspicion]

    def _explain_gap(self, beats: Mapping[Member, BeatMessage | None]) -> None:
        """Workers that sent heartbeats meanwhile did not stand still: only this process did."""
        sent = [
            message.beats - track.beats
            for (generation, rank), message in beats.items()
            if message and (track := self._armed.get(generation, {}).get(rank)) and track.beats >= 0
        ]
        if sent and max(sent) <= _BEATS_OF_A_THAW and self._gap_s >= STANDSTILL_MIN_S:
            self._standstill_s = self._gap_s
        self._gap_s = 0.0

    def take_standstill(self) -> float:
        """For how many seconds nothing of the job ran, told once; 0 if it did."""
        seconds, self._standstill_s = self._standstill_s, 0.0
        return seconds

    def _hear(self, track: _Track, message: BeatMessage | None, now: float) -> None:
        if message is None:
            track.here = False
            return
        if not track.here:
            track.beats_at = now
        track.here = True
        if message.beats != track.beats:
            track.beats, track.beats_at = message.beats, now
            track.path_broken = False
            track.message = message
            if message.durations:
                self._deadlines.learn(track.rank, message.durations)
        elif track.path_broken:
            return  # a word of the past, and the slot has told more since
        if message.seq != track.seq:
            self._advance(track, message.seq, message.phase, message.step, now)

    def _advance(self, track: _Track, seq: int, phase: str, step: int, now: float) -> None:
        track.seq, track.phase, track.step = seq, phase, step
        track.seq_at = now
        track.promoted &= phase not in ("step", "evaluate", "checkpoint")
        track.unanswered_since = None
        track.testimony = None

    # --- who is silent ----------------------------------------------------------------------------

    def _suspect(self, generation: int, now: float) -> Suspicion | None:
        armed = self._armed[generation].values()
        tracks = [track for track in armed if track.phase != "wait" or track.promoted]
        overdue = self._overdue(tracks, now)
        lost = [track for track in self._armed[generation].values() if self._is_lost(track, now)]
        if not lost and not overdue:
            return None
        # Ranks stop within a step of each other: from half of its deadline a rank counts as silent.
        silent = {track.rank: track for track in tracks if self._is_silent(track, now)}
        silent |= {track.rank: track for track in (*overdue, *lost)}
        if lost:
            return self._suspicion("heartbeat_lost", generation, lost, sorted(silent), now)
        culprits = self._culprits([silent[rank] for rank in sorted(silent)], now)
        return self._suspicion("progress_stalled", generation, culprits, sorted(silent), now)

    def _overdue(self, tracks: list[_Track], now: float) -> list[_Track]:
        """Those furthest behind, if they have been that for longer than their deadline.

        Whoever is ahead of another rank may only be waiting for it: for rank 0 that writes a
        checkpoint, for one that compiles longer. Its own time starts when it is overtaken.
        """
        last = min((track.position() for track in tracks), default=(0, 0))
        for track in tracks:
            if track.position() > last:
                track.ahead_at = now
        return [
            track
            for track in tracks
            if track.position() == last
            and now - max(track.seq_at, track.ahead_at) > self._limit_s(track)
        ]

    def _is_lost(self, track: _Track, now: float) -> bool:
        return track.here and now - track.beats_at > self.lease_s

    def _is_silent(self, track: _Track, now: float) -> bool:
        return now - track.seq_at > 0.5 * self._limit_s(track)

    def _limit_s(self, track: _Track) -> float:
        if track.phase == "wait" and track.promoted:
            return self._deadlines.limit_s("restore", warm=False)
        warm = track.message is not None and track.phase in track.message.durations
        limit_s = self._deadlines.limit_s(track.phase, warm=warm)
        return max(limit_s, track.save_s) if track.phase == "checkpoint" else limit_s

    def _culprits(self, stalled: list[_Track], now: float) -> list[_Track]:
        """Who does not even beat, or is stopped; else who is furthest behind; else everybody."""
        stopped = [track for track in stalled if _has_ended_or_stopped(track.testimony)]
        if stopped:
            return stopped
        mute = [track for track in stalled if self._is_mute(track, now)]
        if mute and len(mute) < len(stalled):
            return mute
        last = min(track.position() for track in stalled)
        return [track for track in stalled if track.position() == last]

    def _is_mute(self, track: _Track, now: float) -> bool:
        return not track.here or now - track.beats_at > 3 * self._every_s

    def _suspicion(
        self, kind: Kind, generation: int, culprits: list[_Track], stalled: list[int], now: float
    ) -> Suspicion:
        first = culprits[0]
        lost = kind == "heartbeat_lost"
        since = min(track.beats_at if lost else track.seq_at for track in culprits)
        return Suspicion(
            kind=kind,
            generation=generation,
            ranks=tuple(track.rank for track in culprits),
            stalled=tuple(stalled),
            phase=first.phase,
            step=first.step,
            silence_s=round(now - since, 3),
            deadline_s=round(self.lease_s if lost else self._limit_s(first), 3),
            why="; ".join(self._story(track, now) for track in culprits[:4]),
        )

    def _story(self, track: _Track, now: float) -> str:
        said = (
            f"rank {track.rank} in {track.phase}, step {track.step}, number {track.seq} "
            f"unchanged for {now - track.seq_at:.2f} s"
        )
        if track.beats < 0:
            said += ", never heard"
        elif not track.here:
            said += ", its key is gone"
        else:
            said += f", last beat {now - track.beats_at:.2f} s ago"
        if track.testimony is not None:
            told = track.testimony
            said += f", its slot says: state {told.get('state')}, number {told.get('seq')}"
        return said

    # --- what the second witness says -------------------------------------------------------------

    def judge(
        self, now: float, suspicion: Suspicion, testimony: Mapping[int, Mapping[str, Any]]
    ) -> Suspicion | None:
        """The verdict, or None where the slots' word does not bear the suspicion out.

        `testimony` maps ranks to {"alive", "state", "seq", "phase", "step"}; a rank that is missing
        did not answer. A number that moved is news like any other: that rank's time starts afresh.
        After a verdict the generation's leases start afresh, so that an unheeded one comes again.
        """
        armed = self._armed.get(suspicion.generation)
        late = self._seen_at is not None and now - self._seen_at > WITNESS_S + self._pause_s
        if armed is None:
            return None
        if late:
            self.rearm(now)
            return None
        self._seen_at = now
        for rank in suspicion.stalled:
            if track := armed.get(rank):
                self._testify(track, testimony.get(rank), now)
        verdict = self._suspect(suspicion.generation, now)
        if verdict is None or not self._is_borne_out(armed, verdict, testimony, now):
            return None
        for track in armed.values():
            track.rearm(now)
        return verdict

    def attest(
        self, now: float, generation: int, testimony: Mapping[int, Mapping[str, Any]]
    ) -> Suspicion | None:
        """Take in what the slots say while the store is away: the verdict, or None.

        A slot sees the process and its beat file, so that its word alone is enough. `testimony` is
        as for `judge`; for a rank whose slot does not answer, or cannot read the file, this time is
        left out.
        """
        armed = self._armed.get(generation)
        if armed is None:
            return None
        self._seen_at = now
        for track in armed.values():
            told = testimony.get(track.rank)
            if told is None or not (_has_ended_or_stopped(told) or _number(told, "beats") >= 0):
                track.leave_out(now - track.seen_at)
            else:
                self._testify(track, told, now)
            track.seen_at = now
        verdict = self._suspect(generation, now)
        if verdict is None or not any(rank in testimony for rank in verdict.ranks):
            return None
        for track in armed.values():
            track.rearm(now)
        return verdict

    def _testify(self, track: _Track, told: Mapping[str, Any] | None, now: float) -> None:
        track.testimony = told
        if told is None:
            if track.unanswered_since is None:
                track.unanswered_since = now
            return
        track.unanswered_since = None
        if _has_ended_or_stopped(told):
            return
        seq, step, phase = _number(told, "seq"), _number(told, "step"), told.get("phase")
        moved = seq >= 0 and seq != track.seq
        if track.seq < 0 and phase in (None, "initialize"):
            moved = False  # never heard, and its loop is where we thought it was
        sent = _number(told, "beats")  # the thread's count of sends, from slots that know it
        beating = sent > max(track.beats, track.told_beats)
        if not moved and not beating:
            return
        track.path_broken = self._is_mute(track, now)
        track.told_beats = max(sent, track.told_beats)
        track.beats_at = now
        if moved:
            self._advance(track, seq, str(phase or track.phase), step, now)

    def _is_borne_out(
        self,
        armed: Mapping[int, _Track],
        verdict: Suspicion,
        testimony: Mapping[int, Mapping[str, Any]],
        now: float,
    ) -> bool:
        if verdict.kind == "heartbeat_lost":
            return True  # stopped, unmoved or unanswered: all that is left after `_testify`
        if any(rank in testimony for rank in verdict.stalled):
            return True
        # No slot answers. One slow answer is no evidence; a lease of silence is.
        waited = [armed[rank].unanswered_since for rank in verdict.stalled]
        return any(since is not None and now - since > self.lease_s for since in waited)

    def broken_paths(self) -> tuple[Member, ...]:
        """Ranks that live and move by their slot's word, yet whose heartbeats do not arrive."""
        return tuple(
            (generation, track.rank)
            for generation in sorted(self._armed)
            for track in self._armed[generation].values()
            if track.path_broken
        )

    # --- small helpers ----------------------------------------------------------------------------

    def _tracks(self) -> Iterator[_Track]:
        for armed in self._armed.values():
            yield from armed.values()

    def _view(self, track: _Track, now: float) -> RankView:
        return RankView(
            rank=track.rank,
            pid=track.message.pid if track.message else None,
            phase=track.phase,
            step=track.step,
            beat_age_s=round(now - track.beats_at, 3) if track.message else None,
            silence_s=round(now - track.seq_at, 3),
            deadline_s=self._limit_s(track),
            path_broken=track.path_broken,
        )


def _has_ended_or_stopped(told: Mapping[str, Any] | None) -> bool:
    return told is not None and (told.get("alive") is False or told.get("state") in tuple("TtZX"))


def _number(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    return value if isinstance(value, int) else -1
