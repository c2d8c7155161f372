"""Products whose precision follows from the dtype of what is multiplied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def exact(dtype: Any) -> jax.lax.Precision | None:
    """True float32 for float32, the backend's fastest for others.

    TPUs and GPUs would otherwise round float32 inputs to bfloat16 or TF32, which is far above the
    thresholds that scores are held to.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`einsum(spec, a, b)` of arrays of one dtype, summed and returned in float32."""
    return jnp.einsum(spec, a, b, precision=exact(b.dtype), preferred_element_type=jnp.float32)
