import copy
import json
import random
from pathlib import Path

import pytest
from trajectory_samples import BASE, CALL, SPANS, TALK, TOKENS

from race_jax.trajectories import from_json, read, scan, to_json, write
from race_jax.types import TokenTrajectory, TokenTurn, Trajectory

DOCS = Path(__file__).parents[1] / "docs" / "trajectories.md"


def save(path, *records):
    text = "".join(
        (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
    )
    path.write_text(text, encoding="utf-8")
    return path


def edited(record, *path_and_value):
    """A copy with the value at a path replaced; the value `...` deletes it."""
    *path, last, value = path_and_value
    result = copy.deepcopy(record)
    place = result
    for key in path:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def test_messages_are_kept_and_brought_to_one_form():
    record = BASE | {
        "tools": [{"type": "function", "function": {"name": "go"}}],
        "reward": 1,
        "success": True,
        "env": "house",
        "variation": 3,
    }
    trajectory = from_json(record)
    assert trajectory == Trajectory(
        id="a",
        messages=tuple(BASE["messages"]),
        tools=({"type": "function", "function": {"name": "go"}},),
        reward=1.0,
        success=True,
        extra={"env": "house", "variation": 3},
    )
    assert isinstance(trajectory.reward, float)


def test_openai_variants_mean_the_same():
    call = {"index": 0, "function": {"name": "go", "arguments": '{"to": "hall"}'}, "id": "c1"}
    variants = [
        ({"content": None, "reasoning": "Hm.", "tool_calls": [call]}, {}),
        ({"reasoning_content": "Hm.", "reasoning": "Hm.", "tool_calls": [CALL]}, {}),
        ({"content": [], "reasoning_content": "Hm.", "reasoning": None, "tool_calls": [CALL]}, {}),
        ({"content": "<think>\nHm.\n</think>\n\n", "tool_calls": [call]}, {}),
        (
            {
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c1", "name": "go", "arguments": {"to": "hall"}}],
            },
            {},
        ),
        ({"reasoning_content": "Hm.", "tool_calls": [CALL], "loss": None}, {}),
        ({"reasoning_content": "Hm.", "tool_calls": [CALL], "loss": 1}, {"loss": True}),
        ({"reasoning_content": "Hm.", "tool_calls": [CALL], "refusal": None}, {"refusal": None}),
    ]
    for variant, more in variants:
        record = edited(BASE, "messages", 2, {"role": "assistant", **variant})
        record["messages"][0]["role"] = "developer"
        record["messages"][1]["content"] = [{"type": "text", "text": "G"}, "o."]
        want = edited(BASE, "messages", 2, BASE["messages"][2] | more)
        assert list(from_json(record).messages) == want["messages"], variant


def test_calls_without_ids_and_empty_lists_of_calls():
    record = copy.deepcopy(BASE)
    del record["messages"][2]["tool_calls"][0]["id"]
    del record["messages"][3]["tool_call_id"]
    record["messages"][4]["tool_calls"] = []
    trajectory = from_json(record)
    assert trajectory.messages[2]["tool_calls"] == [
        {"type": "function", "function": {"name": "go", "arguments": {"to": "hall"}}}
    ]
    assert "tool_calls" not in trajectory.messages[4]


def test_parallel_calls_may_be_answered_in_any_order():
    calls = [CALL | {"id": name} for name in ("x", "y")]
    record = edited(BASE, "messages", 2, "tool_calls", calls)
    replies = [{"role": "tool", "tool_call_id": name, "content": ""} for name in ("y", "x")]
    record["messages"][3:4] = replies
    assert len(from_json(record).messages) == 6
    record["messages"].insert(5, replies[0])
    with pytest.raises(ValueError, match=r"tool-reply: messages\[5\]: a tool message without an"):
        from_json(record)


def test_calls_in_the_text_may_be_answered():
    record = edited(BASE, "messages", 2, "tool_calls", ...)
    record["messages"][2]["content"] = '<tool_call>\n{"name": "go"}\n</tool_call>'
    assert from_json(record).messages[3]["role"] == "tool"


def think(content, **more):
    """What one assistant message becomes: reasoning and content."""
    record = edited(BASE, "messages", 4, {"role": "assistant", "content": content, **more})
    message = from_json(record).messages[4]
    return message["reasoning_content"], message["content"]


def test_think_blocks_are_split_from_the_content():
    assert think("<think>\n2+2.\n</think>\n\nFour") == ("2+2.", "Four")
    # The generation prompt had the opening tag.
    assert think("2+2.\n</think>\n\nFour") == ("2+2.", "Four")
    assert think("\n2+2.\n</think>\n\nFour") == ("\n2+2.", "Four")
    # Empty blocks.
    assert think("<think>\n\n</think>\n\nFour") == ("", "Four")
    assert think("<think>\n</think>\n\nFour") == ("", "Four")
    assert think("\n</think>\n\nFour") == ("", "Four")
    assert think("</think>\n\nFour") == ("", "Four")
    # Only the newlines of the block go, and the first closing tag counts.
    assert think("<think>\n\n a \n\n</think>\n\n\n b \n") == ("\n a \n", "\n b \n")
    assert think("<think>a</think>b") == ("a", "b")
    assert think(" \n<think>\na\n</think>\nb") == ("a", "b")
    assert think("a</think>say </think> and <think>") == ("a", "say </think> and <think>")
    assert think("no block <think> here") == ("", "no block <think> here")


def test_quoted_tags_stay_where_the_source_has_split():
    for reasoning in ("r", ""):
        for key in ("reasoning_content", "reasoning"):
            assert think("say </think> now", **{key: reasoning}) == (reasoning, "say </think> now")
    assert think("say <think>x</think>", reasoning_content="") == ("", "say <think>x</think>")
    assert think("r\n</think>\n\nc", reasoning_content=None) == ("r", "c")


def test_random_blocks_split_back_to_their_parts():
    rng = random.Random(0)
    pieces = ["\n", " ", "a", "é", "<", "think", "Action:", "\u2028", "</", ">", "\r\n", "<think>"]
    for _ in range(500):
        reasoning = "".join(rng.choices(pieces, k=rng.randrange(6)))
        content = "".join(rng.choices([*pieces, "</think>"], k=rng.randrange(6))) + "!"
        if "</think>" in reasoning or content.lstrip().startswith("<think>"):
            continue
        block = f"<think>\n{reasoning}\n</think>\n\n{content}"
        assert think(block) == (reasoning, content)
        if "<think>" not in reasoning:
            assert think(f"{reasoning}\n</think>\n\n{content}") == (reasoning, content)


def test_agentgym_conversation():
    trajectory = from_json(TALK)
    assert trajectory.id == "webshop_3"
    assert trajectory.extra == {}
    assert trajectory.messages == (
        {"role": "user", "content": "You shop."},
        {"role": "assistant", "content": "OK.", "reasoning_content": "", "loss": False},
        {"role": "user", "content": "Find a lamp."},
        {
            "role": "assistant",
            "content": "search[lamp]",
            "reasoning_content": "Look.",
            "loss": True,
        },
        {"role": "user", "content": "Results"},
        {"role": "assistant", "content": "click[b0]\n", "reasoning_content": "", "loss": True},
    )


def talk(value, **more):
    record = edited(TALK, "conversations", 5, {"from": "gpt", "value": value, **more})
    message = from_json(record).messages[5]
    return message["reasoning_content"], message["content"]


def test_react_text():
    assert talk("Thought: go on\nAction: \n go\n\n") == ("go on", " go\n\n")
    assert talk("Thought:\na\n\nb\n \n Action:go") == ("a\n\nb", "go")
    # AgentGym's servers act on what follows the last label.
    assert talk("Thought:\nAction: a\nAction:\nb") == ("Action: a", "b")
    assert talk("Thought:\nx\nAction:\nclick[Action: the film]") == (
        "x\nAction:\nclick[",
        "the film]",
    )
    # Text of another form stays whole.
    assert talk("I take Action: a") == ("", "I take Action: a")
    assert talk("Thought: no label") == ("", "Thought: no label")
    assert talk("<think>\nAction: x\n</think>\n\nAction: y") == ("Action: x", "Action: y")
    assert talk("Thought: a\n</think>\n\nAction: b") == ("Thought: a", "Action: b")
    assert talk("Thought: a\nAction: b", loss=True) == ("a", "b")
    shown = edited(TALK, "conversations", 1, "value", "Thought: a\nAction: b")
    assert from_json(shown).messages[1]["content"] == "Thought: a\nAction: b"
    # In chat messages it is content like any other.
    assert think("Thought:\na\n\nAction:\nb") == ("", "Thought:\na\n\nAction:\nb")


def test_sharegpt_conversation_with_functions():
    record = {
        "id": 7,
        "system": "Act.",
        "tools": '[{"name": "go", "description": "Go.", "parameters": {}}]',
        "conversations": [
            {"from": "human", "value": "Go."},
            {"from": "function_call", "value": '{"name": "go", "arguments": {"to": "hall"}}'},
            {"from": "observation", "value": "You went."},
            {"from": "function_call", "value": '<think>\nHm.\n</think>\n\n[{"name": "go", '
             '"arguments": "{}"}]'},
            {"from": "tool", "value": "Where?"},
            {"from": "gpt", "value": "I stop."},
            {"from": "observation", "value": "Bye."},
            {"role": "assistant", "content": "Bye."},
        ],
    }  # fmt: skip
    trajectory = from_json(record)
    bare = {"name": "go", "description": "Go.", "parameters": {}}
    assert trajectory.id == "7"
    assert trajectory.tools == ({"type": "function", "function": bare},)
    assert [m["role"] for m in trajectory.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant", "user",
        "assistant",
    ]  # fmt: skip
    assert trajectory.messages[0]["content"] == "Act."
    first, second = (trajectory.messages[i] for i in (2, 4))
    assert first["tool_calls"][0]["function"] == {"name": "go", "arguments": {"to": "hall"}}
    assert (second["reasoning_content"], second["content"]) == ("Hm.", "")
    assert second["tool_calls"][0]["function"]["arguments"] == {}
    assert trajectory.extra == {}


def test_places_are_named_as_the_source_counts_them():
    record = edited(TALK, "conversations", 4, "value", 3) | {"system": "Act."}
    with pytest.raises(ValueError, match=r"content: conversations\[4\]: content must be text"):
        from_json(record)
    record = edited(TALK, "conversations", 5, "value", " ") | {"system": "Act."}
    with pytest.raises(ValueError, match=r"empty-action: conversations\[5\]: neither content"):
        from_json(record)


def test_tokens_in_turns():
    trajectory = from_json(TOKENS)
    assert trajectory.messages == ()
    assert trajectory.tokens == TokenTrajectory(
        "t", (1, 2), (TokenTurn((3, 4), (4,), (5, 6), (7,)), TokenTurn((), (), (8,), ()))
    )
    assert trajectory.tokens.assemble().tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trajectory.tokens.assemble([0]).tokens.tolist() == [1, 2, 4, 5, 6, 7, 8]


def test_tokens_in_spans():
    trajectory = from_json(SPANS | {"skip": [9]})
    assert trajectory.tokens == TokenTrajectory(
        "s", (1, 2), (TokenTurn((3, 4), (9,), (5, 6), (7,)), TokenTurn((), (), (8,), ()))
    )
    assert trajectory.tokens.assemble().tokens.tolist() == SPANS["token_ids"]
    spans = edited(SPANS, "spans", 1, "kind", "skip")
    assert from_json(spans).tokens == TokenTrajectory(
        "s", (1, 2), (TokenTurn((), (3, 4), (5, 6), (7,)), TokenTurn((), (), (8,), ()))
    )
    # Empty spans say nothing, except for prompts and actions.
    empty = edited(SPANS, "spans", 3, {"kind": "observation", "start": 6, "end": 7})
    empty["spans"] += [{"kind": "observation", "start": 8, "end": 8}]
    empty["spans"].insert(4, {"kind": "reasoning", "start": 7, "end": 7})
    assert from_json(empty).tokens == from_json(SPANS).tokens


def test_messages_with_their_tokens():
    record = BASE | {"tokens": TOKENS["tokens"], "epsilon": 0.001, "turns": [{"turn": 1}]}
    trajectory = from_json(record)
    assert trajectory.messages == tuple(BASE["messages"])
    assert trajectory.tokens is not None
    assert trajectory.tokens.id == "a"
    assert trajectory.extra == {"epsilon": 0.001, "turns": [{"turn": 1}]}


def test_counts_under_the_names_of_tokens_are_plain_keys():
    record = BASE | {"tokens": 512, "token_ids": [1, 2], "skip": 0}
    trajectory = from_json(record)
    assert trajectory.tokens is None
    assert trajectory.extra == {"tokens": 512, "token_ids": [1, 2], "skip": 0}
    assert from_json(to_json(trajectory)) == trajectory


def test_examples_in_the_docs_are_read(tmp_path):
    text = DOCS.read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in text.split("```json\n")[1:]]
    records = [json.loads(block) for block in blocks]
    path = save(tmp_path / "x.jsonl", *records)
    assert [(line.form, line.faults) for line in scan(path)] == [
        ("messages", ()),
        ("messages", ()),
        ("conversations", ()),
        ("conversations", ()),
        ("tokens", ()),
        ("spans", ()),
    ]


