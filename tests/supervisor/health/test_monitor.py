"""Who is silent, and when that is a verdict: all in virtual time."""

import random
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from supervisor.health.deadlines import DEFAULTS_S
from supervisor.health.monitor import Suspicion
from tests.supervisor.virtual import EVERY_S, LEASE_S, STARTUP, VirtualRank, World, monitor, steps
from trainer.wire.heartbeat import Beat, BeatSender

POLL_S = EVERY_S
SAMPLING_S = 2 * EVERY_S  # one interval until it is sent, one until it is polled


def two(script: Sequence[tuple[str, int, float]], **of_rank_1: Any) -> list[VirtualRank]:
    """Two ranks with one script; the second may behave differently."""
    return [VirtualRank(script), VirtualRank(script, rank=1, offset_s=0.1, **of_rank_1)]


def stuck(script: list[tuple[str, int, float]], at: float, *, frozen: bool = False) -> World:
    """Rank 1 stops at `at`, and rank 0 where it needs it: after its dispatch of the same step."""
    world = World(two(script))
    victim, culprit = world.ranks
    setattr(culprit, "stopped_at" if frozen else "stuck_at", at)
    done = culprit.position(at)[3]
    begun, ends = victim.starts[done], victim.starts[done + 1]
    victim.stuck_at = max(at, begun + 0.5 * (ends - begun))
    return world


# --- no false alarm ---------------------------------------------------------------------------


def test_a_hundred_thousand_steps_that_vary_by_a_factor_of_three_give_no_verdict() -> None:
    """One false alarm a day costs more than the hangs it finds (skypilot#10155)."""
    chance = random.Random(7)
    script = STARTUP + steps(chance.uniform(0.08, 0.24) for _ in range(100_000))
    world = World(two(script))
    assert world.run(world.ranks[0].starts[-1] + 60.0) == []


@settings(max_examples=60, deadline=None)
@given(
    shortest_s=st.floats(0.002, 20.0),
    factors=st.lists(st.floats(1.0, 3.0), min_size=3, max_size=120),
    skew_s=st.floats(0.0, 0.24),
)
def test_no_step_time_that_varies_by_a_factor_of_three_is_a_hang(
    shortest_s: float, factors: list[float], skew_s: float
) -> None:
    """Also where it is short, and the number is sampled more slowly than it changes."""
    script = STARTUP + steps(shortest_s * factor for factor in factors)
    ranks = two(script)
    ranks[1].offset_s = skew_s
    assert World(ranks).run(ranks[0].starts[-1] + 1.0) == []


@pytest.mark.parametrize("phase", ["compile", "evaluate", "checkpoint", "restore"])
def test_a_phase_that_takes_six_times_longer_than_usual_is_no_hang(phase: str) -> None:
    """Detectors that know one deadline only are alarmed by compilation and saves (marin#8543)."""
    usual, slow = [(phase, 30, 20.0)], [(phase, 60, 120.0)]
    script = [*STARTUP, *steps([0.2] * 30), *usual, *steps([0.2] * 30, 30), *slow]
    assert World(two(script)).run(400.0) == []


def test_a_step_that_takes_six_times_longer_than_usual_is_told_in_time() -> None:
    """The other half: in `step` that is a hang, and six seconds are not waited for."""
    script = STARTUP + steps([1.0] * 20 + [6.0 + SAMPLING_S] + [1.0] * 5)
    (verdict,) = World(two(script)).run(60.0)
    assert verdict[1].kind == "progress_stalled"
    assert verdict[1].deadline_s == 5.0


def test_a_rank_that_waits_for_a_slow_save_of_rank_0_is_not_blamed() -> None:
    """Rank 0 alone writes the metadata; the others are already in the next step's collective."""
    before = [*STARTUP, *steps([0.2] * 20)]
    saves, waits = ("checkpoint", 20, 50.0), ("checkpoint", 20, 0.1)
    ranks = [
        VirtualRank([*before, saves, *steps([0.2] * 20, 20)]),
        VirtualRank([*before, waits, ("step", 20, 50.1), *steps([0.2] * 19, 21)], rank=1),
    ]
    assert World(ranks).run(80.0) == []


