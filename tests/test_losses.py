import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from race_jax import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def batch(seed=0, rows=3, length=7):
    rng = np.random.default_rng(seed)
    completion = rng.random((rows, length)) < 0.7
    return {
        "logprobs": jnp.asarray(-rng.random((rows, length)), jnp.float32),
        "old_logprobs": jnp.asarray(-rng.random((rows, length)), jnp.float32),
        "advantages": jnp.asarray(rng.normal(size=(rows, length)), jnp.float32),
        "completion_mask": jnp.asarray(completion),
        "keep_mask": jnp.asarray(completion & (rng.random((rows, length)) < 0.6)),
    }


def loop(logprobs, old_logprobs, advantages, completion_mask, keep_mask, clip_low, clip_high):
    """RACE eq. 13, a token at a time in float64."""
    total = weight = 0.0
    for index in np.ndindex(*logprobs.shape):
        weight += bool(completion_mask[index])
        if keep_mask[index] and completion_mask[index]:
            ratio = np.exp(np.float64(logprobs[index]) - np.float64(old_logprobs[index]))
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            advantage = np.float64(advantages[index])
            total -= min(ratio * advantage, clipped * advantage)
    return total, weight


def test_sft_sums_over_the_mask():
    # -(-1 + -3) = 4 over 2 tokens; the masked -inf is no part of it.
    logprobs = jnp.array([[-1.0, -jnp.inf, -3.0]])
    mask = jnp.array([[True, False, True]])
    assert losses.sft(logprobs, mask) == (4, 2)
    gradient = jax.grad(lambda x: losses.sft(x, mask)[0])(logprobs)
    np.testing.assert_array_equal(gradient, [[-1, 0, -1]])


def test_micro_batches_add_up_and_a_mean_of_means_would_not():
    # One token of loss 1.0, nine of 0.1: 1.9 / 10 = 0.19; the mean of the two means is 0.55.
    parts = [jnp.full((1, 1), -1.0), jnp.full((1, 9), -0.1)]
    sums = [losses.sft(part, jnp.ones(part.shape, bool)) for part in parts]
    total, weight = (sum(x) for x in zip(*sums, strict=True))
    np.testing.assert_allclose(total / weight, 0.19, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.3),  # a gain is capped at 1 + high
        (1.5, -1.0, 1.5),  # a loss is not
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.9),  # floored at 1 - low
        (1.2, 1.0, -1.2),  # between 1 + low and 1 + high: the clips have a side each
        (0.95, -1.0, 0.95),
        (3.0, 0.0, 0.0),
    ],
)
def test_each_branch_of_the_clip_by_hand(ratio, advantage, loss):
    got = losses.clipped_surrogate(
        jnp.full((1, 1), np.log(ratio)),
        jnp.zeros((1, 1)),
        jnp.full((1, 1), advantage),
        clip_low=0.1,
        clip_high=0.3,
    )
    np.testing.assert_allclose(got, [[loss]], atol=1e-6)


def test_gradient_is_minus_the_advantage_where_the_policies_agree():
    x = batch()

    def total(logprobs):
        return losses.clipped_surrogate(logprobs, x["old_logprobs"], x["advantages"], **CLIP).sum()

    gradient = jax.grad(total)(x["old_logprobs"])
    np.testing.assert_allclose(gradient, -x["advantages"], atol=1e-6)


def test_no_gradient_reaches_the_sampling_policy_or_the_advantages():
    x = batch()
    for name in ("old_logprobs", "advantages"):
        gradient = jax.grad(lambda v, name=name: losses.masked_grpo(**{**x, name: v}, **CLIP)[0])
        np.testing.assert_array_equal(gradient(x[name]), 0)


