import numpy as np
import pytest
from toy import ToyModel, random_trajectory

from race_jax.logic.cover import check_epsilons, find_cover
from race_jax.logic.scoring import Scorer, action_means, bucket_length, scored_positions
from race_jax.types import TokenTrajectory, TokenTurn

SKIP = (1, 2)


def four_turns(bare=()):
    """Prompt of 2; every turn 3 reasoning tokens (the first names the turn), 2 action, 1 seen."""
    return TokenTrajectory(
        "four",
        (5, 6),
        tuple(
            TokenTurn(() if t in bare else (10 + t, 1, 2), SKIP, (20, 21), (30,)) for t in range(4)
        ),
    )


def table_score(table, calls=None):
    """Likelihoods looked up by which turns still carry reasoning."""

    def score(sequence):
        removed = frozenset(t for t in range(4) if 10 + t not in sequence.tokens)
        if calls is not None:
            calls.append(removed)
        return np.array(table[removed], float)

    return score


def test_algorithm_1_by_hand():
    # epsilon 1/8; all values are exact in binary, so that equality can be seen.
    table = {
        frozenset(): [-1, -1, -1, -1],
        # Turn 2 out: d = (1/8, -1/4, 0). Equality and a rise both pass: accepted.
        frozenset({1}): [-1, -1.125, -0.75, -1],
        # Turn 3 out as well, against the vector above: d = (0, 3/8): turn 4 protects turn 3.
        frozenset({1, 2}): [-1, -1.125, -0.75, -1.375],
        # Turn 4 out with turn 2, against the same vector: d = (1/16): accepted.
        frozenset({1, 3}): [-1, -1.125, -0.75, -1.0625],
    }
    calls = []
    cover = find_cover(four_turns(), table_score(table, calls), 0.125)
    assert calls == [frozenset(), {1}, {1, 2}, {1, 3}]
    assert cover.removed == (1, 3)
    assert [r.decreases for r in cover.removals] == [(0.125, -0.25, 0.0), (0.0, 0.375), (0.0625,)]
    assert [r.accepted for r in cover.removals] == [True, False, True]
    assert [r.worst_turn for r in cover.removals] == [1, 3, 3]
    assert cover.loglik_full.tolist() == [-1, -1, -1, -1]
    assert cover.loglik_final.tolist() == [-1, -1.125, -0.75, -1.0625]


def test_token_counts_by_hand():
    # Full: 2 + 4 * 6 = 26 tokens; the last observation and the last action token are not needed:
    # 24. Turn starts 2, 8, 14, 20; a removal shortens its turn by 1.
    table = {
        frozenset(): [0, 0, 0, 0],
        frozenset({1}): [0, -1, 0, 0],  # rejected at its own action: 2 + 2 - 1 = 3 tokens
        frozenset({2}): [0, 0, 0, -1],  # rejected at turn 4: 5 (turn 3) + 3 + 2 - 1 = 9 tokens
        frozenset({3}): [0, 0, 0, 0],  # accepted: 2 + 2 - 1 = 3 tokens
    }
    cover = find_cover(four_turns(), table_score(table), 0.5)
    assert cover.removed == (3,)
    assert cover.tokens_minimum == 24 + 3 + 9 + 3
    assert cover.tokens_naive == 24 + 3 * 23 == cover.tokens_forwarded


def test_first_turn_is_kept_and_bare_turns_are_not_tested():
    calls = []
    table = {frozenset(s): [0, 0, 0, 0] for s in ({1}, {1, 2}, {1, 2, 3})}
    cover = find_cover(four_turns(bare=(1,)), table_score(table, calls), 0.0)
    assert calls == [{1}, {1, 2}, {1, 2, 3}]
    assert cover.removed == (2, 3)


@pytest.mark.parametrize("epsilon", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_a_threshold_that_is_none_is_refused(epsilon):
    with pytest.raises(ValueError, match=r"epsilon .*finite number"):
        find_cover(four_turns(), table_score({}), epsilon)


def test_thresholds_are_sorted_and_unique():
    assert check_epsilons([0.1, 0.001, 0.1]) == (0.001, 0.1)
    assert check_epsilons([np.float32(0.5), np.int64(2)]) == (0.5, 2.0)
    assert str(check_epsilons([-0.0])) == "(0.0,)"
    with pytest.raises(ValueError, match="no epsilon"):
        check_epsilons([])


def test_a_likelihood_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"four: the likelihood of action 2 is nan"):
        find_cover(four_turns(), table_score({frozenset(): [0, np.nan, 0, 0]}), 0.1)


def test_scored_positions_shift_by_one():
    sequence = four_turns().assemble()
    positions, targets = scored_positions(sequence)
    # The first action stands at 5 and 6 (after 2 prompt and 3 reasoning tokens).
    assert positions.tolist() == [4, 5, 10, 11, 16, 17, 22, 23]
    assert targets.tolist() == [20, 21] * 4


def test_action_means_weigh_each_action_by_its_own_length():
    turn = TokenTurn((), SKIP, (20,), ())
    longer = TokenTurn((), SKIP, (20, 21, 22), ())
    sequence = TokenTrajectory("x", (5,), (turn, longer)).assemble()
    got = action_means(sequence, np.array([-1.0, -1.0, -2.0, -6.0]))
    assert got.tolist() == [-1.0, -3.0]


def test_scorer_equals_a_loop_over_prefixes():
    model = ToyModel()
    params = model.init()
    sequence = random_trajectory(3, 3).assemble()
    embed, mix, head = (np.float64(params[k]) for k in ("embed", "mix", "head"))
    want = []
    for begin, end in sequence.actions:
        logprobs = []
        for m in range(begin, end):
            weights = model.decay ** np.arange(m - 1, -1, -1)
            hidden = np.tanh(weights @ embed[sequence.tokens[:m]] @ mix)
            logits = head @ hidden
            logprobs.append(logits[sequence.tokens[m]] - np.log(np.exp(logits).sum()))
        want.append(np.mean(logprobs))
    scorer = Scorer(model, params)
    np.testing.assert_allclose(scorer.score(sequence), want, atol=1e-5)


def test_the_bucket_does_not_move_a_likelihood():
    model = ToyModel()
    scorer = Scorer(model, model.init())
    sequence = random_trajectory(4, 4).assemble()
    np.testing.assert_allclose(
        scorer.score(sequence), scorer.score(sequence, bucket=512), atol=1e-6
    )


def test_few_programs_for_many_lengths():
    model = ToyModel()
    scorer = Scorer(model, model.init())
    sequences = [random_trajectory(s, 1 + s % 12).assemble() for s in range(50)]
    buckets = {bucket_length(int(s.actions[-1, 1]) - 1) for s in sequences}
    for sequence in sequences:
        scorer.score(sequence)
    assert scorer._logprobs._cache_size() == len(buckets) <= 9


def test_buckets_are_two_per_doubling():
    assert sorted({bucket_length(n) for n in range(1, 600)}) == [
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
    ]
    assert all(n <= bucket_length(n) <= max(64, 1.5 * n) for n in range(1, 5000))


def test_a_sequence_longer_than_the_context_is_refused():
    model = ToyModel(context_length=20)
    with pytest.raises(ValueError, match="context is 20"):
        Scorer(model, model.init()).score(random_trajectory(0, 3).assemble())
