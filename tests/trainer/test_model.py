"""The model computes what its papers say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import model
from trainer.config import ModelSettings, OptimizerSettings
from trainer.optimizer import make_optimizer

SMALL = ModelSettings(layers=2, width=16, heads=4, key_value_heads=2, hidden=24)


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(SMALL, jax.random.key(0))


def test_every_parameter_has_the_shape_that_is_declared(params: model.Params) -> None:
    """Counts and weight decay are derived from these shapes."""
    assert {name: leaf.shape for name, leaf in params.items()} == model.shapes(SMALL)
    assert model.decayed(SMALL)["gate"]
    assert not model.decayed(SMALL)["final_norm"]


def test_no_byte_sees_the_bytes_after_it(params: model.Params) -> None:
    """A model that looks ahead has a wonderful loss and has learned nothing."""
    rows = np.arange(12, dtype=np.uint8)[None]
    changed = rows.copy()
    changed[0, 8:] = 200
    before = model.forward(SMALL, params, jnp.asarray(rows))
    after = model.forward(SMALL, params, jnp.asarray(changed))
    assert before.shape == (1, 12, model.VOCABULARY)
    np.testing.assert_allclose(before[0, :8], after[0, :8], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[0, 8:], after[0, 8:], atol=1e-3)


def test_attention_knows_distances_and_not_places(params: model.Params) -> None:
    """Rotary angles make a score depend on how far apart two bytes are."""
    values = jax.random.normal(jax.random.key(1), (1, 6, 1, 4))
    rotated = model._rotate(values, model._angles(SMALL, 6))
    same = jnp.broadcast_to(values[:, :1], values.shape)
    turned = model._rotate(same, model._angles(SMALL, 6))[0, :, 0]
    scores = turned @ turned.T
    for distance in range(1, 5):
        diagonal = jnp.diagonal(scores, offset=distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)
    np.testing.assert_allclose(
        jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(values, axis=-1), rtol=1e-5
    )


def test_shared_key_value_heads_equal_repeated_ones(params: model.Params) -> None:
    """Grouped-query attention is multi-head attention whose groups share keys and values."""
    full = SMALL.model_copy(update={"key_value_heads": 4})
    repeated = dict(params)
    for name in ("key", "value"):
        heads = params[name].reshape(2, 16, 2, 4)
        repeated[name] = jnp.repeat(heads, 2, axis=2).reshape(2, 16, 16)
    rows = jnp.arange(20, dtype=jnp.uint8)[None]
    np.testing.assert_allclose(
        model.forward(SMALL, params, rows), model.forward(full, repeated, rows), atol=1e-4
    )


def test_an_untrained_model_knows_nothing(params: model.Params) -> None:
    """The first loss is near that of a uniform guess; far off, the initialisation is broken."""
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 33), dtype=np.uint8))
    assert abs(float(model.loss(SMALL, params, rows)) - np.log(256)) < 1.0


def test_dropout_draws_from_its_key_alone(params: model.Params) -> None:
    """Random layers must be as repeatable as everything else."""
    settings = SMALL.model_copy(update={"dropout": 0.5})
    rows = jnp.arange(20, dtype=jnp.uint8)[None]
    key = jax.random.key(5)
    first = model.loss(settings, params, rows, key)
    assert float(first) == float(model.loss(settings, params, rows, key))
    assert float(first) != float(model.loss(settings, params, rows, jax.random.key(6)))
    assert float(model.loss(settings, params, rows)) == float(model.loss(SMALL, params, rows))


def learning_rates(steps: int, settings: OptimizerSettings) -> list[float]:
    """Read off by a gradient of constant size: Adam's first steps move by the rate itself."""
    optimizer = make_optimizer(settings, steps=steps, decayed={"w": False})
    params: dict[str, Any] = {"w": jnp.zeros(())}
    state = optimizer.init(params)
    rates = []
    for _ in range(steps):
        updates, state = optimizer.update({"w": jnp.ones(())}, state, params)
        rates.append(-float(updates["w"]))
    return rates


def test_the_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    """The schedule belongs to the job's length: a resumed run must find its place in it."""
    settings = OptimizerSettings(learning_rate=0.1, warmup_steps=4, final_fraction=0.1)
    rates = learning_rates(20, settings)
    assert rates[0] == 0.0
    assert max(rates) == pytest.approx(0.1, rel=1e-3)
    assert rates.index(max(rates)) == 4
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.01, abs=2e-3)


def test_a_short_job_still_reaches_its_peak() -> None:
    """`--set trainer.steps=4` is a trial run, and must train."""
    settings = OptimizerSettings(learning_rate=0.1, warmup_steps=100)
    assert max(learning_rates(4, settings)) == pytest.approx(0.1, rel=1e-3)
