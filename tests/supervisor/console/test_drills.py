"""Drills that are accepted happen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.console.drills import Drills


class Workers:
    """A cluster that remembers its orders."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []

    async def order(self, generation: int, rank: int, order: dict[str, Any]) -> None:
        self.orders.append({"generation": generation, "rank": rank, **order})


def order(workers: Workers, at_step: int = 700, **request: Any) -> dict[str, Any]:
    drills = Drills(allowed=True, workers=2)
    wanted = {"rank": 1, "kind": "kill", **request}
    return asyncio.run(drills.order(wanted, workers, 3, at_step=at_step, steps=1000))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"step": 3}, "has begun step 700"),
        ({"step": 700}, "has begun step 700"),
        ({"step": 699, "phase": "checkpoint"}, "has begun step 700"),
        ({"step": 1000}, "the last of which is 999"),
    ],
)
def test_a_step_that_will_not_come_is_refused(request_: dict[str, Any], words: str) -> None:
    """`fault --step 3` at step 700 was accepted, and nothing ever happened."""
    workers = Workers()
    answer = order(workers, **request_)
    assert not answer["ok"]
    assert words in answer["error"]
    assert workers.orders == []


@pytest.mark.parametrize(
    "request_", [{"step": 701}, {"step": 999}, {"step": 700, "phase": "evaluate"}]
)
def test_a_step_that_may_come_is_waited_for(request_: dict[str, Any]) -> None:
    """The worker knows when."""
    workers = Workers()
    assert order(workers, **request_)["ok"]
    assert workers.orders[0]["step"] == request_["step"]


def test_before_any_heartbeat_every_step_may_come() -> None:
    """Workers that start have not yet said where they are."""
    assert order(Workers(), at_step=-1, step=0)["ok"]
