"""Trajectories that come as token ids: laid out for a renderer, never encoded again."""

import dataclasses

import numpy as np
import pytest

from race_jax.chat import renderer_for
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.types import TokenTrajectory, TokenTurn, Trajectory


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(["look", "door", " "])


@pytest.fixture(params=["qwen2_5", "qwen3", "qwen3_5"])
def family(request):
    return request.param


def episode():
    """Two turns that reason and one between them that does not."""
    look = {"function": {"name": "look", "arguments": {"at": "door"}}}
    return Trajectory(
        "t1",
        (
            {"role": "user", "content": "Find the key."},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "The door first.",
                "tool_calls": [look],
            },
            {"role": "tool", "content": "Locked."},
            {"role": "assistant", "content": "Again.", "reasoning_content": ""},
            {"role": "user", "content": "Hurry."},
            {"role": "assistant", "content": "Under the mat.", "reasoning_content": "Found it."},
        ),
    )


def test_ids_stay_as_they_were_sampled(tokenizer, family):
    close = renderer_for(tokenizer, family)
    template = renderer_for(tokenizer, family, skip_form="template")
    in_close = close.encode(episode())
    in_template = template.encode(episode())
    for source in (in_close, in_template):
        bare = TokenTrajectory(
            source.id,
            source.prompt,
            tuple(TokenTurn(t.reasoning, (), t.action, t.observation) for t in source.turns),
        )
        for given in (source, bare):
            as_ids = Trajectory("t1", (), tokens=given)
            assert close.encode(as_ids) == in_close
            assert template.encode(as_ids) == in_template
            assert close.compress(as_ids, {0}) == close.decode(in_close, {0})
    # An empty block in other ids was sampled so, and stays.
    newline = tuple(tokenizer.encode("\n"))
    turns = list(in_close.turns)
    turns[1] = TokenTurn((), newline + close.skip_ids, turns[1].action, turns[1].observation)
    odd = TokenTrajectory("t1", in_close.prompt, tuple(turns))
    assert close.encode(Trajectory("t1", (), tokens=odd)).turns[1].skip == turns[1].skip
    moved = template.encode(Trajectory("t1", (), tokens=odd)).assemble().tokens
    np.testing.assert_array_equal(moved, odd.assemble().tokens)


@pytest.mark.parametrize("before", ["", "\n", " \n"])
@pytest.mark.parametrize("skip_form", ["close", "template"])
def test_an_empty_block_is_no_reasoning_whatever_it_is_called(tokenizer, skip_form, before):
    renderer = renderer_for(tokenizer, "qwen3", skip_form=skip_form)
    good = renderer_for(tokenizer, "qwen3").encode(episode())
    block = (*tokenizer.encode(before), *good.turns[1].skip)
    turns = list(good.turns)
    turns[1] = dataclasses.replace(turns[1], reasoning=block)
    given = TokenTrajectory("t1", good.prompt, tuple(turns))
    aligned = renderer.encode(Trajectory("t1", (), tokens=given))
    assert aligned.reasoned == (0, 2)
    if before:
        np.testing.assert_array_equal(aligned.assemble().tokens, given.assemble().tokens)
    else:
        assert aligned == renderer.encode(episode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": (1, 2)}, "turn 1: the ids before it do not end in the generation prompt"),
        ({"observation": ()}, "turn 2: the ids before it do not end in the generation prompt"),
        ({"action": ()}, "turn 1: its action is empty"),
        ({"reasoning": (1, 2)}, "turn 1: its reasoning holds no '?</think>"),
        ({"turns": ()}, "no assistant turn"),
    ],
)
def test_faults_of_ids(tokenizer, change, message):
    renderer = renderer_for(tokenizer, "qwen3")
    good = renderer.encode(episode())
    parts = {key: value for key, value in change.items() if key not in ("prompt", "turns")}
    first = dataclasses.replace(good.turns[0], **parts)
    turns = change.get("turns", (first, *good.turns[1:]))
    bad = TokenTrajectory("t1", change.get("prompt", good.prompt), turns)
    with pytest.raises(ValueError, match=f"trajectory 't1': .*{message}"):
        renderer.encode(Trajectory("t1", (), tokens=bad))


def test_ids_whose_block_is_never_opened_are_refused(tokenizer):
    close = renderer_for(tokenizer, "qwen3")
    template = renderer_for(tokenizer, "qwen3", skip_form="template")
    tokens = template.encode(episode())
    opener = template.opener_len
    turns = tuple(
        TokenTurn(t.reasoning[opener:], (), t.action, t.observation) for t in tokens.turns
    )
    bad = TokenTrajectory("t1", tokens.prompt, turns)
    for renderer in (close, template):
        with pytest.raises(ValueError, match=r"turn 1: no '<think>.*' comes before its"):
            renderer.encode(Trajectory("t1", (), tokens=bad))
