"""Rotary embeddings: both spellings, transformers' numbers, long positions, refusals."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from race_jax.models import RopeConfig
from race_jax.models.rope import frequencies, rotate, rotation_tables

YARNS = [
    {"factor": 4.0, "original_max_position_embeddings": 32768},
    {"factor": 4.0, "original_max_position_embeddings": 2048, "truncate": False},
    {"factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.5},
    {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"factor": 2.0, "original_max_position_embeddings": 8192, "beta_fast": 20, "beta_slow": 2},
    {"factor": 1.0, "original_max_position_embeddings": 4096},
]


def hf(values, theta=10000.0, positions=131072):
    return {"rope_theta": theta, "rope_scaling": values, "max_position_embeddings": positions}


def test_worked_default():
    # theta 100, H = 4: frequencies 100^0 and 100^(-1/2).
    freqs, factor = frequencies(RopeConfig(rope_theta=100.0), 4)
    np.testing.assert_allclose(freqs, [1.0, 0.1], rtol=1e-7)
    assert factor == 1.0 and freqs.dtype == np.float32


def test_worked_linear():
    freqs, factor = frequencies(RopeConfig("linear", 100.0, factor=4.0), 4)
    np.testing.assert_allclose(freqs, [0.25, 0.025], rtol=1e-7)
    assert factor == 1.0


def test_worked_yarn():
    # H = 8, theta = 10^4, 200 pi original positions: a pair turns 100 * f times. Pair d turns
    # beta times at d = 8 log(200 pi / (2 pi beta)) / (2 log 10^4): beta 10 at 1, beta 1 at 2.
    rope = RopeConfig(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=628,
        beta_fast=10.0,
        beta_slow=1.0,
    )
    freqs, factor = frequencies(rope, 8)
    # Bounds floor(0.9998) = 0 and ceil(1.9998) = 2: weights of the slow form 0, 1/2, 1, 1.
    plain = np.array([1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(freqs, plain * [1, (1 + 0.25) / 2, 0.25, 0.25], rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("values", YARNS)
@pytest.mark.parametrize("width", [64, 128])
def test_yarn_equals_transformers(values, width):
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, **values}
    config = transformers.Qwen3Config(
        head_dim=width, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    want, want_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    rope = RopeConfig.from_hf({"rope_parameters": parameters}, 131072)
    got, factor = frequencies(rope, width)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5)
    assert factor == pytest.approx(want_factor)


@pytest.mark.parametrize(
    "values",
    [None, {"type": "linear", "factor": 2.0}, *({"type": "yarn", **yarn} for yarn in YARNS)],
)
def test_old_and_new_spelling_agree(values):
    old = RopeConfig.from_hf(hf(values, theta=5e5), 131072)
    renamed = {("rope_type" if k == "type" else k): v for k, v in (values or {}).items()}
    new = RopeConfig.from_hf({"rope_parameters": {"rope_theta": 5e5, **renamed}}, 131072)
    assert old == new
    for a, b in zip(frequencies(old, 64), frequencies(new, 64), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("values", [None, {"rope_type": "linear", "factor": 2.0}, YARNS[3]])
def test_written_spellings_read_back_alike(values):
    if values is YARNS[3]:
        values = {"rope_type": "yarn", **values}
    rope = RopeConfig.from_hf(hf(values), 131072)
    written = rope.to_hf()
    assert RopeConfig.from_hf(written, 131072) == rope
    new_only = {"rope_parameters": written["rope_parameters"]}
    assert RopeConfig.from_hf(new_only, 131072) == rope
    old_only = {k: v for k, v in written.items() if k != "rope_parameters"}
    assert RopeConfig.from_hf(old_only, 131072) == rope


def test_yarn_fills_in_what_transformers_fills_in():
    outer = {**hf({"type": "yarn", "factor": 2.0}), "original_max_position_embeddings": 4096}
    assert RopeConfig.from_hf(outer, 8192).original_max_position_embeddings == 4096
    bare = RopeConfig.from_hf(hf({"type": "yarn", "factor": 2.0}), 8192)
    assert bare.original_max_position_embeddings == 8192
    ratio = hf({"type": "yarn", "factor": None, "original_max_position_embeddings": 2048})
    assert RopeConfig.from_hf(ratio, 8192).factor == 4.0


@pytest.mark.parametrize("position", [0, 1, 257, 40000, 131071, 1000001])
def test_tables_are_exact_at_long_positions(position):
    rope = RopeConfig(rope_theta=1e6)
    freqs = frequencies(rope, 128)[0]
    cos, sin = rotation_tables(rope, 128, jnp.array([position]))
    # The float32 product is the angle; its cosine and sine must be those of that very number.
    angles = (np.float32(position) * freqs).astype(np.float64)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-6)


def test_worked_rotation():
    # A quarter turn of pair (entry 0, entry 2), none of pair (1, 3).
    x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]])
    np.testing.assert_allclose(rotate(x, cos, sin)[0, 0], [-3.0, 2.0, 1.0, 4.0])


def test_scores_depend_on_distance_alone(rng):
    q, k = jnp.asarray(rng.standard_normal((2, 1, 1, 16)))
    rope = RopeConfig(rope_theta=100.0)

    def score(a, b):
        at = [rotation_tables(rope, 16, jnp.array([place])) for place in (a, b)]
        return float(jnp.sum(rotate(q, *at[0]) * rotate(k, *at[1])))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (hf({"rope_type": "llama3", "factor": 8.0}), "rope_type 'llama3'; the supported ones are"),
        (hf({"type": "dynamic", "factor": 2.0}), "rope_type 'dynamic'"),
        (hf({"rope_type": "longrope"}), "default, linear, yarn"),
        (hf({"rope_type": "default", "factor": 8.0}), "has factor in its rotary settings"),
        (hf({"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1}), "has low_freq_factor"),
        (hf({"full_attention": {"rope_type": "yarn"}}), "has full_attention"),
        (hf({"mrope_section": [1, 2, 3]}), "has mrope_section"),
        (hf({"type": "linear"}), "without a factor"),
        (hf({"type": "linear", "factor": 0.5}), "factor is 0.5; it must be at least 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5; it must be above 1"),
    ],
)
def test_refusals(data, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(data, 4096)


def test_direct_refusals():
    with pytest.raises(ValueError, match="rope_type is 'su'"):
        RopeConfig("su")
    with pytest.raises(ValueError, match="needs original_max_position_embeddings"):
        RopeConfig("yarn", factor=2.0)
