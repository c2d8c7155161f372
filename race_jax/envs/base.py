"""The protocol of environments, and copies of an episode by replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

Call = Mapping[str, Any]
"""A tool call: `{"name": str, "arguments": mapping}`."""


class Step(NamedTuple):
    """What one action brings.

    Attributes:
        observation: The environment's reply.
        reward: The episode's return as it stands, within `reward_range`: no difference to the step
            before, so the last one is the trajectory's reward.
        done: Whether the episode is over.
        success: Whether the task is solved.
    """

    observation: str
    reward: float
    done: bool
    success: bool = False


class EnvironmentFault(Exception):
    """An environment or its server failed; the episode cannot go on. The caller is not at fault."""


class Environment(Protocol):
    """A world that runs one episode at a time.

    Attributes:
        name: Of the environment, as it stands in configurations and results.
        system: The system prompt.
        reward_range: Least and greatest reward.
    """

    name: str
    system: str
    reward_range: tuple[float, float]

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools, each `{"type": "function", "function": {...}}`.

        Where they depend on the task: those of the episode, once there is one.
        """
        ...

    def tasks(self, split: str) -> Sequence[str]:
        """Names of the tasks of `train`, `dev` or `test`, in a fixed order.

        Raises:
            ValueError: There is no such split.
        """
        ...

    def reset(self, task: str) -> str:
        """Start an episode and return what the agent is told first.

        Raises:
            ValueError: There is no such task.
            EnvironmentFault: The environment failed.
        """
        ...

    def step(self, call: Call) -> Step:
        """Carry out one call, which fits a schema of `tools`.

        Raises:
            ValueError: There is no episode, or it is over.
            EnvironmentFault: The environment failed.
        """
        ...

    def close(self) -> None:
        """Free all that the environment holds; a closed one can be reset again."""
        ...


@runtime_checkable
class TakesText(Protocol):
    """An environment that takes a turn of text without a call, such as a final answer.

    Attributes:
        answer_tool: The tool to which the text goes, as its one required argument; empty for none.
    """

    answer_tool: str


@runtime_checkable
class RewardsFormat(Protocol):
    """An environment whose reward may hang on the form of what the agent writes.

    Attributes:
        format_reward: Whether the reward is multiplied by `race_jax.rewards.format_reward` of the
            turns, with `tool_call` as the one action.
    """

    format_reward: bool


def check_split(split: str, splits: Iterable[str], name: str) -> None:
    """Raise ValueError unless the environment `name` has a split of that name."""
    if split not in (known := list(splits)):
        raise ValueError(f"there is no split {split!r}; {name} has {', '.join(known)}")


class Diverged(Exception):
    """A replay brought another observation than the episode it copies."""


def replay(
    make: Callable[[], Environment], task: str, calls: Sequence[Call], observations: Sequence[str]
) -> Environment:
    """A copy of an episode: a new environment in which the same calls were made.

    Args:
        make: Builds an environment.
        task: The episode's task.
        calls: What was called, in order.
        observations: The first observation, and the reply to each call.

    Raises:
        Diverged: An observation differs; the message says which.
        EnvironmentFault: The environment failed.
    """
    copy = make()
    try:
        seen = copy.reset(task)
        for n, expected in enumerate(observations):
            if n:
                seen = copy.step(calls[n - 1]).observation
            if seen != expected:
                raise Diverged(
                    f"task {task!r}: observation {n} of the replay is {seen[:200]!r}, but the "
                    f"episode had {expected[:200]!r}"
                )
    except BaseException:
        copy.close()
        raise
    return copy
