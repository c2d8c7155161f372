"""Products by group against a loop, on the instruction's path and on the blocked one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.models import grouped
from race_jax.models.grouped import grouped_matmul

ways = pytest.mark.parametrize("way", [grouped._blocked, grouped._ragged, grouped_matmul])
SIZES = [
    [3, 0, 20, 1, 16],  # an empty group, one row, one full block and a half, two full blocks
    [0, 0, 40, 0, 0],
    [8, 8, 8, 8, 8],
    [1, 0, 7, 0, 9],  # rows past the last group
    [0, 0, 0, 0, 0],
]


def reference(x, weight, sizes):
    """One row at a time, in float64."""
    out, row = np.zeros((len(x), weight.shape[2])), 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            out[row] = np.asarray(x[row], np.float64) @ np.asarray(weight[group], np.float64)
            row += 1
    return out


def draw(rng, rows=40, groups=5, dtype=jnp.float32):
    x = jnp.asarray(rng.standard_normal((rows, 6)), dtype)
    return x, jnp.asarray(rng.standard_normal((groups, 6, 4)), dtype)


def test_worked_case():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = jnp.array([[[1.0], [0.0]], [[10.0], [1.0]]])
    # Row 0 takes matrix 0: 1. Rows 1 and 2 take matrix 1: 30 + 4 and 50 + 6.
    got = grouped_matmul(x, weight, jnp.array([1, 2]))
    np.testing.assert_array_equal(got, [[1], [34], [56]])


@ways
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_equal_the_loop(rng, way, sizes):
    x, weight = draw(rng)
    given = rng.standard_normal((40, 4))
    got = jax.jit(way)(x, weight, jnp.array(sizes))
    np.testing.assert_allclose(got, reference(x, weight, sizes), atol=1e-5)
    to_x, to_weight = jax.jit(
        jax.grad(lambda x, w: jnp.sum(way(x, w, jnp.array(sizes)) * given), argnums=(0, 1))
    )(x, weight)
    row = 0
    for group, size in enumerate(sizes):
        part = slice(row, row + size)
        want = given[part] @ np.asarray(weight[group], np.float64).T
        np.testing.assert_allclose(to_x[part], want, atol=1e-5)
        want = np.asarray(x[part], np.float64).T @ given[part]
        np.testing.assert_allclose(to_weight[group], want, atol=1e-5)
        row += size
    assert np.all(to_x[row:] == 0)


@pytest.mark.parametrize("rows", [1, 7, 700])
def test_any_number_of_rows(rng, rows):
    x, weight = draw(rng, rows, groups=3)
    sizes = np.bincount(rng.integers(0, 3, rows), minlength=3)
    got = grouped_matmul(x, weight, jnp.asarray(sizes))
    np.testing.assert_allclose(got, reference(x, weight, sizes), atol=1e-5)


@ways
def test_a_group_with_nan_spoils_no_other(rng, way):
    x, weight = draw(rng)
    x = x.at[:3].set(jnp.nan)
    sizes = jnp.array([3, 12, 5, 8, 12])

    def loss(weight):
        return jnp.sum(way(x, weight, sizes)[3:])

    value, grads = jax.jit(jax.value_and_grad(loss))(weight)
    assert np.isfinite(value) and np.all(np.isfinite(grads[1:]))


@ways
def test_bfloat16_is_summed_in_float32(rng, way):
    x, weight = draw(rng, dtype=jnp.bfloat16)
    sizes = [3, 0, 20, 1, 16]
    got = way(x, weight, jnp.array(sizes))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(x, weight, sizes), atol=1e-5)
    grads = jax.grad(lambda x, w: jnp.sum(way(x, w, jnp.array(sizes)) ** 2), argnums=(0, 1))(
        x, weight
    )
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2


def test_work_grows_with_rows_and_not_with_rows_times_groups():
    """The program multiplies one block of rows with one matrix, in a loop over the blocks."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 64), (64, 64, 32))]
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = jax.jit(grouped_matmul).lower(*shapes, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (1024 + 256) * (64 + 32)
