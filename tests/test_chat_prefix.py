"""Properties of every renderer over random episodes."""

import random

import numpy as np
import pytest

from race_jax.chat import renderer_for
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.types import Trajectory

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "i": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "z": {"type": "null"},
                    "l": {"type": "array"},
                },
            },
        },
    }
    for name in ("look", "take.it")
)
PIECES = [
    *("door", " ", "\n", "\n\n", "p4:h1", "é🙂", "0.5", '"', "\\", "{}", "<", ">", "\t"),
    *("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "assistant\n"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<function=look>"),
]


def some_text(rng, inner=True):
    text = "".join(rng.choices(PIECES, k=rng.randrange(1, 9)))
    # The form in which every family leaves text as it is: nothing to trim, never empty.
    return "a" + text + "z" if inner else text


def some_call(rng, number):
    values = {
        "s": some_text(rng, inner=False),
        "i": rng.randrange(-5, 99),
        "b": rng.random() < 0.5,
        "z": None,
        "l": [1, some_text(rng, inner=False)],
    }
    keys = rng.sample(sorted(values), k=rng.randrange(len(values)))
    name = rng.choice(["look", "take.it"])
    function = {"name": name, "arguments": {key: values[key] for key in keys}}
    return {"id": f"call_{number}", "type": "function", "function": function}


def some_episode(rng, thinking):
    """At least six messages; `thinking` None mixes turns with and without reasoning."""
    messages, number = [], 0
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": some_text(rng)})
    messages.append({"role": "user", "content": some_text(rng)})
    for _ in range(rng.randrange(3, 6)):
        thinks = rng.random() < 0.5 if thinking is None else thinking
        message = {
            "role": "assistant",
            "content": some_text(rng) if rng.random() < 0.5 else "",
            "reasoning_content": some_text(rng) if thinks else "",
        }
        calls = [some_call(rng, number + n + 1) for n in range(rng.randrange(3))]
        number += len(calls)
        if calls:
            message["tool_calls"] = calls
        elif not message["content"]:
            message["content"] = some_text(rng)
        messages.append(message)
        for call in calls:
            reply = {"role": "tool", "content": some_text(rng), "tool_call_id": call["id"]}
            messages.append({**reply, "name": call["function"]["name"]})
        if not calls or rng.random() < 0.2:
            messages.append({"role": "user", "content": some_text(rng)})
    return messages if rng.random() < 0.5 else messages[: last_turn(messages) + 1]


def last_turn(messages):
    return max(n for n, m in enumerate(messages) if m["role"] == "assistant")


@pytest.fixture(scope="module")
def tokenizers():
    return {"word": word_tokenizer(["door", "p4:h1", " "])}


@pytest.fixture(params=["word", "qwen"])
def tokenizer(request, tokenizers):
    if request.param == "qwen":
        return request.getfixturevalue("qwen_tokenizer")
    return tokenizers[request.param]


@pytest.fixture(params=["close", "template"])
def skip_form(request):
    return request.param


@pytest.fixture(params=["qwen2_5", "qwen3", "qwen3_5"])
def renderer(request, tokenizer, skip_form):
    return renderer_for(tokenizer, request.param, skip_form=skip_form)


def episodes():
    for seed in range(12):
        rng = random.Random(seed)
        yield rng, some_episode(rng, thinking=(True, False, None)[seed % 3])


def encode(renderer, messages):
    return renderer.encode(Trajectory("t", tuple(messages), TOOLS))


def test_every_prefix_of_an_episode_renders_to_a_prefix(renderer):
    for _, messages in episodes():
        tokens = encode(renderer, messages)
        whole = tokens.assemble().tokens.tolist()
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        # What the policy is shown before each turn, then what it has said after it.
        assert list(renderer.prompt_ids(messages[: turns[0]], TOOLS)) == whole[: len(tokens.prompt)]
        for n in range(turns[0] + 1, len(messages) + 1):
            if n < len(messages) and messages[n]["role"] == "tool" == messages[n - 1]["role"]:
                continue  # the replies to one turn's calls share a message
            part = encode(renderer, messages[:n]).assemble().tokens.tolist()
            assert part == whole[: len(part)]
            assert len(part) > len(tokens.prompt)
        # A rollout that appends ids turn by turn holds the same ids as the render of the whole.
        ids = list(tokens.prompt)
        ends = [*turns[1:], len(messages)]
        for turn, begin, end in zip(tokens.turns, turns, ends, strict=True):
            assert ids == whole[: len(ids)]
            ids += (turn.reasoning or turn.skip) + turn.action
            if end < len(messages):
                ids += renderer.observation_ids(messages[begin + 1 : end])
        assert ids == whole[: len(ids)]


def test_decode_inverts_encode(renderer):
    for _, messages in episodes():
        assert renderer.decode(encode(renderer, messages)) == messages


def test_only_the_renderers_own_tags_are_control_ids(renderer):
    for rng, messages in episodes():
        tokens = encode(renderer, messages)
        removed = set(rng.sample(range(len(tokens.turns)), k=2))
        ids = tokens.assemble(removed).tokens.tolist()
        control = [i for i in ids if i in renderer.codec.control_ids]
        names = renderer.codec.decode(control)
        calls = sum(len(m.get("tool_calls", ())) for m in messages)
        replies = sum(m["role"] == "tool" for m in messages)
        turns, users = len(tokens.turns), [m["role"] for m in messages].count("user")
        groups = sum(
            m["role"] == "tool" and messages[n - 1]["role"] != "tool"
            for n, m in enumerate(messages)
        )
        shown = 1 + users + groups + turns  # the system message holds the tools
        in_tool_block = (names.count("\ud804"), names.count("\ud805"))
        assert in_tool_block == (calls + 2, calls + 2)  # the instructions show two
        assert (names.count("\ud806"), names.count("\ud807")) == (replies, replies)
        assert (names.count("\ud800"), names.count("\ud801")) == (shown, shown)
        assert (names.count("\ud802"), names.count("\ud803")) == (turns, turns)


def test_compressing_messages_is_removing_segments(renderer):
    for rng, messages in episodes():
        trajectory = Trajectory("t", tuple(messages), TOOLS)
        tokens = renderer.encode(trajectory)
        removed = {t for t in range(len(tokens.turns)) if rng.random() < 0.5}
        compressed = renderer.compress(trajectory, removed)
        again = renderer.encode(Trajectory("t", tuple(compressed), TOOLS))
        expected = tokens.assemble(removed).tokens
        np.testing.assert_array_equal(again.assemble().tokens, expected)
        assert renderer.decode(tokens, removed) == compressed


def test_segments_partition_the_sequence(renderer):
    for _, messages in episodes():
        tokens = encode(renderer, messages)
        laid_out = tokens.assemble()
        policy = np.zeros(len(laid_out.tokens), bool)
        for turn, start, (begin, end) in zip(
            tokens.turns, laid_out.starts, laid_out.actions, strict=True
        ):
            policy[start:end] = True
            assert laid_out.tokens[end - 1] == renderer.end_of_turn
            thought = laid_out.tokens[start:begin].tolist()
            assert thought.count(renderer.end_of_reasoning) == 1
            assert len(thought) == len(turn.reasoning or turn.skip)
        rest = len(tokens.prompt) + sum(len(turn.observation) for turn in tokens.turns)
        assert (~policy).sum() == rest
        # The policy never samples a message's head or the newline after its end.
        assert renderer.codec.encode("\ud800")[0] not in laid_out.tokens[policy]
