"""The loss of cover-aware RL on packed rows, and what is told of it each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from race_jax import losses
from race_jax.losses import LOG_RATIO_LIMIT, Reduction, Weighted
from race_jax.masked import masked_sum

Places = Mapping[str, jax.Array]
"""Arrays [B, P] at the places that carry loss, named as `rl_data.make_batch` names them."""
Terms = Literal["both", "policy", "closure"]


def actor_loss(
    logprobs: jax.Array,
    batch: Places,
    *,
    clip_low: float,
    clip_high: float,
    reduction: Reduction = "token-mean",
    norm_length: int | None = None,
    terms: Terms = "both",
) -> Weighted:
    """L_actor = L_GRPO + lambda * L_close, as one sum and one weight.

    Lambda and the closure's own normaliser stand in `close_weight`.

    Args:
        logprobs: float32 [B, P] in nats.
        batch: `completion`, `keep`, `old_logprobs`, `advantages`, `close_weight`, `segment_ids`,
            and `importance`, a weight per token, if there is one.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        reduction: How tokens are averaged; `token-mean` is RACE's.
        norm_length: Of `seq-mean-token-sum-norm`.
        terms: Both, or one alone: `policy` or `closure`. The weight is the same.

    Reference: RACE eq. 15.
    """
    completion, keep = batch["completion"], batch["keep"]
    kept = keep & completion
    # Masked before the ratio is taken: 0 times the derivative of a NaN is NaN.
    inputs = (jnp.where(kept, x, 0) for x in (logprobs, batch["old_logprobs"], batch["advantages"]))
    per_token = losses.clipped_surrogate(*inputs, clip_low=clip_low, clip_high=clip_high)
    if "importance" in batch:
        per_token = per_token * batch["importance"]
    total, weight = losses.reduce_tokens(
        per_token,
        completion,
        keep,
        batch["segment_ids"],
        reduction=reduction,
        norm_length=norm_length,
    )
    closing = batch["close_weight"] > 0
    scaled = jnp.where(closing, logprobs, 0) * batch["close_weight"]
    closure, _ = losses.reasoning_closure(scaled, closing, num_turns=0)
    return {"both": total + closure, "policy": total, "closure": closure}[terms], weight


def actor_measures(
    logprobs: jax.Array, batch: Places, *, clip_low: float, clip_high: float
) -> dict[str, jax.Array]:
    """Sums over a batch's places, which add up over micro-batches.

    Args:
        logprobs: float32 [B, P] in nats.
        batch: As of `actor_loss`.
        clip_low: As there.
        clip_high: As there.

    Returns:
        Float32 scalars: `policy`, the policy tokens; sums over them of `ratio`, of `clipped` (1
        where clipping took the gradient), of `surprisal` (-log pi) and of `gap` (|log pi - log
        pi_old|); `kept`, those in K, over which `ratio` and `clipped` run; `close_nats`, the sum of
        -log pi(e), and `closings`, its terms.
    """
    completion, kept = batch["completion"], batch["keep"] & batch["completion"]
    old, advantages = batch["old_logprobs"], batch["advantages"]
    gap = jnp.where(completion, logprobs - old, 0)
    ratio = jnp.exp(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    high, low = ratio > 1 + clip_high, ratio < 1 - clip_low
    clipped = (high & (advantages > 0)) | (low & (advantages < 0))
    closing = batch["close_weight"] > 0

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, dtype=jnp.float32)

    return {
        "policy": count(completion),
        "kept": count(kept),
        "ratio": masked_sum(ratio, kept),
        "clipped": count(clipped & kept),
        "surprisal": masked_sum(-logprobs, completion),
        "gap": masked_sum(jnp.abs(gap), completion),
        "close_nats": masked_sum(-logprobs, closing),
        "closings": count(closing),
    }
