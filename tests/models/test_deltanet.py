"""Gated DeltaNet against its definition token by token, under cuts, segments and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.models import deltanet
from race_jax.models.deltanet import (
    Delta,
    causal_conv,
    conv_window,
    delta_chunked,
    delta_step,
    delta_transition,
    find_fresh,
    scale_queries,
    unit,
)

LENGTHS = [[1, 2, 3, 63, 64, 65], [65, 64, 63, 3, 2, 1], [64, 1, 1, 128, 4]]
chunked = jax.jit(delta_chunked)


def draw(rng, batch, length, *, strength=1.0, fresh=0.05):
    """Rows with two key heads and four value heads."""

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return Delta(
        scale_queries(normal(batch, length, 2, 8)),
        unit(normal(batch, length, 2, 8)),
        normal(batch, length, 4, 6),
        -strength * jax.nn.softplus(normal(batch, length, 4)),
        jax.nn.sigmoid(normal(batch, length, 4)),
        jnp.asarray(rng.random((batch, length)) < fresh),
    )


def one_by_one(delta, state):
    """The recurrence as it is defined, in float64."""
    q, k, v, decay, rate, fresh = (np.asarray(x, np.float64) for x in delta)
    q, k = np.repeat(q, 2, axis=2), np.repeat(k, 2, axis=2)
    state, out = np.array(state, np.float64), []
    for t in range(q.shape[1]):
        state = state * (np.exp(decay[:, t]) * (1 - fresh[:, t])[:, None])[..., None, None]
        answer = np.einsum("bvk,bvkd->bvd", k[:, t], state)
        moved = rate[:, t][..., None] * (v[:, t] - answer)
        state = state + np.einsum("bvk,bvd->bvkd", k[:, t], moved)
        out.append(np.einsum("bvk,bvkd->bvd", q[:, t], state))
    return np.stack(out, axis=1), state


@pytest.mark.parametrize("length", [1, 3, 64, 65, 1100])
def test_chunks_equal_the_recurrence(rng, length):
    delta = draw(rng, 1, length)
    state = jnp.asarray(rng.normal(size=(1, 4, 8, 6)), jnp.float32)
    got, after = chunked(delta, state)
    want, last = one_by_one(delta, state)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(after, last, atol=1e-5)


def test_one_token_by_hand():
    """S = [[2]], exp(g) = 1/2, b = 1/2, k = 1, v = 3, q = 10: S -> 1 + (3 - 1) / 2 = 2, o = 20."""
    one = Delta(*(jnp.full((1, 1, 1), x) for x in (10.0, 1.0, 3.0)), *2 * [jnp.zeros((1, 1))], None)
    one = one._replace(
        decay=jnp.log(one.decay + 0.5), rate=one.rate + 0.5, fresh=jnp.zeros(1, bool)
    )
    out, state = delta_step(one, jnp.full((1, 1, 1, 1), 2.0))
    assert out[0, 0, 0] == pytest.approx(20) and state[0, 0, 0, 0] == pytest.approx(2)
    out, state = delta_step(one._replace(fresh=jnp.ones(1, bool)), state)
    assert out[0, 0, 0] == pytest.approx(15)
    row = jax.tree.map(lambda x: x[:, None], one)
    out, _ = delta_chunked(row, jnp.full((1, 1, 1, 1), 2.0))
    assert out[0, 0, 0, 0] == pytest.approx(20)


@pytest.mark.parametrize("sizes", LENGTHS)
def test_segments_begin_at_any_offset_of_a_chunk(rng, sizes):
    delta = draw(rng, 1, sum(sizes), fresh=0)
    ids = jnp.asarray(np.repeat(np.arange(1, len(sizes) + 1), sizes)[None])
    packed, last = chunked(delta._replace(fresh=find_fresh(ids)))
    zero, begin = np.zeros((1, 4, 8, 6)), 0
    for size in sizes:
        part = jax.tree.map(lambda x, b=begin, n=size: x[:, b : b + n], delta)
        want, state = one_by_one(part, zero)
        np.testing.assert_allclose(packed[:, begin : begin + size], want, atol=1e-5)
        begin += size
    np.testing.assert_allclose(last, state, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 63, 64])
def test_rows_may_be_cut_anywhere(rng, cut):
    delta = draw(rng, 2, 130, fresh=0.01)
    whole, last = chunked(delta)
    first, second = (
        jax.tree.map(lambda x, s=s: x[:, s], delta) for s in (np.s_[:cut], np.s_[cut:])
    )
    left, state = chunked(first)
    right, state = chunked(second, state)
    np.testing.assert_allclose(np.concatenate([left, right], axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("fresh", [0, 0.02])
def test_transition_says_what_rows_do_to_any_state(rng, fresh):
    delta = draw(rng, 2, 100, strength=0.02, fresh=fresh)
    a, b = jax.jit(delta_transition)(delta)
    for _ in range(2):
        state = jnp.asarray(rng.normal(size=(2, 4, 8, 6)), jnp.float32)
        _, want = chunked(delta, state)
        np.testing.assert_allclose(jnp.einsum("bvij,bvjd->bvid", a, state) + b, want, atol=1e-5)
    began = np.asarray(delta.fresh.any(axis=1))
    assert np.all(np.asarray(a)[began] == 0) and (not fresh or began.any())


def test_tokens_without_rate_and_decay_leave_no_trace(rng):
    delta = draw(rng, 1, 30, fresh=0)
    state = jnp.asarray(rng.normal(size=(1, 4, 8, 6)), jnp.float32)
    want = chunked(delta, state)[1]
    pads = draw(rng, 1, 50, fresh=0)
    pads = pads._replace(decay=0 * pads.decay, rate=0 * pads.rate)
    parts = [jax.tree.map(lambda x: x[:, :20], pads), delta, pads]
    got = chunked(jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts), state)[1]
    np.testing.assert_allclose(got, want, atol=1e-5)


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1, 2), allow_int=True)
def slopes(q, k, delta, zeros):
    q, k = (jnp.where(zeros, 0, x) for x in (q, k))
    out, state = delta_chunked(delta._replace(q=scale_queries(q), k=unit(k)))
    return jnp.sum(jnp.sin(out)) + jnp.sum(state)


@pytest.mark.parametrize("strength", [0.0, 1.0, 50.0, 1e4])
def test_outputs_and_gradients_stay_finite(rng, strength):
    """Decay from none to all at once; zero keys and queries, as at padding, among the others."""
    delta = draw(rng, 1, 200, strength=strength)
    zeros = jnp.arange(200)[None, :, None, None] % 7 == 0

    grads = slopes(delta.q, delta.k, delta, zeros)
    grads = [x for x in jax.tree.leaves(grads) if x.dtype == jnp.float32]
    assert all(np.all(np.isfinite(x)) for x in grads)
    assert max(np.abs(x).max() for x in grads) < 1e3


def test_gradients_equal_those_of_the_recurrence(rng):
    delta = draw(rng, 1, 70)

    def by_step(delta):
        def step(state, token):
            out, state = delta_step(token, state)
            return state, out

        tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), delta)
        return jax.lax.scan(step, jnp.zeros((1, 4, 8, 6)), tokens)[1].swapaxes(0, 1)

    def grads(run):
        def loss(floats):
            return jnp.sum(jnp.sin(run(Delta(*floats, delta.fresh))))

        return jax.jit(jax.grad(loss))(delta[:5])

    for a, b in zip(grads(lambda x: delta_chunked(x)[0]), grads(by_step), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_equal_keys_without_decay_lose_no_digits():
    """A text of one token: every pair of keys overlaps fully, the hardest system to invert."""
    ones = jnp.tril(jnp.ones((64, 64)), -1)
    inverse = deltanet._invert(ones)
    np.testing.assert_allclose(inverse, jnp.eye(64) - jnp.eye(64, k=-1), atol=1e-6)


def test_inverse_and_its_slope(rng):
    lower = np.tril(rng.normal(size=(3, 32, 32)) * 0.3, -1)
    got = deltanet._invert(jnp.asarray(lower, jnp.float32))
    want = np.linalg.inv(np.eye(32) + lower)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    move = np.tril(rng.normal(size=(3, 32, 32)), -1)
    arrays = (jnp.asarray(x, jnp.float32) for x in (lower, move))
    slope = jax.jvp(deltanet._invert, *((x,) for x in arrays))[1]
    near = (np.linalg.inv(np.eye(32) + lower + 1e-6 * move) - want) / 1e-6
    np.testing.assert_allclose(slope, near, atol=1e-3 * np.abs(near).max())


def test_convolution_by_hand():
    """Taps 1, 10, 100 over 1, 2, 3, 4, the last two in a segment of their own."""
    x = jnp.arange(1.0, 5.0)[None, :, None]
    kernel, window = jnp.array([[1.0, 10.0, 100.0]]), jnp.array([[[0.0], [5.0]]])
    fresh = jnp.array([[False, False, True, False]])
    got = causal_conv(x, kernel, window, fresh)[0, :, 0]
    sums = np.array([100 + 50, 200 + 10 + 5, 300, 400 + 30], np.float32)
    np.testing.assert_allclose(got, sums / (1 + np.exp(-sums)))
    np.testing.assert_array_equal(conv_window(x, window, fresh)[0, :, 0], [3, 4])
    np.testing.assert_array_equal(conv_window(x[:, :3], window, fresh[:, :3])[0, :, 0], [0, 3])
    np.testing.assert_array_equal(conv_window(x[:, :1], window, fresh[:, :1])[0, :, 0], [5, 1])


def test_segments_begin_where_the_id_changes():
    ids = jnp.array([[0, 0, 1, 1, 2], [3, 3, 3, 0, 0]])
    first = np.array([[1, 0, 1, 0, 1], [1, 0, 0, 1, 0]], bool)
    np.testing.assert_array_equal(find_fresh(ids), first)