def test_a_rank_that_compiles_longer_is_waited_for() -> None:
    """Only rank 0 finds its executable in the cache on CPU: the others are minutes behind it."""
    ranks = [
        VirtualRank([("initialize", -1, 2.0), ("compile", -1, 1.0), ("step", 0, 120.0)]),
        VirtualRank([("initialize", -1, 2.0), ("compile", -1, 120.0), ("step", 0, 1.0)], rank=1),
    ]
    assert World(ranks).run(130.0) == []


def test_a_missing_key_is_unknown_and_not_silent() -> None:
    """A store that was emptied by its restart has not killed anybody (resque#1883)."""
    world = World(two(STARTUP + steps([0.2] * 400)))
    assert world.run(20.0) == []
    for _ in range(4):
        assert world.monitor.observe(world.now, {(1, 0): None, (1, 1): None}) == []
        world.now += POLL_S
    assert world.run(60.0) == []


def test_a_rank_that_waits_and_cannot_reach_the_store_lives_by_the_word_of_its_slot() -> None:
    """A slow store let standbys look dead, and each new one after them."""
    world = World(two([*STARTUP, *steps([0.2] * 5)]))
    assert world.run(60.0) == []
    world.ranks[1].cut_at = world.now
    assert world.run(400.0) == []
    assert world.monitor.broken_paths() == ((1, 1),)
    world.ranks[1].mute_at = world.now  # now its thread is dead indeed
    _, verdict = world.run(world.now + 3 * LEASE_S)[0]
    assert (verdict.kind, verdict.ranks) == ("heartbeat_lost", (1,))


def test_a_rank_that_waits_is_judged_by_its_liveness_only() -> None:
    """Whoever is done waits for the others, or for a promotion, for as long as that takes."""
    world = World(two([*STARTUP, *steps([0.2] * 5)]))
    assert world.run(4000.0) == []
    world.ranks[1].mute_at = world.now
    ((when, verdict),) = world.run(4000.0 + LEASE_S + 2.0)
    assert verdict.kind == "heartbeat_lost"
    assert verdict.ranks == (1,)
    assert when <= 4000.0 + LEASE_S + SAMPLING_S + POLL_S


