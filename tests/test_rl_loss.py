"""The loss on packed rows against loops over trajectories that know nothing of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ToyModel

from race_jax.logprobs import token_logprobs
from race_jax.rl_data import Judged, make_batch
from race_jax.rl_loss import actor_loss, actor_measures
from race_jax.types import TokenTrajectory, TokenTurn

MODEL = ToyModel(vocab_size=24, width=8)
PARAMS = MODEL.init(3)
CLOSE, SKIP = 1, (1, 2)
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
LAMBDA = 0.7


def trajectory(name, turns):
    laid = [
        TokenTurn(tuple(reasoning) + SKIP if reasoning else (), SKIP, (*action, 3), tuple(seen))
        for reasoning, action, seen in turns
    ]
    return TokenTrajectory(name, (5, 6, 7), tuple(laid))


def judged(seed=0):
    """Two of one group, three turns each: one solved with two removals, one failed; and a third."""
    rng = np.random.default_rng(seed)
    shapes = [
        trajectory("solved", [([8, 9], [10], [4, 4]), ([11], [12, 13], [4]), ([14], [10], [])]),
        trajectory("failed", [([8], [10], [4]), ([], [15], [4]), ([16, 17, 18], [19], [])]),
        trajectory("single", [([9], [11], [])]),
    ]
    items = []
    for shape, advantage, removed in zip(shapes, (1.0, -1.0, 0.0), ((1, 2), (), ()), strict=True):
        count = sum(len(t.reasoning or t.skip) + len(t.action) for t in shape.turns)
        old = tuple(float(v) for v in -3 + rng.normal(0, 0.6, count))
        items.append(Judged(shape, old, advantage, removed))
    return items


def log_softmax_after(params, context):
    """log pi(. | context), in float64 and by the toy's definition."""
    embed, mix, head = (np.asarray(params[k], np.float64) for k in ("embed", "mix", "head"))
    state = np.zeros(embed.shape[1])
    for token in context:
        state = MODEL.decay * state + embed[token]
    logits = head @ np.tanh(state @ mix)
    return logits - np.log(np.sum(np.exp(logits)))


def reference(params, items, closure=LAMBDA, masking=True):
    """RACE eqs. 13 to 15 by loops."""
    total, tokens, close, turns = 0.0, 0, 0.0, 0
    for item in items:
        context, old = list(item.tokens.prompt), iter(item.logprobs)
        compressed = list(item.tokens.prompt)
        for t, turn in enumerate(item.tokens.turns):
            turns += 1
            if t in item.removed:
                close += log_softmax_after(params, compressed)[CLOSE]
            opening = turn.reasoning or turn.skip
            for place, token in enumerate(opening + turn.action):
                ratio = np.exp(log_softmax_after(params, context)[token] - next(old))
                context.append(token)
                tokens += 1
                if masking and t in item.removed and place < len(opening):
                    continue
                clipped = min(max(ratio, 1 - CLIPS["clip_low"]), 1 + CLIPS["clip_high"])
                total += min(ratio * item.advantage, clipped * item.advantage)
            compressed += (turn.skip if t in item.removed else opening) + turn.action
            compressed += turn.observation
            context += turn.observation
    return -total / tokens - closure * close / turns


def logprobs_of(params, batch):
    hidden = MODEL.forward(params, *(batch[k] for k in ("tokens", "positions", "segment_ids")))
    return token_logprobs(hidden, MODEL.head(params), batch["targets"])


def rows_of(items, **changes):
    given = {"place": 0, "length": 40, "rows": 1, "closure": LAMBDA, **changes}
    batch, _ = make_batch(items, **given)
    return {k: jnp.asarray(v) for k, v in batch.items()}


def quotient(params, batch, **changes):
    total, weight = actor_loss(logprobs_of(params, batch), batch, **{**CLIPS, **changes})
    return total / weight


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("closure", [LAMBDA, 0.0])
def test_rows_give_the_loss_of_loops(masking, closure):
    items = judged()
    batch = rows_of(items, masking=masking, closure=closure)
    expected = reference(PARAMS, items, closure, masking)
    assert quotient(PARAMS, batch) == pytest.approx(expected, rel=1e-5)
    assert abs(reference(PARAMS, items, 0.0, True) - reference(PARAMS, items, 0.0, False)) > 1e-3


def test_gradients_are_those_of_the_loops():
    items = judged()
    gradient = jax.grad(quotient)(PARAMS, rows_of(items))
    rng = np.random.default_rng(1)
    way = {k: rng.normal(0, 1, v.shape) for k, v in PARAMS.items()}
    step = 1e-6

    def along(size):
        moved = {k: np.asarray(v, np.float64) + size * way[k] for k, v in PARAMS.items()}
        return reference(moved, items)

    slope = (along(step) - along(-step)) / (2 * step)
    assert sum(np.sum(np.asarray(gradient[k]) * way[k]) for k in way) == pytest.approx(
        slope, rel=1e-3
    )


