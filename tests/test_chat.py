import json

import numpy as np
import pytest

from race_jax.chat import family_of, renderer_for
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.types import TokenTrajectory, Trajectory

FAMILIES = ["qwen2_5", "qwen3", "qwen3_5"]
FORMS = ["close", "template"]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "times": {"type": "integer"}},
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    """Knows a few words, spells the rest in bytes: every text is possible."""
    return word_tokenizer(["look", "door", " ", "p4:h1", "because"])


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=FORMS)
def renderer(request, tokenizer, family):
    return renderer_for(tokenizer, family, skip_form=request.param)


def call(name="look", n=1, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{n}", "type": "function", "function": function}


def assistant(content="", reasoning="", *calls, **keys):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, **keys}
    return {**message, "tool_calls": list(calls)} if calls else message


def reply(content, n=1, name="look"):
    return {"role": "tool", "content": content, "tool_call_id": f"call_{n}", "name": name}


def user(content):
    return {"role": "user", "content": content}


def episode():
    return (
        {"role": "system", "content": "Act."},
        user("Find the key."),
        assistant("", "The door first.", call(at="door", times=2)),
        reply("Locked."),
        assistant("Again.", "", call(at="door", n=2), call(at="mat", times=1, n=3)),
        reply("Still locked.", 2),
        reply("A key!", 3),
        user("Hurry."),
        assistant("It is under the mat.", "Found it."),
    )


def trajectory(messages, tools=(LOOK,), **keys):
    return Trajectory("t1", tuple(messages), tuple(tools), **keys)


