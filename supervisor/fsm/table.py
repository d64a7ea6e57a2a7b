"""The transition table: the one place that says what a job does next, and why.

Rows of one (event, source) are tried in order; the last of them has no guard. A pair with no row
is a bug, not a default: say `ignore` and say why.
"""

from collections.abc import Iterable
from typing import Any

from . import events as e
from .states import LIVE, TERMINAL, State

S = State
Row = dict[str, Any]
STARTING = (S.INITIALIZING, S.RESTORING)
SETTLED = (S.PROVISIONING, S.INITIALIZING, S.RUNNING, S.RESTORING)


def on(
    event: type[e.Event],
    source: State | Iterable[State],
    target: State | None,
    why: str,
    *,
    when: str = "",
    do: str = "",
) -> Row:
    """One row. `when` and `do` are names of methods of Job; a target of None stays."""
    return {
        "trigger": event.name,
        "source": [source] if isinstance(source, State) else list(source),
        "dest": target,
        "conditions": when.split(),
        "before": ["begin_entry"] if target else [],
        "after": do.split(),
        "why": why,
    }


def ignore(events: Iterable[type[e.Event]], source: State | Iterable[State], why: str) -> list[Row]:
    """Rows that change nothing; `why` is their reason."""
    return [on(event, source, None, why) for event in events]


STARTING_UP = [
    on(
        e.JobStarted,
        S.PROVISIONING,
        None,
        "a run begins where the newest restore point is",
        do="issue_generation select_restore_point",
    ),
    on(
        e.RestorePointSelected,
        S.PROVISIONING,
        None,
        "it is known where to start; now Ray places the slots",
        when="is_selecting",
        do="accept_restore_point place_slots",
    ),
    on(
        e.CapacityMissing,
        S.PROVISIONING,
        None,
        "the settings allow waiting for a larger cluster",
        when="waits_for_capacity",
        do="wait_for_capacity",
    ),
    on(
        e.CapacityMissing,
        S.PROVISIONING,
        S.DRAINING,
        "the cluster can never hold this job",
        do="drain_to_fail kill_workers",
    ),
    on(
        e.CapacityFound,
        S.PROVISIONING,
        None,
        "the wait is over; placing has a limit of its own",
        when="awaits_capacity",
        do="end_capacity_wait",
    ),
    on(
        e.DeadlinePassed,
        S.PROVISIONING,
        S.DRAINING,
        "no node joined in time",
        when="capacity_overdue",
        do="drain_to_fail kill_workers",
    ),
    *[
        on(
            event,
            S.PROVISIONING,
            S.DRAINING,
            "the slots could not be placed",
            do="drain_to_recover open_incident lose_slots kill_workers",
        )
        for event in (e.PlacementTimedOut, e.PlacementFailed)
    ],
    on(
        e.SlotsPlaced,
        S.PROVISIONING,
        S.INITIALIZING,
        "every rank has a slot",
        do="accept_slots start_workers",
    ),
    on(e.WorkersStarted, STARTING, None, "the processes run; they join, compile and load"),
    on(
        e.WorkersInitialized,
        S.INITIALIZING,
        S.RUNNING,
        "every worker holds the starting state",
        do="close_incident",
    ),
]

