import numpy as np
import pytest

from race_jax import losses
from race_jax.chat import renderer_for
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.packing import (
    ACTION,
    DECISION,
    OTHER,
    REASONING,
    closing_id,
    decision_place,
    fill_rows,
    make_example,
    next_in_segment,
    plan_rows,
)
from race_jax.types import TokenTrajectory, TokenTurn, Trajectory

TWO_TURNS = TokenTrajectory(
    "two",
    (10, 11, 12),
    (
        TokenTurn((20, 21, 1, 2), (1, 2), (30, 3), (40, 41)),
        TokenTurn((22, 1, 2), (1, 2), (31, 32, 3), (42,)),
    ),
)
A, B = [1, 2, 3], [4, 5, 6, 7, 8]


def as_example(tokens, sampled=True):
    kinds = np.full(len(tokens), ACTION if sampled else OTHER, np.uint8)
    return {"tokens": np.array(tokens, np.int32), "kinds": kinds}


def test_two_turns_by_hand():
    got = make_example(TWO_TURNS, 0)
    np.testing.assert_array_equal(
        got.tokens, [10, 11, 12, 20, 21, 1, 2, 30, 3, 40, 41, 22, 1, 2, 31, 32, 3]
    )
    o, r, d, a = OTHER, REASONING, DECISION, ACTION
    np.testing.assert_array_equal(got.kinds, [o, o, o, d, r, r, r, a, a, o, o, d, r, r, a, a, a])
    # The last observation is not needed, so it is not there.
    np.testing.assert_array_equal(got.turns, [[3, 9, 0], [11, 17, 0]])


def test_the_loss_of_two_turns_by_hand():
    example = make_example(TWO_TURNS, 0)
    row = fill_rows([[{"tokens": example.tokens, "kinds": example.kinds}]], 20)
    logprobs = -np.arange(1.0, 21.0, dtype=np.float32)[None]
    # Sampled are ids 3 to 8 and 11 to 16, predicted at places 2 to 7 and 10 to 15:
    # 3 + ... + 8 + 11 + ... + 16 = 33 + 81.
    assert losses.sft(logprobs, row["loss_mask"]) == (114, 12)


def test_a_removed_turn_trains_on_what_closes_its_block():
    got = make_example(TWO_TURNS, 0, removed={1})
    np.testing.assert_array_equal(got.tokens[11:], [1, 2, 31, 32, 3])
    np.testing.assert_array_equal(got.kinds[11:], [DECISION, REASONING, ACTION, ACTION, ACTION])
    np.testing.assert_array_equal(got.turns, [[3, 9, 0], [11, 16, 1]])
    bare = TokenTurn((), (1, 2), (31, 32, 3), ())
    natural = TokenTrajectory("two", TWO_TURNS.prompt, (TWO_TURNS.turns[0], bare))
    for left, right in zip(make_example(natural, 0), got, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_example_is_the_sequence_that_logic_scores():
    for removed in ((), (0,), (1,), (0, 1)):
        example, scored = make_example(TWO_TURNS, 0, removed), TWO_TURNS.assemble(removed)
        np.testing.assert_array_equal(example.tokens, scored.tokens[: len(example.tokens)])
        np.testing.assert_array_equal(example.turns[:, 0], scored.starts)
        np.testing.assert_array_equal(example.turns[:, 1], scored.actions[:, 1])


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("form", ["close", "template"])
def test_mask_and_ids_per_family(qwen_tokenizer, family, form):
    """The ids of the sampled tokens, spelt out, for a turn with reasoning and one without."""
    renderer = renderer_for(qwen_tokenizer, family, skip_form=form)
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "reasoning_content": ""},
        {"role": "user", "content": "f"},
    )
    tokens = renderer.encode(Trajectory("t", messages))
    place = decision_place(renderer)
    got = make_example(tokens, place)
    ids = qwen_tokenizer.convert_tokens_to_ids
    think, close, end = ids("<think>"), ids("</think>"), ids("<|im_end|>")
    letters = dict(zip("bce", (qwen_tokenizer.encode(x)[0] for x in "bce"), strict=True))
    opener, empty = (
        ([], [close, 271]) if form == "close" else ([think, 198], [think, 271, close, 271])
    )
    sampled = [*opener, letters["c"], 198, close, 271, letters["b"], end]
    sampled += [*empty, letters["e"], end]
    assert got.tokens[got.kinds != OTHER].tolist() == sampled
    # One token decides: `</think>` against the first of the reasoning; in the family's own empty
    # block, two newlines in one token against one.
    decisions = got.tokens[got.kinds == DECISION].tolist()
    assert decisions == ([letters["c"], close] if form == "close" else [198, 271])
    assert closing_id(renderer) == decisions[1]
    np.testing.assert_array_equal(got.turns[:, 2], [0, 1])


