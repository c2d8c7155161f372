"""Training a tiny hybrid-thinking model from scratch, on a CPU, in minutes.

A hybrid-thinking model acts both after reasoning and after an empty block. LoGiC needs one as its
scorer: to a model that has never acted after an empty block every removal looks harmful. Half of
the episodes are trained on with all their reasoning, half with each block emptied at random, in the
ids that LoGiC puts there. Closing a block at once is not trained on, so it stays the model's habit
to think.
"""

from __future__ import annotations

import dataclasses
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
        steps: Updates on episodes.
        batch: Rows per update.
        emptied: Share of episodes, in [0, 1], in which each block is emptied with probability 1/2.
        matrix_lr: Learning rate of the matrices (Muon), per update.
        other_lr: Learning rate of embeddings and norms (Adam).
        warmup: Updates over which the rates rise from 0.
        decay: Share of all updates, at the end, over which they fall to 0; in [0, 1].
    """

    drill_steps: int = 80
    steps: int = 220
    batch: int = 16
    emptied: float = 0.5
    matrix_lr: float = 0.01
    other_lr: float = 0.003
    warmup: int = 10
    decay: float = 0.5


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
        name: leaf * (width**-0.5 / config.initializer_range) for name, leaf in layers["mlp"].items()
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


def loss_sum(model: Model, params: Params, data: Batch) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of the trained tokens: its sum in nats, and their number."""
    rows, length = data.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    hidden = model.forward(params, data.tokens, positions, jnp.ones_like(data.tokens))
    before = jnp.take_along_axis(hidden, data.places[..., None], axis=1)
    targets = jnp.take_along_axis(data.tokens, data.places + 1, axis=1)
    logprobs = token_logprobs(
        before.reshape(-1, before.shape[-1]), model.head(params), targets.reshape(-1), chunk=4096
    )
    return -jnp.sum(logprobs * data.weights.reshape(-1)), jnp.sum(data.weights)


def optimizer(model: Model, settings: TinyTraining) -> optax.GradientTransformation:
    """Muon on the matrices of the blocks, Adam on embeddings and norms."""
    total = settings.drill_steps + settings.steps
    fall = max(int(settings.decay * total), 1)

    def schedule(peak: float) -> optax.Schedule:
        rise = optax.linear_schedule(0.0, peak, settings.warmup)
        return optax.join_schedules(
            [rise, optax.linear_schedule(peak, 0.0, fall)],
            [max(total - fall, settings.warmup)],
        )

    muon = optax.contrib.muon(
        schedule(settings.matrix_lr),
        adam_learning_rate=schedule(settings.other_lr),
        muon_weight_dimension_numbers=lambda params: matrix_axes(model.config),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


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
