"""LoGiC on a hybrid: the engine, whose caches hold recurrent states, against Algorithm 1."""

import numpy as np
import pytest
from toy import random_trajectory, stir

from race_jax.logic.cover import find_cover, most_scored
from race_jax.logic.engine import Engine
from race_jax.logic.scoring import Scorer
from race_jax.models import ModelConfig, init_model

TINY = ModelConfig(
    "qwen3_5_text",
    32,
    16,
    24,
    2,
    2,
    num_key_value_heads=1,
    head_dim=8,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
)
EPSILONS = (0.01, 0.1, 0.4, 2.0)
TRAJECTORIES = [random_trajectory(seed, 2 + seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model():
    """A hybrid whose predictions are far from even, so that removals cost something."""
    return stir(init_model(TINY, 0))


@pytest.mark.parametrize("sizes", [{"rows": 8, "row_tokens": 8}, {"rows": 2, "row_tokens": 1}])
def test_a_hybrid_engine_equals_algorithm_1(model, sizes):
    length = max(most_scored(t) for t in TRAJECTORIES)
    scorer = Scorer(model, model.params)
    engine = Engine(model, model.params, length=length, slots=2, **sizes)
    results = {covers[0].id: covers for covers in engine.run(TRAJECTORIES, EPSILONS)}
    decided = set()
    for trajectory in TRAJECTORIES:
        for cover in results[trajectory.id]:
            want = find_cover(
                trajectory, lambda sequence: scorer.score(sequence, bucket=512), cover.epsilon
            )
            assert [(r.turn, r.accepted) for r in cover.removals] == [
                (r.turn, r.accepted) for r in want.removals
            ]
            for a, b in zip(cover.removals, want.removals, strict=True):
                np.testing.assert_allclose(a.decreases, b.decreases, atol=1e-5)
                decided.add(a.accepted)
            np.testing.assert_allclose(cover.loglik_full, want.loglik_full, atol=1e-5)
            np.testing.assert_allclose(cover.loglik_final, want.loglik_final, atol=1e-5)
    assert decided == {True, False}
