"""Networks and checkpoints."""

from race_jax.models.config import FAMILIES, ModelConfig
from race_jax.models.decoder import Model, abstract_params, init_model, param_axes
from race_jax.models.hf import load_config, load_model, save_model
from race_jax.models.moe import LoadBalance, RouterStats, load_balance
from race_jax.models.rope import RopeConfig

__all__ = [
    "FAMILIES",
    "LoadBalance",
    "Model",
    "ModelConfig",
    "RopeConfig",
    "RouterStats",
    "abstract_params",
    "init_model",
    "load_balance",
    "load_config",
    "load_model",
    "param_axes",
    "save_model",
]
