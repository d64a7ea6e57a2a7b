"""A SIGKILL of a random rank every few seconds: what still gets done, and what is left at the end.

The default job runs on a Ray head and a Redis that are not its own, so that placement groups,
actors and keys would outlive it if it forgot them. Goodput is the time of the steps that count
(each step once) over the time from the first strike to the end of the storm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import redis

from supervisor.cluster.own_servers import EmbeddedRay, EmbeddedRedis, authenticate
from supervisor.record import recoveries as history
from tests.benchmarks.overhead import kinds_of
from tests.benchmarks.report import (
    circumstances,
    note,
    parser_of,
    print_circumstances,
    print_table,
    summary,
    write_json,
)
from tests.benchmarks.supervised import Row, Supervised, folder_of, measure_this_tree
from tests.faults.harness import MARK, SHARED_MEMORY
from trainer.host.processes import environment, look_at_all
from trainer.state.snapshot import directory_of
from trainer.wire.store_address import StoreAddress


def measure(
    folder: Path, *, every_s: float, minutes: float, standby: str, snapshot_every: str, seed: int
) -> Row:
    """The whole storm: strikes, figures, and the list of what was left (empty if all is well)."""
    measure_this_tree()
    run = Supervised(
        folder,
        **{
            "recovery.standby": standby,
            "recovery.snapshot_every_steps": snapshot_every
            if snapshot_every == "auto"
            else int(snapshot_every),
        },
    )
    in_shared_memory = set(SHARED_MEMORY.iterdir())
    with _cluster(folder / "cluster", run.job.mark) as (address, store):
        url = f"redis://:{store.password}@{store.host}:{store.port}"
        _add_cluster(run, address, url)
        before = _listening(run)
        try:
            run.start()
            run.until_stepping(steps=30, standby=standby == "generation")
            figures = _storm(run, every_s=every_s, minutes=minutes, seed=seed)
            ports = _listening(run) - before
            figures["exit_status"] = run.stop()
            figures["daemon_goodput"] = run.job.result()["goodput"]
            left = _left(run, in_shared_memory, ports, before)
            left += _left_in_cluster(address, store)
        finally:
            run.job.daemons[-1].end()
    left += [f"process {one.pid} after the head" for one in run.job.processes()]
    figures["left"] = left
    run.job.end()
    return figures


@contextlib.contextmanager
def _cluster(folder: Path, mark: str) -> Iterator[tuple[str, StoreAddress]]:
    """A Ray head and a Redis of the benchmark's own, with the mark of the job."""
    folder.mkdir()
    authenticate(folder)
    os.environ[MARK] = mark
    head, store = EmbeddedRay(folder), EmbeddedRedis(folder)
    try:
        yield head.ensure(), store.ensure()
    finally:
        del os.environ[MARK]
        store.stop()
        head.stop()


def _add_cluster(run: Supervised, address: str, url: str) -> None:
    settings = run.job.folder / "job.toml"
    lines = [f'cluster.address = "{address}"', f'heartbeats.redis_url = "{url}"']
    settings.write_text(settings.read_text() + "\n".join(lines) + "\n")


def _storm(run: Supervised, *, every_s: float, minutes: float, seed: int) -> Row:
    chance = random.Random(seed)
    run.read()
    generation = run.metrics.rows[-1]["generation"]
    began, strikes, missed = time.time(), 0, 0
    seen = len(run.journal.rows)
    next_at = time.monotonic()
    end_at = next_at + 60 * minutes
    while next_at < end_at:
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at += every_s
        workers = run.status().get("workers", [])
        pids = [worker["pid"] for worker in workers if worker["pid"]]
        if not pids:
            missed += 1
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)
            strikes += 1
        assert run.daemon.process.poll() is None, f"the daemon ended{run.job.story()}"
        run.read()
        last = run.metrics.rows[-1]
        note(f"strike {strikes}: generation {last['generation']}, step {last['step']}")
    time.sleep(max(0.0, end_at - time.monotonic()))
    ended = time.time()
    run.until_stepping(steps=1, standby=False)
    run.read()
    return {
        "strikes": strikes,
        "missed": missed,
        **_figures(run, seen, generation, began, ended),
    }


