"""Log-probabilities with rows and vocabulary cut over eight virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.logic.scoring import Scorer
from race_jax.logprobs import leading_token_logprobs, token_logprobs
from race_jax.models import ModelConfig, init_model, param_axes
from race_jax.sharding import make_mesh, place, sharding_for, shardings_for, use_mesh
from race_jax.types import TokenTrajectory, TokenTurn

MESHES = [{"tensor": 8}, {"fsdp": 2, "tensor": 2, "context": 2}, {"data": 8}]


def sample(rows, width=8, vocab=48):
    rng = np.random.default_rng(rows)
    return (
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.normal(size=(vocab, width)).astype(np.float32) * 3,
        rng.integers(0, vocab, rows).astype(np.int32),
    )


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("rows", [1, 21])
def test_values_and_gradients_equal_those_of_one_device(sizes, rows):
    hidden, head, targets = sample(rows)
    weights = np.random.default_rng(1).normal(size=rows)

    def loss(hidden, head):
        logprobs = token_logprobs(hidden, head, targets, chunk=4)
        return jnp.sum(weights * logprobs), logprobs

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, want), want_grads = run(hidden, head)
    with use_mesh(make_mesh(**sizes)):
        (_, got), grads = run(hidden, head)
    np.testing.assert_allclose(got, want, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("count", [0, 1, 13, 40])
def test_leading_rows(sizes, count):
    hidden, head, targets = sample(40)
    want = token_logprobs(hidden, head, targets)
    with use_mesh(make_mesh(**sizes)):
        run = jax.jit(lambda count: leading_token_logprobs(hidden, head, targets, count, chunk=3))
        got = run(count)
    np.testing.assert_allclose(got[:count], want[:count], atol=1e-5)


def test_an_unknown_target_is_nan_and_no_wrong_number():
    hidden, head, _ = sample(8)
    with use_mesh(make_mesh(tensor=8)):
        got = token_logprobs(hidden, head, jnp.array([0, 47, 48, 99, -1, 5, 6, 7]))
    np.testing.assert_array_equal(np.isnan(got), [0, 0, 1, 1, 1, 0, 0, 0])


def test_a_vocabulary_that_does_not_divide():
    hidden, _, targets = sample(8)
    with (
        use_mesh(make_mesh(tensor=8)),
        pytest.raises(ValueError, match=r"head: vocab is 50 .* tensor = 8; make tensor 5 or 10"),
    ):
        token_logprobs(hidden, np.zeros((50, 8), np.float32), targets)


def test_logits_are_never_whole():
    rows, width, vocab = 1024, 16, 8192
    mesh = make_mesh(fsdp=2, tensor=4)

    def shape(shape, axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding_for(axes, mesh))

    def loss(hidden, head, targets):
        return token_logprobs(hidden, head, targets, chunk=64).sum()

    with use_mesh(mesh):
        program = jax.jit(jax.grad(loss, (0, 1))).lower(
            shape((rows, width), ("tokens", None)),
            shape((vocab, width), ("vocab", "embed")),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        compiled = program.compile()
    # A device's logits are [64, 8192 / 4] at a time, 0.5 MB; its rows' whole ones would be 16.8 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 6e6
    text = compiled.as_text()
    for whole in ("f32[512,8192]", "f32[1024,8192]", "f32[1024,2048]", "f32[64,8192]"):
        assert whole not in text
    assert "f32[64,2048]" in text


def test_scoring_a_trajectory_on_a_mesh():
    config = ModelConfig("qwen3", 96, 32, 48, 1, 4, num_key_value_heads=2, head_dim=8)
    model = init_model(config, 0)
    turns = tuple(TokenTurn((5, 6), (1, 2), tuple(range(7, 20)), (3, 4)) for _ in range(3))
    sequence = TokenTrajectory("one", tuple(range(30)), turns).assemble()
    want = Scorer(model, model.params).score(sequence)
    mesh = make_mesh(tensor=2, context=4)
    params = place(model.params, shardings_for(param_axes(config), mesh, model.params))
    with use_mesh(mesh):
        got = Scorer(model, params).score(sequence)
    np.testing.assert_allclose(got, want, atol=1e-5)
