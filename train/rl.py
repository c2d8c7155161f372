"""Cover-aware RL: RACE's second stage, its ablations, plain GRPO and AdaptThink.

A step samples a group of trajectories for each of its tasks, compares their rewards, lets LoGiC
find with the current policy what reasoning of the successful ones can go, and updates the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from race_jax.advantages import degenerate_groups, group_relative
from race_jax.rl_data import Judged, RowStats, judged, make_batch, outcome_reward
from race_jax.rollout.jobs import Job
from race_jax.rollout.loop import Runner
from race_jax.rollout.results import Group, Rollout
from race_jax.train.policy import Numbers, PolicyLoop, train_policy
from race_jax.train.rl_config import RlConfig
from race_jax.train.state import TrainState


def rl(config: RlConfig, *, console: Console | None = None, until: int | None = None) -> int:
    """Train as `config` says; a run that was cut short goes on from its last checkpoint.

    Args:
        config: The run.
        console: Where to show progress.
        until: Stop after this step as if the process had been asked to.

    Returns:
        Exit code 0, also when a signal ended the run early with a checkpoint; 1 if so many episodes
        in a row were spoilt by the environment that the run ended, with a checkpoint.

    Raises:
        ValueError: A setting is at fault, or the checkpoint is of other settings.
        FloatingPointError: Several updates in a row had no finite loss or gradient.
        OSError: A file could not be written.
    """
    return train_policy(config, GroupLoop, console=console, until=until)


class GroupLoop(PolicyLoop[Judged]):
    """Groups of independent trajectories of a task, compared with one another."""

    @property
    def config(self) -> RlConfig:
        """The run's settings."""
        assert isinstance(self.run.config, RlConfig)
        return self.run.config

    @property
    def samples(self) -> int:
        """Trajectories of a group."""
        return self.config.group

    @property
    def method(self) -> dict[str, Any]:
        """Only a group's size decides its episodes."""
        return {"group": self.config.group}

    def episodes(
        self, runner: Runner, tasks: Sequence[str], done: Mapping[str, Rollout]
    ) -> Iterator[Rollout]:
        """All trajectories of all groups, in any order."""
        jobs = [Job(self.run.env_name, name, n) for name in tasks for n in range(self.samples)]
        return runner.run([job for job in jobs if job.id not in done], self.stop)

    def judge(self, groups: Sequence[Group], state: TrainState) -> tuple[list[Judged], Numbers]:
        """Group-relative advantages and covers of all usable trajectories."""
        loss = self.config.loss
        usable = [(n, rollout) for n, group in enumerate(groups) for rollout in group.usable]
        ids = jnp.asarray([n for n, _ in usable])
        rewards = jnp.asarray([outcome_reward(r, loss.adaptthink) for _, r in usable], jnp.float32)
        advantages = group_relative(
            rewards, ids, num_groups=len(groups), normalize_std=loss.normalize_std
        )
        flat = degenerate_groups(rewards, ids, num_groups=len(groups))
        covers, told = self.covers([r for _, r in usable], state)
        items = [
            judged(r, r.tokens, float(advantage), covers.get(r.id))
            for (_, r), advantage in zip(usable, np.asarray(advantages), strict=True)
            if r.tokens is not None
        ]
        return items, told | {"rl/degenerate": float(np.mean(np.asarray(flat)))}

    def rows(
        self, items: Sequence[Judged], closure: float
    ) -> tuple[dict[str, np.ndarray], RowStats]:
        """The rows of an update."""
        config = self.config
        return make_batch(
            items,
            place=self.run.decision,
            length=config.row_length,
            rows=config.rows,
            closure=closure,
            masking=config.loss.masking,
            reduction=config.loss.reduction,
        )