def test_two_trajectories_three_turns_by_hand():
    """Trajectory 0 (A = 1): a redundant turn of reasoning, reasoning, action, and a kept one.

    Trajectory 1 (A = -1) failed, so nothing of it is masked. Ratios are 1 but for one token.
    """
    names = ["r", "r", "a", "o", "r", "a"], ["r", "a", "-", "-", "-", "-"]
    completion = jnp.array([[name in "ra" for name in row] for row in names])
    keep = completion.at[0, :2].set(False)
    old = jnp.full((2, 6), -1.0)
    new = old.at[1, 1].set(-1 + np.log(2.0))
    advantages = jnp.array([[1.0] * 6, [-1.0] * 6])
    total, weight = losses.masked_grpo(new, old, advantages, completion, keep, **CLIP)
    # Row 0 keeps 3 tokens of loss -1; row 1: 1 and, at ratio 2 with A = -1, 2. Sum 0, of 7 tokens.
    np.testing.assert_allclose((total, weight), (0, 7), atol=1e-6)
    gradient = jax.grad(
        lambda x: losses.masked_grpo(x, old, advantages, completion, keep, **CLIP)[0]
    )(new)
    # -A r where kept, exactly 0 on masked reasoning, the observation and padding.
    want = [[0, 0, -1, 0, -1, -1], [1, 2, 0, 0, 0, 0]]
    np.testing.assert_allclose(gradient, want, atol=1e-6)
    np.testing.assert_array_equal(gradient[~keep], 0)


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(seed):
    x = batch(seed)
    for low, high in ((0.2, 0.2), (0.1, 0.4), (0.0, 0.0)):
        got = losses.masked_grpo(**x, clip_low=low, clip_high=high)
        np.testing.assert_allclose(got, loop(**x, clip_low=low, clip_high=high), atol=1e-5)


def test_masking_changes_the_sum_and_not_the_weight():
    x = batch()
    everything = losses.masked_grpo(**{**x, "keep_mask": x["completion_mask"]}, **CLIP)
    some = losses.masked_grpo(**x, **CLIP)
    nothing = losses.masked_grpo(**{**x, "keep_mask": jnp.zeros((3, 7), bool)}, **CLIP)
    assert everything[1] == some[1] == nothing[1] == x["completion_mask"].sum()
    assert nothing[0] == 0


def test_what_is_kept_outside_the_policy_tokens_does_not_count():
    x = batch()
    wide = {**x, "keep_mask": jnp.ones((3, 7), bool)}
    plain = {**x, "keep_mask": x["completion_mask"]}
    assert losses.masked_grpo(**wide, **CLIP) == losses.masked_grpo(**plain, **CLIP)


def test_rows_padding_and_parts_do_not_matter():
    x = batch(rows=4)
    want = losses.masked_grpo(**x, **CLIP)
    padded = {k: jnp.pad(v, ((0, 2), (0, 3)), constant_values=0) for k, v in x.items()}
    turned = {k: v[::-1] for k, v in x.items()}
    np.testing.assert_allclose(losses.masked_grpo(**padded, **CLIP), want, atol=1e-6)
    np.testing.assert_allclose(losses.masked_grpo(**turned, **CLIP), want, atol=1e-6)
    parts = [losses.masked_grpo(**{k: v[i::2] for k, v in x.items()}, **CLIP) for i in (0, 1)]
    np.testing.assert_allclose(np.sum(parts, axis=0), want, atol=1e-6)


@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
def test_what_lies_under_the_mask_does_not_matter(name, bad):
    x = batch()
    spoilt = {**x, name: jnp.where(x["keep_mask"], x[name], bad)}

    def loss(logprobs, x):
        return losses.masked_grpo(**{**x, "logprobs": logprobs}, **CLIP)[0]

    for function in (loss, jax.grad(loss)):
        np.testing.assert_array_equal(
            function(spoilt["logprobs"], spoilt), function(x["logprobs"], x)
        )


