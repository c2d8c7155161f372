"""Training a tiny hybrid-thinking model from scratch, on a CPU, in minutes.

A hybrid-thinking model acts both after reasoning and after an empty block. LoGiC needs one as its
scorer: to a model that has never acted after an empty block every removal looks harmful. Half of
the episodes are trained on with all their reasoning, half with each block emptied at random, in the
ids that LoGiC puts there. Closing a block at once is not trained on, so it stays the model's habit
to think.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from race_jax.models import Model, ModelConfig, init_model, param_axes
from race_jax.packing import OTHER, Example, fill_rows, make_example
from race_jax.train.optimizer import LoraConfig
from race_jax.train.state import Trainee, init_state
from race_jax.train.step import ComputeConfig, make_step, sft_loss
from race_jax.types import Params, TokenTrajectory

COMPUTE = ComputeConfig("float32", remat="none", head_chunk=4096)
"""How an update computes: a model this small needs no memory saved."""


@dataclasses.dataclass(frozen=True)
class TinyTraining:
    """Settings of a training from scratch.

    Attributes:
        drill_steps: Updates on look-up drills, which come first. Without them the look-ups of whole
            episodes are not found within minutes.
        drill_batch: Drills per update.
        steps: Updates on episodes.
        batch: Episodes per update.
        emptied: Share of episodes, in [0, 1], with blocks emptied at random.
        matrix_lr: Learning rate of the matrices (Muon), per update.
        other_lr: Learning rate of embeddings and norms (Adam).
        warmup: Updates over which the rates rise from 0.
        decay: Share of all updates, at the end, over which they fall to 0; in [0, 1].
        enough: Nats per token on episodes at which the look-ups are learnt. When they are found
            hangs on chance, on rounding even.
        rounds: How often half of the episode updates are made again, the rates risen anew, as long
            as the loss is above `enough`.
    """

    drill_steps: int = 90
    drill_batch: int = 16
    steps: int = 300
    batch: int = 8
    emptied: float = 0.75
    matrix_lr: float = 0.02
    other_lr: float = 0.005
    warmup: int = 10
    decay: float = 0.7
    enough: float = 0.023
    rounds: int = 4

    def __post_init__(self):
        for name, low, high in (
            *((name, 0, None) for name in ("drill_steps", "steps", "warmup", "rounds", "enough")),
            *((name, 1, None) for name in ("drill_batch", "batch")),
            *((name, 0, None) for name in ("matrix_lr", "other_lr")),
            *((name, 0, 1) for name in ("emptied", "decay")),
        ):
            value = getattr(self, name)
            if not low <= value or (high is not None and value > high):
                rule = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"training.{name} is {value}; it must be {rule}")
        if not self.drill_steps + self.steps:
            raise ValueError("training.drill_steps and training.steps are both 0; train a little")


def tiny_config(vocab_size: int, context: int = 1024) -> ModelConfig:
    """The shape of the quickstart's model: Qwen3 with two layers, about 350 thousand weights."""
    return ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": context,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
    )


def fresh_model(config: ModelConfig, seed: int) -> Model:
    """A model whose blocks start as the identity and whose other matrices keep their scale.

    Matrices inside the blocks are drawn with standard deviation 1 / sqrt(inputs); those that write
    to the residual stream are zero.
    """
    model = init_model(config, seed)
    layers = model.params["layers"]
    width = config.hidden_size
    attention = {
        name: leaf * (width**-0.5 / config.initializer_range) if leaf.ndim == 4 else leaf
        for name, leaf in layers["attention"].items()
    }
    mlp = {
        name: leaf * (width**-0.5 / config.initializer_range)
        for name, leaf in layers["mlp"].items()
    }
    attention["out"] = jnp.zeros_like(attention["out"])
    mlp["down"] = jnp.zeros_like(mlp["down"])
    params = {**model.params, "layers": {**layers, "attention": attention, "mlp": mlp}}
    return dataclasses.replace(model, params=params)


def lesson(episode: TokenTrajectory, removed: Collection[int] = ()) -> Example:
    """An episode to train on: reasoning and actions are learnt, closing at once is not.

    Args:
        episode: The episode.
        removed: Turns that are taken without their reasoning.
    """
    example = make_example(episode, 0, removed)
    for (begin, _, skips), turn in zip(example.turns, episode.turns, strict=True):
        if skips:
            example.kinds[begin : begin + len(turn.skip)] = OTHER
    return example


