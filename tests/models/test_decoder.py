"""Networks against transformers, and against themselves under padding, packing and layering."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from race_jax.models import (
    Model,
    ModelConfig,
    RopeConfig,
    abstract_params,
    init_model,
    load_model,
    param_axes,
    save_model,
)

SMALL = ModelConfig("qwen3", 61, 24, 40, 2, 4, num_key_value_heads=2, head_dim=8)


def plain(tokens):
    """Positions and segments of rows without padding."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tokens, positions, jnp.ones_like(tokens)


forward = jax.jit(Model.forward, static_argnums=0)


def logits(model, params, *rows):
    return model.forward(params, *rows) @ model.head(params).T


def test_logits_equal_transformers(pair, rng):
    tokens = rng.integers(0, 97, (2, 150))
    model = load_model(pair.path)
    with torch.no_grad():
        want = pair.module(torch.tensor(tokens)).logits.numpy()
    got = jax.jit(lambda p: logits(model, p, *plain(tokens)))(model.params)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_loss_gradients_equal_transformers(pair, rng, tmp_path):
    tokens = rng.integers(0, 97, (2, 40))
    model = load_model(pair.path)

    def loss(params):
        scores = jax.nn.log_softmax(logits(model, params, *plain(tokens))[:, :-1])
        return -jnp.mean(jnp.take_along_axis(scores, jnp.asarray(tokens)[:, 1:, None], axis=-1))

    value, grads = jax.jit(jax.value_and_grad(loss))(model.params)
    pair.module.zero_grad()
    reference = pair.module(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    reference.backward()
    np.testing.assert_allclose(value, reference.item(), atol=1e-5)
    # Written as a checkpoint, gradients carry the names that transformers gives them.
    save_model(dataclasses.replace(model, params=grads), tmp_path / "grads")
    got = load_file(tmp_path / "grads" / "model.safetensors")
    want = pair.gradients()
    assert set(got) == set(want)
    for name in want:
        apart, size = (np.linalg.norm(x) for x in (got[name] - want[name], want[name]))
        # A key's bias moves a query's scores nearly alike: its gradient is mostly rounding.
        assert apart <= 1e-3 * size + 1e-6, name


def test_left_padding_equals_transformers(pair, rng):
    tokens = rng.integers(0, 97, (2, 20))
    mask = np.ones((2, 20), np.int32)
    mask[1, :7] = 0
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    model = load_model(pair.path)
    with torch.no_grad():
        want = pair.module(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(positions),
        ).logits.numpy()
    got = np.asarray(logits(model, model.params, *map(jnp.asarray, (tokens, positions, mask))))
    np.testing.assert_allclose(got[mask > 0], want[mask > 0], atol=1e-4)


@pytest.mark.parametrize(("left", "right"), [(1, 0), (0, 3), (5, 150)])
def test_padding_changes_nothing(rng, left, right):
    model = init_model(SMALL, 0)
    alone = rng.integers(0, 61, (1, 9))
    want = forward(model, model.params, *plain(alone))
    pads = ((0, 0), (left, right))
    tokens, positions, segments = (np.pad(x, pads) for x in plain(alone))
    tokens[segments == 0] = 999  # padding may hold any id, even one that the vocabulary lacks
    got = forward(model, model.params, tokens, positions, segments)
    np.testing.assert_allclose(got[:, left : left + 9], want, atol=1e-5)
    assert np.all(np.isfinite(got))


def test_packed_sequences_do_not_see_one_another(rng):
    model = init_model(SMALL, 0)
    sizes = [1, 3, 130, 5]
    parts = [rng.integers(0, 61, (1, n)) for n in sizes]
    positions = np.concatenate([np.arange(n) for n in sizes])[None]
    segments = np.repeat(np.arange(1, 5), sizes)[None]
    packed = forward(model, model.params, np.concatenate(parts, axis=1), positions, segments)
    begin = 0
    for part, n in zip(parts, sizes, strict=True):
        want = forward(model, model.params, *plain(part))
        np.testing.assert_allclose(packed[:, begin : begin + n], want, atol=1e-5)
        begin += n
    parts[1] = (parts[1] + 1) % 61
    changed = forward(model, model.params, np.concatenate(parts, axis=1), positions, segments)
    same = np.all(np.asarray(packed) == np.asarray(changed), axis=-1)[0]
    assert same[0] and same[4:].all() and not same[1:4].any()


def test_a_token_sees_nothing_after_it(rng):
    model = init_model(SMALL, 0)
    tokens = rng.integers(0, 61, (1, 12))
    other = tokens.copy()
    other[0, 7:] = (other[0, 7:] + 1) % 61
    a, b = (np.asarray(forward(model, model.params, *plain(x))) for x in (tokens, other))
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert not np.allclose(a[:, 7:], b[:, 7:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_finite_with_padding_on_both_sides(rng, dtype):
    model = init_model(SMALL, 0, dtype)
    tokens = rng.integers(0, 61, (2, 10))
    segments = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 0, 0], [0] * 10])
    positions = np.array([[0, 0, 0, 1, 2, 0, 1, 2, 0, 0], [0] * 10])

    def loss(params):
        states = forward(model, params, tokens, positions, segments)
        return jnp.sum(jnp.where(segments[..., None] > 0, states, 0) ** 2)

    for leaf in jax.tree.leaves(jax.grad(loss)(model.params)):
        assert leaf.dtype == dtype and np.all(np.isfinite(np.asarray(leaf, np.float32)))


