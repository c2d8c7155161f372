"""Losses: pure functions of arrays, each with its mask, as sums and weights.

A loss here is what an optimizer makes small. All but `clipped_surrogate`, which gives one value
per token, return `(sum, weight)`: add both over micro-batches and devices, divide once. A mean of
means would count a token of a short part more than one of a long part.

Values under a false mask may be anything, -inf and NaN too: they reach neither sum nor gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from race_jax.masked import masked_sum

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is cut here, in nats: e^20 in float32 is finite, and so is its gradient."""

Weighted = tuple[jax.Array, jax.Array]
"""A sum and the weight to divide it by, both float32 scalars."""


def sft(logprobs: jax.Array, loss_mask: jax.Array) -> Weighted:
    """Negative log-likelihood: -sum_{k in mask} log pi(k).

    Args:
        logprobs: float32 [B, T] in nats, aligned to targets.
        loss_mask: bool [B, T], true on tokens that the policy sampled.

    Returns:
        The sum, and the number of tokens in the mask.

    Reference: RACE eq. 12.
    """
    _same_shape(logprobs=logprobs, loss_mask=loss_mask)
    return -masked_sum(logprobs, loss_mask), _count(loss_mask)


def clipped_surrogate(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """PPO's clipped surrogate as a loss per token: -min(r A, clip(r, 1 - low, 1 + high) A).

    r = exp(logprobs - old_logprobs). The value is to be made small; where r = 1 it is -A, and its
    derivative by `logprobs` is -A.

    Args:
        logprobs: float32 [B, T] in nats, of the policy that is trained.
        old_logprobs: float32 [B, T] in nats, of the policy that sampled; no gradient flows to it.
        advantages: float32 [B, T], no gradient flows to them.
        clip_low: How far r may fall below 1, in [0, 1].
        clip_high: How far r may rise above 1, at least 0.

    Returns:
        float32 [B, T]. Where both log-probabilities are -inf, r counts as 1. r is kept within
        e^-20 to e^20, so that no ratio and no gradient is infinite.

    Raises:
        ValueError: Shapes differ, or a clip is out of range.

    Reference: the min of RACE eq. 13, with a clip for each side.
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    _check_clip("clip_low", clip_low, 1.0)
    _check_clip("clip_high", clip_high, float("inf"))
    old_logprobs = jax.lax.stop_gradient(old_logprobs)
    advantages = jax.lax.stop_gradient(advantages)
    # -inf minus -inf is NaN, forwards and backwards: both sides are replaced before they meet.
    never = jnp.isneginf(logprobs) & jnp.isneginf(old_logprobs)
    gap = jnp.where(never, 0, logprobs) - jnp.where(never, 0, old_logprobs)
    ratio = jnp.exp(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def masked_grpo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    completion_mask: jax.Array,
    keep_mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> Weighted:
    """GRPO's loss over the kept tokens, normalised by all policy tokens.

        L_GRPO = - 1/(sum_i |P_i|) * sum_i sum_{k in K_i} min(r A_i, clip(r, 1 - c, 1 + c) A_i)

    What leaves K (the reasoning of redundant turns) leaves the sum and not the weight.

    Args:
        logprobs: float32 [B, T] in nats, of the policy that is trained.
        old_logprobs: float32 [B, T] in nats, of the policy that sampled.
        advantages: float32 [B, T], not multiplied by a mask.
        completion_mask: bool [B, T], P: all tokens that the policy sampled.
        keep_mask: bool [B, T], K. Only its part inside `completion_mask` counts.
        clip_low: How far r may fall below 1, in [0, 1].
        clip_high: How far r may rise above 1, at least 0.

    Returns:
        The sum over K, and the number of tokens in P.

    Raises:
        ValueError: Shapes differ, or a clip is out of range.

    Reference: RACE eq. 13. No KL term.
    """
    _same_shape(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        completion_mask=completion_mask,
        keep_mask=keep_mask,
    )
    completion_mask = jnp.asarray(completion_mask, bool)
    kept = jnp.asarray(keep_mask, bool) & completion_mask
    # Masked before the ratio is taken: 0 times the derivative of a NaN is NaN.
    inputs = (jnp.where(kept, x, 0) for x in (logprobs, old_logprobs, advantages))
    losses = clipped_surrogate(*inputs, clip_low=clip_low, clip_high=clip_high)
    return masked_sum(losses, kept), _count(completion_mask)


def reasoning_closure(
    close_logprobs: jax.Array, skip_mask: jax.Array, *, num_turns: jax.Array | int
) -> Weighted:
    """Negative log-likelihood of closing the block at once, at the turns that need no reasoning.

        L_close = - 1/(sum_i T_i) * sum_{i successful} sum_{t in S_i} log pi(e | x_i^(t))

    Args:
        close_logprobs: float32, any shape, in nats: log-probability of the reasoning-termination
            token e at each turn's first place, in the compressed context.
        skip_mask: bool, the same shape: the turn is in S_i, so its trajectory succeeded.
        num_turns: Number of all turns of the batch, failed trajectories' included; at least 0.

    Returns:
        The sum over S, and `num_turns`.

    Raises:
        ValueError: Shapes differ, or `num_turns` is negative.

    Reference: RACE eq. 14.
    """
    _same_shape(close_logprobs=close_logprobs, skip_mask=skip_mask)
    if isinstance(num_turns, int) and num_turns < 0:
        raise ValueError(f"num_turns is {num_turns}; it counts turns, so it is at least 0")
    return -masked_sum(close_logprobs, skip_mask), jnp.asarray(num_turns, jnp.float32)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.asarray(mask, bool), dtype=jnp.float32)


def _same_shape(**arrays: jax.Array) -> None:
    """Refuse shapes that would broadcast: [B] against [B, B] would give a wrong sum silently."""
    shapes = {name: jnp.shape(x) for name, x in arrays.items()}
    if len(set(shapes.values())) > 1:
        told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these must have one shape, one value per token: {told}")


def _check_clip(name: str, value: float, most: float) -> None:
    if isinstance(value, int | float) and not 0 <= value <= most:
        rule = "at least 0" if most == float("inf") else "from 0 to 1"
        raise ValueError(f"{name} is {value}; it must be {rule} (the paper uses 0.2)")
