"""The model of a job as it stands: out of its newest checkpoint, or as it was before training.

One process and one device hold it in whole. For looking at a model and for taking it away, not for
training.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compute.step import kept, named_leaves, seed_key
from trainer.config import TASK_OF_THE_HOUSE, TrainerSettings
from trainer.language import model
from trainer.language.task import LanguageModel
from trainer.settings import SettingsError
from trainer.state import checkpoint
from trainer.task import Context, TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model with its parameters (numpy, low-rank additions added) and where they are from."""

    task: LanguageModel
    params: dict[str, Any]
    source: str


def read_trained(
    settings: TrainerSettings, config_dir: Path, job_dir: Path, *, untrained: bool = False
) -> Trained:
    """The model after the newest finished checkpoint of a job, trained by the daemon or alone.

    Without one, or `untrained`: the model that training starts from. Raises `SettingsError`.
    """
    if settings.task != TASK_OF_THE_HOUSE:
        raise SettingsError(
            f'[trainer] task = "{settings.task}": only "{TASK_OF_THE_HOUSE}" can be generated from '
            "and exported; a task of your own knows best what its state means: trainer.load, and "
            "export with --format, give it to you as arrays"
        )
    task = LanguageModel(Context.alone(settings, config_dir))
    found = checkpoint.finished(job_dir) or checkpoint.finished(job_dir / "alone")
    if found and not untrained:
        path = found[0][2]
        try:
            state, _ = checkpoint.load(path, _blank(task, settings.seed))
        except (checkpoint.CheckpointRejected, TaskError) as error:
            raise SettingsError(f"{error}; were the settings others when it was saved?") from None
        trained = {
            name.removeprefix("params."): values
            for name, values in named_leaves(state)
            if name.startswith("params.")
        }
        return Trained(task=task, params=task.whole_params(trained), source=f"checkpoint {path}")
    given = task.initial_values()
    if given:
        params = {name.partition(".")[2]: value.whole() for name, value in given.items()}
        return Trained(task=task, params=params, source=f"model {settings.model.pretrained}")
    key = jax.random.split(seed_key(settings.seed))[0]
    drawn = jax.jit(lambda key: model.init_params(task.architecture, key))(key)
    params = {name: np.asarray(values) for name, values in drawn.items()}
    return Trained(task=task, params=params, source=f"seed {settings.seed}")


def _blank(task: LanguageModel, seed: int) -> Any:
    """The form of what is saved of the state, on the host, at no cost of memory."""

    def blank(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    tree = jax.eval_shape(task.init, seed_key(seed))
    leaves = [blank(leaf) for _, leaf in named_leaves(tree)]
    return kept(task, jax.tree.unflatten(jax.tree.structure(tree), leaves))
