"""`race-jax quickstart`: the whole way in minutes, without network, GPU or downloads.

A small text world, a tiny hybrid-thinking model trained on it from scratch, LoGiC's covers compared
with the turns that need their reasoning by construction, then RACE's two stages of training, and
what each of them costs and saves.
"""

from __future__ import annotations

import shlex

from rich.console import Console

from race_jax.envs.potions import PotionShopConfig
from race_jax.metrics import plot_metrics, read_metrics
from race_jax.report import plot_sweep, read_records, write_report
from race_jax.report_rollouts import write_rollouts
from race_jax.rollout.measures import plot_measures
from race_jax.rollout.results import read_rollouts
from race_jax.tokenizer import load_tokenizer
from race_jax.train import story
from race_jax.train.logic_cli import parse_epsilons
from race_jax.train.rl_config import RlConfig
from race_jax.train.sft_setup import SftConfig
from race_jax.train.story import BASE, COVERS, HELD_OUT, MODEL, SPLIT, TRAIN
from race_jax.train.story_table import cover_table, read_row, story_table, write_rows
from race_jax.train.tiny import TinyTraining
from race_jax.train.workspace import Workspace

NOTES = "quickstart.json"
REPORT, SWEEP, ROLLOUTS, CURVES, POINTS, RESULTS = (
    *("report.html", "sweep.png", "rollouts.html", "rl.png", "results.png", "results.json"),
)
RACE_SFT, RACE_RL = "race_sft", "race_sft_rl"
MODELS = (
    ("base", BASE),
    ("SFT", MODEL),
    ("RACE-SFT", f"{RACE_SFT}/model"),
    ("RACE-SFT-RL", f"{RACE_RL}/model"),
)
"""The models that are compared, and their folders."""


def quickstart(
    out: str = "quickstart",
    seed: int = 0,
    fresh: bool = False,
    short: bool = False,
    episodes: int = 2000,
    held_out: int = 40,
    epsilon: str = "0.001,0.003,0.01,0.03,0.1,0.3",
    cover_epsilon: float = 0.03,
    size: int = 5,
    drill_steps: int = 90,
    steps: int = 300,
    cover_steps: int = 30,
    rl_steps: int = 8,
    rl_prompts: int = 8,
    tasks: int = 64,
) -> int:
    """Go through RACE from scratch in minutes: SFT, LoGiC, cover SFT, cover-aware RL.

    Needs neither network nor GPU. Stopped halfway, it goes on where it stood.

    Args:
        out: Folder for trajectories, models, LoGiC's output, pages and plots.
        seed: Seed of tasks, model and training; equal seeds give equal results.
        fresh: Do every stage anew.
        short: End after LoGiC, without cover SFT, RL and evaluations.
        episodes: Episodes to train on.
        held_out: Other episodes, for LoGiC to compress and cover SFT to learn from.
        epsilon: LoGiC's thresholds in nats per token, separated by commas.
        cover_epsilon: The one among them that cover SFT and RL take.
        size: Potions, herbs, shelves and rooms in the world, at least 4 of each.
        drill_steps: Updates on look-up drills, which come first.
        steps: Updates on episodes. Fewer make a quicker and a worse model.
        cover_steps: Updates of cover SFT.
        rl_steps: Steps of cover-aware RL.
        rl_prompts: Tasks of a step, each played four times.
        tasks: Tasks that each model is evaluated on.

    Returns:
        Exit code: 0, or LoGiC's if that is another.

    Raises:
        ValueError: A setting is out of range, or `out` cannot be used.
    """
    counts = {"episodes": episodes, "held-out": held_out, "tasks": tasks}
    counts |= {"cover-steps": cover_steps, "rl-steps": rl_steps, "rl-prompts": rl_prompts}
    for name, value in {"seed": seed, **counts}.items():
        low = 0 if name == "seed" else 1
        if not low <= value <= SPLIT:
            raise ValueError(f"--{name} {value}: it must be from {low} to {SPLIT}")
    if cover_epsilon not in parse_epsilons(epsilon) and not short:
        raise ValueError(f"--cover-epsilon {cover_epsilon}: it must be one of --epsilon {epsilon}")
    world, training = PotionShopConfig(size), TinyTraining(drill_steps, steps=steps)
    console = Console(highlight=False, soft_wrap=True)
    guarded = (TRAIN, HELD_OUT, BASE, MODEL, COVERS, REPORT, RACE_SFT, RACE_RL)
    work = Workspace(out, console, notes=NOTES, guarded=guarded)
    if fresh:
        work.forget()
    story.make_trajectories(work, "1. trajectories", seed, world, episodes, held_out)
    story.train_model(work, "2. SFT from scratch", seed, world, training)
    code = story.find_covers(work, "3. LoGiC", epsilon)
    show_covers(work)
    if not short:
        cover_sft = story.sft_settings(
            work, RACE_SFT, reasoning="cover", epsilon=cover_epsilon, steps=cover_steps, seed=seed
        )
        cover_rl = story.rl_settings(
            work,
            f"{RACE_SFT}/model",
            RACE_RL,
            world=world,
            steps=rl_steps,
            prompts=rl_prompts,
            group=4,
            epsilon=cover_epsilon,
            seed=seed,
        )
        train_and_compare(work, world, cover_sft, cover_rl, tasks)
    console.print(next_steps(work, epsilon, short), markup=False)
    return code


