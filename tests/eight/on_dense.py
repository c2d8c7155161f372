"""Dense decoders on eight virtual devices against one: scores, loss, gradients, caches."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.logprobs import token_logprobs
from race_jax.models import (
    Model,
    ModelConfig,
    abstract_params,
    init_model,
    load_model,
    param_axes,
    save_model,
)
from race_jax.sharding import (
    Rules,
    make_mesh,
    place,
    sharding_for,
    shardings_for,
    spec_for,
    use_mesh,
)

QWEN3 = ModelConfig("qwen3", 96, 32, 48, 2, 4, num_key_value_heads=2, head_dim=8)
QWEN2 = ModelConfig(
    "qwen2", 96, 32, 48, 2, 4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
)
COPIED = Rules(replicate=("kv_heads",))


@pytest.fixture(scope="module", autouse=True)
def eight():
    assert jax.device_count() == 8


@functools.cache
def noisy(config):
    """A model whose norms and biases are random too."""
    model = init_model(config, 0)
    leaves, tree = jax.tree.flatten(model.params)
    rng = np.random.default_rng(1)
    return model, tree.unflatten(
        [np.asarray(x) + rng.normal(size=x.shape).astype(np.float32) / 8 for x in leaves]
    )


def placed(config, params, mesh, rules):
    return place(params, shardings_for(param_axes(config), mesh, params, rules))


def packed(rows, length, seed=0):
    """Rows of several segments, with padding on either side; some segments cross every cut."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 96, (rows, length)).astype(np.int32)
    segments, positions = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        left, right = (3 if row % 3 == 0 else 0), length - (7 if row % 2 else 0)
        cuts = [left, *sorted(rng.integers(left + 1, right, row % 4)), right]
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            segments[row, begin:end] = i + 1
            positions[row, begin:end] = np.arange(end - begin)
    assert len(np.unique(segments[0])) > 1
    return tokens, positions, segments


@functools.partial(jax.jit, static_argnums=0)
def scored(model, params, tokens, positions, segments, ends=None):
    """Mean negative log-probability, the log-probabilities, and the gradients."""

    def loss(params):
        hidden = model.forward(params, tokens, positions, segments, ends=ends)
        targets = jnp.roll(tokens, -1, axis=1)
        logprobs = token_logprobs(hidden, model.head(params), targets, chunk=16)
        real = segments > 0
        return -jnp.sum(jnp.where(real, logprobs, 0)) / jnp.sum(real), logprobs

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def on_one_device(config):
    model, params = noisy(config)
    return jax.tree.map(np.asarray, scored(model, params, *packed(8, 64)))


MESHES = [
    (QWEN3, {"data": 8}, Rules()),
    (QWEN3, {"fsdp": 4, "tensor": 2}, Rules()),
    (QWEN3, {"context": 4, "data": 2}, Rules()),
    (QWEN3, {"data": 2, "fsdp": 2, "context": 2}, Rules()),
    (QWEN3, {"data": 2, "tensor": 4}, COPIED),
    (QWEN2, {"fsdp": 2, "tensor": 2, "context": 2}, Rules()),
]


