"""Faults that trainers and samplers met with chat templates, each as a small case of our own."""

import numpy as np
import pytest
from chat_samples import F, assistant, call, tool, trajectory, user

from race_jax.chat import renderer_for
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.tokenizer import Codec, mark_tags
from race_jax.types import TokenTrajectory, TokenTurn, Trajectory

FAMILIES = ["qwen2_5", "qwen3", "qwen3_5"]
IS, IE, THINK, END_THINK, NEWLINE, BLANK = 151644, 151645, 151667, 151668, 198, 271
GENERATION_PROMPT = (IS, 77091, NEWLINE)  # assistant\n


def tokens_of(renderer, *messages, tools=(F,)):
    return renderer.encode(trajectory(*messages, tools=tools))


def policy_mask(tokens, removed=()):
    """1 where the policy samples: reasoning or skip, and action."""
    mask = [0] * len(tokens.prompt)
    for t, turn in enumerate(tokens.turns):
        thought = turn.skip if t in removed or not turn.reasoning else turn.reasoning
        mask += [1] * (len(thought) + len(turn.action)) + [0] * len(turn.observation)
    return mask


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def qwen(qwen_tokenizer, family):
    """The renderer of a family over the real tokenizer."""
    return renderer_for(qwen_tokenizer, family)


@pytest.fixture(scope="module")
def words():
    return word_tokenizer(["look", " "])


# Decoding and encoding again between turns.


def test_sampled_ids_are_never_encoded_again(qwen_tokenizer, family, monkeypatch):
    renderer = renderer_for(qwen_tokenizer, family)
    sampled = (36441, 49066, IE)  # "sea" + "rch", which text would make 1836
    assert qwen_tokenizer.encode("search", add_special_tokens=False) == [1836]
    prompt, observation = renderer.prompt_ids([user("Q")]), renderer.observation_ids([tool("hit")])
    turns = (
        TokenTurn((), renderer.skip_ids, sampled, observation),
        TokenTurn((36441, 49066, *renderer.skip_ids), renderer.skip_ids, sampled, ()),
    )
    encode = Codec.encode

    def guarded(self, marked):
        assert "search" not in marked
        return encode(self, marked)

    monkeypatch.setattr(Codec, "encode", guarded)
    row = renderer.encode(Trajectory("t", (), tokens=TokenTrajectory("t", prompt, turns)))
    ids = row.assemble().tokens.tolist()
    first = len(prompt) + len(renderer.skip_ids)
    assert ids[first : first + 3] == [36441, 49066, IE]
    assert policy_mask(row)[first : first + 2] == [1, 1]
    # The next prompt is what was sampled, and the ids of the reply.
    second = row.assemble().starts[1]
    assert ids[:second] == [*prompt, *renderer.skip_ids, *sampled, *observation]
    monkeypatch.undo()
    # Reading the turn changes nothing in it.
    assert renderer.parse_turn(row.turns[1].reasoning + sampled).content == "search"
    assert row.turns[1].action == sampled


# The empty block, whose opener the prompt has.


def test_an_empty_block_has_one_set_of_ids_everywhere(qwen):
    messages = (user("Q"), assistant("", "why", [call(x=1)]), tool("r"), assistant("A", "so"))
    tokens = tokens_of(qwen, *messages)
    scored = tokens.assemble({0}).tokens.tolist()
    # Mask 0 on the prompt's <think>\n, 1 on </think> and the blank line.
    at = len(tokens.prompt)
    assert scored[at - 2 : at + 2] == [THINK, NEWLINE, END_THINK, BLANK]
    assert policy_mask(tokens, {0})[at - 2 : at + 2] == [0, 0, 1, 1]
    # Fine-tuning renders the compressed messages; a rollout appends what it samples.
    tuned = tokens_of(qwen, *qwen.compress(trajectory(*messages), {0}))
    rolled = [*qwen.prompt_ids(messages[:1], [F]), END_THINK, BLANK, *tokens.turns[0].action]
    rolled += qwen.observation_ids(messages[2:3])
    assert tuned.assemble().tokens.tolist() == scored
    assert scored[: len(rolled)] == rolled


def test_the_template_form_of_an_empty_block(qwen_tokenizer, family):
    renderer = renderer_for(qwen_tokenizer, family, skip_form="template")
    tokens = tokens_of(renderer, user("Q"), assistant("A"), user("R"), assistant("B", "why"))
    assert tokens.turns[0].skip == (THINK, BLANK, END_THINK, BLANK)
    assert tokens.prompt[-3:] == GENERATION_PROMPT
    assert tokens.turns[1].reasoning[: renderer.opener_len] == (THINK, NEWLINE)


