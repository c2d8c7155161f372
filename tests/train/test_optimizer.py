import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from race_jax.train.optimizer import (
    LoraConfig,
    OptimizerConfig,
    compute_params,
    init_lora,
    is_matrix,
    lora_axes,
    make_optimizer,
    matrices,
    merge_lora,
    schedule,
)

AXES = {
    "embed": ("vocab", "embed"),
    "layers": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "bias": ("layers", "heads", "head_dim"),
        "norm": ("layers", "embed"),
        "gate": ("layers", "experts", "embed", "mlp"),
    },
    "norm": ("embed",),
}
SHAPES = {
    "embed": (7, 4),
    "layers": {
        "query": (2, 4, 3, 2),
        "out": (2, 3, 2, 4),
        "bias": (2, 3, 2),
        "norm": (2, 4),
        "gate": (2, 5, 4, 6),
    },
    "norm": (4,),
}


@pytest.fixture
def params():
    leaves, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def rates(config, steps):
    rate = schedule(config, steps)
    return [float(rate(jnp.int32(s))) for s in range(steps)]


def test_the_rate_rises_then_falls_by_hand():
    # 10 steps, warm-up of round(0.2 * 10) = 2; the other 8 are at shares 0/8 .. 7/8.
    linear = rates(OptimizerConfig(lr=1.0, schedule="linear", warmup=0.2), 10)
    np.testing.assert_allclose(linear[:4], [0.5, 1.0, 1.0, 7 / 8], rtol=1e-6)
    np.testing.assert_allclose(linear[-1], 1 / 8, rtol=1e-6)
    cosine = rates(OptimizerConfig(lr=2.0, warmup=0.2, final_lr=0.1), 10)
    np.testing.assert_allclose(cosine[6], 2 * (0.1 + 0.9 * 0.5), rtol=1e-6)  # half way
    flat = rates(OptimizerConfig(lr=3.0, schedule="constant", warmup=0.0), 4)
    np.testing.assert_allclose(flat, 3.0)


def test_cosine_agrees_with_optax():
    ours = rates(OptimizerConfig(lr=1.0, warmup=0.0, final_lr=0.2), 50)
    theirs = optax.cosine_decay_schedule(1.0, 50, alpha=0.2)
    np.testing.assert_allclose(ours, [float(theirs(s)) for s in range(50)], rtol=1e-5)


def test_the_rate_does_not_rise_again_after_the_last_step():
    rate = schedule(OptimizerConfig(lr=1.0, schedule="linear"), 5)
    assert float(rate(jnp.int32(5))) == float(rate(jnp.int32(50))) == 0.0


def test_matrices_are_told_from_norms_and_biases():
    told = matrices(AXES)
    assert told == {
        "embed": True,
        "layers": {"query": True, "out": True, "bias": False, "norm": False, "gate": True},
        "norm": False,
    }
    assert not is_matrix(("layers", "conv", "linear_heads", "head_dim"))


def test_one_update_by_hand():
    # Adam's first step is lr * sign(g); decay takes lr * decay * w off the matrix only.
    config = OptimizerConfig(
        lr=0.1, schedule="constant", warmup=0.0, weight_decay=0.5, clip=1e9, eps=1e-12
    )
    params = {"w": jnp.array([[2.0, -4.0]]), "norm": jnp.array([1.0])}
    rule = make_optimizer(config, 10, {"w": True, "norm": False})
    gradient = {"w": jnp.array([[3.0, -7.0]]), "norm": jnp.array([0.5])}
    updates, _ = rule.update(gradient, rule.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new["w"], [[2 - 0.1 - 0.1, -4 + 0.1 + 0.2]], rtol=1e-6)
    np.testing.assert_allclose(new["norm"], [0.9], rtol=1e-6)


def test_clipping_is_by_the_norm_of_all_gradients_together():
    # A second step, so that the scale of the first gradient matters: clipped, both look alike.
    config = OptimizerConfig(lr=0.1, schedule="constant", warmup=0.0, clip=1.0)
    rule = make_optimizer(config, 10, {"a": True, "b": True})
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    small = {"a": jnp.array([0.6]), "b": jnp.array([0.8])}
    large = jax.tree.map(lambda g: 1000 * g, small)
    results = []
    for gradient in (small, large):
        state = rule.init(params)
        _, state = rule.update(gradient, state, params)
        results.append(rule.update({"a": jnp.array([0.1]), "b": jnp.array([0.0])}, state, params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *results)


def test_compute_params_round_matrices_only(params):
    computed = compute_params(params, matrices(AXES), "bfloat16")
    assert computed["embed"].dtype == computed["layers"]["gate"].dtype == jnp.bfloat16
    assert computed["norm"].dtype == computed["layers"]["bias"].dtype == jnp.float32


def test_adapters_start_without_effect_and_stand_on_linear_layers_only(params):
    config = LoraConfig(rank=2)
    adapters = init_lora(params, AXES, config, jax.random.key(1))
    assert set(adapters) == {"layers"}
    assert set(adapters["layers"]) == {"query", "out", "gate"}
    merged = merge_lora(params, adapters, AXES, config)
    jax.tree.map(np.testing.assert_array_equal, merged, params)


def test_merged_matrices_are_base_plus_scaled_product(params):
    config = LoraConfig(rank=2, alpha=6.0)
    adapters = init_lora(params, AXES, config, jax.random.key(1))
    drawn = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape), adapters)
    merged = merge_lora(params, drawn, AXES, config)
    for name, spec in (
        ("query", "lir,lroh->lioh"),
        ("out", "lnhr,lrd->lnhd"),
        ("gate", "leir,lero->leio"),
    ):
        pair = drawn["layers"][name]
        expected = params["layers"][name] + 3.0 * np.einsum(spec, pair["a"], pair["b"])
        np.testing.assert_allclose(merged["layers"][name], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(merged["layers"]["bias"], params["layers"]["bias"])


def test_adapters_of_equal_shapes_differ():
    shapes = {n: jnp.zeros((2, 4, 6)) for n in ("ab", "ba")}
    axes = {n: ("layers", "embed", "mlp") for n in shapes}
    made = init_lora(shapes, axes, LoraConfig(rank=2), jax.random.key(0))
    assert not np.array_equal(made["ab"]["a"], made["ba"]["a"])


def test_axes_of_adapters_lie_parallel_to_them(params):
    adapters = init_lora(params, AXES, LoraConfig(rank=2), jax.random.key(1))
    axes = lora_axes(AXES)
    assert axes["layers"]["out"] == {
        "a": ("layers", "heads", "head_dim", None),
        "b": ("layers", None, "embed"),
    }
    jax.tree.map(
        lambda names, x: len(names) == x.ndim or pytest.fail(str(names)),
        axes,
        adapters,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("schedule", "step"),
        ("warmup", 1.0),
        ("final_lr", 1.5),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("clip", 0.0),
        ("patience", 0),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{field} is {value!r}; it must be"):
        OptimizerConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("rank", -1), ("alpha", 0.0), ("alpha", math.nan)])
def test_an_adapter_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"lora\.{field} is {value}"):
        LoraConfig(**{field: value})
