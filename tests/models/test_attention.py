"""Blocked attention against a loop, at every kind of block boundary."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.models import attention
from race_jax.models.attention import job_sizes, plan_jobs, segment_attention


def reference(q, k, v, segments):
    """One query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, length, heads, width = q.shape
    group = heads // k.shape[2]
    out = np.zeros_like(q)
    for b in range(rows):
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
            for n in range(heads):
                scores = k[b, seen, n // group] @ q[b, t, n] / math.sqrt(width)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[b, seen, n // group] / weights.sum()
    return out


def draw(rng, length):
    shapes = ((2, length, 4, 6), (2, length, 2, 6), (2, length, 2, 6))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17, 30])
@pytest.mark.parametrize("outer", [2, 16])
def test_equals_the_loop_whatever_the_blocks(monkeypatch, rng, length, outer):
    # Blocks of 4 queries; with 2 chunks, a chunk holds several blocks and is looped over.
    monkeypatch.setattr(attention, "_INNER", 4)
    monkeypatch.setattr(attention, "_OUTER", outer)
    q, k, v = draw(rng, length)
    segments = np.sort(rng.integers(0, 4, (2, length)), axis=1)
    got = segment_attention(q, k, v, jnp.asarray(segments))
    np.testing.assert_allclose(got, reference(q, k, v, segments), atol=1e-5)


def test_gradients_do_not_depend_on_the_blocks(monkeypatch, rng):
    q, k, v = draw(rng, 18)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 18)), axis=1))

    def grads():
        return jax.grad(
            lambda *x: jnp.sum(jnp.sin(segment_attention(*x, segments))), argnums=(0, 1, 2)
        )(q, k, v)

    whole = grads()
    monkeypatch.setattr(attention, "_INNER", 4)
    monkeypatch.setattr(attention, "_OUTER", 2)
    for a, b in zip(whole, grads(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_large_scores_do_not_overflow(rng):
    q, k, v = draw(rng, 9)
    segments = np.ones((2, 9), np.int32)
    got = segment_attention(900 * q, k, v, jnp.asarray(segments))
    np.testing.assert_allclose(got, reference(900 * q, k, v, segments), atol=1e-3)


def test_memory_grows_with_length_and_not_with_its_square():
    def peak(length):
        shapes = [jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (2, 1, 1)]
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q, k, v, segments):
            return jnp.sum(segment_attention(q, k, v, segments))

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, segments).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert peak(8192) < 3 * peak(4096)


def test_worked_pieces():
    # Slot 5 has a run of 7 rows = 4 + 2 + 1, slot 2 a run of 2, slot 5 again a run of 1.
    slots = jnp.array([5] * 7 + [2] * 2 + [5])
    jobs = plan_jobs(slots, (4, 2, 1))
    assert jobs.number.tolist() == [1, 2, 2]
    assert jobs.first[0, :1].tolist() == [0]
    assert jobs.first[1, :2].tolist() == [4, 7]
    assert jobs.first[2, :2].tolist() == [6, 9]


def test_pieces_cover_each_row_once_and_stay_in_their_slot(rng):
    for rows in (1, 2, 7, 16, 19):
        sizes = job_sizes(rows, int(rng.integers(1, 200)))
        assert sizes[-1] == 1 and sizes[0] <= rows
        slots = np.repeat(rng.integers(0, 4, rows), rng.integers(1, 6, rows))[:rows]
        jobs = plan_jobs(jnp.asarray(slots), sizes)
        covered = []
        for size, firsts, count in zip(sizes, jobs.first, jobs.number, strict=True):
            for first in firsts[: int(count)].tolist():
                assert len(set(slots[first : first + size])) == 1
                covered += range(first, first + size)
        assert sorted(covered) == list(range(rows))
