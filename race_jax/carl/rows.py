"""Trees to the rows of an update: every state that a trained action needs is laid out once.

A row holds the edges of a tree depth first. Each token is followed by all that comes after it on
some branch, so one number per token says who sees it: the first place after its edge's subtree
(`ends`). Attention under that mask gives each branch what it would have had alone.

Where a state branches, its last token has several next tokens, and a place in a row has one target.
So an edge begins with a copy of its state's last token, which stands once more in front of each
branch and is the only token that is laid out twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from race_jax.carl.advantages import EdgeCredit
from race_jax.carl.tree import Tree
from race_jax.packing import OTHER, fill_rows, make_example, plan_rows
from race_jax.rl_data import (
    Arrays,
    RowStats,
    closure_example,
    judged,
    policy_example,
    round_parts,
)

Removed = Mapping[int, Collection[int]]
"""By sample, the turns whose reasoning its cover took out."""


class JudgedTree(NamedTuple):
    """A tree with all that an update needs to know of it.

    Attributes:
        tree: Its rollouts.
        credit: One entry per node.
        removed: Of its successful rollouts.
    """

    tree: Tree
    credit: EdgeCredit
    removed: Removed


class _Layout:
    """Which ids each edge of a tree brings, and what is known of them."""

    def __init__(self, item: JudgedTree, place: int, masking: bool):
        self.item, self.place = item, place
        self.children = item.tree.children
        self.examples: dict[int, Arrays] = {}
        self.turns: dict[int, np.ndarray] = {}
        for sample, rollout in item.tree.rollouts.items():
            assert rollout.tokens is not None
            # Advantages are of edges, and come with them.
            alone = judged(rollout, rollout.tokens, 0.0, item.removed.get(sample))
            self.examples[sample] = policy_example(alone, place, masking=masking)
            self.turns[sample] = make_example(rollout.tokens, place).turns

    def span(self, node: int) -> tuple[int, int]:
        """Begin and end, in its rollout's ids, of what the edge into a node brings.

        It begins with the last id of the state before it, and ends before the last id of the state
        after it. The root brings the prompt.
        """
        state = self.item.tree.nodes[node]
        turns = self.turns[state.sample]
        begin = 0 if node == 0 else int(turns[state.turn - 1, 0]) - 1
        if state.turn < len(turns):
            return begin, int(turns[state.turn, 0]) - 1
        return begin, len(self.examples[state.sample]["tokens"])

    def above(self, node: int) -> list[int]:
        """The node and all before it, the root first."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.item.tree.nodes[node].parent
        return path[::-1]

    def depth_first(self) -> Iterator[int]:
        """All nodes, each followed by those below it."""
        stack = [0]
        while stack:
            node = stack.pop()
            yield node
            stack += reversed(self.children[node])

    def _action_end(self, node: int) -> int:
        state = self.item.tree.nodes[node]
        return int(self.turns[state.sample][state.turn - 1, 1]) if state.turn else 0

    def unit(self, trained: Collection[int]) -> Arrays:
        """The part of the tree that some trained edges need, as arrays [n].

        Args:
            trained: Child nodes of the edges that carry loss.

        Returns:
            As of `rl_data.policy_example`, with `positions` int32, `ends` int32 (from the unit's
            beginning) and `pieces` int32, the number of each token's edge, from 1.
        """
        needed = {node for target in trained for node in self.above(target)}
        order = [node for node in self.depth_first() if node in needed]
        inner = {self.item.tree.nodes[node].parent for node in order}
        parts: list[Arrays] = []
        opened: list[int] = []  # the path at hand
        ends: dict[int, int] = {}
        at = 0
        for piece, node in enumerate(order, 1):
            parent = self.item.tree.nodes[node].parent
            while opened and opened[-1] != parent:
                ends[opened.pop()] = at
            opened.append(node)
            parts.append(self._edge(node, piece, node in trained, node not in inner))
            at += len(parts[-1]["tokens"])
        ends |= dict.fromkeys(opened, at)
        for node, part in zip(order, parts, strict=True):
            part["ends"] = np.full(len(part["tokens"]), ends[node], np.int32)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _edge(self, node: int, piece: int, trained: bool, leaf: bool) -> Arrays:
        """What one edge brings; it carries loss if it is `trained`."""
        begin, end = self.span(node)
        if leaf:
            end = self._action_end(node)
        example = self.examples[self.item.tree.nodes[node].sample]
        part = {name: values[begin:end] for name, values in example.items()}
        # The first id is a copy of the state's last one, which its own edge has if any.
        loss = np.arange(end - begin) > 0 if trained else np.zeros(end - begin, bool)
        completion = part["completion"] & loss
        advantage = float(self.item.credit.advantages[node])
        return part | {
            "positions": np.arange(begin, end, dtype=np.int32),
            "pieces": np.full(end - begin, piece, np.int32),
            "kinds": np.where(loss, part["kinds"], OTHER).astype(np.uint8),
            "completion": completion,
            "keep": part["keep"] & loss,
            "advantages": np.where(completion, advantage, 0).astype(np.float32),
        }

    def units(self, share: bool, length: int) -> list[Arrays]:
        """The whole update set, in parts of at most `length` ids.

        Args:
            share: Put as much of the tree into a part as fits; otherwise one rollout each.
            length: Ids of a row.

        Raises:
            ValueError: One path alone is longer.
        """
        tree, trainable = self.item.tree, self.item.credit.trainable
        targets = [node for node in self.depth_first() if trainable[node]]
        if not share:
            samples = dict.fromkeys(tree.nodes[node].sample for node in targets)
            own = [[n for n in targets if tree.nodes[n].sample == sample] for sample in samples]
            return [self._checked(self.unit(group), length) for group in own]
        groups: list[list[int]] = []
        held: set[int] = set()
        size = 0
        for node in targets:
            path = set(self.above(node))
            # Counts what follows the last action too, so it may be more than will be laid out.
            size += sum(end - begin for begin, end in map(self.span, path - held))
            if not groups or size > length:
                groups.append([])
                held, size = set(), sum(end - begin for begin, end in map(self.span, path))
            groups[-1].append(node)
            held |= path
        return [self._checked(self.unit(group), length) for group in groups]

    def _checked(self, unit: Arrays, length: int) -> Arrays:
        if len(unit["tokens"]) > length:
            raise ValueError(
                f"{self.item.tree.env}/{self.item.tree.task}: the path to an action has "
                f"{len(unit['tokens'])} tokens and a row {length}; raise the row's length or lower "
                "the limit of a trajectory"
            )
        return unit

    def closures(self, weight: float) -> Iterator[Arrays]:
        """The compressed contexts of the successful rollouts, for RACE eq. 14, as units.

        A turn that several rollouts share counts once, with the one that sampled it.
        """
        for sample, removed in self.item.removed.items():
            rollout = self.item.tree.rollouts[sample]
            assert rollout.tokens is not None
            begun = rollout.fork[1] if rollout.fork else 0
            own = [turn for turn in sorted(removed) if turn >= begun]
            if not own:
                continue
            example = closure_example(rollout.tokens, removed, self.place, weight)
            assert example is not None
            others = np.flatnonzero(example["close_weight"])[: len(removed) - len(own)]
            example["close_weight"][others] = 0
            example["kinds"][others] = OTHER
            yield example


