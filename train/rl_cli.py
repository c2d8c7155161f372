"""`race-jax rl`: cover-aware reinforcement learning from one file of settings."""

from __future__ import annotations

from race_jax.train import rl as loop
from race_jax.train.rl_config import RlConfig


def rl(config: RlConfig) -> int:
    """Train a model on its own episodes: cover-aware GRPO, plain GRPO, or AdaptThink.

    Stopped halfway, by a signal too, the same command goes on from the last checkpoint.
    """
    return loop.rl(config)
