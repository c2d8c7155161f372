"""The parameters that a configuration calls for: fresh, as shapes, and as logical axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models.blocks import Decoder
from race_jax.models.config import ModelConfig
from race_jax.models.hybrid_blocks import Hybrid
from race_jax.types import Params


def new_network(config: ModelConfig, seed: int, dtype: jnp.dtype) -> Decoder | Hybrid:
    """All parameters of a model, freshly drawn."""
    kind = Hybrid if config.family.hybrid else Decoder
    return kind(config, nnx.Rngs(seed), dtype)


def abstract_network(config: ModelConfig, dtype: jnp.dtype) -> Decoder | Hybrid:
    """The same with shapes in place of arrays."""
    return nnx.eval_shape(lambda: new_network(config, 0, dtype))


def abstract_params(config: ModelConfig, dtype: str = "float32") -> Params:
    """Shapes and dtypes of the parameters, as the pytree that `Model.params` has."""
    return nnx.to_pure_dict(nnx.split(abstract_network(config, check_dtype(dtype)))[1])


def param_axes(config: ModelConfig) -> Params:
    """Logical axis names of each parameter, parallel to `Model.params`.

    Returns:
        Nested dict of tuples over `layers`, `vocab`, `embed`, `heads`, `kv_heads`, `head_dim`,
        `mlp`, `experts`, `linear_heads`, `conv`; a mesh maps the names to its own axes.
    """
    state = nnx.split(abstract_network(config, jnp.dtype("float32")))[1]
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda variable: variable.get_metadata()["axes"],
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def check_dtype(dtype: str) -> jnp.dtype:
    """The dtype of that name, or a ValueError."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; choose float32 or bfloat16.")
    return jnp.dtype(dtype)
