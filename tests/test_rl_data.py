import dataclasses

import numpy as np
import pytest

from race_jax.packing import OTHER
from race_jax.rl_data import (
    Judged,
    closure_example,
    make_batch,
    outcome_reward,
    policy_example,
    sampled_logprobs,
    task_order,
)
from race_jax.rollout.results import Rollout, TurnNote
from race_jax.types import TokenTrajectory, TokenTurn

CLOSE, BLANK, END = 1, 2, 3
SKIP = (CLOSE, BLANK)
# Turn 2 was sampled without reasoning; the cover takes out that of turn 1.
THREE = TokenTrajectory(
    "three",
    (10, 11),
    (
        TokenTurn((20, CLOSE, BLANK), SKIP, (30, END), (40, 41)),
        TokenTurn((21, 22, CLOSE, BLANK), SKIP, (31, END), (42,)),
        TokenTurn((), SKIP, (32, END), ()),
    ),
)
SAMPLED = tuple(-0.1 * n for n in range(1, 16))
ITEM = Judged(THREE, SAMPLED, 0.5, (1,))
FAILED = Judged(
    TokenTrajectory("failed", (10,), (TokenTurn((23, CLOSE, BLANK), SKIP, (33, END), ()),)),
    (-1.0,) * 5,
    -0.5,
)


def test_a_trajectory_as_sampled_by_hand():
    got = policy_example(ITEM, 0)
    o = 0
    np.testing.assert_array_equal(
        got["tokens"], [10, 11, 20, 1, 2, 30, 3, 40, 41, 21, 22, 1, 2, 31, 3, 42, 1, 2, 32, 3]
    )
    completion = [o, o, 1, 1, 1, 1, 1, o, o, 1, 1, 1, 1, 1, 1, o, 1, 1, 1, 1]
    np.testing.assert_array_equal(got["completion"], np.array(completion, bool))
    keep = [o, o, 1, 1, 1, 1, 1, o, o, o, o, o, o, 1, 1, o, 1, 1, 1, 1]
    np.testing.assert_array_equal(got["keep"], np.array(keep, bool))
    np.testing.assert_allclose(got["old_logprobs"][got["completion"]], SAMPLED)
    assert not got["old_logprobs"][~got["completion"]].any()
    np.testing.assert_array_equal(got["advantages"], 0.5 * np.array(completion))
    assert not got["close_weight"].any()


def test_closing_is_asked_for_at_the_decisions_of_kept_turns():
    got = policy_example(ITEM._replace(removed=(), kept=(1,)), 0)
    np.testing.assert_array_equal(np.flatnonzero(got["asked"]), [9])
    # Where the block opens with two tokens of the template, the third decides; a turn that ended
    # before it has no decision.
    got = policy_example(ITEM._replace(kept=(0, 1)), 2)
    np.testing.assert_array_equal(np.flatnonzero(got["asked"]), [4, 11])
    assert not policy_example(ITEM._replace(kept=(0,)), 3)["asked"].any()
    assert not policy_example(ITEM, 0)["asked"].any()
    batch, _ = make_batch(
        [ITEM._replace(kept=(0,)), FAILED], place=0, length=40, rows=1, closure=0.4
    )
    # Arrays are aligned to targets: before the token that decides.
    assert batch["tokens"][batch["asked"]].tolist() == [11]
    assert batch["targets"][batch["asked"]].tolist() == [20]


def test_without_masking_all_policy_tokens_are_kept():
    got = policy_example(ITEM, 0, masking=False)
    np.testing.assert_array_equal(got["keep"], got["completion"])


def test_the_compressed_context_by_hand():
    # Turn 1 closes at once, and nothing after its `</think>` is needed.
    got = closure_example(THREE, (1,), 0, 0.25)
    np.testing.assert_array_equal(got["tokens"], [10, 11, 20, 1, 2, 30, 3, 40, 41, 1])
    np.testing.assert_array_equal(got["close_weight"], [0] * 9 + [0.25])
    np.testing.assert_array_equal(np.flatnonzero(got["kinds"] != OTHER), [9])
    assert not got["completion"].any()
    both = closure_example(THREE, (0, 1), 0, 1.0)
    np.testing.assert_array_equal(both["tokens"], [10, 11, 1, 2, 30, 3, 40, 41, 1])
    np.testing.assert_array_equal(np.flatnonzero(both["close_weight"]), [2, 8])
    assert closure_example(THREE, (), 0, 1.0) is None


