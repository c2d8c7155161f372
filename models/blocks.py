"""Decoder blocks, and all parameters of a decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models.config import ModelConfig
from race_jax.models.layers import Attention, Maker, Mlp, rms_norm
from race_jax.models.moe import Experts, RouterStats, count_routes


class Block(nnx.Module):
    """One pre-norm decoder block. The residual stream is float32 whatever the parameters are."""

    def __init__(self, config: ModelConfig, make: Maker):
        self.eps = config.rms_norm_eps
        self.attention_norm = make.ones((config.hidden_size,), ("embed",))
        self.attention = Attention(config, make)
        self.mlp_norm = make.ones((config.hidden_size,), ("embed",))
        self.mlp = (Experts if config.num_experts else Mlp)(config, make)

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of the residual stream `x` float32 [..., D]."""
        return self.attention.project(rms_norm(x, self.attention_norm[...], self.eps), cos, sin)

    def finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """The residual stream after the block, given what attention mixed, [..., N, H]."""
        x = x + self.attention.output(mixed)
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))

    def finish_routed(
        self, x: jax.Array, mixed: jax.Array, counted: jax.Array
    ) -> tuple[jax.Array, RouterStats]:
        """As `finish`, for a mixture of experts, with the routes of the tokens `counted` [...]."""
        assert isinstance(self.mlp, Experts)
        x = x + self.attention.output(mixed)
        out, probabilities, chosen = self.mlp.routed(rms_norm(x, self.mlp_norm[...], self.eps))
        return x + out, count_routes(probabilities, chosen, counted)


class Decoder(nnx.Module):
    """All parameters of a decoder: blocks stacked on a leading `layers` axis."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        v, d = config.vocab_size, config.hidden_size
        make = Maker(rngs, dtype, config.initializer_range)
        self.embed = make.normal((v, d), ("vocab", "embed"))
        self.layers = Block(config, dataclasses.replace(make, stack=(config.num_hidden_layers,)))
        self.norm = make.ones((d,), ("embed",))
        if not config.tie_word_embeddings:
            self.head = make.normal((v, d), ("vocab", "embed"))
