"""`race-jax carl-criticality`: how much hangs on each state, against how uncertain the policy is.

Episodes are played, their states are visited again, and several actions are sampled in each, from
which the episode goes on greedily. So the spread of outcomes is due to that one action.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from race_jax import jsonl
from race_jax.carl.criticality import (
    Judgement,
    by_key,
    compare_by_entropy,
    comparison_line,
    forked_states,
    plot_criticality,
    resampled_states,
    resampling_jobs,
)
from race_jax.carl.tree import credit_trees, rebuild
from race_jax.chat import SkipForm, renderer_for
from race_jax.envs.base import EnvironmentFault
from race_jax.envs.factory import EnvironmentConfig
from race_jax.families import family_of
from race_jax.report_view import visible
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import RunFailed, Runner, Stop
from race_jax.rollout.results import Rollout, RolloutFile, read_rollouts
from race_jax.rollout.workers import make_host
from race_jax.tokenizer import load_tokenizer
from race_jax.train.evaluate_cli import spread
from race_jax.train.interrupt import stop_requests
from race_jax.train.progress import Meter
from race_jax.train.runtime import model_fingerprint
from race_jax.train.samplers import SamplerConfig, make_sampler

MOST_ROWS = 40
"""Rows of a table on the console."""
_DECIDE = ("env", "split", "actions", "states", "skip_form")


@dataclasses.dataclass(frozen=True)
class CriticalityConfig:
    """One analysis, of a model or of the trees of a finished step.

    Attributes:
        out: JSONL of the episodes that are played; its name gives those of the results, which end
            in `.states.jsonl`, `.summary.json` and `.png`.
        model: Folder of a Hugging Face checkpoint with its tokenizer; null with `rollouts`.
        rollouts: JSONL of a run of `race-jax carl`. Its forked states are judged by the values of
            their children, and nothing is played.
        env: The environment.
        split: `train`, `dev` or `test`.
        count: Tasks, taken evenly over the split; null takes all.
        actions: K, actions sampled in each state, at least 2.
        states: Most states of an episode, taken evenly; null takes all.
        sampler: Where turns are sampled.
        rollout: Limits and sampling.
        skip_form: How a turn without reasoning reads.
        in_flight: Most episodes at once; by default as many as the sampler serves at a time.
    """

    out: str
    model: str | None = None
    rollouts: str | None = None
    env: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    split: str = "test"
    count: int | None = 70
    actions: int = 8
    states: int | None = None
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    skip_form: SkipForm = "close"
    in_flight: int | None = None

    def __post_init__(self):
        if (self.model is None) == (self.rollouts is None):
            raise ValueError(
                f"model is {self.model} and rollouts is {self.rollouts}; give a model to play "
                "with, or the rollouts of a run of race-jax carl"
            )
        if self.actions < 2:
            raise ValueError(
                f"actions is {self.actions}; it must be at least 2, for one has no spread"
            )
        for name in ("count", "states", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or null")
        if self.model is not None and self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0; actions must be sampled, so it must be above 0"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the episodes."""
        assert self.model is not None
        given = dataclasses.asdict(self)
        kept = {name: given[name] for name in _DECIDE}
        for name in ("workers", "restart_after"):
            del kept["env"][name]
        kept["sampler"] = {k: given["sampler"][k] for k in ("kind", "dtype", "length")}
        free = ("step_timeout", "episode_timeout", "max_faults")
        kept["rollout"] = {k: v for k, v in given["rollout"].items() if k not in free}
        return {**kept, "criticality": True, "model_fingerprint": model_fingerprint(self.model)}


def carl_criticality(config: CriticalityConfig) -> int:
    """Resample the actions of states and tell criticality against action entropy.

    Stopped halfway, by a signal too, the same command plays only what is left.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not config.out or Path(config.out).is_dir() or Path(config.out).suffix != ".jsonl":
        raise ValueError(f"out is {config.out!r}; it must name a file that ends in .jsonl")
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    if config.rollouts is not None:
        _tell(config, _states_of_trees(config.rollouts), console)
        return 0
    try:
        code = _play(config, console)
    except EnvironmentFault as fault:
        raise ValueError(f"environment {config.env.name!r}: {fault}") from None
    if Path(config.out).exists():
        states = resampled_states(read_rollouts(config.out), config.actions)
        if states:
            _tell(config, states, console)
        else:
            console.print("no state has two outcomes yet, so there is nothing to tell")
            code = code or 1
    return code


def _states_of_trees(path: str) -> list[Judgement]:
    """The forked states of a file of trees."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file; race-jax carl writes rollouts/step_*")
    trees = [tree for tree in rebuild(read_rollouts(path)).values() if tree.edges]
    pairs = zip(trees, credit_trees(trees), strict=True)
    states = [state for tree, credit in pairs for state in forked_states(tree, credit)]
    if not states:
        raise ValueError(f"{path}: no state has two actions; name rollouts of race-jax carl")
    return states


