"""Mixtures of experts on meshes of eight devices, against the same on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.models import ModelConfig, init_model, load_balance, param_axes
from race_jax.sharding import Rules, make_mesh, place, shardings_for, use_mesh

CONFIG = ModelConfig(
    "qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.2,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
)
MODEL = init_model(CONFIG, 0)
MESHES = [
    ({"fsdp": 2, "tensor": 2, "context": 2}, "fsdp"),
    ({"fsdp": 2, "tensor": 2, "context": 2}, "tensor"),
    ({"data": 4, "fsdp": 1, "tensor": 2}, "tensor"),
]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Eight rows of 12: packed, padded on both sides, and one that is all padding."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray

    @classmethod
    def draw(cls):
        rng = np.random.default_rng(0)
        segments = np.repeat([[1] * 5 + [2] * 7], 8, axis=0)
        segments[1, :3] = segments[2, 9:] = 0
        segments[3] = 0
        positions = np.where(segments == 2, np.arange(12) - 5, np.arange(12))
        positions[1, :5] = np.maximum(np.arange(5) - 3, 0)
        return cls(rng.integers(0, 64, (8, 12)), positions, segments)


ROWS = Rows.draw()


def run(params):
    """Hidden states where they mean something, statistics, and gradients of both."""

    def loss(params):
        arrays = (ROWS.tokens, ROWS.positions, ROWS.segments)
        hidden, stats = MODEL.forward_routed(params, *map(jnp.asarray, arrays))
        hidden = jnp.where(ROWS.segments[..., None] > 0, hidden, 0)
        return jnp.mean(jnp.sin(hidden)) + load_balance(stats).loss, (hidden, stats)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.fixture(scope="module")
def alone():
    return jax.tree.map(np.asarray, run(MODEL.params))


@pytest.mark.parametrize(("sizes", "experts"), MESHES)
def test_states_statistics_and_gradients_equal_one_device(alone, sizes, experts):
    mesh, rules = make_mesh(**sizes), Rules(experts=experts)
    places = shardings_for(param_axes(CONFIG), mesh, MODEL.params, rules)
    with use_mesh(mesh, rules):
        got = run(place(MODEL.params, places))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("experts", ["fsdp", "tensor"])
def test_each_device_stores_its_share_of_the_experts(experts):
    mesh, rules = make_mesh(fsdp=4, tensor=2), Rules(experts=experts)
    places = shardings_for(param_axes(CONFIG), mesh, MODEL.params, rules)
    gate = place(MODEL.params, places)["layers"]["mlp"]["gate"]
    shares = {shard.data.shape for shard in gate.addressable_shards}
    # [layers, 8 experts, 32, 12] over fsdp 4 and tensor 2.
    assert shares == {(2, 2, 32, 6) if experts == "fsdp" else (2, 4, 8, 12)}


def test_cached_rows_equal_one_device():
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 64, (4, 6)), jnp.int32)
    slots, starts = jnp.arange(4), jnp.zeros(4, jnp.int32)

    def extend(params):
        cache = MODEL.init_cache(params, 4, 6)
        return jax.jit(MODEL.extend)(params, cache, tokens, slots, starts)[0]

    want = np.asarray(extend(MODEL.params))
    mesh, rules = make_mesh(data=2, fsdp=2, tensor=2), Rules(experts="tensor")
    places = shardings_for(param_axes(CONFIG), mesh, MODEL.params, rules)
    with use_mesh(mesh, rules):
        got = extend(place(MODEL.params, places))
    np.testing.assert_allclose(got, want, atol=1e-5)