def test_extreme_log_probabilities_stay_finite():
    ends = [-np.inf, -1e30, -1.0, 0.0]
    new, old, advantages = map(jnp.float32, np.meshgrid(ends, ends, [-1.0, 0.0, 1.0]))

    def loss(new):
        values = losses.clipped_surrogate(new, old, advantages, **CLIP)
        return values.sum(), values

    gradient, values = jax.grad(loss, has_aux=True)(new)
    assert np.isfinite(values).all() and np.isfinite(gradient).all()


def test_an_empty_mask_gives_zero_loss_and_gradient():
    x = batch()
    none = {**x, "completion_mask": jnp.zeros((3, 7), bool)}
    assert losses.masked_grpo(**none, **CLIP) == (0, 0)
    gradient = jax.grad(lambda v: losses.masked_grpo(**{**none, "logprobs": v}, **CLIP)[0])
    np.testing.assert_array_equal(gradient(x["logprobs"]), 0)
    assert losses.sft(x["logprobs"], none["completion_mask"]) == (0, 0)


def test_gradients_are_the_numerical_ones():
    x = batch()
    check_grads(
        lambda v: losses.masked_grpo(**{**x, "logprobs": v}, clip_low=0.2, clip_high=0.3)[0],
        (x["logprobs"],),
        order=1,
        modes=("rev",),
        eps=1e-3,
        rtol=1e-2,
    )


def test_closure_counts_every_turn_of_the_batch():
    """Two trajectories of 2 and 3 turns, the second failed; LoGiC emptied turn 2 of the first."""
    close = jnp.array([-5.0, -2.0, -jnp.inf, -1.0, -1.0])
    skip = jnp.array([False, True, False, False, False])
    assert losses.reasoning_closure(close, skip, num_turns=5) == (2, 5)
    gradient = jax.grad(lambda x: losses.reasoning_closure(x, skip, num_turns=5)[0])(close)
    np.testing.assert_array_equal(gradient, [0, -1, 0, 0, 0])


def test_closure_with_nothing_to_close():
    close = jnp.array([[-5.0, -2.0]])
    assert losses.reasoning_closure(close, jnp.zeros((1, 2), bool), num_turns=2) == (0, 2)
    empty = losses.reasoning_closure(jnp.zeros(0), jnp.zeros(0, bool), num_turns=jnp.int32(0))
    assert empty == (0, 0)


def test_shapes_that_would_broadcast_are_refused():
    x = batch(rows=7)
    with pytest.raises(ValueError, match=r"advantages \(7,\)"):
        losses.masked_grpo(**{**x, "advantages": jnp.zeros(7)}, **CLIP)
    with pytest.raises(ValueError, match="loss_mask"):
        losses.sft(x["logprobs"], jnp.ones(7, bool))
    with pytest.raises(ValueError, match="skip_mask"):
        losses.reasoning_closure(jnp.zeros(3), jnp.zeros((3, 1), bool), num_turns=3)


@pytest.mark.parametrize("clips", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -1.0}])
def test_clips_out_of_range_are_refused(clips):
    x = batch()
    with pytest.raises(ValueError, match=next(iter(clips))):
        losses.masked_grpo(**x, **{**CLIP, **clips})


def test_a_negative_number_of_turns_is_refused():
    with pytest.raises(ValueError, match="num_turns is -1"):
        losses.reasoning_closure(jnp.zeros(1), jnp.zeros(1, bool), num_turns=-1)


ROWS = {
    "losses": jnp.array([[1.0, 0.0] + [0.0] * 8, [0.0] + [0.1] * 9]),
    "completion_mask": jnp.array([[True] + [False] * 9, [False] + [True] * 9]),
    "segment_ids": jnp.array([[1] * 2 + [0] * 8, [1] * 10]),
}