def _play(config: CriticalityConfig, console: Console) -> int:
    """Play what the file lacks; returns the exit code."""
    from race_jax.models import load_config

    assert config.model is not None
    name, tasks = _tasks(config)
    tokenizer = load_tokenizer(config.model)
    family = family_of(load_config(config.model).model_type)
    renderer = renderer_for(tokenizer, family, skip_form=config.skip_form)
    at_once = config.in_flight or (
        config.sampler.slots if config.sampler.kind == "local" else config.sampler.concurrency
    )
    with RolloutFile(config.out, config.settings) as file, stop_requests() as stop:
        plan = _Plan(config, file, name, tasks)
        if not plan.jobs:
            console.print(f"all episodes are in {config.out}")
            return 0
        sampler = make_sampler(
            config.sampler, config.model, config.rollout.max_tokens, len(tokenizer)
        )
        host = make_host(config.env, config.rollout.step_timeout, at_once)
        try:
            runner = Runner(sampler, renderer, host, config.rollout, in_flight=at_once, keep=True)
            faulty = plan.run(runner, stop, console)
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


def _tasks(config: CriticalityConfig) -> tuple[str, list[str]]:
    env = config.env.maker()()
    try:
        return env.name, spread(env.tasks(config.split), config.count)
    finally:
        env.close()


class _Plan:
    """Which episodes are left, as those before them come in."""

    def __init__(
        self, config: CriticalityConfig, file: RolloutFile, name: str, tasks: Sequence[str]
    ):
        self.config, self.file = config, file
        self.jobs: deque[Job] = deque()
        self.planned = 0
        self._left: dict[str, int] = {}
        firsts = [Job(name, task, 0) for task in tasks]
        known: dict[str, Rollout] = {}
        if file.done:
            wanted = {job.id for job in firsts}
            known = {r.id: r for r in read_rollouts(config.out) if r.id in wanted}
        for job in firsts:
            if job.id not in file.done:
                self.jobs.append(job)
                self.planned += 1
        for rollout in known.values():
            self._visit(rollout)

    def _visit(self, origin: Rollout) -> None:
        """Add the episodes that leave an episode's states."""
        if origin.faulty or origin.tokens is None:
            return
        chosen = spread([str(n) for n in range(len(origin.notes))], self.config.states)
        jobs = resampling_jobs(origin, self.config.actions, map(int, chosen))
        left = [job for job in jobs if job.id not in self.file.done]
        self._left[origin.task] = len(left)
        self.planned += len(left)
        # Before further first episodes, while the cache of this one is at hand.
        self.jobs.extendleft(reversed(left))

    def run(self, runner: Runner, stop: Stop, console: Console) -> int:
        """Play; returns how many episodes were spoilt."""
        faulty = done = 0
        with Meter(console, "episodes", self.planned) as meter:
            for rollout in runner.run(self.jobs, stop):
                self.file.append(rollout)
                done += 1
                faulty += rollout.faulty
                if rollout.faulty or rollout.tokens is None:
                    console.print(visible(f"{rollout.id}: {rollout.stop}: {rollout.error}"))
                self._follow(rollout, runner)
                # Each first episode adds those that leave it.
                meter.total = self.planned
                meter.update(done, f"{done}/{self.planned}")
        return faulty

    def _follow(self, rollout: Rollout, runner: Runner) -> None:
        """What an episode leads to, and what the sampler can forget."""
        first = Job(rollout.env, rollout.task, 0).id
        if rollout.sample == 0:
            self._visit(rollout)
        else:
            self._left[rollout.task] -= 1
            runner.sampler.forget(rollout.id)
        if not self._left.get(rollout.task):
            runner.sampler.forget(first)


def _tell(config: CriticalityConfig, states: Sequence[Judgement], console: Console) -> None:
    """Write and show the results."""
    out = Path(config.out)
    with jsonl.replacing(out.with_suffix(".states.jsonl")) as file:
        for state in states:
            file.write(json.dumps(state._asdict()).encode() + b"\n")
    told = compare_by_entropy(states)
    turns = by_key(states, lambda s: s.turn + 1)
    tools = by_key(states, lambda s: s.tool or "no call")
    spreads = np.array([s.criticality for s in states])
    summary = {
        "states": len(states),
        "criticality": float(spreads.mean()),
        "entropy": float(np.mean([s.entropy for s in states])),
        "none": float(np.mean(spreads < 1e-6)),
        "above_0.4": float(np.mean(spreads > 0.4)),
        "median_entropy": told.median,
        "criticality_little_entropy": float(np.mean(told.low)),
        "criticality_much_entropy": float(np.mean(told.high)) if told.high else None,
        "cliffs_delta": told.delta,
        "brunner_munzel": told.statistic,
        "p": told.p,
        "by_turn": turns,
        "by_tool": tools,
    }
    with jsonl.replacing(out.with_suffix(".summary.json")) as file:
        file.write(json.dumps(summary, indent=1).encode())
    plot_criticality(states, out.with_suffix(".png"))
    console.print(_table("turn", turns))
    console.print(_table("tool", tools))
    console.print(
        f"{len(states)} states; criticality {spreads.mean():.3f} on average, none in "
        f"{np.mean(spreads < 1e-6):.0%}, above 0.4 in {np.mean(spreads > 0.4):.0%}"
    )
    if told.high:
        console.print(
            f"entropy above {told.median:.3g} nats: criticality {np.mean(told.high):.3f}, "
            f"else {np.mean(told.low):.3f}; {comparison_line(told)}"
        )
    console.print(visible(f"{out.with_suffix('.png')}: plots"))


def _table(name: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table()
    table.add_column(name)
    for column in ("states", "criticality", "entropy, nats"):
        table.add_column(column, justify="right")
    for key, row in list(rows.items())[:MOST_ROWS]:
        table.add_row(
            str(visible(key)),
            f"{row['states']:.0f}",
            f"{row['criticality']:.3f}",
            f"{row['entropy']:.3g}",
        )
    return table