def lessons(
    episodes: Sequence[TokenTrajectory],
    drills: Sequence[TokenTrajectory],
    settings: TinyTraining,
    seed: int,
) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
    """The batches of a whole training: drills first, then episodes with blocks emptied at random.

    Each pass over the episodes is in a new order, and empties other blocks.

    Returns:
        Arrays [B, T] as `fill_rows` makes them, and the most places with loss in a row.

    Raises:
        ValueError: There is nothing of what the settings ask for.
    """
    rng = random.Random(f"lessons {seed}")
    for kind, items, steps, size in (
        ("drills", drills, settings.drill_steps, settings.drill_batch),
        ("episodes", episodes, settings.steps, settings.batch),
    ):
        if steps and not items:
            raise ValueError(f"{steps} updates on {kind} are asked for, but there are none")
        full = [lesson(item) for item in items]
        # One width and one number of places, so that one program is compiled.
        length = -(-max((len(e.tokens) for e in full), default=0) // 16) * 16
        places = -(-max((np.sum(e.kinds != OTHER) for e in full), default=0) // 16) * 16
        order: list[int] = []
        for _ in range(steps):
            rows = []
            for _ in range(size):
                order = order or rng.sample(range(len(items)), len(items))
                i = order.pop()
                emptied = kind == "episodes" and rng.random() < settings.emptied
                some = lesson(items[i], _some(rng, len(items[i].turns))) if emptied else full[i]
                rows.append([{"tokens": some.tokens, "kinds": some.kinds}])
            yield fill_rows(rows, length), min(int(places), length)


def _some(rng: random.Random, turns: int) -> set[int]:
    """Turns to empty: each with the same chance, which itself is drawn per episode."""
    chance = rng.random()
    return {t for t in range(turns) if rng.random() < chance}


def optimizer(model: Model, settings: TinyTraining) -> optax.GradientTransformation:
    """Muon on the matrices of the blocks, Adam on embeddings and norms."""
    muon = optax.contrib.muon(
        schedule(settings, settings.matrix_lr),
        adam_learning_rate=schedule(settings, settings.other_lr),
        muon_weight_dimension_numbers=lambda params: matrix_axes(model.config),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def schedule(settings: TinyTraining, peak: float) -> optax.Schedule:
    """A rate that rises in a line to `peak`, stays, and falls in a line to 0."""
    total = settings.drill_steps + settings.steps
    rise, fall = max(settings.warmup, 1), max(settings.decay * total, 1)
    return lambda step: peak * jnp.clip(jnp.minimum((step + 1) / rise, (total - step) / fall), 0, 1)


def matrix_axes(config: ModelConfig) -> Any:
    """Which axes of each parameter are a matrix's inputs and outputs; None for what is none."""

    def numbers(axes: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
        if axes[0] != "layers" or len(axes) < 3:
            return None
        middle = tuple(range(2, len(axes) - 1))
        if axes[1] == "embed":
            return optax.contrib.MuonDimensionNumbers((1,), (*middle, len(axes) - 1))
        return optax.contrib.MuonDimensionNumbers((1, *middle), (len(axes) - 1,))

    return jax.tree.map(numbers, param_axes(config), is_leaf=lambda x: isinstance(x, tuple))


def train(
    model: Model,
    batches: Iterator[tuple[Mapping[str, np.ndarray], int]],
    settings: TinyTraining,
    report: Callable[[int, float, Params], None] = lambda step, loss, params: None,
) -> Model:
    """Update the model once per batch; returns the trained model.

    Args:
        model: Where to start.
        batches: From `lessons`, one per update.
        settings: Rates and their schedule.
        report: Called after each update with its number, from 1, the loss in nats per token, and
            the parameters, which the next update overwrites.
    """
    trainee, rule = Trainee(model, {}, LoraConfig()), optimizer(model, settings)
    update = make_step(trainee, rule, sft_loss, COMPUTE)
    state = init_state(trainee, rule, model.params, jax.random.key(0))
    for step, (batch, places) in enumerate(batches, 1):
        arrays = {name: jnp.asarray(values) for name, values in batch.items()}
        state, told = update(state, {}, arrays, places)
        report(step, float(told["loss"]), state.trained)
    return dataclasses.replace(model, params=state.trained)
