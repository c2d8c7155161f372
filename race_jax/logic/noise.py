"""How far a likelihood moves when nothing but the arithmetic's order changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from race_jax.logic.engine import Engine, Failure
from race_jax.logic.lanes import Lanes
from race_jax.logic.scoring import Scorer
from race_jax.types import TokenTrajectory

RESOLUTION = 2.0**-24
"""Half of float32's step at 1, where the log-softmax adds up: nothing finer can be told apart."""


def freeze(trajectory: TokenTrajectory) -> TokenTrajectory:
    """The same sequence with nothing to test: every turn's reasoning becomes its skip form."""
    turns = tuple(
        dataclasses.replace(turn, reasoning=(), skip=turn.reasoning or turn.skip)
        for turn in trajectory.turns
    )
    return dataclasses.replace(trajectory, turns=turns)


def noise_floor(
    engine: Engine | Lanes, scorer: Scorer, trajectories: Iterable[TokenTrajectory]
) -> float:
    """The largest difference between two computations of the same action likelihoods.

    One goes through the engine's cached rows, the other through one uncached pass, padded: other
    shapes, other chunks, the same mathematics.

    Args:
        engine: The engine whose decisions are to be judged.
        scorer: Uncached passes of the same checkpoint, in float32 whatever the engine's dtype.
        trajectories: A few samples.

    Returns:
        max_j |l_j - l'_j| over all actions of the samples, nats per token, and never less than
        `RESOLUTION`.

    Raises:
        ValueError: A sample cannot be scored.
    """
    largest = RESOLUTION
    for trajectory in trajectories:
        frozen = freeze(trajectory)
        (result,) = engine.run([frozen], [0.0])
        if isinstance(result, Failure):
            raise ValueError(f"trajectory {result.id}: {result.reason}")
        other = scorer.score(frozen.assemble())
        largest = max(largest, float(np.abs(result[0].loglik_full - other).max()))
    return largest
