"""Cached passes: equal to uncached ones in any schedule, rolled back exactly, updated in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from race_jax.models import Model, ModelConfig, init_model, load_model
from race_jax.models import attention as attention_module
from race_jax.models.cache import KVCache

SMALL = ModelConfig("qwen3", 61, 24, 40, 2, 4, num_key_value_heads=2, head_dim=8)
MODEL = init_model(SMALL, 0)
ways = pytest.mark.parametrize("way", ["blocked", "gathered"])
forward = jax.jit(Model.forward, static_argnums=0)
extend = jax.jit(lambda model, *arrays: model.extend(*arrays), static_argnums=0)


def use(way):
    return dataclasses.replace(MODEL, cached_attention=way)


def whole(model, tokens):
    """Hidden states [T, D] of one sequence without a cache."""
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return forward(model, model.params, tokens, jnp.arange(tokens.shape[1])[None], tokens * 0 + 1)[
        0
    ]


def put(model, cache, tokens, slots, starts):
    arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, slots, starts))
    return extend(model, model.params, cache, *arrays)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of keys, pieces of several sizes, heads together and apart, in short texts."""
    monkeypatch.setattr(attention_module, "_KEYS", 16)
    monkeypatch.setattr(attention_module, "_MERGED", 24)
    monkeypatch.setattr(attention_module, "_SCORES", 600)


def test_states_and_cache_equal_transformers(pair, rng):
    tokens = rng.integers(0, 97, (1, 24))
    model = load_model(pair.path)
    with torch.no_grad():
        out = pair.module(torch.tensor(tokens), use_cache=True, output_hidden_states=True)
    cache = model.init_cache(model.params, 2, 30)
    states = []
    for begin in range(0, 24, 8):
        hidden, cache = put(model, cache, tokens[:, begin : begin + 8], [1], [begin])
        states.append(hidden)
    want = out.hidden_states[-1].numpy()
    np.testing.assert_allclose(np.concatenate(states, axis=1), want, atol=1e-4)
    kinds = model.config.layer_types or ["full_attention"] * len(out.past_key_values.layers)
    pairs = zip(out.past_key_values.layers, kinds, strict=True)
    full = [kept for kept, kind in pairs if kind == "full_attention"]
    entries = cache if isinstance(cache, KVCache) else cache.entries
    for layer, kept in enumerate(full):
        np.testing.assert_allclose(entries.k[layer, 1, :, :24], kept.keys[0].numpy(), atol=1e-4)
        np.testing.assert_allclose(entries.v[layer, 1, :, :24], kept.values[0].numpy(), atol=1e-4)
    assert np.all(entries.k[:, 0] == 0) and np.all(entries.k[:, 1, :, 24:] == 0)


@ways
@pytest.mark.parametrize("size", [1, 5])
def test_any_schedule_equals_one_pass(rng, way, size):
    """Rows of several slots, in random numbers and order, continuing one another in one call."""
    model = use(way)
    lengths = [7, 33, 50]
    texts = [rng.integers(0, 61, n) for n in lengths]
    wants = [whole(model, text) for text in texts]
    rows = 6
    cache = model.init_cache(model.params, 3, 61)
    done = [0, 0, 0]
    while any(done[s] < lengths[s] for s in range(3)):
        plan = []
        for slot in rng.permutation(3):
            for _ in range(int(rng.integers(0, rows - len(plan) + 1))):
                if done[slot] < lengths[slot]:
                    plan.append((slot, done[slot]))
                    done[slot] += size
        plan += [(3, 0)] * (rows - len(plan))
        plan = [plan[i] for i in rng.permutation(rows)] if rng.random() < 0.5 else plan
        tokens = np.zeros((rows, size), np.int32)
        for r, (slot, start) in enumerate(plan):
            if slot < 3:
                part = texts[slot][start : start + size]
                tokens[r, : len(part)] = part
        hidden, cache = put(model, cache, tokens, *zip(*plan, strict=True))
        assert hidden.dtype == jnp.float32
        for r, (slot, start) in enumerate(plan):
            if slot < 3:
                want = wants[slot][start : start + size]
                np.testing.assert_allclose(hidden[r, : len(want)], want, atol=1e-5)


