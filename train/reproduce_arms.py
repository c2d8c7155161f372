"""The arms of RACE's comparison, as they are made in the embedded world."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from race_jax.envs.potions import PotionShopConfig
from race_jax.train import story
from race_jax.train.reproduce_forced import play_forced
from race_jax.train.rl_config import PolicyLossConfig
from race_jax.train.story import BASE, MODEL
from race_jax.train.tiny import TinyTraining
from race_jax.train.workspace import Workspace

BENCHMARKS = ("ScienceWorld", "WebShop", "AppWorld", "DeepSearch")
HALF = "half_covered"
"""Folder of the start of RL from covers."""
Reasoning = Literal["full", "cover", "none"]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A row of the table.

    Attributes:
        name: Its title.
        folder: Where its run lies in a seed's workspace, or the model itself.
        sft: For a supervised arm: the reasoning that it is trained on.
        half: Whether it sees each trajectory with all its reasoning too, so that closing is only
            half learnt.
        start: For an arm of RL: folder of the model that it starts from.
        covers: Whether LoGiC runs in RL.
        loss: What differs in RL's loss.
        paper: Success in % and reasoning tokens per benchmark that the paper reports for it.
    """

    name: str
    folder: str
    sft: Reasoning | None = None
    half: bool = False
    start: str | None = None
    covers: bool = True
    loss: Mapping[str, float | bool] = dataclasses.field(default_factory=dict)
    paper: tuple[tuple[float, int], ...] = ()

    @property
    def model(self) -> str:
        """Folder of its model in a seed's workspace."""
        made = self.sft is not None or self.start is not None
        return f"{self.folder}/model" if made else self.folder

    @property
    def evaluation(self) -> str:
        """File of its evaluation in a seed's workspace."""
        return f"evaluations/{self.folder}.jsonl"


_COVERED = f"{HALF}/model"
ARMS = (
    Arm(
        "base: look-up drills only",
        BASE,
        paper=((18.52, 2210), (15.60, 2713), (46.15, 3134), (29.25, 1281)),
    ),
    Arm("SFT", MODEL, paper=((43.87, 2236), (44.60, 1375), (64.96, 3479), (28.00, 2321))),
    Arm("SFT, as many steps more", "sft_further", sft="full"),
    Arm("SFT without reasoning", "direct", sft="none"),
    Arm(
        "RACE-SFT",
        "race_sft",
        sft="cover",
        paper=((43.05, 1966), (45.40, 1232), (63.08, 3330), (28.25, 1856)),
    ),
    Arm("RACE-SFT, half-covered", HALF, sft="cover", half=True),
    Arm(
        "SFT+GRPO",
        "sft_grpo",
        start=MODEL,
        covers=False,
        paper=((74.55, 2073), (52.00, 2702), (65.30, 3545), (35.75, 2163)),
    ),
    Arm(
        "RACE-SFT+GRPO, no LoGiC in RL",
        "race_sft_grpo",
        start=_COVERED,
        covers=False,
        paper=((75.54, 2573), (51.40, 2670), (67.18, 8574), (35.75, 3507)),
    ),
    Arm(
        "RACE-SFT-RL, no masking",
        "no_masking",
        start=_COVERED,
        loss={"masking": False},
        paper=((72.95, 609), (46.00, 124), (56.75, 3161), (32.00, 2196)),
    ),
    Arm("RACE-SFT-RL, no closure", "no_closure", start=_COVERED, loss={"closure": 0.0}),
    Arm(
        "AdaptThink",
        "adaptthink",
        start=_COVERED,
        covers=False,
        loss={"adaptthink": 0.05},
        paper=((64.49, 1252), (44.60, 748), (68.72, 2381), (33.50, 1481)),
    ),
    Arm(
        "RACE-SFT-RL",
        "race_sft_rl",
        start=_COVERED,
        paper=((73.28, 1403), (53.40, 535), (65.13, 1900), (35.00, 822)),
    ),
)
"""All arms, each after what it starts from. The paper's numbers are of Qwen3.5-9B, on benchmarks
that have nothing to do with this world.

Reference: RACE, tables 1 to 3 and the ablation.
"""


