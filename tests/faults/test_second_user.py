"""What any user of the machine can do to a job that trains, as far as the README lists it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests.faults.conftest import MakeJob
from tests.faults.harness import PATIENCE_S, Numbers
from trainer.host.processes import raise_file_limit

full = pytest.mark.full

FIRST = struct.pack("<q", 0)  # what gloo's connecting side sends: which pair it belongs to
STANDBY: dict[str, Any] = {
    "recovery.standby": "generation",
    "recovery.snapshot_every_steps": 1,
}


def take_a_place(pids: Sequence[int]) -> bytes:
    """Connect to each port of these ranks as soon as it is there, as if it were the peer.

    Returns the first bytes that a rank sent to the stranger; all connections are closed then.
    """
    held: dict[int, socket.socket] = {}
    deadline = time.monotonic() + PATIENCE_S
    ranks = [psutil.Process(pid) for pid in pids]
    try:
        while time.monotonic() < deadline:
            for rank in ranks:
                for one in rank.net_connections("tcp4"):
                    if one.status == psutil.CONN_LISTEN and one.laddr.port not in held:
                        forged = socket.create_connection(one.laddr)
                        forged.sendall(FIRST)
                        forged.setblocking(False)
                        held[one.laddr.port] = forged
            for forged in held.values():
                try:
                    if told := forged.recv(1 << 16):
                        return told
                except BlockingIOError:
                    continue
            time.sleep(0.001)
        raise AssertionError("no rank has taken a stranger for its peer")
    finally:
        for forged in held.values():
            forged.close()


@full
def test_a_stranger_in_the_place_of_a_rank_is_one_incident_and_recovered(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """gloo has no password: a rank sent what it had to the first that said eight bytes of zero."""
    tiny = job()
    daemon = tiny.start()
    started = daemon.until("workers_started")
    assert take_a_place([pid for _, pid in started["pids"]])
    assert daemon.exit_status() == 0
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 1


@full
def test_strangers_that_are_late_half_done_or_talk_nonsense_do_nothing(
    job: MakeJob, undisturbed: Numbers
) -> None:
    """1,500 idle connections ended a worker once, for want of descriptors."""
    raise_file_limit()
    tiny = job(**{**STANDBY, "trainer.options.pace_s": 0.1})
    daemon = tiny.start()
    started = daemon.until("workers_started")
    daemon.until("standby_ready")
    held = []
    for _, pid in started["pids"]:
        for one in psutil.Process(pid).net_connections("tcp4"):
            if one.status == psutil.CONN_LISTEN:
                for said in [b""] * 1500 + [FIRST[:3], FIRST, FIRST, b"\xff" * 70_000]:
                    held.append(socket.create_connection(one.laddr))
                    held[-1].sendall(said)
    assert len(held) >= 2 * 1504
    assert daemon.exit_status() == 0
    for one in held:
        one.close()
    tiny.must_equal(undisturbed)
    assert tiny.result()["failures"] == 0