def train_and_compare(
    work: Workspace, world: PotionShopConfig, cover_sft: SftConfig, cover_rl: RlConfig, tasks: int
) -> None:
    """RACE's two stages of training, and every model on the same tasks."""
    story.fine_tune(work, "4. RACE-SFT, on the covers", cover_sft)
    story.reinforce(work, "5. RACE-SFT-RL, on the model's own episodes", cover_rl)
    for n, (name, model) in enumerate(MODELS, 6):
        config = story.evaluation_settings(
            work, model, evaluation_of(model), world=world, count=tasks
        )
        story.play(work, f"{n}. evaluation of {name}", config)
    show_story(work)


def evaluation_of(model: str) -> str:
    """The file of a model's evaluation, by the model's folder."""
    return f"evaluations/{model.removesuffix('/model')}.jsonl"


def show_covers(work: Workspace) -> None:
    """LoGiC's page and curve, and the table against the construction."""
    records = read_records(work[COVERS], faults=[])
    needed = {item.id: item.extra["needed"] for item in story.trajectories(work[HELD_OUT])}
    work.console.print(cover_table(records, needed))
    title = "Quickstart: a potion shop, and a model trained from scratch"
    write_report(records, work[REPORT], title=title, source=COVERS)
    plot_sweep(records, work[SWEEP])


def show_story(work: Workspace) -> None:
    """The models side by side, RL's curves, and the page of the last model's episodes."""
    rows = [read_row(name, work[evaluation_of(model)]) for name, model in MODELS]
    write_rows(rows, work[RESULTS])
    # What solves nothing says nothing about the price of success, and would stretch the axis.
    plot_measures([row.all for row in rows[1:]], work[POINTS])
    plot_metrics(read_metrics(f"{work[RACE_RL]}/metrics.jsonl"), work[CURVES])
    _, last = MODELS[-1]
    codec = load_tokenizer(work[last])
    write_rollouts(
        list(read_rollouts(work[evaluation_of(last)])),
        work[ROLLOUTS],
        title="Quickstart: episodes of the model after RACE-SFT-RL",
        source=evaluation_of(last),
        decode=lambda token: str(codec.decode([token])),
    )
    work.console.print(story_table(rows, "The story: success, and what it costs in reasoning"))


def next_steps(work: Workspace, epsilon: str, short: bool) -> str:
    """What to look at and what to run next."""

    def place(name: str) -> str:
        return shlex.quote(work[name])

    first = epsilon.split(",")[0]
    lines = [f"\nOpen {place(REPORT)} in a browser: every turn, kept or skipped, and why."]
    if short:
        lines.append("Without --short the same command goes on to cover SFT, RL and a table.")
    else:
        lines += [
            f"{place(ROLLOUTS)} shows episodes of the last model, token by token.",
            f"{place(POINTS)}: success against reasoning; {place(CURVES)}: RL, step by step.",
        ]
    lines += [
        "",
        "Next, the same by hand, with thresholds of your own:",
        f"  race-jax logic --model {place(MODEL)} --trajectories {place(HELD_OUT)} \\",
        f"      --epsilon {first} --out {place('mine.jsonl')}",
        f"  race-jax report {place('mine.jsonl')} --out {place('mine.html')}",
        "With a Qwen checkpoint's folder as --model and your own agent's trajectories, these",
        "two commands do the same for real. Training is race-jax sft and race-jax rl; all arms",
        "of the paper in this world, over several seeds, are race-jax reproduce.",
    ]
    return "\n".join(lines)