RUNNING = [
    on(
        e.FirstStepTaken,
        S.RUNNING,
        None,
        "training goes on; standbys failed again and again, so the next one has to wait",
        when="wants_standby standby_failed_often",
        do="note_first_step pause_standby",
    ),
    on(
        e.FirstStepTaken,
        S.RUNNING,
        None,
        "training goes on, and the next generation is prepared beside it",
        when="wants_standby",
        do="note_first_step prepare_standby",
    ),
    on(
        e.FirstStepTaken,
        S.RUNNING,
        None,
        "training goes on, and new processes are kept ready in the slots",
        when="wants_spares",
        do="note_first_step prepare_spares",
    ),
    on(e.FirstStepTaken, (S.RUNNING, S.DRAINING), None, "training goes on", do="note_first_step"),
    on(
        e.SnapshotFailed,
        (S.RUNNING, S.DRAINING),
        None,
        "training goes on; checkpoints still count",
        do="report_failed_snapshot",
    ),
    on(
        e.CheckpointCommitted,
        (S.RUNNING, S.DRAINING),
        None,
        "a new restore point; older ones may go",
        when="is_news",
        do="note_checkpoint",
    ),
    on(
        e.CheckpointFailed,
        S.RUNNING,
        S.DRAINING,
        "no save has ever worked, though the disk does: nothing would be left of the training",
        when="can_never_save",
        do="drain_to_fail open_incident kill_workers",
    ),
    on(
        e.CheckpointFailed,
        (S.RUNNING, S.DRAINING),
        None,
        "training goes on; the last committed one still counts",
        do="report_failed_checkpoint",
    ),
    on(
        e.TrainingCompleted,
        S.RUNNING,
        S.DRAINING,
        "the last step is committed",
        do="drain_to_complete kill_workers",
    ),
    on(
        e.StopRequested,
        S.RUNNING,
        S.DRAINING,
        "the workers write a last checkpoint first",
        when="wants_last_save",
        do="drain_to_stop save_workers",
    ),
    on(
        e.StopRequested,
        (S.PROVISIONING, S.INITIALIZING, S.RUNNING, S.RESTORING),
        S.DRAINING,
        "nothing new to save, or no time for it",
        do="drain_to_stop kill_workers",
    ),
]

NUMBERS = [
    on(
        e.NumbersDiverged,
        S.RUNNING,
        S.DRAINING,
        "back to a checkpoint before it, and past the batches in between",
        when="may_roll_back",
        do="drain_to_recover open_incident plan_rollback kill_workers",
    ),
    on(
        e.NumbersDiverged,
        S.RUNNING,
        S.DRAINING,
        "the settings ask for a stop; a retry would meet the same numbers",
        do="drain_to_fail open_incident kill_workers",
    ),
    on(
        e.ReplicasDiverged,
        S.RUNNING,
        S.DRAINING,
        "back to the last state on which all replicas agreed",
        do="drain_to_recover open_incident plan_return kill_workers",
    ),
    on(
        e.BatchSkipped,
        (S.RUNNING, S.DRAINING),
        None,
        "the state is as it was before the step; a person should know",
        do="report_skipped_batch",
    ),
]

LOST_ALREADY = [
    on(
        event,
        (S.PROVISIONING, S.RESTORING),
        None,
        "no slots are placed: what was lost belongs to the incident that is under way",
        when="slots_missing",
        do="note_victims",
    )
    for event in (e.SlotLost, e.NodeLost)
]

RUNGS = [
    on(
        event,
        S.RESTORING,
        S.DRAINING,
        "the promoted standby failed: the same incident goes on with new workers in the slots",
        when="was_promoted",
        do="drain_to_recover fall_a_rung note_lost_slots kill_workers",
    )
    for event in (*e.FAILURES, e.StandbyLost)
]