def test_a_workers_clock_that_is_an_hour_off_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Leases that compare the clocks of two machines kill healthy workers after an NTP step."""

    def unused(timeout_s: float) -> Redis:
        raise AssertionError("nothing is sent")

    beat = Beat(tmp_path / "beat")
    sender = BeatSender(beat, key="k", generation=1, rank=0, every_s=1.0, connect=unused)
    watching = monitor()
    watching.arm(1, [0], 0.0)
    beat.enter("step", 0)
    shifted = time.time() + 3600.0
    for poll in range(200):
        if poll == 100:
            monkeypatch.setattr(time, "time", lambda: shifted)
        beat.tick()
        assert watching.observe(poll * POLL_S, {(1, 0): sender.message()}) == []


# --- blindness and pauses ---------------------------------------------------------------------


def test_an_outage_of_the_store_gives_no_verdict_then_or_right_after() -> None:
    """Blind, not dead: twenty seconds without Redis are twenty seconds of training (case 25)."""
    world = World(two(STARTUP + steps([0.1] * 2000)))
    assert world.run(30.0) == []
    for rank in world.ranks:
        rank.cut_at = world.now  # what was written last is all there is to read at first
    world.lose_store(50.0)
    for _ in range(3):
        assert world.poll() == []
        world.now += POLL_S
    for rank in world.ranks:
        rank.cut_at = float("inf")
    assert world.run(90.0) == []


def test_an_outage_adds_nothing_to_a_silence_of_before() -> None:
    """Beats that could not be sent for a second must not complete a lease."""
    world = World(two(STARTUP + steps([0.1] * 2000)))
    assert world.run(30.0) == []
    for rank in world.ranks:
        rank.cut_at = world.now
    asleep = world.beats()
    assert world.poll() == []
    world.lose_store(60.0)
    assert world.monitor.observe(world.now, asleep) == []


def test_a_rank_that_died_during_the_outage_is_found_a_lease_after_it() -> None:
    """Silence counts again from the moment that sight returns."""
    world = World(two(STARTUP + steps([0.1] * 20) + [("evaluate", 20, 900.0)]))
    world.run(10.0)
    world.ranks[1].mute_at = 12.0
    world.lose_store(30.0)
    ((when, verdict),) = world.run(30.0 + LEASE_S + 1.0)
    assert verdict.kind == "heartbeat_lost"
    assert LEASE_S - POLL_S <= when - 30.0 <= LEASE_S + 2 * POLL_S


@pytest.mark.parametrize("good_polls", [1, 2, 10])
def test_a_store_that_fails_now_and_then_hides_no_hang(good_polls: int) -> None:
    """An overloaded Redis timed out once in eleven polls; each time every lease began afresh, and a
    stopped rank was never noticed. What was silent before a failed poll stays so."""
    world = World(two(STARTUP + steps([0.1] * 20) + [("evaluate", 20, 900.0)]))
    assert world.run(10.0) == []
    world.ranks[1].mute_at = world.now
    while not (verdicts := world.run(world.now + good_polls * POLL_S)):
        world.lose_store(world.now + POLL_S)
        assert world.now < 10.0 + 3 * LEASE_S
    assert verdicts[0][1].ranks == (1,)


def test_slots_bear_witness_while_the_store_is_away() -> None:
    """Redis was away for an hour, and so was every verdict: a frozen rank held all the others."""
    world = World(two(STARTUP + steps([0.1] * 20) + [("evaluate", 20, 900.0)]))
    assert world.run(10.0) == []
    while world.now < 40.0:
        world.lose_store(world.now + 1.0)
        assert world.attest() == []
    world.ranks[1].stopped_at = world.now
    while not (verdicts := world.attest()):
        world.lose_store(world.now + 1.0)
        assert world.now < 40.0 + LEASE_S + 2.0
    assert (verdicts[0].kind, verdicts[0].ranks) == ("heartbeat_lost", (1,))
    assert "state T" in verdicts[0].why


@pytest.mark.parametrize("told", [None, {"alive": True, "state": "S", "seq": None, "beats": None}])
def test_a_slot_that_cannot_say_holds_nothing_against_its_rank(
    told: Mapping[str, object] | None,
) -> None:
    """The store was away and the disk was full: no heartbeat, no beat file, and a healthy rank."""
    world = World(two(STARTUP + steps([0.1] * 20) + [("evaluate", 20, 900.0)]))
    assert world.run(10.0) == []
    while world.now < 100.0:
        world.lose_store(world.now + 1.0)
        well = world.ranks[0].word_of_its_slot(world.now)
        testimony = {0: well} if told is None else {0: well, 1: told}
        assert world.monitor.attest(world.now, 1, testimony) is None
    assert world.run(120.0) == []


@pytest.mark.parametrize("pause_s", [LEASE_S / 2 + 0.1, LEASE_S, 3600.0])
def test_a_paused_daemon_does_not_take_its_own_absence_for_silence(pause_s: float) -> None:
    """A laptop lid, a SIGSTOP, a swap storm: all workers slept as well."""
    script = STARTUP + steps([0.1] * 50) + [("evaluate", 50, 50_000.0)]
    world = World(two(script))
    world.run(15.0)
    asleep = world.beats()
    world.now += pause_s
    assert world.monitor.observe(world.now, asleep) == []
    assert world.monitor.observe(world.now + POLL_S, asleep) == []


def test_a_gap_in_which_no_worker_sent_a_beat_is_a_standstill_of_everything() -> None:
    """A container that was frozen for 40 s: what breaks of it then is no rank's failure."""
    world = World(two(STARTUP + steps([0.1] * 3000)))
    world.run(15.0)
    asleep = world.beats()
    world.now += 40.0
    assert world.monitor.observe(world.now, asleep) == []
    assert world.monitor.take_standstill() == pytest.approx(40.0 + EVERY_S)
    assert world.monitor.take_standstill() == 0.0


