"""The task of the house: a language model on text, from the seed or pretrained, whole or LoRA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.compute.sharding import constrain
from trainer.config import TrainerSettings
from trainer.data.source import Source, open_source
from trainer.data.tokenizer import BytesTokenizer, Tokenizer
from trainer.language import model
from trainer.language.architecture import Architecture, of_settings
from trainer.language.optimizer import make_optimizer
from trainer.language.pretrained.model import Pretrained, open_pretrained
from trainer.settings import SettingsError
from trainer.task import WEIGHT, Context, Task

Tables = dict[str, dict[str, Any]]
"""A state's tables of parameters: "params" are trained; "base", with low-rank additions only, is
not."""


class LanguageModel(Task):
    """Predicts the next token.

    The state holds "params", "optimizer" and the PRNG "key"; with low-rank additions these are the
    "params", and the weights that they are added to are "base": the optimizer keeps nothing for
    them, and no checkpoint holds them.
    """

    reads_all_settings = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = context.settings
        self._compute = model.Compute.of_settings(settings.model)
        self._pretrained = self._open(settings, context.config_dir)
        self.architecture = _architecture(settings, self._pretrained)
        self._rows = context.rows(settings.data.batch_size)
        self._optimizer = make_optimizer(
            settings.optimizer, steps=settings.steps, decayed=model.decayed(self._trained_shapes())
        )

    @functools.cached_property
    def _source(self) -> Source:
        """Opened when it is needed: whoever only looks at the model needs no data."""
        settings = self.context.settings
        return open_source(
            settings.data,
            self.tokenizer,
            self.context.config_dir,
            seed=settings.seed,
            held_out_batches=settings.evaluate_batches,
            tick=self.context.tick,
        )

    @staticmethod
    def _open(settings: TrainerSettings, config_dir: str) -> Pretrained | None:
        name = settings.model.pretrained
        return open_pretrained(name, config_dir) if name else None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """That of the pretrained model, or bytes."""
        if self._pretrained is None:
            return BytesTokenizer()
        tokenizer = self._pretrained.read_tokenizer()
        if tokenizer.vocabulary > self.architecture.vocabulary:
            raise SettingsError(
                f"{self._pretrained.path}: the tokenizer has {tokenizer.vocabulary} tokens, the "
                f"model knows {self.architecture.vocabulary}; they do not belong together"
            )
        return tokenizer

    def init(self, key: Any) -> dict[str, Any]:
        """Parameters, optimizer state, and the key that dropout draws from."""
        first, rest = jax.random.split(key)
        settings = self.context.settings.model
        if settings.lora_rank:
            draw, base = jax.random.split(first)
            params = model.init_low_rank(
                self.architecture, settings.lora_rank, settings.lora_targets, draw
            )
            tables = {"params": params, "base": model.init_params(self.architecture, base)}
        else:
            tables = {"params": model.init_params(self.architecture, first)}
        return {**tables, "optimizer": self._optimizer.init(tables["params"]), "key": rest}

    def initial_values(self) -> Mapping[str, Any]:
        """The weights of the pretrained model, read from its files part by part."""
        if self._pretrained is None:
            return {}
        table = "base" if self.context.settings.model.lora_rank else "params"
        return {f"{table}.{name}": value for name, value in self._pretrained.values.items()}

    def frozen(self, name: str) -> bool:
        """What low-rank additions are added to; it is in the model's files already."""
        return name.startswith("base.")

    def logical_axes(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """By the name of the parameter, which the optimizer's moments of it bear too."""
        axes = model.logical_axes(name.rpartition(".")[2])
        if axes is None or len(axes) != len(shape):
            return (None,) * len(shape)
        return axes

    def train_step(
        self, state: dict[str, Any], batch: dict[str, jax.Array]
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """One AdamW step on a batch as `trainer.data.source.Rows` says.

        The loss is the mean over all targets that count.
        """
        key, drop = jax.random.split(state["key"])
        value, gradients = self._gradients(state, batch, drop if self._drops else None)
        updates, optimizer = self._optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "optimizer": optimizer, "key": key}, {"loss": value}

    def batch(self, step: int) -> Any:
        """This rank's rows; see `trainer.data.source.Rows`."""
        return self._source.train_rows(step, self._rows)

    def evaluate(self, state: dict[str, Any], batch: dict[str, jax.Array]) -> Mapping[str, Any]:
        """The loss without dropout, and how many targets it is the mean of."""
        weights = _weights(batch)
        rows, length = batch["tokens"].shape
        targets = jnp.float32(rows * (length - 1)) if weights is None else jnp.sum(weights)
        loss = self._loss(state["params"], state, batch, weights, None, None)
        return {"loss": loss, WEIGHT: targets}

    def held_out_batch(self, index: int) -> Any:
        """This rank's rows, the same at every evaluation."""
        return self._source.held_out_rows(index, self._rows)

    def position(self, step: int) -> Mapping[str, Any]:
        """The epoch, and the samples that were drawn."""
        return self._source.position(step)

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in a step over all ranks."""
        return self._source.tokens_per_step

    def facts(self) -> Mapping[str, Any]:
        """The data and the model by their digests and sizes."""
        trained = sum(math.prod(shape) for shape in self._trained_shapes().values())
        facts = {**self._source.facts(), "parameters": self.architecture.parameters}
        if self._pretrained is not None:
            facts["pretrained"] = self._pretrained.fingerprint
            facts["architecture"] = dataclasses.asdict(self.architecture)
        if self.context.settings.model.lora_rank:
            facts["parameters_trained"] = trained
        return facts

    def whole_params(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters of the model (numpy) out of the trained ones, low-rank additions added."""
        if self._pretrained is None or not self.context.settings.model.lora_rank:
            return dict(trained)
        base = {name: value.whole() for name, value in self._pretrained.values.items()}
        return model.merge(base, trained, self._compute)

    @property
    def _drops(self) -> bool:
        return self.architecture.dropout > 0.0

    def _trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        settings = self.context.settings.model
        if not settings.lora_rank:
            return self.architecture.shapes
        return model.low_rank_shapes(self.architecture, settings.lora_rank, settings.lora_targets)

    def _loss(
        self,
        params: Any,
        state: Mapping[str, Any],
        batch: Mapping[str, jax.Array],
        weights: jax.Array | None,
        total: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        return model.loss(
            self.architecture,
            {**state.get("base", {}), **params},
            batch["tokens"],
            weights=weights,
            segments=batch.get("segments"),
            total=total,
            key=key,
            compute=self._compute,
        )

    def _gradients(
        self, state: Mapping[str, Any], batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """Loss and gradients of a batch, computed in as many parts as the settings say."""
        loss = jax.value_and_grad(self._loss)
        weights = _weights(batch)
        count = self.context.settings.accumulation_steps
        if count == 1:
            value, gradients = loss(state["params"], state, batch, weights, None, key)
            return value, gradients
        rows, length = batch["tokens"].shape[0], batch["tokens"].shape[1] - 1
        total = jnp.float32(rows * length) if weights is None else jnp.sum(weights)
        parts = jax.tree.map(lambda leaf: _parts(leaf, count), (batch, weights))

        def body(summed: Any, xs: Any) -> tuple[Any, None]:
            (part, part_weights), index = xs
            drop = None if key is None else jax.random.fold_in(key, index)
            found = loss(state["params"], state, part, part_weights, total, drop)
            return jax.tree.map(jnp.add, summed, found), None

        nothing = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, state["params"]))
        summed, _ = jax.lax.scan(body, nothing, (parts, jnp.arange(count)))
        value, gradients = summed
        return value, gradients


def _architecture(settings: TrainerSettings, pretrained: Pretrained | None) -> Architecture:
    if pretrained is None:
        return of_settings(settings.model)
    found = pretrained.architecture
    length = settings.data.sequence_length
    if length > found.context:
        raise SettingsError(
            f"[trainer.data] sequence_length = {length}: the pretrained model was made for "
            f"{found.context} tokens at most; use shorter sequences"
        )
    return dataclasses.replace(found, dropout=settings.model.dropout)


def _weights(batch: Mapping[str, jax.Array]) -> jax.Array | None:
    """What each target counts; the first token of a document is nobody's target."""
    weights, segments = batch.get("weights"), batch.get("segments")
    if segments is None:
        return weights
    within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return within.astype(jnp.float32) if weights is None else weights * within


def _parts(leaf: jax.Array, count: int) -> jax.Array:
    """`[rows, ...]` as `[count, rows / count, ...]`; part i has the rows i, i + count, ...

    So the rows of each part lie on the devices in the same shares as those of the whole batch, and
    which they are does not depend on how many devices there are.
    """
    parts = leaf.reshape(-1, count, *leaf.shape[1:]).swapaxes(0, 1)
    return constrain(parts, None, "rows", *(None,) * (leaf.ndim - 1))
