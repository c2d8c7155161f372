"""`race-jax carl`: tree rollouts and updates on forked states, from one file of settings."""

from __future__ import annotations

from race_jax.train import carl as loop
from race_jax.train.carl_config import CarlConfig


def carl(config: CarlConfig) -> int:
    """Train a model on trees of its own episodes, where its actions decide.

    Stopped halfway, by a signal too, the same command goes on from the last checkpoint.
    """
    return loop.carl(config)