@pytest.mark.parametrize(("config", "sizes", "rules"), MESHES)
def test_scores_loss_and_gradients_equal_those_of_one_device(config, sizes, rules):
    model, params = noisy(config)
    (want_loss, want), want_grads = on_one_device(config)
    mesh = make_mesh(**sizes)
    there = placed(config, params, mesh, rules)
    with use_mesh(mesh, rules):
        (loss, got), grads = scored(model, there, *packed(8, 64))
    segments = packed(8, 64)[2]
    assert np.std(want[segments > 0]) > 0.1
    np.testing.assert_allclose(np.asarray(got)[segments > 0], want[segments > 0], atol=1e-5)
    np.testing.assert_allclose(loss, want_loss, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    layers = jax.tree.leaves(grads["layers"]), jax.tree.leaves(there["layers"])
    for a, b in zip(*layers, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def branching(rows, length):
    """Rows of a trunk with three branches, another tree, and padding; where each token ends."""
    tokens, positions, _ = packed(rows, length)
    segments = np.zeros((rows, length), np.int32)
    ends = np.tile(np.arange(1, length + 1, dtype=np.int32), (rows, 1))
    for row in range(rows):
        at = 0
        for tree, (trunk, *branches) in enumerate([(9 + row, 5, 1, 7), (4, 3 + row, 6)], 1):
            whole = trunk + sum(branches)
            segments[row, at : at + whole] = tree
            positions[row, at : at + trunk] = np.arange(trunk)
            ends[row, at : at + trunk] = at + whole
            at += trunk
            for size in branches:
                positions[row, at : at + size] = trunk + np.arange(size)
                ends[row, at : at + size] = at + size
                at += size
    return tokens, positions, segments, ends


def test_rows_of_trees_equal_those_of_one_device():
    model, params = noisy(QWEN3)
    rows = branching(8, 64)
    want = jax.tree.map(np.asarray, scored(model, params, *rows))
    mesh = make_mesh(fsdp=2, tensor=4)
    with use_mesh(mesh, COPIED):
        got = scored(model, placed(QWEN3, params, mesh, COPIED), *rows)
    real = rows[2] > 0
    np.testing.assert_allclose(np.asarray(got[0][1])[real], want[0][1][real], atol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_of_trees_are_not_cut():
    model, params = noisy(QWEN3)
    mesh = make_mesh(data=2, fsdp=2, context=2)
    with use_mesh(mesh), pytest.raises(ValueError, match=r"make context 1 .* \(share: false\)"):
        scored(model, placed(QWEN3, params, mesh, Rules()), *branching(8, 64))


def test_a_row_that_twice_context_does_not_divide():
    model, params = noisy(QWEN3)
    mesh = make_mesh(context=4, data=2)
    with use_mesh(mesh), pytest.raises(ValueError, match=r"time 60.*pad them to 64, or cut.* 56"):
        scored(model, params, *packed(8, 60))


def test_rows_that_do_not_divide():
    model, params = noisy(QWEN3)
    mesh = make_mesh(data=4, fsdp=2)
    with use_mesh(mesh), pytest.raises(ValueError, match="batch is 6 and does not divide over"):
        scored(model, params, *packed(6, 64))


def test_key_heads_that_do_not_divide_are_copied_only_if_asked():
    model, params = noisy(QWEN3)
    mesh = make_mesh(data=2, tensor=4)
    with pytest.raises(ValueError, match=r"key: kv_heads is 2 .* tensor = 4; make tensor 2"):
        shardings_for(param_axes(QWEN3), mesh, abstract_params(QWEN3))
    with use_mesh(mesh), pytest.raises(ValueError, match="kv_heads is 2 and does not divide"):
        scored(model, params, *packed(8, 64))


def test_a_checkpoint_is_read_inside_use_mesh(tmp_path):
    model, params = noisy(QWEN3)
    save_model(dataclasses.replace(model, params=params), tmp_path / "model")
    mesh = make_mesh(fsdp=4, tensor=2)
    with use_mesh(mesh):
        got = load_model(tmp_path / "model", shardings=lambda axes: sharding_for(axes, mesh))
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert got.params["head"].sharding.spec == spec_for(("vocab", "embed"))


def test_the_scores_of_attention_stay_in_blocks():
    model, _ = noisy(QWEN3)
    mesh = make_mesh(context=2, data=4)
    shapes = abstract_params(QWEN3)

    def temporaries(length):
        rows = jax.ShapeDtypeStruct((4, length), jnp.int32)
        with use_mesh(mesh):
            compiled = jax.jit(model.forward).lower(shapes, rows, rows, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A device's scores, if whole, would add (4096^2 - 2048^2) / 2 * 4 bytes * 4 heads = 100 MB.
    assert temporaries(4096) - temporaries(2048) < 10e6


@functools.partial(jax.jit, static_argnums=0)
def extended(model, params, cache, tokens, slots, starts):
    return model.extend(params, cache, tokens, slots, starts)


def decoded(model, params, rows):
    """Prefill in two calls, one of them out of order, then decode and copy between slots."""
    rng = np.random.default_rng(3)
    cache = model.init_cache(params, 5, 24)
    hidden = []

    def add(cache, slots, starts, size):
        slots, starts = np.asarray(slots, np.int32), np.asarray(starts, np.int32)
        tokens = rng.integers(0, 96, (len(slots), size)).astype(np.int32)
        states, cache = extended(model, params, cache, tokens, slots, starts)
        hidden.append(np.asarray(states)[slots < 5])
        return cache

    first = [4, 0, 0, 2, 5, 3, 1, 5][:rows]
    cache = add(cache, first, [0, 0, 4, 0, 0, 0, 0, 0][:rows], 4)
    cache = add(cache, first, [4, 8, 12, 4, 0, 4, 4, 0][:rows], 4)
    one, zero = jnp.asarray([1], jnp.int32), jnp.asarray([0], jnp.int32)
    copied = model.read_rows(cache, 4 * one, zero, 8)
    cache = model.write_rows(cache, copied, one, zero)
    cache = add(cache, [1, 4, 0], [8, 8, 16], 1)
    held = model.read_rows(cache, jnp.arange(2), jnp.zeros(2, jnp.int32), 8)
    return hidden, jax.tree.map(np.asarray, held)


CACHES = [
    ({"fsdp": 4, "tensor": 2}, Rules(), 8, "blocked"),
    ({"fsdp": 4, "tensor": 2}, Rules(), 3, "gathered"),
    ({"data": 2, "tensor": 4}, COPIED, 8, "gathered"),
    ({"data": 2, "fsdp": 2, "context": 2}, Rules(), 7, "blocked"),
]


@pytest.mark.parametrize(("sizes", "rules", "rows", "how"), CACHES)
def test_caches_equal_those_of_one_device(sizes, rules, rows, how):
    config = QWEN3
    params = noisy(config)[1]
    model = Model(config, None, cached_attention=how)
    want_hidden, want = decoded(model, params, rows)
    mesh = make_mesh(**sizes)
    with use_mesh(mesh, rules):
        there = placed(config, params, mesh, rules)
        cache = model.init_cache(there, 5, 24)
        hidden, held = decoded(model, there, rows)
    pieces = mesh.shape["data"] * mesh.shape["fsdp"]
    part = cache.k.addressable_shards[0].data.shape
    # Each device holds its share of the five slots and a spare one, and its heads.
    assert part[1] == -(-5 // pieces) + 1 and part[2] == max(1, 2 // mesh.shape["tensor"])
    for a, b in zip(hidden, want_hidden, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    copies = held.k.shape[2] // want.k.shape[2]
    for a, b in zip(held, want, strict=True):
        np.testing.assert_allclose(a[:, :, ::copies], b, atol=1e-5)
