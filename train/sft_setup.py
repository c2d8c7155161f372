"""What a supervised run is made of: settings, model, data, mesh, compiled functions."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from race_jax.chat import renderer_for
from race_jax.checkpoint import Checkpoints
from race_jax.families import family_of
from race_jax.metrics import check_trackers
from race_jax.models import load_config, make_model
from race_jax.packing import closing_id
from race_jax.sft_data import SftDataConfig, build_pipeline
from race_jax.sharding import sharding_for
from race_jax.tokenizer import load_tokenizer
from race_jax.train.distributed import DistributedConfig, MeshConfig, row_share
from race_jax.train.evaluate import make_evaluation
from race_jax.train.optimizer import (
    LoraConfig,
    OptimizerConfig,
    make_optimizer,
    schedule,
)
from race_jax.train.runs import TrainingRun
from race_jax.train.runtime import enable_compilation_cache, make_folder, model_fingerprint
from race_jax.train.state import Trainee, TrainState
from race_jax.train.step import ComputeConfig, make_step, sft_loss

FREE = (
    *("out", "model", "data.path", "data.cache", "mesh", "log_every", "eval_every", "eval_batches"),
    *("save_every", "keep", "track", "distributed"),
    *("compute.micro_batches", "compute.remat", "compute.head_chunk", "optimizer.patience"),
)
"""Fields that may differ when a run goes on: they change no result beyond rounding."""


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """One supervised run. Everything that decides its result stands here.

    Attributes:
        model: Folder of the Hugging Face checkpoint to start from, with its tokenizer.
        out: The run's folder: checkpoints, metrics, the resolved settings.
        data: What is trained on.
        steps: Updates of the whole run, skipped ones included.
        optimizer: AdamW and its schedule.
        lora: Adapters instead of full training.
        compute: How a step computes.
        mesh: How devices are arranged.
        distributed: How several processes find one another.
        seed: Decides the order of the data and the adapters' start.
        log_every: Steps between lines of metrics.
        eval_every: Steps between evaluations on held-out data; one more before the first step.
        eval_batches: Held-out batches of an evaluation; null takes all.
        save_every: Steps between checkpoints; one more at the end and on SIGTERM.
        keep: Latest checkpoints to keep; the one with the lowest held-out loss stays as well.
        track: Where else to show metrics: `wandb`, `trackio`.
    """

    model: str
    out: str
    data: SftDataConfig
    steps: int
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    seed: int = 0
    log_every: int = 1
    eval_every: int = 50
    eval_batches: int | None = None
    save_every: int = 100
    keep: int = 2
    track: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("steps", "log_every", "eval_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ValueError(
                f"eval_batches is {self.eval_batches}; it must be at least 1, or null."
            )
        if self.data.batch_size % self.compute.micro_batches:
            raise ValueError(
                f"compute.micro_batches is {self.compute.micro_batches}; it must divide "
                f"data.batch_size, which is {self.data.batch_size}."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**32 - 1.")


class Run(TrainingRun):
    """A prepared run: what the loop steps through, and where its arrays lie."""

    def __init__(self, config: SftConfig, console: Console):
        """Read settings, tokenizer and data; weights come with `start`.

        Raises:
            ValueError: Something does not fit; nothing has been written then.
            FileNotFoundError: A folder or file is missing.
        """
        super().__init__(config.model, config.out, config.mesh, config.compute, config.seed)
        self.config = config
        shape = load_config(config.model)
        self.renderer = renderer_for(
            load_tokenizer(config.model), family_of(shape.model_type), skip_form="close"
        )
        if config.data.length > shape.context_length:
            raise ValueError(
                f"data.length is {config.data.length}, and the model's context has "
                f"{shape.context_length} tokens; lower data.length."
            )
        share, shares = row_share(self.mesh)
        part = (config.data.batch_size // config.compute.micro_batches, config.data.length)
        sharding_for(("batch", "time"), self.mesh, part, self.rules, name="a micro-batch")
        self.data = build_pipeline(
            config.data,
            self.renderer,
            seed=config.seed,
            vocab_size=shape.vocab_size,
            process_index=share,
            process_count=shares,
            report=lambda line: console.print(line, markup=False),
        )
        console.print(self.data.table())
        self.settings = {
            **dataclasses.asdict(config),
            "model_fingerprint": model_fingerprint(config.model),
            "data_fingerprint": self.data.fingerprint,
        }
        self.model = make_model(shape, {})
        self.trainee = Trainee(self.model, {}, config.lora)
        self.schedule = schedule(config.optimizer, config.steps)
        self.rule = make_optimizer(config.optimizer, config.steps, self.trainee.decayed)
        self.step = make_step(self.trainee, self.rule, sft_loss, config.compute)
        self.evaluation = make_evaluation(self.trainee, config.compute, closing_id(self.renderer))

    def start(self, checkpoints: Checkpoints) -> TrainState:
        """The state to go on from: the last checkpoint's, or a fresh one.

        Raises:
            ValueError: The checkpoint is of a run with other settings.
        """
        state, notes = self.begin(checkpoints, FREE)
        if notes:
            self.data.set_state(notes["data"])
        return state


def prepare(config: SftConfig, console: Console) -> Run:
    """Check and gather all that a run needs, before anything is written."""
    enable_compilation_cache()
    check_trackers(config.track)
    run = Run(config, console)
    make_folder(run.folder)
    return run