def _figures(run: Supervised, seen: int, generation: int, began: float, ended: float) -> Row:
    calm = [row["step_s"] for row in run.rows_until(began)]
    rows = [row for row in run.metrics.rows if began <= row["at"] <= ended]
    useful: dict[int, float] = {}
    for row in rows:
        useful[row["step"]] = row["step_s"]
    records = run.journal.rows[seen:]
    recoveries = history.recoveries(records)
    took = [row["total_s"] for row in recoveries if row["total_s"] is not None]
    effects = [
        effect["effect"] for record in records for effect in record.get("effects", ()) if effect
    ]
    restored = [
        record["event"]["kind"]
        for record in records
        if record["kind"] == "move" and record["event"]["event"] == "restore_point_selected"
    ]
    ends = [row["at"] for row in rows]
    gaps = [after - before for before, after in zip([began, *ends], [*ends, ended], strict=True)]
    seconds = ended - began
    return {
        "seconds": seconds,
        "generations": rows[-1]["generation"] - generation,
        "steps": len(useful),
        "done_again": len(rows) - len(useful),
        "calm_step_s": statistics.median(calm),
        "storm_step_s": statistics.median(useful.values()),
        "goodput": sum(useful.values()) / seconds,
        "share_of_calm_speed": len(useful) * statistics.median(calm) / seconds,
        "longest_without_step_s": max(gaps),
        "recoveries": len(recoveries),
        "recovery_s": summary(took),
        "rungs": {
            "standby": effects.count("PromoteStandby"),
            "new workers": effects.count("RestoreWorkers"),
        },
        "restored": {kind: restored.count(kind) for kind in dict.fromkeys(restored)},
        "events": _count(row["event"] for row in recoveries),
    }


def _count(names: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found


def _left(
    run: Supervised, in_shared_memory: set[Path], ports: set[int], before: set[int]
) -> list[str]:
    """What the job left on this machine; the head and Redis still run, and are not its."""
    time.sleep(1.0)
    own = directory_of(run.job.run_dir)
    new = set(SHARED_MEMORY.iterdir()) - in_shared_memory
    # What Ray's head or other jobs hold is not this job's.
    left = [str(path) for path in new if path == own]
    kinds = kinds_of(run, {"workers": [], "standby": None})
    wrong = [pid for pid, kind in kinds.items() if kind not in ("Ray's head", "Redis")]
    left += [f"process {pid}: {' '.join(psutil.Process(pid).cmdline())[:80]}" for pid in wrong]
    held = _listening(run) - before
    left += [f"port {port}" for port in sorted(held & ports)]
    with contextlib.suppress(FileNotFoundError):
        left += [str(path) for path in (run.job.run_dir / "control",) if path.exists()]
    return left


def _listening(run: Supervised) -> set[int]:
    """The TCP ports on which processes of the job, its head and its Redis listen."""
    marked = {pid for pid in look_at_all() if environment(pid).get(MARK) == run.job.mark}
    return {
        one.laddr.port
        for one in psutil.net_connections(kind="tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in marked
    }


def _left_in_cluster(address: str, store: StoreAddress) -> list[str]:
    import ray
    from ray.util import list_named_actors, placement_group_table

    client = redis.Redis(
        host=store.host, port=store.port, password=store.password, decode_responses=True
    )
    left = [f"Redis key {key} (expires in {client.ttl(key)} s)" for key in client.scan_iter("*")]
    client.close()
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        groups: dict[str, Any] = placement_group_table()
        left += [
            f"placement group {group['name']}: {group['state']}"
            for group in groups.values()
            if group["state"] != "REMOVED"
        ]
        left += [f"actor {one['name']}" for one in list_named_actors(all_namespaces=True)]
    finally:
        ray.shutdown()
    return left


def main() -> None:
    """Measure, print, write; exit status 1 if something was left."""
    parser = parser_of("storm", __doc__)
    parser.add_argument("--every", type=float, default=10.0, metavar="S")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--standby", choices=("generation", "spares", "none"), default="generation")
    parser.add_argument("--snapshot-every", default="auto", metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    facts = circumstances()
    with folder_of("storm", keep=options.keep) as folder:
        figures = measure(
            folder,
            every_s=options.every,
            minutes=options.minutes,
            standby=options.standby,
            snapshot_every=options.snapshot_every,
            seed=options.seed,
        )
    title = (
        f"a SIGKILL every {options.every:g} s for {options.minutes:g} min, standby "
        f"{options.standby}, snapshots {options.snapshot_every}"
    )
    rows = [[name, _cell(value)] for name, value in figures.items() if name != "left"]
    print_table(title, ["", "figure"], rows)
    print("left behind: " + ("; ".join(figures["left"]) or "nothing"))
    print_circumstances(facts)
    write_json(options.json, {"benchmark": "storm", **facts, **figures})
    raise SystemExit(1 if figures["left"] else 0)


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    return f"{value:.3f}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