def test_a_gap_of_the_daemon_alone_is_no_standstill() -> None:
    """Somebody stopped the daemon for 40 s: a rank that died meanwhile is paid for."""
    world = World(two(STARTUP + steps([0.1] * 3000)))
    world.run(15.0)
    world.now += 40.0
    world.monitor.observe(world.now, world.beats())
    assert world.monitor.take_standstill() == 0.0


def test_a_standstill_is_seen_although_the_first_poll_after_it_fails() -> None:
    """The poll that was under way when everything froze has run into its time-out by then."""
    world = World(two(STARTUP + steps([0.1] * 3000)))
    world.run(15.0)
    asleep = world.beats()
    world.now += 40.0
    world.monitor.miss(world.now)
    assert world.monitor.observe(world.now + EVERY_S, asleep) == []
    assert world.monitor.take_standstill() == pytest.approx(40.0 + EVERY_S)


def test_a_daemon_paused_while_it_asks_the_slots_gives_no_verdict() -> None:
    """The answer is about a time that is gone."""
    world = stuck(STARTUP + steps([0.2] * 100), at=15.0)
    suspicions: list[Suspicion] = []
    while not suspicions:
        world.now += POLL_S
        suspicions = world.monitor.observe(world.now, world.beats())
    told = world.testimony(suspicions[0])
    assert world.monitor.judge(world.now + 60.0, suspicions[0], told) is None


# --- every hang is found ----------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    step_s=st.floats(0.01, 0.55),  # above, a frozen rank first loses its lease
    done=st.integers(3, 40),
    frozen=st.booleans(),
)
def test_a_hang_in_a_step_always_gives_a_verdict_in_time_and_names_its_culprit(
    step_s: float, done: int, frozen: bool
) -> None:
    """Alive in a collective, threads beating, native time-outs silent (jax#38503, marin#7344)."""
    script = STARTUP + steps([step_s] * 200)
    done += int(1.0 / step_s)  # until its median has arrived, a first step's deadline holds
    # Rank 1 stops before its dispatch (at 0.03 of the step), so rank 0 is ahead of it.
    at = 6.0 + (done + 0.03) * step_s
    world = stuck(script, at, frozen=frozen)
    limit_s = max(1.0, 5 * step_s, 3 * step_s + 2 * EVERY_S)
    verdicts = world.run(at + limit_s + SAMPLING_S + 2 * POLL_S)
    when, verdict = verdicts[0]
    assert verdict.kind == "progress_stalled"
    assert (verdict.generation, verdict.ranks, verdict.stalled) == (1, (1,), (0, 1))
    assert verdict.deadline_s == pytest.approx(limit_s, abs=0.01)
    assert at + verdict.deadline_s - SAMPLING_S - step_s <= when
    assert "rank 1 in step" in verdict.why


@pytest.mark.parametrize("phase", ["initialize", "compile", "restore", "evaluate", "checkpoint"])
def test_a_hang_in_any_other_phase_ends_at_that_phases_deadline(phase: str) -> None:
    """Blind before the first step is as bad as alarmed by it (dlrover#1730)."""
    world = World(two([(phase, -1, 1e9)]))
    when, verdict = world.run(DEFAULTS_S[phase] + SAMPLING_S + 2 * POLL_S)[0]
    assert verdict.kind == "progress_stalled"
    assert verdict.phase == phase
    assert verdict.stalled == (0, 1)
    assert when > DEFAULTS_S[phase]


def test_a_rank_that_was_never_heard_misses_the_deadline_of_initialize() -> None:
    """One rank missing at the rendezvous: the others beat and wait, and must not be blamed."""
    ranks = two([("initialize", -1, 1e9)])
    ranks[1].cut_at = -1.0
    ranks[1].stuck_at = 0.0
    when, verdict = World(ranks).run(DEFAULTS_S["initialize"] + 1.0)[0]
    assert verdict.ranks == (1,)
    assert verdict.stalled == (0, 1)
    assert "never heard" in verdict.why
    assert when <= DEFAULTS_S["initialize"] + 2 * POLL_S


