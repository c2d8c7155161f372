"""Networks and checkpoints."""

from race_jax.models.config import FAMILIES, ModelConfig
from race_jax.models.decoder import Model
from race_jax.models.hf import load_config, load_model, save_model
from race_jax.models.hybrid import HybridModel, init_model, make_model
from race_jax.models.moe import LoadBalance, RouterStats, load_balance
from race_jax.models.network import abstract_params, param_axes
from race_jax.models.rope import RopeConfig

__all__ = [
    "FAMILIES",
    "HybridModel",
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
    "make_model",
    "param_axes",
    "save_model",
]
