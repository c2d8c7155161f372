"""How much hangs on a state: the spread of what comes of the actions that are sampled there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from race_jax.carl.advantages import EdgeCredit
from race_jax.carl.tree import Tree
from race_jax.rollout.results import Rollout


class Judgement(NamedTuple):
    """A state with several actions.

    Attributes:
        task: Of the tree.
        turn: Turns before it.
        tool: What most of its actions called; empty for none.
        entropy: H(s), mean -log-probability per token of its actions, nats.
        criticality: Standard deviation of the outcomes of its actions.
        actions: How many.
    """

    task: str
    turn: int
    tool: str
    entropy: float
    criticality: float
    actions: int


def tool_of(rollout: Rollout, turn: int) -> str:
    """The tool that a turn called first; empty if it called none."""
    own = [m for m in rollout.messages if m["role"] == "assistant"]
    calls = own[turn].get("tool_calls") or () if turn < len(own) else ()
    return str(calls[0]["function"]["name"]) if calls else ""


def forked_states(tree: Tree, credit: EdgeCredit) -> list[Judgement]:
    """All states of a tree with more than one action, judged by the values of their children.

    Args:
        tree: The tree.
        credit: Its values.

    Reference: CARL eq. 5, with the tree's own branches in place of greedy continuations.
    """
    children: dict[int, list[int]] = {}
    for n, node in enumerate(tree.nodes):
        if node.parent >= 0:
            children.setdefault(node.parent, []).append(n)
    found = []
    for state, below in children.items():
        if len(below) < 2:
            continue
        node = tree.nodes[state]
        tools = [tool_of(tree.rollouts[tree.nodes[n].sample], node.turn) for n in below]
        values = np.asarray(credit.values, np.float64)[below]
        found.append(
            Judgement(
                task=tree.task,
                turn=node.turn,
                tool=max(sorted(set(tools)), key=tools.count),
                entropy=node.entropy,
                criticality=float(np.std(values)),
                actions=len(below),
            )
        )
    return found


def by_key(
    states: Iterable[Judgement], key: Callable[[Judgement], Hashable]
) -> dict[str, dict[str, float]]:
    """Means over states that share a key: how many there are, criticality and entropy.

    Args:
        states: Any.
        key: What they are put together by.

    Returns:
        By key in rising order, as text: `states`, `criticality`, `entropy`.
    """
    groups: dict[Hashable, list[Judgement]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)

    def means(group: Sequence[Judgement]) -> dict[str, float]:
        return {
            "states": len(group),
            "criticality": float(np.mean([s.criticality for s in group])),
            "entropy": float(np.mean([s.entropy for s in group])),
        }

    return {str(k): means(groups[k]) for k in sorted(groups, key=lambda k: (str(type(k)), k))}