def test_a_rank_whose_thread_is_silent_loses_its_lease_in_any_phase() -> None:
    """A C extension that holds the GIL stops the thread as well; a long phase hides nothing."""
    world = World(two([*STARTUP, *steps([0.1] * 20), ("evaluate", 20, 1e6)]))
    world.ranks[1].mute_at = 20.0
    when, verdict = world.run(30.0)[0]
    assert (verdict.kind, verdict.ranks, verdict.phase) == ("heartbeat_lost", (1,), "evaluate")
    assert 20.0 + LEASE_S - SAMPLING_S <= when <= 20.0 + LEASE_S + SAMPLING_S + POLL_S


def test_an_unheeded_verdict_comes_again_after_another_deadline() -> None:
    """A verdict that arrives in a state that ignores it must not be the last one."""
    world = stuck(STARTUP + steps([1.0] * 100), at=20.3)
    times = [when for when, _ in world.run(40.0)]
    assert len(times) == 3
    assert all(later - earlier > 5.0 for earlier, later in pairwise(times))


def test_a_disarmed_generation_is_neither_polled_nor_judged() -> None:
    """Whoever is being drained is expected to fall silent."""
    world = stuck(STARTUP + steps([0.2] * 100), at=15.0)
    world.run(15.0)
    world.monitor.disarm(1)
    assert world.monitor.members() == ()
    assert world.run(60.0) == []


def test_a_generation_is_judged_apart_from_another() -> None:
    """A standby beside the active one waits; its silence is its own."""
    ranks = [
        *two(STARTUP + steps([0.2] * 1000)),
        VirtualRank([("initialize", -1, 2.0)], generation=2),
        VirtualRank([("initialize", -1, 2.0)], rank=1, generation=2, mute_at=20.0),
    ]
    _, verdict = World(ranks).run(24.0)[0]
    assert (verdict.generation, verdict.ranks) == (2, (1,))


# --- culprits ---------------------------------------------------------------------------------


def test_a_stopped_process_is_the_culprit_however_far_it_came() -> None:
    """SIGSTOP in the collective: all numbers are equal, and only its slot knows."""
    script = STARTUP + steps([0.5] * 100)
    world = World(two(script))
    begun = world.ranks[0].starts[30]
    world.ranks[0].stuck_at = world.ranks[1].stopped_at = begun + 0.3
    assert world.run(begun + 5.0)[0][1].ranks == (1,)


def test_a_rank_that_holds_its_interpreter_lock_is_the_culprit_however_far_it_came() -> None:
    """It runs, so its slot sees nothing; but its thread cannot send any more."""
    world = World(two(STARTUP + steps([0.2] * 200)))
    begun = world.ranks[0].starts[100]
    for rank in world.ranks:
        rank.offset_s = 0.0
        rank.stuck_at = begun + 0.1
    world.ranks[1].mute_at = begun + 0.26
    verdict = world.run(begun + 4.0)[0][1]
    assert (verdict.kind, verdict.ranks, verdict.stalled) == ("progress_stalled", (1,), (0, 1))


def test_a_stopped_process_is_the_culprit_also_where_all_fell_silent() -> None:
    """The network to the store went with it, so that only the slots can tell the two apart."""
    world = World(two(STARTUP + steps([0.4] * 200)))
    begun = world.ranks[0].starts[100]
    for rank in world.ranks:
        rank.offset_s = 0.0  # so that both are equally far by what arrived
        rank.stuck_at = begun + 0.1
        rank.cut_at = begun + 0.6
    world.ranks[1].stopped_at = begun + 0.1
    verdict = world.run(begun + 2.9)[0][1]
    assert (verdict.kind, verdict.ranks) == ("progress_stalled", (1,))