def test_messages_without_loss_are_context():
    words = ["a", "b", "c", "d"]
    renderer = renderer_for(word_tokenizer(words), "qwen3")
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "loss": False},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    )
    got = make_example(renderer.encode(Trajectory("t", messages)), 0)
    assert len(got.turns) == 1
    close, newlines, d = (renderer.codec.encode(x)[0] for x in ("\ud803", "\n\n", "d"))
    sampled = got.tokens[got.kinds != OTHER].tolist()
    assert sampled == [close, newlines, d, renderer.end_of_turn]


def test_the_label_shift_by_hand():
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]])
    values = np.array([[5, 6, 7, 8, 9, 0, 0]])
    np.testing.assert_array_equal(next_in_segment(values, segments), [[6, 7, 0, 9, 0, 0, 0]])
    np.testing.assert_array_equal(next_in_segment(values, segments, -1)[0, 2], -1)


def test_two_examples_in_a_row_by_hand():
    got = fill_rows([[as_example(A), as_example(B)], [as_example(B)]], 10)
    np.testing.assert_array_equal(got["tokens"][0], [*A, *B, 0, 0])
    np.testing.assert_array_equal(got["targets"][0], [2, 3, 0, 5, 6, 7, 8, 0, 0, 0])
    np.testing.assert_array_equal(got["positions"][0], [0, 1, 2, 0, 1, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(got["segment_ids"][0], [1, 1, 1, 2, 2, 2, 2, 2, 0, 0])
    # Nothing is trained across the boundary: 3 does not predict 4.
    np.testing.assert_array_equal(got["loss_mask"][0], [1, 1, 0, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(got["segment_ids"][1], [1] * 5 + [0] * 5)
    kinds = {name: x.dtype for name, x in got.items()}
    assert kinds.pop("loss_mask") == np.dtype(bool)
    assert set(kinds.values()) == {np.dtype(np.int32)}


def test_a_token_that_is_padding_elsewhere_is_none_here():
    # Id 0 pads, and here it is also text and the end of a turn: lengths decide, not ids.
    got = fill_rows([[as_example([0, 7, 0])]], 5)
    np.testing.assert_array_equal(got["segment_ids"], [[1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(got["loss_mask"], [[1, 1, 0, 0, 0]])


def test_what_goes_with_tokens_shifts_with_the_targets():
    example = {**as_example(A), "old_logprobs": np.array([-1, -2, -3], np.float32)}
    got = fill_rows([[example, example]], 7)
    np.testing.assert_array_equal(got["old_logprobs"], [[-2, -3, 0, -2, -3, 0, 0]])


def test_packed_and_separate_rows_hold_the_same():
    rng = np.random.default_rng(0)
    examples = [as_example(rng.integers(1, 99, n), n % 2) for n in (3, 1, 8, 5, 2)]
    packed = fill_rows([examples], 24)
    for n, example in enumerate(examples, 1):
        alone = fill_rows([[example]], len(example["tokens"]))
        here = packed["segment_ids"][0] == n
        for name in alone.keys() - {"segment_ids"}:
            np.testing.assert_array_equal(packed[name][0, here], alone[name][0])


def test_rows_without_examples_are_padding():
    got = fill_rows([[], []], 4)
    assert all(not x.any() and x.shape == (2, 4) for x in got.values())


def test_rows_that_overflow_are_refused():
    with pytest.raises(ValueError, match="row 1: its examples have more than 7 tokens"):
        fill_rows([[as_example(A)], [as_example(A), as_example(B)]], 7)


@pytest.mark.parametrize("seed", range(5))
def test_plans_hold_everything_once_and_within_capacity(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 101, 300)
    rows = plan_rows(lengths, 100)
    assert sorted(i for row in rows for i in row) == list(range(300))
    sums = [int(lengths[row].sum()) for row in rows]
    assert max(sums) <= 100
    # Best fit leaves at most one row that is not more than half full, as a second would have
    # gone into the first.
    assert sum(2 * total <= 100 for total in sums) <= 1
    assert plan_rows(lengths, 100) == rows
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_a_plan_by_hand():
    # 7 opens a row, 6 another; 4 fits neither better than beside 6 (10 of 10); 3 goes beside 7.
    assert plan_rows([3, 4, 6, 7], 10) == [[0, 3], [1, 2]]
    assert plan_rows([], 10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_plans_refuse_what_does_not_fit(length):
    with pytest.raises(ValueError, match=f"example 1 has {length} tokens"):
        plan_rows([5, length], 10)
