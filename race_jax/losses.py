"""Losses: pure functions of arrays, each with its mask, as sums and weights.

A loss here is what an optimizer makes small. `clipped_surrogate` gives a loss per token,
`truncated_importance` weights; all others return `(sum, weight)`: add both over micro-batches and
devices, divide once. A mean of means would count a token of a short part more than one of a long.

Values under a false mask may be anything, -inf and NaN too: they reach neither sum nor gradient.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from race_jax.masked import masked_sum, safe_divide

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is cut here, in nats: e^20 in float32 is finite, and so is its gradient."""

Reduction = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]

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
    ratio = _ratio(logprobs, old_logprobs)
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


def reduce_tokens(
    losses: jax.Array,
    completion_mask: jax.Array,
    keep_mask: jax.Array,
    segment_ids: jax.Array,
    *,
    reduction: Reduction,
    norm_length: int | None = None,
) -> Weighted:
    """Losses per token to a sum and its weight, by one of the usual rules.

    With n policy tokens in a sequence and N sequences in the batch, a token's share of the loss is

    - `token-mean`: 1 / (all policy tokens), as RACE eq. 13;
    - `seq-mean-token-mean`: 1 / (n N);
    - `seq-mean-token-sum`: 1 / N;
    - `seq-mean-token-sum-norm`: 1 / (`norm_length` N).

    What is masked leaves the sum and none of n, N or the number of tokens.

    Args:
        losses: float32 [B, T].
        completion_mask: bool [B, T], all tokens that the policy sampled.
        keep_mask: bool [B, T], those that count; only its part inside `completion_mask` does.
        segment_ids: int32 [B, T], the sequences packed in a row, 0 at padding.
        reduction: The rule.
        norm_length: The divisor of `seq-mean-token-sum-norm`, such as the longest response allowed.

    Returns:
        The sum, and its weight: all policy tokens, or all sequences that have any.

    Raises:
        ValueError: Shapes differ, the rule is unknown, or `norm_length` does not go with it.
    """
    _same_shape(
        losses=losses,
        completion_mask=completion_mask,
        keep_mask=keep_mask,
        segment_ids=segment_ids,
    )
    rules = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    if reduction not in rules:
        raise ValueError(f"loss reduction {reduction!r} is none of {', '.join(rules)}")
    if (norm_length is not None) != (reduction == rules[3]) or (norm_length or 1) < 1:
        raise ValueError(
            f"norm_length is {norm_length} with {reduction}; it is a number of tokens, given with "
            "seq-mean-token-sum-norm and no other"
        )
    completion_mask = jnp.asarray(completion_mask, bool)
    kept = jnp.asarray(keep_mask, bool) & completion_mask
    if reduction == "token-mean":
        return masked_sum(losses, kept), _count(completion_mask)
    rows, length = losses.shape
    # No row has more sequences than places, so these numbers differ for different sequences.
    sequence = segment_ids + (length + 1) * jnp.arange(rows)[:, None]
    sizes = jnp.zeros(rows * (length + 1)).at[sequence].add(jnp.where(completion_mask, 1.0, 0.0))
    weight = jnp.sum(sizes > 0, dtype=jnp.float32)
    if reduction == "seq-mean-token-mean":
        losses = safe_divide(jnp.where(kept, losses, 0), sizes[sequence])
    return masked_sum(losses, kept) / (norm_length or 1), weight


def truncated_importance(
    logprobs: jax.Array, sampler_logprobs: jax.Array, *, limit: float
) -> jax.Array:
    """min(exp(logprobs - sampler_logprobs), limit): weights against a sampler that differs a bit.

    Args:
        logprobs: float32 [B, T] in nats, the trainer's log-probabilities of the sampling policy.
        sampler_logprobs: float32 [B, T] in nats, as the sampler reported them.
        limit: The largest weight, above 0; 2 is common.

    Returns:
        float32 [B, T], without gradient; 1 where both are -inf.

    Raises:
        ValueError: Shapes differ, or the limit is not above 0.
    """
    _same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    if isinstance(limit, int | float) and not limit > 0:
        raise ValueError(f"limit is {limit}; a weight's limit is above 0")
    return jax.lax.stop_gradient(jnp.minimum(_ratio(logprobs, sampler_logprobs), limit))


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


def _ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    # -inf minus -inf is NaN, forwards and backwards: both sides are replaced before they meet.
    never = jnp.isneginf(logprobs) & jnp.isneginf(old_logprobs)
    gap = jnp.where(never, 0, logprobs) - jnp.where(never, 0, old_logprobs)
    return jnp.exp(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


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