def test_ranks_that_are_equally_far_are_all_suspected() -> None:
    """A network that is gone blames nobody in particular, and hides nobody either."""
    world = World(two(STARTUP + steps([0.5] * 100)))
    begun = world.ranks[0].starts[30]
    world.ranks[0].stuck_at = world.ranks[1].stuck_at = begun + 0.3
    assert world.run(begun + 5.0)[0][1].ranks == (0, 1)


def test_a_victim_that_is_late_a_poll_before_its_culprit_is_not_blamed() -> None:
    """Their numbers stop within one step of each other, in either order."""
    script = STARTUP + steps([1.0] * 100)
    world = World(two(script))
    begun = world.ranks[0].starts[30]
    world.ranks[0].stuck_at = begun + 0.25  # waits in the collective of this step
    world.ranks[1].stuck_at = begun + 0.03  # its batch is ready, its dispatch never comes
    world.ranks[1].offset_s = 0.24
    assert world.run(begun + 9.0)[0][1].ranks == (1,)


# --- the second witness -----------------------------------------------------------------------


def test_a_broken_path_to_the_store_is_made_visible_and_is_no_verdict() -> None:
    """Its slot sees the number move: what is broken is the wire, not the worker."""
    world = World(two(STARTUP + steps([0.5] * 400)))
    world.ranks[1].cut_at = 30.0
    assert world.run(120.0) == []
    assert world.monitor.broken_paths() == ((1, 1),)
    world.ranks[1].cut_at = float("inf")
    assert world.run(125.0) == []
    assert world.monitor.broken_paths() == ()


def test_a_rank_behind_a_broken_path_is_still_watched_by_its_slot() -> None:
    """Two failures at once: the hang is found all the same, only later."""
    world = World(two(STARTUP + steps([0.5] * 1000)))
    world.ranks[1].cut_at = 30.0
    world.run(60.0)
    world.ranks[1].stuck_at = world.ranks[0].stuck_at = 60.0
    _, verdict = world.run(75.0)[0]
    assert 1 in verdict.stalled


def test_a_step_that_ends_while_the_slot_is_asked_is_no_hang() -> None:
    """The number moved between the poll and the answer."""
    world = stuck(STARTUP + steps([0.2] * 100), at=15.0)
    suspicions: list[Suspicion] = []
    while not suspicions:
        world.now += POLL_S
        suspicions = world.monitor.observe(world.now, world.beats())
    moved = {rank: {"alive": True, "state": "R", "seq": 9999, "phase": "step", "step": 60}
             for rank in (0, 1)}  # fmt: skip
    assert world.monitor.judge(world.now, suspicions[0], moved) is None
    assert world.monitor.broken_paths() == ()


def test_a_slot_that_does_not_answer_is_no_witness_of_a_stall_at_first() -> None:
    """A hung status call read as failure recovered a healthy job 24 times (skypilot#10155)."""
    world = stuck(STARTUP + steps([0.2] * 1000), at=20.0)
    for rank in world.ranks:
        rank.slot_answers = False
    ((when, verdict), *_) = world.run(30.0)
    assert verdict.kind == "progress_stalled"
    assert 21.0 + LEASE_S <= when <= 21.5 + LEASE_S + SAMPLING_S


def test_a_silent_rank_whose_slot_does_not_answer_either_is_lost() -> None:
    """Both ways to it are dead: its node is."""
    world = World(two(STARTUP + steps([0.2] * 20) + [("evaluate", 20, 1e6)]))
    world.ranks[1].mute_at = 20.0
    world.ranks[1].slot_answers = False
    assert world.run(24.0)[0][1].ranks == (1,)


def test_a_view_tells_what_the_display_needs() -> None:
    """`status` shows the age of every heartbeat, and says where it has never seen one."""
    world = World(two(STARTUP + steps([0.2] * 100)))
    world.ranks[1].cut_at = -1.0
    world.run(10.0)
    heard, unheard = world.monitor.view(1, world.now)
    assert (heard.rank, heard.pid, heard.phase) == (0, 100, "step")
    assert heard.beat_age_s is not None
    assert heard.beat_age_s <= 2 * EVERY_S
    assert (unheard.pid, unheard.beat_age_s, unheard.phase) == (None, None, "initialize")
