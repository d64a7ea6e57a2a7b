"""Drills: faults that an operator orders for a running job, to see it recover."""

import itertools
from typing import Any

from supervisor.cluster.slots import Cluster, ClusterError
from trainer.wire.faults import KINDS
from trainer.wire.heartbeat import PHASES

_SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP"}


class Drills:
    """The faults that were ordered. One that waits for a phase or step outlives a generation."""

    def __init__(self, allowed: bool, workers: int) -> None:
        self._allowed = allowed
        self._workers = workers
        self._numbers = itertools.count(1)
        self._armed: dict[str, dict[str, Any]] = {}

    def armed_for(self, rank: int) -> list[dict[str, Any]]:
        """What a new worker of this rank must know of."""
        return [
            {key: value for key, value in fault.items() if key != "rank"}
            for fault in self._armed.values()
            if fault["rank"] == rank
        ]

    def struck(self, id: str) -> None:
        """A worker said that it is about to strike: never twice."""
        self._armed.pop(id, None)

    async def order(
        self,
        request: dict[str, Any],
        cluster: Cluster,
        generation: int,
        *,
        at_step: int = -1,
        steps: int | None = None,
    ) -> dict[str, Any]:
        """Carry out or arm one fault; the answer says what will happen.

        `at_step` is the step that its rank has begun, `steps` how many the job has.
        """
        problem = self._problem(request) or _out_of_reach(request, at_step, steps)
        if problem:
            return {"ok": False, "error": problem}
        rank, kind = request["rank"], request["kind"]
        fault = {"id": f"drill-{next(self._numbers)}", "rank": rank, "kind": kind}
        fault |= {key: request.get(key) for key in ("phase", "step", "seconds")}
        waits = fault["phase"] is not None or fault["step"] is not None
        if waits:
            self._armed[fault["id"]] = fault
        try:
            if kind in _SIGNALS and not waits:
                await cluster.signal(generation, rank, _SIGNALS[kind])
            else:
                order = {key: value for key, value in fault.items() if key != "rank"}
                await cluster.order(generation, rank, {"order": "fault", **order})
        except ClusterError as error:
            if not waits:
                return {"ok": False, "error": f"rank {rank} cannot be struck now: {error}"}
            return {"ok": True, "message": f"Armed for the next worker of rank {rank}."}
        return {"ok": True}

    def _problem(self, request: dict[str, Any]) -> str:
        if not self._allowed:
            return "drills are off for this job; set control.drills = true and start it again"
        rank, kind = request.get("rank"), request.get("kind")
        if not isinstance(rank, int) or not 0 <= rank < self._workers:
            return f"there is no rank {rank!r}; the ranks are 0 to {self._workers - 1}"
        if kind not in KINDS:
            return f"unknown kind {kind!r}; one of {', '.join(KINDS)}"
        if request.get("phase") not in (None, *PHASES):
            return f"unknown phase {request['phase']!r}; one of {', '.join(PHASES)}"
        for name, types in (("step", (int,)), ("seconds", (int, float))):
            value = request.get(name)
            if value is not None and (not isinstance(value, types) or value < 0):
                return f"{name} must be a number from 0 up, not {value!r}"
        return ""


def _out_of_reach(request: dict[str, Any], at_step: int, steps: int | None) -> str:
    """Why a step of this request will never be begun; empty if it may."""
    step = request.get("step")
    if step is None:
        return ""
    # Other phases of the step that has begun may still come.
    if step < at_step or (step == at_step and request.get("phase") in (None, "step")):
        return f"rank {request['rank']} has begun step {at_step}; choose a step above that"
    if steps is not None and step >= steps:
        return f"the job has {steps} steps, the last of which is {steps - 1}"
    return ""
