"""What training changes: trained parameters, optimizer, counters, random key."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from race_jax.models import Model, abstract_params, param_axes
from race_jax.sharding import replicated, shardings_for, state_shardings
from race_jax.train.optimizer import (
    LoraConfig,
    init_lora,
    is_matrix,
    lora_axes,
    map_axes,
    merge_lora,
)
from race_jax.types import Params


class TrainState(NamedTuple):
    """All that a step reads and replaces, and that a checkpoint holds.

    Attributes:
        step: int32 scalar, steps done, skipped ones included.
        trained: Master weights float32: all parameters, or the adapters.
        optimizer: The optimizer's state.
        key: Raw random key; step s draws from it folded with s.
        skipped: int32 scalar, steps skipped so far for a loss or gradient that is not finite.
        skipped_in_a_row: int32 scalar, those since the last good step.
    """

    step: jax.Array
    trained: Params
    optimizer: Any
    key: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


class Trainee(NamedTuple):
    """A model and which of its arrays are trained.

    Attributes:
        model: Its functions; `model.params` is not read.
        frozen: Parameters under the adapters, in the dtype of the arithmetic; empty when all are
            trained.
        lora: Rank 0 trains all.
    """

    model: Model
    frozen: Params
    lora: LoraConfig

    @property
    def axes(self) -> Params:
        """Logical axes of the model's parameters."""
        return param_axes(self.model.config)

    @property
    def decayed(self) -> Params:
        """Which trained arrays weight decay touches: matrices, and all adapters."""
        return map_axes(lambda axes: bool(self.lora.rank) or is_matrix(axes), self.trained_axes)

    @property
    def trained_axes(self) -> Params:
        """Logical axes of what is trained."""
        return lora_axes(self.axes) if self.lora.rank else self.axes

    def params(self, trained: Params, frozen: Params) -> Params:
        """The model's parameters: the trained ones, or the frozen ones with adapters added in."""
        if not self.lora.rank:
            return trained
        return merge_lora(frozen, trained, self.axes, self.lora)


def abstract_state(
    trainee: Trainee, rule: optax.GradientTransformation, mesh: Mesh | None
) -> TrainState:
    """Shapes of a state, with shardings where a mesh is given; a checkpoint is read into it."""

    def shapes() -> TrainState:
        params = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), abstract_params(trainee.model.config)
        )
        return init_state(trainee, rule, params, jax.random.key(0))

    state = jax.eval_shape(shapes)
    if mesh is None:
        return state
    placed = shardings_for(trainee.trained_axes, mesh, state.trained)
    whole = replicated(mesh)
    where = jax.tree.map(lambda _: whole, state)._replace(
        trained=placed, optimizer=state_shardings(state.optimizer, state.trained, placed)
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, where
    )


def init_state(
    trainee: Trainee, rule: optax.GradientTransformation, params: Params, key: jax.Array
) -> TrainState:
    """The state before the first step.

    Args:
        trainee: What is trained.
        rule: The optimizer.
        params: The model's parameters; master weights are their float32 copies.
        key: A random key: the adapters are drawn from it.
    """
    if trainee.lora.rank:
        trained = init_lora(params, trainee.axes, trainee.lora, key)
    else:
        trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    zero = jnp.zeros((), jnp.int32)
    # Counters are arrays of their own: a step that donates its state may not meet one twice.
    return TrainState(
        zero, trained, rule.init(trained), jax.random.key_data(key), zero + 0, zero + 0
    )


def fresh_state(
    trainee: Trainee,
    rule: optax.GradientTransformation,
    like: TrainState,
    params: Params,
    seed: int,
) -> TrainState:
    """Step 0: the weights in float32, moments at zero, each where it belongs.

    Args:
        trainee: What is trained.
        rule: The optimizer.
        like: From `abstract_state`.
        params: The model's parameters; without adapters they are donated.
        seed: The adapters are drawn from it.
    """
    where = jax.tree.map(lambda leaf: leaf.sharding, like)
    make = functools.partial(init_state, trainee, rule)
    # Without adapters the float32 weights become the state; with them they are still needed.
    donated = () if trainee.lora.rank else (0,)
    begin = jax.jit(make, out_shardings=where, donate_argnums=donated)
    return begin(params, jax.random.key(seed))
