"""Mixtures of experts against a loop over tokens and against transformers."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from race_jax.models import (
    Model,
    ModelConfig,
    RouterStats,
    init_model,
    load_balance,
    load_model,
    save_model,
)
from race_jax.models.layers import Maker
from race_jax.models.moe import Experts, count_routes

SMALL = ModelConfig(
    "qwen3_moe",
    *(61, 24, 40, 2, 4),
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
)
DENSE = ModelConfig("qwen3", 61, 24, 40, 2, 4, head_dim=8)
forward = jax.jit(Model.forward_routed, static_argnums=0)


def experts(normed=False, dtype="float32"):
    config = dataclasses.replace(SMALL, norm_topk_prob=normed)
    return Experts(config, Maker(nnx.Rngs(0), jnp.dtype(dtype), 0.3))


def plain(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    return tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), tokens * 0 + 1


@pytest.mark.parametrize("normed", [False, True])
def test_each_token_passes_its_best_experts(rng, normed):
    layer = experts(normed)
    x = rng.standard_normal((2, 9, 24)).astype(np.float32)
    router, gate, up, down = (
        np.asarray(w[...], np.float64) for w in (layer.router, layer.gate, layer.up, layer.down)
    )
    got, probabilities, chosen = jax.jit(layer.routed)(jnp.asarray(x))
    for b in range(2):
        for t in range(9):
            scores = np.exp(x[b, t].astype(np.float64) @ router)
            scores /= scores.sum()
            best = np.argsort(-scores)[:2]
            weights = scores[best] / (scores[best].sum() if normed else 1)
            want = np.zeros(24)
            for e, weight in zip(best, weights, strict=True):
                inner = x[b, t] @ gate[e]
                want += weight * ((inner / (1 + np.exp(-inner)) * (x[b, t] @ up[e])) @ down[e])
            np.testing.assert_allclose(got[b, t], want, atol=1e-5)
            np.testing.assert_allclose(probabilities[b, t], scores, atol=1e-6)
            assert set(chosen[b, t].tolist()) == set(best.tolist())


def test_one_expert_for_all_drops_no_token(rng):
    layer = experts()
    layer.router[...] = jnp.zeros((24, 5)).at[0, 3].set(50.0).at[0, 1].set(40.0)
    x = jnp.asarray(rng.standard_normal((1, 50, 24)), jnp.float32).at[..., 0].set(1.0)
    run = jax.jit(layer.routed)
    got, _, chosen = run(x)
    assert np.all(np.sort(chosen, axis=-1) == [1, 3])
    alone = np.concatenate([run(x[:, t : t + 1])[0] for t in range(50)], axis=1)
    np.testing.assert_allclose(got, alone, atol=1e-5)


def test_worked_load_balance():
    # 4 tokens, 1 expert each of 2: three choose expert 0, one chooses expert 1.
    stats = RouterStats(jnp.array([[3.0, 1.0]]), jnp.array([[2.4, 1.6]]), jnp.array([4.0]))
    balance = load_balance(stats)
    np.testing.assert_allclose(balance.fraction, [0.75, 0.25])
    np.testing.assert_allclose(balance.probability, [0.6, 0.4])
    # 2 * (0.75 * 0.6 + 0.25 * 0.4) = 2 * 0.55
    np.testing.assert_allclose(balance.loss, 1.1, atol=1e-6)


def test_nothing_counted_gives_zero_and_finite_gradients():
    def loss(probabilities):
        chosen = jnp.zeros((2, 3, 1), jnp.int32)
        stats = count_routes(probabilities, chosen, jnp.zeros((2, 3), bool))
        return load_balance(jax.tree.map(lambda x: x[None], stats)).loss

    value, grad = jax.value_and_grad(loss)(jnp.full((2, 3, 4), jnp.nan))
    assert value == 0 and np.all(grad == 0)


@pytest.mark.parametrize("padding", [False, True])
def test_load_balance_equals_transformers(rng, padding):
    logits = [rng.standard_normal((3 * 7, 6)).astype(np.float32) for _ in range(2)]
    mask = np.ones((3, 7), np.int64)
    if padding:
        mask[0, :3] = mask[2, 5:] = 0
    want = load_balancing_loss_func(
        tuple(map(torch.tensor, logits)), 6, 2, torch.tensor(mask) if padding else None
    )
    counted = jnp.asarray(mask) > 0
    each = []
    for layer in logits:
        probabilities = jax.nn.softmax(jnp.asarray(layer)).reshape(3, 7, 6)
        each.append(count_routes(probabilities, jax.lax.top_k(probabilities, 2)[1], counted))
    got = load_balance(jax.tree.map(lambda *x: jnp.stack(x), *each))
    np.testing.assert_allclose(got.loss, want.item(), atol=1e-5)
    np.testing.assert_allclose(jnp.sum(got.fraction), 2, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(got.probability), 1, atol=1e-5)


def test_the_models_statistics_and_their_gradients_equal_transformers(moe, rng):
    tokens = rng.integers(0, 97, (2, 12))
    mask = np.ones((2, 12), np.int64)
    mask[1, :5] = 0
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    model = load_model(moe.path)

    def loss(params):
        stats = forward(model, params, *map(jnp.asarray, (tokens, positions, mask)))[1]
        return load_balance(stats).loss

    value, grads = jax.jit(jax.value_and_grad(loss))(model.params)
    moe.module.zero_grad()
    reference = moe.module(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(positions),
        output_router_logits=True,
    ).aux_loss
    reference.backward()
    np.testing.assert_allclose(value, reference.item(), atol=1e-5)
    for layer, block in enumerate(moe.module.model.layers):
        want = block.mlp.gate.weight.grad.numpy().T
        got = grads["layers"]["mlp"]["router"][layer]
        np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())


def test_padding_and_packing_change_no_statistics(rng):
    model = init_model(SMALL, 0)
    sizes = [1, 6, 11]
    parts = [rng.integers(0, 61, (1, n)) for n in sizes]
    apart = []
    for part, n in zip(parts, sizes, strict=True):
        rows = (np.pad(x, ((0, 0), (0, 25 - n))) for x in plain(part))
        apart.append(forward(model, model.params, *rows))
    want = jax.tree.map(lambda *x: sum(x), *(stats for _, stats in apart))
    tokens = np.pad(np.concatenate(parts, axis=1), ((0, 0), (3, 4)), constant_values=999)
    segments = np.pad(np.repeat([1, 2, 3], sizes), (3, 4))[None]
    positions = np.pad(np.concatenate([np.arange(n) for n in sizes]), (3, 4))[None]
    states, stats = forward(model, model.params, tokens, positions, segments)
    for a, b in zip(stats, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert stats.tokens.tolist() == [18, 18] and np.all(np.isfinite(states))
    rows = zip(apart, sizes, strict=True)
    together = np.concatenate([states[:, :n] for (states, _), n in rows], axis=1)
    np.testing.assert_allclose(states[:, 3:-4], together, atol=1e-5)


def test_states_do_not_depend_on_whether_routes_are_counted(rng):
    model = init_model(SMALL, 0)
    rows = plain(rng.integers(0, 61, (2, 9)))
    states, _ = forward(model, model.params, *rows)
    again = jax.jit(model.forward)(model.params, *rows)
    np.testing.assert_allclose(states, again, atol=1e-6)
    remat = jax.jit(functools.partial(model.forward_routed, remat=True))
    again, stats = remat(model.params, *rows)
    np.testing.assert_allclose(states, again, atol=1e-6)
    assert stats.chosen.shape == (2, 5) and stats.tokens.tolist() == [18, 18]


def test_bfloat16_routes_as_float32_does(rng):
    """The same input goes to the same experts: the router's scores are not rounded."""
    full, half = experts(), experts(dtype="bfloat16")
    full.router[...] = half.router[...].astype(jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, 200, 24)), jnp.float32)
    np.testing.assert_array_equal(full.routed(x)[2], half.routed(x)[2])


