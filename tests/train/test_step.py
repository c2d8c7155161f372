import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from race_jax.models import ModelConfig, init_model
from race_jax.packing import ACTION, fill_rows
from race_jax.train.optimizer import LoraConfig, OptimizerConfig, make_optimizer, matrices
from race_jax.train.state import Trainee, init_state
from race_jax.train.step import (
    Bounded,
    ComputeConfig,
    loss_and_gradient,
    make_step,
    places_in,
    select_places,
    split_batch,
)

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 29,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": True,
    }
)
FLOAT = ComputeConfig(dtype="float32", head_chunk=8)


def sft(logprobs, batch):
    mask = batch["loss_mask"]
    return -jnp.sum(jnp.where(mask, logprobs, 0)), jnp.sum(mask).astype(jnp.float32)


def rows(counts, width=12, seed=0):
    """Rows of which `counts[b]` tokens, at random places, carry loss."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 29, (len(counts), width + 1)).astype(np.int32)
    mask = np.zeros((len(counts), width), bool)
    for row, count in zip(mask, counts, strict=True):
        row[rng.permutation(width)[:count]] = True
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(width, dtype=np.int32), (len(counts), 1)),
        "segment_ids": np.ones((len(counts), width), np.int32),
        "loss_mask": mask,
    }


def trainee_of(model, rank=0):
    frozen = model.params if rank else {}
    return Trainee(model, frozen, LoraConfig(rank))


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, 0)


def gradient_of(trainee, trained, batch, compute=FLOAT, places=None, loss=sft):
    run = jax.jit(loss_and_gradient, static_argnums=(0, 4, 5, 6))
    places = batch["tokens"].shape[1] if places is None else places
    # The frozen parameters are no static argument, so the trainee travels without them.
    bare = trainee._replace(frozen=None)
    return run(bare, trained, trainee.frozen, batch, loss, compute, places)[:3]


def close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5), a, b)


def test_micro_batches_weigh_tokens_not_parts():
    # Part A: 1 token of loss 1.0. Part B: 9 tokens of loss 0.1. (1 + 0.9) / 10 = 0.19; a mean of
    # the parts' means would be (1.0 + 0.1) / 2 = 0.55.
    model = init_model(CONFIG, 0)
    batch = rows([1, 9])
    batch["nats"] = np.where(batch["loss_mask"], np.array([[1.0], [0.1]]), 0).astype(np.float32)

    def told(logprobs, batch):
        total, weight = sft(logprobs, batch)
        return 0 * total + jnp.sum(batch["nats"]), weight

    compute = ComputeConfig(dtype="float32", micro_batches=2)
    total, weight, _ = gradient_of(trainee_of(model), model.params, batch, compute, loss=told)
    assert float(weight) == 10
    np.testing.assert_allclose(total / weight, 0.19, rtol=1e-6)


@pytest.mark.parametrize("parts", [2, 4])
def test_the_gradient_is_the_same_for_any_number_of_micro_batches(model, parts):
    batch = rows([1, 9, 0, 12])
    whole = gradient_of(trainee_of(model), model.params, batch)
    compute = ComputeConfig(dtype="float32", head_chunk=8, micro_batches=parts)
    close(whole, gradient_of(trainee_of(model), model.params, batch, compute))


def test_the_gradient_is_that_of_the_plain_formula(model):
    batch = rows([3, 7])

    def plain(params):
        hidden = model.forward(params, *(batch[k] for k in ("tokens", "positions", "segment_ids")))
        logits = hidden @ model.head(params).T
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nats * batch["loss_mask"]) / 10

    loss, gradient = jax.jit(jax.value_and_grad(plain))(model.params)
    total, weight, ours = gradient_of(trainee_of(model), model.params, batch)
    np.testing.assert_allclose(total / weight, loss, rtol=1e-6)
    close(ours, gradient)


@pytest.mark.parametrize("change", [{"remat": "none"}, {"head_chunk": 1}, {"head_chunk": 999}])
def test_how_a_step_computes_does_not_change_what_comes_out(model, change):
    batch = rows([5, 2])
    compute = ComputeConfig(**{"dtype": "float32", "head_chunk": 8, **change})
    close(
        gradient_of(trainee_of(model), model.params, batch),
        gradient_of(trainee_of(model), model.params, batch, compute),
    )


def test_the_head_sees_only_the_places_that_carry_loss(model):
    batch = rows([5, 2])
    close(
        gradient_of(trainee_of(model), model.params, batch),
        gradient_of(trainee_of(model), model.params, batch, places=5),
    )


def test_packed_trajectories_train_as_separate_ones(model):
    # a = 1 2 3 and b = 4 .. 8 in one row, or in rows of their own: no token of b sees a, and
    # nothing is learnt from a's last token about b's first.
    def example(tokens):
        return {
            "tokens": np.array(tokens, np.int32),
            "kinds": np.full(len(tokens), ACTION, np.uint8),
        }

    a, b = example([1, 2, 3]), example([4, 5, 6, 7, 8])
    packed = gradient_of(trainee_of(model), model.params, fill_rows([[a, b], []], 12))
    apart = gradient_of(trainee_of(model), model.params, fill_rows([[a], [b]], 12))
    assert float(packed[1]) == 2 + 4
    close(packed, apart)


def test_no_token_that_carries_loss_gives_zero(model):
    total, weight, gradient = gradient_of(trainee_of(model), model.params, rows([0, 0]), places=1)
    assert float(total) == float(weight) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_bfloat16_arithmetic_keeps_float32_masters(model):
    batch = rows([5, 2])
    compute = ComputeConfig(head_chunk=8)
    total, _, gradient = gradient_of(trainee_of(model), model.params, batch, compute)
    exact, _, wanted = gradient_of(trainee_of(model), model.params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(total, exact, rtol=0.01)
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, gradient, wanted))
    assert 0 < float(norm) < 0.1 * float(optax.tree.norm(wanted))


def test_places_are_the_columns_with_loss_first_in_order():
    batch = {
        "loss_mask": jnp.array([[False, True, False, True], [True, False, False, False]]),
        "targets": jnp.array([[10, 11, 12, 13], [20, 21, 22, 23]]),
    }
    order, picked = select_places(batch, 2)
    assert order.tolist() == [[1, 3], [0, 1]]
    assert picked["targets"].tolist() == [[11, 13], [20, 21]]
    assert picked["loss_mask"].tolist() == [[True, True], [True, False]]


def test_the_number_of_places_takes_few_values():
    for most, expected in ((0, 2), (1, 2), (2, 2), (3, 4), (16, 16)):
        mask = np.zeros((3, 16), bool)
        mask[1, :most] = True
        assert places_in(mask, 16) == expected
    seen = {places_in(np.arange(1000)[None] < n, 1000) for n in range(1001)}
    assert len(seen) == 8
    assert max(seen) == 1000


def test_a_batch_is_cut_so_that_every_device_keeps_its_rows():
    parts = split_batch({"tokens": jnp.arange(8)[:, None]}, 4)
    assert parts["tokens"][..., 0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="8 rows cannot be cut into 3 micro-batches"):
        split_batch({"tokens": jnp.arange(8)[:, None]}, 3)


@pytest.fixture(scope="module")
def made(model):
    trainee = trainee_of(model)
    config = OptimizerConfig(lr=0.01, schedule="constant", warmup=0.0)
    rule = make_optimizer(config, 9, matrices(trainee.axes))
    return trainee, rule, make_step(trainee, rule, sft, FLOAT)


class TestStep:
    def test_a_step_is_optax_on_the_normalised_gradient(self, model, made):
        trainee, rule, step = made
        batch = rows([5, 2])
        _, _, gradient = gradient_of(trainee, model.params, batch)
        updates, _ = rule.update(gradient, rule.init(model.params), model.params)
        state = init_state(trainee, rule, model.params, jax.random.key(0))
        state, numbers = step(state, {}, batch, 12)
        close(state.trained, optax.apply_updates(model.params, updates))
        assert int(state.step) == 1
        np.testing.assert_allclose(numbers["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)

    @pytest.mark.parametrize("limit", [0.05, 50.0])
    def test_a_bounded_loss_is_clipped_before_it_is_added(self, model, limit):
        trainee, batch = trainee_of(model), rows([5, 2])

        def first(logprobs, batch):
            total, weight = sft(logprobs, batch)
            return 0.25 * total, weight

        rule = optax.sgd(1.0)
        step = make_step(trainee, rule, first, FLOAT, bounded=Bounded(sft, limit))
        total, weight, gradient = gradient_of(trainee, model.params, batch)
        size = float(optax.tree.norm(gradient))
        assert 0.05 < size < 50
        state = init_state(trainee, rule, model.params, jax.random.key(0))
        state, numbers = step(state, {}, batch, 12)
        share = 0.25 + min(1.0, limit / size)
        close(state.trained, jax.tree.map(lambda p, g: p - share * g, model.params, gradient))
        assert float(numbers["bounded_norm"]) == pytest.approx(size, rel=1e-5)
        assert float(numbers["loss"]) == pytest.approx(1.25 * float(total / weight), rel=1e-5)

    def test_a_step_that_is_not_finite_changes_only_the_counters(self, model, made):
        trainee, rule, step = made
        good, bad = rows([5, 2]), rows([5, 2], seed=1)
        bad["tokens"] = np.full_like(bad["tokens"], 99)  # an id that the model lacks gives NaN
        state = init_state(trainee, rule, model.params, jax.random.key(0))
        state, _ = step(state, {}, good, 12)
        before = jax.tree.map(np.array, state)
        for row in (1, 2):
            state, numbers = step(state, {}, bad, 12)
            assert int(numbers["skipped_in_a_row"]) == row
        jax.tree.map(np.testing.assert_array_equal, before.trained, state.trained)
        jax.tree.map(np.testing.assert_array_equal, before.optimizer, state.optimizer)
        state, numbers = step(state, {}, good, 12)
        assert (int(state.step), int(numbers["skipped"]), int(numbers["skipped_in_a_row"])) == (
            *(4, 2, 0),
        )
        assert np.any(np.asarray(state.trained["norm"]) != before.trained["norm"])

    def test_adapters_train_and_nothing_else_does(self, model):
        trainee = trainee_of(model, rank=2)
        config = OptimizerConfig(lr=0.01, schedule="constant", warmup=0.0)
        flags = jax.tree.map(
            lambda _: True, trainee.trained_axes, is_leaf=lambda x: type(x) is tuple
        )
        rule = make_optimizer(config, 9, flags)
        step = make_step(trainee, rule, sft, FLOAT)
        state = init_state(trainee, rule, model.params, jax.random.key(0))
        losses = []
        for _ in range(5):
            state, numbers = step(state, trainee.frozen, rows([12, 12]), 12)
            losses.append(float(numbers["loss"]))
        assert losses[-1] < losses[0] - 0.05
        merged = trainee.params(state.trained, trainee.frozen)
        np.testing.assert_array_equal(merged["embed"], model.params["embed"])
        assert np.any(
            np.asarray(merged["layers"]["mlp"]["down"]) != model.params["layers"]["mlp"]["down"]
        )


def test_memory_of_the_head_is_flat_in_the_length(model):
    # What grows with T are hidden states and their gradients, not [T, V] logits: V is far above D.
    config = ModelConfig.from_hf({**CONFIG.to_hf(), "vocab_size": 32768})
    wide = init_model(config, 0)
    trainee = trainee_of(wide)._replace(frozen=None)

    def peak(width):
        batch = rows([4, 4], width)
        compiled = (
            jax.jit(loss_and_gradient, static_argnums=(0, 4, 5, 6))
            .lower(trainee, wide.params, {}, batch, sft, FLOAT, width)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = peak(32), peak(96)
    logits = 2 * (96 - 32) * 32768 * 4
    assert long - short < logits / 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float16"), ("micro_batches", 0), ("remat", "all"), ("head_chunk", 0)],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"compute\.{field} is {value!r}; it must be"):
        ComputeConfig(**{field: value})