def test_remat_gives_the_same_values_and_gradients(rng):
    model = init_model(SMALL, 0)
    rows = plain(rng.integers(0, 61, (1, 11)))

    def run(params, remat):
        return jnp.sum(jnp.sin(model.forward(params, *rows, remat=remat)))

    for a, b in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(run), static_argnums=1)(model.params, False)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(run), static_argnums=1)(model.params, True)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_programs_do_not_grow_with_depth():
    def size(layers):
        config = dataclasses.replace(SMALL, num_hidden_layers=layers)
        model = Model(config, None)
        params = abstract_params(config)
        row = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        place = jax.ShapeDtypeStruct((1,), jnp.int32)
        cache = jax.eval_shape(lambda p: model.init_cache(p, 2, 16), params)
        programs = (
            jax.make_jaxpr(model.forward)(params, row, row, row),
            jax.make_jaxpr(model.extend)(params, cache, row, place, place),
        )
        return [str(program).count("dot_general") for program in programs]

    assert size(2) == size(9)


def products(model, params):
    """The matrix products of `forward`, with those inside loops."""
    row = jnp.zeros((1, 200), jnp.int32)
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(eqn)
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(value, "jaxpr"):
                    value = value.jaxpr
                if hasattr(value, "eqns"):
                    visit(value)

    visit(jax.make_jaxpr(model.forward)(params, row, row, row).jaxpr)
    return found


def test_float32_products_are_true_float32_and_bfloat16_ones_sum_in_float32():
    full = products(Model(SMALL, None), abstract_params(SMALL))
    half = products(Model(SMALL, None), abstract_params(SMALL, "bfloat16"))
    assert len(full) == len(half) >= 9
    highest = jax.lax.Precision.HIGHEST
    assert all(eqn.params["precision"] == (highest, highest) for eqn in full)
    assert all(eqn.outvars[0].aval.dtype == jnp.float32 for eqn in half)
    assert all(var.aval.dtype == jnp.bfloat16 for eqn in half for var in eqn.invars)


def test_bfloat16_is_near_float32_and_its_states_are_not_rounded(rng):
    full = init_model(SMALL, 0)
    half = init_model(SMALL, 0, "bfloat16")
    rows = plain(rng.integers(0, 61, (1, 30)))
    want = np.asarray(full.forward(full.params, *rows))
    got = half.forward(half.params, *rows)
    assert got.dtype == jnp.float32
    assert np.mean(np.asarray(got.astype(jnp.bfloat16), np.float32) == np.asarray(got)) < 0.1
    assert 1e-4 < np.sqrt(np.mean((got - want) ** 2)) < 0.02 * np.sqrt(np.mean(want**2))


