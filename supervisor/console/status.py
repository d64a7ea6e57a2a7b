"""What `status` answers and the display shows: a picture of a run, made of what is known now."""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from supervisor.daemon.loop import Daemon
from supervisor.daemon.roster import Roster
from supervisor.fsm.job import Job
from supervisor.fsm.states import State
from trainer.wire.heartbeat import BeatMessage

_STARTING = {
    "launch": "the workers start: Python and JAX are imported",
    "initialize": "the workers join each other",
    "compile": "the step is compiled, or a stored program loaded",
    "restore": "the workers load the state",
}
_DRAINING = {
    "last_call": "waiting a moment for the cause",
    "saving": "a last checkpoint is written; a second Ctrl-C or signal stops without it",
    "evidence": "stacks and log tails are collected",
    "killing": "the workers are ended, and their end is proven",
}
HINT = "to see a recovery, in another terminal: python -m supervisor fault --rank 1 --kind kill"


def snapshot(
    daemon: Daemon,
    *,
    name: str,
    steps: int,
    epoch: int,
    started_at: float,
    beats: Mapping[tuple[int, int], BeatMessage],
    changed: Sequence[str],
    code_changed: Sequence[str] = (),
    drills: bool,
    drain_warning: str = "",
    disk: Sequence[Mapping[str, Any]] = (),
    every_steps: Mapping[str, int | str] = MappingProxyType({}),
    result: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The fields of `status --json` (see the README), each None or empty if unknown.

    `every_steps`: steps between two restore points by their kind, as the settings want it.
    `result`: what result.json holds, once the job has ended; it overrules the last heartbeats.
    """
    job, now = daemon.job, daemon.clock()
    roster = daemon.performers.rosters.get(job.active)
    first = beats.get((job.active, 0))
    ready = roster.said.get("ready", {}).get(0, {}) if roster else {}
    step = (
        first.step
        if first and first.step >= 0
        else max(job.result.get("step", 0), job.restore_step, job.committed_step)
    )
    # At the end the last heartbeats are behind what was reached.
    said = {key: value for key, value in {**job.result, **result}.items() if value is not None}
    step = said["step"] + said.get("steps_lost", 0) if "step" in said else step
    return {
        "job": name,
        "state": job.state.name,
        "generation": job.active,
        "step": step,
        "steps": steps,
        "workers": _workers(daemon, beats),
        "standby": _standby(daemon),
        "snapshot_step": first.snapshot_step if first else None,
        "restore_point": _restore_point(job),
        "every_steps": {
            kind: _interval(roster, kind, every) for kind, every in every_steps.items()
        },
        "budgets": job.budgets,
        "supervisor": {"pid": os.getpid(), "epoch": epoch, "started_at": started_at},
        "incident": _incident(daemon),
        "activity": activity(daemon),
        "purpose": job.purpose or None,
        "heartbeat_store_lost_since": job.blind_since,
        "journal_lost_since": daemon.journal_lost_since,
        "settings_changed": list(changed),
        "code_changed": list(code_changed),
        "differences": list(job.differences),
        "drain_warning": drain_warning or None,
        "disk": list(disk),
        **_measured(first, max(0, steps - step)),
        **{key: said[key] for key in ("loss", "held_out_loss") if key in said},
        "reason": said.get("reason"),
        **{key: said.get(key) for key in ("remedy", "log", "log_tail")},
        "unigram_entropy": ready.get("unigram_entropy"),
        "last_event": _last_event(daemon),
        "uptime_s": round(now - started_at, 1),
        "retry_in_s": daemon.timers.left_s("backoff"),
        "hint": HINT if drills and job.state.name == "RUNNING" and not job.incidents else None,
    }


def _measured(first: BeatMessage | None, steps_left: int) -> dict[str, float | None]:
    """What rank 0 measures. Before the first step its heartbeat holds zeros: nothing is known."""
    if first is None:
        names = ("loss", "held_out_loss", "tokens_per_s", "step_s", "time_left_s")
        return dict.fromkeys(names)
    step_s = first.durations.get("step", (first.step_s, 0.0))[0] or None
    return {
        "loss": first.loss,
        "held_out_loss": first.held_out_loss,
        "tokens_per_s": first.tokens_per_s or None,
        "step_s": step_s,
        "time_left_s": round(steps_left * step_s, 1) if step_s else None,
    }


def activity(daemon: Daemon) -> str | None:
    """What is being done while no step is, and how long a first start usually takes."""
    job, workers = daemon.job, daemon.performers.workers
    if job.stage == "capacity":
        return f"waiting for nodes: {job.reason}"
    if job.state is State.DRAINING:
        return _DRAINING.get(job.stage)
    if job.state is State.PROVISIONING:
        doing = f"Ray starts, and places {workers} slots"
    elif job.stage == "starting":
        roster = daemon.performers.rosters.get(job.active)
        phases = set(roster.phases.values()) if roster else {"launch"}
        doing = next((said for phase, said in _STARTING.items() if phase in phases), "")
    else:
        return None
    usual = "" if job.stepped or job.active > 1 else "; a first start usually takes 15 to 30 s"
    return f"{doing}{usual}" if doing else None


def _interval(roster: Roster | None, kind: str, every: int | str) -> int | str:
    """What "auto" settled on, as soon as the workers have said it."""
    said = roster.said.get(f"{kind}_interval", {}) if roster and every == "auto" else {}
    return int(said[min(said)]["every_steps"]) if said else every


def _standby(daemon: Daemon) -> dict[str, Any] | None:
    job, generation = daemon.job, daemon.job.standby
    if generation is None:
        return {"generation": None, "ready": False, "disabled": True} if job.standby_off else None
    pids = daemon.performers.pids.get(generation, {})
    roster = daemon.performers.rosters.get(generation)
    phases = roster.phases if roster else {}
    return {
        "generation": generation,
        "ready": job.standby_ready,
        "disabled": False,
        "start_s": job.standby_start_s or None,
        "memory_mb": job.standby_memory_mb or None,
        "workers": [
            {"rank": rank, "pid": pids.get(rank), "phase": phases.get(rank)}
            for rank in range(daemon.performers.workers)
        ],
    }


def _workers(daemon: Daemon, beats: Mapping[tuple[int, int], BeatMessage]) -> list[dict[str, Any]]:
    performers, active = daemon.performers, daemon.job.active
    roster = performers.rosters.get(active)
    if roster is None:
        return []
    views = {view.rank: view for view in performers.views(active)}
    slots = {slot.rank: slot for slot in performers.cluster.slots}
    rows = []
    for rank in range(performers.workers):
        beat, view = beats.get((active, rank)), views.get(rank)
        stepped = roster.said.get("stepped", {}).get(rank, {})
        slot = slots.get(rank)
        rows.append(
            {
                "rank": rank,
                "pid": performers.pids.get(active, {}).get(rank),
                "node": slot.node_id if slot else None,
                "host": slot.host if slot else None,
                "address": slot.address if slot else None,
                "phase": beat.phase if beat else roster.phases[rank],
                "step": beat.step if beat and beat.step >= 0 else None,
                "beat_age_s": _rounded(view.beat_age_s) if view else None,
                "memory_mb": _megabytes(stepped.get("rss_bytes")),
                "device_memory_mb": _megabytes(stepped.get("device_bytes")),
            }
        )
    return rows


def _restore_point(job: Job) -> dict[str, Any] | None:
    if job.committed_step < 0:
        return None
    verified = any(step == job.committed_step for _, step in job.verified)
    return {"kind": "checkpoint", "step": job.committed_step, "verified": verified}


def _incident(daemon: Daemon) -> dict[str, Any] | None:
    incident = daemon.job.incident
    if incident is None:
        return None
    return {
        "number": incident.number,
        "event": incident.event,
        "cause": incident.cause,
        "ranks": incident.ranks,
        "victims": incident.victims,
        "story": incident.story,
        "frame": incident.frame or None,
        "at": incident.opened_at,
        **daemon.chronicle.recovery_from(incident.opened_at, incident.step),
    }


def _last_event(daemon: Daemon) -> dict[str, Any] | None:
    move = daemon.last_move
    if move is None:
        return None
    return {"event": move.event.name, "at": move.event.at, "why": move.why}


def _megabytes(size: float | None) -> float | None:
    return None if size is None else round(size / 1e6, 1)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
