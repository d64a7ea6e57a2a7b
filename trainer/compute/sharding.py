"""Where the parts of arrays lie: the mesh axes, and the one table from logical axes to them.

A model names what an axis of an array *is* ("embed", "heads"); only this table says over which
devices it is spread. Nothing here knows of processes, files or tasks.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

AXES = ("dp", "fsdp", "tp")
"""Replicas, parts of a replica that gather parameters as they need them, parts of each matrix."""

ROWS = ("dp", "fsdp")
"""The rows of a batch are spread over all that are not parts of one matrix."""

RULES: Mapping[str, str | tuple[str, ...] | None] = {
    # of parameters
    "layers": None,
    "vocabulary": "tp",
    "embed": "fsdp",
    "heads": "tp",
    "key_value_heads": "tp",
    "hidden": "tp",
    "low_rank": None,
    # of activations
    "rows": ROWS,
    "length": None,
    "stream": None,
    "active_heads": "tp",
    "active_hidden": "tp",
    "active_vocabulary": "tp",
}
"""Logical to physical axes; None = whole on every device."""

LogicalAxes = tuple[str | None, ...]


def spec_of(mesh: Mesh | AbstractMesh, axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
    """The physical axes of an array; an axis that does not divide evenly stays whole.

    Raises `KeyError` for a name that the table does not have.
    """
    sizes = dict(mesh.shape)
    spec: list[str | tuple[str, ...] | None] = []
    for name, length in zip(axes, shape, strict=True):
        physical = None if name is None else RULES[name]
        names = (physical,) if isinstance(physical, str) else physical or ()
        parts = math.prod(sizes[one] for one in names)
        spec.append(physical if parts > 1 and length % parts == 0 else None)
    return PartitionSpec(*spec)


def spread_evenly(mesh: Mesh, shape: Sequence[int]) -> PartitionSpec:
    """For an array whose axes nobody named: its longest axis that fits, over "fsdp"."""
    parts = int(mesh.shape["fsdp"])
    fitting = [index for index, length in enumerate(shape) if length % parts == 0 and length]
    if parts == 1 or not fitting:
        return PartitionSpec()
    longest = max(fitting, key=lambda index: (shape[index], -index))
    return PartitionSpec(*("fsdp" if index == longest else None for index in range(len(shape))))


def constrain(values: jax.Array, *axes: str | None) -> jax.Array:
    """Say while a step is traced where an activation lies; without a mesh it says nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return values
    spec = spec_of(mesh, axes, values.shape)
    constrained: jax.Array = jax.lax.with_sharding_constraint(values, spec)
    return constrained
