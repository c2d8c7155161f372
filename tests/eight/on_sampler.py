"""The sampler on eight virtual devices against one: the same tokens, with few slots and many."""

import jax
import numpy as np
import pytest

from race_jax.models import ModelConfig, init_model, param_axes
from race_jax.models.sampler import LocalSampler
from race_jax.rollout.protocol import Request, SamplingConfig
from race_jax.sharding import Rules, make_mesh, place, shardings_for, use_mesh

SHAPE = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
}
QWEN3 = ModelConfig("qwen3", 96, 32, 48, 2, 4, **SHAPE)
HYBRID = ModelConfig.from_hf(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **SHAPE,
    }
)
RULES = [SamplingConfig(), SamplingConfig(0.0), SamplingConfig(0.7, top_p=0.9, top_k=20)]


@pytest.fixture(scope="module", autouse=True)
def eight():
    assert jax.device_count() == 8


def play(model, params, slots):
    """Two turns of five conversations, and what was parked on the way."""
    rng = np.random.default_rng(0)
    engine = LocalSampler(
        model, params, known=90, slots=slots, length=120, chunk=16, rows=2, burst=4
    )
    prompts = [tuple(rng.integers(0, 90, size).tolist()) for size in (1, 17, 40, 40, 55)]
    prompts[3] = prompts[2][:36] + prompts[3][36:]
    found = []
    for turn in range(2):
        for n, ids in enumerate(prompts):
            rule = RULES[n % len(RULES)]
            engine.submit(Request(f"c{n}", ids, 7 + n, (5,), 10 * n + turn, rule))
        done = {}
        while finished := engine.poll():
            done |= {c.conversation: c for c in finished}
        found += [done[f"c{n}"] for n in range(5)]
        prompts = [ids + done[f"c{n}"].tokens + (8, 9) for n, ids in enumerate(prompts)]
    return found, engine.stats.parked


@pytest.mark.parametrize("config", [QWEN3, HYBRID], ids=["qwen3", "qwen3_5"])
@pytest.mark.parametrize(
    ("sizes", "slots"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, 4), ({"tensor": 2, "context": 4}, 3)],
    ids=str,
)
def test_a_mesh_samples_what_one_device_does(config, sizes, slots):
    model = init_model(config, 0)
    want, _ = play(model, model.params, slots)
    mesh, rules = make_mesh(**sizes), Rules()
    params = place(model.params, shardings_for(param_axes(config), mesh, model.params, rules))
    with use_mesh(mesh, rules):
        got, parked = play(model, params, slots)
    for one, other in zip(want, got, strict=True):
        assert (one.tokens, one.reason) == (other.tokens, other.reason)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert parked