def test_a_block_that_opens_with_the_template_counts_its_closing_token():
    # The family's own empty block: `<think>`, a blank line, `</think>`; what opens it is context.
    opener = 9
    turn = TokenTurn((opener, 20, CLOSE), (opener, CLOSE, BLANK), (30, END), ())
    got = closure_example(TokenTrajectory("x", (10,), (turn,)), (0,), 1, 1.0)
    np.testing.assert_array_equal(got["tokens"], [10, opener, CLOSE])
    np.testing.assert_array_equal(got["close_weight"], [0, 0, 1])


def test_weights_count_the_whole_batch():
    batch, stats = make_batch([ITEM, FAILED], place=0, length=24, rows=2, closure=0.4)
    assert batch["completion"].sum() == stats.policy == 15 + 5
    assert (batch["completion"] & ~batch["keep"]).sum() == stats.masked == 4
    assert (stats.turns, stats.closings) == (4, 1)
    # lambda * W / turns, at one place.
    assert batch["close_weight"].sum() == pytest.approx(0.4 * 20 / 4)
    assert (stats.sampled, stats.extra) == (20 + 6, 10)
    assert stats.padding == batch["tokens"].size - 36
    assert (batch["targets"][batch["close_weight"] > 0] == CLOSE).all()
    # A place has loss if its target was sampled by the policy or is to close.
    both = batch["completion"] | (batch["close_weight"] > 0)
    np.testing.assert_array_equal(batch["loss_mask"], both)


def test_other_reductions_weigh_the_closure_by_sequences():
    batch, _ = make_batch(
        [ITEM, FAILED], place=0, length=24, rows=1, closure=0.4, reduction="seq-mean-token-sum"
    )
    assert batch["close_weight"].sum() == pytest.approx(0.4 * 2 / 4)


def test_without_closure_no_compressed_context_is_laid_out():
    batch, stats = make_batch([ITEM, FAILED], place=0, length=24, rows=1, closure=0.0)
    assert (stats.extra, stats.closings) == (0, 0)
    assert not batch["close_weight"].any()


@pytest.mark.parametrize(
    ("count", "rows", "expected"),
    [(1, 1, 1), (3, 1, 3), (5, 1, 6), (7, 1, 8), (9, 1, 12), (13, 1, 16), (5, 4, 8), (9, 4, 12)],
)
def test_rows_are_filled_up_to_a_few_sizes(count, rows, expected):
    batch, _ = make_batch([FAILED] * count, place=0, length=6, rows=rows, closure=0.1)
    assert len(batch["tokens"]) == expected
    assert not batch["loss_mask"][count:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 19}, "three has 20 tokens and a row 19"),
        ({"closure": -0.1}, "lambda is -0.1; it must be a finite number, at least 0"),
        ({"closure": float("nan")}, "lambda is nan"),
        ({"items": []}, "no trajectory"),
        ({"items": [ITEM._replace(logprobs=(0.0,))]}, "15 sampled ids and 1 log-prob"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(changes, message):
    given = {"items": [ITEM], "place": 0, "length": 24, "rows": 1, "closure": 0.1, **changes}
    with pytest.raises(ValueError, match=message):
        make_batch(given.pop("items"), **given)


def note(reasoning, logprobs=(-0.5,), forced=0):
    return TurnNote(logprobs, reasoning, False, 1, forced=forced)


def rollout(success, *notes):
    return Rollout("e/t/0", "e", "t", 0, (), (), float(success), success, "done", None, None, notes)


def test_adaptthink_pays_for_turns_without_reasoning_of_successes_only():
    solved = rollout(True, note(0), note(7), note(0), note(0))
    assert outcome_reward(solved, 0.05) == pytest.approx(1 + 0.05 * 3 / 4)
    assert outcome_reward(solved) == 1
    assert outcome_reward(dataclasses.replace(solved, success=False, reward=0.0), 0.05) == 0


def test_log_probabilities_come_turn_after_turn_and_all_must_be_sampled():
    item = rollout(True, note(0, (-1.0, -2.0)), note(3, (-3.0,)))
    assert sampled_logprobs(item) == (-1.0, -2.0, -3.0)
    with pytest.raises(ValueError, match="e/t/0 has turns whose first ids were not sampled"):
        sampled_logprobs(rollout(True, note(0, forced=2)))


def test_each_pass_takes_every_task_at_most_once_in_an_order_of_its_own():
    passes = [[task_order(11, 5, step, 3) for step in range(3 * e, 3 * e + 3)] for e in range(2)]
    for steps in passes:
        seen = [task for step in steps for task in step]
        assert len(set(seen)) == 9
        assert set(seen) <= set(range(11))
    assert passes[0] != passes[1]
    assert task_order(11, 6, 0, 3) != passes[0][0]
    with pytest.raises(ValueError, match="takes 12 tasks, but there are 11; lower prompts"):
        task_order(11, 0, 0, 12)
