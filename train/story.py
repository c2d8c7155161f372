"""The stages of RACE in the embedded world, each made of the commands' own building blocks.

Trajectories, a tiny hybrid-thinking model from scratch, LoGiC's covers of other episodes, training
on them, RL, and evaluation: `race-jax quickstart` goes through them once, `race-jax reproduce` for
every arm and seed. Each is a stage of a workspace, so what is finished is kept.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from race_jax.chat import renderer_for
from race_jax.checkpoint import Checkpoints
from race_jax.envs.factory import EnvironmentConfig
from race_jax.envs.potion_text import words
from race_jax.envs.potions import PotionShopConfig, drill, oracle_trajectory
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.logic.records import THINK
from race_jax.models import Model, save_model
from race_jax.report import read_records
from race_jax.rollout.limits import RolloutConfig
from race_jax.sft_data import SftDataConfig
from race_jax.tokenizer import load_tokenizer
from race_jax.train.evaluate_cli import EvaluateConfig, evaluate_as
from race_jax.train.export_cli import export
from race_jax.train.logic_cli import logic, parse_epsilons
from race_jax.train.optimizer import OptimizerConfig
from race_jax.train.playing import Wrap
from race_jax.train.progress import Meter
from race_jax.train.rl import rl
from race_jax.train.rl_config import CoverConfig, PolicyLossConfig, RlConfig
from race_jax.train.runtime import enable_compilation_cache, model_fingerprint
from race_jax.train.samplers import SamplerConfig
from race_jax.train.sft import sft
from race_jax.train.sft_setup import SftConfig
from race_jax.train.tiny import COMPUTE, TinyTraining, fresh_model, lessons, tiny_config, train
from race_jax.train.workspace import Workspace, digest_of
from race_jax.trajectories import read, write
from race_jax.types import Params, TokenTrajectory, Trajectory, is_turn

TRAIN, HELD_OUT, BASE, MODEL, COVERS = (
    *("train.jsonl", "held_out.jsonl", "base", "model", "covers.jsonl"),
)
BOTH = "both.jsonl"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SPLIT = 1_000_000_000
"""Seeds of held-out tasks start this far above those of training tasks."""
LENGTH, TURN = 768, 64
"""Most tokens of an episode and of a turn; the world's longest right ones take about half."""


def make_trajectories(
    work: Workspace, title: str, seed: int, world: PotionShopConfig, episodes: int, held_out: int
) -> None:
    """The teacher's episodes, with reasoning at every turn: to train on, and others for LoGiC."""

    def make() -> None:
        for name, start, count in ((TRAIN, 0, episodes), (HELD_OUT, SPLIT, held_out)):
            first = 2 * SPLIT * seed + start
            write(work[name], (oracle_trajectory(first + i, world) for i in range(count)))

    settings = {"seed": seed, "world": dataclasses.asdict(world)}
    counts = {"episodes": episodes, "held_out": held_out}
    work.stage(title, settings | counts, (TRAIN, HELD_OUT), make)


def train_model(
    work: Workspace, title: str, seed: int, world: PotionShopConfig, training: TinyTraining
) -> None:
    """A model from scratch on the workspace's episodes, which can act without reasoning too."""
    settings = {
        "seed": seed,
        "world": dataclasses.asdict(world),
        "training": dataclasses.asdict(training),
        "data": digest_of(work[TRAIN]),
    }
    made = tuple(f"{folder}/{name}" for folder in (BASE, MODEL) for name in MODEL_FILES)
    work.stage(title, settings, made, lambda: _train(work, seed, world, training))