def test_a_dense_model_has_no_routes(rng):
    model = init_model(DENSE, 0)
    with pytest.raises(ValueError, match="a qwen3 model has no experts to route to"):
        model.forward_routed(model.params, *plain(rng.integers(0, 61, (1, 3))))


@pytest.fixture(scope="module")
def moe(pairs):
    return pairs("qwen3_moe")


def test_the_fused_form_of_newer_files_is_read(moe, tmp_path):
    moe.module.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    fused, apart = load_model(tmp_path / "fused"), load_model(moe.path)
    assert fused.config == apart.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), fused.params, apart.params))


def test_saved_experts_carry_the_names_of_the_hub(moe, tmp_path, rng):
    save_model(load_model(moe.path), tmp_path / "out", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "model.layers.2.mlp.experts.5.down_proj.weight" in index["weight_map"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(again, transformers.Qwen3MoeForCausalLM)
    tokens = torch.tensor(rng.integers(0, 97, (1, 9)))
    with torch.no_grad():
        np.testing.assert_allclose(again(tokens).logits, moe.module(tokens).logits, atol=1e-5)


def test_experts_in_both_forms_at_once_are_refused(moe, tmp_path):
    path = shutil.copytree(moe.path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    stem = "model.layers.0.mlp.experts."
    downs = [tensors[f"{stem}{e}.down_proj.weight"] for e in range(6)]
    tensors[stem + "down_proj"] = np.stack(downs)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight is in .* and again"):
        load_model(path)


def test_a_lost_expert_is_named(moe, tmp_path):
    path = shutil.copytree(moe.path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.4\.up_proj"):
        load_model(path)


HUB = {
    "model_type": "qwen3_moe",
    **{"vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def test_missing_keys_mean_what_they_mean_to_transformers():
    made = transformers.Qwen3MoeConfig(**{k: v for k, v in HUB.items() if k != "model_type"})
    config = ModelConfig.from_hf(HUB)
    assert config.num_experts == made.num_local_experts == 128
    assert config.num_experts_per_tok == made.num_experts_per_tok
    assert config.moe_intermediate_size == made.moe_intermediate_size
    assert config.norm_topk_prob == made.norm_topk_prob
    assert config.head_dim == 8


def test_both_names_of_the_number_of_experts():
    old, new = ({**HUB, name: 16} for name in ("num_experts", "num_local_experts"))
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    written = ModelConfig.from_hf(new).to_hf()
    assert written["num_experts"] == 16 and "num_local_experts" not in written
    assert transformers.Qwen3MoeConfig(**written).num_local_experts == 16
    assert ModelConfig.from_hf(json.loads(json.dumps(written))) == ModelConfig.from_hf(new)
    assert not {"num_experts", "norm_topk_prob"} & DENSE.to_hf().keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step 2 and mlp_only_layers \[\]"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]; supported are 1 and \[\]"),
        ({"num_experts": 4}, "num_experts_per_tok is 8 and num_experts is 4"),
        ({"num_experts": 0}, "num_experts is 0; it must be a whole number above 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1; it must be true or false"),
    ],
)
def test_configurations_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**HUB, **change})


def test_experts_on_a_dense_family_are_refused():
    with pytest.raises(ValueError, match="num_experts is 4, and a qwen3 model has no experts"):
        dataclasses.replace(DENSE, num_experts=4)
