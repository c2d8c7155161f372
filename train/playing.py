"""Tasks played with a model into a file of rollouts: what every command that plays them shares."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rich.console import Console

from race_jax.chat import Renderer, SkipForm, renderer_for
from race_jax.envs.factory import EnvironmentConfig
from race_jax.families import family_of
from race_jax.report_view import visible
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.calls import checker_of
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import RunFailed, Runner, Stop
from race_jax.rollout.protocol import Sampler
from race_jax.rollout.results import Rollout, RolloutFile
from race_jax.rollout.workers import make_host
from race_jax.tokenizer import load_tokenizer
from race_jax.train.progress import Meter
from race_jax.train.runtime import make_parents, model_fingerprint
from race_jax.train.samplers import SamplerConfig, make_sampler

FREE = (
    *("model", "out", "count", "in_flight", "env.workers", "env.restart_after"),
    *("sampler.address", "sampler.timeout", "sampler.concurrency"),
    *("sampler.slots", "sampler.chunk", "sampler.host_gib"),
    *("rollout.step_timeout", "rollout.episode_timeout", "rollout.max_faults"),
)
"""Settings that may differ when a run goes on: no episode changes by them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """What is played, and how.

    Attributes:
        env: The environment.
        split: `train`, `dev` or `test`.
        count: Tasks, taken evenly over the split; null takes all.
        sampler: Where turns are sampled.
        rollout: Limits and sampling.
        skip_form: How a turn without reasoning reads.
        in_flight: Most episodes at once; by default as many as the sampler serves at a time.
    """

    free: ClassVar[tuple[str, ...]] = FREE

    env: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    split: str = "test"
    count: int | None = 100
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    skip_form: SkipForm = "close"
    in_flight: int | None = None

    def __post_init__(self):
        if self.at_once < 1:
            raise ValueError(f"in_flight is {self.at_once}; it must be at least 1")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count is {self.count}; it must be at least 1, or null for all")

    @property
    def conversations(self) -> int:
        """Those of one episode that a sampler holds at a time."""
        return 1

    @property
    def at_once(self) -> int:
        """Most episodes at once."""
        if self.in_flight is not None:
            return self.in_flight
        if self.sampler.kind != "local":
            return self.sampler.concurrency
        # More conversations than slots would be moved in and out of the cache.
        return max(self.sampler.slots // self.conversations, 1)

    def deciding(self, model: str) -> dict[str, Any]:
        """What decides the episodes: all but what is free, and the content of the checkpoint."""
        given = dataclasses.asdict(self)
        for name in self.free:
            *path, last = name.split(".")
            place = given
            for key in path:
                place = place[key]
            del place[last]
        return {**given, "model_fingerprint": model_fingerprint(model)}

    def tasks(self) -> tuple[str, list[str]]:
        """The environment's name, and the tasks to play.

        Raises:
            ValueError: A setting is at fault, or a tool's schema is.
            EnvironmentFault: The environment failed.
        """
        env = self.env.maker()()
        try:
            tasks = env.tasks(self.split)
            try:
                checker_of(env.tools)
            except ValueError as error:
                # Otherwise every episode would end with this.
                raise ValueError(f"environment {env.name!r}: {error}") from None
            return env.name, spread(tasks, self.count)
        finally:
            env.close()


def spread(tasks: Sequence[str], count: int | None) -> list[str]:
    """`count` tasks at equal distances, the first one first; all if there are no more."""
    if count is None or count >= len(tasks):
        return list(tasks)
    return [tasks[n * len(tasks) // count] for n in range(count)]


def check_out(out: str) -> None:
    """Make the folder of a file of rollouts.

    Raises:
        ValueError: The name is not one of such a file, or the folder cannot be made.
    """
    if not out or Path(out).is_dir() or Path(out).suffix != ".jsonl":
        raise ValueError(f"out is {out!r}; it must name a file that ends in .jsonl")
    make_parents(Path(out).parent, out)


class Text(NamedTuple):
    """A model's text.

    Attributes:
        model: Its folder.
        renderer: Messages to ids.
        known: The tokenizer's length; ids from here on are never sampled.
    """

    model: str
    renderer: Renderer
    known: int


def text_of(model: str, skip_form: SkipForm) -> Text:
    """Read a model's tokenizer and family.

    Raises:
        ValueError: The folder is of no known family.
        OSError: It cannot be read.
    """
    from race_jax.models import load_config

    tokenizer = load_tokenizer(model)
    family = family_of(load_config(model).model_type)
    return Text(model, renderer_for(tokenizer, family, skip_form=skip_form), len(tokenizer))


Wrap = Callable[[Sampler, Renderer], Sampler]
"""Stands between the episodes and the sampler."""


@contextlib.contextmanager
def playing(
    config: PlayConfig,
    text: Text,
    *,
    agent: AgentConfig | None = None,
    wrap: Wrap | None = None,
    keep: bool = False,
) -> Iterator[Runner]:
    """What runs the episodes; sampler and environments are closed at the end.

    Args:
        config: The settings.
        text: Of the model.
        agent: Which agent plays.
        wrap: Changes what is asked of the sampler, or what it says.
        keep: As of `Runner`.

    Raises:
        ValueError: A setting does not fit, or the checkpoint cannot be read.
        ConnectionError: The sampler's server is down.
    """
    sampler = make_sampler(config.sampler, text.model, config.rollout.max_tokens, text.known)
    host = make_host(config.env, config.rollout.step_timeout, config.at_once)
    try:
        yield Runner(
            wrap(sampler, text.renderer) if wrap else sampler,
            text.renderer,
            host,
            config.rollout,
            in_flight=config.at_once,
            agent=agent,
            keep=keep,
        )
    finally:
        host.close()
        sampler.close()


def play(
    runner: Runner,
    jobs: Iterable[Job],
    file: RolloutFile,
    stop: Stop,
    console: Console,
    *,
    planned: Callable[[], int],
    then: Callable[[Rollout], None] = lambda rollout: None,
) -> int:
    """Run episodes into a file, and show how far it is.

    Args:
        runner: Runs them.
        jobs: As of `Runner.run`.
        file: Where they go.
        stop: Ends the run.
        console: Where progress and faults are shown.
        planned: How many there will be, as far as is known.
        then: Called with each one.

    Returns:
        Exit code: 130 if it was stopped, 1 if an episode was spoilt or the run failed, else 0.
    """
    faulty = done = 0
    try:
        with Meter(console, "episodes", planned()) as meter:
            for rollout in runner.run(jobs, stop):
                file.append(rollout)
                done += 1
                faulty += rollout.faulty
                if rollout.faulty or rollout.tokens is None:
                    console.print(visible(f"{rollout.id}: {rollout.stop}: {rollout.error}"))
                then(rollout)
                meter.total = planned()
                meter.update(done, f"{done}/{meter.total}")
    except RunFailed as failure:
        console.print(visible(str(failure)))
        return 1
    if stop.is_set():
        console.print("stopped; the same command goes on from there")
        return 130
    return 1 if faulty else 0