FAILURES = [
    *[
        on(
            event,
            (*STARTING, S.RUNNING),
            S.DRAINING,
            "the culprit is known",
            when="is_primary",
            do="drain_to_recover open_incident kill_workers look_ahead",
        )
        for event in (e.WorkerCrashed, e.WorkerRaised)
    ],
    *[
        on(
            event,
            (*STARTING, S.RUNNING),
            S.DRAINING,
            "a victim spoke first; the culprit has a moment to show itself",
            do="drain_to_recover open_incident call_last look_ahead",
        )
        for event in (e.WorkerCrashed, e.WorkerRaised)
    ],
    *[
        on(
            event,
            (*STARTING, S.RUNNING),
            S.DRAINING,
            "the workers stand still",
            do="drain_to_recover open_incident collect_evidence look_ahead",
        )
        for event in (e.HeartbeatLost, e.ProgressStalled)
    ],
    *[
        on(
            event,
            (*STARTING, S.RUNNING),
            S.DRAINING,
            "the slots must be placed anew",
            do="drain_to_recover open_incident lose_slots kill_workers",
        )
        for event in (e.SlotLost, e.NodeLost)
    ],
    *[
        on(
            event,
            SETTLED,
            S.DRAINING,
            "it happened while no daemon was there, and a daemon's absence costs no budget",
            do="drain_to_recover open_incident charge_nobody lose_slots kill_workers",
        )
        for event in (e.WorkersOrphaned, e.SlotsVanished)
    ],
    on(
        e.ClusterLost,
        S.RESTORING,
        None,
        "no slots are placed: the next placement connects anew",
        when="slots_missing",
    ),
    on(
        e.ClusterLost,
        SETTLED,
        S.DRAINING,
        "the slots went with the cluster",
        do="drain_to_recover open_incident lose_slots kill_workers",
    ),
    *[
        on(
            event,
            STARTING,
            S.DRAINING,
            "the start failed",
            do="drain_to_recover open_incident kill_workers",
        )
        for event in (e.InitializationFailed, e.RestoreFailed)
    ],
    on(
        e.RestorePointRejected,
        (S.INITIALIZING, S.RESTORING),
        S.DRAINING,
        "more restore points were damaged than are ever kept: something writes them again",
        when="restores_in_vain",
        do="drain_to_fail kill_workers",
    ),
    on(
        e.RestorePointRejected,
        S.INITIALIZING,
        S.DRAINING,
        "the restore point is damaged; it goes to quarantine and the one before is taken",
        do="drain_to_recover open_incident fall_a_rung quarantine_restore_point",
    ),
    on(
        e.RestorePointRejected,
        S.RESTORING,
        S.DRAINING,
        "the restore point is damaged; it goes to quarantine and the one before is taken",
        when="is_starting",
        do="drain_to_recover fall_a_rung quarantine_restore_point",
    ),
    on(
        e.RestorePointsExhausted,
        (S.PROVISIONING, S.RESTORING),
        S.DRAINING,
        "something was committed and nothing can be loaded: starting over would lose it",
        when="is_selecting",
        do="drain_to_fail kill_workers",
    ),
]

