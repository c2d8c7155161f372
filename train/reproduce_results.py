"""What `race-jax reproduce` has found: means and spreads, tables and plots."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from race_jax import jsonl
from race_jax.report import read_records
from race_jax.train.reproduce_arms import BENCHMARKS, Arm, ReproduceConfig, threshold_folder
from race_jax.train.reproduce_forced import FORCED
from race_jax.train.story import COVERS, HELD_OUT, trajectories
from race_jax.train.story_table import CoverCounts, Row, count_covers, read_row


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds, of those where there is a number.

    Attributes:
        mean: The mean; None without a number.
        deviation: Of single seeds, with n - 1; None for less than two, which have no spread.
    """

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Of a number per seed."""
        known = [value for value in values if value is not None]
        if not known:
            return cls(None, None)
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def text(self, scale: float = 1.0, digits: int = 1, unit: str = "") -> str:
        """`mean ± deviation`, or the mean alone where there is no spread."""
        if self.mean is None:
            return "-"
        mean = f"{scale * self.mean:.{digits}f}"
        if self.deviation is None:
            return f"{mean}{unit}"
        return f"{mean} ± {scale * self.deviation:.{digits}f}{unit}"


@dataclasses.dataclass(frozen=True)
class Line:
    """An evaluation over all seeds.

    Attributes:
        name: What was evaluated.
        rows: One per seed, but for seeds where it failed.
        paper: What the paper reports for the arm, per benchmark.
    """

    name: str
    rows: tuple[Row, ...]
    paper: tuple[tuple[float, int], ...] = ()

    @property
    def success(self) -> Spread:
        """Share of episodes that solved their task."""
        return self.over(lambda row: row.all.success)

    @property
    def tokens(self) -> Spread:
        """Reasoning tokens per episode."""
        return self.over(lambda row: row.all.reasoning_tokens)

    @property
    def tokens_solved(self) -> Spread:
        """The same of episodes that solved their task."""
        return self.over(lambda r: r.solved.reasoning_tokens if r.solved.episodes else None)

    @property
    def skipped(self) -> Spread:
        """Share of turns without reasoning."""
        return self.over(lambda row: row.all.skip_ratio)

    def over(self, number: Callable[[Row], float | None]) -> Spread:
        """A number of each seed, as mean and spread."""
        return Spread.of([number(row) for row in self.rows])


@dataclasses.dataclass(frozen=True)
class Found:
    """All results.

    Attributes:
        arms: The arms.
        forced: The SFT model with turns forced to go without reasoning, by which.
        thresholds: By threshold: cover SFT, and LoGiC's counts of each seed.
        seeds: The seeds.
    """

    arms: tuple[Line, ...]
    forced: tuple[Line, ...]
    thresholds: tuple[tuple[float, Line, tuple[CoverCounts, ...]], ...]
    seeds: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, single seeds included."""
        return {
            "seeds": list(self.seeds),
            "arms": [_line_dict(line) for line in self.arms],
            "forced": [_line_dict(line) for line in self.forced],
            "thresholds": [
                {
                    "epsilon": epsilon,
                    "line": _line_dict(line),
                    "logic": [
                        dataclasses.asdict(c) | {"recall": c.recall, "precision": c.precision}
                        for c in counts
                    ],
                }
                for epsilon, line, counts in self.thresholds
            ],
        }


def _line_dict(line: Line) -> dict[str, Any]:
    spreads: Mapping[str, Spread] = {
        "success": line.success,
        "tokens": line.tokens,
        "tokens_solved": line.tokens_solved,
        "skipped": line.skipped,
    }
    return {
        "name": line.name,
        **{name: dataclasses.asdict(spread) for name, spread in spreads.items()},
        "seeds": [row.as_dict() for row in line.rows],
        "paper": dict(zip(BENCHMARKS, line.paper, strict=False)),
    }


def collect(config: ReproduceConfig, folders: Mapping[int, Path]) -> Found:
    """Read all evaluations of a finished run.

    Args:
        config: The run.
        folders: Each seed's.
    """

    def line(name: str, evaluation: str, arm: Arm | None = None) -> Line:
        files = [folder / evaluation for folder in folders.values()]
        rows = tuple(read_row(name, file) for file in files if file.is_file())
        return Line(name, rows, arm.paper if arm else ())

    arms = tuple(line(arm.name, arm.evaluation, arm) for arm in config.chosen)
    if config.arms is not None:
        return Found(arms, (), (), config.seeds)
    counts = [_counts(folder) for folder in folders.values()]
    thresholds = []
    for epsilon in config.thresholds:
        evaluation = f"evaluations/{threshold_folder(config, epsilon)}.jsonl"
        logic = tuple(found[epsilon] for found in counts)
        thresholds.append((epsilon, line(f"epsilon {epsilon:g}", evaluation), logic))
    forced = tuple(
        line(f"forced empty at {which} turns", f"evaluations/forced_{which}.jsonl")
        for which in FORCED
    )
    return Found(arms, forced, tuple(thresholds), config.seeds)


def _counts(folder: Path) -> dict[float, CoverCounts]:
    records = read_records(str(folder / COVERS), faults=[])
    needed = {item.id: item.extra["needed"] for item in trajectories(str(folder / HELD_OUT))}
    return {found.epsilon: found for found in count_covers(records, needed)}


def write_results(found: Found, folder: Path) -> None:
    """Write `results.json`, `results.md` and the plots."""
    with jsonl.replacing(folder / "results.json") as file:
        file.write(json.dumps(found.as_dict(), indent=1).encode())
    with jsonl.replacing(folder / "results.md") as file:
        file.write(markdown(found).encode())
    plot_arms(found, folder / "results.png")
    if found.thresholds:
        plot_thresholds(found, folder / "thresholds.png")


