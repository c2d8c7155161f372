"""Advantages within groups of trajectories that answer the same task."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from race_jax.masked import safe_divide


def group_relative(
    rewards: jax.Array,
    group_ids: jax.Array,
    *,
    num_groups: int,
    normalize_std: bool = True,
    ddof: int = 0,
) -> jax.Array:
    """A_i = (R_i - mean of its group) / standard deviation of its group.

    Exactly 0 in a group whose rewards are all equal, or that has one member: equality is tested on
    the rewards themselves, since the rounding of a mean can leave a spurious deviation, which
    division would turn into advantages of full size.

    Args:
        rewards: float32 [B], any scale.
        group_ids: int32 [B] in [0, num_groups); members need not be neighbours. Rows of other ids,
            padding for instance, get 0 and belong to no group.
        num_groups: Number of groups G; static.
        normalize_std: Divide by the standard deviation.
        ddof: 0 for the deviation of the group itself (the population's), 1 for the estimate from a
            sample, divided by n - 1.

    Returns:
        float32 [B]. No constant is added to the deviation. A reward that is not finite spoils its
        own group only.

    Raises:
        ValueError: Shapes differ, `num_groups` is below 1, or `ddof` is neither 0 nor 1.

    Reference: RACE section 3.3. The paper leaves the deviation open; the population's is ours.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof!r}; it must be 0 (population) or 1 (sample)")
    rewards, ids, known, count = _groups(rewards, group_ids, num_groups)
    low = jax.ops.segment_min(rewards, ids, num_groups + 1)
    spread = jax.ops.segment_max(rewards, ids, num_groups + 1) - low
    # In units of the group's spread nothing overflows or vanishes when squared.
    unit = safe_divide(rewards - low[ids], spread[ids])
    mean = safe_divide(jax.ops.segment_sum(unit, ids, num_groups + 1), count)
    centred = unit - mean[ids]
    if not normalize_std:
        return jnp.where(known, centred * spread[ids], 0)
    squares = jax.ops.segment_sum(centred**2, ids, num_groups + 1)
    deviation = jnp.sqrt(safe_divide(squares, count - ddof))
    return jnp.where(known, safe_divide(centred, deviation[ids]), 0)


def degenerate_groups(rewards: jax.Array, group_ids: jax.Array, *, num_groups: int) -> jax.Array:
    """Which groups teach nothing, since all their rewards are equal or they have one member.

    Their tokens have advantage 0 and still count in a loss's weight.

    Args:
        rewards: float32 [B], any scale.
        group_ids: int32 [B] in [0, num_groups); rows of other ids do not count.
        num_groups: Number of groups; static.

    Returns:
        bool [num_groups]; false for a group without members.

    Raises:
        ValueError: Shapes differ, or `num_groups` is below 1.
    """
    rewards, ids, _, count = _groups(rewards, group_ids, num_groups)
    low = jax.ops.segment_min(rewards, ids, num_groups + 1)
    high = jax.ops.segment_max(rewards, ids, num_groups + 1)
    return ((low == high) & (count > 0))[:num_groups]


def leave_one_out(rewards: jax.Array, group_ids: jax.Array, *, num_groups: int) -> jax.Array:
    """A_i = R_i - mean of the *other* rewards of its group; 0 for a group of one.

    The baseline does not depend on R_i, so the estimate has no shrinkage.

    Args:
        rewards: float32 [B], any scale.
        group_ids: int32 [B] in [0, num_groups); rows of other ids get 0.
        num_groups: Number of groups; static.

    Returns:
        float32 [B].

    Raises:
        ValueError: Shapes differ, or `num_groups` is below 1.
    """
    centred = group_relative(rewards, group_ids, num_groups=num_groups, normalize_std=False)
    _, ids, _, count = _groups(rewards, group_ids, num_groups)
    return centred * safe_divide(count, count - 1)[ids]


def _groups(
    rewards: jax.Array, group_ids: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rewards, ids with strays moved to a spare group, which rows are known, and group sizes."""
    rewards = jnp.asarray(rewards, jnp.float32)
    group_ids = jnp.asarray(group_ids)
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards {rewards.shape} and group_ids {group_ids.shape} must both be [B], one entry "
            "per trajectory"
        )
    if num_groups < 1:
        raise ValueError(f"num_groups is {num_groups}; it must be at least 1")
    known = (group_ids >= 0) & (group_ids < num_groups)
    ids = jnp.where(known, group_ids, num_groups)
    count = jax.ops.segment_sum(jnp.ones_like(rewards), ids, num_groups + 1)
    return rewards, ids, known, count