KEPT_FIRST = "the newest state is in memory only: it goes to the disk for the next run"
DRAINING = [
    *[
        on(
            e.StopRequested,
            S.DRAINING,
            target,
            "no time to write the newest snapshot to the disk",
            when=f"is_keeping hurries {purpose}",
            do="finish",
        )
        for target, purpose in ((S.STOPPED, "drains_to_stop"), (S.FAILED, "drains_to_fail"))
    ],
    *[
        on(
            event,
            S.DRAINING,
            None,
            "this is the culprit that the last call waited for",
            when="names_culprit",
            do="name_culprit note_lost_slots kill_workers",
        )
        for event in e.FAILURES
    ],
    *[
        on(
            event,
            S.DRAINING,
            None,
            "the last save cannot succeed any more",
            when="is_saving",
            do="note_lost_slots note_failed_save kill_workers",
        )
        for event in e.FAILURES
    ],
    *[
        on(event, S.DRAINING, None, "evidence, no new failure", do="note_victims note_lost_slots")
        for event in e.FAILURES
    ],
    on(
        e.DeadlinePassed,
        S.DRAINING,
        None,
        "no culprit showed itself",
        when="last_call_ended",
        do="collect_evidence",
    ),
    on(
        e.DeadlinePassed,
        S.DRAINING,
        None,
        "the last save took too long",
        when="last_save_overdue",
        do="note_failed_save kill_workers",
    ),
    on(
        e.WorkersSaved,
        S.DRAINING,
        None,
        "the last checkpoint is committed",
        when="is_saving",
        do="kill_workers",
    ),
    on(
        e.LastSaveFailed,
        S.DRAINING,
        None,
        "a failed last save does not stop a drain",
        when="is_saving",
        do="note_failed_save kill_workers",
    ),
    on(
        e.EvidenceCollected,
        S.DRAINING,
        None,
        "nothing more to learn from the living",
        when="collects_evidence",
        do="kill_workers",
    ),
    on(
        e.RestorePointQuarantined,
        S.DRAINING,
        None,
        "nothing picks it again",
        when="is_quarantining",
        do="kill_workers",
    ),
    on(
        e.HousekeepingFailed,
        S.DRAINING,
        None,
        "it stays where it is, and is not picked again all the same",
        when="quarantine_failed",
        do="kill_workers report_housekeeping",
    ),
    on(
        e.StopRequested,
        S.DRAINING,
        None,
        "no time for what the drain still waits for",
        when="stop_hurries",
        do="drain_to_stop kill_workers",
    ),
    on(
        e.StopRequested,
        S.DRAINING,
        None,
        "stopping prevails over recovering",
        when="stop_prevails",
        do="drain_to_stop",
    ),
    on(
        e.TrainingCompleted,
        S.DRAINING,
        None,
        "the last step was committed after all: nothing is left to do",
        do="drain_to_complete",
    ),
    *[
        on(event, S.DRAINING, None, "evidence, no new failure", do="lose_slots")
        for event in (e.ClusterLost, e.WorkersOrphaned, e.SlotsVanished)
    ],
    *[
        row
        for event, more in ((e.WorkersGone, ""), (e.ExitUnproven, "quarantine_slots "))
        for row in (
            on(event, S.DRAINING, None, "said twice", when="is_keeping"),
            on(
                event,
                S.DRAINING,
                S.COMPLETED,
                "all is committed and the workers are gone",
                when="drains_to_complete",
                do=f"{more}finish",
            ),
            on(
                event,
                S.DRAINING,
                None,
                KEPT_FIRST,
                when="drains_to_fail holds_newer_state",
                do=f"{more}keep_snapshot",
            ),
            on(
                event,
                S.DRAINING,
                S.FAILED,
                "no retry can help",
                when="drains_to_fail",
                do=f"{more}finish",
            ),
            on(
                event,
                S.DRAINING,
                None,
                KEPT_FIRST,
                when="drains_to_stop lost_last_save holds_newer_state",
                do=f"{more}keep_snapshot",
            ),
            on(
                event,
                S.DRAINING,
                S.STOPPED,
                "stopped as asked",
                when="drains_to_stop",
                do=f"{more}finish",
            ),
            on(
                event,
                S.DRAINING,
                None,
                "the incident is charged to its budget",
                do=f"{more}judge_incident",
            ),
        )
    ],
    on(
        e.RestorePointSelected,
        S.DRAINING,
        None,
        "the standby loads it while the processes end",
        when="looks_ahead",
        do="note_restore_point preload_standby",
    ),
    *[
        on(
            event,
            S.DRAINING,
            None,
            "nothing found ahead; it is looked for again when it is needed",
            when="looks_ahead",
            do="forget_ahead",
        )
        for event in (e.RestorePointsUnreadable, e.RestorePointsExhausted)
    ],
    on(
        e.RetryGranted,
        S.DRAINING,
        S.RESTORING,
        "the standby has loaded its state, or is about to",
        when="is_ahead",
        do="advance_generation take_what_is_ahead promote_standby",
    ),
    on(
        e.RetryGranted,
        S.DRAINING,
        S.RESTORING,
        "the next generation may start",
        do="advance_generation back_off",
    ),
    *[
        on(
            event,
            S.DRAINING,
            None,
            KEPT_FIRST,
            when="holds_newer_state",
            do="give_up keep_snapshot",
        )
        for event in (e.RetryBudgetExhausted, e.RetryRuledOut)
    ],
    *[
        row
        for event, note in (
            (e.SnapshotKept, "note_kept_snapshot"),
            (e.SnapshotNotKept, "note_unkept_snapshot"),
        )
        for row in (
            on(
                event,
                S.DRAINING,
                S.COMPLETED,
                "all was committed after all",
                when="is_keeping drains_to_complete",
                do="finish",
            ),
            on(
                event,
                S.DRAINING,
                S.STOPPED,
                "stopped as asked; the next run starts from what is on the disk",
                when="is_keeping drains_to_stop",
                do=f"{note} finish",
            ),
            on(
                event,
                S.DRAINING,
                S.FAILED,
                "no retry can help; the next run starts from what is on the disk",
                when="is_keeping",
                do=f"{note} finish",
            ),
        )
    ],
    on(e.RetryBudgetExhausted, S.DRAINING, S.FAILED, "the budget is spent", do="give_up finish"),
    on(e.RetryRuledOut, S.DRAINING, S.FAILED, "no retry can help", do="give_up finish"),
]

