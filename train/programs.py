"""The programs that runs spend their time in, on shapes in place of arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from race_jax import losses
from race_jax.logic.scoring import score_rows
from race_jax.logprobs import token_logprobs
from race_jax.models import Model, abstract_params, make_model, param_axes
from race_jax.sharding import sharding_for, shardings_for
from race_jax.train.flops import ModelFlops
from race_jax.train.optimizer import OptimizerConfig, make_optimizer
from race_jax.train.plan_config import PlanConfig, model_config
from race_jax.train.state import Trainee, abstract_state
from race_jax.train.step import Arrays, make_step, sft_loss
from race_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function and the shapes that it is called with.

    Attributes:
        name: What it does, in a few words.
        shape: What it takes at once, in words.
        lower: Traces it, within `use_mesh`.
        resident: What lies on the chips while it runs, by kind: `parameters`, `optimizer`, `cache`
            and `inputs`, each a pytree of shapes with shardings.
        model_flops: FLOPs that the mathematics needs, over all chips.
    """

    name: str
    shape: str
    lower: Callable[[], Any]
    resident: dict[str, Any]
    model_flops: float


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What all programs of a run have in common."""

    config: PlanConfig
    mesh: Mesh
    model: Model

    @property
    def length(self) -> str:
        """Tokens of a row, in words."""
        return f"{self.config.sequence_length:,} tokens"

    def params(self) -> Params:
        """The parameters in the dtype of the arithmetic."""
        shapes = abstract_params(self.model.config, self.config.compute.dtype)
        placed = shardings_for(param_axes(self.model.config), self.mesh, shapes)
        return jax.tree.map(_placed, shapes, placed)

    def array(self, axes: tuple, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        """One array of that shape."""
        sharding = sharding_for(axes, self.mesh, shape, name=f"{self.config.program} batch")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def row(self, dtype: Any = jnp.int32, rows: int = 0) -> Any:
        """[rows, sequence_length]; all rows of a batch by default."""
        shape = (rows or self.config.rows, self.config.sequence_length)
        return self.array(("batch", "time"), shape, dtype)


def make_programs(config: PlanConfig, mesh: Mesh) -> list[Program]:
    """The programs of a run; call it within `use_mesh`.

    Args:
        config: The run.
        mesh: The mesh in use.

    Raises:
        ValueError: If a dimension does not divide its mesh axes.
    """
    shape = model_config(config.model)
    model = make_model(shape, {}, config.sequence_length)
    setting = _Setting(config, mesh, model)
    if config.trains:
        return [_training(setting)]
    if config.program == "decode":
        return [_decoding(setting)]
    return [_scoring(setting), _engine(setting)]


def _scoring(setting: _Setting) -> Program:
    """Whole rows, one for each group of devices, and the log-probabilities of some tokens."""
    model, config = setting.model, setting.config
    rows = setting.mesh.shape["data"] * setting.mesh.shape["fsdp"]
    params, row = setting.params(), setting.row(rows=rows)
    spots = setting.array(("batch", None), (rows, config.places))

    @jax.jit
    def score(params: Params, rows: tuple, spots: Any, wanted: Any) -> jax.Array:
        hidden = model.forward(params, *rows)
        hidden = jnp.take_along_axis(hidden, spots[..., None], axis=1)
        return token_logprobs(hidden, model.head(params), wanted)

    batch = ((row, row, row), spots, spots)
    return Program(
        "scoring pass",
        f"{rows} x {setting.length}, {config.places:,} scored of each row",
        lambda: score.lower(params, *batch),
        {"parameters": params, "inputs": batch},
        ModelFlops(model.config).forward(rows, config.sequence_length, config.places),
    )


def _engine(setting: _Setting) -> Program:
    """A step of LoGiC's engine: more tokens of each sequence, on top of all that fits before."""
    model, config = setting.model, setting.config
    rows, tokens = config.rows, config.row_tokens
    params, places = setting.params(), max(1, round(config.head_share * rows * tokens))
    head = model.head(params)
    head = jax.ShapeDtypeStruct(head.shape, jnp.float32, sharding=head.sharding)
    cache = _cache(setting, params, config.sequence_length + tokens)

    flat = setting.array((None,), (rows,))
    picks = setting.array((None,), (rows * tokens,))
    rest = (setting.array((None, None), (rows, tokens)), flat, flat, flat, picks, picks)
    jitted = jax.jit(functools.partial(score_rows, model), donate_argnums=2)
    return Program(
        "LoGiC engine step",
        f"{rows} sequences of {setting.length}, {tokens} more of each, {places} scored",
        lambda: jitted.lower(params, head, cache, *rest, places),
        {"parameters": (params, head), "cache": cache, "inputs": rest},
        ModelFlops(model.config).extend(rows, tokens, config.sequence_length, places),
    )