def _train(work: Workspace, seed: int, world: PotionShopConfig, training: TinyTraining) -> None:
    """Train on drills and episodes; the base model is what the drills left."""
    enable_compilation_cache()
    tokenizer = word_tokenizer(words(world.size))
    renderer = renderer_for(tokenizer, "qwen3")
    episodes = [renderer.encode(item) for item in trajectories(work[TRAIN])]
    drills = [
        drill(2 * SPLIT * seed + i, renderer, min(10, 2 * world.size), world)
        for i in range(training.drill_steps * training.drill_batch)
    ]
    model = fresh_model(tiny_config(len(tokenizer)), seed)

    def save(folder: str, params: Params) -> None:
        save_model(dataclasses.replace(model, params=params), work[folder])
        tokenizer.save_pretrained(work[folder])
        load_tokenizer(work[folder])

    def after(step: int, params: Params) -> None:
        if step == training.drill_steps:
            save(BASE, params)

    after(0, model.params)
    trained, loss = _round(work.console, "training", model, episodes, drills, training, seed, after)
    again = dataclasses.replace(training, drill_steps=0, steps=training.steps // 2)
    for number in range(1, training.rounds + 1):
        if loss <= training.enough or not again.steps:
            break
        work.console.print(
            f"the look-ups are not all found: {loss:.3f} nats a token, and {training.enough} would "
            f"be enough. {again.steps} more updates, round {number} of at most {training.rounds}"
        )
        lessons_seed = seed + number * SPLIT
        trained, loss = _round(
            work.console, "more training", trained, episodes, [], again, lessons_seed
        )
    work.console.print(f"loss at the end: {loss:.3f} nats a token")
    save(MODEL, trained.params)


def _round(
    console: Console,
    title: str,
    model: Model,
    episodes: Sequence[TokenTrajectory],
    drills: Sequence[TokenTrajectory],
    training: TinyTraining,
    seed: int,
    after: Callable[[int, Params], None] = lambda step, params: None,
) -> tuple[Model, float]:
    """Train once through the schedule; returns the model, and the mean loss of the last updates."""
    total = training.drill_steps + training.steps
    recent: deque[float] = deque(maxlen=20)

    with Meter(console, title, total) as meter:

        def show(step: int, loss: float, params: Params) -> None:
            recent.append(loss)
            after(step, params)
            kind = "drills" if step <= training.drill_steps else "episodes"
            rate = step / max(meter.spent, 1e-9)
            mean = sum(recent) / len(recent)
            meter.update(step, f"step {step}/{total} ({kind}), loss {mean:.3f}, {rate:.1f} steps/s")

        model = train(model, lessons(episodes, drills, training, seed), training, show)
    return model, sum(recent) / len(recent)


def find_covers(work: Workspace, title: str, epsilon: str) -> int:
    """LoGiC over the held-out episodes; a run that was cut short goes on.

    Returns:
        LoGiC's exit code.
    """
    codes = [0]

    def run() -> None:
        codes[0] = logic(work[MODEL], work[HELD_OUT], work[COVERS], epsilon)

    settings = {
        "model": model_fingerprint(work[MODEL]),
        "data": digest_of(work[HELD_OUT]),
        "epsilons": parse_epsilons(epsilon),
    }
    work.stage(title, settings, (COVERS,), run, unfinished=COVERS)
    return codes[0]


def write_both(work: Workspace, epsilon: float) -> str:
    """LoGiC's trajectories twice, with all their reasoning and with that of their cover alone.

    Returns:
        Name of the file in the workspace.
    """
    removed = {
        record["id"]: [turn["decision"] != THINK for turn in record["turns"]]
        for record in read_records(work[COVERS], faults=[])
        if record["epsilon"] == epsilon
    }

    def both() -> Iterator[Trajectory]:
        for item in trajectories(work[HELD_OUT]):
            yield dataclasses.replace(item, id=f"{item.id}/full")
            skips = iter(removed[item.id])
            messages = tuple(
                {**m, "reasoning_content": ""} if is_turn(m) and next(skips) else m
                for m in item.messages
            )
            yield dataclasses.replace(item, id=f"{item.id}/cover", messages=messages)

    write(work[BOTH], both())
    return BOTH


def sft_settings(
    work: Workspace, out: str, *, reasoning: str, epsilon: float, steps: int, seed: int
) -> SftConfig:
    """A short supervised training of the workspace's model on what LoGiC was given.

    Args:
        work: The workspace.
        out: Folder of the run in it.
        reasoning: `full`, `cover` or `none`, as in `SftDataConfig`.
        epsilon: The covers' threshold.
        steps: Updates.
        seed: Order of the data.
    """
    return SftConfig(
        model=work[MODEL],
        out=work[out],
        data=SftDataConfig(
            work[COVERS],
            LENGTH,
            4,
            reasoning,  # pyright: ignore[reportArgumentType]
            epsilon=epsilon if reasoning == "cover" else None,
            held_out=0.25,
            cache=work["tokens"],
        ),
        steps=steps,
        optimizer=OptimizerConfig(lr=3e-4, warmup=0.1),
        compute=COMPUTE,
        seed=seed,
        eval_every=max(steps, 1),
        save_every=10,
        log_every=5,
    )


def rl_settings(
    work: Workspace,
    start: str,
    out: str,
    *,
    world: PotionShopConfig,
    steps: int,
    prompts: int,
    group: int,
    epsilon: float,
    seed: int,
    loss: PolicyLossConfig | None = None,
    covers: bool = True,
) -> RlConfig:
    """RL in the workspace's world.

    Args:
        work: The workspace.
        start: Folder of the model to start from in it.
        out: Folder of the run in it.
        world: The world.
        steps: Batches of rollouts.
        prompts: Tasks of a step.
        group: Episodes of each task.
        epsilon: LoGiC's threshold.
        seed: Tasks and samples.
        loss: Masking, closure and the like.
        covers: Whether LoGiC runs.
    """
    return RlConfig(
        model=work[start],
        out=work[out],
        steps=steps,
        env=environment(world),
        prompts=prompts,
        group=group,
        rollout=RolloutConfig(max_turn_tokens=TURN, max_tokens=LENGTH),
        sampler=SamplerConfig(slots=32),
        logic=CoverConfig(enabled=covers, epsilon=epsilon),
        loss=loss or PolicyLossConfig(),
        optimizer=OptimizerConfig(lr=3e-4, schedule="constant", warmup=0.0),
        compute=COMPUTE,
        rows=4,
        seed=seed,
        save_every=1,
    )


def evaluation_settings(
    work: Workspace, model: str, out: str, *, world: PotionShopConfig, count: int
) -> EvaluateConfig:
    """An evaluation on the world's test tasks, the same ones for every model."""
    return EvaluateConfig(
        model=work[model],
        out=work[out],
        env=environment(world),
        count=count,
        sampler=SamplerConfig(slots=32),
        rollout=RolloutConfig(max_turn_tokens=TURN, max_tokens=LENGTH),
    )


def environment(world: PotionShopConfig) -> EnvironmentConfig:
    """The world as an environment's settings."""
    return EnvironmentConfig("potions", dataclasses.asdict(world))


def fine_tune(work: Workspace, title: str, config: SftConfig) -> None:
    """A supervised run, and its model as a Hugging Face directory in `model` under it."""

    def run() -> None:
        sft(config, console=work.console)
        _finish(config.out, config.steps)

    settings = _without_paths(dataclasses.asdict(config))
    settings["data"] = _without_paths(settings["data"])
    settings |= {"model": model_fingerprint(config.model), "of": digest_of(config.data.path)}
    _stage_of_run(work, title, config.out, settings, run)


def reinforce(work: Workspace, title: str, config: RlConfig) -> None:
    """A run of RL, and its model as a Hugging Face directory in `model` under it.

    Raises:
        ValueError: It ended before its first checkpoint.
    """

    def run() -> None:
        code = rl(config, console=work.console)
        _finish(config.out, config.steps, ended=code != 0)

    settings = _without_paths(dataclasses.asdict(config))
    settings |= {"model": model_fingerprint(config.model)}
    _stage_of_run(work, title, config.out, settings, run)


def play(
    work: Workspace,
    title: str,
    config: EvaluateConfig,
    wrap: Wrap | None = None,
    method: Mapping[str, Any] | None = None,
) -> None:
    """An evaluation; a run that was cut short plays only what is left.

    Arguments after the stage's title are those of `evaluate_as`.
    """

    def run() -> None:
        code = evaluate_as(config, wrap, method)
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise ValueError(
                f"{config.out}: the evaluation was spoilt; its lines above say by what"
            )

    out = str(Path(config.out).relative_to(work.path))
    summary = str(Path(out).with_suffix(".summary.json"))
    settings = {**config.settings, **(method or {}), "count": config.count}
    work.stage(title, settings, (out, summary), run, unfinished=out)


def trajectories(path: str) -> Iterator[Trajectory]:
    """The trajectories of a file that `write` made."""
    for item in read(path, strict=True):
        assert isinstance(item, Trajectory)
        yield item


def _without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without places: a workspace that was moved is the same."""
    places = ("model", "out", "path", "cache")
    return {name: value for name, value in settings.items() if name not in places}


def _stage_of_run(
    work: Workspace, title: str, out: str, settings: Mapping[str, Any], run: Callable[[], None]
) -> None:
    folder = str(Path(out).relative_to(work.path))
    made = tuple(f"{folder}/model/{name}" for name in MODEL_FILES)
    work.stage(title, settings, made, run, unfinished=folder)


def _finish(out: str, steps: int, *, ended: bool = False) -> None:
    """Export a run's last checkpoint, if the run came to its end.

    Args:
        out: The run's folder.
        steps: How many steps it was to make.
        ended: Whether it ended by itself before that; its last checkpoint then is its result.

    Raises:
        KeyboardInterrupt: A signal cut it short.
        ValueError: It ended before its first checkpoint.
    """
    with Checkpoints(Path(out) / "checkpoints", read_only=True) as checkpoints:
        last = checkpoints.latest
    if last is None and ended:
        raise ValueError(f"{out}: the run ended before its first step was done")
    if not ended and (last or 0) < steps:
        raise KeyboardInterrupt
    export(out, str(Path(out) / "model"), step="latest", dtype="float32")