STANDBY = [
    on(
        e.StandbyReady,
        LIVE,
        None,
        "the next generation needs only a state",
        when="is_standby",
        do="note_standby",
    ),
    on(
        e.StandbyLost,
        LIVE,
        None,
        "the job goes on without; it is prepared again after a pause",
        when="is_standby",
        do="lose_standby",
    ),
    on(
        e.WorkersGone,
        LIVE,
        None,
        "the leaving generation has ended",
        when="is_leaving",
        do="note_departure",
    ),
    on(
        e.ExitUnproven,
        LIVE,
        None,
        "a process of the lost standby may live: nothing else is started in these slots",
        when="is_leaving",
        do="note_departure quarantine_slots_later",
    ),
    on(
        e.DeadlinePassed,
        S.RUNNING,
        None,
        "the pause after a lost standby is over",
        when="standby_is_due",
        do="prepare_standby",
    ),
    on(
        e.StandbyDisabled,
        LIVE,
        None,
        "it fails again and again: it is tried again, at growing intervals",
        do="report_standby_disabled",
    ),
]

RESTORING = [
    on(
        e.RestorePointsUnreadable,
        (S.PROVISIONING, S.RESTORING),
        None,
        "a disk that cannot be read now may be read later; starting over would lose what it holds",
        when="is_selecting",
        do="select_again_later",
    ),
    on(
        e.DeadlinePassed,
        (S.PROVISIONING, S.RESTORING),
        None,
        "the pause is over",
        when="pause_ended",
        do="select_restore_point",
    ),
    on(
        e.RestorePointSelected,
        S.RESTORING,
        None,
        "the standby has all but the state",
        when="is_selecting may_promote",
        do="accept_restore_point promote_standby",
    ),
    on(
        e.RestorePointSelected,
        S.RESTORING,
        None,
        "new workers start in the slots that are there",
        when="is_selecting slots_intact",
        do="accept_restore_point restore_workers",
    ),
    on(
        e.RestorePointSelected,
        S.RESTORING,
        S.PROVISIONING,
        "slots are missing; the restore point is carried along",
        when="is_selecting",
        do="accept_restore_point place_slots",
    ),
    on(
        e.WorkersRestored,
        S.RESTORING,
        S.RUNNING,
        "every worker holds the restore point",
        when="is_starting",
        do="close_incident",
    ),
]

