"""Mixtures of experts: a router, and experts that each work on the tokens that chose them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models.config import ModelConfig
from race_jax.models.layers import Maker, contract


class RouterStats(NamedTuple):
    """How tokens were spread over the experts, as sums: add them over batches, then divide once.

    Attributes:
        chosen: float32 [L, E], how many tokens passed each expert.
        probabilities: float32 [L, E], sum over tokens of the router's softmax.
        tokens: float32 [L], how many tokens were counted: those that are not padding.
    """

    chosen: jax.Array
    probabilities: jax.Array
    tokens: jax.Array


class LoadBalance(NamedTuple):
    """Means over tokens and layers, for metrics and the loss.

    Attributes:
        fraction: float32 [E], share of the tokens that passed each expert; sums to the number of
            experts per token. Nothing is dropped, whatever the spread.
        probability: float32 [E], mean of the router's softmax; sums to 1.
        loss: float32 [], `E * sum_e fraction_e * probability_e`: the number of experts per token
            when the spread is even, and more when it is not.
    """

    fraction: jax.Array
    probability: jax.Array
    loss: jax.Array


def load_balance(stats: RouterStats) -> LoadBalance:
    """The auxiliary load-balance loss and what it is made of, pooled over layers.

    loss = E * sum_e (tokens that chose e / tokens) * (mean router probability of e)

    The gradient flows through the probabilities alone; the choice of experts has none.

    Args:
        stats: From `Model.forward_routed`, or the sum of several.

    Returns:
        All zero when no token was counted.

    Reference: Switch Transformer, eq. 4-6, with a top-k choice as transformers has it.
    """
    total = jnp.sum(stats.tokens)
    divisor = jnp.maximum(total, 1.0)
    fraction = jax.lax.stop_gradient(jnp.sum(stats.chosen, axis=0)) / divisor
    probability = jnp.sum(stats.probabilities, axis=0) / divisor
    return LoadBalance(fraction, probability, fraction.shape[0] * jnp.sum(fraction * probability))


def count_routes(probabilities: jax.Array, chosen: jax.Array, counted: jax.Array) -> RouterStats:
    """The statistics of one block: sums over the tokens where `counted` bool [...] is true.

    Args:
        probabilities: The router's softmax, float32 [..., E].
        chosen: int32 [..., top], in [0, E).
        counted: bool [...]; false at padding.

    Returns:
        `chosen` and `probabilities` float32 [E], `tokens` float32 [].
    """
    experts = probabilities.shape[-1]
    counted = counted.reshape(-1)
    hits = jnp.repeat(counted.astype(jnp.float32), chosen.shape[-1])
    return RouterStats(
        jnp.zeros(experts, jnp.float32).at[chosen.reshape(-1)].add(hits),
        jnp.sum(jnp.where(counted[:, None], probabilities.reshape(-1, experts), 0), axis=0),
        jnp.sum(counted, dtype=jnp.float32),
    )


class Experts(nnx.Module):
    """A router and E gated MLPs: sum over a token's experts of weight * down(silu(gate) * up)."""

    def __init__(self, config: ModelConfig, make: Maker):
        d, e, f = config.hidden_size, config.num_experts, config.moe_intermediate_size
        self.router = make.normal((d, e), ("embed", "experts"))
        self.gate = make.normal((e, d, f), ("experts", "embed", "mlp"))
        self.up = make.normal((e, d, f), ("experts", "embed", "mlp"))
        self.down = make.normal((e, f, d), ("experts", "mlp", "embed"))
        self.top, self.normed = config.num_experts_per_tok, config.norm_topk_prob

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [..., D] from [..., D]."""
        return self.routed(x)[0]

    def routed(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Outputs float32 [..., D] of `x` [..., D], and how its tokens were routed.

        Returns:
            The outputs, the router's softmax float32 [..., E], and the experts that each token
            passed, int32 [..., top].
        """
        flat = x.reshape(-1, x.shape[-1])
        # Near ties between experts are common, and a rounded score would send the token elsewhere.
        scores = contract(
            "td,de->te", flat.astype(jnp.float32), self.router[...].astype(jnp.float32)
        )
        probabilities = jax.nn.softmax(scores, axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, self.top)
        if self.normed:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        mixed = self._mix(flat, weights, chosen)
        lead = x.shape[:-1]
        return mixed.reshape(x.shape), probabilities.reshape(*lead, -1), chosen.reshape(*lead, -1)

    def _mix(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """The weighted sum [M, D] over the experts `chosen` [M, top] of each row of `x` [M, D]."""
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.gate[...].shape[0])
        # A permutation of repeated rows, and its inverse, so that gradients are sums over `top`
        # in a fixed order and never scattered additions.
        rows = _permute(jnp.repeat(x, self.top, axis=0), order)
        gate = grouped_matmul(rows, self.gate[...], sizes)
        up = grouped_matmul(rows, self.up[...], sizes)
        out = grouped_matmul(jax.nn.silu(gate) * up, self.down[...], sizes)
        out = _permute(out, jnp.argsort(order)).reshape(*chosen.shape, -1)
        return jnp.sum(out * weights[..., None], axis=1)


def grouped_matmul(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group of rows times its own matrix, in the dtype of the weight, summed in float32.

    Args:
        x: [M, D], sorted by group.
        weight: [E, D, F].
        sizes: int32 [E], rows of each group; they sum to M.

    Returns:
        float32 [M, F].
    """
    return jax.lax.ragged_dot(
        x.astype(weight.dtype),
        weight,
        sizes,
        precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    """`rows[order]` for a permutation `order`."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