@dataclasses.dataclass(frozen=True)
class ReproduceConfig:
    """All arms in the embedded world. Everything that decides the results stands here.

    Attributes:
        out: Folder; each seed has one of its own in it.
        seeds: Each decides its world's tasks, its model, and all training from it.
        world: Size and difficulty of the world.
        training: The model from scratch.
        episodes: Episodes that it is trained on.
        held_out: Other episodes: LoGiC compresses them, and supervised arms learn from them.
        epsilon: LoGiC's threshold in all arms, nats per token.
        thresholds: LoGiC's thresholds for the curve; each is a supervised training of its own.
        sft_steps: Updates of supervised arms.
        rl_steps: Steps of RL.
        prompts: Tasks of a step.
        group: Episodes of each task.
        loss: RL's loss, where an arm does not say otherwise.
        tasks: Test tasks of an evaluation, the same for all arms and seeds.
        arms: Folders' names of the arms to run, with what they start from; null for all.
    """

    out: str = "reproduce"
    seeds: tuple[int, ...] = (0, 1, 2)
    world: PotionShopConfig = dataclasses.field(default_factory=PotionShopConfig)
    training: TinyTraining = dataclasses.field(default_factory=TinyTraining)
    episodes: int = 2000
    held_out: int = 40
    epsilon: float = 0.03
    thresholds: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1, 0.2, 0.3)
    sft_steps: int = 30
    rl_steps: int = 12
    prompts: int = 8
    group: int = 4
    loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
    tasks: int = 512
    arms: tuple[str, ...] | None = None

    def __post_init__(self):
        for name in ("episodes", "held_out", "sft_steps", "rl_steps", "prompts", "tasks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.group < 2:
            raise ValueError(
                f"group is {self.group}; an advantage compares episodes of one task, so it takes "
                "at least 2."
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(
                f"seeds is {list(self.seeds)}; it must be different numbers of at least 0."
            )
        if any(not 0 <= value < math.inf for value in (self.epsilon, *self.thresholds)):
            raise ValueError(
                f"epsilon is {self.epsilon} and thresholds {list(self.thresholds)}; all must be at "
                "least 0 and finite."
            )
        known = [arm.folder for arm in ARMS]
        for name in self.arms or ():
            if name not in known:
                raise ValueError(f"arms names {name!r}; there are {', '.join(known)}.")

    @property
    def chosen(self) -> tuple[Arm, ...]:
        """The arms that run: those asked for and what they start from, in order."""
        if self.arms is None:
            return ARMS
        wanted = set(self.arms)
        for arm in reversed(ARMS):
            if arm.folder in wanted and arm.start is not None:
                wanted.add(arm.start.removesuffix("/model"))
        return tuple(arm for arm in ARMS if arm.folder in wanted)

    @property
    def epsilons(self) -> tuple[float, ...]:
        """Every threshold that LoGiC is asked for, rising."""
        return tuple(sorted({self.epsilon, *self.thresholds}))


def make(work: Workspace, config: ReproduceConfig, arm: Arm, seed: int) -> None:
    """Train an arm's model, unless it is there."""
    if arm.sft is not None:
        supervised(work, arm.folder, config, seed, arm.sft, config.epsilon, half=arm.half)
    elif arm.start is not None:
        run = story.rl_settings(
            work,
            arm.start,
            arm.folder,
            world=config.world,
            steps=config.rl_steps,
            prompts=config.prompts,
            group=config.group,
            epsilon=config.epsilon,
            seed=seed,
            loss=dataclasses.replace(config.loss, **arm.loss),
            covers=arm.covers,
        )
        story.reinforce(work, arm.folder, run)


def supervised(
    work: Workspace,
    folder: str,
    config: ReproduceConfig,
    seed: int,
    reasoning: Reasoning,
    epsilon: float,
    *,
    half: bool = False,
) -> None:
    """A supervised arm, or a point of the threshold curve.

    Args:
        work: The seed's workspace.
        folder: Of the run in it.
        config: The settings.
        seed: Order of the data.
        reasoning: What the turns are trained with.
        epsilon: The covers' threshold.
        half: Train on the trajectories with all their reasoning as well.
    """
    run = story.sft_settings(
        work, folder, reasoning=reasoning, epsilon=epsilon, steps=config.sft_steps, seed=seed
    )
    if half:
        both = story.write_both(work, epsilon)
        data = dataclasses.replace(run.data, path=work[both], reasoning="full", epsilon=None)
        run = dataclasses.replace(run, data=data)
    story.fine_tune(work, folder, run)


def evaluate(
    work: Workspace, config: ReproduceConfig, model: str, out: str, forced: str = ""
) -> None:
    """Evaluate a model on the test tasks, unless that is done.

    Args:
        work: The seed's workspace.
        config: The settings.
        model: The model's folder.
        out: File of the episodes.
        forced: Turns whose block is closed by force: `needed`, `redundant`, `all`; or none.
    """
    settings = story.evaluation_settings(work, model, out, world=config.world, count=config.tasks)
    if forced:
        play_forced(work, out, settings, forced)
    else:
        story.play(work, out, settings)


def threshold_folder(config: ReproduceConfig, epsilon: float) -> str:
    """Where the supervised arm at a threshold lies; at the arms' own it is the arm itself."""
    return "race_sft" if epsilon == config.epsilon else f"epsilon_{epsilon:g}"
