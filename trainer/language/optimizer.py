"""AdamW with a linear warm-up, a cosine decay and a limit on the gradient's norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from trainer.config import OptimizerSettings


def make_optimizer(settings: OptimizerSettings, *, steps: int, decayed: Mapping[str, bool]) -> Any:
    """An optax transformation for a job of `steps` steps.

    `decayed` mirrors the parameters: True where weight decay applies (Loshchilov and Hutter, 2019).
    A job too short for the warm-up warms up for half of its steps.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=min(settings.warmup_steps, steps // 2),
        decay_steps=steps,
        end_value=settings.learning_rate * settings.final_fraction,
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.gradient_norm_max),
        optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2),
        optax.add_decayed_weights(settings.weight_decay, mask=dict(decayed)),
        optax.scale_by_learning_rate(schedule),
    )
