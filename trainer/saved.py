"""What a job has saved, for other programs: the state of whatever task it trained, as numpy arrays.

Needs neither the task nor its settings. For looking at and taking away, not for training.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.compute.step import named_leaves
from trainer.settings import SettingsError
from trainer.state import checkpoint


def load(run_dir: Path | str, step: int | None = None, like: Any = None) -> Any:
    """The state that a job has saved after `step` finished steps; None: the newest.

    `run_dir` is the folder of the job, `<job.run_dir>/<job.name>`. Dicts and lists by the paths of
    the leaves: `load(...)["params"]["dense"]["kernel"]`; if these contradict each other, one dict
    by the dotted paths. With a tree `like` the state (only its structure is looked at) the same
    structure. Every byte is compared with its digest. Raises FileNotFoundError if there is no such
    checkpoint, `trainer.state.checkpoint.CheckpointRejected` for one that is damaged, and KeyError
    if `like` has a leaf that was not saved.
    """
    import jax

    leaves, _ = checkpoint.load_leaves(find(Path(run_dir).resolve(), step))
    if like is None:
        return tree_of(leaves)
    values = [leaves[name] for name, _ in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def find(job_dir: Path, step: int | None) -> Path:
    """The checkpoint of a step, of the highest generation. Raises FileNotFoundError."""
    points = checkpoint.finished(job_dir) or checkpoint.finished(job_dir / "alone")
    found = [path for at, _, path in points if step in (None, at)]
    if not found:
        steps = ", ".join(str(at) for at, _, _ in points) or "none at all"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{job_dir}: {what}; there are: {steps}")
    return found[0]


def tree_of(leaves: Mapping[str, Any]) -> Any:
    """Dicts and lists out of dotted paths; as they are where one path goes on below another."""
    tree: dict[str, Any] = {}
    for name, values in leaves.items():
        *above, last = name.split(".")
        place = tree
        for key in above:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                return dict(leaves)
        if last in place:
            return dict(leaves)
        place[last] = values
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    inner = {key: _with_lists(value) for key, value in tree.items()}
    places = [str(number) for number in range(len(inner))]
    if inner and set(inner) == set(places):
        return [inner[place] for place in places]
    return inner


def write(out: Path, kind: str, leaves: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """One file of arrays by their dotted paths, there in whole or not at all.

    Types that the format has no name for, like bfloat16 in `npz`, become float32, without loss.
    Raises `SettingsError` if the package of the other kind is missing, and OSError.
    """
    if out.exists():
        raise SettingsError(f"--out: {out} is there already; name a new file")
    draft = out.with_name(f".{out.name}.new")
    draft.unlink(missing_ok=True)
    try:
        if kind == "npz":
            # As numpy.savez does, which takes a leaf of the name `file` for its own argument.
            with zipfile.ZipFile(draft, "w") as archive:
                for name, values in leaves.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        array = _known(values)
                        np.lib.format.write_array(member, array, allow_pickle=False)
        else:
            _write_safetensors(draft, leaves, about)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)


def _write_safetensors(out: Path, leaves: Mapping[str, Any], about: Mapping[str, str]) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError:
        text = "--format: the package safetensors is not installed; npz needs none"
        raise SettingsError(text) from None
    held = {
        name: np.ascontiguousarray(_known(values, "bfloat16", "float8_e4m3fn", "float8_e5m2"))
        for name, values in leaves.items()
    }
    try:
        save_file(held, str(out), metadata=dict(about))
    except SafetensorError as error:
        raise SettingsError(f"--format: {error}; npz can hold it") from None


def _known(values: Any, *others: str) -> Any:
    """numpy's own types and the others as they are; the rest as float32, which holds them all."""
    is_known = values.dtype.isbuiltin == 1 or values.dtype.name in others
    return values if is_known else values.astype(np.float32)
