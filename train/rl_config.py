"""Settings of a run of cover-aware RL."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from race_jax.chat import SkipForm
from race_jax.closure_guard import GuardConfig
from race_jax.envs.factory import EnvironmentConfig
from race_jax.logic.cover import EPSILON, check_epsilons
from race_jax.losses import Reduction
from race_jax.rollout.limits import RolloutConfig
from race_jax.settings import check_rules
from race_jax.train.distributed import MeshConfig
from race_jax.train.optimizer import LoraConfig, OptimizerConfig
from race_jax.train.samplers import SamplerConfig
from race_jax.train.step import ComputeConfig

FREE = (
    *("out", "model", "mesh", "save_every", "keep", "track", "in_flight"),
    *("rows", "share", "compute.remat", "compute.head_chunk", "optimizer.patience"),
    *("env.workers", "env.restart_after", "sampler.slots", "sampler.chunk", "sampler.host_gib"),
    *("rollout.step_timeout", "rollout.episode_timeout", "rollout.max_faults"),
    *("logic.slots", "logic.rows", "logic.row_tokens"),
)
"""Fields that may differ when a run goes on: they change no result beyond rounding."""


@dataclasses.dataclass(frozen=True)
class CoverConfig:
    """LoGiC on the step's successful trajectories, with the current policy as scorer.

    Attributes:
        enabled: Whether it runs; without it the update is plain GRPO.
        epsilon: Threshold, nats per token.
        dtype: Arithmetic of the scorer's trunk, `float32` or `bfloat16`.
        slots: Trajectories in flight.
        rows: Rows per step at most.
        row_tokens: Tokens per row.
    """

    enabled: bool = True
    epsilon: float = EPSILON
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 16
    rows: int = 32
    row_tokens: int = 16

    def __post_init__(self):
        check_epsilons([self.epsilon])


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The loss: RACE eqs. 13 to 15, and the arms that it is compared with.

    Attributes:
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        masking: Whether reasoning that the cover removes leaves the policy loss.
        closure: lambda of the closure loss; 0 for none.
        closure_warmup: Share of the steps over which lambda rises from 0, linearly.
        closure_clip: Highest norm of the closure loss's own gradient, lambda included; null for no
            limit but the optimizer's. It costs a second pass over the rows, and a second gradient.
        reduction: How tokens are averaged; `token-mean` is the paper's.
        norm_length: Divisor of `seq-mean-token-sum-norm`.
        normalize_std: Divide advantages by the group's standard deviation.
        adaptthink: AdaptThink's delta: a bonus on successful trajectories, times their share of
            turns without reasoning; 0 for none.
        old_logprobs: `sampler` takes the log-probabilities that the sampler told; `recomputed`
            forwards the rows once more before the first update.
        importance_limit: With `recomputed`: weigh each token by exp(recomputed - sampler), at most
            this; null for no weights.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    masking: bool = True
    closure: float = 0.02
    closure_warmup: float = 0.0
    closure_clip: float | None = None
    reduction: Reduction = "token-mean"
    norm_length: int | None = None
    normalize_std: bool = True
    adaptthink: float = 0.0
    old_logprobs: Literal["sampler", "recomputed"] = "sampler"
    importance_limit: float | None = None

    def __post_init__(self):
        limit = self.importance_limit
        rules = {
            "clip_low": (0 <= self.clip_low <= 1, "from 0 to 1"),
            "clip_high": (0 <= self.clip_high < math.inf, "at least 0 and finite"),
            "closure": (0 <= self.closure < math.inf, "at least 0 and finite"),
            "closure_warmup": (0 <= self.closure_warmup <= 1, "a share of the steps, 0 to 1"),
            "closure_clip": (
                self.closure_clip is None or 0 < self.closure_clip < math.inf,
                "null, or above 0 and finite",
            ),
            "adaptthink": (0 <= self.adaptthink < math.inf, "at least 0 and finite"),
            "old_logprobs": (
                self.old_logprobs in ("sampler", "recomputed"),
                "sampler or recomputed",
            ),
            "importance_limit": (
                limit is None or (limit > 0 and self.old_logprobs == "recomputed"),
                "null, or above 0 and with old_logprobs: recomputed",
            ),
        }
        check_rules("loss", self, rules)


def _gentle() -> OptimizerConfig:
    return OptimizerConfig(lr=1e-6, schedule="constant", warmup=0.0)


@dataclasses.dataclass(frozen=True)
class PolicyRunConfig:
    """What every run that trains a policy on its own episodes is told.

    Attributes:
        model: Folder of the Hugging Face checkpoint to start from, with its tokenizer.
        out: The run's folder: checkpoints, metrics, rollouts, the resolved settings.
        steps: Batches of rollouts, each followed by its updates.
        env: The environment.
        split: Its tasks.
        prompts: Tasks of a step.
        epochs: Updates on each batch, all with the same old log-probabilities.
        rollout: Limits and sampling of episodes.
        sampler: Where turns are sampled; `local` only, since it must follow the policy.
        in_flight: Most episodes at once; by default the sampler's slots.
        logic: LoGiC.
        loss: The loss.
        guard: When lambda backs off, so that the run does not collapse into closing.
        optimizer: AdamW; its schedule counts updates.
        lora: Adapters instead of full training.
        compute: How an update computes. Its number of micro-batches follows from `rows`.
        rows: Rows forwarded at a time in an update.
        length: Tokens of a row; by default the limit of a trajectory.
        mesh: How devices are arranged.
        skip_form: How a turn without reasoning reads.
        seed: Decides the order of the tasks, the samples and the adapters' start.
        save_every: Steps between checkpoints; one more at the end and on SIGTERM.
        keep: Latest checkpoints to keep.
        track: Where else to show metrics: `wandb`, `trackio`.
    """

    model: str
    out: str
    steps: int
    env: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    split: str = "train"
    prompts: int = 16
    epochs: int = 1
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    in_flight: int | None = None
    logic: CoverConfig = dataclasses.field(default_factory=CoverConfig)
    loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=_gentle)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    rows: int = 1
    length: int | None = None
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    skip_form: SkipForm = "close"
    seed: int = 0
    save_every: int = 10
    keep: int = 2
    track: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("steps", "prompts", "epochs", "rows", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.in_flight is not None and self.in_flight < 1:
            raise ValueError(f"in_flight is {self.in_flight}; it must be at least 1, or null.")
        if self.sampler.kind != "local":
            raise ValueError(
                f"sampler.kind is {self.sampler.kind}; RL samples with the parameters that it "
                "trains, which a server does not have. Use local."
            )
        if self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0, so all trajectories of a group are the same; "
                "it must be above 0 (the paper uses 1)."
            )
        if self.compute.micro_batches != 1:
            raise ValueError(
                f"compute.micro_batches is {self.compute.micro_batches}; leave it at 1 and set "
                "rows: a step's number of micro-batches follows from its rows."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**32 - 1.")

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.length or self.rollout.max_tokens


@dataclasses.dataclass(frozen=True)
class RlConfig(PolicyRunConfig):
    """One run of RL. Everything that decides its result stands here and in `PolicyRunConfig`.

    Attributes:
        group: Trajectories of each task, at least 2.
    """

    group: int = 8

    def __post_init__(self):
        super().__post_init__()
        if self.group < 2:
            raise ValueError(
                f"group is {self.group}; an advantage compares trajectories of one task, so it "
                "takes at least 2."
            )
