"""Masked reductions that give 0 where nothing is left, with finite gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Axis = int | tuple[int, ...] | None


def masked_sum(values: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
    """sum_n values_n over the n where mask_n; what the mask leaves out may be inf or NaN.

    The gradient is 0 wherever the mask is false. (A product with the mask would turn inf into NaN.)
    A function that makes NaN *derivatives* of masked values has to mask its own inputs as well:
    0 times NaN is NaN on the way back.

    Args:
        values: float, any shape.
        mask: bool, broadcast against `values`.
        axis: Axes to sum over, all by default.

    Returns:
        The sums; 0 where the mask is false throughout.
    """
    return jnp.sum(jnp.where(jnp.asarray(mask, bool), values, 0), axis=axis)


def safe_divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Divide, with 0 where the weight is 0, in values and gradients.

    Args:
        total: float, any shape.
        weight: float or int, broadcast against `total`, at least 0.
    """
    some = weight != 0
    return jnp.where(some, total / jnp.where(some, weight, 1), 0)


def masked_mean(values: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
    """sum_n values_n / |mask| over the n where mask_n; 0 where the mask is false throughout.

    Never average such means over micro-batches or devices: add sums and weights, divide once.

    Args:
        values: float, any shape.
        mask: bool, broadcast against `values`.
        axis: Axes to average over, all by default.
    """
    mask = jnp.broadcast_to(jnp.asarray(mask, bool), jnp.shape(values))
    return safe_divide(masked_sum(values, mask, axis), jnp.sum(mask, axis=axis, dtype=jnp.float32))