def test_masked_reasoning_observations_and_prompts_have_no_gradient_at_all():
    batch = rows_of(judged())
    loose = {"clip_low": 1.0, "clip_high": 1e6}

    def total(logprobs):
        return actor_loss(logprobs, batch, **loose)[0]

    gradient = np.asarray(jax.grad(total)(logprobs_of(PARAMS, batch)))
    taught = np.asarray(batch["keep"] & (batch["advantages"] != 0)) | (
        np.asarray(batch["close_weight"]) > 0
    )
    assert (gradient[~taught] == 0).all()
    assert (gradient[taught] != 0).all()
    assert (np.asarray(batch["completion"]) & ~np.asarray(batch["keep"])).sum() == 6


def test_the_terms_add_up_and_share_their_weight():
    batch = rows_of(judged())
    both, policy, closure = (
        actor_loss(logprobs_of(PARAMS, batch), batch, **CLIPS, terms=terms)
        for terms in ("both", "policy", "closure")
    )
    assert both[0] == policy[0] + closure[0] and both[1] == policy[1] == closure[1]
    assert policy[0] == quotient(PARAMS, rows_of(judged(), closure=0.0)) * policy[1]
    assert closure[0] > 0


def test_masking_leaves_the_weight_as_it_is():
    items = judged()
    weights = [
        actor_loss(logprobs_of(PARAMS, b), b, **CLIPS)[1]
        for b in (rows_of(items), rows_of(items, masking=False), rows_of(items, closure=0.0))
    ]
    assert weights[0] == weights[1] == weights[2] == sum(len(i.logprobs) for i in items)


@pytest.mark.parametrize("length", [24, 33, 64, 128])
@pytest.mark.parametrize("rows", [1, 3])
def test_packing_padding_and_order_change_nothing(length, rows):
    items = judged()
    batch = rows_of(items[::-1], length=length, rows=rows)
    assert quotient(PARAMS, batch) == pytest.approx(reference(PARAMS, items), rel=1e-5)


@pytest.mark.parametrize(
    "reduction", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_the_closure_does_not_depend_on_how_tokens_are_averaged(reduction):
    items = [item._replace(advantage=0.0) for item in judged()]
    norm = 50 if reduction.endswith("norm") else None
    batch = rows_of(items, reduction=reduction)
    got = quotient(PARAMS, batch, reduction=reduction, norm_length=norm)
    assert got == pytest.approx(reference(PARAMS, items), rel=1e-5)
    assert got != 0


def test_groups_without_differences_and_empty_covers_teach_nothing():
    items = [item._replace(advantage=0.0, removed=()) for item in judged()]
    batch = rows_of(items)
    gradient = jax.grad(quotient)(PARAMS, batch)
    assert all((np.asarray(g) == 0).all() for g in gradient.values())
    assert quotient(PARAMS, batch) == 0


def test_importance_scales_the_policy_loss_and_not_the_closure():
    items = judged()
    batch = rows_of(items)
    doubled = {**batch, "importance": jnp.full(batch["tokens"].shape, 2.0)}
    policy = reference(PARAMS, items, 0.0)
    assert quotient(PARAMS, doubled) - quotient(PARAMS, batch) == pytest.approx(policy, rel=1e-4)


def test_impossible_tokens_under_a_mask_reach_neither_loss_nor_gradient():
    batch = rows_of(judged())
    logprobs = logprobs_of(PARAMS, batch)
    taught = (batch["keep"] & batch["completion"]) | (batch["close_weight"] > 0)
    for bad in (-jnp.inf, jnp.nan):
        spoilt = jnp.where(taught, logprobs, bad)
        value, gradient = jax.value_and_grad(lambda x: actor_loss(x, batch, **CLIPS)[0])(spoilt)
        assert value == actor_loss(logprobs, batch, **CLIPS)[0]
        assert np.isfinite(gradient).all()


def test_measures_by_hand():
    half, double = float(np.log(0.5)), float(np.log(2.0))
    batch = {
        "completion": jnp.array([[1, 1, 1, 1, 0, 0]], bool),
        "keep": jnp.array([[1, 1, 1, 0, 0, 0]], bool),
        "old_logprobs": jnp.array([[-1.0, -1.0, -1.0, -1.0, 0, 0]]),
        "advantages": jnp.array([[1.0, 1.0, -1.0, -1.0, 0, 0]]),
        "close_weight": jnp.array([[0, 0, 0, 0, 0.5, 0]]),
    }
    # Ratios 2 (clipped, as A > 0), 1/2 (not), 1/2 (clipped, as A < 0), masked 1.
    logprobs = jnp.array([[-1 + double, -1 + half, -1 + half, -1.0, -4.0, -9.0]])
    got = actor_measures(logprobs, batch, clip_low=0.2, clip_high=0.2)
    assert {k: float(v) for k, v in got.items()} == pytest.approx(
        {
            "policy": 4,
            "kept": 3,
            "ratio": 3,
            "clipped": 2,
            "surprisal": 4 - double - 2 * half,
            "gap": 3 * double,
            "close_nats": 4,
            "closings": 1,
        },
        rel=1e-5,
    )