@pytest.mark.parametrize(
    ("reduction", "norm", "want"),
    [
        # Sequences of 1 and 9 tokens, with losses 1.0 and 0.1 each.
        ("token-mean", None, 0.19),
        ("seq-mean-token-mean", None, 0.55),
        ("seq-mean-token-sum", None, 0.95),
        ("seq-mean-token-sum-norm", 10, 0.095),
    ],
)
def test_reductions_by_hand_and_packed(reduction, norm, want):
    def reduced(rows, **masks):
        rows = {"keep_mask": rows["completion_mask"], **rows, **masks}
        return losses.reduce_tokens(**rows, reduction=reduction, norm_length=norm)

    total, weight = reduced(ROWS)
    np.testing.assert_allclose(total / weight, want, atol=1e-6)
    # Both in one row, with padding between and behind, and another row of padding.
    packed = {
        name: jnp.stack([jnp.pad(x.reshape(-1), (0, 3)), jnp.zeros(23, x.dtype)])
        for name, x in ROWS.items()
    }
    packed["segment_ids"] = packed["segment_ids"].at[0, 10:20].set(2)
    np.testing.assert_allclose(reduced(packed), (total, weight), atol=1e-6)
    # Micro-batches add up.
    parts = [reduced({name: x[n : n + 1] for name, x in ROWS.items()}) for n in (0, 1)]
    np.testing.assert_allclose(np.sum(parts, axis=0), (total, weight), atol=1e-6)
    # Masking leaves the weight, and every other token's share, as they are.
    kept = ROWS["completion_mask"].at[1, 5:].set(False)
    rest = reduced(ROWS, keep_mask=kept)
    assert rest[1] == weight
    lost = {"token-mean": 0.05, "seq-mean-token-mean": 0.5 / 9 / 2}
    lost |= {"seq-mean-token-sum": 0.25, "seq-mean-token-sum-norm": 0.025}
    np.testing.assert_allclose((total - rest[0]) / weight, lost[reduction], atol=1e-6)


def test_reductions_agree_with_the_paper_loss_and_survive_emptiness():
    x = batch()
    masks = {name: x[name] for name in ("completion_mask", "keep_mask")}
    values = losses.clipped_surrogate(x["logprobs"], x["old_logprobs"], x["advantages"], **CLIP)
    got = losses.reduce_tokens(
        values, **masks, segment_ids=jnp.ones((3, 7), jnp.int32), reduction="token-mean"
    )
    np.testing.assert_allclose(got, losses.masked_grpo(**x, **CLIP), atol=1e-6)
    none = jnp.zeros((3, 7), bool)
    for reduction in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):

        def total(values, reduction=reduction):
            return losses.reduce_tokens(
                values, none, none, jnp.zeros((3, 7), jnp.int32), reduction=reduction
            )[0]

        bad = jnp.full((3, 7), jnp.nan)
        assert total(bad) == 0
        np.testing.assert_array_equal(jax.grad(total)(bad), 0)


def test_unknown_reductions_are_refused():
    masks = {"completion_mask": ROWS["completion_mask"], "keep_mask": ROWS["completion_mask"]}
    arrays = {**ROWS, **masks}
    with pytest.raises(ValueError, match="'mean' is none of token-mean"):
        losses.reduce_tokens(**arrays, reduction="mean")
    for keys in (
        {"reduction": "token-mean", "norm_length": 4},
        {"reduction": "seq-mean-token-sum-norm"},
    ):
        with pytest.raises(ValueError, match="norm_length is"):
            losses.reduce_tokens(**arrays, **keys)


def test_importance_weights_are_cut_and_carry_no_gradient():
    new = jnp.log(jnp.array([[0.5, 0.5, 0.5, 0.0]]))
    old = jnp.log(jnp.array([[0.5, 0.1, 1.0, 0.0]]))
    got = losses.truncated_importance(new, old, limit=2.0)
    np.testing.assert_allclose(got, [[1, 2, 0.5, 1]], atol=1e-6)  # 0.5 / 0.1 = 5 is cut to 2
    gradient = jax.grad(lambda x: losses.truncated_importance(x, old, limit=2.0).sum())(new)
    np.testing.assert_array_equal(gradient, 0)
    with pytest.raises(ValueError, match="limit is 0"):
        losses.truncated_importance(new, old, limit=0)
