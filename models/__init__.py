"""Networks and checkpoints."""

from race_jax.models.config import FAMILIES, ModelConfig
from race_jax.models.decoder import Model, abstract_params, init_model, param_axes
from race_jax.models.hf import load_config, load_model, save_model
from race_jax.models.rope import RopeConfig

__all__ = [
    "FAMILIES",
    "Model",
    "ModelConfig",
    "RopeConfig",
    "abstract_params",
    "init_model",
    "load_config",
    "load_model",
    "param_axes",
    "save_model",
]
