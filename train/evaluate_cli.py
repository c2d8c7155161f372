"""`race-jax evaluate`: tasks played and measured; `race-jax compare`: several results together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from race_jax import jsonl
from race_jax.chat import SkipForm, renderer_for
from race_jax.envs.base import EnvironmentFault
from race_jax.envs.factory import EnvironmentConfig
from race_jax.families import family_of
from race_jax.report_view import visible
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.calls import checker_of
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import RunFailed, Runner
from race_jax.rollout.measures import by_kind, measure, measures_table, plot_measures, stops_line
from race_jax.rollout.results import Rollout, RolloutFile, read_rollouts
from race_jax.rollout.workers import make_host
from race_jax.tokenizer import load_tokenizer
from race_jax.train.interrupt import stop_requests
from race_jax.train.progress import Meter
from race_jax.train.runtime import model_fingerprint
from race_jax.train.samplers import SamplerConfig, make_sampler

MOST_KINDS = 40
"""Kinds of tasks that get a row of their own in the table."""
FREE = (
    *("out", "in_flight", "env.workers", "env.restart_after", "sampler.slots"),
    *("sampler.address", "sampler.timeout", "sampler.concurrency", "sampler.chunk"),
    *("rollout.step_timeout", "rollout.episode_timeout", "rollout.max_faults"),
    *("count", "samples", "model"),
)
"""Settings that may differ when a run goes on: no episode changes by them."""


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """One evaluation. Everything that decides its result stands here.

    Attributes:
        model: Folder of a Hugging Face checkpoint with its tokenizer. Of a server's model only the
            tokenizer and `config.json` are needed.
        out: JSONL of the rollouts. Beside it, `.settings.json` holds the resolved settings and
            `.summary.json` the measures.
        env: The environment.
        split: `train`, `dev` or `test`.
        count: Tasks, taken evenly over the split; null takes all.
        samples: Episodes per task.
        sampler: Where turns are sampled.
        rollout: Limits and sampling.
        agent: Which agent plays around the model.
        skip_form: How a turn without reasoning reads.
        in_flight: Most episodes at once; by default as many as the sampler serves at a time.
    """

    model: str
    out: str
    env: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    split: str = "test"
    count: int | None = 100
    samples: int = 1
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)
    skip_form: SkipForm = "close"
    in_flight: int | None = None

    def __post_init__(self):
        for name, value in (("samples", self.samples), ("in_flight", self.at_once)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count is {self.count}; it must be at least 1, or null for all")

    @property
    def at_once(self) -> int:
        """Most episodes at once."""
        if self.in_flight is not None:
            return self.in_flight
        if self.sampler.kind != "local":
            return self.sampler.concurrency
        # More conversations than slots would be moved in and out of the cache; drafts are one more.
        return max(self.sampler.slots // (2 if self.agent.kind == "dart" else 1), 1)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the episodes: all but what is free, and the checkpoint's content."""
        given = dataclasses.asdict(self)
        for name in FREE:
            *path, last = name.split(".")
            place = given
            for key in path:
                place = place[key]
            del place[last]
        return {**given, "model_fingerprint": model_fingerprint(self.model)}