HOUSEKEEPING = [
    on(
        e.CheckpointSkipped,
        LIVE,
        None,
        "an older restore point is taken, and a person should know why",
        do="note_skipped_checkpoint",
    ),
    on(
        e.StandstillEnded,
        LIVE,
        None,
        "everything stood still, so nothing failed; what breaks of it now is charged to nobody",
        do="note_standstill",
    ),
    on(
        e.ExitProven,
        LIVE,
        None,
        "a proof that comes later ends the doubt",
        do="end_doubt",
    ),
    on(
        e.SupervisorRestarted,
        S.PROVISIONING,
        None,
        "placing is ordered again, and says again if capacity is missing",
        when="awaits_capacity",
        do="end_capacity_wait",
    ),
    on(
        e.SupervisorRestarted,
        LIVE,
        None,
        "the workers never stopped; what was ordered and not done is ordered again",
    ),
    on(
        e.HeartbeatStoreLost,
        LIVE,
        None,
        "blind, not dead: the slots are asked instead, and training goes on",
        do="note_blindness",
    ),
    on(
        e.HeartbeatStoreRecovered,
        LIVE,
        None,
        "heartbeats can be read again; only time in which nobody looked is left out",
        do="note_sight",
    ),
    on(
        e.HousekeepingFailed,
        LIVE,
        None,
        "nothing waits for it, but a person should know",
        do="report_housekeeping",
    ),
    on(
        e.DifferencesFound,
        LIVE,
        None,
        "training goes on, but a person should know",
        do="note_differences",
    ),
]

