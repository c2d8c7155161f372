"""`race-jax evaluate`: tasks played and measured; `race-jax compare`: several results together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from race_jax import jsonl
from race_jax.envs.base import EnvironmentFault
from race_jax.report_view import visible
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.jobs import Job
from race_jax.rollout.measures import by_kind, measure, measures_table, plot_measures, stops_line
from race_jax.rollout.results import Rollout, RolloutFile, read_rollouts
from race_jax.train.interrupt import stop_requests
from race_jax.train.playing import FREE, PlayConfig, Wrap, check_out, play, playing, text_of

MOST_KINDS = 40
"""Kinds of tasks that get a row of their own in the table."""


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(PlayConfig):
    """One evaluation. Everything that decides its result stands here and in `PlayConfig`.

    Attributes:
        model: Folder of a Hugging Face checkpoint with its tokenizer. Of a server's model only the
            tokenizer and `config.json` are needed.
        out: JSONL of the rollouts. Beside it, `.settings.json` holds the resolved settings and
            `.summary.json` the measures.
        samples: Episodes per task.
        agent: Which agent plays around the model.
    """

    free: ClassVar[tuple[str, ...]] = (*FREE, "samples")

    model: str
    out: str
    samples: int = 1
    agent: AgentConfig = dataclasses.field(default_factory=AgentConfig)

    def __post_init__(self):
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; it must be at least 1")
        super().__post_init__()

    @property
    def conversations(self) -> int:
        """Those of one episode that a sampler holds at a time; drafts are one more."""
        return 2 if self.agent.kind == "dart" else 1

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the episodes."""
        return self.deciding(self.model)


def evaluate(config: EvaluateConfig) -> int:
    """Play tasks with a model and tell success rate, reasoning and turns.

    Stopped halfway, by a signal too, the same command plays only what is left.
    """
    return evaluate_as(config)


def evaluate_as(
    config: EvaluateConfig, wrap: Wrap | None = None, method: Mapping[str, Any] | None = None
) -> int:
    """`evaluate`, with something between the episodes and the sampler.

    Args:
        config: The evaluation.
        wrap: What.
        method: All that decides what that does; goes with the settings.

    Returns:
        Exit code as of `play`.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    check_out(config.out)
    try:
        code = _play(config, wrap, method or {}, console)
    except EnvironmentFault as fault:
        raise ValueError(f"environment {config.env.name!r}: {fault}") from None
    if Path(config.out).exists():
        _tell(config, console)
    return code


def _play(
    config: EvaluateConfig, wrap: Wrap | None, method: Mapping[str, Any], console: Console
) -> int:
    """Run the episodes that the file lacks; returns the exit code."""
    text = text_of(config.model, config.skip_form)
    name, tasks = config.tasks()
    jobs = [Job(name, task, sample) for task in tasks for sample in range(config.samples)]
    with RolloutFile(config.out, {**config.settings, **method}) as file, stop_requests() as stop:
        left = [job for job in jobs if job.id not in file.done]
        console.print(f"{len(jobs)} episodes; {len(jobs) - len(left)} already in {config.out}")
        if not left:
            return 0
        with playing(config, text, agent=config.agent, wrap=wrap) as runner:
            # Only settings under which a run can begin replace those of the run before.
            with jsonl.replacing(_beside(config.out, "settings")) as settings:
                settings.write(json.dumps(dataclasses.asdict(config), indent=1).encode())
            return play(runner, left, file, stop, console, planned=lambda: len(left))


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
        ValueError: A file holds something else, or nothing.
        OSError: A file cannot be read or written.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if plot is not None and any(jsonl.same_file(plot, path) for path in results):
        raise ValueError(f"--plot {plot} would replace a result; name another file")
    names = _short_names(results)
    rows = [measure(_rollouts(p), name) for p, name in zip(results, names, strict=True)]
    for path, row in zip(results, rows, strict=True):
        if not row.episodes:
            raise ValueError(f"{path}: it holds no episode yet; race-jax evaluate writes them")
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
