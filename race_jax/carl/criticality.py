"""How much hangs on a state: the spread of what comes of the actions that are sampled there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from race_jax import jsonl
from race_jax.carl.advantages import EdgeCredit
from race_jax.carl.tree import Tree, fork_at
from race_jax.rollout.jobs import Job
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
        outcomes: Of each of them.
    """

    task: str
    turn: int
    tool: str
    entropy: float
    criticality: float
    actions: int
    outcomes: tuple[float, ...] = ()


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
    found = []
    for state, below in enumerate(tree.children):
        if len(below) < 2:
            continue
        node = tree.nodes[state]
        tools = [tool_of(tree.rollouts[tree.nodes[n].sample], node.turn) for n in below]
        values = np.asarray(credit.values, np.float64)[below]
        found.append(_judge(tree.task, node.turn, tools, node.entropy, values.tolist()))
    return found


def _judge(
    task: str, turn: int, tools: Sequence[str], entropy: float, outcomes: Sequence[float]
) -> Judgement:
    return Judgement(
        task=task,
        turn=turn,
        tool=max(sorted(set(tools)), key=tools.count),
        entropy=entropy,
        criticality=float(np.std(outcomes)),
        actions=len(outcomes),
        outcomes=tuple(outcomes),
    )


def resampling_jobs(origin: Rollout, actions: int, turns: Iterable[int]) -> list[Job]:
    """Episodes that each sample another action in a state of a rollout and go on greedily.

    Args:
        origin: Sample 0 of its task, neither spoilt nor without a turn.
        actions: K, how many in each state.
        turns: Which states, by the turns before them.

    Returns:
        Jobs with the samples 1 + turn K to (turn + 1) K.

    Raises:
        ValueError: It has no such turn, or its first ids were not sampled.

    Reference: CARL eq. 5.
    """
    return [
        Job(
            origin.env,
            origin.task,
            1 + turn * actions + n,
            fork_at(origin, turn) if turn else None,
            turn + 1,
        )
        for turn in turns
        for n in range(actions)
    ]


def resampled_states(rollouts: Iterable[Rollout], actions: int) -> list[Judgement]:
    """States judged by the episodes of `resampling_jobs`.

    Args:
        rollouts: Of any tasks; sample 0, spoilt ones, and states with one outcome are left out.
        actions: K.

    Returns:
        By task and turn.

    Reference: CARL eqs. 5 and 8.
    """
    groups: dict[tuple[str, int], list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda r: r.sample):
        if rollout.sample and not rollout.faulty and rollout.notes:
            turn = (rollout.sample - 1) // actions
            groups.setdefault((rollout.task, turn), []).append(rollout)
    found = []
    for (task, turn), group in sorted(groups.items()):
        if len(group) < 2:
            continue
        tools = [tool_of(rollout, turn) for rollout in group]
        nats = [-float(np.mean(rollout.notes[turn].logprobs)) for rollout in group]
        outcomes = [rollout.reward for rollout in group]
        found.append(_judge(task, turn, tools, float(np.mean(nats)), outcomes))
    return found


class Comparison(NamedTuple):
    """Criticality of states with much action entropy against that of states with little.

    Attributes:
        median: Of the entropies, nats; states above it have much.
        low: Criticality of the states with little, in their order.
        high: Of those with much.
        delta: Cliff's delta, the chance that one of `high` is above one of `low` less the chance
            that it is below, in [-1, 1]; None where one side is empty.
        statistic: Of the Brunner-Munzel test; None where it is not defined: fewer than two states
            on a side, or no spread.
        p: Its two-sided p-value, or None. States of one task are not independent, which it takes
            them to be.
    """

    median: float
    low: tuple[float, ...]
    high: tuple[float, ...]
    delta: float | None
    statistic: float | None
    p: float | None