# Which </think> ends the reasoning.


def as_inputs(renderer, text):
    """Text as a server returns it, and as the ids of a sampler."""
    return text, renderer.codec.encode(mark_tags(text))


def test_only_the_closing_tag_is_in_the_completion(qwen):
    for output in as_inputs(qwen, "2+2.\n</think>\n\nFour<|im_end|>"):
        turn = qwen.parse_turn(output)
        assert (turn.reasoning, turn.content, turn.error) == ("2+2.", "Four", None)
        assert turn.message() == assistant("Four", "2+2.")
    again = tokens_of(qwen, user("Q"), turn.message(), tools=())
    ids = again.assemble().tokens.tolist()
    assert (ids.count(THINK), ids.count(END_THINK)) == (1, 1)
    # A policy that opens the block once more has still opened one.
    for output in as_inputs(qwen, "<think>\n2+2.\n</think>\n\nFour<|im_end|>"):
        assert qwen.parse_turn(output).reasoning == "2+2."


def test_a_quoted_closing_tag_splits_nothing(qwen_tokenizer, qwen):
    quote = "The tag </think> ends a thought."
    # After the block was closed at once.
    for output in as_inputs(qwen, f"</think>\n\n{quote}"):
        turn = qwen.parse_turn(output)
        assert (turn.reasoning, turn.content) == ("", quote)
    # Where no block was open.
    template = renderer_for(qwen_tokenizer, qwen.family.name, skip_form="template")
    for renderer, options in ((qwen, {"opened": False}), (template, {})):
        turn = renderer.parse_turn(quote, **options)
        assert (turn.reasoning, turn.content, turn.error) == ("", quote, None)
    opened = template.parse_turn(f"<think>\nhm\n</think>\n\n{quote}")
    assert (opened.reasoning, opened.content) == ("hm", quote)
    # In ids, a quotation inside the reasoning is told from the end of it.
    ids = tokens_of(qwen, user("Q"), assistant("A", quote), tools=()).turns[0]
    assert qwen.parse_turn(ids.reasoning + ids.action).reasoning == quote
    # In messages with reasoning_content, or that do not begin with the opener.
    for message in (assistant(quote), {"role": "assistant", "content": quote}):
        tokens = tokens_of(qwen, user("Q"), message, tools=())
        assert tokens.reasoned == ()
        assert qwen.decode(tokens)[-1]["content"] == quote


def test_reasoning_that_never_ends(qwen):
    for text in ("thinking and thinking", "thinking<|im_end|>", ""):
        for output in as_inputs(qwen, text):
            turn = qwen.parse_turn(output)
            assert turn.reasoning == text.removesuffix("<|im_end|>")
            assert turn.error == "the reasoning is not closed by </think>"
            assert turn.tool_calls == []


def test_one_side_has_the_opener_in_every_family(qwen_tokenizer, family):
    # The families' own prompts differ: Qwen3's policy samples <think>, Qwen3.5's does not.
    for skip_form, sampled in (("close", 0), ("template", 1)):
        renderer = renderer_for(qwen_tokenizer, family, skip_form=skip_form)
        tokens = tokens_of(renderer, user("Q"), assistant("A", "why"), tools=())
        ids, mask = tokens.assemble().tokens.tolist(), policy_mask(tokens)
        at = ids.index(THINK)
        assert ids[at : at + 2] == [THINK, NEWLINE] and mask[at : at + 2] == [sampled] * 2
        # The opener is never counted as reasoning.
        assert len(tokens.turns[0].reasoning) - renderer.opener_len == len("why") - 2 + 3


# What comes before must not change.


def test_a_second_query_strips_no_reasoning(qwen):
    start = (user("Q"), assistant("", "r1", [call(x=1)]), tool("o1"), assistant("done", "r2"))
    row = tokens_of(qwen, *start).assemble().tokens.tolist()
    longer = tokens_of(qwen, *start, user("Q2"), assistant("again"))
    assert longer.assemble().tokens.tolist()[: len(row)] == row
    assert longer.reasoned == (0, 1)


def test_an_empty_block_stays_when_a_reply_follows(qwen):
    start = (user("Q"), assistant("", "", [call(x=1)]))
    row = tokens_of(qwen, *start).assemble().tokens.tolist()
    for more in ((tool("r"),), (tool("r"), assistant("A", "b")), (user("R"), assistant("A"))):
        longer = tokens_of(qwen, *start, *more).assemble().tokens.tolist()
        assert longer[: len(row)] == row
    assert row.count(THINK) == row.count(END_THINK) == 1


