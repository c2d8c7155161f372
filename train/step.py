"""One step of training: micro-batches, the normalised gradient, the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from race_jax import losses
from race_jax.logprobs import token_logprobs
from race_jax.settings import check_rules
from race_jax.sharding import constrain
from race_jax.train.optimizer import compute_params, matrices
from race_jax.train.state import Trainee, TrainState
from race_jax.types import Params

Arrays = Mapping[str, jax.Array]
"""A batch: `tokens`, `targets`, `positions`, `segment_ids`, `loss_mask` and more, each [B, T]."""
Loss = Callable[[jax.Array, Arrays], tuple[jax.Array, jax.Array]]
"""Log-probabilities [B, P] and the batch at those places -> (sum, weight)."""
Measure = Callable[[jax.Array, Arrays], dict[str, jax.Array]]
"""The same -> sums that are told beside the loss; micro-batches' add up."""
Probe = Callable[[jax.Array, jax.Array, Arrays], dict[str, jax.Array]]
"""Hidden states [B, T, D], the head [V, D] and the batch -> further such sums."""


class Bounded(NamedTuple):
    """A further loss, whose gradient is clipped on its own.

    Attributes:
        loss: The loss.
        norm: The highest norm of its gradient.
    """

    loss: Loss
    norm: float


def sft_loss(logprobs: jax.Array, batch: Arrays) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of the policy's tokens: RACE eq. 12 on a batch."""
    return losses.sft(logprobs, batch["loss_mask"])


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How a step computes; what comes out is the same up to rounding.

    Attributes:
        dtype: Arithmetic of the trunk, `float32` or `bfloat16`; master weights, norms, head and
            loss are float32 always.
        micro_batches: Parts a batch is cut into, one after the other; memory follows one part.
        remat: `block` keeps each block's input only and recomputes the rest in the backward pass;
            `none` keeps everything.
        head_chunk: Tokens whose logits exist at a time, on each device.
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    micro_batches: int = 1
    remat: Literal["block", "none"] = "block"
    head_chunk: int = 256

    def __post_init__(self):
        rules = {
            "dtype": (self.dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
            "micro_batches": (self.micro_batches >= 1, "at least 1"),
            "remat": (self.remat in ("block", "none"), "block or none"),
            "head_chunk": (self.head_chunk >= 1, "at least 1"),
        }
        check_rules("compute", self, rules)


def select_places(batch: Arrays, places: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The columns of each row that carry loss, first of all, so that the head sees no others.

    Args:
        batch: Arrays [B, T].
        places: P, at least the largest number of places with loss in a row.

    Returns:
        Their columns int32 [B, P], and the batch at those columns. Rows with fewer are filled up
        with columns that carry none.
    """
    order = jnp.argsort(~batch["loss_mask"], axis=1, stable=True)[:, :places]
    return order, {k: jnp.take_along_axis(v, order, axis=1) for k, v in batch.items()}


def batch_logprobs(
    trainee: Trainee,
    params: Params,
    batch: Arrays,
    places: int,
    compute: ComputeConfig,
    temperature: float = 1.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Log-probability float32 [B, P] of the targets that carry loss, and the batch there.

    `temperature` divides the logits.
    """
    hidden = hidden_states(trainee, params, batch, compute, temperature)
    return logprobs_at(hidden, trainee.model.head(params), batch, places, compute)


def hidden_states(
    trainee: Trainee,
    params: Params,
    batch: Arrays,
    compute: ComputeConfig,
    temperature: float = 1.0,
) -> jax.Array:
    """The states [B, T, D] whose products with the head are the logits, over `temperature`."""
    hidden = trainee.model.forward(
        params,
        batch["tokens"],
        batch["positions"],
        batch["segment_ids"],
        remat=compute.remat == "block",
        ends=batch.get("ends"),
    )
    # The head is linear, and has no bias.
    return hidden if temperature == 1 else hidden / temperature


def logprobs_at(
    hidden: jax.Array, head: jax.Array, batch: Arrays, places: int, compute: ComputeConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`batch_logprobs`, given the hidden states [B, T, D] and the head [V, D]."""
    order, picked = select_places(batch, places)
    states = jnp.take_along_axis(hidden, order[..., None], axis=1)
    return token_logprobs(states, head, picked["targets"], chunk=compute.head_chunk), picked


def split_batch(batch: Arrays, parts: int) -> Arrays:
    """[B, T] -> [parts, B / parts, T], in which every device keeps rows that it has.

    Part m takes rows m, m + parts, ...: rows lie on devices in order, so each part has some on
    every device.
    """
    size = len(batch["tokens"])
    if size % parts:
        raise ValueError(
            f"a batch of {size} rows cannot be cut into {parts} micro-batches; make "
            "compute.micro_batches a divisor of data.batch_size."
        )

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(size // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, (None, "batch", "time"))

    return {name: cut(x) for name, x in batch.items()}


def loss_and_gradient(
    trainee: Trainee,
    trained: Params,
    frozen: Params,
    batch: Arrays,
    loss: Loss,
    compute: ComputeConfig,
    places: int,
    *,
    measure: Measure | None = None,
    probe: Probe | None = None,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array, Params, dict[str, jax.Array]]:
    """Sum and weight of a batch's loss, and the gradient of their quotient.

    (sum_m S_m) / (sum_m W_m) over the micro-batches m: each part adds its sum, its weight and the
    gradient of its sum, and one division follows. A mean of the parts' means would count a token
    of a short part more than one of a long part.

    Returns:
        S, W, and d(S / W) / d `trained` in float32, zero where W is 0; and the sums of `measure`
        and `probe`, which have no part in the gradient.
    """
    wide = matrices(trainee.axes)

    def part_sum(trained: Params, part: Arrays) -> tuple[jax.Array, tuple]:
        params = compute_params(trainee.params(trained, frozen), wide, compute.dtype)
        hidden = hidden_states(trainee, params, part, compute, temperature)
        head = trainee.model.head(params)
        logprobs, picked = logprobs_at(hidden, head, part, places, compute)
        total, weight = loss(logprobs, picked)
        told = measure(jax.lax.stop_gradient(logprobs), picked) if measure else {}
        if probe:
            told |= probe(*jax.lax.stop_gradient((hidden, head)), part)
        return total, (weight, told)

    gradient_of = jax.value_and_grad(part_sum, has_aux=True)

    def add(carry: tuple, part: Arrays) -> tuple[tuple, dict[str, jax.Array]]:
        total, weight, gradient = carry
        (s, (w, told)), g = gradient_of(trained, part)
        return (total + s, weight + w, jax.tree.map(jnp.add, gradient, g)), told

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jax.tree.map(jnp.zeros_like, trained))
    parts = split_batch(batch, compute.micro_batches)
    (total, weight, gradient), told = jax.lax.scan(add, start, parts)
    told = {name: jnp.sum(values, axis=0) for name, values in told.items()}
    scale = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
    return total, weight, jax.tree.map(lambda g: g * scale, gradient), told


def make_step(
    trainee: Trainee,
    rule: optax.GradientTransformation,
    loss: Loss,
    compute: ComputeConfig,
    *,
    measure: Measure | None = None,
    probe: Probe | None = None,
    bounded: Bounded | None = None,
    temperature: float = 1.0,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted step `(state, frozen, batch, places) -> (state, metrics)`.

    The state is donated. A step whose loss or gradient is not finite changes only the counters, so
    that one bad batch costs one step.

    Metrics, float32 scalars: `loss` (sum / weight), `weight`, `grad_norm` (before clipping),
    `skipped`, `skipped_in_a_row`, and the sums of `measure` and `probe`. `temperature` divides the
    logits. `bounded` is forwarded on its own, so it costs a second pass and a second gradient in
    memory; the metrics count it in, and `bounded_norm` is its gradient's before clipping.
    """

    def step(
        state: TrainState, frozen: Params, batch: Arrays, places: int
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def gradient_of(loss: Loss, **asked: Any) -> tuple:
            arrays = (state.trained, frozen, batch)
            return loss_and_gradient(
                trainee, *arrays, loss, compute, places, temperature=temperature, **asked
            )

        total, weight, gradient, told = gradient_of(loss, measure=measure, probe=probe)
        value = total / jnp.maximum(weight, 1)
        if bounded:
            further, share, second, _ = gradient_of(bounded.loss)
            value += further / jnp.maximum(share, 1)
            told["bounded_norm"] = size = optax.tree.norm(second)
            scale = bounded.norm / jnp.maximum(size, bounded.norm)
            gradient = jax.tree.map(lambda a, b: a + scale * b, gradient, second)
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(value) & jnp.isfinite(norm)
        updates, optimizer = rule.update(gradient, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)

        def keep(new: Params, old: Params) -> Params:
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        bad = 1 - good.astype(jnp.int32)
        state = TrainState(
            state.step + 1,
            keep(trained, state.trained),
            keep(optimizer, state.optimizer),
            state.key,
            state.skipped + bad,
            (state.skipped_in_a_row + 1) * bad,
        )
        metrics = {
            "loss": value,
            "weight": weight,
            "grad_norm": norm,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
            **told,
        }
        return state, metrics

    return jax.jit(step, static_argnames="places", donate_argnames="state")


def places_in(loss_mask, width: int, step: int = 8) -> int:
    """How many places per row the head must see: the most in any row, rounded up to T / `step`.

    Rounding keeps the number of compiled programs at `step`.
    """
    most = int(loss_mask.sum(axis=1).max(initial=0))
    unit = max(-(-width // step), 1)
    return min(max(-(-most // unit), 1) * unit, width)
