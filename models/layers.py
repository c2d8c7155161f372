"""The parts of a decoder block, each with its parameters, their shapes and logical axes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models.config import ModelConfig
from race_jax.models.products import product
from race_jax.models.rope import rotate

Axes = tuple[str, ...]


def draw_flat(
    sample: Callable[..., jax.Array], key: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """`sample(key, shape)`, drawn along one axis.

    The numbers are the same, and XLA on a CPU compiles the generator several times faster for one
    axis than for four.

    Args:
        sample: Such as `jax.random.normal`.
        key: A random key.
        shape: Of the result.

    Returns:
        float32 [*shape].
    """
    return sample(key, (math.prod(shape),)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Maker:
    """Draws fresh parameters, so that shape, axes and start are declared on one line.

    Attributes:
        rngs: Source of random keys.
        dtype: Dtype of every parameter.
        std: Standard deviation of matrices.
        stack: Leading sizes put before each declared shape: the layers of a scan.
    """

    rngs: nnx.Rngs
    dtype: jnp.dtype
    std: float
    stack: tuple[int, ...] = ()

    def normal(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        """A matrix drawn from N(0, std^2)."""
        drawn = draw_flat(jax.random.normal, self.rngs.params(), self.stack + shape)
        return self._param((self.std * drawn).astype(self.dtype), axes)

    def ones(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        """A norm's scale."""
        return self._param(jnp.ones(self.stack + shape, self.dtype), axes)

    def zeros(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        """A bias."""
        return self._param(jnp.zeros(self.stack + shape, self.dtype), axes)

    def log_uniform(self, shape: tuple[int, ...], axes: Axes, low: float, high: float) -> nnx.Param:
        """Logarithms of numbers drawn evenly between `low` and `high`."""
        uniform = functools.partial(jax.random.uniform, minval=low, maxval=high)
        drawn = draw_flat(uniform, self.rngs.params(), self.stack + shape)
        return self._param(jnp.log(drawn).astype(self.dtype), axes)

    def _param(self, value: jax.Array, axes: Axes) -> nnx.Param:
        return nnx.Param(value, axes=("layers",) * len(self.stack) + axes)


def contract(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`product(spec, x, weight)` in the dtype of the weight."""
    return product(spec, x.astype(weight.dtype), weight)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps) * scale.astype(jnp.float32)


class Attention(nnx.Module):
    """The projections of self-attention with grouped key and value heads."""

    def __init__(self, config: ModelConfig, make: Maker):
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.query = make.normal((d, n, h), ("embed", "heads", "head_dim"))
        self.key = make.normal((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.value = make.normal((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.out = make.normal((n, h, d), ("heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.query_bias = make.zeros((n, h), ("heads", "head_dim"))
            self.key_bias = make.zeros((k, h), ("kv_heads", "head_dim"))
            self.value_bias = make.zeros((k, h), ("kv_heads", "head_dim"))
        if config.out_bias:
            self.out_bias = make.zeros((d,), ("embed",))
        if config.family.qk_norm:
            self.query_norm = make.ones((h,), ("head_dim",))
            self.key_norm = make.ones((h,), ("head_dim",))
        self.qkv_biased, self.out_biased = config.qkv_bias, config.out_bias
        self.qk_normed = config.family.qk_norm

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [..., N, H], rotated keys and values [..., K, H] of `x` [..., D]."""
        dtype = self.query[...].dtype
        q = contract("...d,dnh->...nh", x, self.query[...])
        k = contract("...d,dnh->...nh", x, self.key[...])
        v = contract("...d,dnh->...nh", x, self.value[...])
        if self.qkv_biased:
            q, k, v = q + self.query_bias[...], k + self.key_bias[...], v + self.value_bias[...]
        if self.qk_normed:
            q = rms_norm(q, self.query_norm[...], self.eps)
            k = rms_norm(k, self.key_norm[...], self.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def output(self, mixed: jax.Array) -> jax.Array:
        """What attention adds to the residual stream: float32 [..., D] from [..., N, H]."""
        out = contract("...nh,nhd->...d", mixed, self.out[...])
        return out + self.out_bias[...] if self.out_biased else out


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, make: Maker):
        d, f = config.hidden_size, config.intermediate_size
        self.gate = make.normal((d, f), ("embed", "mlp"))
        self.up = make.normal((d, f), ("embed", "mlp"))
        self.down = make.normal((f, d), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [..., D] from [..., D]."""
        gate = contract("...d,df->...f", x, self.gate[...])
        up = contract("...d,df->...f", x, self.up[...])
        return contract("...f,fd->...d", jax.nn.silu(gate) * up, self.down[...])
