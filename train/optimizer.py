"""AdamW by Optax: schedules, clipping, which arrays decay, and adapters of low rank."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from race_jax.models.layers import draw_flat
from race_jax.settings import check_rules
from race_jax.types import Params

_STACKED = ("layers", "experts")
"""Axes that count copies of a matrix; the others are its inputs and outputs."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank on every linear layer of the blocks; the rest stays as it is.

    W = W_0 + (alpha / rank) A B, with A [inputs, rank] drawn and B [rank, outputs] zero at the
    start. The embedding and the head are not adapted.

    Attributes:
        rank: Rank of every adapter; 0 trains all parameters instead.
        alpha: Scale of the adapters before the division by `rank`.
    """

    rank: int = 0
    alpha: float = 32.0

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1, or 0 for none.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        lr: Highest learning rate, above 0.
        schedule: How the rate falls after the warm-up: `cosine`, `linear` or `constant`.
        warmup: Share of all steps, in [0, 1), over which the rate rises from 0.
        final_lr: Share of `lr` that is left at the last step, in [0, 1]; of no effect for
            `constant`.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, above 0.
        weight_decay: Decoupled decay per step, times the learning rate; norms and biases have none.
        clip: Largest global norm of a gradient; longer ones are scaled down to it.
        patience: Steps in a row that may be skipped for a loss or gradient that is not finite.
    """

    lr: float = 1e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.03
    final_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    patience: int = 5

    def __post_init__(self):
        rules = {
            "lr": (0 < self.lr < math.inf, "above 0 and finite"),
            "schedule": (
                self.schedule in ("cosine", "linear", "constant"),
                "cosine, linear or constant",
            ),
            "warmup": (0 <= self.warmup < 1, "a share of the steps from 0 to below 1"),
            "final_lr": (0 <= self.final_lr <= 1, "a share of lr from 0 to 1"),
            "beta1": (0 <= self.beta1 < 1, "from 0 to below 1"),
            "beta2": (0 <= self.beta2 < 1, "from 0 to below 1"),
            "eps": (0 < self.eps < math.inf, "above 0 and finite"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0 and finite"),
            "clip": (0 < self.clip < math.inf, "above 0 and finite"),
            "patience": (self.patience >= 1, "at least 1"),
        }
        check_rules("optimizer", self, rules)


def schedule(config: OptimizerConfig, steps: int) -> Callable[[Any], jax.Array]:
    """Learning rate of each step, counted from 0.

    With W = round(warmup * steps): rate_s = lr (s + 1) / W while s < W; then, at the share
    u = (s - W) / max(steps - W, 1) of the rest, lr (f + (1 - f) (1 + cos(pi u)) / 2) for `cosine`,
    lr (f + (1 - f) (1 - u)) for `linear` and lr for `constant`, with f = `final_lr`.
    """
    rise = round(config.warmup * steps)

    def rate(step: Any) -> jax.Array:
        share = jnp.clip((step - rise) / max(steps - rise, 1), 0, 1)
        shape = {
            "cosine": (1 + jnp.cos(jnp.pi * share)) / 2,
            "linear": 1 - share,
            "constant": jnp.ones_like(share),
        }[config.schedule]
        floor = 0.0 if config.schedule == "constant" else config.final_lr
        falling = floor + (1 - floor) * shape
        return config.lr * jnp.where(step < rise, (step + 1) / max(rise, 1), falling)

    return rate


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether these are the axes of a matrix to or from the residual stream.

    Norms, biases and what else a layer keeps per channel are none: an embedding axis alone, or no
    embedding axis at all.
    """
    core = [axis for axis in axes if axis not in _STACKED]
    return "embed" in core and len(core) > 1


def matrices(axes: Params) -> Params:
    """For each parameter, whether it is a matrix, by its logical axes from `param_axes`."""
    return map_axes(is_matrix, axes)


def map_axes(function: Callable[[tuple[str, ...]], Any], axes: Params) -> Params:
    """`function` of each parameter's logical axes, in a tree like that of `param_axes`."""
    return jax.tree.map(function, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def make_optimizer(
    config: OptimizerConfig, steps: int, decayed: Params
) -> optax.GradientTransformation:
    """Clip to the global norm, then AdamW on the schedule.

    Args:
        config: Rates, moments, decay.
        steps: Length of the run, for the schedule.
        decayed: A pytree of bools like the parameters: which of them weight decay touches.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def compute_params(params: Params, wide: Params, dtype: str) -> Params:
    """The parameters that a step computes with: matrices in `dtype`, all else in float32.

    Args:
        params: Master weights, float32.
        wide: Which of them are matrices, from `matrices`.
        dtype: `float32` or `bfloat16`.
    """
    return jax.tree.map(lambda x, m: x.astype(dtype if m else jnp.float32), params, wide)


def _inputs(core: tuple[str, ...]) -> int:
    """How many of a matrix's axes are inputs: `embed` first, or all before `embed` last."""
    return 1 if core[0] == "embed" else len(core) - 1


def _adapted(axes: tuple[str, ...]) -> bool:
    return is_matrix(axes) and "vocab" not in axes


def init_lora(params: Params, axes: Params, config: LoraConfig, key: jax.Array) -> Params:
    """Fresh adapters, float32.

    Args:
        params: The parameters or their shapes.
        axes: Logical axes of each, from `param_axes`.
        config: Rank.
        key: A random key.

    Returns:
        Nested dict like `params` with `{"a", "b"}` in place of each adapted matrix and without
        the other parameters: a [stack..., inputs..., rank] from N(0, 1 / inputs), b zero.
    """

    def walk(node: Any, names: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            made = {k: walk(v, names[k], (*path, k)) for k, v in node.items()}
            return {k: v for k, v in made.items() if v is not None}
        if not _adapted(names):
            return None
        stack = sum(axis in _STACKED for axis in names)
        cut = stack + _inputs(names[stack:])
        inputs, shape = math.prod(node.shape[stack:cut]), node.shape
        own = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
        drawn = draw_flat(jax.random.normal, own, (*shape[:cut], config.rank))
        return {
            "a": drawn / math.sqrt(inputs),
            "b": jnp.zeros((*shape[:stack], config.rank, *shape[cut:]), jnp.float32),
        }

    return _without_empty(walk(params, axes, ()))


def lora_axes(axes: Params) -> Params:
    """Logical axes of the adapters, parallel to `init_lora`; the rank is never cut."""

    def walk(names: Any) -> Any:
        if isinstance(names, dict):
            made = {k: walk(v) for k, v in names.items()}
            return {k: v for k, v in made.items() if v is not None}
        if not _adapted(names):
            return None
        stack = sum(axis in _STACKED for axis in names)
        cut = stack + _inputs(names[stack:])
        return {"a": (*names[:cut], None), "b": (*names[:stack], None, *names[cut:])}

    return _without_empty(walk(axes))


def _without_empty(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    kept = {k: _without_empty(v) for k, v in tree.items()}
    return {k: v for k, v in kept.items() if not (isinstance(v, dict) and not v)}


def merge_lora(params: Params, adapters: Params, axes: Params, config: LoraConfig) -> Params:
    """The parameters with their adapters added in, in the dtype of the parameters.

    W = W_0 + (alpha / rank) A B, summed in float32.
    """

    def walk(node: Any, adapter: Any, names: Any) -> Any:
        if adapter is None:
            return node
        if isinstance(node, dict):
            return {k: walk(v, adapter.get(k), names[k]) for k, v in node.items()}
        stack = sum(axis in _STACKED for axis in names)
        a, b = adapter["a"], adapter["b"]
        flat_a = a.reshape(*a.shape[:stack], -1, config.rank)
        flat_b = b.reshape(*b.shape[:stack], config.rank, -1)
        added = jnp.einsum("...ir,...ro->...io", flat_a, flat_b).reshape(node.shape)
        return (node.astype(jnp.float32) + config.alpha / config.rank * added).astype(node.dtype)

    return walk(params, adapters, axes)
