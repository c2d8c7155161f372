"""`race-jax quickstart`: the whole way in minutes, without network, GPU or downloads.

Makes trajectories of a small text world, trains a tiny hybrid-thinking model on some of them from
scratch, runs LoGiC with it over others, and compares LoGiC's decisions with the turns that need
their reasoning by construction of the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from race_jax import jsonl
from race_jax.chat import renderer_for
from race_jax.envs.potion_text import words
from race_jax.envs.potions import PotionShopConfig, drill, oracle_trajectory
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.logic.records import THINK
from race_jax.models import Model, save_model
from race_jax.report import read_records, write_report
from race_jax.tokenizer import load_tokenizer
from race_jax.train.logic_cli import logic, parse_epsilons
from race_jax.train.progress import Meter, duration
from race_jax.train.runtime import enable_compilation_cache, model_fingerprint
from race_jax.train.tiny import TinyTraining, fresh_model, lessons, tiny_config, train
from race_jax.trajectories import read, write
from race_jax.types import TokenTrajectory, Trajectory

STAGES = "quickstart.json"
TRAIN, HELD_OUT, MODEL, COVERS, REPORT = (
    *("train.jsonl", "held_out.jsonl", "model", "covers.jsonl", "report.html"),
)
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SPLIT = 1_000_000_000
"""Seeds of held-out tasks start this far above those of training tasks."""


class Workspace:
    """The output folder, and which stages are finished in it under which settings."""

    def __init__(self, path: str, console: Console):
        """Open or make the folder.

        Raises:
            ValueError: The path is a file, or the folder holds files of the quickstart's names that
                no quickstart made.
        """
        self.path, self.console = Path(path), console
        self.notes = self.path / STAGES
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out {path} is a file; name a folder, new or of a quickstart")
        self.done: dict[str, str] = {}
        if self.notes.is_file():
            # Notes that cannot be read count for nothing: then every stage runs again.
            with contextlib.suppress(ValueError, TypeError):
                self.done = dict(json.loads(self.notes.read_text(encoding="utf-8")))
            return
        for name in (TRAIN, HELD_OUT, MODEL, COVERS, REPORT):
            if (self.path / name).exists():
                raise ValueError(
                    f"--out {path} holds {name}, which no quickstart made; name another folder"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        self._save()

    def __getitem__(self, name: str) -> str:
        """The path of a file or folder in the workspace."""
        return str(self.path / name)

    def forget(self) -> None:
        """Take every stage for unfinished."""
        self.done = {}
        self._save()

    def note(self, title: str, fingerprint: str) -> None:
        """Remember under which settings a stage was done."""
        self.done[title] = fingerprint
        self._save()

    def stage(
        self, title: str, settings: Mapping[str, Any], made: Sequence[str], work: Callable[[], None]
    ) -> None:
        """Do a stage, unless what it makes is there and was made under the same settings.

        Args:
            title: Says what the stage does; shown, and the name under which it is remembered.
            settings: All that decides the result, ready for JSON.
            made: Names of what the stage makes.
            work: Does it.
        """
        settings = {**settings, "race-jax": importlib.metadata.version("race-jax")}
        fingerprint = _digest(json.dumps(settings, sort_keys=True).encode())
        there = all((self.path / name).exists() for name in made)
        if there and self.done.get(title) == fingerprint:
            self.console.print(f"[bold]{title}[/]: done in an earlier run, kept")
            return
        if there and title in self.done:
            self.console.print(f"{title}: made under other settings before, done again")
        self.console.print(f"[bold]{title}[/] ...")
        begun = time.monotonic()
        self.done.pop(title, None)
        self._save()
        work()
        self.note(title, fingerprint)
        self.console.print(f"[bold]{title}[/]: {duration(time.monotonic() - begun)} min")

    def _save(self) -> None:
        with jsonl.replacing(self.notes) as file:
            file.write(json.dumps(self.done, indent=1).encode())


def quickstart(
    out: str = "quickstart",
    seed: int = 0,
    fresh: bool = False,
    episodes: int = 2000,
    held_out: int = 40,
    epsilon: str = "0.001,0.003,0.01,0.03,0.1,0.3",
    size: int = 5,
    drill_steps: int = 90,
    steps: int = 300,
) -> int:
    """Train a tiny model from scratch, run LoGiC with it, and write a report.

    Needs neither network nor GPU. Stopped halfway, it goes on with the first unfinished stage.

    Args:
        out: Folder for trajectories, model, LoGiC's output and the report.
        seed: Seed of tasks, model and training; equal seeds give equal results.
        fresh: Do every stage anew.
        episodes: Episodes to train on.
        held_out: Other episodes, for LoGiC to compress.
        epsilon: LoGiC's thresholds in nats per token, separated by commas.
        size: Potions, herbs, shelves and rooms in the world, at least 4 of each.
        drill_steps: Updates on look-up drills, which come first.
        steps: Updates on episodes. Fewer make a quicker and a worse model.

    Returns:
        Exit code: 0, or LoGiC's if that is another.

    Raises:
        ValueError: A setting is out of range, or `out` cannot be used.
    """
    parse_epsilons(epsilon)
    for name, value, low in (
        ("seed", seed, 0),
        ("episodes", episodes, 1),
        ("held-out", held_out, 1),
    ):
        if not low <= value <= SPLIT:
            raise ValueError(f"--{name} {value}: it must be from {low} to {SPLIT}")
    world, training = PotionShopConfig(size), TinyTraining(drill_steps, steps=steps)
    console = Console(highlight=False, soft_wrap=True)
    work = Workspace(out, console)
    if fresh:
        work.forget()
    drawn = {"seed": seed, "world": dataclasses.asdict(world)}

    def make_trajectories() -> None:
        for name, start, count in ((TRAIN, 0, episodes), (HELD_OUT, SPLIT, held_out)):
            first = 2 * SPLIT * seed + start
            write(work[name], (oracle_trajectory(first + i, world) for i in range(count)))

    work.stage(
        "1. trajectories",
        {**drawn, "episodes": episodes, "held_out": held_out},
        (TRAIN, HELD_OUT),
        make_trajectories,
    )
    work.stage(
        "2. training",
        {**drawn, "training": dataclasses.asdict(training), "data": _digest_of(work[TRAIN])},
        tuple(f"{MODEL}/{name}" for name in MODEL_FILES),
        lambda: _train(work, seed, world, training),
    )
    code = _compress(work, epsilon)
    records = read_records(work[COVERS], faults=[])
    needed = {item.id: item.extra["needed"] for item in _trajectories(work[HELD_OUT])}
    console.print(cover_table(records, needed))
    title = "Quickstart: a potion shop, and a model trained from scratch"
    write_report(records, work[REPORT], title=title, source=COVERS)
    console.print(_next_steps(work, epsilon), markup=False)
    return code


def _train(work: Workspace, seed: int, world: PotionShopConfig, training: TinyTraining) -> None:
    """Train a model on the workspace's episodes, and save it with its tokenizer."""
    enable_compilation_cache()
    tokenizer = word_tokenizer(words(world.size))
    renderer = renderer_for(tokenizer, "qwen3")
    episodes = [renderer.encode(item) for item in _trajectories(work[TRAIN])]
    drills = [
        drill(2 * SPLIT * seed + i, renderer, min(10, 2 * world.size), world)
        for i in range(training.drill_steps * training.drill_batch)
    ]
    model = fresh_model(tiny_config(len(tokenizer)), seed)
    model, loss = _round(work.console, "training", model, episodes, drills, training, seed)
    again = dataclasses.replace(training, drill_steps=0, steps=training.steps // 2)
    for number in range(1, training.rounds + 1):
        if loss <= training.enough or not again.steps:
            break
        work.console.print(
            f"the look-ups are not all found: {loss:.3f} nats a token, and {training.enough} would "
            f"be enough. {again.steps} more updates, round {number} of at most {training.rounds}"
        )
        lessons_seed = seed + number * SPLIT
        model, loss = _round(
            work.console, "more training", model, episodes, [], again, lessons_seed
        )
    work.console.print(f"loss at the end: {loss:.3f} nats a token")
    save_model(model, work[MODEL])
    tokenizer.save_pretrained(work[MODEL])
    load_tokenizer(work[MODEL])


def _round(
    console: Console,
    title: str,
    model: Model,
    episodes: Sequence[TokenTrajectory],
    drills: Sequence[TokenTrajectory],
    training: TinyTraining,
    seed: int,
) -> tuple[Model, float]:
    """Train once through the schedule; returns the model, and the mean loss of the last updates."""
    total = training.drill_steps + training.steps
    recent: deque[float] = deque(maxlen=20)

    with Meter(console, title, total) as meter:

        def show(step: int, loss: float) -> None:
            recent.append(loss)
            kind = "drills" if step <= training.drill_steps else "episodes"
            rate = step / max(meter.spent, 1e-9)
            mean = sum(recent) / len(recent)
            meter.update(step, f"step {step}/{total} ({kind}), loss {mean:.3f}, {rate:.1f} steps/s")

        model = train(model, lessons(episodes, drills, training, seed), training, show)
    return model, sum(recent) / len(recent)


def _compress(work: Workspace, epsilon: str) -> int:
    """Run LoGiC over the held-out episodes; a run that was cut short goes on."""
    title = "3. LoGiC"
    settings = (model_fingerprint(work[MODEL]), _digest_of(work[HELD_OUT]), parse_epsilons(epsilon))
    fingerprint = _digest(repr(settings).encode())
    if work.done.get(title) != fingerprint:
        (work.path / COVERS).unlink(missing_ok=True)
        work.note(title, fingerprint)
    work.console.print(f"[bold]{title}[/] ...")
    begun = time.monotonic()
    code = logic(work[MODEL], work[HELD_OUT], work[COVERS], epsilon)
    work.console.print(f"[bold]{title}[/]: {duration(time.monotonic() - begun)} min")
    return code


def cover_table(
    records: Sequence[Mapping[str, Any]], needed: Mapping[str, Sequence[bool]]
) -> Table:
    """Per threshold: what LoGiC saves, and how far its THINK turns are the needed ones.

    recall = needed turns kept / needed turns; precision = needed turns kept / turns kept; both over
    the turns that LoGiC tested, which leaves out every first turn.

    Args:
        records: LoGiC's output.
        needed: For each trajectory's id, whether each turn needs its reasoning.
    """
    table = Table(
        title="Against the turns that need their reasoning by construction",
        caption="recall: needed turns that are kept; precision: kept turns that are needed;\n"
        "both of the tested turns, so without each first one",
    )
    for column in ("epsilon", "turns skipped", "reasoning tokens saved", "recall", "precision"):
        table.add_column(column, justify="right")
    for epsilon in sorted({record["epsilon"] for record in records}):
        rows = [
            (turn, need)
            for record in records
            if record["epsilon"] == epsilon
            for turn, need in zip(record["turns"], needed[record["id"]], strict=True)
        ]
        tested = [(turn["decision"] == THINK, need) for turn, need in rows if turn["tested"]]
        before = sum(turn["reasoning_tokens"] for turn, _ in rows)
        after = sum(turn["reasoning_tokens"] for turn, _ in rows if turn["decision"] == THINK)
        hits = sum(kept and need for kept, need in tested)
        table.add_row(
            f"{epsilon:g}",
            _share(sum(turn["decision"] != THINK for turn, _ in rows), len(rows)),
            _share(before - after, before),
            _share(hits, sum(need for _, need in tested)),
            _share(hits, sum(kept for kept, _ in tested)),
        )
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _next_steps(work: Workspace, epsilon: str) -> str:
    model, held_out, report = (shlex.quote(work[name]) for name in (MODEL, HELD_OUT, REPORT))
    mine = shlex.quote(work["mine.jsonl"])
    first = epsilon.split(",")[0]
    return "\n".join(
        [
            f"\nOpen {report} in a browser: every turn, kept or skipped, and why.",
            "",
            "Next, the same by hand, with thresholds of your own:",
            f"  race-jax logic --model {model} --trajectories {held_out} --epsilon {first} \\",
            f"      --out {mine}",
            f"  race-jax report {mine} --out {shlex.quote(work['mine.html'])}",
            "With a Qwen checkpoint's folder as --model and your own agent's trajectories, these",
            "two commands do the same for real.",
        ]
    )


def _trajectories(path: str) -> Iterator[Trajectory]:
    for item in read(path, strict=True):
        assert isinstance(item, Trajectory)
        yield item


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _digest_of(path: str) -> str:
    return _digest(Path(path).read_bytes())