def test_bfloat16_gradients_are_near_float32(rng):
    full = init_model(SMALL, 0)
    half = init_model(SMALL, 0, "bfloat16")
    rows = plain(rng.integers(0, 61, (1, 30)))

    def grads(model):
        loss = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.forward(p, *rows)))))
        return loss(model.params)

    for a, b in zip(jax.tree.leaves(grads(full)), jax.tree.leaves(grads(half)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(a)


def test_an_id_outside_the_vocabulary_gives_nan_and_no_wrong_number():
    model = init_model(SMALL, 0)
    states = forward(model, model.params, *plain([[1, 61, 2], [1, 60, 2]]))
    assert np.all(np.isnan(states[0, 1:])) and np.all(np.isfinite(states[1]))


def test_axes_and_abstract_shapes_run_parallel_to_the_parameters(pair):
    model = load_model(pair.path)
    axes = param_axes(model.config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(model.config)) == (
        jax.tree.map(lambda x: (x.shape, x.dtype), model.params)
    )
    pairs = jax.tree.map(
        lambda x, names: (x.ndim, names), model.params, axes, is_leaf=lambda x: isinstance(x, tuple)
    )
    leaves = jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple))
    assert all(ndim == len(names) for ndim, names in leaves)
    known = {"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp"}
    known |= {"experts"} if model.config.num_experts else set()
    known |= {"linear_heads", "conv"} if model.config.layer_types else set()
    assert {name for _, names in leaves for name in names} == known
    assert axes["layers"]["attention"]["out"] == ("layers", "heads", "head_dim", "embed")


def test_fresh_parameters():
    config = dataclasses.replace(SMALL, model_type="qwen2", initializer_range=0.05)
    model = init_model(config, 3)
    layers = model.params["layers"]
    assert np.std(layers["mlp"]["gate"]) == pytest.approx(0.05, rel=0.05)
    assert not np.allclose(layers["mlp"]["gate"][0], layers["mlp"]["gate"][1])
    assert np.all(layers["attention"]["key_bias"] == 0) and np.all(model.params["norm"] == 1)
    again, other = init_model(config, 3), init_model(config, 4)
    np.testing.assert_array_equal(model.params["embed"], again.params["embed"])
    assert not np.allclose(model.params["embed"], other.params["embed"])


def test_head_is_the_embedding_when_tied():
    tied = init_model(dataclasses.replace(SMALL, tie_word_embeddings=True), 0)
    assert "head" not in tied.params and tied.head(tied.params) is tied.params["embed"]
    untied = init_model(SMALL, 0)
    assert untied.head(untied.params) is untied.params["head"]


def test_models_of_one_configuration_share_a_compiled_program():
    first, second = init_model(SMALL, 0), init_model(SMALL, 1)
    traces = []

    @jax.jit
    def run(params, tokens):
        traces.append(1)
        return first.forward(params, *plain(tokens))

    run(first.params, jnp.zeros((1, 4), jnp.int32))
    run(second.params, jnp.zeros((1, 4), jnp.int32))
    assert len(traces) == 1
    assert first == second and hash(first) == hash(second)
    assert first != dataclasses.replace(first, max_length=7)


def test_context_length():
    assert init_model(SMALL, 0).context_length == 32768
    rope = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=1000)
    stretched = dataclasses.replace(SMALL, rope=rope, max_position_embeddings=1000)
    assert Model(stretched, None).context_length == 4000
    assert Model(stretched, None, max_length=50).context_length == 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 0}, "context length is 0"),
        ({"attention": "flash"}, "attention is 'flash'"),
    ],
)
def test_model_errors(change, message):
    with pytest.raises(ValueError, match=message):
        Model(SMALL, None, **change)


def test_unknown_dtype():
    with pytest.raises(ValueError, match="dtype is 'float16'; choose float32 or bfloat16"):
        init_model(SMALL, 0, "float16")