NOT_STEPPED = "not all workers are ready, so none has stepped"
NOT_STARTED = "nothing was started in this generation"
NO_WORKER = "no worker of this generation exists yet"
IGNORED = [
    *ignore([e.JobStarted], [s for s in LIVE if s is not S.PROVISIONING], "a run opens once"),
    *ignore([e.DeadlinePassed], LIVE, "nothing waits for it any more"),
    *ignore(
        [e.RestorePointSelected],
        (S.INITIALIZING, S.RUNNING),
        "the generation has its restore point already",
    ),
    *ignore([e.RestorePointSelected], S.DRAINING, "found after the drain had begun"),
    *ignore(
        [e.RestorePointSelected, e.RestorePointsExhausted, e.RestorePointsUnreadable],
        (S.PROVISIONING, S.RESTORING),
        "not asked for now: the generation has its restore point, or has to wait for its backoff",
    ),
    *ignore(
        [e.RestorePointsExhausted, e.RestorePointsUnreadable],
        (S.INITIALIZING, S.RUNNING),
        "the generation has its restore point already",
    ),
    *ignore(
        [e.RestorePointsExhausted, e.RestorePointsUnreadable],
        S.DRAINING,
        "found after the drain had begun",
    ),
    *ignore([e.RestorePointRejected], S.PROVISIONING, NO_WORKER),
    *ignore([e.RestorePointRejected], S.RESTORING, NOT_STARTED),
    *ignore([e.RestorePointRejected], S.RUNNING, "all workers said that they hold it"),
    *ignore([e.RestorePointRejected], S.DRAINING, "evidence, no new failure"),
    *ignore(
        [e.RestorePointQuarantined], (*SETTLED, S.DRAINING), "the drain no longer waits for it"
    ),
    *ignore(
        [
            e.SlotsPlaced,
            e.CapacityMissing,
            e.CapacityFound,
            e.PlacementTimedOut,
            e.PlacementFailed,
        ],
        (S.INITIALIZING, S.RUNNING, S.RESTORING),
        "the generation has its slots already",
    ),
    *ignore([e.CapacityFound], S.PROVISIONING, "the placement goes on already"),
    *ignore(
        [
            e.SlotsPlaced,
            e.CapacityMissing,
            e.CapacityFound,
            e.PlacementTimedOut,
            e.PlacementFailed,
        ],
        S.DRAINING,
        "found after the drain had begun; the slots are released or placed anew",
    ),
    *ignore([e.WorkersStarted], S.PROVISIONING, NO_WORKER),
    *ignore([e.WorkersStarted], S.RUNNING, "said twice"),
    *ignore([e.WorkersStarted], S.DRAINING, "started before the order to end reached the slots"),
    *ignore([e.WorkersInitialized], (S.PROVISIONING, S.RESTORING), NO_WORKER),
    *ignore([e.WorkersInitialized], S.RUNNING, "said twice"),
    *ignore([e.WorkersInitialized], S.DRAINING, "said before the order to end arrived"),
    *ignore([e.WorkersRestored], (S.PROVISIONING, S.INITIALIZING), NO_WORKER),
    *ignore([e.WorkersRestored], S.RESTORING, NOT_STARTED),
    *ignore([e.WorkersRestored], S.RUNNING, "said twice"),
    *ignore([e.WorkersRestored], S.DRAINING, "said before the order to end arrived"),
    *ignore(
        [e.InitializationFailed, e.RestoreFailed, e.HeartbeatLost, e.ProgressStalled],
        S.PROVISIONING,
        NO_WORKER,
    ),
    *ignore([e.WorkerCrashed, e.WorkerRaised], S.PROVISIONING, NO_WORKER),
    *ignore([e.SlotLost, e.NodeLost], S.PROVISIONING, "no slots are placed"),
    *ignore(
        [e.InitializationFailed, e.RestoreFailed],
        S.RUNNING,
        "all workers said that they were ready",
    ),
    *ignore(
        [e.FirstStepTaken, e.CheckpointCommitted, e.CheckpointFailed, e.TrainingCompleted],
        S.PROVISIONING,
        NO_WORKER,
    ),
    *ignore(
        [e.FirstStepTaken, e.CheckpointCommitted, e.CheckpointFailed, e.TrainingCompleted],
        STARTING,
        NOT_STEPPED,
    ),
    *ignore([e.CheckpointCommitted], (S.RUNNING, S.DRAINING), "said twice"),
    *ignore(
        [e.SnapshotFailed, e.NumbersDiverged, e.ReplicasDiverged, e.BatchSkipped],
        S.PROVISIONING,
        NO_WORKER,
    ),
    *ignore(
        [e.SnapshotFailed, e.NumbersDiverged, e.ReplicasDiverged, e.BatchSkipped],
        STARTING,
        NOT_STEPPED,
    ),
    *ignore(
        [e.NumbersDiverged, e.ReplicasDiverged],
        S.DRAINING,
        "said by another rank too, or too late to matter",
    ),
    *ignore([e.StandbyReady, e.StandbyLost], LIVE, "it is no standby any more"),
    *ignore([e.WorkersSaved, e.LastSaveFailed], SETTLED, "no last save was asked for"),
    *ignore([e.WorkersSaved, e.LastSaveFailed], S.DRAINING, "the drain no longer waits for it"),
    *ignore([e.SnapshotKept, e.SnapshotNotKept], SETTLED, "only a job that fails keeps one"),
    *ignore([e.SnapshotKept, e.SnapshotNotKept], S.DRAINING, "the drain does not wait for it"),
    *ignore([e.EvidenceCollected], SETTLED, "the incident is closed"),
    *ignore([e.EvidenceCollected], S.DRAINING, "the drain no longer waits for it"),
    *ignore([e.WorkersGone, e.ExitUnproven], SETTLED, "the order to end was another generation's"),
    *ignore([e.StopRequested], S.DRAINING, "asked twice, or the end is decided already"),
    *ignore(
        [event for event in e.EVENTS.values() if event not in e.RAISED],
        sorted(TERMINAL, key=lambda state: state.name),
        "nothing follows an end",
    ),
]

TRANSITIONS: list[Row] = [
    *STARTING_UP,
    *RUNNING,
    *NUMBERS,
    *LOST_ALREADY,
    *RUNGS,
    *FAILURES,
    *STANDBY,
    *DRAINING,
    *RESTORING,
    *HOUSEKEEPING,
    *IGNORED,
]

# Verdicts on a retry are raised while the job drains and nowhere else.
IMPOSSIBLE = frozenset(
    {(event, state) for event in e.VERDICTS for state in State if state is not S.DRAINING}
    | {(e.StandbyDisabled, state) for state in TERMINAL}
)