def text(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def test_segments_of_qwen3(tokenizer):
    tokens = renderer_for(tokenizer, "qwen3").encode(trajectory(episode()))
    prompt = text(tokenizer, tokens.prompt)
    assert prompt.startswith("<|im_start|>system\nAct.\n\n# Tools\n\n")
    assert json.dumps(LOOK) in prompt
    assert prompt.endswith(
        "<|im_end|>\n<|im_start|>user\nFind the key.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    first, second, last = tokens.turns
    assert text(tokenizer, first.reasoning) == "The door first.\n</think>\n\n"
    assert text(tokenizer, first.action) == (
        '<tool_call>\n{"name": "look", "arguments": {"at": "door", "times": 2}}\n</tool_call>'
        "<|im_end|>"
    )
    assert text(tokenizer, first.observation) == (
        "\n<|im_start|>user\n<tool_response>\nLocked.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert second.reasoning == ()
    assert text(tokenizer, second.skip) == "</think>\n\n"
    assert text(tokenizer, second.action) == (
        'Again.\n<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": "mat", "times": 1}}\n</tool_call>'
        "<|im_end|>"
    )
    assert text(tokenizer, second.observation) == (
        "\n<|im_start|>user\n<tool_response>\nStill locked.\n</tool_response>\n<tool_response>\n"
        "A key!\n</tool_response><|im_end|>\n<|im_start|>user\nHurry.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert text(tokenizer, last.action) == "It is under the mat.<|im_end|>"
    assert last.observation == ()


def test_what_qwen3_5_does_otherwise(tokenizer):
    messages = (
        {"role": "system", "content": "\n Act. \n"},
        user("  Find the key.\n"),
        assistant("\n Well: ", " why \n", call(at="door", times=2), call(at="mat", n=2)),
        reply(" Locked.\n"),
        reply("-", 2),
        assistant("", "", call(n=3)),
    )
    tokens = renderer_for(tokenizer, "qwen3_5").encode(trajectory(messages))
    prompt = text(tokenizer, tokens.prompt)
    # The tools come first, then the system text; white space around messages goes.
    assert prompt.startswith("<|im_start|>system\n# Tools\n\nYou have access to the following")
    assert prompt.endswith(
        "</IMPORTANT>\n\nAct.<|im_end|>\n<|im_start|>user\nFind the key.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert text(tokenizer, tokens.turns[0].reasoning) == "why\n</think>\n\n"
    assert text(tokenizer, tokens.turns[0].action) == (
        "Well:\n\n<tool_call>\n<function=look>\n<parameter=at>\ndoor\n</parameter>\n"
        "<parameter=times>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=look>\n<parameter=at>\nmat\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    assert "\nLocked.\n" in text(tokenizer, tokens.turns[0].observation)
    assert text(tokenizer, tokens.turns[1].action) == (
        "<tool_call>\n<function=look>\n</function>\n</tool_call><|im_end|>"
    )


def test_qwen2_5_puts_its_own_system_text_where_there_is_none(tokenizer):
    own = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    chat = [user("Hi"), assistant("Hello")]
    for tools, end in (((), "<|im_end|>"), ((LOOK,), "\n\n# Tools")):
        for family, begin in (("qwen2_5", f"<|im_start|>system\n{own}{end}"), ("qwen3", None)):
            renderer = renderer_for(tokenizer, family)
            tokens = renderer.encode(trajectory(chat, tools))
            prompt = text(tokenizer, tokens.prompt)
            assert prompt.startswith(begin) if begin else own not in prompt
            assert renderer.decode(tokens) == chat
    empty = [{"role": "system", "content": ""}, *chat]
    tokens = renderer_for(tokenizer, "qwen2_5").encode(trajectory(empty, ()))
    assert text(tokenizer, tokens.prompt).startswith("<|im_start|>system\n<|im_end|>\n")


def test_skip_forms(tokenizer, family):
    close = renderer_for(tokenizer, family)
    template = renderer_for(tokenizer, family, skip_form="template")
    think, end = close.codec.encode("\ud802")[0], close.end_of_reasoning
    one, two = tokenizer.encode("\n"), tokenizer.encode("\n\n")
    assert close.skip_ids == (end, *two) and close.opener_len == 0
    assert template.skip_ids == (think, *two, end, *two) and template.opener_len == 2
    a, b = close.encode(trajectory(episode())), template.encode(trajectory(episode()))
    opener = (think, *one)
    assert a.prompt == b.prompt + opener
    for x, y in zip(a.turns, b.turns, strict=True):
        assert x.action == y.action
        assert y.reasoning == (opener + x.reasoning if x.reasoning else ())
        assert x.observation == (y.observation + opener if y.observation else ())
    # With all reasoning kept the sequences are the same; turn 2 has none.
    keep = trajectory([m for m in episode() if m.get("content") != "Again."])
    same = [r.encode(keep).assemble().tokens for r in (close, template)]
    np.testing.assert_array_equal(*same)


def test_removing_reasoning_changes_no_other_segment(renderer, tokenizer):
    full = renderer.encode(trajectory(episode()))
    compressed = renderer.compress(trajectory(episode()), {0, 2})
    again = renderer.encode(trajectory(compressed))
    np.testing.assert_array_equal(again.assemble().tokens, full.assemble({0, 2}).tokens)
    assert again.reasoned == ()
    # What remains is the same conversation with one block opened and closed per turn.
    shown = text(tokenizer, again.assemble().tokens)
    assert shown.count("<think>") == shown.count("</think>") == 3


def test_decode_is_the_inverse_of_encode(renderer):
    messages = list(episode())
    tokens = renderer.encode(trajectory(messages))
    assert renderer.decode(tokens) == messages
    removed = [dict(m) for m in messages]
    removed[2]["reasoning_content"] = ""
    assert renderer.decode(tokens, {0}) == removed


def test_decode_takes_xml_types_from_the_prompt(tokenizer):
    renderer = renderer_for(tokenizer, "qwen3_5")
    tokens = renderer.encode(trajectory([user("Q"), assistant("", "", call(at="1", times=1))]))
    function = renderer.decode(tokens)[1]["tool_calls"][0]["function"]
    assert function["arguments"] == {"at": "1", "times": 1}
    function = renderer.decode(tokens, tools=())[1]["tool_calls"][0]["function"]
    assert function["arguments"] == {"at": "1", "times": "1"}


def test_messages_without_loss_are_context(renderer, tokenizer):
    # AgentGym traces begin with a canned assistant message.
    for loss in (False, 0):
        messages = [
            user("Rules."),
            assistant("OK.", "", loss=loss),
            user("Task."),
            assistant("", "why", call(at="a")),
            reply("r"),
            assistant("Quoted.", "old thought", call(at="b", n=2), loss=loss),
            reply("s", 2),
            assistant("Done."),
        ]
        tokens = renderer.encode(trajectory(messages))
        assert len(tokens.turns) == 2
        assert "assistant\nOK.<|im_end|>\n" in text(tokenizer, tokens.prompt)
        between = text(tokenizer, tokens.turns[0].observation)
        assert "assistant\n<think>\nold thought\n</think>\n\nQuoted." in between
        decoded = renderer.decode(tokens)
        assert decoded == messages  # False == 0
    on = [user("Q"), assistant("A", loss=1), user("Q"), assistant("B", loss=True)]
    assert len(renderer.encode(trajectory(on)).turns) == 2


def test_a_trailing_observation_has_no_generation_prompt(renderer, tokenizer):
    tokens = renderer.encode(trajectory(episode()[:4]))
    end = "<tool_response>\nLocked.\n</tool_response><|im_end|>\n"
    assert text(tokenizer, tokens.turns[-1].observation) == f"\n<|im_start|>user\n{end}"
    assert renderer.decode(tokens) == list(episode()[:4])


def test_reasoning_is_found_where_it_is(renderer):
    expected = renderer.encode(trajectory([user("Q"), assistant("A", "r")]))
    for message in (
        {"role": "assistant", "content": "A", "reasoning": "r"},
        {"role": "assistant", "content": "A", "reasoning": "r", "reasoning_content": ""},
        {"role": "assistant", "content": "<think>\nr\n</think>\n\nA"},
        {"role": "assistant", "content": "\n<think>r</think>A"},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}], "reasoning": "\nr\n"},
    ):
        assert renderer.encode(trajectory([user("Q"), message])) == expected
    for empty in ("", None, " \n ", "\n\n"):
        message = {"role": "assistant", "content": "A", "reasoning_content": empty}
        assert renderer.encode(trajectory([user("Q"), message])).reasoned == ()


def test_json_text_as_arguments(renderer):
    function = {"name": "look", "arguments": '{"at": "door", "times": 2}'}
    as_text = [user("Q"), assistant("", "", {"function": function})]
    as_mapping = [user("Q"), assistant("", "", call(at="door", times=2))]
    encode = renderer.encode
    assert encode(trajectory(as_text)) == encode(trajectory(as_mapping))


def test_compress_touches_only_the_reasoning(renderer):
    messages = [
        user("Q"),
        {"role": "assistant", "content": "<think>\na\n</think>\n\nA", "extra": 1},
        user("Q"),
        {"role": "assistant", "content": "B", "reasoning": "b"},
        user("Q"),
        {"role": "assistant", "content": "<think>\nc\n</think>\n\nC"},
        user("Q"),
        {"role": "assistant", "content": " D", "tool_calls": [call()]},
    ]
    before = json.dumps(messages)
    out = renderer.compress(trajectory(messages), {0, 1})
    assert json.dumps(messages) == before
    assert out[1] == {**messages[1], "content": "A", "reasoning_content": ""}
    assert out[3] == {"role": "assistant", "content": "B", "reasoning_content": ""}
    assert out[5] == messages[5]
    assert out[7] == {**messages[7], "reasoning_content": ""}
    assert [out[n] for n in (0, 2, 4, 6)] == [messages[n] for n in (0, 2, 4, 6)]


def test_prompt_and_observation_for_rollouts(renderer):
    messages = episode()
    tokens = renderer.encode(trajectory(messages))
    assert renderer.prompt_ids(messages[:2], [LOOK]) == tokens.prompt
    assert renderer.observation_ids(messages[3:4]) == tokens.turns[0].observation
    assert renderer.observation_ids(messages[5:8]) == tokens.turns[1].observation
    assert tokens.turns[1].action[-1] == renderer.end_of_turn
    with pytest.raises(ValueError, match="message 3: it is a turn of the policy"):
        renderer.prompt_ids(messages[:3], [LOOK])
    with pytest.raises(ValueError, match=r"message 1: .* 'system' cannot stand here"):
        renderer.observation_ids(messages[:1])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no assistant turn"),
        ([user("Q")], "no assistant turn"),
        ([user("Q"), assistant("A", loss=False)], "no assistant turn"),
        ([user("Q"), assistant("A"), user("Q"), assistant(" \n", "r")], "turn 2: its action is em"),
        ([user("Q"), assistant(None)], "turn 1: its action is empty"),
        ([user("Q"), {"role": "bot", "content": ""}], "message 2 has the role 'bot'"),
        ([user("Q"), {"content": ""}], "message 2 has the role None"),
        ([user("Q"), {"role": "system", "content": "S"}, assistant("A")], "message 2 is a system"),
        ([user("Q"), assistant("", "", {"name": "f", "arguments": "{x"})], "turn 1: .*not valid"),
        ([user("Q"), assistant("", "", {"name": "f", "arguments": 3})], "turn 1: .*an object"),
        ([user("Q"), assistant("", "", "look")], "turn 1: a tool call must be an object"),
        ([user("Q"), {**assistant("A"), "tool_calls": "f"}], "turn 1: `tool_calls` must be a list"),
        ([user("Q"), {**assistant("A"), "reasoning_content": 3}], "turn 1: `reasoning_content`"),
        ([user(3), assistant("A")], "message 1: `content` must be text, not int"),
        ([{"role": "system", "content": 3}, assistant("A")], "message 1: `content` must be text"),
        ([user([{"type": "image", "image": "x"}]), assistant("A")], "message 1: .*not text"),
        ([user("Q"), user("\ud800"), assistant("A")], "message 2: .*lone surrogate"),
        ([user("Q"), assistant("A", "\ud803")], "turn 1: the text holds a lone surrogate"),
        (
            [user("Q"), assistant("A"), user("\udc00"), assistant("B")],
            "turn 1: message 3: .*sur",
        ),
    ],
)
def test_faults_of_messages(tokenizer, family, messages, message):
    renderer = renderer_for(tokenizer, family)
    with pytest.raises(ValueError, match=f"trajectory 't1': .*{message}"):
        renderer.encode(trajectory(messages))


def test_faults_of_tools(tokenizer, family):
    renderer = renderer_for(tokenizer, family)
    for tools, message in (((LOOK, LOOK), "two tools have the name"), (("look",), "not of the")):
        with pytest.raises(ValueError, match=f"trajectory 't1': .*{message}"):
            renderer.encode(trajectory(episode(), tools))


def test_faults_of_decode(tokenizer):
    renderer = renderer_for(tokenizer, "qwen3")
    tokens = renderer.encode(trajectory(episode()))
    with pytest.raises(ValueError, match="do not end in"):
        renderer.decode(TokenTrajectory("t1", tokens.prompt[:-1], tokens.turns))
    with pytest.raises(ValueError, match="no chat message begins at 'x<"):
        renderer.decode(
            TokenTrajectory("t1", tuple(tokenizer.encode("x")) + tokens.prompt, tokens.turns)
        )


def test_families_and_options(tokenizer):
    assert family_of("qwen2") == "qwen2_5"
    assert family_of("qwen3") == family_of("qwen3_moe") == "qwen3"
    assert family_of("qwen3_5") == family_of("qwen3_5_text") == "qwen3_5"
    with pytest.raises(ValueError, match=r"'llama'; known are qwen2, qwen3, qwen3_5"):
        family_of("llama")
    with pytest.raises(ValueError, match=r"family 'qwen4'; known are qwen2_5, qwen3, qwen3_5"):
        renderer_for(tokenizer, "qwen4")
    with pytest.raises(ValueError, match="skip_form is 'none'"):
        renderer_for(tokenizer, "qwen3", skip_form="none")
