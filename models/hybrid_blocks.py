"""The parts of a hybrid of gated DeltaNet and gated attention, and all its parameters."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models.config import LAYER_TYPES, ModelConfig
from race_jax.models.deltanet import Delta, scale_queries, unit
from race_jax.models.layers import Maker, Mlp, contract, rms_norm
from race_jax.models.rope import rotate

Triple = tuple[jax.Array, jax.Array, jax.Array]
"""Something of the queries, of the keys and of the values."""


def centred_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` times 1 + `scale`."""
    return rms_norm(x, 1.0 + scale.astype(jnp.float32), eps)


class GatedAttention(nnx.Module):
    """The projections of attention whose output is gated by its input."""

    def __init__(self, config: ModelConfig, make: Maker):
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        # Query and gate of a head lie side by side.
        self.query = make.normal((d, n, 2 * h), ("embed", "heads", "head_dim"))
        self.key = make.normal((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.value = make.normal((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.out = make.normal((n, h, d), ("heads", "head_dim", "embed"))
        self.biased = config.attention_bias
        if self.biased:
            self.query_bias = make.zeros((n, 2 * h), ("heads", "head_dim"))
            self.key_bias = make.zeros((k, h), ("kv_heads", "head_dim"))
            self.value_bias = make.zeros((k, h), ("kv_heads", "head_dim"))
            self.out_bias = make.zeros((d,), ("embed",))
        self.query_norm = make.zeros((h,), ("head_dim",))
        self.key_norm = make.zeros((h,), ("head_dim",))

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Rotated queries [..., N, H], rotated keys and values [..., K, H], gates [..., N, H]."""
        dtype = self.query[...].dtype
        q = contract("...d,dnh->...nh", x, self.query[...])
        k = contract("...d,dnh->...nh", x, self.key[...])
        v = contract("...d,dnh->...nh", x, self.value[...])
        if self.biased:
            q, k, v = q + self.query_bias[...], k + self.key_bias[...], v + self.value_bias[...]
        q, gate = jnp.split(q, 2, axis=-1)
        q = rotate(centred_norm(q, self.query_norm[...], self.eps), cos, sin)
        k = rotate(centred_norm(k, self.key_norm[...], self.eps), cos, sin)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), gate

    def output(self, mixed: jax.Array, gate: jax.Array) -> jax.Array:
        """What attention adds to the residual stream: float32 [..., D] from [..., N, H]."""
        mixed = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate)
        out = contract("...nh,nhd->...d", mixed, self.out[...])
        return out + self.out_bias[...] if self.biased else out


class Projected(NamedTuple):
    """What gated DeltaNet makes of the residual stream, before its convolution.

    Attributes:
        inputs: Queries [..., K, dk], keys [..., K, dk] and values [..., V, dv], in the dtype of the
            parameters.
        gate: float32 [..., V, dv], what gates the output.
        decay: float32 [..., V], as in `Delta`.
        rate: float32 [..., V], as in `Delta`.
    """

    inputs: Triple
    gate: jax.Array
    decay: jax.Array
    rate: jax.Array


class DeltaNet(nnx.Module):
    """The projections of gated DeltaNet, and the kernels of its convolution."""

    def __init__(self, config: ModelConfig, make: Maker):
        d, w = config.hidden_size, config.linear_conv_kernel_dim
        k, v = config.linear_num_key_heads, config.linear_num_value_heads
        dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
        heads, taps = ("linear_heads", "head_dim"), ("linear_heads", "head_dim", "conv")
        self.eps = config.rms_norm_eps
        self.query = make.normal((d, k, dk), ("embed", *heads))
        self.key = make.normal((d, k, dk), ("embed", *heads))
        self.value = make.normal((d, v, dv), ("embed", *heads))
        self.query_conv = make.normal((k, dk, w), taps)
        self.key_conv = make.normal((k, dk, w), taps)
        self.value_conv = make.normal((v, dv, w), taps)
        self.gate = make.normal((d, v, dv), ("embed", *heads))
        self.rate = make.normal((d, v), ("embed", "linear_heads"))
        self.decay = make.normal((d, v), ("embed", "linear_heads"))
        self.decay_bias = make.ones((v,), ("linear_heads",))
        self.decay_log = make.log_uniform((v,), ("linear_heads",), 0.01, 16.0)
        self.norm = make.ones((dv,), ("head_dim",))
        self.out = make.normal((v, dv, d), (*heads, "embed"))

    @property
    def kernels(self) -> Triple:
        """The kernels of queries, keys and values, [heads, width, W]."""
        return self.query_conv[...], self.key_conv[...], self.value_conv[...]

    def project(self, x: jax.Array, real: jax.Array) -> Projected:
        """Project `x` float32 [..., D]; tokens that are not `real` [...] leave no trace."""
        matrices = self.query[...], self.key[...], self.value[...]
        q, k, v = (
            jnp.where(real[..., None, None], contract("...d,dnh->...nh", x, m), 0).astype(m.dtype)
            for m in matrices
        )
        gate = contract("...d,dnh->...nh", x, self.gate[...])
        rate = jax.nn.sigmoid(contract("...d,dn->...n", x, self.rate[...]))
        step = contract("...d,dn->...n", x, self.decay[...]) + self.decay_bias[...]
        speed = jnp.exp(self.decay_log[...].astype(jnp.float32))
        decay = -speed * jax.nn.softplus(step.astype(jnp.float32))
        real = real[..., None]
        return Projected((q, k, v), gate, jnp.where(real, decay, 0), jnp.where(real, rate, 0))

    def output(self, read: jax.Array, gate: jax.Array) -> jax.Array:
        """What gated DeltaNet adds to the residual stream: float32 [..., D] from [..., V, dv]."""
        normed = rms_norm(read, self.norm[...], self.eps) * jax.nn.silu(gate)
        return contract("...nh,nhd->...d", normed, self.out[...])


def make_delta(projected: Projected, convolved: Triple, fresh: jax.Array) -> Delta:
    """What the tokens ask of the states, given the outputs of the convolution."""
    q, k, v = convolved
    return Delta(scale_queries(q), unit(k), v, projected.decay, projected.rate, fresh)


class Layers(nnx.Module):
    """The parameters of all blocks. What blocks of one kind have is stacked over those blocks."""

    def __init__(self, config: ModelConfig, make: Maker):
        def stack(count: int) -> Maker:
            return dataclasses.replace(make, stack=(count,))

        total, d = config.num_hidden_layers, config.hidden_size
        linear, full = (len(config.layers_of(kind)) for kind in LAYER_TYPES)
        self.attention_norm = stack(total).zeros((d,), ("embed",))
        self.attention = GatedAttention(config, stack(full))
        self.deltanet = DeltaNet(config, stack(linear))
        self.mlp_norm = stack(total).zeros((d,), ("embed",))
        self.mlp = Mlp(config, stack(total))


class Hybrid(nnx.Module):
    """All parameters of a hybrid."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        v, d = config.vocab_size, config.hidden_size
        make = Maker(rngs, dtype, config.initializer_range)
        self.embed = make.normal((v, d), ("vocab", "embed"))
        self.layers = Layers(config, make)
        self.norm = make.zeros((d,), ("embed",))
        if not config.tie_word_embeddings:
            self.head = make.normal((v, d), ("vocab", "embed"))