def make_tree_batch(
    items: Sequence[JudgedTree],
    *,
    place: int,
    length: int,
    rows: int,
    share: bool = True,
    closure: float = 0.0,
    masking: bool = True,
) -> tuple[Arrays, RowStats]:
    """The update sets of all trees to the rows of one update.

        L = - 1/|D_upd| * sum_{tokens of D_upd} min(r A, clip(r, 1 - low, 1 + high) A)

    where |D_upd| counts tokens: actions outside it are not in the mean either. With `removed`,
    RACE's mask takes reasoning out of the sum and not out of the mean, and its closure loss joins
    as in `rl_data.make_batch`, with the tree's actions in place of the turns.

    Args:
        items: Trees; those without a trained edge bring nothing.
        place: From `packing.decision_place`.
        length: Tokens of a row.
        rows: The number of rows is a multiple of this.
        share: Lay each shared state out once per row; otherwise each rollout alone, for models that
            read rows in order.
        closure: lambda of RACE eq. 15, at least 0.
        masking: Whether the covers mask reasoning.

    Returns:
        Arrays [B, T] as `packing.fill_rows` gives them, and with `share` also `ends` int32; and
        what they hold. B / rows is as of `rl_data.make_batch`.

    Raises:
        ValueError: No tree has a trained edge, a path is longer than a row, or lambda is negative.

    Reference: CARL eqs. 9 and 10; RACE eqs. 13 to 15. The two together are ours.
    """
    if not (np.isfinite(closure) and closure >= 0):
        raise ValueError(f"lambda is {closure}; it must be a finite number, at least 0")
    layouts = [_Layout(item, place, masking) for item in items if item.credit.trainable.any()]
    if not layouts:
        raise ValueError("no tree has a state with two actions, so there is nothing to train on")
    units = [unit for layout in layouts for unit in layout.units(share, length)]
    policy = int(sum(unit["completion"].sum() for unit in units))
    turns = sum(item.tree.edges for item in items)
    sampled = sum(len(unit["tokens"]) for unit in units)
    masked = int(sum((unit["completion"] & ~unit["keep"]).sum() for unit in units))
    if closure:
        units += [unit for layout in layouts for unit in layout.closures(closure * policy / turns)]
    lengths = [len(unit["tokens"]) for unit in units]
    plan = plan_rows(lengths, length)
    plan += [[]] * (rows * round_parts(-(-len(plan) // rows)) - len(plan))
    batch = fill_rows([[units[n] for n in row] for row in plan], length)
    if not share:
        del batch["ends"]
    return batch, RowStats(
        policy=policy,
        masked=masked,
        turns=turns,
        closings=int((batch["close_weight"] > 0).sum()),
        sampled=sampled,
        extra=sum(lengths) - sampled,
        padding=len(plan) * length - sum(lengths),
    )
