"""Numbers of a run: their names, the files they go to, and curves drawn from them."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from race_jax import jsonl

FILE = "metrics.jsonl"
TRACKERS = ("wandb", "trackio")
"""Packages that can show a run elsewhere; both take the same calls."""

NAMES: Mapping[str, str] = {
    "train/loss": "training loss, nats per trained token",
    "train/tokens": "tokens that carried loss in the step",
    "train/learning_rate": "learning rate of the step",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/skipped": "steps skipped so far for a loss or gradient that was not finite",
    "train/epoch": "passes over the data so far",
    "speed/tokens_per_second": "tokens per second, padding not counted",
    "speed/seconds_left": "time left, seconds",
    "memory/peak_bytes": "most memory held so far, bytes, on the device or of the process",
    "eval/loss": "held-out loss, nats per policy token",
    "eval/loss_reasoning": "held-out loss of reasoning tokens after the first of a turn",
    "eval/loss_decision": "held-out loss of the first token of a turn: close, or begin to reason",
    "eval/loss_action": "held-out loss of action tokens",
    "eval/close_on_skip": "probability of closing at once, mean over held-out SKIP turns",
    "eval/close_on_think": "probability of closing at once, mean over held-out THINK turns",
    "eval/turns_skip": "held-out SKIP turns behind that mean",
    "eval/turns_think": "held-out THINK turns behind that mean",
    "rl/reward": "mean reward of the step's trajectories, as the environment gave it",
    "rl/success": "share of the step's episodes that solved their task",
    "rl/reasoning_tokens": "reasoning tokens per episode",
    "rl/skip_ratio": "turns sampled without reasoning / turns",
    "rl/thinking_tokens": "reasoning tokens per turn that has any",
    "rl/turns": "turns per episode",
    "rl/cover_skips": "turns that LoGiC removed / turns, both of successful trajectories",
    "rl/closings_per_turn": "turns that the closure loss sums over / turns of the batch",
    "rl/close_nats": "-log-probability of closing at once, mean over those turns, nats",
    "rl/close_at_kept": "probability of closing at once, mean over turns that LoGiC kept",
    "rl/kept_turns": "turns behind that mean",
    "rl/uncertain": "decisions of LoGiC nearer to its threshold than the noise floor / decisions",
    "rl/noise_floor": "most that a likelihood moved with the arithmetic's order, nats per token",
    "rl/masked": "policy tokens that the cover masks / policy tokens",
    "rl/extra_tokens": "tokens forwarded for compressed contexts / tokens as sampled",
    "rl/filled": "share of the rows' places that hold tokens",
    "rl/ratio": "mean ratio of new to old probability over kept tokens, last update of the step",
    "rl/clipped": "share of kept tokens whose gradient clipping took, last update of the step",
    "rl/entropy": "-log-probability of sampled tokens, mean: an estimate of the entropy, nats",
    "rl/mismatch": "mean |log-probability by trainer - by sampler| of sampled tokens, nats",
    "rl/degenerate": "share of groups whose rewards are all equal",
    "rl/truncated": "turns that a limit cut off",
    "rl/unusable": "episodes that environment or sampler spoilt, or that have no turn",
    "rl/unscored": "successful trajectories that LoGiC could not score",
    "rl/closure_grad_norm": "norm of the closure loss's gradient, where it is clipped on its own",
    "rl/closure": "lambda of the step, after its warm-up and its guard",
    "carl/rollout_actions": "actions sampled for the step's trees, |D_roll|",
    "carl/update_actions": "actions with a sibling, which are trained, |D_upd|",
    "carl/rollout_ratio": "|D_roll| / actions of N whole episodes per task",
    "carl/update_ratio": "|D_upd| / actions of N whole episodes per task",
    "carl/entropy": "mean over states of the -log-probability per token of their actions, nats",
    "carl/criticality": "standard deviation of the values below a forked state, mean",
    "carl/diverged": "forks that were lost since the environment did not repeat itself / forks",
    "carl/flat": "share of trees whose advantages are all 0",
    "time/rollout": "seconds of sampling and environments",
    "time/logic": "seconds of LoGiC",
    "time/update": "seconds of rows, old log-probabilities and updates",
}
"""Every name that a run writes, and what it means."""


def check_trackers(trackers: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before any work.

    Raises:
        ValueError: One is.
    """
    for name in trackers:
        if name not in TRACKERS:
            raise ValueError(f"track names {name!r}; known are {', '.join(TRACKERS)}.")
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"track names {name}, which is not installed; `pip install {name}`, or leave it "
                f"out: {FILE} and TensorBoard's files are written anyway."
            )


class MetricWriter:
    """Writes numbers to `metrics.jsonl`, TensorBoard's files and trackers; a context manager.

    A run that goes on from a checkpoint may have written further than that: those lines are taken
    back first, so that no step stands there twice.

    Attributes:
        earlier: The records that an earlier part of the run has left.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int | None = None,
        trackers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        active: bool = True,
    ):
        """Open the files.

        Args:
            folder: The run's folder.
            step: The step that the run goes on from; None if it begins.
            trackers: From `TRACKERS`.
            settings: What trackers show as the run's configuration.
            active: Whether to write at all: of several processes, one does.

        Raises:
            ValueError: A tracker is unknown or not installed.
        """
        # Imported here: reading metrics needs no TensorBoard.
        from tensorboardX import SummaryWriter

        check_trackers(trackers)
        self._log = self._board = None
        self._runs = []
        self.earlier: list[dict[str, Any]] = []
        if not active:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        self._log = jsonl.JsonlLog(path)
        records = list(self._log.records())
        last = -1 if step is None else step
        kept = [record for record in records if record.get("step", 0) <= last]
        if len(kept) < len(records):
            self._log.close()
            with jsonl.replacing(path) as file:
                file.writelines(jsonl.dumps(record) for record in kept)
            self._log = jsonl.JsonlLog(path)
        self.earlier = kept
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1)
        for name in trackers:
            run = importlib.import_module(name)
            run.init(project="race-jax", name=folder.name, config=dict(settings or {}))
            self._runs.append(run)

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None and self._board is not None:
            self._log.close()
            self._board.close()
        for run in self._runs:
            run.finish()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step; what is not finite stands as null in the file.

        Raises:
            ValueError: A name is not in `NAMES`.
        """
        unknown = [name for name in values if name not in NAMES]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such metric; name it in metrics.NAMES.")
        if self._log is None or self._board is None:
            return
        plain = {name: float(value) for name, value in values.items()}
        finite = {k: v if math.isfinite(v) else None for k, v in plain.items()}
        self._log.append({"step": step, **finite})
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        self._board.flush()
        for run in self._runs:
            run.log(plain, step=step)