def test_message_by_message_is_the_whole(qwen):
    messages = (
        {"role": "system", "content": "S"},
        user("Q"),
        assistant("", "r1", [call(x=1)]),
        tool("o1"),
        assistant("", "r2", [call(x=2)]),
        tool("o2"),
        assistant("final"),
    )
    tokens = tokens_of(qwen, *messages)
    ids, mask = tokens.assemble().tokens.tolist(), policy_mask(tokens)
    assert len(ids) == len(mask)
    text = qwen.codec.decode(ids)
    assert text.count("\ud802") == 3  # one block a turn
    assert text.count("\ud800user\n") == 3  # no lost head
    # One encoding of the whole text gives the same ids.
    assert list(qwen.codec.encode(text)) == ids


def test_no_constant_offset_eats_the_first_observation(qwen_tokenizer):
    # Qwen2.5 puts a system text where there is none, Qwen3 does not.
    for family in FAMILIES:
        renderer = renderer_for(qwen_tokenizer, family)
        for first in ([], [{"role": "system", "content": "A much longer system text. " * 9}]):
            messages = (*first, user("Q"), assistant("A", "r"), user("Observed."), assistant("B"))
            observed = tokens_of(renderer, *messages, tools=()).turns[0].observation
            text = qwen_tokenizer.decode(observed)
            assert text == (
                "\n<|im_start|>user\nObserved.<|im_end|>\n<|im_start|>assistant\n<think>\n"
            )


# What the policy samples.


def test_the_mask_covers_neither_heads_nor_the_newline_after_the_end(qwen_tokenizer):
    renderer = renderer_for(qwen_tokenizer, "qwen3", skip_form="template")
    tokens = tokens_of(renderer, user("a"), assistant("b"), user("c"), tools=())
    turn = tokens.turns[0]
    a, b, c, head = 64, 65, 66, 872
    assert tokens.prompt == (IS, head, NEWLINE, a, IE, NEWLINE, *GENERATION_PROMPT)
    assert turn.action == (b, IE)
    assert turn.observation == (NEWLINE, IS, head, NEWLINE, c, IE, NEWLINE)
    assert policy_mask(tokens) == [0] * 9 + [1] * 4 + [1, 1] + [0] * 7


def test_a_compact_call_is_read_and_left_alone(qwen_tokenizer):
    for family, text in (
        ("qwen3", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
        ("qwen3_5", "<tool_call><function=f></function></tool_call>"),
    ):
        renderer = renderer_for(qwen_tokenizer, family)
        _, sampled = as_inputs(renderer, f"</think>\n\n{text}<|im_end|>")
        turn = renderer.parse_turn(sampled, [F])
        assert turn.tool_calls == [{"id": "call_1", **call()}]
        action = sampled[len(renderer.skip_ids) :]
        given = TokenTrajectory(
            "t", renderer.prompt_ids([user("Q")], [F]), (TokenTurn((), (), action, ()),)
        )
        assert renderer.encode(Trajectory("t", (), tokens=given)).turns[0].action == action
        # Rendered from the message it reads otherwise: history must come from ids.
        assert tokens_of(renderer, user("Q"), turn.message()).turns[0].action != action


def test_penalties_see_policy_tokens_only(qwen_tokenizer):
    renderer = renderer_for(qwen_tokenizer, "qwen3", skip_form="template")
    tokens = tokens_of(renderer, user("a"), assistant("b"), user("c"), tools=())
    mask = np.asarray(policy_mask(tokens), bool)
    divergence = np.where(mask, 0.1, 10.0)
    assert np.isclose(divergence[mask].sum(), 0.6)  # 4 of the block, b, IE
    assert mask.sum() == len(tokens.turns[0].skip) + len(tokens.turns[0].action)


@pytest.mark.parametrize("loss", [0, False])
def test_a_turn_without_loss_gives_no_policy_tokens(qwen, loss):
    quiet = (user("Q"), assistant("A", "r", loss=loss), user("R"), assistant("B", "s"))
    tokens = tokens_of(qwen, *quiet, tools=())
    only = tokens_of(qwen, user("R"), assistant("B", "s"), tools=())
    assert len(tokens.turns) == 1
    assert tokens.turns[0] == only.turns[0]
    assert sum(policy_mask(tokens)) == sum(policy_mask(only))
    assert qwen.compress(trajectory(*quiet), {0})[1] == quiet[1]
