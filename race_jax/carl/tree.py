"""The tree of a task's rollouts: nodes are states, edges are actions, outcomes stand at the leaves.

A state is an exact token prefix. No two are merged but the root, where every episode of the task
begins; so a tree is known from its rollouts, each of which says where it left another one. Nothing
else is stored, and nothing else is needed to go on with one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from race_jax.carl.advantages import Baseline, Credit, EdgeCredit, check_tree, edge_advantages
from race_jax.rollout.jobs import Fork, Job
from race_jax.rollout.protocol import Completion
from race_jax.rollout.results import Rollout


@dataclasses.dataclass
class Node:
    """A state, and the edge into it.

    Attributes:
        parent: Index of the state before it; -1 at the root.
        sample: The rollout that came here first.
        turn: Turns before it.
        nats: Mean -log-probability of the tokens of the action into it; 0 at the root.
        actions: n(s), actions sampled here.
        entropy: H(s), the mean of their `nats`.
        reward: The outcome, at a leaf; None elsewhere.
        closed: Whether no further action may start here, since the environment did not come back.
    """

    parent: int
    sample: int
    turn: int
    nats: float
    actions: int = 0
    entropy: float = 0.0
    reward: float | None = None
    closed: bool = False

    @property
    def density(self) -> float:
        """d(s) = n(s) / H(s); infinite where H is 0.

        Reference: CARL eq. 12.
        """
        return self.actions / self.entropy if self.entropy > 0 else np.inf


class Tree:
    """The rollouts of one task.

    Attributes:
        env: Name of the environment.
        task: Name of the task.
        nodes: By index, parents before children; the root first, once there is a rollout.
        rollouts: Those in the tree, by sample.
        paths: By sample: the nodes before each turn, and the leaf.
        dropped: Rollouts that the environment or the sampler spoilt, which are not in the tree.
        diverged: Those of them where the environment did not repeat itself.
    """

    def __init__(self, env: str, task: str):
        """An empty tree."""
        self.env, self.task = env, task
        self.nodes: list[Node] = []
        self.rollouts: dict[int, Rollout] = {}
        self.paths: dict[int, tuple[int, ...]] = {}
        self.dropped = self.diverged = 0

    def add(self, rollout: Rollout) -> bool:
        """Put a rollout into the tree, after the one that it forks from.

        The running mean of a state that was left again is H <- (h + H n) / (n + 1), n <- n + 1.

        Args:
            rollout: A finished one of this task.

        Returns:
            Whether it is in; a spoilt one is only counted, and the state that it could not come
            back to is closed. An episode from the root with another prompt than the first one's is
            spoilt too.

        Raises:
            ValueError: It is of another task, is in already, or leaves no rollout that is in.

        Reference: CARL Algorithm 1. That the root's actions of the first phase count for one state
        is ours.
        """
        self._check(rollout)
        path = [0]
        if rollout.fork is not None:
            sample, turn = rollout.fork
            path = list(self.paths[sample][: turn + 1])
        strayed = self._strayed(rollout)
        if strayed or rollout.faulty or rollout.tokens is None:
            self.dropped += 1
            self.diverged += strayed
            if strayed:
                self.nodes[path[-1]].closed = True
            return False
        if not self.nodes:
            self.nodes.append(Node(-1, rollout.sample, 0, 0.0))
        for turn in range(len(path) - 1, len(rollout.notes)):
            # As records hold them, so that trees read back grow on as these would have.
            nats = -float(np.mean(rollout.notes[turn].record()["logprobs"]))
            state = self.nodes[path[-1]]
            state.entropy = (nats + state.entropy * state.actions) / (state.actions + 1)
            state.actions += 1
            path.append(len(self.nodes))
            self.nodes.append(Node(path[-2], rollout.sample, turn + 1, nats))
        self.nodes[path[-1]].reward = rollout.reward
        self.rollouts[rollout.sample], self.paths[rollout.sample] = rollout, tuple(path)
        return True

    def _check(self, rollout: Rollout) -> None:
        if (rollout.env, rollout.task) != (self.env, self.task):
            raise ValueError(f"{rollout.id} is no rollout of {self.env}/{self.task}")
        if rollout.sample in self.rollouts:
            raise ValueError(f"{rollout.id} is in the tree already")
        if rollout.fork is None:
            return
        sample, turn = rollout.fork
        known = self.paths.get(sample, ())
        if not 0 <= turn < len(known) - 1:
            raise ValueError(
                f"{rollout.id} leaves sample {sample} at turn {turn}, and the tree holds "
                + (f"{len(known) - 1} turns of that one" if known else "no such sample")
                + "; a rollout must come after the one that it leaves"
            )
        if not rollout.faulty and len(rollout.notes) <= turn:
            raise ValueError(f"{rollout.id} has no turn of its own: it forks at turn {turn}")

    def _strayed(self, rollout: Rollout) -> bool:
        """Whether the environment did not bring a rollout to the state that it was to begin in."""
        if rollout.fork is not None:
            return rollout.stop == "diverged"
        if rollout.faulty or rollout.tokens is None or not self.nodes:
            return False
        first = self.rollouts[self.nodes[0].sample].tokens
        return first is not None and rollout.tokens.prompt != first.prompt

    @property
    def states(self) -> list[int]:
        """Nodes from which an action can be sampled: no leaves, no closed ones."""
        return [n for n, node in enumerate(self.nodes) if node.reward is None and not node.closed]

    @property
    def children(self) -> list[list[int]]:
        """The nodes below each node, in the order in which they came."""
        below: list[list[int]] = [[] for _ in self.nodes]
        for n, node in enumerate(self.nodes):
            if node.parent >= 0:
                below[node.parent].append(n)
        return below

    @property
    def edges(self) -> int:
        """Actions that were sampled for the tree: |D_roll|."""
        return max(len(self.nodes) - 1, 0)

    def job(self, node: int, sample: int) -> Job:
        """The episode that samples another action in a state, and goes on to the end.

        Args:
            node: The state.
            sample: The new rollout's number.
        """
        state = self.nodes[node]
        if state.turn == 0:
            return Job(self.env, self.task, sample)
        origin = self.rollouts[state.sample]
        return Job(self.env, self.task, sample, fork_at(origin, state.turn))

    def arrays(self, size: int | None = None) -> tuple[np.ndarray, ...]:
        """`parent`, `rewards`, `is_leaf`, `valid`, as `edge_advantages` takes them.

        Args:
            size: Length of the arrays; by default the number of nodes.

        Returns:
            int32, float32, bool and bool [size].
        """
        count = len(self.nodes)
        size = count if size is None else size
        parent, rewards = np.full(size, -1, np.int32), np.zeros(size, np.float32)
        parent[:count] = [node.parent for node in self.nodes]
        rewards[:count] = [0.0 if node.reward is None else node.reward for node in self.nodes]
        is_leaf, valid = np.zeros(size, bool), np.arange(size) < count
        is_leaf[:count] = [node.reward is not None for node in self.nodes]
        return parent, rewards, is_leaf, valid


def fork_at(origin: Rollout, turn: int) -> Fork:
    """Leave a rollout before its turn `turn`, at least 1.

    Raises:
        ValueError: It has no such turn, or ids were given to the policy within its turns.
    """
    tokens = origin.tokens
    if tokens is None or not 1 <= turn < len(tokens.turns):
        raise ValueError(f"{origin.id} cannot be left at turn {turn}: it must be one of its own")
    state, completions = list(tokens.prompt), []
    for done, note in zip(tokens.turns[:turn], origin.notes, strict=False):
        if note.forced:
            raise ValueError(
                f"{origin.id} has turns whose first ids were not sampled; trees take rollouts of "
                "the agent `plain`"
            )
        sampled = (done.reasoning or done.skip) + done.action
        state += sampled + done.observation
        reason = "length" if note.truncated else "stop"
        completions.append(Completion(origin.id, sampled, note.logprobs, reason))
    return Fork(origin.sample, tuple(state), tuple(completions))


def rebuild(rollouts: Iterable[Rollout]) -> dict[str, Tree]:
    """The trees that rollouts of several tasks make, by task.

    Raises:
        ValueError: A rollout leaves one that is not there.
    """
    trees: dict[str, Tree] = {}
    for rollout in sorted(rollouts, key=lambda r: r.sample):
        tree = trees.setdefault(rollout.task, Tree(rollout.env, rollout.task))
        tree.add(rollout)
    return trees


def credit_trees(
    trees: Sequence[Tree], credit: Credit = Credit.CARL, baseline: Baseline = "mean"
) -> list[EdgeCredit]:
    """`edge_advantages` of several trees at once, padded to one size.

    Args:
        trees: With at least one edge each.
        credit: The rule.
        baseline: Of the values that it compares.

    Returns:
        For each tree its values float32, advantages float32 and trainable bool [nodes], on the
        host.

    Raises:
        ValueError: A tree has no edge, or a leaf's reward is not finite.
    """
    if not trees:
        return []
    for tree in trees:
        try:
            check_tree(*tree.arrays())
        except ValueError as error:
            raise ValueError(f"the tree of {tree.env}/{tree.task}: {error}") from None
    # Powers of two, so that a run compiles a handful of programs.
    size = 1 << (max(len(tree.nodes) for tree in trees) - 1).bit_length()
    arrays = [np.stack(parts) for parts in zip(*(t.arrays(size) for t in trees), strict=True)]

    def one(*parts: jax.Array) -> EdgeCredit:
        return edge_advantages(*parts, credit=credit, baseline=baseline)

    found = jax.device_get(jax.vmap(one)(*map(jnp.asarray, arrays)))
    return [
        jax.tree.map(lambda x, n=n, tree=tree: np.asarray(x[n, : len(tree.nodes)]), found)
        for n, tree in enumerate(trees)
    ]
