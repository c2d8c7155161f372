"""`race-jax sft`: supervised fine-tuning from one file of settings."""

from __future__ import annotations

from race_jax.train import sft as loop
from race_jax.train.sft_setup import SftConfig


def sft(config: SftConfig) -> int:
    """Fine-tune a model on trajectories: full reasoning, LoGiC's covers, or no reasoning.

    Stopped halfway, by a signal too, the same command goes on from the last checkpoint.
    """
    return loop.sft(config)
