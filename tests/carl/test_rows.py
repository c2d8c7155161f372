"""Rows of trees: what is laid out, who sees whom, and the same update as path by path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from carl_samples import Digits, trees, word_renderer
from checkpoint_samples import tiny_config

from race_jax.carl.forking import ForkConfig
from race_jax.carl.rows import JudgedTree, make_tree_batch
from race_jax.carl.tree import credit_trees
from race_jax.envs.potion_text import words
from race_jax.envs.potions import PotionShopConfig
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.models import init_model, make_model
from race_jax.packing import decision_place, make_example
from race_jax.rl_loss import actor_loss
from race_jax.train.optimizer import LoraConfig
from race_jax.train.state import Trainee
from race_jax.train.step import ComputeConfig, loss_and_gradient, places_in

LENGTH = 4096
CLIPS = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.fixture(scope="module")
def renderer():
    return word_renderer()


@pytest.fixture(scope="module")
def items():
    make = functools.partial(Digits, turns=3)
    grown = list(trees(make=make, config=ForkConfig(first=2, forks=6, rule="random")).values())
    return [
        JudgedTree(tree, credit, {})
        for tree, credit in zip(grown, credit_trees(grown), strict=True)
    ]


def batch_of(items, renderer, **settings):
    place = decision_place(renderer)
    return make_tree_batch(items, **{"place": place, "length": LENGTH, "rows": 1, **settings})


def trained_tokens(items, renderer):
    """Each id of the update set with its advantage and log-probability, from the rollouts."""
    found = []
    for item in items:
        for node in np.flatnonzero(item.credit.trainable):
            state = item.tree.nodes[node]
            rollout = item.tree.rollouts[state.sample]
            turn = rollout.tokens.turns[state.turn - 1]
            ids = (turn.reasoning or turn.skip) + turn.action
            nats = np.float32(rollout.notes[state.turn - 1].logprobs)
            advantage = float(item.credit.advantages[node])
            found += [
                (i, round(advantage, 5), round(float(v), 5)) for i, v in zip(ids, nats, strict=True)
            ]
    return sorted(found)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("length", [512, LENGTH])
def test_rows_train_each_token_of_the_update_set_once(items, renderer, share, length):
    batch, stats = batch_of(items, renderer, share=share, length=length)
    mask = batch["loss_mask"]
    told = zip(
        batch["targets"][mask], batch["advantages"][mask], batch["old_logprobs"][mask], strict=True
    )
    found = sorted((int(i), round(float(a), 5), round(float(v), 5)) for i, a, v in told)
    assert found == trained_tokens(items, renderer)
    assert stats.policy == mask.sum() == len(found)
    assert stats.turns == sum(item.tree.edges for item in items)
    assert ("ends" in batch) == share


def test_sharing_lays_out_each_state_once_but_for_its_last_token(items, renderer):
    shared, fewer = batch_of(items, renderer)
    _, more = batch_of(items, renderer, share=False)
    needed, branches = 0, 0
    for item in items:
        tree, place = item.tree, decision_place(renderer)
        keep = set()
        for node in np.flatnonzero(item.credit.trainable):
            while node >= 0:
                keep.add(int(node))
                node = tree.nodes[node].parent
        inner = {tree.nodes[n].parent for n in keep} - {-1}
        states = {}
        for n in keep - {0}:
            node = tree.nodes[n]
            example = make_example(tree.rollouts[node.sample].tokens, place)
            begin, end = example.turns[node.turn - 1][:2]
            if n in inner and node.turn < len(example.turns):
                end = example.turns[node.turn][0]
            states[n] = end - begin
            branches += 1 if node.parent in inner else 0
        first = tree.rollouts[0].tokens
        needed += len(first.prompt) + sum(states.values())
        # Each inner state's last token stands in front of each of its branches.
        branches -= len(inner)
    assert fewer.sampled == needed + branches
    assert fewer.sampled < 0.6 * more.sampled
    segments = shared["segment_ids"]
    assert (shared["ends"] > np.arange(LENGTH)).all()
    assert (shared["ends"][segments == 0] == np.where(segments == 0)[1] + 1).all()


def test_each_token_of_a_row_sees_its_own_branch_and_nothing_else(items, renderer):
    batch, _ = batch_of(items, renderer)
    paths = {
        tuple(make_example(rollout.tokens, 0).tokens[:n].tolist())
        for item in items
        for rollout in item.tree.rollouts.values()
        for n in range(len(make_example(rollout.tokens, 0).tokens) + 1)
    }
    rng = np.random.default_rng(0)
    for row in range(len(batch["tokens"])):
        ends, tokens = batch["ends"][row], batch["tokens"][row]
        held = np.flatnonzero(batch["segment_ids"][row])
        for place in rng.choice(held, 60):
            seen = [j for j in range(place + 1) if ends[j] > place]
            assert tuple(tokens[seen].tolist()) in paths
            assert batch["positions"][row][seen].tolist() == list(range(len(seen)))


SHAPE = tiny_config(
    len(word_tokenizer(words(PotionShopConfig().size))),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=LENGTH,
    rms_norm_eps=1e-5,
    initializer_range=0.1,
)


def update_of(model, batch):
    trainee = Trainee(model, model.params, LoraConfig())
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    loss = functools.partial(actor_loss, **CLIPS)
    total, weight, gradient, _ = jax.jit(
        lambda trained: loss_and_gradient(
            trainee,
            trained,
            {},
            arrays,
            loss,
            ComputeConfig(dtype="float32"),
            places_in(batch["loss_mask"], batch["loss_mask"].shape[1]),
        )
    )(model.params)
    return float(total), float(weight), gradient


def test_the_update_with_shared_prefixes_is_the_one_without(items, renderer):
    model = init_model(SHAPE, 0)
    one = update_of(model, batch_of(items, renderer, share=True, length=512)[0])
    two = update_of(model, batch_of(items, renderer, share=False, length=512)[0])
    assert one[1] == two[1]
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one[2]), jax.tree.leaves(two[2]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one[2])) > 1e-4


def _above(tree, node):
    while node >= 0:
        yield int(node)
        node = tree.nodes[node].parent


def test_covers_mask_reasoning_and_bring_their_closures_once(items, renderer):
    item = items[0]
    thought = {
        sample: [t for t, turn in enumerate(rollout.tokens.turns) if t and turn.reasoning]
        for sample, rollout in item.tree.rollouts.items()
    }
    judged = [item._replace(removed=thought)]
    batch, stats = batch_of(judged, renderer, closure=0.5)
    plain, _ = batch_of(judged, renderer)
    tree = item.tree
    own = sum(
        1
        for sample, turns in thought.items()
        for t in turns
        if t >= (tree.rollouts[sample].fork or (0, 0))[1]
    )
    assert stats.closings == own > 0
    weights = batch["close_weight"][batch["close_weight"] > 0]
    np.testing.assert_allclose(weights, 0.5 * stats.policy / tree.edges, rtol=1e-6)
    # Masked: the reasoning of removed turns whose actions are trained.
    masked = 0
    for node in np.flatnonzero(item.credit.trainable):
        state = tree.nodes[node]
        turn = tree.rollouts[state.sample].tokens.turns[state.turn - 1]
        if state.turn - 1 in thought[state.sample]:
            masked += len(turn.reasoning)
    assert stats.masked == masked == (batch["completion"] & ~batch["keep"]).sum() > 0
    assert plain["keep"].sum() == plain["completion"].sum() - masked
    # Kept turns are those that reason, but the first of an episode and those removed: none here.
    assert not batch["asked"].any()
    spared = [item._replace(removed=dict.fromkeys(thought, ()))]
    asked = batch_of(spared, renderer)[0]["asked"]
    laid_out = {
        n
        for target in np.flatnonzero(item.credit.trainable)
        for n in _above(tree, target)
        if n and tree.nodes[n].turn - 1 in thought[tree.nodes[n].sample]
    }
    assert asked.sum() == len(laid_out) > 0
    bare, _ = batch_of(judged, renderer, masking=False)
    assert (bare["keep"] == bare["completion"]).all()


def test_bad_input_is_refused_by_name(items, renderer):
    with pytest.raises(ValueError, match=r"digits/a: the path to an action has \d+ tokens"):
        batch_of(items, renderer, length=64)
    with pytest.raises(ValueError, match="lambda is -1"):
        batch_of(items, renderer, closure=-1)
    untrained = [
        item._replace(credit=item.credit._replace(trainable=np.zeros_like(item.credit.trainable)))
        for item in items
    ]
    with pytest.raises(ValueError, match="nothing to train on"):
        batch_of(untrained, renderer)


def test_models_that_read_in_order_refuse_trees(items, renderer):
    batch, _ = batch_of(items, renderer)
    model = make_model(
        tiny_config(
            64,
            model_type="qwen3_5_text",
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            partial_rotary_factor=0.5,
        ),
        {},
    )
    rows = (batch["tokens"], batch["positions"], batch["segment_ids"])
    with pytest.raises(ValueError, match="reads rows in order"):
        model.forward({}, *rows, ends=batch["ends"])
