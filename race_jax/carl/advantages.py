"""Credit on a rollout tree: nodes are states, edges are actions, rewards stand at the leaves.

Values go up the tree and advantages down it, each in one pass over the nodes in the order of their
indices, parents before children. The work is linear in nodes whatever the tree's shape, and a
program serves every tree of its padded size.
"""

from __future__ import annotations

import enum
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from race_jax.masked import safe_divide

Baseline = Literal["mean", "leave_one_out"]

_EQUAL = 1e-6
"""Values that differ by no more than this, relative to their size, are equal up to rounding."""


class Credit(enum.StrEnum):
    """How an edge u -> v is credited. L(v): the leaves below v.

    `CARL`: V(v) - V(u), with V(u) the mean over u's children; states with one child train nothing.
    `TREERL`: (V(v) - V(root) + V(v) - V(u)) / sqrt(|L(v)|), with V the mean over leaves.
    `TREERPO`: V(v) against its siblings, over their standard deviation; V as in CARL.
    `ARPO`: the mean, over L(v), of each leaf's reward normalised among the tree's leaves.
    `OUTCOME`: ablation. The mean over L(v) of the leaf's reward less that of all leaves, on the
    edges that CARL trains.
    `INHERIT`: ablation. CARL's, and an action from a state with one child has the advantage of the
    action before it; all edges train.
    """

    CARL = "carl"
    TREERL = "treerl"
    TREERPO = "treerpo"
    ARPO = "arpo"
    OUTCOME = "outcome"
    INHERIT = "inherit"


class EdgeCredit(NamedTuple):
    """What a tree's edges are worth. An edge stands at the index of its child node.

    Attributes:
        values: float32 [n], V of each node; 0 at padding.
        advantages: float32 [n], A of the edge into each node; 0 at the root and at padding.
        trainable: bool [n], whether that edge's action is in the update set.
    """

    values: jax.Array
    advantages: jax.Array
    trainable: jax.Array


class _Up(NamedTuple):
    """What reaches a node from below, float32 [n] each."""

    value: jax.Array
    leaf_mean: jax.Array
    leaves: jax.Array
    children: jax.Array


def edge_advantages(
    parent: jax.Array,
    rewards: jax.Array,
    is_leaf: jax.Array,
    valid: jax.Array,
    *,
    credit: Credit = Credit.CARL,
    baseline: Baseline = "mean",
) -> EdgeCredit:
    """Values, edge advantages and the update set of a rollout tree.

        V(leaf) = R(leaf);  V(u) = mean over children of V(child);  A(u -> v) = V(v) - V(u)

    Jitted; use `jax.vmap` for trees padded to one size. Called with concrete arrays it checks them;
    inside a trace it cannot, and a node without any leaf below counts for nothing.

    Args:
        parent: int32 [n], the index of each node's parent, -1 at the root; every parent stands
            before its children.
        rewards: float32 [n], read at leaves only; other entries may be anything.
        is_leaf: bool [n], the episode ended there.
        valid: bool [n], false at padding and at subtrees that were given up.
        credit: The rule.
        baseline: `mean`: V(u) over all children, the edge's own among them; in expectation this
            shrinks A by (1 - 1/k) with k children. `leave_one_out`: the mean over the other
            children, exactly unbiased. For `CARL` and `INHERIT`.

    Returns:
        values [n], advantages [n] (root 0), trainable [n] (for CARL: the source state has more than
        one child). No normalisation by a deviation, except where the rule has one of its own.

    Raises:
        ValueError: The arrays are no tree with rewards at its leaves (concrete arrays only), or a
            setting is unknown.

    Reference: CARL eqs. 9 to 13, Algorithm 2; section 6 for the other rules. `leave_one_out` and,
    in `OUTCOME`, the baseline and the mean in place of one copy per leaf are ours.
    """
    credit = Credit(credit)
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline is {baseline!r}; it must be 'mean' or 'leave_one_out'")
    if baseline != "mean" and credit not in (Credit.CARL, Credit.INHERIT):
        raise ValueError(f"credit {credit.value!r} has a baseline of its own; use baseline='mean'")
    arrays = (parent, rewards, is_leaf, valid)
    shapes = [np.shape(x) for x in arrays]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"parent, rewards, is_leaf and valid must all be [n]; they are {shapes}")
    if not any(isinstance(x, Tracer) for x in arrays):
        check_tree(*(np.asarray(x) for x in arrays))
    return _edge_advantages(*map(jnp.asarray, arrays), credit=credit, baseline=baseline)


def check_tree(
    parent: np.ndarray, rewards: np.ndarray, is_leaf: np.ndarray, valid: np.ndarray
) -> None:
    """Raise ValueError unless the valid nodes are one tree with a finite reward at every leaf.

    Args:
        parent: int [n], -1 at the root.
        rewards: float [n].
        is_leaf: bool [n].
        valid: bool [n].
    """
    valid, is_leaf = valid.astype(bool), is_leaf.astype(bool)
    nodes = np.flatnonzero(valid)
    if len(nodes) < 2:
        raise ValueError(
            f"the tree has {len(nodes)} valid nodes, so no action to credit; it needs a root and "
            "at least one child"
        )
    above = parent[nodes]

    def refuse(bad: np.ndarray, what: str) -> None:
        if bad.any():
            node = int(nodes[np.argmax(bad)])
            raise ValueError(f"node {node} (parent {int(parent[node])}): {what}")

    roots = nodes[above == -1]
    if len(roots) != 1:
        raise ValueError(
            f"the tree has {len(roots)} roots {roots[:5].tolist()}; exactly one valid node must "
            "have parent -1"
        )
    refuse(above < -1, "a parent is the index of a node, or -1 at the root")
    refuse(above >= nodes, "a parent must stand before its child; renumber the nodes from the root")
    refuse(
        (above >= 0) & ~valid[np.maximum(above, 0)],
        "its parent is not valid; mark the whole branch as not valid",
    )
    refuse((above >= 0) & is_leaf[np.maximum(above, 0)], "its parent is a leaf")
    has_child = np.zeros(len(valid), bool)
    has_child[above[above >= 0]] = True
    refuse(
        ~is_leaf[nodes] & ~has_child[nodes],
        "it has neither children nor an outcome; mark it as a leaf with a reward, or as not valid",
    )
    refuse(
        is_leaf[nodes] & ~np.isfinite(rewards[nodes]),
        "a leaf without a finite reward; give it one, or mark its branch as not valid",
    )


