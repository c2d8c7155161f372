import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.masked import masked_mean, masked_sum, safe_divide

BAD = jnp.array([1.0, jnp.inf, jnp.nan, 2.0, -jnp.inf])
GOOD = jnp.array([True, False, False, True, False])


def test_what_is_masked_reaches_neither_value_nor_gradient():
    # 1 + 2 = 3, over 2 entries 1.5
    assert masked_sum(BAD, GOOD) == 3
    assert masked_mean(BAD, GOOD) == 1.5
    np.testing.assert_array_equal(jax.grad(masked_sum)(BAD, GOOD), [1, 0, 0, 1, 0])
    np.testing.assert_array_equal(jax.grad(masked_mean)(BAD, GOOD), [0.5, 0, 0, 0.5, 0])


@pytest.mark.parametrize("function", [masked_sum, masked_mean])
def test_nothing_left_gives_zero(function):
    none = jnp.zeros(5, bool)
    assert function(BAD, none) == 0
    np.testing.assert_array_equal(jax.grad(function)(BAD, none), 0)
    assert function(jnp.zeros(0), jnp.zeros(0, bool)) == 0


def test_axes_and_broadcast_masks():
    values = jnp.arange(6.0).reshape(2, 3)
    column = jnp.array([[True], [False]])
    # Row 0 is 0, 1, 2 and row 1 is masked throughout.
    np.testing.assert_array_equal(masked_sum(values, column, axis=1), [3, 0])
    np.testing.assert_array_equal(masked_mean(values, column, axis=1), [1, 0])
    np.testing.assert_array_equal(masked_mean(values, column, axis=0), [0, 1, 2])


def test_masks_of_numbers_count_as_truth_values():
    assert masked_sum(BAD, jnp.array([1, 0, 0, 1, 0])) == 3


def test_division_by_zero_is_zero_with_finite_gradients():
    total, weight = jnp.array([3.0, 3.0, 0.0]), jnp.array([2.0, 0.0, 0.0])
    np.testing.assert_array_equal(safe_divide(total, weight), [1.5, 0, 0])
    for argument in (0, 1):
        gradient = jax.grad(lambda *a: safe_divide(*a).sum(), argument)(total, weight)
        assert np.isfinite(gradient).all()
