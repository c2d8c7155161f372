"""What is told of evaluated episodes: success, reasoning, turns, and why episodes ended."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from race_jax import jsonl
from race_jax.rollout.results import Rollout


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    r"""Wilson's interval of a probability, which holds near 0 and 1 and for few tries too.

    $$\frac{\hat p + z^2/2n \pm z\sqrt{\hat p(1-\hat p)/n + z^2/4n^2}}{1 + z^2/n}$$

    Args:
        successes: From 0 to `count`.
        count: Independent tries; without any, the interval is (0, 1).
        z: Quantile of the normal distribution; 1.96 gives 95 %.

    Returns:
        The least and the greatest probability.
    """
    if not count:
        return 0.0, 1.0
    rate, square = successes / count, z * z / count
    middle = rate + square / 2
    spread = math.sqrt(square * (rate * (1 - rate) + square / 4))
    low, high = (middle - spread) / (1 + square), (middle + spread) / (1 + square)
    # At the ends rounding leaves traces.
    return (0.0 if successes == 0 else low), (1.0 if successes == count else high)


@dataclasses.dataclass(frozen=True)
class Measures:
    """Means over episodes, those that were spoilt included: they count as not solved.

    Attributes:
        name: Of what was evaluated.
        episodes: How many.
        tasks: Distinct tasks among them.
        successes: Episodes that solved their task.
        interval: 95 % interval of the success rate, taking episodes as independent.
        reward: Mean reward.
        reasoning_tokens: Mean of the reasoning tokens of an episode, its closings included.
        skip_ratio: Turns without reasoning / turns; 0 without turns.
        thinking_tokens: Reasoning tokens / turns with reasoning; 0 without any.
        turns: Mean number of turns.
        sampled_tokens: Mean number of sampled tokens, drafts included.
        invalid: Mean number of calls or turns that could not be carried out.
        truncated: Turns that a limit cut off, in all.
        stops: How many episodes ended for each reason.
    """

    name: str
    episodes: int
    tasks: int
    successes: int
    interval: tuple[float, float]
    reward: float
    reasoning_tokens: float
    skip_ratio: float
    thinking_tokens: float
    turns: float
    sampled_tokens: float
    invalid: float
    truncated: int
    stops: Mapping[str, int]

    @property
    def success(self) -> float:
        """Share of episodes that solved their task; 0 without episodes."""
        return self.successes / self.episodes if self.episodes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {**dataclasses.asdict(self), "success": self.success}


def measure(rollouts: Iterable[Rollout], name: str = "") -> Measures:
    """Measure episodes.

    Args:
        rollouts: The episodes; only their notes are read, one after the other.
        name: What to call them.
    """
    tasks: set[tuple[str, str]] = set()
    stops: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    reward = 0.0
    for rollout in rollouts:
        tasks.add((rollout.env, rollout.task))
        stops[rollout.stop] += 1
        reward += rollout.reward
        sums["episodes"] += 1
        sums["successes"] += rollout.success
        for note in rollout.all_notes:
            sums["turns"] += 1
            sums["thinking"] += note.reasoning_tokens > 0
            sums["reasoning"] += note.reasoning_tokens
            sums["sampled"] += len(note.logprobs) + note.drafted
            sums["invalid"] += len(note.errors)
            sums["truncated"] += note.truncated
    episodes = max(sums["episodes"], 1)
    return Measures(
        name=name,
        episodes=sums["episodes"],
        tasks=len(tasks),
        successes=sums["successes"],
        interval=wilson(sums["successes"], sums["episodes"]),
        reward=reward / episodes,
        reasoning_tokens=sums["reasoning"] / episodes,
        skip_ratio=(sums["turns"] - sums["thinking"]) / max(sums["turns"], 1),
        thinking_tokens=sums["reasoning"] / max(sums["thinking"], 1),
        turns=sums["turns"] / episodes,
        sampled_tokens=sums["sampled"] / episodes,
        invalid=sums["invalid"] / episodes,
        truncated=sums["truncated"],
        stops=dict(stops.most_common()),
    )


def by_kind(rollouts: Iterable[Rollout]) -> list[Measures]:
    """Measures of each kind of task: what stands before the last `/` of a task's name.

    Returns:
        One for each kind, in the order of their names; none where names have no `/`.
    """
    kinds: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        kind, slash, _ = rollout.task.rpartition("/")
        if slash:
            # Ids and messages are of no use here, and may not fit into memory together.
            light = dataclasses.replace(
                rollout, messages=(), tools=(), tokens=None, notes=rollout.all_notes, parts=()
            )
            kinds.setdefault(kind, []).append(light)
    return [measure(kinds[kind], kind) for kind in sorted(kinds)]


_COLUMNS = ("n", "success", "95 %", "reward", "reasoning", "skip", "a think", "turns")


def measures_table(rows: Sequence[Measures], title: str = "") -> Table:
    """Measures side by side, one row each."""
    caption = "reasoning, turns: per episode; a think: reasoning tokens per turn that has any"
    table = Table(title=title or None, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=9)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row.interval
        table.add_row(
            Text(row.name),
            str(row.episodes),
            f"{100 * row.success:.1f} %",
            f"{100 * low:.1f}-{100 * high:.1f}",
            f"{row.reward:.3f}",
            f"{row.reasoning_tokens:,.0f}",
            f"{100 * row.skip_ratio:.1f} %",
            f"{row.thinking_tokens:,.0f}",
            f"{row.turns:.1f}",
        )
    return table


def stops_line(row: Measures) -> str:
    """Why episodes ended, and what went wrong in them, in one line."""
    stops = ", ".join(f"{reason} {count}" for reason, count in row.stops.items())
    invalid = f"; {row.invalid:.2f} invalid calls per episode" if row.invalid else ""
    cut = f"; {row.truncated} turns cut off" if row.truncated else ""
    return f"{row.name}: {stops or 'no episodes'}{invalid}{cut}"


def plot_measures(rows: Sequence[Measures], path: str | Path) -> None:
    """Draw success against reasoning tokens, one named point with its 95 % interval each.

    Args:
        rows: At least one.
        path: The PNG to write.

    Raises:
        ValueError: There are no rows.
        OSError: The file cannot be written.
    """
    # A figure of its own, not pyplot's: no global state, no display.
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("there are no measures to plot")
    figure = Figure(figsize=(6.4, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    width = 1.3 * max(row.reasoning_tokens for row in rows) or 1.0
    for row, lift in zip(rows, _label_lifts(rows, width), strict=True):
        x, y = row.reasoning_tokens, 100 * row.success
        low, high = (100 * bound for bound in row.interval)
        # At 0 and at 100 % rounding could make a length negative.
        spans = [[max(y - low, 0.0)], [max(high - y, 0.0)]]
        axes.errorbar([x], [y], yerr=spans, fmt="o", capsize=3, color="#1b5e93")
        axes.annotate(
            row.name,
            (x, y),
            textcoords="offset points",
            xytext=(7, 5 + 9 * lift),
            fontsize=8,
            parse_math=False,  # a file's name may hold dollars
        )
    axes.set(xlabel="reasoning tokens per episode", ylabel="success, %", ylim=(-3, 103))
    # Room for the names, which stand to the right of their points, and for points at 0.
    axes.set_xlim(-0.02 * width, width)
    axes.grid(True, color="#d8dde2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    with jsonl.replacing(path) as image:
        figure.savefig(image, format="png")


def _label_lifts(rows: Sequence[Measures], width: float) -> list[int]:
    """By how many lines each name is raised, so that names of points close together can be read.

    Args:
        rows: One point each.
        width: Of the x axis.
    """
    placed: list[tuple[float, float]] = []
    lifts = []
    for row in rows:
        x, y, lift = row.reasoning_tokens / width, row.success, 0
        # A name takes about a quarter of the width and a thirtieth of the height.
        while any(abs(x - u) < 0.25 and abs(y + lift / 30 - v) < 0.03 for u, v in placed):
            lift += 1
        placed.append((x, y + lift / 30))
        lifts.append(lift)
    return lifts
