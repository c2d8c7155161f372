"""Hybrids and mixtures of experts on eight virtual devices against one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.logprobs import token_logprobs
from race_jax.models import ModelConfig, init_model, param_axes
from race_jax.models.deltanet import Delta, delta_chunked
from race_jax.sharding import Rules, make_mesh, place, shardings_for, use_mesh

HYBRID = ModelConfig(
    "qwen3_5_text",
    96,
    32,
    48,
    2,
    4,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
EXPERTS = ModelConfig(
    "qwen3_moe",
    96,
    32,
    48,
    2,
    4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
# Segments of 1, 2 and 3 tokens at the cuts of a row of 64 tokens among 2 or 4 devices, and long
# ones across them; the last row is one segment over all devices.
SIZES = [
    [13, 1, 1, 1, 2, 14, 30, 2],
    [15, 3, 14, 2, 1, 29],
    [30, 1, 2, 31],
    [64],
]


@functools.cache
def noisy(config):
    model = init_model(config, 0)
    leaves, tree = jax.tree.flatten(model.params)
    rng = np.random.default_rng(1)
    return model, tree.unflatten(
        [np.asarray(x) + rng.normal(size=x.shape).astype(np.float32) / 8 for x in leaves]
    )


def packed(rows=8):
    """Rows of 64 tokens with the segments above; odd rows have their first or last as padding."""
    tokens = np.random.default_rng(0).integers(0, 96, (rows, 64)).astype(np.int32)
    segments, positions = np.zeros((2, rows, 64), np.int32)
    for row in range(rows):
        sizes = SIZES[row % len(SIZES)]
        assert sum(sizes) == 64
        segments[row] = np.repeat(np.arange(len(sizes)) + 1, sizes)
        positions[row] = np.concatenate([np.arange(size) for size in sizes])
        if row % 2 and len(sizes) > 1:
            segments[row][segments[row] == (1 if row % 4 == 1 else len(sizes))] = 0
    return tokens, positions, segments


@functools.partial(jax.jit, static_argnums=0)
def scored(model, params, tokens, positions, segments):
    """Mean negative log-probability, the log-probabilities, and the gradients."""

    def loss(params):
        hidden = model.forward(params, tokens, positions, segments)
        targets = jnp.roll(tokens, -1, axis=1)
        logprobs = token_logprobs(hidden, model.head(params), targets, chunk=64)
        real = segments > 0
        return -jnp.sum(jnp.where(real, logprobs, 0)) / jnp.sum(real), logprobs

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def on_one_device(config):
    model, params = noisy(config)
    return jax.tree.map(np.asarray, scored(model, params, *packed()))


MESHES = [
    (HYBRID, {"fsdp": 4, "tensor": 2}, Rules()),
    (HYBRID, {"context": 4, "data": 2}, Rules()),
    (HYBRID, {"fsdp": 2, "tensor": 2, "context": 2}, Rules()),
    (EXPERTS, {"fsdp": 4, "tensor": 2}, Rules(experts="fsdp")),
    (EXPERTS, {"data": 2, "tensor": 2, "context": 2}, Rules(experts="tensor")),
]


@pytest.mark.parametrize(("config", "sizes", "rules"), MESHES)
def test_scores_loss_and_gradients_equal_those_of_one_device(config, sizes, rules):
    model, params = noisy(config)
    (want_loss, want), want_grads = on_one_device(config)
    mesh = make_mesh(**sizes)
    there = place(params, shardings_for(param_axes(config), mesh, params, rules))
    with use_mesh(mesh, rules):
        (loss, got), grads = scored(model, there, *packed())
    real = packed()[2] > 0
    assert np.std(want[real]) > 0.1
    np.testing.assert_allclose(np.asarray(got)[real], want[real], atol=1e-5)
    np.testing.assert_allclose(loss, want_loss, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_states_really_cross_devices():
    # Decay and rate that are far from 0 and 1: the last token must read the first one's value.
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 64, 1, 4)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(1, 64, 1, 4))
    gentle = (np.full((1, 64, 1), -0.01), np.full((1, 64, 1), 0.1))
    fresh = np.zeros((1, 64), bool)
    delta = Delta(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, *gentle)), jnp.asarray(fresh))
    other = delta._replace(v=delta.v.at[0, 0].add(1.0))
    a, b = delta_chunked(delta)[0], delta_chunked(other)[0]
    assert np.abs(np.asarray(a - b))[0, -1].max() > 1e-4


@functools.partial(jax.jit, static_argnums=0)
def extended(model, params, cache, tokens, slots, starts):
    return model.extend(params, cache, tokens, slots, starts)


def decoded(model, params):
    """Prefill three slots in two calls, decode, and go on from states copied to another slot."""
    rng = np.random.default_rng(3)
    cache = model.init_cache(params, 5, 24)
    hidden = []

    def add(cache, slots, starts, size):
        tokens = rng.integers(0, 96, (len(slots), size)).astype(np.int32)
        places = (np.asarray(x, np.int32) for x in (slots, starts))
        states, cache = extended(model, params, cache, tokens, *places)
        hidden.append(np.asarray(states)[np.asarray(slots) < 5])
        return cache

    cache = add(cache, [4, 0, 0, 2], [0, 0, 6, 0], 6)
    cache = add(cache, [4, 5, 0, 2], [6, 0, 12, 6], 6)
    four, one, zero = (jnp.asarray([i], jnp.int32) for i in (4, 1, 0))
    entries, states = model.read_rows(cache, four, zero, 12), model.read_states(cache, four)
    cache = model.write_states(model.write_rows(cache, entries, one, zero), states, one)
    add(cache, [1, 4, 0], [12, 12, 18], 1)
    return hidden


def test_caches_equal_those_of_one_device():
    model, params = noisy(HYBRID)
    want = decoded(model, params)
    mesh = make_mesh(fsdp=2, tensor=2, context=2)
    with use_mesh(mesh):
        got = decoded(model, place(params, shardings_for(param_axes(HYBRID), mesh, params)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_row_too_short_for_the_convolution():
    model, params = noisy(dataclasses.replace(HYBRID, linear_conv_kernel_dim=6))
    rows = [x[:, :16] for x in packed()]
    with use_mesh(make_mesh(context=8)), pytest.raises(ValueError, match="looks back 5; pad"):
        scored(model, params, *rows)