@functools.partial(jax.jit, static_argnames=("credit", "baseline"))
def _edge_advantages(
    parent: jax.Array,
    rewards: jax.Array,
    is_leaf: jax.Array,
    valid: jax.Array,
    *,
    credit: Credit,
    baseline: Baseline,
) -> EdgeCredit:
    """`edge_advantages` on arrays that are taken to be a tree."""
    up = _climb(parent, rewards, is_leaf, valid)
    edge = valid & (parent >= 0) & (up.leaves > 0)
    above = jnp.maximum(parent, 0)
    forked = edge & (up.children[above] > 1)
    gain = up.value - up.value[above]
    values, trainable = up.value, edge
    if credit in (Credit.CARL, Credit.INHERIT):
        children = up.children[above]
        scale = safe_divide(children, children - 1) if baseline == "leave_one_out" else 1.0
        advantages = jnp.where(forked, gain * scale, 0)
        trainable = forked
        if credit is Credit.INHERIT:
            advantages, trainable = _descend(above, advantages, forked), edge
    elif credit is Credit.TREERPO:
        advantages, trainable = _among_siblings(up, above, forked), forked
    elif credit is Credit.TREERL:
        values = up.leaf_mean
        root = jnp.sum(jnp.where(valid & (parent < 0), values, 0))
        advantages = safe_divide(2 * values - root - values[above], jnp.sqrt(up.leaves))
    else:
        leaf = valid & is_leaf
        mean = jnp.sum(jnp.where(valid & (parent < 0), up.leaf_mean, 0))
        advantages = up.leaf_mean - mean
        if credit is Credit.OUTCOME:
            trainable = forked
        else:
            values = up.leaf_mean
            outcomes = jnp.where(leaf, rewards, 0)
            squares = jnp.where(leaf, (outcomes - mean) ** 2, 0)
            deviation = jnp.sqrt(safe_divide(jnp.sum(squares), jnp.sum(leaf)))
            level = deviation <= _EQUAL * jnp.max(jnp.abs(outcomes), initial=0)
            advantages = safe_divide(advantages, jnp.where(level, 0, deviation))
    return EdgeCredit(values, jnp.where(trainable, advantages, 0), trainable)


def _climb(parent: jax.Array, rewards: jax.Array, is_leaf: jax.Array, valid: jax.Array) -> _Up:
    """From the last node to the first: when a node's turn comes, all its children have reported.

    The loop carries one array and returns nothing else, so that XLA updates it in place; an output
    per step would have it copied at every step, which is quadratic in nodes.
    """
    size = len(parent)
    leaf = valid & is_leaf
    outcome = jnp.where(leaf, rewards, 0).astype(jnp.float32)
    one = leaf.astype(jnp.float32)
    # Total of the children's values, children, total of the leaves below, leaves. A leaf begins as
    # if it were its own only child.
    sums = jnp.stack([outcome, one, outcome, one], axis=1)
    # What padding and the root report goes to a row that nobody reads.
    sums = jnp.pad(sums, ((0, 1), (0, 0)))
    to = jnp.where(valid & (parent >= 0), parent, size)

    def report(step: jax.Array, sums: jax.Array) -> jax.Array:
        node = size - 1 - step
        total, children, leaf_total, leaves = sums[node]
        told = jnp.stack([safe_divide(total, children), jnp.float32(1), leaf_total, leaves])
        return sums.at[to[node]].add(jnp.where(leaves > 0, told, 0))

    sums = jax.lax.fori_loop(0, size, report, sums)
    total, children, leaf_total, leaves = jnp.where(valid, sums[:size].T, 0)
    return _Up(safe_divide(total, children), safe_divide(leaf_total, leaves), leaves, children)


def _descend(above: jax.Array, advantages: jax.Array, own: jax.Array) -> jax.Array:
    """From the first node to the last: each edge without credit of its own takes the one before."""

    def take(node: jax.Array, known: jax.Array) -> jax.Array:
        inherited = jnp.where(own[node], advantages[node], known[above[node]])
        return known.at[node].set(inherited)

    return jax.lax.fori_loop(0, len(advantages), take, jnp.zeros_like(advantages))


def _among_siblings(up: _Up, above: jax.Array, forked: jax.Array) -> jax.Array:
    """(V(v) - mean of siblings) / their standard deviation; 0 where they are equal."""
    size = len(above)
    value = jnp.where(forked, up.value, 0)
    gain = value - up.value[above]
    squares = jax.ops.segment_sum(jnp.where(forked, gain**2, 0), above, size)
    deviation = jnp.sqrt(safe_divide(squares, up.children))
    scale = jax.ops.segment_max(jnp.abs(value), above, size)
    level = deviation <= _EQUAL * jnp.maximum(scale, 0)
    return safe_divide(gain, jnp.where(level, 0, deviation)[above])
