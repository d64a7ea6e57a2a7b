"""What Ray is asked for: nodes, placement groups, slot actors, by exact name.

Every call blocks, and belongs in a thread; Ray is imported by the first of them, not before.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.cluster.own_servers import RAYLET_VARIABLE
from trainer.slot.actor import GROUPS, ResilientWorker

NAMESPACE = "everstep"
_NODE_ID_LABEL = "ray.io/node-id"  # which Ray gives to every node
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster. `resources`: all that it has, in use or not."""

    id: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]


def prefix(run_dir: Path) -> str:
    """What the names of this run's actors and groups start with.

    It holds a digest of the run directory: two users of one cluster may both name a job "first".
    """
    run = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:8]
    return f"everstep:{run_dir.name}:{run}:"


class _Unchanged(list[str]):
    """A path that Ray (2.60) does not extend by our working directory and that of the command.

    In the slots these would come first, and a `trainer.py` there would be taken for ours.
    """

    def extend(self, values: Iterable[str]) -> None:
        """Leave it as it is."""


def outlive_raylet() -> None:
    """Keep Ray (2.60) from ending this process with its raylet. Call it before Ray is imported.

    Its library calls `_exit(1)` when it then writes to the raylet, unless the process that should
    outlive it is alive: the one named here, or else the parent if that is not process 1. A daemon
    under systemd, in a container or after `nohup` has process 1 as its parent.
    """
    os.environ[RAYLET_VARIABLE] = str(os.getpid())


