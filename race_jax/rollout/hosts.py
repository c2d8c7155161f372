"""Where environments run: what the loop asks of it, and cheap environments in this process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from race_jax.envs.base import Call, Environment, RewardsFormat, Step, TakesText
from race_jax.rollout.jobs import Opening
from race_jax.trajectory_messages import short


class Fault(NamedTuple):
    """An environment's failure, after which its episode cannot go on.

    Attributes:
        stop: Why, as the episode's stop reason.
        error: What failed, where, and at which call.
    """

    stop: Literal["env_error", "timeout"]
    error: str


Reply = Opening | Step | Fault


class Host(Protocol):
    """Runs the environments of several episodes, each of which has one thing in hand at a time."""

    @property
    def capacity(self) -> int:
        """Most episodes at once."""
        ...

    def open(self, key: str, task: str) -> None:
        """Begin an episode; an `Opening` or a `Fault` will come of it."""
        ...

    def step(self, key: str, call: Call) -> None:
        """Carry out a call; a `Step` or a `Fault` will come of it."""
        ...

    def poll(self, timeout: float) -> list[tuple[str, Reply]]:
        """What has come, in any order; waits `timeout` seconds at most if nothing has."""
        ...

    def release(self, key: str) -> None:
        """The episode is over, whatever it has in hand; its environment is free for another."""
        ...

    def close(self) -> None:
        """End all environments."""
        ...


def opening_of(env: Environment, task: str) -> Opening:
    """Begin an episode in `env`.

    Raises:
        ValueError: What the environment says of itself is not what `Environment` asks for.
    """
    told, system, span = env.reset(task), env.system or "", env.reward_range
    if not isinstance(system, str):
        raise ValueError(f"its system prompt is {short(system)}; it must be text")
    try:
        low, high = (float(bound) for bound in span)
    except (TypeError, ValueError):
        low, high = math.inf, -math.inf
    if not -math.inf < low <= high < math.inf:
        raise ValueError(
            f"its reward range is {short(span)}; it must be the least and the greatest"
        )
    return Opening(
        system,
        tuple(env.tools),
        (low, high),
        told,
        answer_tool=env.answer_tool if isinstance(env, TakesText) else "",
        format_reward=isinstance(env, RewardsFormat) and env.format_reward,
    )


def step_of(env: Environment, call: Call) -> Step:
    """Carry out a call in `env`.

    Raises:
        ValueError: What comes back is no `Step`.
    """
    step = env.step(call)
    if not isinstance(step, Step):
        raise ValueError(f"its step returned {short(step)}; it must return a `Step`")
    return step


class LocalHost:
    """Environments in this process, for those that answer at once: nothing can stop a slow one.

    Args:
        make: Builds an environment.
        capacity: Most episodes at once.
    """

    def __init__(self, make: Callable[[], Environment], capacity: int = 64):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self._make = make
        self.capacity = capacity
        self._busy: dict[str, Environment] = {}
        self._idle: list[Environment] = []
        self._ready: list[tuple[str, Reply]] = []

    def open(self, key: str, task: str) -> None:
        """Begin an episode."""
        env = self._busy[key] = self._idle.pop() if self._idle else self._make()
        self._do(key, lambda: opening_of(env, task), f"as task {task!r} began")

    def step(self, key: str, call: Call) -> None:
        """Carry out a call."""
        self._do(key, lambda: step_of(self._busy[key], call), f"at {dict(call)!r:.300}")

    def _do(self, key: str, work: Callable[[], Reply], what: str) -> None:
        try:
            reply = work()
        except Exception as error:  # Whatever it raises, it is the environment's fault.
            reply = Fault("env_error", f"{what}: {type(error).__name__}: {error}"[:1000])
        self._ready.append((key, reply))

    def poll(self, timeout: float) -> list[tuple[str, Reply]]:
        """What has come."""
        ready = [(key, reply) for key, reply in self._ready if key in self._busy]
        self._ready = []
        # What failed may be broken for good, so its environment serves no other episode.
        for key, reply in ready:
            if isinstance(reply, Fault):
                _close(self._busy.pop(key))
        return ready

    def release(self, key: str) -> None:
        """The episode is over."""
        if key in self._busy:
            self._idle.append(self._busy.pop(key))

    def close(self) -> None:
        """End all environments."""
        for env in (*self._busy.values(), *self._idle):
            _close(env)
        self._busy, self._idle, self._ready = {}, [], []


def _close(env: Environment) -> None:
    """End an environment; one that is broken may not even close."""
    with contextlib.suppress(Exception):
        env.close()
