"""The model computes what its papers say."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config import ModelSettings, OptimizerSettings
from trainer.language import model
from trainer.language.architecture import Architecture, of_settings
from trainer.language.optimizer import make_optimizer

SMALL = of_settings(ModelSettings(layers=2, width=16, heads=4, key_value_heads=2, hidden=24))


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(SMALL, jax.random.key(0))


def test_every_parameter_has_the_shape_that_is_declared(params: model.Params) -> None:
    """Counts and weight decay are derived from these shapes."""
    assert {name: leaf.shape for name, leaf in params.items()} == SMALL.shapes
    assert SMALL.parameters == sum(leaf.size for leaf in params.values())
    assert model.decayed(SMALL.shapes)["gate"]
    assert not model.decayed(SMALL.shapes)["final_norm"]
    for name, leaf in params.items():
        axes = model.logical_axes(name)
        assert axes is None or len(axes) == leaf.ndim


def test_no_byte_sees_the_bytes_after_it(params: model.Params) -> None:
    """A model that looks ahead has a wonderful loss and has learned nothing."""
    rows = np.arange(12, dtype=np.uint8)[None]
    changed = rows.copy()
    changed[0, 8:] = 200
    before = model.forward(SMALL, params, jnp.asarray(rows))
    after = model.forward(SMALL, params, jnp.asarray(changed))
    assert before.shape == (1, 12, 256)
    np.testing.assert_allclose(before[0, :8], after[0, :8], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[0, 8:], after[0, 8:], atol=1e-3)


def test_attention_knows_distances_and_not_places(params: model.Params) -> None:
    """Rotary angles make a score depend on how far apart two bytes are."""
    values = jax.random.normal(jax.random.key(1), (1, 6, 1, 4))
    rotated = model._rotate(values, model._angles(SMALL, jnp.arange(6)))
    same = jnp.broadcast_to(values[:, :1], values.shape)
    turned = model._rotate(same, model._angles(SMALL, jnp.arange(6)))[0, :, 0]
    scores = turned @ turned.T
    for distance in range(1, 5):
        diagonal = jnp.diagonal(scores, offset=distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)
    np.testing.assert_allclose(
        jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(values, axis=-1), rtol=1e-5
    )


def test_shared_key_value_heads_equal_repeated_ones(params: model.Params) -> None:
    """Grouped-query attention is multi-head attention whose groups share keys and values."""
    full = dataclasses.replace(SMALL, key_value_heads=4)
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
    settings = dataclasses.replace(SMALL, dropout=0.5)
    rows = jnp.arange(20, dtype=jnp.uint8)[None]
    key = jax.random.key(5)
    first = model.loss(settings, params, rows, key=key)
    assert float(first) == float(model.loss(settings, params, rows, key=key))
    assert float(first) != float(model.loss(settings, params, rows, key=jax.random.key(6)))
    assert float(model.loss(settings, params, rows)) == float(model.loss(SMALL, params, rows))


def test_packed_documents_see_only_themselves(params: model.Params) -> None:
    """A row of several documents must teach what each alone would have taught."""
    draw = np.random.default_rng(1)
    first, second = draw.integers(0, 256, 9), draw.integers(0, 256, 6)
    row = jnp.asarray(np.concatenate([first, second]))[None]
    segments = jnp.asarray([1] * 9 + [2] * 6)[None]
    packed = model.forward(SMALL, params, row, segments=segments)[0]
    for part, alone in ((packed[:9], first), (packed[9:], second)):
        expected = model.forward(SMALL, params, jnp.asarray(alone)[None])[0]
        np.testing.assert_allclose(part, expected, atol=1e-5)
    weights = jnp.asarray(segments[:, 1:] == segments[:, :-1], jnp.float32)
    found = model.loss(SMALL, params, row, weights=weights, segments=segments)
    each = [
        float(model.loss(SMALL, params, jnp.asarray(one)[None])) * (len(one) - 1)
        for one in (first, second)
    ]
    assert float(found) == pytest.approx(sum(each) / 13, rel=1e-5)


def test_targets_without_weight_do_not_count(params: model.Params) -> None:
    """Prompts and padding are read, not learned."""
    rows = jnp.asarray(np.random.default_rng(2).integers(0, 256, (2, 9)))
    weights = np.zeros((2, 8), np.float32)
    weights[0, 3] = 1.0
    logits = model.forward(SMALL, params, rows[:, :-1])[0, 3]
    expected = -jax.nn.log_softmax(logits)[rows[0, 4]]
    found = model.loss(SMALL, params, rows, weights=jnp.asarray(weights))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def gradients(architecture: Architecture, params: model.Params, **more: Any) -> Any:
    rows = jnp.asarray(np.random.default_rng(3).integers(0, 256, (4, 25)))
    run = jax.jit(jax.value_and_grad(lambda params: model.loss(architecture, params, rows, **more)))
    return run(params)


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        scale = float(jnp.abs(left).max())
        np.testing.assert_allclose(left, right, atol=tolerance * scale, rtol=tolerance)


def test_blocks_in_a_loop_and_logits_in_pieces_change_nothing(
    params: model.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models take another way through the code than the small one that tests train."""
    plain = gradients(SMALL, params)
    monkeypatch.setattr(model, "_UNROLLED", 0)
    monkeypatch.setattr(model, "_LOGITS_MAX", 4 * 24 * 256 // 5)
    assert_close(plain, gradients(SMALL, params), 1e-5)
    assert_close(plain, gradients(SMALL, params, compute=model.Compute(remat=True)), 1e-5)


def test_bfloat16_comes_near_and_leaves_state_and_loss_in_float32(params: model.Params) -> None:
    """Half of the bits are for products alone; sums and what is kept need all of them."""
    compute = model.Compute(dtype="bfloat16")
    value, found = gradients(SMALL, params, compute=compute)
    expected, wide = gradients(SMALL, params)
    assert value.dtype == jnp.float32
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype("float32")}
    assert float(value) == pytest.approx(float(expected), rel=5e-3)
    assert_close(wide, found, 0.1)


