"""`race-jax report`: the page of LoGiC output or of rollouts, or the curves of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from race_jax.jsonl import same_file
from race_jax.metrics import NAMES, is_metrics, plot_metrics, read_metrics
from race_jax.report import (
    MAX_TRAJECTORIES,
    plot_sweep,
    read_records,
    summary_table,
    write_report,
)
from race_jax.report_rollouts import is_rollouts, write_rollouts
from race_jax.report_view import visible
from race_jax.rollout.measures import measures_table, stops_line
from race_jax.rollout.results import read_rollouts
from race_jax.tokenizer import load_tokenizer

SHOWN_FAULTS = 20
"""How many skipped lines the console names; the page lists more."""


def report(
    file: str,
    out: str = "report.html",
    title: str | None = None,
    max_trajectories: int = MAX_TRAJECTORIES,
    plot: str | None = None,
    tokenizer: str | None = None,
) -> int:
    """Show LoGiC output or rollouts as one self-contained page, or a run's curves as a picture.

    Args:
        file: A file that `race-jax logic` or `race-jax evaluate` wrote, or the `metrics.jsonl` of
            a run. Of metrics, the curves are drawn, into `plot`; the settings of the page are of
            no effect.
        out: The HTML page to write.
        title: Heading of the page; by default the kind of what it shows.
        max_trajectories: How many transcripts the page holds; totals always cover all.
        plot: A PNG to write: skip share and tokens saved against the threshold, or a run's curves
            (by default beside the metrics). Of no effect with rollouts.
        tokenizer: Model or tokenizer folder, for the log-prob of each token of rollouts.

    Returns:
        Exit code: 0, or 1 if lines of the file were skipped, or its trees could not be drawn.

    Raises:
        ValueError: The file is not there or holds no LoGiC output, or an output would replace it.
        OSError: A file cannot be read or written.
    """
    for target in (out, plot):
        if target is not None and same_file(file, target):
            raise ValueError(f"{target}: the output would replace the input; name another file")
    if is_metrics(file):
        return _curves(file, plot or str(Path(file).with_suffix(".png")))
    if is_rollouts(file):
        return _rollouts(file, out, title, max_trajectories, tokenizer)
    faults: list[str] = []
    records = read_records(file, faults=faults)
    write_report(
        records,
        out,
        title=title or "LoGiC report",
        source=Path(file).name,
        faults=faults,
        max_trajectories=max_trajectories,
    )
    if plot is not None:
        plot_sweep(records, plot)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    for fault in faults[:SHOWN_FAULTS]:
        errors.print(f"[yellow]skipped:[/] {_plain(fault)}")
    if len(faults) > SHOWN_FAULTS:
        errors.print(f"[yellow]skipped:[/] {len(faults) - SHOWN_FAULTS} more lines")
    console = Console(highlight=False)
    console.print(summary_table(records))
    size = Path(out).stat().st_size / 1e6
    skipped = f", {len(faults)} lines skipped" if faults else ""
    line = f"{_plain(out)}: {size:.1f} MB from {len(records)} records{skipped}"
    console.print(line, soft_wrap=True)
    return 1 if faults else 0


def _rollouts(file: str, out: str, title: str | None, most: int, tokenizer: str | None) -> int:
    """Write the page of rollouts, and tell what they come to."""
    codec = load_tokenizer(tokenizer) if tokenizer is not None else None
    rollouts = list(read_rollouts(file))
    faults: list[str] = []
    row = write_rollouts(
        rollouts,
        out,
        title=title or "Rollouts",
        source=Path(file).name,
        decode=(lambda token: str(codec.decode([token]))) if codec is not None else None,
        max_trajectories=most,
        faults=faults,
    )
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    for fault in faults:
        errors.print(f"[yellow]{_plain(file)}:[/] {_plain(fault)}")
    console = Console(highlight=False)
    console.print(measures_table([row]))
    console.print(_plain(stops_line(row)), soft_wrap=True)
    size = Path(out).stat().st_size / 1e6
    line = f"{_plain(out)}: {size:.1f} MB from {len(rollouts)} rollouts"
    console.print(line, soft_wrap=True)
    return 1 if faults else 0


def _curves(file: str, plot: str) -> int:
    """Draw the curves of a run, and show where each began and ended."""
    curves = read_metrics(file)
    plot_metrics(curves, plot)
    table = Table(title=_plain(file))
    for column in ("metric", "points", "first", "last"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in NAMES:
        if name in curves:
            values = curves[name].values
            table.add_row(name, str(len(values)), f"{values[0]:.6g}", f"{values[-1]:.6g}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{_plain(plot)}: curves over the steps", soft_wrap=True)
    return 0


def _plain(text: str) -> str:
    """Text that comes from outside, without markup or control characters."""
    return escape(str(visible(text)))