class Curve(NamedTuple):
    """One number over the run."""

    steps: list[int]
    values: list[float]


def is_metrics(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as `metrics.jsonl` does: a record with a step and known names.

    Raises:
        OSError: It cannot be read.
    """
    record = jsonl.first_object(Path(path))
    return "step" in record and any(name in NAMES for name in record)


def read_metrics(path: str | os.PathLike[str]) -> dict[str, Curve]:
    """The curves in a `metrics.jsonl`, by name; values that are null are left out.

    Raises:
        ValueError: The file holds no metrics.
        OSError: It cannot be read.
    """
    curves: dict[str, Curve] = {}
    for _, line in jsonl.lines(Path(path)):
        try:
            record = jsonl.loads(line or b"").value
        except ValueError:  # the torn end of a file that is still being written
            continue
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            continue
        for name, value in record.items():
            if name in NAMES and isinstance(value, int | float):
                curve = curves.setdefault(name, Curve([], []))
                curve.steps.append(record["step"])
                curve.values.append(float(value))
    if not curves:
        raise ValueError(f"{path} holds no metrics; name the {FILE} of a run's folder.")
    return curves


_PANELS: Sequence[tuple[str, Mapping[str, str]]] = (
    (
        "loss, nats per token",
        {"train/loss": "training", "eval/loss": "held out"},
    ),
    (
        "held-out loss by kind, nats per token",
        {
            "eval/loss_reasoning": "reasoning",
            "eval/loss_decision": "decision",
            "eval/loss_action": "action",
        },
    ),
    (
        "probability of closing at once",
        {"eval/close_on_skip": "on SKIP turns", "eval/close_on_think": "on THINK turns"},
    ),
    ("share of episodes", {"rl/success": "solved"}),
    ("reasoning tokens per episode", {"rl/reasoning_tokens": ""}),
    (
        "share of turns",
        {"rl/skip_ratio": "sampled without reasoning", "rl/cover_skips": "removed by LoGiC"},
    ),
    ("reasoning tokens per turn that has any", {"rl/thinking_tokens": ""}),
    ("-log-probability of closing, nats", {"rl/close_nats": "at removed turns"}),
    ("probability of closing, in RL", {"rl/close_at_kept": "at turns that LoGiC kept"}),
    ("lambda", {"rl/closure": ""}),
    ("entropy, nats per token", {"rl/entropy": "estimated from sampled tokens"}),
    (
        "share of tokens",
        {"rl/masked": "masked by the cover", "rl/clipped": "clipped, of those kept"},
    ),
    (
        "share of groups and of decisions",
        {
            "rl/degenerate": "groups, all rewards equal",
            "rl/uncertain": "LoGiC's decisions, uncertain",
        },
    ),
    (
        "seconds of a step",
        {"time/rollout": "rollout", "time/logic": "LoGiC", "time/update": "update"},
    ),
    ("norm of the gradient", {"train/grad_norm": ""}),
    ("learning rate", {"train/learning_rate": ""}),
    ("tokens per second", {"speed/tokens_per_second": ""}),
)
_FROM_ZERO = (
    "reasoning tokens per episode",
    "reasoning tokens per turn that has any",
    "lambda",
    "seconds of a step",
    "learning rate",
)
"""Panels whose curves are amounts: a fall by half should look like one."""
_COLOURS = ("#1b5e93", "#8f4a00", "#3a7d44")
_MARKED = 40  # curves with fewer points show them


def plot_metrics(curves: Mapping[str, Curve], path: str | os.PathLike[str]) -> None:
    """Draw a run's curves over its steps, as a PNG; panels without numbers are left out.

    Args:
        curves: From `read_metrics`.
        path: The image to write.

    Raises:
        ValueError: None of the curves has a panel.
        OSError: The file cannot be written.
    """
    # A figure of its own, not pyplot's: no global state, no display, no import cost elsewhere.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [(title, names) for title, names in _PANELS if any(name in curves for name in names)]
    if not panels:
        raise ValueError("there are no curves to plot; the run has not written any yet.")
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(9, 2.8 * rows), dpi=130, layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, names) in zip(grid, panels, strict=False):
        for (name, label), colour in zip(names.items(), _COLOURS, strict=False):
            if name in curves:
                curve = curves[name]
                marker = "o" if len(curve.steps) < _MARKED else None
                axes.plot(*curve, color=colour, label=label, marker=marker, markersize=3)
        if title.startswith(("probability", "share")):
            axes.set_ylim(-0.02, 1.02)
        elif title in _FROM_ZERO:
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax or 1)
        axes.set(title=title, xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(True, color="#d8dde2", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if any(names.values()):
            axes.legend(frameon=False, loc="best")
    with jsonl.replacing(Path(path)) as image:
        figure.savefig(image, format="png")