def test_low_rank_additions_start_at_nothing_and_are_what_merging_gives(
    params: model.Params,
) -> None:
    """The first step starts from the pretrained model, the export ends with the trained one."""
    compute = model.Compute(low_rank_scale=2.0)
    targets = ("query", "value", "down")
    low = model.init_low_rank(SMALL, 3, targets, jax.random.key(2))
    rows = jnp.arange(20)[None]
    plain = model.forward(SMALL, params, rows)
    np.testing.assert_array_equal(
        model.forward(SMALL, {**params, **low}, rows, compute=compute), plain
    )
    trained = {
        name: one + 0.3 * jax.random.normal(jax.random.key(4), one.shape)
        for name, one in low.items()
    }
    added = model.forward(SMALL, {**params, **trained}, rows, compute=compute)
    assert not np.allclose(added, plain, atol=1e-2)
    merged = model.merge(params, trained, compute)
    np.testing.assert_allclose(model.forward(SMALL, merged, rows), added, atol=1e-4)


def test_a_cache_gives_the_logits_of_the_whole(params: model.Params) -> None:
    """Generated text must come from the model that was trained."""
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 256, (1, 14)))
    whole = model.forward(SMALL, params, tokens)
    cache = model.empty_cache(SMALL, 1, 20, model.PLAIN)
    first, cache = model.forward_cached(SMALL, params, tokens[:, :9], jnp.int32(0), cache)
    np.testing.assert_allclose(first, whole[:, :9], atol=1e-5)
    for place in range(9, 14):
        one, cache = model.forward_cached(
            SMALL, params, tokens[:, place : place + 1], jnp.int32(place), cache
        )
        np.testing.assert_allclose(one[:, 0], whole[:, place], atol=1e-5)


def test_a_large_draw_is_not_part_of_the_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device can hold all matrices of a large model; each is drawn by itself then."""
    monkeypatch.setattr(model, "_SMALL", 0)
    large = model.init_params(SMALL, jax.random.key(0))
    assert float(jnp.std(large["gate"])) == pytest.approx(16**-0.5, rel=0.1)
    assert len({float(one.ravel()[0]) for name, one in large.items() if "norm" not in name}) == 9


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