def connect(address: str) -> None:
    """Make this process a driver of the cluster at `address`; a former connection ends.

    It asks for no runtime environment: within a submitted job that of the job counts.
    """
    outlive_raylet()
    import ray

    if ray.is_initialized():
        ray.shutdown()
    forget_token()
    # At a lower level Ray says that it sets no SIGTERM handler in this thread, as it should be.
    # Nor may its raylets write into our display: what happens to slots is told by their watch.
    ray._private.worker._worker_logs_enabled = False
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _Unchanged()
    ray.init(
        address=address,
        namespace=NAMESPACE,
        job_config=job,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def forget_token() -> None:
    """Let the variables count anew: Ray (2.60) keeps the first token that a process has read."""
    import ray

    raylet: Any = ray._raylet  # its types do not know the loader
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def disconnect() -> None:
    """Cease to be a driver; 11 s where the head is gone."""
    import ray

    ray.shutdown()


def _connected() -> Any:
    """Ray, whose calls would start a cluster of their own where there is no connection."""
    import ray

    if not ray.is_initialized():
        raise RuntimeError("not connected to a cluster")
    return ray


def nodes() -> list[Node]:
    """The cluster's nodes, dead ones included."""
    table: list[dict[str, Any]] = _connected().nodes()
    return [
        Node(
            id=one["NodeID"],
            address=one["NodeManagerAddress"],
            is_alive=one["Alive"],
            resources=one.get("Resources", {}),
        )
        for one in table
    ]


def addresses_elsewhere(living: Sequence[Node]) -> list[str]:
    """The addresses of nodes that are not on this machine."""
    return sorted({node.address for node in living if not _is_local(node.address)})


def _is_local(address: str) -> bool:
    """Whether a socket could be bound to it: the kernel knows all of this machine's addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_here() -> str:
    """Return HOST:PORT of a cluster that is there; "" if there is none.

    RAY_ADDRESS names it, or else `ray start` has begun it on this machine.
    """
    if given := os.environ.get("RAY_ADDRESS", "").strip():
        return "" if given in ("auto", "local") else given
    from ray._private.utils import read_ray_address

    found: str | None = read_ray_address()
    return found or ""


def gpus_here() -> int:
    """Return how many GPUs Ray would find on this machine; what hides devices counts."""
    outlive_raylet()
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        return 0
    hidden = manager.get_current_process_visible_accelerator_ids()
    found: int = manager.get_current_node_num_accelerators()
    return found if hidden is None else min(found, len(hidden))


def shortage(
    bundle: Mapping[str, float], workers: int, placement: str, living: Sequence[Node]
) -> str | None:
    """Why the cluster, were it empty, could not hold the job; None where it could."""
    for name, amount in bundle.items():
        total = sum(node.resources.get(name, 0.0) for node in living)
        if total < workers * amount:
            return (
                f"needs {_plain(workers * amount)} {_named(name)}, the cluster has {_plain(total)}"
            )
    places = [_fits(bundle, node) for node in living]
    each = ", ".join(f"{_plain(amount)} {_named(name)}" for name, amount in bundle.items())
    if placement == "strict_spread":
        able = sum(count > 0 for count in places)
        if able < workers:
            return f"needs {workers} nodes with {each} each (strict_spread), the cluster has {able}"
    elif sum(places) < workers:
        return f"needs {workers} slots of {each}, the cluster's nodes can hold {sum(places)}"
    return None


def rank_order(at: Sequence[str], devices: Sequence[Sequence[str]]) -> list[int]:
    """Indices of slots in rank order: by node as first met in `at`, by device, as created."""
    node_order = list(dict.fromkeys(at))
    keys = [
        (node_order.index(node), list(map(_device, own)))
        for node, own in zip(at, devices, strict=True)
    ]
    return sorted(range(len(at)), key=keys.__getitem__)


def create_group(
    name: str,
    bundle: Mapping[str, float],
    workers: int,
    placement: str,
    avoid: Sequence[str] = (),
) -> Any:
    """Ask for a detached placement group of `workers` equal bundles; it need not be there yet.

    No bundle comes to lie on a node of `avoid` (ids).
    """
    _connected()
    from ray.util import placement_group

    selector = {_NODE_ID_LABEL: f"!in({','.join(avoid)})"}
    return placement_group(
        [dict(bundle) for _ in range(workers)],
        strategy=placement.upper(),
        name=name,
        lifetime="detached",
        bundle_label_selector=[selector] * workers if avoid else None,
    )


def group_nodes(group: Any) -> list[str] | None:
    """The node of each bundle, once all are reserved."""
    _connected()
    from ray.util import placement_group_table

    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        return None
    by_index = table["bundles_to_node_id"]
    return [by_index[index] for index in sorted(by_index)]


def find_group(name: str) -> Any | None:
    """The placement group of this name, if it is there."""
    _connected()
    from ray.util import get_placement_group

    try:
        return get_placement_group(name)
    except ValueError:
        return None


def remove_groups(name_prefix: str, timeout_s: float) -> list[str]:
    """Remove the groups whose names start so; their names. Raises TimeoutError naming the rest."""
    from ray.util import get_placement_group, remove_placement_group

    names = _groups(name_prefix)
    for name in names:
        try:
            remove_placement_group(get_placement_group(name))
        except ValueError:  # gone since we looked
            continue
    deadline = time.monotonic() + timeout_s
    while left := _groups(name_prefix):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not removed after {timeout_s:.0f} s: {', '.join(left)}")
        time.sleep(_PAUSE_S)
    return names


def create_slot(
    name: str,
    group: Any,
    index: int,
    bundle: Mapping[str, float],
    arguments: Mapping[str, Any],
) -> Any:
    """Start a slot's actor in bundle `index`; the handle, before the actor is up."""
    ray = _connected()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    own = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU")}
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_task_retries": 0,
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": own,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }
    actor_class = ray.remote(concurrency_groups=GROUPS)(ResilientWorker)
    return actor_class.options(**options).remote(**arguments)


def find_slots(name_prefix: str) -> dict[str, Any]:
    """The living slot actors whose names start so."""
    ray = _connected()
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(name_prefix):
            try:
                found[entry["name"]] = ray.get_actor(entry["name"], namespace=NAMESPACE)
            except ValueError:  # gone since we looked
                continue
    return found


def kill_slots(actors: Sequence[Any]) -> None:
    """End slot actors; their children die with them."""
    ray = _connected()
    for actor in actors:
        ray.kill(actor, no_restart=True)


def await_no_slots(name_prefix: str, timeout_s: float) -> None:
    """Wait until no such name is taken. Raises TimeoutError naming the rest."""
    deadline = time.monotonic() + timeout_s
    while left := find_slots(name_prefix):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"still there after {timeout_s:.0f} s: {', '.join(left)}")
        time.sleep(_PAUSE_S)


def _groups(name_prefix: str) -> list[str]:
    _connected()
    from ray.util import placement_group_table

    return [
        table["name"]
        for table in placement_group_table().values()
        if table["name"].startswith(name_prefix) and table["state"] != "REMOVED"
    ]


def _fits(bundle: Mapping[str, float], node: Node) -> int:
    counts = (node.resources.get(name, 0.0) // amount for name, amount in bundle.items() if amount)
    return int(min(counts, default=0.0))


def _device(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (0, name)


def _plain(amount: float) -> str:
    return f"{amount:g}"


def _named(resource: str) -> str:
    return f"{resource}s" if resource in ("CPU", "GPU") else resource
