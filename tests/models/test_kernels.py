"""Kernels against the plain path, the one switch, and what cannot run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.models import Model, ModelConfig, init_model, kernels
from race_jax.models.attention import segment_attention
from race_jax.models.kernels import (
    check_choices,
    choose_kernel,
    compile_for,
    cudnn_attention,
    splash_attention,
    target_backend,
)

SMALL = ModelConfig("qwen3", 61, 24, 40, 2, 4, num_key_value_heads=2, head_dim=8)


def cudnn_calls(q, k, v, segment_ids):
    """The calls that cuDNN gets, worked on by XLA."""
    return cudnn_attention(q, k, v, segment_ids, implementation="xla")


def splash_interpreted(q, k, v, segment_ids):
    return splash_attention(q, k, v, segment_ids, interpret=True)


ways = pytest.mark.parametrize("way", [cudnn_calls, splash_interpreted])


def draw(rng, rows, length, heads=4, kv_heads=2, width=16, dtype=jnp.float32):
    return [
        jnp.asarray(rng.standard_normal((rows, length, n, width)), dtype)
        for n in (heads, kv_heads, kv_heads)
    ]


def segments(*rows):
    """Rows from runs of (segment, length)."""
    return jnp.asarray([np.repeat(*zip(*row, strict=True)) for row in rows], jnp.int32)


CASES = {
    # Segments of 1, 2, 127, 128 and 129 tokens around blocks of 128; padding left and right.
    "packed": segments(
        [(1, 1), (2, 2), (3, 127), (4, 128), (5, 129), (0, 13)], [(0, 30), (1, 300), (2, 70)]
    ),
    "short": segments([(1, 5)], [(0, 5)]),
    "block": segments([(1, 128)]),
}


@ways
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_plain_path(monkeypatch, rng, way, case):
    monkeypatch.setattr(kernels, "_PIECE", 128)
    monkeypatch.setattr(kernels, "_BLOCK", 128)
    ids = CASES[case]
    arrays = draw(rng, *ids.shape)

    def run(attend):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attend(q, k, v, ids)))

        out = jax.jit(attend)(*arrays, ids)
        return out, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    want, want_grads = run(segment_attention)
    got, grads = run(way)
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@ways
@pytest.mark.parametrize("heads", [(2, 2), (6, 1)])
def test_any_grouping_of_heads_and_width(rng, way, heads):
    ids = segments([(1, 20), (2, 11)])
    arrays = draw(rng, 1, 31, *heads, width=24)
    np.testing.assert_allclose(
        jax.jit(way)(*arrays, ids), segment_attention(*arrays, ids), atol=1e-5
    )


@ways
def test_bfloat16_is_as_near_to_float32_as_the_plain_path(rng, way):
    ids = segments([(1, 60), (2, 40)])
    arrays = draw(rng, 1, 100, dtype=jnp.bfloat16)
    want = segment_attention(*(x.astype(jnp.float32) for x in arrays), ids)
    got, plain = (f(*arrays, ids) for f in (jax.jit(way), segment_attention))
    assert got.dtype == jnp.bfloat16
    error, usual = (np.abs(np.asarray(x, np.float32) - want).max() for x in (got, plain))
    assert error < 2 * usual + 1e-3


def test_masks_for_cudnn_are_made_a_piece_at_a_time(monkeypatch):
    """Memory grows with T * piece and not with T^2: a whole mask would have 8192^2 entries."""
    length = 8192
    shapes = [jax.ShapeDtypeStruct((1, length, n, 8), jnp.bfloat16) for n in (2, 1, 1)]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    masks = []

    def spy(q, k, v, mask, implementation):
        masks.append(mask.shape)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    jax.eval_shape(cudnn_attention, *shapes, ids)
    assert sum(shape[2] for shape in masks) == length and len(masks) == 8
    assert [shape[3] for shape in masks] == list(range(1024, length + 1, 1024))


def test_the_calls_lower_to_cudnn_itself(monkeypatch):
    """As far as that can be seen without a GPU: the program for CUDA calls its flash attention."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    shapes = [jax.ShapeDtypeStruct((2, 100, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, 100), jnp.int32)

    def loss(q, k, v, ids):
        return jnp.sum(cudnn_attention(q, k, v, ids).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax" in text
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


@pytest.mark.parametrize(
    ("backend", "dtype", "width", "kernel"),
    [
        ("cpu", jnp.bfloat16, 128, "xla"),
        ("cpu", jnp.float32, 128, "xla"),
        ("gpu", jnp.bfloat16, 128, "cudnn"),
        ("gpu", jnp.bfloat16, 100, "xla"),
        ("gpu", jnp.float32, 128, "xla"),
        ("tpu", jnp.bfloat16, 128, "splash"),
        ("tpu", jnp.bfloat16, 64, "splash"),
        ("tpu", jnp.float32, 128, "xla"),
    ],
)
def test_what_auto_takes(backend, dtype, width, kernel):
    with compile_for(backend):
        assert target_backend() == backend
        assert choose_kernel("auto", dtype, width) == kernel
    assert target_backend() == jax.default_backend()


@pytest.mark.parametrize(
    ("attention", "backend", "dtype", "width", "message"),
    [
        ("cudnn", "cpu", jnp.bfloat16, 64, "runs on NVIDIA GPUs, and .* backend cpu; choose auto"),
        ("cudnn", "tpu", jnp.bfloat16, 64, "the backend tpu; choose auto or xla"),
        ("splash", "cpu", jnp.bfloat16, 64, "runs on TPUs, and this program is for the backend"),
        ("cudnn", "gpu", jnp.float32, 64, "the model is in float32; load it with dtype bfloat16"),
        ("splash", "tpu", jnp.float32, 64, "multiplies in bfloat16, and the model is in float32"),
        ("cudnn", "gpu", jnp.bfloat16, 12, "head_dim is 12; cuDNN takes multiples of 8 up to 128"),
        ("flash", "gpu", jnp.bfloat16, 64, "attention is 'flash'; choose auto, xla, cudnn, splash"),
    ],
)
def test_what_cannot_run_is_refused(attention, backend, dtype, width, message):
    with compile_for(backend), pytest.raises(ValueError, match=message):
        choose_kernel(attention, dtype, width)


def test_names_that_are_no_choice():
    with pytest.raises(ValueError, match="attention is 'blocked'; choose auto, xla"):
        Model(SMALL, None, attention="blocked")
    with pytest.raises(ValueError, match="cached_attention is 'xla'; choose auto, blocked"):
        check_choices("auto", "xla")
    with (
        pytest.raises(ValueError, match="backend is 'cuda'; choose cpu, gpu or tpu"),
        compile_for("cuda"),
    ):
        pass


def test_a_model_runs_what_it_is_told_to(rng):
    model = init_model(SMALL, 0, "bfloat16")
    row = jnp.asarray(rng.integers(0, 61, (1, 9)), jnp.int32)
    rows = (row, jnp.arange(9)[None], row * 0 + 1)
    plain = dataclasses.replace(model, attention="xla")
    np.testing.assert_array_equal(
        jax.jit(plain.forward)(model.params, *rows), jax.jit(model.forward)(model.params, *rows)
    )
    forced = dataclasses.replace(model, attention="splash")
    with pytest.raises(ValueError, match="attention is splash, which runs on TPUs"):
        forced.forward(model.params, *rows)
    with compile_for("tpu"):
        program = str(jax.make_jaxpr(forced.forward)(model.params, *rows))
    assert "splash" in program
