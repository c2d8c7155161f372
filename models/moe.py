"""Mixtures of experts: a router, and experts that each work on the tokens that chose them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models.config import ModelConfig
from race_jax.models.grouped import grouped_matmul
from race_jax.models.layers import Maker, contract
from race_jax.sharding import ambient_mesh, only, spec_for


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
    """A router and E gated MLPs: sum over a token's experts of weight * down(silu(gate) * up).

    No token is dropped, however many choose one expert. On a mesh whose rules put `experts` on
    `tensor`, each device works for its own experts; else what cuts the experts is gathered layer by
    layer, and `tensor` cuts their width.
    """

    def __init__(self, config: ModelConfig, make: Maker):
        d, e, f = config.hidden_size, config.num_experts, config.moe_intermediate_size
        self.router = make.normal((d, e), ("embed", "experts"))
        self.gate = make.normal((e, d, f), ("experts", "embed", "mlp"))
        self.up = make.normal((e, d, f), ("experts", "embed", "mlp"))
        self.down = make.normal((e, f, d), ("experts", "mlp", "embed"))
        self.top, self.normed = config.num_experts_per_tok, config.norm_topk_prob

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [B, T, D] from [B, T, D]."""
        return self.routed(x)[0]

    def routed(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Outputs float32 [B, T, D] of `x` [B, T, D], and how its tokens were routed.

        Returns:
            The outputs, the router's softmax float32 [B, T, E], and the experts that each token
            passed, int32 [B, T, top].
        """
        weights = (self.router[...], self.gate[...], self.up[...], self.down[...])
        mesh = ambient_mesh()
        if mesh is None:
            return self._local(x, *weights)
        cut = "time" if x.shape[1] % mesh.shape["context"] == 0 else None
        tokens = spec_for(("rows", cut, "features"), x.shape, name="tokens")
        columns = ("experts", None, "mlp"), ("experts", "mlp", None)
        places = [
            only(spec_for(axes, weight.shape, name="the experts"), "tensor")
            for axes, weight in zip(columns, (weights[1], weights[3]), strict=True)
        ]
        shared = places[0][0] is not None

        def local(*args: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            first = jax.lax.axis_index("tensor") * args[2].shape[0] if shared else 0
            mixed, probabilities, chosen = self._local(*args, first=first)
            return jax.lax.psum(mixed, "tensor"), probabilities, chosen

        return jax.shard_map(
            local,
            in_specs=(tokens, spec_for((None, None)), places[0], places[0], places[1]),
            out_specs=(tokens, tokens, tokens),
            check_vma=False,
        )(x, *weights)

    def _local(
        self,
        x: jax.Array,
        router: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        *,
        first: jax.Array | int = 0,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `routed`, with the share of the experts from `first` on that `gate` holds."""
        flat = x.reshape(-1, x.shape[-1])
        probabilities, weights, chosen = self._route(flat, router)
        own = chosen - first
        own = jnp.where((own >= 0) & (own < len(gate)), own, len(gate)).reshape(-1)
        order = jnp.argsort(own, stable=True)
        sizes = jnp.bincount(own, length=len(gate))
        # A permutation of repeated rows, and its inverse, so that gradients are sums over `top`
        # in a fixed order and never scattered additions.
        rows = _permute(jnp.repeat(flat.astype(gate.dtype), self.top, axis=0), order)
        hidden = jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes)
        out = grouped_matmul(hidden, down, sizes)
        out = _permute(out, jnp.argsort(order)).reshape(*chosen.shape, -1)
        mixed = jnp.sum(out * weights[..., None], axis=1)
        lead = x.shape[:-1]
        return mixed.reshape(x.shape), probabilities.reshape(*lead, -1), chosen.reshape(*lead, -1)

    def _route(self, x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Softmax [M, E], weights [M, top] and experts [M, top] of `x` [M, D], in float32.

        Near ties between experts are common, and a rounded score would send a token elsewhere.
        """
        probabilities = jax.nn.softmax(
            contract("md,de->me", x, router.astype(jnp.float32)), axis=-1
        )
        weights, chosen = jax.lax.top_k(probabilities, self.top)
        if self.normed:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return probabilities, weights, chosen


def _permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    """`rows[order]` for a permutation `order`."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
