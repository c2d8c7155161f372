"""The loop that keeps many episodes in flight between a sampler and environments."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from race_jax.chat import Renderer
from race_jax.envs.base import Step
from race_jax.prefixes import common_length
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


_DIVERGED = (
    "the environment did not repeat what it had said under the same calls, so the episode cannot "
    "leave the other one there; forks need an environment that task and calls alone decide"
)


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
        given: Turns of its fork that are still to be taken; None once it is on its own.
        asked: The conversation whose request it waits for, if it does not wait for the environment.
        conversations: All that it has asked for.
    """

    episode: Episode | AdaptEpisode
    begun: float
    given: deque[Completion] | None = None
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
        keep: Leave the conversations of finished episodes with the sampler, so that others can fork
            from them; the caller forgets them, by the episodes' names.
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
        keep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}; it must be at least 1")
        self.sampler, self.renderer, self.host, self.config = sampler, renderer, host, config
        self.in_flight = min(in_flight, host.capacity)
        self.agent, self._keep = agent or AgentConfig(), keep
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._asked: dict[str, str] = {}
        self._faults = 0

    def run(self, jobs: Iterable[Job], stop: Stop | None = None) -> Iterator[Rollout]:
        """Run episodes.

        Args:
            jobs: Which, with distinct names. They begin in this order. A `deque` is taken as it is,
                so that its owner can add further ones as episodes come out.
            stop: Ends the run between two events once it is set; what is in flight is given up.

        Yields:
            Each rollout as soon as it is finished.

        Raises:
            RunFailed: `max_faults` episodes in a row were spoilt by environment or sampler.
        """
        waiting = jobs if isinstance(jobs, deque) else deque(jobs)
        try:
            while stop is None or not stop.is_set():
                while waiting and len(self._live) < self.in_flight:
                    self._begin(waiting.popleft())
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
        if job.fork is not None and self.agent.kind != "plain":
            raise ValueError(f"{job.id!r} forks, and the agent is {self.agent.kind}; use plain")
        episode = self.agent.episode(job, self.renderer, self.config, self.sampler.context_length)
        given = None if job.fork is None else deque(job.fork.completions)
        self._live[job.id] = _Live(episode, self._clock(), given)
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
        live = self._live[key]
        if live.given is not None and not isinstance(following, Action):
            following = self._live_again(live, live.given, following)
        if isinstance(following, Request):
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
            seconds = self._clock() - live.begun
            self._drop(key)
            yield dataclasses.replace(following, seconds=seconds)

    def _live_again(self, live: _Live, given: deque[Completion], following: Next) -> Next:
        """Answer requests by the turns of the fork, as long as all ids are those before it."""
        assert isinstance(live.episode, Episode) and live.episode.job.fork is not None
        state = live.episode.job.fork.state
        while isinstance(following, Request):
            prompt = following.prompt
            if prompt != (state[: len(prompt)] if given else state):
                at = common_length(prompt, state)
                return live.episode.end("diverged", f"{_DIVERGED} (at id {at} of {len(state)})")
            if not given:
                live.given = None
                origin = live.episode.job._replace(sample=live.episode.job.fork.sample).id
                return dataclasses.replace(following, origin=origin)
            following = live.episode.sampled(given.popleft())
        if isinstance(following, Rollout) and not following.faulty:
            return dataclasses.replace(
                following, stop="diverged", error=f"{_DIVERGED} (it ended before the fork)"
            )
        return following

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
        if not self._keep or live.asked is not None:
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