def _over(found: Found) -> str:
    count = len(found.seeds)
    return "one seed" if count == 1 else f"mean ± standard deviation over {count} seeds"


def _cells(line: Line) -> list[str]:
    return [
        line.success.text(100),
        line.tokens.text(),
        line.tokens_solved.text(),
        line.skipped.text(100),
    ]


def _paper_cells(line: Line) -> list[str]:
    known = [f"{success:.1f} / {tokens:,}" for success, tokens in line.paper]
    return known or ["-"] * len(BENCHMARKS)


_HEAD = ("success %", "reasoning tokens", "of solved", "skipped turns %")


def markdown(found: Found) -> str:
    """The tables for a document."""

    def rule(columns: int) -> str:
        return "| --- |" + " ---: |" * columns

    paper = [f"paper: {name}" for name in BENCHMARKS]
    out = [
        f"{_over(found)}. Paper: success % / reasoning tokens of Qwen3.5-9B in other worlds.",
        "",
        f"| arm | {' | '.join((*_HEAD, *paper))} |",
        rule(len(_HEAD) + len(paper)),
        *(f"| {x.name} | {' | '.join(_cells(x) + _paper_cells(x))} |" for x in found.arms),
    ]
    if found.forced:
        out += [
            "",
            f"| SFT model | {' | '.join(_HEAD)} |",
            rule(len(_HEAD)),
            *(f"| {line.name} | {' | '.join(_cells(line))} |" for line in found.forced),
        ]
    if found.thresholds:
        out += [
            "",
            f"| epsilon | LoGiC's recall % | precision % | {' | '.join(_HEAD)} |",
            rule(len(_HEAD) + 2),
            *(
                f"| {epsilon:g} | {' | '.join([*_logic_cells(counts), *_cells(line)])} |"
                for epsilon, line, counts in found.thresholds
            ),
        ]
    return "\n".join(out) + "\n"


def _logic_cells(counts: Sequence[CoverCounts]) -> list[str]:
    return [
        Spread.of([count.recall for count in counts]).text(100),
        Spread.of([count.precision for count in counts]).text(100),
    ]


def show(found: Found, console: Console) -> None:
    """Print the tables."""
    seeds = _over(found)

    def table(title: str, columns: Sequence[str]) -> Table:
        made = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        made.add_column("")
        for column in columns:
            made.add_column(column, justify="right", no_wrap=True)
        return made

    arms = table(f"The arms in the embedded world: {seeds}", _HEAD)
    for line in (*found.arms, *found.forced):
        arms.add_row(Text(line.name), *_cells(line))
    console.print(arms)
    paper = table(
        "The paper's own: Qwen3.5-9B in other worlds, success % / reasoning tokens", BENCHMARKS
    )
    for line in found.arms:
        if line.paper:
            paper.add_row(Text(line.name), *_paper_cells(line))
    console.print(paper)
    if found.thresholds:
        curve = table(f"LoGiC's threshold: {seeds}", ("recall %", "precision %", *_HEAD))
        for epsilon, line, counts in found.thresholds:
            curve.add_row(f"{epsilon:g}", *_logic_cells(counts), *_cells(line))
        console.print(curve)


def plot_arms(found: Found, path: Path) -> None:
    """Draw success against reasoning tokens of all arms, with the spread over seeds, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    # What solves next to nothing says nothing about the price of success.
    lines = [line for line in found.arms if (line.success.mean or 0) > 0.02]
    left_out = [line.name for line in found.arms if line not in lines]
    for number, line in enumerate(lines):
        x, y = line.tokens, line.success
        axes.errorbar(
            [x.mean or 0],
            [100 * (y.mean or 0)],
            xerr=[x.deviation or 0],
            yerr=[100 * (y.deviation or 0)],
            fmt="osD^v*P"[number % 7],
            color=f"C{number % 10}",
            capsize=2,
            label=line.name,
        )
    note = f"\nbelow 2 %, not shown: {', '.join(left_out)}" if left_out else ""
    axes.set(
        xlabel=f"reasoning tokens per episode{note}",
        ylabel="success, %",
        title=f"Embedded world: {_over(found)}",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(-3, 103)
    axes.grid(True, color="#d8dde2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    with jsonl.replacing(path) as image:
        figure.savefig(image, format="png")


def plot_thresholds(found: Found, path: Path) -> None:
    """Draw cover SFT's success and reasoning tokens against LoGiC's threshold, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    other = axes.twinx()
    lines = [line for _, line, _ in found.thresholds]
    places = range(len(lines))
    handles = [
        axes.errorbar(
            places,
            [100 * (line.success.mean or 0) for line in lines],
            yerr=[100 * (line.success.deviation or 0) for line in lines],
            fmt="o-",
            color="#1b5e93",
            capsize=3,
            label="success",
        ),
        other.errorbar(
            places,
            [line.tokens.mean or 0 for line in lines],
            yerr=[line.tokens.deviation or 0 for line in lines],
            fmt="s--",
            color="#b3541e",
            capsize=3,
            label="reasoning tokens",
        ),
    ]
    axes.set_xticks(list(places), [f"{epsilon:g}" for epsilon, _, _ in found.thresholds])
    axes.set(xlabel="epsilon, nats per token", ylabel="success, %", ylim=(-3, 103))
    other.set_ylabel("reasoning tokens per episode")
    other.set_ylim(bottom=0)
    axes.grid(True, color="#d8dde2", linewidth=0.6)
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    with jsonl.replacing(path) as image:
        figure.savefig(image, format="png")
