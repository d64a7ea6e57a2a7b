"""The task of the house: a small language model over the bytes of real text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import optax

from trainer import model
from trainer.data import windows as data
from trainer.optimizer import make_optimizer
from trainer.task import Context, Task


class LanguageModel(Task):
    """Predicts the next byte. The state holds "params", "optimizer" and the PRNG "key"."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.settings
        self._rows = context.rows(settings.data.batch_size)
        self._text = data.read_text(settings.data, context.config_dir)
        self._optimizer = make_optimizer(
            settings.optimizer, steps=settings.steps, decayed=model.decayed(settings.model)
        )

    def init(self, key: Any) -> dict[str, Any]:
        """Parameters, optimizer state, and the key that dropout draws from."""
        first, rest = jax.random.split(key)
        params = model.init_params(self.context.settings.model, first)
        return {"params": params, "optimizer": self._optimizer.init(params), "key": rest}

    def train_step(
        self, state: dict[str, Any], batch: jax.Array
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """One AdamW step on rows `[batch, length + 1]`; the loss is the mean over all of them."""
        settings = self.context.settings.model
        key, drop = jax.random.split(state["key"])
        value, gradients = jax.value_and_grad(
            lambda params: model.loss(settings, params, batch, drop if settings.dropout else None)
        )(state["params"])
        updates, optimizer = self._optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer, "key": key}, {"loss": value}

    def batch(self, step: int) -> Any:
        """uint8 `[rows of this rank, length + 1]`."""
        settings = self.context.settings
        rows = data.train_rows(
            self._text,
            seed=settings.seed,
            step=step,
            count=settings.data.batch_size,
            length=settings.data.sequence_length,
        )
        return rows[self._rows]

    def evaluate(self, state: dict[str, Any], batch: jax.Array) -> Mapping[str, Any]:
        """The loss without dropout."""
        return {"loss": model.loss(self.context.settings.model, state["params"], batch)}

    def held_out_batch(self, index: int) -> Any:
        """uint8 `[rows of this rank, length + 1]`, the same at every evaluation."""
        settings = self.context.settings
        rows = data.held_out_rows(
            self._text,
            index=index,
            batches=settings.evaluate_batches,
            count=settings.data.batch_size,
            length=settings.data.sequence_length,
        )
        return rows[self._rows]

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in a step over all ranks."""
        return self.context.settings.data.batch_size * self.context.settings.data.sequence_length

    def facts(self) -> Mapping[str, Any]:
        """The text by its digest, its unigram entropy (nats a byte), the number of parameters."""
        wanted = model.shapes(self.context.settings.model).values()
        return {
            "text_sha256": self._text.digest,
            "text_bytes": len(self._text.train) + len(self._text.held_out),
            "text_files": self._text.files,
            "unigram_entropy": data.unigram_entropy(self._text),
            "parameters": sum(math.prod(shape) for shape in wanted),
        }
