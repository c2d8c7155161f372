import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from race_jax.models import ModelConfig
from race_jax.packing import OTHER, fill_rows
from race_jax.train import tiny
from race_jax.train.optimizer import LoraConfig
from race_jax.train.state import Trainee
from race_jax.train.step import loss_and_gradient, sft_loss
from race_jax.train.tiny import TinyTraining
from race_jax.types import TokenTrajectory, TokenTurn

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": True,
    }
)
EPISODE = TokenTrajectory(
    "e",
    (1, 2),
    (
        TokenTurn((10, 11), (20, 21), (12,), (3, 4)),
        TokenTurn((), (20, 21), (13, 14), (5,)),
        TokenTurn((15,), (20, 21), (16,), (6, 7)),
    ),
)


@pytest.fixture(scope="module")
def model():
    """A model in which every matrix matters, those that start at zero too."""
    fresh = tiny.fresh_model(CONFIG, 0)
    leaves, tree = jax.tree.flatten(fresh.params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return dataclasses.replace(fresh, params=jax.tree.unflatten(tree, moved))


def trained(example):
    return example.tokens[example.kinds != OTHER].tolist()


def test_a_lesson_trains_reasoning_and_actions_and_drops_the_last_observation():
    # prompt 1 2 | 10 11 > 12 | 3 4 | (no reasoning: 20 21) > 13 14 | 5 | 15 > 16
    lesson = tiny.lesson(EPISODE)
    assert lesson.tokens.tolist() == [1, 2, 10, 11, 12, 3, 4, 20, 21, 13, 14, 5, 15, 16]
    assert trained(lesson) == [10, 11, 12, 13, 14, 15, 16]


def test_a_removed_block_stands_as_the_skip_form_and_is_not_trained_on():
    lesson = tiny.lesson(EPISODE, {0})
    assert lesson.tokens.tolist() == [1, 2, 20, 21, 12, 3, 4, 20, 21, 13, 14, 5, 15, 16]
    assert trained(lesson) == [12, 13, 14, 15, 16]
    scored = EPISODE.assemble({0}).tokens[: len(lesson.tokens)]
    assert lesson.tokens.tolist() == scored.tolist()


def rows_of(lessons, length):
    return fill_rows([[{"tokens": x.tokens, "kinds": x.kinds}] for x in lessons], length)


def test_the_loss_is_the_sum_over_the_trained_tokens(model):
    lessons = [tiny.lesson(EPISODE, {0}), tiny.lesson(EPISODE)]
    batch = {name: jnp.asarray(x) for name, x in rows_of(lessons, 16).items()}
    trainee = Trainee(model, {}, LoraConfig())

    @jax.jit
    def loss(params, batch):
        return loss_and_gradient(trainee, params, {}, batch, sft_loss, tiny.COMPUTE, 8)[:2]

    total, count = loss(model.params, batch)
    forward = jax.jit(model.forward)
    expected, number = 0.0, 0
    for lesson in lessons:
        ids = jnp.asarray(lesson.tokens[None])
        places = jnp.arange(ids.shape[1])[None]
        hidden = forward(model.params, ids, places, jnp.ones_like(ids))[0]
        logits = np.asarray(hidden, np.float64) @ np.asarray(model.head(model.params), np.float64).T
        for i in range(1, ids.shape[1]):
            if lesson.kinds[i] != OTHER:
                row = logits[i - 1]
                token = lesson.tokens[i]
                expected -= row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
                number += 1
    assert int(count) == number == 12
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_a_fresh_model_passes_the_embedding_through():
    fresh = tiny.fresh_model(CONFIG, 3)
    tokens = jnp.asarray([[1, 5, 9]])
    hidden = fresh.forward(fresh.params, tokens, jnp.arange(3)[None], jnp.ones_like(tokens))
    embedded = np.asarray(fresh.params["embed"])[np.asarray(tokens)]
    scale = np.sqrt(np.mean(embedded**2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(hidden, embedded / scale, rtol=1e-5)
    query = np.asarray(fresh.params["layers"]["attention"]["query"])
    assert abs(query.std() - 16**-0.5) < 0.02


def test_matrices_of_the_blocks_are_seen_as_inputs_by_outputs():
    numbers = tiny.matrix_axes(CONFIG)
    attention, mlp = numbers["layers"]["attention"], numbers["layers"]["mlp"]
    axes = {
        name: (tuple(attention[name].reduction_axis), tuple(attention[name].output_axis))
        for name in ("query", "key", "value", "out")
    }
    # Shapes [L, D, N, H] and, for the output, [L, N, H, D].
    assert axes == {
        "query": ((1,), (2, 3)),
        "key": ((1,), (2, 3)),
        "value": ((1,), (2, 3)),
        "out": ((1, 2), (3,)),
    }
    for name in ("gate", "up", "down"):
        assert (tuple(mlp[name].reduction_axis), tuple(mlp[name].output_axis)) == ((1,), (2,))
    assert numbers["embed"] is numbers["norm"] is attention["query_norm"] is None


def test_an_update_of_stacked_weights_is_muon_on_each_layers_matrix(model):
    settings = TinyTraining(
        drill_steps=0, steps=4, matrix_lr=0.1, other_lr=0.01, warmup=0, decay=0.0
    )
    rule = tiny.optimizer(model, settings)
    gradient = jax.tree.map(lambda leaf: 1e-3 * leaf, model.params)
    updates, _ = jax.jit(rule.update)(gradient, rule.init(model.params), model.params)
    # By hand, one layer's matrix at a time, with what optax takes for a matrix without being told.
    plain = optax.contrib.muon(0.1, adam_learning_rate=0.01)
    for name, inputs in (("query", 16), ("out", 24)):
        leaf = gradient["layers"]["attention"][name]
        for layer in range(2):
            alone = {"w": leaf[layer].reshape(inputs, -1), "norm": gradient["norm"]}
            expected, _ = jax.jit(plain.update)(alone, plain.init(alone), alone)
            got = updates["layers"]["attention"][name][layer].reshape(inputs, -1)
            np.testing.assert_allclose(got, expected["w"], atol=1e-5)
            np.testing.assert_allclose(updates["norm"], expected["norm"], rtol=1e-4)


def test_the_rates_rise_stay_and_fall():
    settings = TinyTraining(drill_steps=4, steps=6, warmup=2, decay=0.5)
    rates = [float(tiny.schedule(settings, 0.01)(step)) for step in range(10)]
    shares = [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    np.testing.assert_allclose(rates, 0.01 * np.asarray(shares), rtol=1e-5)
    constant = TinyTraining(drill_steps=4, steps=6, warmup=0, decay=0.0)
    assert all(float(tiny.schedule(constant, 0.01)(step)) == np.float32(0.01) for step in range(10))


def test_lessons_begin_with_drills_and_repeat_for_equal_seeds():
    drills = [TokenTrajectory("d", (8,), (TokenTurn((9,), (), (), ()),))]
    settings = TinyTraining(drill_steps=2, drill_batch=3, steps=4, batch=5)
    made = list(tiny.lessons([EPISODE], drills, settings, 0))
    batches = [batch["tokens"] for batch, _ in made]
    assert [len(tokens) for tokens in batches] == [3, 3, 5, 5, 5, 5]
    assert all(tokens[0, :2].tolist() == [8, 9] for tokens in batches[:2])
    assert all(tokens[:, :2].tolist() == [[1, 2]] * 5 for tokens in batches[2:])
    # One program each for drills and episodes.
    assert len({(batch["tokens"].shape, places) for batch, places in made}) == 2
    assert all(batch["loss_mask"].sum(1).max() <= places for batch, places in made)
    again = [batch["tokens"] for batch, _ in tiny.lessons([EPISODE], drills, settings, 0)]
    other = [batch["tokens"] for batch, _ in tiny.lessons([EPISODE], drills, settings, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(batches, other, strict=True))


def test_lessons_empty_blocks_in_the_share_asked_for():
    def full_rows(emptied):
        settings = TinyTraining(drill_steps=0, steps=50, batch=8, emptied=emptied)
        batches = tiny.lessons([EPISODE], [], settings, 0)
        rows = [row for batch, _ in batches for row in batch["tokens"].tolist()]
        full = tiny.lesson(EPISODE).tokens.tolist()
        return sum(row[: len(full)] == full for row in rows) / len(rows)

    assert full_rows(0.0) == 1.0
    # The two blocks of an emptied episode are both kept with chance int (1 - p)^2 dp = 1/3.
    assert abs(full_rows(1.0) - 1 / 3) < 0.1
    assert abs(full_rows(0.5) - 2 / 3) < 0.1


def test_every_episode_is_used_before_any_is_used_again():
    episodes = [dataclasses.replace(EPISODE, prompt=(i, i)) for i in range(6)]
    settings = TinyTraining(drill_steps=0, steps=4, batch=3)
    batches = tiny.lessons(episodes, [], settings, 0)
    firsts = [int(row[0]) for batch, _ in batches for row in batch["tokens"]]
    assert sorted(firsts[:6]) == sorted(firsts[6:]) == list(range(6))


def test_lessons_without_material_say_what_is_missing():
    with pytest.raises(ValueError, match="2 updates on drills are asked for, but there are none"):
        list(tiny.lessons([EPISODE], [], TinyTraining(drill_steps=2, steps=1), 0))


def test_training_learns_and_repeats_exactly():
    settings = TinyTraining(
        drill_steps=0, steps=30, batch=4, emptied=0.5, matrix_lr=0.05, other_lr=0.03
    )

    def run():
        losses = []
        batches = tiny.lessons([EPISODE], [], settings, 0)
        trained = tiny.train(
            tiny.fresh_model(CONFIG, 0), batches, settings, lambda _, loss, __: losses.append(loss)
        )
        return trained, losses

    first, losses = run()
    second, _ = run()
    assert len(losses) == 30 and losses[-1] < 0.1 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "training.batch is 0; it must be at least 1"),
        ({"steps": -1}, "training.steps is -1; it must be at least 0"),
        ({"emptied": 1.5}, "training.emptied is 1.5; it must be from 0 to 1"),
        ({"matrix_lr": float("nan")}, "training.matrix_lr is nan"),
        ({"steps": 0, "drill_steps": 0}, "both 0"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TinyTraining(**settings)