def _decoding(setting: _Setting) -> Program:
    """One more token of each sequence, and the logits that the next is drawn from."""
    model, config = setting.model, setting.config
    params, rows = setting.params(), config.rows
    cache = _cache(setting, params, config.sequence_length)

    def step(params: Params, cache: Any, tokens: Any, slots: Any, starts: Any) -> Any:
        hidden, cache = model.extend(params, cache, tokens, slots, starts)
        head = model.head(params)
        logits = jnp.einsum(
            "rqd,vd->rv", hidden.astype(head.dtype), head, preferred_element_type=jnp.float32
        )
        return logits, cache

    flat = setting.array((None,), (rows,))
    rest = (setting.array((None, None), (rows, 1)), flat, flat)
    jitted = jax.jit(step, donate_argnums=1)
    return Program(
        "decode step",
        f"{rows} sequences of {setting.length}, one more of each",
        lambda: jitted.lower(params, cache, *rest),
        {"parameters": params, "cache": cache, "inputs": rest},
        ModelFlops(model.config).extend(rows, 1, config.sequence_length - 1, rows),
    )


def _cache(setting: _Setting, params: Params, length: int) -> Any:
    """Shapes of the cache, where the model puts it."""
    make = functools.partial(setting.model.init_cache, slots=setting.config.rows)
    # Where it lies does not depend on its length, and a short one always fits.
    short = jax.jit(functools.partial(make, length=1)).lower(params).compile()
    shapes = jax.eval_shape(functools.partial(make, length=length), params)
    return jax.tree.map(_placed, shapes, short.output_shardings)


def _training(setting: _Setting) -> Program:
    """A whole step: micro-batches, the gradient, AdamW."""
    model, config = setting.model, setting.config
    frozen = setting.params() if config.lora.rank else {}
    trainee = Trainee(model, frozen, config.lora)
    rule = make_optimizer(OptimizerConfig(), 1000, trainee.decayed)
    state = abstract_state(trainee, rule, setting.mesh)
    names = ("tokens", "targets", "positions", "segment_ids")
    batch: dict[str, Any] = {name: setting.row() for name in names}
    batch["loss_mask"] = setting.row(jnp.bool_)
    if config.program == "rl":
        batch["keep_mask"] = setting.row(jnp.bool_)
        batch |= {name: setting.row(jnp.float32) for name in ("advantages", "old_logprobs")}
    loss = {"sft": sft_loss, "rl": rl_loss}[config.program]
    step: Any = make_step(trainee, rule, loss, config.compute)
    flops = ModelFlops(model.config).forward(config.rows, config.sequence_length, config.places)
    return Program(
        {"sft": "SFT step", "rl": "RL step"}[config.program],
        f"{config.rows} x {setting.length} in {config.compute.micro_batches} parts, "
        f"the head on {config.places:,} of each row, remat {config.compute.remat}, "
        + (f"LoRA of rank {config.lora.rank}" if config.lora.rank else "AdamW on all parameters"),
        lambda: step.lower(state, frozen, batch, places=config.places),
        {
            "parameters": (state.trained, frozen),
            "optimizer": state.optimizer,
            "inputs": batch,
        },
        (2 if config.lora.rank else 3) * flops,
    )


def rl_loss(logprobs: jax.Array, batch: Arrays) -> tuple[jax.Array, jax.Array]:
    """Sum and weight of the clipped surrogate over the policy's tokens, less those that are cut."""
    return losses.masked_grpo(
        logprobs,
        batch["old_logprobs"],
        batch["advantages"],
        batch["loss_mask"],
        batch["keep_mask"],
        clip_low=0.2,
        clip_high=0.2,
    )


def _placed(shape: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