@ways
def test_rolled_back_rows_leave_no_trace(rng, way):
    model = use(way)
    kept, tried, other = rng.integers(0, 61, 40), rng.integers(0, 61, 16), rng.integers(0, 61, 24)
    cache = model.init_cache(model.params, 2, 48)
    _, cache = put(model, cache, kept.reshape(5, 8), [0] * 5, np.arange(0, 40, 8))
    _, cache = put(model, cache, other.reshape(3, 8), [1] * 3, np.arange(0, 24, 8))
    before = jax.tree.map(np.asarray, cache)
    places = (jnp.array([0, 0, 1]), jnp.array([16, 24, 8]))
    saved = model.read_rows(cache, *places, 8)
    assert saved.k.shape == (2, 3, 2, 8, 8)
    np.testing.assert_array_equal(saved.v[:, 2], before.v[:, 1, :, 8:16])
    _, cache = put(model, cache, np.stack([tried[:8], tried[8:], tried[:8]]), *places)
    assert not np.array_equal(cache.k, before.k)
    cache = model.write_rows(cache, saved, *places)
    for a, b in zip(cache, before, strict=True):
        np.testing.assert_array_equal(a, b)
    more = rng.integers(0, 61, 8)
    hidden, _ = put(model, cache, more[None], [0], [40])
    np.testing.assert_allclose(hidden[0], whole(model, [*kept, *more])[40:], atol=1e-5)


@ways
def test_overwriting_a_suffix_forgets_the_old_one(rng, way):
    model = use(way)
    first, second = rng.integers(0, 61, 30), rng.integers(0, 61, 10)
    cache = model.init_cache(model.params, 1, 40)
    _, cache = put(model, cache, first.reshape(3, 10), [0] * 3, [0, 10, 20])
    hidden, _ = put(model, cache, second[None], [0], [10])
    np.testing.assert_allclose(hidden[0], whole(model, [*first[:10], *second])[10:], atol=1e-5)


@ways
def test_stale_nan_beyond_the_end_is_not_seen(rng, way):
    model = use(way)
    text = rng.integers(0, 61, 20)
    cache = model.init_cache(model.params, 1, 40)
    cache = jax.tree.map(lambda x: x.at[:, :, :, 20:].set(jnp.nan), cache)
    _, cache = put(model, cache, text[None, :10], [0], [0])
    hidden, _ = put(model, cache, text[None, 10:], [0], [10])
    np.testing.assert_allclose(hidden[0], whole(model, text)[10:], atol=1e-5)


def test_a_row_may_end_where_the_cache_ends(rng):
    # 37 is no multiple of the block of 16 keys, so the last block is moved back.
    text = rng.integers(0, 61, 37)
    cache = MODEL.init_cache(MODEL.params, 1, 37)
    _, cache = put(MODEL, cache, text[None, :30], [0], [0])
    hidden, _ = put(MODEL, cache, text[None, 30:], [0], [30])
    np.testing.assert_allclose(hidden[0], whole(MODEL, text)[30:], atol=1e-5)


def test_a_cache_shorter_than_one_block(rng):
    text = rng.integers(0, 61, 5)
    cache = MODEL.init_cache(MODEL.params, 1, 5)
    hidden, _ = put(MODEL, cache, text[None], [0], [0])
    np.testing.assert_allclose(hidden[0], whole(MODEL, text), atol=1e-5)


@ways
def test_bfloat16_cached_is_near_uncached(rng, way):
    model = dataclasses.replace(init_model(SMALL, 0, "bfloat16"), cached_attention=way)
    text = rng.integers(0, 61, 32)
    cache = model.init_cache(model.params, 1, 32)
    assert cache.k.dtype == jnp.bfloat16
    hidden, cache = put(model, cache, text.reshape(4, 8), [0] * 4, [0, 8, 16, 24])
    want = np.asarray(whole(model, text))
    error = np.sqrt(np.mean((hidden.reshape(32, -1) - want) ** 2))
    assert error < 0.01 * np.sqrt(np.mean(want**2))


@ways
def test_a_donated_cache_is_updated_in_place(way):
    model = use(way)
    shapes = jax.eval_shape(lambda p: model.init_cache(p, 8, 2048), model.params)
    size = sum(x.size * x.dtype.itemsize for x in shapes)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 8), (2,), (2,))]
    step = jax.jit(model.extend, donate_argnums=1).lower(model.params, shapes, *ints)
    rows = jax.eval_shape(lambda c: model.read_rows(c, jnp.array([0]), jnp.array([0]), 8), shapes)
    back = jax.jit(model.write_rows, donate_argnums=0).lower(shapes, rows, ints[1], ints[2])
    for program in (step.compile(), back.compile()):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= size
        if way == "blocked":
            assert memory.temp_size_in_bytes < size / 4


@pytest.mark.parametrize(("slots", "length"), [(0, 4), (2, 0)])
def test_empty_caches_are_refused(slots, length):
    with pytest.raises(ValueError, match="at least 1, and got 0"):
        MODEL.init_cache(MODEL.params, slots, length)
