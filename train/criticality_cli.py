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
from typing import ClassVar

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
from race_jax.envs.base import EnvironmentFault
from race_jax.report_view import visible
from race_jax.rollout.jobs import Job
from race_jax.rollout.loop import Runner
from race_jax.rollout.results import Rollout, RolloutFile, read_rollouts
from race_jax.train.interrupt import stop_requests
from race_jax.train.playing import FREE, PlayConfig, check_out, play, playing, spread, text_of

MOST_ROWS = 40
"""Rows of a table on the console."""


@dataclasses.dataclass(frozen=True)
class CriticalityConfig(PlayConfig):
    """One analysis, of a model or of the trees of a finished step.

    Attributes:
        out: JSONL of the episodes that are played; its name gives those of the results, which end
            in `.states.jsonl`, `.summary.json` and `.png`.
        model: Folder of a Hugging Face checkpoint with its tokenizer; null with `rollouts`.
        rollouts: JSONL of a run of `race-jax carl`. Its forked states are judged by the values of
            their children, and nothing is played.
        count: Tasks, taken evenly over the split; null takes all.
        actions: K, actions sampled in each state, at least 2.
        states: Most states of an episode, taken evenly; null takes all.
    """

    free: ClassVar[tuple[str, ...]] = (*FREE, "rollouts")

    out: str
    model: str | None = None
    rollouts: str | None = None
    actions: int = 8
    states: int | None = None
    count: int | None = dataclasses.field(default=70, kw_only=True)

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
        if self.states is not None and self.states < 1:
            raise ValueError(f"states is {self.states}; it must be at least 1, or null for all")
        super().__post_init__()
        if self.model is not None and self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0; actions must be sampled, so it must be above 0"
            )


def carl_criticality(config: CriticalityConfig) -> int:
    """Resample the actions of states and tell criticality against action entropy.

    Stopped halfway, by a signal too, the same command plays only what is left.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    check_out(config.out)
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
    rollouts = list(read_rollouts(path))
    try:
        trees = [tree for tree in rebuild(rollouts).values() if tree.edges]
        pairs = zip(trees, credit_trees(trees), strict=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    states = [state for tree, credit in pairs for state in forked_states(tree, credit)]
    if not states:
        raise ValueError(f"{path}: no state has two actions; name rollouts of race-jax carl")
    return states


def _play(config: CriticalityConfig, console: Console) -> int:
    """Play what the file lacks; returns the exit code."""
    assert config.model is not None
    text = text_of(config.model, config.skip_form)
    name, tasks = config.tasks()
    with RolloutFile(config.out, config.deciding(config.model)) as file, stop_requests() as stop:
        plan = _Plan(config, file, name, tasks)
        if not plan.jobs:
            console.print(f"all episodes are in {config.out}")
            return 0
        with playing(config, text, keep=True) as runner:
            return play(
                runner,
                plan.jobs,
                file,
                stop,
                console,
                planned=lambda: plan.planned,
                then=lambda rollout: plan.follow(rollout, runner),
            )


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

    def follow(self, rollout: Rollout, runner: Runner) -> None:
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