def evaluate(config: EvaluateConfig) -> int:
    """Play tasks with a model and tell success rate, reasoning and turns.

    Stopped halfway, by a signal too, the same command plays only what is left.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    _check_out(config.out)
    try:
        code = _play(config, console)
    except EnvironmentFault as fault:
        raise ValueError(f"environment {config.env.name!r}: {fault}") from None
    if Path(config.out).exists():
        _tell(config, console)
    return code


def _check_out(out: str) -> None:
    if not out or Path(out).is_dir() or Path(out).suffix != ".jsonl":
        raise ValueError(f"out is {out!r}; it must name a file that ends in .jsonl")
    Path(out).parent.mkdir(parents=True, exist_ok=True)


def _play(config: EvaluateConfig, console: Console) -> int:
    """Run the episodes that the file lacks; returns the exit code."""
    from race_jax.models import load_config

    tokenizer = load_tokenizer(config.model)
    family = family_of(load_config(config.model).model_type)
    renderer = renderer_for(tokenizer, family, skip_form=config.skip_form)
    jobs = list(_jobs(config))
    with RolloutFile(config.out, config.settings) as file, stop_requests() as stop:
        left = [job for job in jobs if job.id not in file.done]
        console.print(f"{len(jobs)} episodes; {len(jobs) - len(left)} already in {config.out}")
        if not left:
            return 0
        sampler = make_sampler(
            config.sampler, config.model, config.rollout.max_tokens, len(tokenizer)
        )
        host = make_host(config.env, config.rollout.step_timeout, config.at_once)
        # Only settings under which a run can begin replace those of the run before.
        with jsonl.replacing(_beside(config.out, "settings")) as settings:
            settings.write(json.dumps(dataclasses.asdict(config), indent=1).encode())
        faulty = done = 0
        try:
            runner = Runner(
                sampler,
                renderer,
                host,
                config.rollout,
                in_flight=config.at_once,
                agent=config.agent,
            )
            with Meter(console, "episodes", len(left)) as meter:
                for rollout in runner.run(left, stop):
                    file.append(rollout)
                    done += 1
                    faulty += rollout.faulty
                    if rollout.faulty or rollout.tokens is None:
                        console.print(visible(f"{rollout.id}: {rollout.stop}: {rollout.error}"))
                    meter.update(done, f"{done}/{len(left)}")
        except RunFailed as failure:
            console.print(visible(str(failure)))
            return 1
        finally:
            host.close()
            sampler.close()
        if stop.is_set():
            console.print("stopped; the same command goes on from there")
            return 130
    return 1 if faulty else 0


def _jobs(config: EvaluateConfig) -> Iterator[Job]:
    env = config.env.maker()()
    try:
        name, tasks = env.name, env.tasks(config.split)
        try:
            checker_of(env.tools)
        except ValueError as error:
            # Otherwise every episode would end with this.
            raise ValueError(f"environment {name!r}: {error}") from None
    finally:
        env.close()
    for task in spread(tasks, config.count):
        for sample in range(config.samples):
            yield Job(name, task, sample)


def spread(tasks: Sequence[str], count: int | None) -> list[str]:
    """`count` tasks at equal distances, the first one first; all if there are no more."""
    if count is None or count >= len(tasks):
        return list(tasks)
    return [tasks[n * len(tasks) // count] for n in range(count)]


def _beside(out: str, what: str) -> Path:
    return Path(out).with_suffix(f".{what}.json")


def _tell(config: EvaluateConfig, console: Console) -> None:
    """Measure all that the file holds, and write and show it."""
    total = measure(read_rollouts(config.out), Path(config.out).stem)
    kinds = by_kind(read_rollouts(config.out))
    summary = total.as_dict() | {"kinds": [kind.as_dict() for kind in kinds]}
    with jsonl.replacing(_beside(config.out, "summary")) as file:
        file.write(json.dumps(summary, indent=1).encode())
    console.print(measures_table([*kinds[:MOST_KINDS], total]))
    console.print(visible(stops_line(total)))
    if len(kinds) > MOST_KINDS:
        console.print(
            f"... {len(kinds) - MOST_KINDS} kinds more in {_beside(config.out, 'summary')}"
        )


def compare(results: list[str], plot: str | None = None) -> int:
    """Put the results of several evaluations into one table, and into one picture.

    Args:
        results: Files that `race-jax evaluate` wrote.
        plot: A PNG to write: success against reasoning tokens.

    Returns:
        Exit code 0.

    Raises:
        ValueError: A file holds something else.
        OSError: A file cannot be read or written.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if plot is not None and any(jsonl.same_file(plot, path) for path in results):
        raise ValueError(f"--plot {plot} would replace a result; name another file")
    names = _short_names(results)
    rows = [measure(_rollouts(p), name) for p, name in zip(results, names, strict=True)]
    console.print(measures_table(rows))
    for row in rows:
        console.print(visible(stops_line(row)))
    tasks = {row.tasks for row in rows}
    if len(tasks) > 1:
        console.print("warning: the results are of different numbers of tasks")
    if plot is not None:
        plot_measures(rows, plot)
        console.print(visible(f"{plot}: success against reasoning tokens"))
    return 0


def _rollouts(path: str) -> Iterator[Rollout]:
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file; race-jax evaluate writes one")
    return read_rollouts(path)


def _short_names(paths: Sequence[str]) -> list[str]:
    """File names without ending, with their folder where two are the same."""
    stems = [Path(path).stem for path in paths]
    return [
        f"{Path(path).resolve().parent.name}/{stem}" if stems.count(stem) > 1 else stem
        for path, stem in zip(paths, stems, strict=True)
    ]
