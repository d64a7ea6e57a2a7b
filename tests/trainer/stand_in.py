"""A child of a slot that follows the protocol of `trainer.process` and does what it is told.

Started as a script, so that no test of slots waits for JAX.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Read the spec, then carry out orders until their pipe closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--reports", type=int)
    parser.add_argument("--orders", type=int)
    options = parser.parse_args()
    descriptor, orders = options.reports, os.fdopen(options.orders)

    def report(kind: str, **fields: object) -> None:
        line = json.dumps({"report": kind, "at": time.time(), **fields})
        os.write(descriptor, line.encode() + b"\n")

    spec = json.loads(orders.readline())
    print(f"rank {spec['rank']} of generation {spec['generation']} has started", flush=True)
    report("started", pid=os.getpid(), coordinator=spec.get("coordinator"))
    for line in iter(orders.readline, ""):
        order = json.loads(line)
        _obey(order, report)
    os._exit(0)


def _obey(order: dict[str, Any], report: Callable[..., None]) -> None:
    match order["order"]:
        case "exit":
            report("completed", step=order.get("step"))
            os._exit(order["status"])
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "tell":
            report(
                "told",
                environment=dict(os.environ),
                cwd=os.getcwd(),  # noqa: PTH109, it is what the child itself sees
                session=os.getsid(0),
                arguments=sys.argv,
            )
        case "flood":
            for number in range(order["reports"]):
                report("flooded", number=number)
        case "garbage":
            os.write(int(sys.argv[2]), b"no report\n")
        case "grandchild":
            code = "import time; time.sleep(600)"
            grandchild = subprocess.Popen(
                [sys.executable, "-c", code], start_new_session=order["own_session"]
            )
            report("spawned", pid=grandchild.pid)
        case "ready":
            report("ready", step=0)
        case "stop":
            report("stopping", after_step=3)
        case "go":
            report("saved", step=4)
        case "deaf":
            report("deaf")
            time.sleep(600)
        case other:
            report("acknowledged", order=other)


if __name__ == "__main__":
    main()
