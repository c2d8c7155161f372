"""The loop that keeps many episodes in flight between a sampler and environments."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from race_jax.chat import Renderer
from race_jax.envs.base import Step
from race_jax.rollout.adapt import AdaptEpisode
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.episode import Episode
from race_jax.rollout.hosts import Fault, Host, Reply
from race_jax.rollout.jobs import Action, Job, Next, Opening
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.protocol import Completion, Request, Sampler
from race_jax.rollout.results import Rollout

_TICK, _IDLE = 0.05, 0.5
"""Seconds to wait for one side while the other may have something too, and while it has not."""


class RunFailed(RuntimeError):
    """So many episodes failed in a row that the run makes no sense; the message holds the cause."""


class Stop(Protocol):
    """Says when a run is to end; a `threading.Event` does."""

    def is_set(self) -> bool:
        """Whether it is to end."""
        ...


@dataclasses.dataclass
class _Live:
    """An episode in flight.

    Attributes:
        episode: It.
        begun: When.
        asked: The conversation whose request it waits for, if it does not wait for the environment.
        conversations: All that it has asked for.
    """

    episode: Episode | AdaptEpisode
    begun: float
    asked: str | None = None
    conversations: set[str] = dataclasses.field(default_factory=set)


class Runner:
    """Runs episodes, many at a time.

    Args:
        sampler: Continues conversations.
        renderer: Messages to ids, for the sampler's model.
        host: Runs the environments.
        config: Limits and sampling.
        in_flight: Most episodes at once; the host's capacity bounds it too.
        agent: Which agent plays.
        clock: Seconds, from anywhere.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        host: Host,
        config: RolloutConfig,
        *,
        in_flight: int = 64,
        agent: AgentConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}; it must be at least 1")
        self.sampler, self.renderer, self.host, self.config = sampler, renderer, host, config
        self.in_flight = min(in_flight, host.capacity)
        self.agent = agent or AgentConfig()
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._asked: dict[str, str] = {}
        self._faults = 0

    def run(self, jobs: Iterable[Job], stop: Stop | None = None) -> Iterator[Rollout]:
        """Run episodes.

        Args:
            jobs: Which, with distinct names. They begin in this order.
            stop: Ends the run between two events once it is set; what is in flight is given up.

        Yields:
            Each rollout as soon as it is finished.

        Raises:
            RunFailed: `max_faults` episodes in a row were spoilt by environment or sampler.
        """
        waiting = iter(jobs)
        try:
            while stop is None or not stop.is_set():
                for job in itertools.islice(waiting, self.in_flight - len(self._live)):
                    self._begin(job)
                if not self._live:
                    return
                for rollout in self._events():
                    yield rollout
                    self._count_fault(rollout)
        finally:
            for key in list(self._live):
                self._drop(key)

    def _begin(self, job: Job) -> None:
        if job.id in self._live:
            raise ValueError(f"two jobs have the name {job.id!r}; names must differ")
        episode = self.agent.episode(job, self.renderer, self.config, self.sampler.context_length)
        self._live[job.id] = _Live(episode, self._clock())
        self.host.open(job.id, job.task)

    def _events(self) -> Iterator[Rollout]:
        """Wait until something happens, and let the episodes take it."""
        asked = len(self._asked)
        acting = len(self._live) - asked
        replies = self.host.poll(0.0 if asked else _IDLE) if acting else []
        for key, reply in replies:
            live = self._live.get(key)
            if live is not None:
                yield from self._follow(key, _take(live.episode, reply))
        completions: Sequence[Completion] = ()
        if asked:
            completions = self.sampler.poll(_TICK if acting else _IDLE)
        for completion in completions:
            key = self._asked.pop(completion.conversation, None)
            if key is not None:
                live = self._live[key]
                live.asked = None
                yield from self._follow(key, live.episode.sampled(completion))
        yield from self._expire()

    def _follow(self, key: str, following: Next) -> Iterator[Rollout]:
        """Do what an episode wants next."""
        if isinstance(following, Request):
            live = self._live[key]
            live.asked = following.conversation
            if isinstance(live.episode, AdaptEpisode):
                # Its conversations come one after the other, so an earlier one is over.
                self._forget(live, live.conversations - {following.conversation})
            live.conversations.add(following.conversation)
            self._asked[following.conversation] = key
            self.sampler.submit(following)
        elif isinstance(following, Action):
            self.host.step(key, following.call)
        else:
            seconds = self._clock() - self._live[key].begun
            self._drop(key)
            yield dataclasses.replace(following, seconds=seconds)

    def _expire(self) -> Iterator[Rollout]:
        now, limit = self._clock(), self.config.episode_timeout
        for key, live in list(self._live.items()):
            if now - live.begun >= limit:
                what = "the sampler" if live.asked else "the environment"
                error = f"the episode took more than {limit} s; it was waiting for {what}"
                yield from self._follow(key, live.episode.end("timeout", error))

    def _drop(self, key: str) -> None:
        live = self._live.pop(key)
        if live.asked is not None:
            del self._asked[live.asked]
        self._forget(live, set(live.conversations))
        self.host.release(key)

    def _forget(self, live: _Live, conversations: set[str]) -> None:
        for conversation in conversations:
            self.sampler.forget(conversation)
        live.conversations -= conversations

    def _count_fault(self, rollout: Rollout) -> None:
        self._faults = self._faults + 1 if rollout.faulty else 0
        if self._faults >= self.config.max_faults:
            raise RunFailed(
                f"{self._faults} episodes failed in a row, so the run ends; the last one "
                f"({rollout.id}): {rollout.stop}: {rollout.error}"
            )


def _take(episode: Episode | AdaptEpisode, reply: Reply) -> Next:
    if isinstance(reply, Opening):
        return episode.begin(reply)
    if isinstance(reply, Step):
        return episode.stepped(reply)
    assert isinstance(reply, Fault)
    return episode.end(reply.stop, reply.error)