@pytest.mark.parametrize("record", [BASE, TALK, TOKENS, SPANS, SPANS | {"skip": [9]}])
def test_every_form_reads_back_equal(tmp_path, record):
    trajectory = from_json(record)
    write(tmp_path / "x.jsonl", [trajectory])
    assert list(read(tmp_path / "x.jsonl")) == [trajectory]


def test_text_is_written_as_utf8(tmp_path):
    record = edited(BASE, "messages", 1, "content", "naïve 雪 \u2028")
    write(tmp_path / "x.jsonl", [from_json(record)])
    assert "naïve 雪 \u2028".encode() in (tmp_path / "x.jsonl").read_bytes()


JUNK = [
    None, True, 0, 1, -1, 2.5, "", " ", "x", "tool", "gpt", "<think>", "a</think>b", "{}", [], {},
    [1], ["x"], [{}], {"x": 1}, [{"type": "text", "text": "x"}], {"role": "user", "content": "x"},
]  # fmt: skip


def places(value, path=()):
    """The path of each value inside a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items if isinstance(value, dict | list) else ():
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


@pytest.mark.parametrize("record", [BASE, TALK, TOKENS, SPANS, BASE | {"tokens": TOKENS["tokens"]}])
def test_any_damage_is_a_fault_or_reads_back_equal(tmp_path, record):
    rng = random.Random(3)
    record = record | {"tools": [{"type": "function", "function": {"name": "go"}}], "reward": 1}
    record |= {"success": True, "env": "house"}
    damaged = []
    for place in places(record):
        damaged += [edited(record, *place, value) for value in (..., *rng.sample(JUNK, 8))]
    path = save(tmp_path / "x.jsonl", *(item | {"id": n} for n, item in enumerate(damaged)))
    good = [item for item in read(path) if isinstance(item, Trajectory)]
    assert len(damaged) // 20 < len(good) < len(damaged)
    write(tmp_path / "y.jsonl", good)
    assert list(read(tmp_path / "y.jsonl")) == good


def test_beside_ids_a_message_may_hold_whatever_a_policy_wrote():
    turns = [m for m in BASE["messages"] if m["role"] == "assistant"]
    ids = {"reasoning": [], "skip": [], "action": [5], "observation": [6]}
    both = BASE | {"tokens": {"prompt": [1], "turns": [ids] * len(turns)}}
    at = next(n for n, m in enumerate(both["messages"]) if m is turns[-1])
    odd = {"role": "assistant", "content": "<think>\nand so on", "reasoning_content": "x"}
    for message in ({**odd, "content": ""}, odd):
        given = edited(both, "messages", at, message)
        assert from_json(given).messages[at] == message
        with pytest.raises(ValueError, match=r"empty-action|think-block"):
            from_json(edited(given, "tokens", ...))
