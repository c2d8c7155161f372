"""CARL: trees forked where the policy is uncertain, exact edge advantages, updates on forks only.

A step grows a tree for each of its tasks, values its states by what came of them, and updates the
policy on the actions of states that have several. All else is as in `rl`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from rich.console import Console

from race_jax import jsonl
from race_jax.carl.advantages import Credit
from race_jax.carl.criticality import Judgement, by_key, forked_states
from race_jax.carl.forking import grow_trees
from race_jax.carl.rows import JudgedTree, make_tree_batch
from race_jax.carl.tree import Tree, credit_trees, rebuild
from race_jax.rl_data import RowStats
from race_jax.rollout.loop import RunFailed, Runner
from race_jax.rollout.results import Group, Rollout
from race_jax.train.carl_config import CarlConfig
from race_jax.train.policy import Numbers, PolicyLoop, train_policy
from race_jax.train.state import TrainState


def carl(config: CarlConfig, *, console: Console | None = None, until: int | None = None) -> int:
    """Train as `config` says; a run that was cut short goes on from its last checkpoint.

    Args:
        config: The run.
        console: Where to show progress.
        until: Stop after this step as if the process had been asked to.

    Returns:
        Exit code as of `rl`.

    Raises:
        ValueError: A setting is at fault, or the checkpoint is of other settings.
        FloatingPointError: Several updates in a row had no finite loss or gradient.
        OSError: A file could not be written.

    Reference: CARL Algorithms 1 and 2.
    """
    return train_policy(config, TreeLoop, console=console, until=until)


class TreeLoop(PolicyLoop[JudgedTree]):
    """Trees of a task's episodes."""

    keep_caches: ClassVar[bool] = True

    @property
    def config(self) -> CarlConfig:
        """The run's settings."""
        assert isinstance(self.run.config, CarlConfig)
        return self.run.config

    @property
    def samples(self) -> int:
        """Leaves of a tree."""
        return self.config.tree.leaves

    @property
    def method(self) -> dict[str, Any]:
        """How trees grow; credit comes after."""
        return {"tree": dataclasses.asdict(self.config.tree)}

    def episodes(
        self, runner: Runner, tasks: Sequence[str], done: Mapping[str, Rollout]
    ) -> Iterator[Rollout]:
        """All episodes of all trees, in any order."""
        return grow_trees(
            runner,
            self.run.env_name,
            tasks,
            self.config.tree,
            runner.config.seed,
            done=done.values(),
            stop=self.stop,
        )

    def judge(self, groups: Sequence[Group], state: TrainState) -> tuple[list[JudgedTree], Numbers]:
        """Credits and covers of all trees that have an edge."""
        trees = list(rebuild(r for group in groups for r in group.rollouts).values())
        grown = [tree for tree in trees if tree.edges]
        credits = credit_trees(grown, Credit(self.config.credit), self.config.baseline)
        if not any(credit.trainable.any() for credit in credits):
            raise RunFailed(
                "no tree of the step has a state with two actions: all forks were spoilt"
            )
        covers, told = self.covers([r for group in groups for r in group.usable], state)
        items = [
            JudgedTree(
                tree,
                credit,
                {s: covers[r.id] for s, r in tree.rollouts.items() if r.id in covers},
            )
            for tree, credit in zip(grown, credits, strict=True)
        ]
        return items, told | self._tell(groups, trees, items)

    def _tell(
        self, groups: Sequence[Group], trees: Sequence[Tree], items: Sequence[JudgedTree]
    ) -> Numbers:
        """Numbers on the step's trees."""
        # Of episodes that are in no tree too: they were sampled all the same.
        everything = [rollout for group in groups for rollout in group.rollouts]
        own = [len(r.notes) - (r.fork[1] if r.fork else 0) for r in everything]
        drawn = sum(max(turns, 0) for turns in own)
        trained = sum(int(item.credit.trainable.sum()) for item in items)
        # What GRPO would have sampled and trained: N whole episodes of each task.
        forks = max(self.config.tree.forks, 1)
        lengths = [len(r.notes) for item in items for r in item.tree.rollouts.values()]
        whole = forks * len(items) * float(np.mean(lengths))
        entropies = [n.entropy for i in items for n in i.tree.nodes if n.actions]
        tried = sum(bool(r.fork) for i in items for r in i.tree.rollouts.values())
        lost = sum(tree.diverged for tree in trees)
        numbers = {
            "carl/rollout_actions": drawn,
            "carl/update_actions": trained,
            "carl/rollout_ratio": drawn / whole,
            "carl/update_ratio": trained / whole,
            "carl/entropy": float(np.mean(entropies)),
            "carl/diverged": lost / max(tried + lost, 1),
            "carl/flat": float(np.mean([not item.credit.advantages.any() for item in items])),
        }
        states = [s for item in items for s in forked_states(item.tree, item.credit)]
        if states:
            numbers["carl/criticality"] = float(np.mean([s.criticality for s in states]))
        self._note_states(states)
        return numbers

    def summary(self, n: Mapping[str, float]) -> str:
        """What the console says of a step, with the trees' cost."""
        return (
            f"{super().summary(n)}; {n['carl/rollout_actions']:.0f} actions sampled "
            f"({n['carl/rollout_ratio']:.2f} of GRPO's), {n['carl/update_actions']:.0f} trained "
            f"({n['carl/update_ratio']:.2f})"
        )

    def _note_states(self, states: Sequence[Judgement]) -> None:
        """Write criticality by turn and by tool beside the step's rollouts."""
        table = {
            "by_turn": by_key(states, lambda s: s.turn),
            "by_tool": by_key(states, lambda s: s.tool),
        }
        folder = self.run.folder / "rollouts"
        with jsonl.replacing(folder / f"step_{self.step:06}.criticality.json") as file:
            file.write(json.dumps(table, indent=1).encode())

    def rows(
        self, items: Sequence[JudgedTree], closure: float
    ) -> tuple[dict[str, np.ndarray], RowStats]:
        """The rows of an update."""
        config = self.config
        return make_tree_batch(
            items,
            place=self.run.decision,
            length=config.row_length,
            rows=config.rows,
            share=config.share and not self.run.model.recurrent,
            closure=closure,
            masking=config.loss.masking,
        )
