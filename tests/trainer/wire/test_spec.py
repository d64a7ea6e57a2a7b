"""A spec says everything, and what it says wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.config import CheckpointSettings, TrainerSettings
from trainer.wire.faults import Fault, FaultError
from trainer.wire.spec import HeartbeatStore, RestorePoint, SpecError, WorkerSpec

SPEC = WorkerSpec(
    job="first",
    run_dir="/runs/first",
    generation=2,
    epoch=1,
    rank=1,
    world_size=2,
    local_rank=1,
    node_rank=0,
    coordinator="127.0.0.1:4711",
    config_dir="/home/me",
    trainer=TrainerSettings(steps=50),
    checkpoint=CheckpointSettings(),
    beat_file="/dev/shm/beat",
    restore_point=RestorePoint(kind="checkpoint", path="/runs/4", step=4, generation=1),
    heartbeat=HeartbeatStore(host="127.0.0.1", port=6379, every_s=0.5, password="secret"),
    faults=(Fault(id="1", kind="kill", phase="step", step=3),),
)


def test_a_spec_survives_the_pipe() -> None:
    """Slot and process must mean the same."""
    text = SPEC.to_json()
    assert "\n" not in text
    assert WorkerSpec.from_json(text) == SPEC


def test_a_password_never_shows_in_a_log_line() -> None:
    """Secrets are neither arguments nor log lines."""
    assert "secret" not in repr(SPEC)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"surprise": 1}, "spec.surprise"),
        ({"rank": "1"}, "spec.rank is '1'"),
        ({"rank": True}, "spec.rank is True"),
        ({"trainer": {"steps": 0}}, "spec.trainer"),
        ({"restore_point": {"kind": "checkpoint"}}, "spec.restore_point.path is missing"),
        ({"heartbeat": []}, "spec.heartbeat"),
        ({"faults": [{"id": "1", "kind": "tickle"}]}, "tickle"),
    ],
)
def test_a_wrong_spec_is_refused_by_key(change: dict[str, Any], complaint: str) -> None:
    """A worker that guesses does something else than it was told."""
    raw = {**json.loads(SPEC.to_json()), **change}
    with pytest.raises(SpecError, match=complaint):
        WorkerSpec.from_json(json.dumps(raw))


def test_a_missing_key_is_named() -> None:
    """Defaults exist only where a default is right for everyone."""
    raw = json.loads(SPEC.to_json())
    del raw["coordinator"]
    with pytest.raises(SpecError, match=r"spec\.coordinator is missing"):
        WorkerSpec.from_json(json.dumps(raw))
    with pytest.raises(SpecError, match="not JSON"):
        WorkerSpec.from_json("hello")


@pytest.mark.parametrize(
    ("more", "phase", "step", "due"),
    [
        ({}, "step", 9, True),
        ({}, "compile", -1, False),
        ({"step": 4}, "step", 4, True),
        ({"step": 4}, "step", 5, False),
        ({"step": 4}, "checkpoint", 4, False),
        ({"phase": "checkpoint"}, "checkpoint", 9, True),
        ({"phase": "checkpoint", "step": 3}, "checkpoint", 9, False),
    ],
)
def test_a_fault_strikes_where_it_was_asked_to(
    more: dict[str, Any], phase: str, step: int, due: bool
) -> None:
    """A drill that strikes elsewhere tests something else."""
    assert Fault(id="1", kind="raise", **more).due(phase, step) is due


@pytest.mark.parametrize(
    "raw",
    [
        {"id": "1", "kind": "kill", "phase": "nowhere"},
        {"id": "1", "kind": "kill", "step": "3"},
        {"id": "1", "kind": "sleep", "seconds": "3"},
        {"id": "1", "kind": "kill", "when": 3},
        [],
    ],
)
def test_a_malformed_fault_is_refused(raw: Any) -> None:
    """An order that is half understood strikes at the wrong time."""
    with pytest.raises(FaultError):
        Fault.from_dict(raw)
