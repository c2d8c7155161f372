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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from race_jax.logprobs import token_logprobs
from race_jax.models import Model, ModelConfig, init_model, param_axes
from race_jax.types import Params, TokenTrajectory


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


class Batch(NamedTuple):
    """Rows to train on.

    Attributes:
        tokens: int32 [B, T], padded with 0 at the end.
        places: int32 [B, P], positions whose next token is trained on; 0 where unused.
        weights: float32 [B, P], 1 at used places, else 0.
    """

    tokens: np.ndarray
    places: np.ndarray
    weights: np.ndarray


class Row(NamedTuple):
    """A sequence and which of its tokens are trained on."""

    tokens: list[int]
    loss_mask: list[bool]


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


def row(episode: TokenTrajectory, removed: Collection[int] = ()) -> Row:
    """An episode as a row: reasoning and actions are trained on, removed blocks are not."""
    tokens, mask = list(episode.prompt), [False] * len(episode.prompt)
    for t, turn in enumerate(episode.turns):
        kept = bool(turn.reasoning) and t not in removed
        last = t + 1 == len(episode.turns)
        observation = () if last else turn.observation
        for ids, trained in (
            (turn.reasoning if kept else turn.skip, kept),
            (turn.action, True),
            (observation, False),
        ):
            tokens += ids
            mask += [trained] * len(ids)
    return Row(tokens, mask)


def batch(rows: Sequence[Row], length: int, places: int) -> Batch:
    """Rows as arrays [B, `length`] with `places` trained tokens at most."""
    shape = (len(rows), places)
    out = Batch(
        np.zeros((len(rows), length), np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
    )
    for b, (tokens, mask) in enumerate(rows):
        out.tokens[b, : len(tokens)] = tokens
        trained = [i - 1 for i in range(1, len(tokens)) if mask[i]]
        out.places[b, : len(trained)] = trained
        out.weights[b, : len(trained)] = 1.0
    return out


def lessons(
    episodes: Sequence[TokenTrajectory],
    drills: Sequence[TokenTrajectory],
    settings: TinyTraining,
    seed: int,
) -> Iterator[Batch]:
    """The batches of a whole training: drills first, then episodes with blocks emptied at random.

    Each pass over the episodes is in a new order, and empties other blocks.
    """
    rng = random.Random(f"lessons {seed}")
    for kind, items, steps, size in (
        ("drills", drills, settings.drill_steps, settings.drill_batch),
        ("episodes", episodes, settings.steps, settings.batch),
    ):
        if steps and not items:
            raise ValueError(f"{steps} updates on {kind} are asked for, but there are none")
        full = [row(item) for item in items]
        # Few widths, so that few programs are compiled.
        length = -(-max((len(r.tokens) for r in full), default=0) // 16) * 16
        places = -(-max((sum(r.loss_mask) for r in full), default=0) // 16) * 16
        order: list[int] = []
        for _ in range(steps):
            rows = []
            for _ in range(size):
                order = order or rng.sample(range(len(items)), len(items))
                i = order.pop()
                emptied = kind == "episodes" and rng.random() < settings.emptied
                rows.append(row(items[i], _some(rng, len(items[i].turns))) if emptied else full[i])
            yield batch(rows, length, places)


def _some(rng: random.Random, turns: int) -> set[int]:
    """Turns to empty: each with the same chance, which itself is drawn per episode."""
    chance = rng.random()
    return {t for t in range(turns) if rng.random() < chance}


def loss_sum(model: Model, params: Params, data: Batch) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of the trained tokens: its sum in nats, and their number."""
    tokens = jnp.asarray(data.tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Padding stands at the end only, where no trained token sees it.
    hidden = model.forward(params, tokens, positions, jnp.ones_like(tokens))
    before = jnp.take_along_axis(hidden, data.places[..., None], axis=1)
    targets = jnp.take_along_axis(tokens, data.places + 1, axis=1)
    logprobs = token_logprobs(
        before.reshape(-1, before.shape[-1]), model.head(params), targets.reshape(-1), chunk=4096
    )
    return -jnp.sum(logprobs * data.weights.reshape(-1)), jnp.sum(data.weights)


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
    batches: Iterator[Batch],
    settings: TinyTraining,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Model:
    """Update the model once per batch; returns the trained model.

    Args:
        model: Where to start.
        batches: One batch per update.
        settings: Rates and their schedule.
        report: Called after each update with its number, from 1, and the loss in nats per token.
    """
    rule = optimizer(model, settings)

    @jax.jit
    def update(params: Params, state: Any, data: Batch) -> tuple[Params, Any, jax.Array]:
        def mean(params: Params) -> jax.Array:
            total, count = loss_sum(model, params, data)
            return total / jnp.maximum(count, 1.0)

        loss, gradient = jax.value_and_grad(mean)(params)
        updates, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state = model.params, rule.init(model.params)
    for step, data in enumerate(batches, 1):
        params, state, loss = update(params, state, data)
        report(step, float(loss))
    return dataclasses.replace(model, params=params)
