"""What passes between an episode and whoever drives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from race_jax.envs.base import Call
from race_jax.rollout.protocol import Completion, Request
from race_jax.rollout.results import Rollout


class Fork(NamedTuple):
    """Where an episode leaves another of its task.

    Attributes:
        sample: The other one.
        state: All ids before the first turn that differs.
        completions: The turns before that, as they were sampled.
    """

    sample: int
    state: tuple[int, ...]
    completions: tuple[Completion, ...]


class Job(NamedTuple):
    """One episode to be run: sample `sample` (from 0) of a task.

    With a `fork`, its first turns are those of another sample. They are carried out again in the
    environment, which must say the same, and nothing of them is sampled or forwarded again. From
    the turn `greedy_from` on, counted from 0, the most probable tokens are taken.
    """

    env: str
    task: str
    sample: int
    fork: Fork | None = None
    greedy_from: int | None = None

    @property
    def id(self) -> str:
        """The name of its trajectory and of its conversation."""
        return f"{self.env}/{self.task}/{self.sample}"


class Opening(NamedTuple):
    """What an environment says as an episode begins.

    Attributes:
        system: System prompt, empty for none.
        tools: Schemas of the tools.
        reward_range: Least and greatest reward.
        observation: What the agent is told first.
        answer_tool: The tool that a turn of text without a call goes to; empty for none.
        format_reward: Whether the reward is multiplied by that of the turns' form.
    """

    system: str
    tools: tuple[Mapping[str, Any], ...]
    reward_range: tuple[float, float]
    observation: str
    answer_tool: str = ""
    format_reward: bool = False


@dataclasses.dataclass(frozen=True)
class Action:
    """A call to be carried out in the environment."""

    call: Call


Next = Request | Action | Rollout
"""What an episode wants next; a `Rollout` says that it is over."""
