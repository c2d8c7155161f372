"""Progressive rollout: where the next branch of a task's tree begins, and many trees at a time.

Within a tree, forks follow one another, since each depends on what the one before it found. The
trees of a step grow side by side, so that the sampler's slots stay full.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from race_jax.carl.tree import Tree
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import request_seed
from race_jax.rollout.loop import Runner, Stop
from race_jax.rollout.results import Rollout
from race_jax.settings import check_rules

Rule = Literal["density", "random", "arpo"]


@dataclasses.dataclass(frozen=True)
class ForkConfig:
    """How a tree grows.

    Attributes:
        first: N0, episodes from the root before any fork, at least 1: 1 is CARL-Lite, 8 CARL.
        forks: N, further episodes, each from a state of the tree, at least 0.
        rule: Where they begin. `density`: in the state with the lowest action density n(s) / H(s).
            `random`: in any state, all alike. `arpo`: in the first state not tried yet that is
            drawn with probability alpha + beta * (H(s) - H(root)), or else at the root.
        alpha: Of `arpo`, in [0, 1].
        beta: Of `arpo`, per nat, at least 0.

    Reference: CARL Algorithm 1 and its ablations; `arpo` as CARL describes that baseline, with the
    draw against a uniform number.
    """

    first: int = 1
    forks: int = 16
    rule: Rule = "density"
    alpha: float = 0.5
    beta: float = 0.2

    def __post_init__(self):
        rules = {
            "first": (self.first >= 1, "at least 1, since a fork needs an episode to leave"),
            "forks": (self.forks >= 0, "at least 0"),
            "rule": (self.rule in get_args(Rule), f"one of {', '.join(get_args(Rule))}"),
            "alpha": (0 <= self.alpha <= 1, "a probability, 0 to 1"),
            "beta": (math.isfinite(self.beta) and self.beta >= 0, "finite and at least 0"),
        }
        check_rules("tree", self, rules)
        if self.first + self.forks < 2:
            raise ValueError(
                f"tree.first is {self.first} and tree.forks is {self.forks}; a tree needs at least "
                "2 episodes, since an advantage compares them."
            )

    @property
    def leaves(self) -> int:
        """N0 + N, episodes of a tree."""
        return self.first + self.forks


def pick_state(tree: Tree, config: ForkConfig, seed: int, sample: int) -> int | None:
    """The state in which the next episode begins.

    It depends on the tree, the settings, the seed and the sample only, so a tree that was cut short
    goes on as it would have. Of states that are equal, the one with fewer actions is taken, then
    the one that came first; where no entropy is above 0, that is all that decides.

    Args:
        tree: With at least one rollout.
        config: The rule.
        seed: Of the rules that draw.
        sample: The new episode's number.

    Returns:
        The node's index; None if no state is left.
    """
    states = tree.states
    if not states:
        return None
    if config.rule == "random":
        rng = np.random.default_rng(request_seed(seed, f"{tree.env}/{tree.task}", sample, 0))
        return states[int(rng.integers(len(states)))]
    if config.rule == "arpo":
        return _drawn_state(tree, config, seed, states)

    def order(node: int) -> tuple[float, int, int]:
        state = tree.nodes[node]
        return -state.entropy / state.actions, state.actions, node

    return min(states, key=order)


def _drawn_state(tree: Tree, config: ForkConfig, seed: int, states: Sequence[int]) -> int:
    """ARPO's rule: entropy that rises over the first step's makes a state likelier to branch."""
    root = tree.nodes[0].entropy
    for node in states:
        state = tree.nodes[node]
        if node == 0 or state.actions > 1:
            continue
        chance = config.alpha + config.beta * (state.entropy - root)
        name = f"{tree.env}/{tree.task}/{state.sample}"
        rng = np.random.default_rng(request_seed(seed, name, state.sample, state.turn))
        if rng.uniform() < chance:
            return node
    return states[0]


@dataclasses.dataclass
class _Growth:
    """A tree on its way.

    Attributes:
        tree: What there is of it.
        ready: Finished rollouts that wait for one with a lower number.
        taken: How many samples are in the tree, or were dropped.
    """

    tree: Tree
    ready: dict[int, Rollout] = dataclasses.field(default_factory=dict)
    taken: int = 0

    def take(self, rollout: Rollout) -> None:
        """Put a rollout into the tree as soon as all before it are."""
        self.ready[rollout.sample] = rollout
        while self.taken in self.ready:
            self.tree.add(self.ready.pop(self.taken))
            self.taken += 1


def grow_trees(
    runner: Runner,
    env: str,
    tasks: Sequence[str],
    config: ForkConfig,
    seed: int,
    *,
    done: Iterable[Rollout] = (),
    stop: Stop | None = None,
) -> Iterator[Rollout]:
    """Roll out one tree for each task, all side by side.

    Args:
        runner: Runs episodes. With `keep`, forks find the cache of the episode that they leave, and
            what a finished tree has left with the sampler is forgotten here.
        env: Name of the environment.
        tasks: With distinct names.
        config: How a tree grows.
        seed: Of the rules that draw.
        done: Rollouts of these tasks that an earlier part of the run has finished.
        stop: Ends the run between two events once it is set.

    Yields:
        Each rollout that was not done, as soon as it is finished. `carl.tree.rebuild` makes the
        trees of them. A task whose first episodes were all spoilt has no forks.

    Raises:
        RunFailed: `max_faults` episodes in a row were spoilt.

    Reference: CARL Algorithm 1.
    """
    growing = {task: _Growth(Tree(env, task)) for task in tasks}
    for rollout in done:
        growing[rollout.task].take(rollout)
    jobs: deque[Job] = deque()
    for growth in growing.values():
        missing = [n for n in range(growth.taken, config.first) if n not in growth.ready]
        jobs += [Job(env, growth.tree.task, n) for n in missing] or _fork(growth, config, seed)
    for rollout in runner.run(jobs, stop):
        yield rollout
        growth = growing[rollout.task]
        growth.take(rollout)
        if growth.taken < config.first:
            continue
        following = _fork(growth, config, seed)
        jobs += following
        if not following:
            for sample in range(growth.taken):
                runner.sampler.forget(Job(env, rollout.task, sample).id)


def _fork(growth: _Growth, config: ForkConfig, seed: int) -> list[Job]:
    """The next episode of a tree; none if it is complete or has no state left."""
    sample = growth.taken
    node = None if sample >= config.leaves else pick_state(growth.tree, config, seed, sample)
    return [] if node is None else [growth.tree.job(node, sample)]