def compare_by_entropy(states: Sequence[Judgement]) -> Comparison:
    """Whether states with more entropy are more critical.

    Raises:
        ValueError: There are no states.
    """
    if not states:
        raise ValueError("there is no state with two outcomes, so there is nothing to compare")
    median = float(np.median([s.entropy for s in states]))
    low = tuple(s.criticality for s in states if s.entropy <= median)
    high = tuple(s.criticality for s in states if s.entropy > median)
    if not high:
        return Comparison(median, low, high, None, None, None)
    delta = float(np.sign(np.subtract.outer(high, low)).mean())
    statistic = p = None
    if min(len(low), len(high)) > 1:
        from scipy.stats import brunnermunzel

        # Where the ranks of a side do not differ, it divides by zero and warns.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            told = brunnermunzel(high, low)
        if math.isfinite(told.statistic) and math.isfinite(told.pvalue):
            statistic, p = float(told.statistic), float(told.pvalue)
    return Comparison(median, low, high, delta, statistic, p)


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


def plot_criticality(states: Sequence[Judgement], path: str | Path) -> None:
    """Draw how criticality is spread, and how it goes with entropy, tool and turn.

    Args:
        states: At least one.
        path: The PNG to write.

    Raises:
        ValueError: There are no states.
        OSError: The file cannot be written.

    Reference: CARL figures 2 and 5.
    """
    # A figure of its own, not pyplot's: no global state, no display.
    from matplotlib.figure import Figure

    told = compare_by_entropy(states)
    figure = Figure(figsize=(9.6, 6.4), dpi=130, layout="constrained")
    (spread, sides), (tools, turns) = figure.subplots(2, 2)
    most = max(s.criticality for s in states) or 1.0
    share = np.full(len(states), 100 / len(states))
    spread.hist(
        [s.criticality for s in states],
        bins=np.linspace(0, most, 13).tolist(),
        weights=share.tolist(),
        color="#1b5e93",
    )
    spread.set(xlabel="criticality", ylabel="states, %")
    boxes = [("little", told.low), ("much", told.high)]
    boxes = [(name, values) for name, values in boxes if values]
    sides.boxplot([values for _, values in boxes], showmeans=True)
    names = [f"{name} entropy\n{len(values)} states" for name, values in boxes]
    sides.set_xticks(range(1, len(boxes) + 1), names)
    sides.set(ylabel="criticality (triangle: mean)", title=comparison_line(told))
    sides.title.set_fontsize(9)
    for axes, name, table in (
        (tools, "tool", by_key(states, lambda s: s.tool or "no call")),
        (turns, "turn", by_key(states, lambda s: s.turn + 1)),
    ):
        _bars(axes, name, table)
    for axes in (spread, sides, tools, turns):
        axes.spines[["top", "right"]].set_visible(False)
    with jsonl.replacing(Path(path)) as image:
        figure.savefig(image, format="png")


def _bars(axes: Any, name: str, table: Mapping[str, Mapping[str, float]]) -> None:
    """Mean criticality as bars, and mean entropy as points on an axis of its own."""
    at = np.arange(len(table))
    axes.bar(at, [row["criticality"] for row in table.values()], 0.6, color="#1b5e93")
    axes.set_xticks(at, list(table), parse_math=False)  # a tool's name may hold dollars
    axes.tick_params(axis="x", labelrotation=0 if name == "turn" else 20)
    axes.set(xlabel=name)
    axes.set_ylabel("mean criticality (bars)", color="#1b5e93")
    other = axes.twinx()
    points = [row["entropy"] for row in table.values()]
    other.plot(at, points, "D", color="#8f4a00", ms=6, mec="white")  # dark bars lie behind
    other.set_ylabel("mean entropy, nats (points)", color="#8f4a00")
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)


def comparison_line(told: Comparison) -> str:
    """The comparison in a line."""
    if told.delta is None:
        return "all states have the same entropy"
    test = "Brunner-Munzel not defined" if told.p is None else f"Brunner-Munzel p {told.p:.3g}"
    return f"Cliff's delta {told.delta:+.2f}, {test}"
