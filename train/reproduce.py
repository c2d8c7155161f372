"""`race-jax reproduce`: every arm of the paper's comparison in the embedded world, over seeds.

Each seed has a workspace of its own, and each arm, each point of the threshold curve and each
evaluation is a stage of it, so a run that was killed goes on with what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from race_jax import jsonl
from race_jax.train import story
from race_jax.train.progress import duration
from race_jax.train.reproduce_arms import (
    Arm,
    ReproduceConfig,
    evaluate,
    make,
    supervised,
    threshold_folder,
)
from race_jax.train.reproduce_forced import FORCED
from race_jax.train.reproduce_results import Found, collect, show, write_results
from race_jax.train.runtime import make_folder
from race_jax.train.story import COVERS, HELD_OUT, MODEL, TRAIN
from race_jax.train.workspace import Workspace

NOTES = "stages.json"
TRAINING, SHORT, RL = 8.0, 1.0, 3.0
"""Rough shares of the time that a training from scratch, an evaluation or a short supervised
training, and RL take. They only serve to tell the time left."""


class Cell(NamedTuple):
    """A piece of work of one seed.

    Attributes:
        name: Told.
        weight: Rough share of the time.
        work: Does it, in the seed's workspace.
        needed: Whether nothing of the seed can go on without it.
    """

    name: str
    weight: float
    work: Callable[[Workspace], None]
    needed: bool = False


def reproduce(config: ReproduceConfig) -> int:
    """Run all arms of RACE in the embedded world over several seeds, and put them into one table.

    Stopped halfway, the same command goes on with what is missing.

    Args:
        config: The run.

    Returns:
        Exit code: 0, or 1 if an arm of a seed failed; the tables then lack that one.

    Raises:
        ValueError: A seed has no model or no covers, or the folder cannot be used.
        OSError: A file could not be read or written.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    folder = Path(config.out)
    _keep_settings(config, folder)
    plan = {seed: list(cells(config, seed)) for seed in config.seeds}
    total = sum(cell.weight for found in plan.values() for cell in found)
    count = sum(len(found) for found in plan.values())
    number, passed = 0, 0.0
    worked, seconds, code = 0.0, 0.0, 0
    for seed, found in plan.items():
        with open(_seed_folder(folder, seed) / "log.txt", "a", encoding="utf-8") as log:
            work = _open(folder, seed, Console(file=log, highlight=False, soft_wrap=True))
            for cell in found:
                number += 1
                left = duration(seconds / worked * (total - passed)) if worked else "-"
                console.print(f"[{number}/{count}] seed {seed}: {cell.name}; time left: {left}")
                begun = time.monotonic()
                try:
                    # What the stages print goes to the log; evaluations have their own consoles.
                    with contextlib.redirect_stdout(log):
                        cell.work(work)
                except (ValueError, FloatingPointError) as error:
                    if cell.needed:
                        raise
                    console.print(f"seed {seed}: {cell.name} failed: {error}")
                    code = 1
                taken = time.monotonic() - begun
                passed += cell.weight
                # What an earlier run did takes no time and tells nothing about the rest.
                if taken > 1:
                    worked, seconds = worked + cell.weight, seconds + taken
        # Whatever comes later, the seeds that are finished have their tables.
        done = config.seeds[: config.seeds.index(seed) + 1]
        found_so_far = results_of(dataclasses.replace(config, seeds=done))
        write_results(found_so_far, folder)
        show(found_so_far, console)
    console.print(f"{folder}: results.json, results.md and plots, over {len(plan)} seeds")
    return code


def results_of(config: ReproduceConfig) -> Found:
    """Everything that a finished run has found, read back from its folder."""
    folder = Path(config.out)
    return collect(config, {seed: _seed_folder(folder, seed) for seed in config.seeds})


def cells(config: ReproduceConfig, seed: int) -> Iterator[Cell]:
    """All work of a seed, in order."""

    def begin(work: Workspace) -> None:
        counts = (config.episodes, config.held_out)
        story.make_trajectories(work, "trajectories", seed, config.world, *counts)
        story.train_model(work, "training", seed, config.world, config.training)

    def logic(work: Workspace) -> None:
        code = story.find_covers(work, "LoGiC", ",".join(f"{e!r}" for e in config.epsilons))
        if code:
            raise ValueError(f"seed {seed}: LoGiC ended with {code}; log.txt says why")

    yield Cell("training from scratch", TRAINING, begin, needed=True)
    yield Cell("LoGiC", SHORT, logic, needed=True)
    for arm in config.chosen:
        yield Cell(arm.name, _weight(arm), lambda work, arm=arm: _arm(work, config, arm, seed))
    if config.arms is not None:
        return
    for which in FORCED:
        yield Cell(
            f"SFT, forced to close at {which} turns",
            SHORT,
            lambda work, which=which: evaluate(
                work, config, MODEL, f"evaluations/forced_{which}.jsonl", which
            ),
        )
    for epsilon in config.thresholds:
        yield Cell(
            f"RACE-SFT at epsilon {epsilon:g}",
            2 * SHORT,
            lambda work, epsilon=epsilon: _threshold(work, config, epsilon, seed),
        )


def _weight(arm: Arm) -> float:
    return SHORT + (RL if arm.start is not None else SHORT if arm.sft is not None else 0.0)


def _arm(work: Workspace, config: ReproduceConfig, arm: Arm, seed: int) -> None:
    make(work, config, arm, seed)
    evaluate(work, config, arm.model, arm.evaluation)


def _threshold(work: Workspace, config: ReproduceConfig, epsilon: float, seed: int) -> None:
    folder = threshold_folder(config, epsilon)
    supervised(work, folder, config, seed, "cover", epsilon)
    evaluate(work, config, f"{folder}/model", f"evaluations/{folder}.jsonl")


def _seed_folder(folder: Path, seed: int) -> Path:
    path = folder / f"seed_{seed}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _open(folder: Path, seed: int, console: Console) -> Workspace:
    guarded = (TRAIN, HELD_OUT, MODEL, COVERS)
    return Workspace(_seed_folder(folder, seed), console, notes=NOTES, guarded=guarded)


def _keep_settings(config: ReproduceConfig, folder: Path) -> None:
    """Note the settings; stages of other settings are done again one by one."""
    make_folder(folder)
    with jsonl.replacing(folder / "settings.json") as file:
        file.write(json.dumps(dataclasses.asdict(config), indent=1).encode())
