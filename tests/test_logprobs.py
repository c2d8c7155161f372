import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.logprobs import leading_token_logprobs, token_logprobs


def reference(hidden, head, targets):
    """The definition in float64, one row at a time."""
    out = []
    for h, target in zip(np.float64(hidden), targets, strict=True):
        logits = np.float64(head) @ h
        top = logits.max()
        out.append(logits[target] - top - np.log(np.exp(logits - top).sum()))
    return np.array(out)


def sample(rows, width=8, vocab=50, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.normal(size=(vocab, width)).astype(np.float32),
        rng.integers(0, vocab, rows).astype(np.int32),
    )


def test_two_logits_by_hand():
    # logits [2, 0]: log softmax of the first = -log(1 + e^-2) = -0.126928
    hidden, head = jnp.array([[1.0]]), jnp.array([[2.0], [0.0]])
    np.testing.assert_allclose(token_logprobs(hidden, head, jnp.array([0])), -0.126928, atol=1e-6)
    np.testing.assert_allclose(token_logprobs(hidden, head, jnp.array([1])), -2.126928, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31])
def test_equals_the_definition_at_every_chunk_boundary(rows):
    hidden, head, targets = sample(rows)
    got = token_logprobs(hidden, head, targets, chunk=8)
    np.testing.assert_allclose(got, reference(hidden, head, targets), atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 20])
def test_leading_rows_do_only_what_is_asked(count):
    hidden, head, targets = sample(20)
    got = leading_token_logprobs(hidden, head, targets, count, chunk=8)
    want = reference(hidden, head, targets)
    np.testing.assert_allclose(got[:count], want[:count], atol=1e-5)
    rounded = -(-count // 8) * 8
    np.testing.assert_array_equal(got[rounded:], 0)


def test_no_rows_give_no_values():
    hidden, head, targets = jnp.zeros((0, 4)), jnp.zeros((7, 4)), jnp.zeros(0, jnp.int32)
    assert token_logprobs(hidden, head, targets).shape == (0,)
    assert leading_token_logprobs(hidden, head, targets, 0).shape == (0,)


def test_one_program_serves_every_count():
    hidden, head, targets = sample(20)
    function = jax.jit(lambda n: leading_token_logprobs(hidden, head, targets, n, chunk=8))
    for count in range(20):
        function(count)
    assert function._cache_size() == 1


def test_never_positive_and_finite_at_extremes():
    hidden = jnp.array([[100.0], [1e4], [-1e4]])
    head = jnp.array([[1.0], [1.0 - 1e-7], [-1.0]])
    got = token_logprobs(hidden, head, jnp.array([0, 0, 0]))
    assert np.isfinite(got).all() and (got <= 0).all()


def test_bfloat16_inputs_are_scored_in_float32():
    # Near 20 bfloat16 steps by 0.125: a head in bfloat16 would return multiples of that.
    hidden, head, targets = sample(64, width=32)
    hidden, head = jnp.bfloat16(hidden), jnp.bfloat16(head * 5)
    got = token_logprobs(hidden, head, targets)
    want = reference(np.float32(hidden), np.float32(head), targets)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_gradients_equal_those_of_full_logits():
    hidden, head, targets = sample(20)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=20), jnp.float32)

    def direct(hidden, head):
        logits = jax.nn.log_softmax(hidden @ head.T)
        return jnp.sum(weights * logits[jnp.arange(20), targets])

    def chunked(hidden, head):
        return jnp.sum(weights * token_logprobs(hidden, head, targets, chunk=8))

    for got, want in zip(
        jax.grad(chunked, (0, 1))(hidden, head), jax.grad(direct, (0, 1))(hidden, head), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_memory_is_flat_in_rows_beyond_one_chunk():
    vocab, width = 20_000, 16

    def temporaries(rows):
        def loss(hidden, head, targets):
            return token_logprobs(hidden, head, targets).sum()

        shapes = (
            jax.ShapeDtypeStruct((rows, width), jnp.float32),
            jax.ShapeDtypeStruct((vocab, width), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(512), temporaries(8192)
    # Full logits would add (8192 - 512) * 20,000 * 4 bytes = 614 MB.
    assert large - small < 8192 * width * 4 * 4
