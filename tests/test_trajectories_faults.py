import copy
import json
from pathlib import Path

import pytest
from trajectory_samples import BASE, CALL, SPANS, TALK, TOKENS

from race_jax.trajectories import RULES, Fault, from_json, read, scan
from race_jax.types import Trajectory

DOCS = Path(__file__).parents[1] / "docs" / "trajectories.md"


def save(path, *records):
    text = "".join(
        (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
    )
    path.write_text(text, encoding="utf-8")
    return path


def rules(path):
    return [(fault.line, fault.rule) for line in scan(path) for fault in line.faults]


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


def in_messages(index, **change):
    return edited(BASE, "messages", index, BASE["messages"][index] | change)


def without(record, *path):
    return edited(record, *path, ...)


def call(**change):
    return in_messages(2, tool_calls=[CALL | change])


def arguments(value):
    return call(function={"name": "go", "arguments": value})


def swapped(kind, start, end, at=1):
    return edited(SPANS, "spans", at, {"kind": kind, "start": start, "end": end})


def unsplit(content):
    return edited(BASE, "messages", 4, {"role": "assistant", "content": content})


def calling(value):
    return edited(TALK, "conversations", 3, {"from": "function_call", "value": value})


FAULTS = [
    ("not-object", "[1, 2]"),
    ("not-object", '"text"'),
    ("not-object", "null"),
    ("json", '{"id": "a"'),
    ("json", json.dumps(BASE) + json.dumps(BASE)),
    ("utf8", '{"id": "\\ud800"}'),
    ("duplicate-key", json.dumps(BASE)[:-1] + ', "id": "b"}'),
    ("number", json.dumps(BASE | {"score": float("nan")})),
    ("number", json.dumps(BASE)[:-1] + ', "score": 1e999}'),
    ("form", {"id": "a"}),
    ("form", {"id": "a", "tokens": 3}),
    ("form", {"id": "a", "token_ids": [1]}),
    ("form", BASE | TALK),
    ("form", TOKENS | SPANS),
    ("form", SPANS | {"tokens": 3}),
    ("id", BASE | {"id": ""}),
    ("id", BASE | {"id": " "}),
    ("id", BASE | {"id": 1.5}),
    ("id", BASE | {"id": True}),
    ("id", BASE | {"id": ["a"]}),
    ("tools", BASE | {"tools": "no json"}),
    ("tools", BASE | {"tools": {"name": "go"}}),
    ("tools", BASE | {"tools": ["go"]}),
    ("tools", BASE | {"tools": [{"type": "function", "function": {"description": "no name"}}]}),
    ("reward", BASE | {"reward": float("nan")}),
    ("reward", BASE | {"reward": float("inf")}),
    ("reward", BASE | {"reward": "1.0"}),
    ("reward", BASE | {"reward": True}),
    ("reward", BASE | {"reward": 10**400}),
    ("success", BASE | {"success": 1}),
    ("success", BASE | {"success": "yes"}),
    ("messages", BASE | {"messages": []}),
    ("messages", BASE | {"messages": None}),
    ("messages", BASE | {"messages": "hello"}),
    ("messages", BASE | {"messages": {"role": "user"}}),
    ("messages", edited(BASE, "messages", 1, "hello")),
    ("messages", TALK | {"conversations": []}),
    ("messages", TALK | {"conversations": None}),
    ("messages", edited(TALK, "conversations", 0, None)),
    ("role", in_messages(1, role="human")),
    ("role", in_messages(1, role=None)),
    ("role", in_messages(1, role=["user"])),
    ("role", without(BASE, "messages", 1, "role")),
    ("role", edited(TALK, "conversations", 2, "from", "alien")),
    ("role", edited(TALK, "conversations", 2, "from", ["human"])),
    ("content", in_messages(1, content=3)),
    ("content", in_messages(1, content=None)),
    ("content", in_messages(4, content={"text": "x"})),
    ("content", in_messages(1, content=[{"type": "image_url", "image_url": {"url": "x"}}])),
    ("content", in_messages(1, content=[{"type": "text"}])),
    ("content", without(BASE, "messages", 1, "content")),
    ("content", without(TALK, "conversations", 2, "value")),
    ("reasoning", in_messages(2, reasoning_content=3)),
    ("reasoning", in_messages(2, reasoning="Other.")),
    ("reasoning", in_messages(1, reasoning_content="Hm.")),
    ("think-block", unsplit("<think>\na")),
    ("think-block", unsplit("a<think>b</think>c")),
    ("think-block", unsplit("<think>b</think><think>")),
    ("think-block", in_messages(4, content="<think>\na\n</think>\n\nb")),
    ("think-block", in_messages(2, content=" <think>\nHm.\n</think>\n\nb")),
    ("tool-calls", in_messages(2, tool_calls={"name": "go"})),
    ("tool-calls", in_messages(2, tool_calls="go")),
    ("tool-calls", in_messages(2, tool_calls=["go"])),
    ("tool-calls", in_messages(2, tool_calls=[CALL, CALL])),
    ("tool-calls", call(id=1)),
    ("tool-calls", call(type="custom")),
    ("tool-calls", call(function=None)),
    ("tool-calls", call(function={"arguments": {}})),
    ("tool-calls", call(function={"name": " ", "arguments": {}})),
    ("tool-calls", call(function={"name": "go"})),
    ("tool-calls", arguments(None)),
    ("tool-calls", arguments("")),
    ("tool-calls", arguments("[1]")),
    ("tool-calls", arguments('"{}"')),
    ("tool-calls", arguments('{"to": "hall"')),
    ("tool-calls", arguments('{"to": NaN}')),
    ("tool-calls", arguments('{"to": 1, "to": 2}')),
    ("tool-calls", arguments('{"to": "\\ud800"}')),
    ("tool-calls", arguments(["hall"])),
    ("tool-calls", in_messages(1, tool_calls=[CALL])),
    ("tool-calls", calling("go(hall)")),
    ("tool-calls", calling(None)),
    ("tool-reply", in_messages(3, tool_call_id="c2")),
    ("tool-reply", in_messages(3, tool_call_id=1)),
    ("tool-reply", in_messages(3, name=1)),
    ("tool-reply", edited(BASE, "messages", 2, {"role": "assistant", "content": "go"})),
    ("tool-reply", edited(BASE, "messages", 1, {"role": "tool", "content": "x"})),
    ("tool-reply", BASE | {"messages": [{"role": "tool", "content": "x"}, *BASE["messages"][1:]]}),
    ("tool-reply", edited(TALK, "conversations", 4, "from", "tool")),
    ("loss", in_messages(2, loss="yes")),
    ("loss", in_messages(2, loss=0.5)),
    ("loss", in_messages(2, loss=[])),
    ("system-order", in_messages(1, role="system")),
    ("system-order", TALK | {"system": "Act.", "conversations": [
        {"from": "system", "value": "Act."}, *TALK["conversations"]]}),
    ("no-prompt", BASE | {"messages": BASE["messages"][2:]}),
    ("consecutive-assistant", without(BASE, "messages", 3)),
    ("consecutive-assistant", without(TALK, "conversations", 2)),
    ("no-turn", BASE | {"messages": BASE["messages"][:2]}),
    ("no-turn", TALK | {"conversations": TALK["conversations"][:3]}),
    ("no-turn", edited(TOKENS, "tokens", "turns", [])),
    ("no-turn", edited(TOKENS, "tokens", "turns", None)),
    ("no-turn", without(TOKENS, "tokens", "turns")),
    ("no-turn", SPANS | {"spans": [{"kind": "prompt", "start": 0, "end": 8}]}),
    ("empty-action", in_messages(4, content="")),
    ("empty-action", in_messages(4, content=" \n")),
    ("empty-action", in_messages(4, content=None, reasoning_content="Only thought.")),
    ("empty-action", unsplit("r</think>\n\n")),
    ("empty-action", edited(TALK, "conversations", 5, "value", "Thought: a\nAction: \n")),
    ("empty-action", edited(TOKENS, "tokens", "turns", 1, {"observation": [1]})),
    ("empty-action", edited(SPANS, "spans", 3, "end", 8)
        | {"spans": [*SPANS["spans"][:3], {"kind": "observation", "start": 6, "end": 8},
                     {"kind": "action", "start": 8, "end": 8}]}),
    ("token-ids", edited(TOKENS, "tokens", "prompt", [1, -1])),
    ("token-ids", edited(TOKENS, "tokens", "prompt", [1, 2.0])),
    ("token-ids", edited(TOKENS, "tokens", "prompt", [True])),
    ("token-ids", edited(TOKENS, "tokens", "prompt", [2**31])),
    ("token-ids", edited(TOKENS, "tokens", "prompt", "12")),
    ("token-ids", without(TOKENS, "tokens", "prompt")),
    ("token-ids", edited(TOKENS, "tokens", "turns", 0, "skip", None)),
    ("token-ids", edited(TOKENS, "tokens", "turns", 0, [5])),
    ("token-ids", SPANS | {"token_ids": [1, 2, 3, 4, 5, 6, 7, -8]}),
    ("token-ids", SPANS | {"token_ids": 8}),
    ("token-ids", SPANS | {"skip": [-1]}),
    ("span-kind", SPANS | {"spans": []}),
    ("span-kind", SPANS | {"spans": 5}),
    ("span-kind", edited(SPANS, "spans", 1, [2, 4])),
    ("span-kind", swapped("thought", 2, 4)),
    ("span-range", edited(SPANS, "spans", 4, "end", 9)),
    ("span-range", swapped("reasoning", -1, 4)),
    ("span-range", swapped("reasoning", 4, 2)),
    ("span-range", swapped("reasoning", 2, 4.0)),
    ("span-range", without(SPANS, "spans", 1, "end")),
    ("span-overlap", swapped("reasoning", 1, 4)),
    ("span-gap", swapped("reasoning", 3, 4)),
    ("span-gap", without(SPANS, "spans", 1)),
    ("span-gap", without(SPANS, "spans", 4)),
    ("span-order", edited(SPANS, "spans", 0, "kind", "observation")),
    ("span-order", edited(SPANS, "spans", 4, "kind", "prompt")),
    ("span-order", edited(SPANS, "spans", 4, "kind", "reasoning")),
    ("span-order", edited(SPANS, "spans", 2, "kind", "reasoning")),
    ("span-order", edited(SPANS, "spans", 1, "kind", "observation")),
    ("span-order", without(edited(SPANS, "spans", 2, "end", 7), "spans", 3)),
    ("span-order", edited(TOKENS, "tokens", "prompt", [])),
    ("span-order", edited(TOKENS, "tokens", "turns", 0, "observation", [])),
    ("turn-count", BASE | {"tokens": {"prompt": [1], "turns": [{"action": [8]}]}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "record"), FAULTS, ids=[f"{rule}-{i}" for i, (rule, _) in enumerate(FAULTS)]
)
def test_each_fault_is_named_once_and_costs_one_line(tmp_path, rule, record):
    good = [BASE | {"id": "before"}, BASE | {"id": "after"}]
    path = save(tmp_path / "x.jsonl", good[0], record, good[1])
    assert rules(path) == [(2, rule)]
    before, fault, after = read(path)
    assert isinstance(fault, Fault)
    assert [before.id, after.id] == ["before", "after"]
    assert (fault.line, fault.rule) == (2, rule)
    assert fault.message and "\n" not in fault.message and len(fault.message) < 250
    with pytest.raises(ValueError, match=rf"x.jsonl:2: {rule}: "):
        list(read(path, strict=True))


def test_every_rule_has_a_case_and_a_line_in_the_docs():
    covered = {rule for rule, _ in FAULTS} | {"empty-file", "duplicate-id", "line-too-long"}
    assert covered == set(RULES)
    text = DOCS.read_text(encoding="utf-8")
    for rule, demand in RULES.items():
        assert f"| `{rule}` | {demand} |" in text


def test_all_faults_of_a_line_are_found(tmp_path):
    record = in_messages(1, content=3) | {"id": None, "reward": "x", "success": 2}
    record["messages"][2]["tool_calls"][0]["function"]["arguments"] = "{"
    record["messages"][4]["content"] = ""
    path = save(tmp_path / "x.jsonl", record)
    found = [rule for _, rule in rules(path)]
    assert sorted(found) == ["content", "empty-action", "reward", "success", "tool-calls"]
    assert len([item for item in read(path)]) == 1


def test_a_reward_that_is_no_number_does_not_hide_others(tmp_path):
    path = save(tmp_path / "x.jsonl", BASE | {"reward": float("nan"), "score": float("nan")})
    assert rules(path) == [(1, "number"), (1, "reward")]


def test_ids(tmp_path):
    nameless = without(BASE, "id")
    path = save(
        tmp_path / "x.jsonl",
        BASE,
        nameless,
        "",
        nameless | {"id": None},
        BASE,
        BASE | {"id": 5},
        BASE | {"id": "5"},
        BASE | {"id": "line-2"},
        BASE | {"item_id": "kept"},
        without(BASE, "id") | {"item_id": 9},
    )
    items = list(read(path))
    assert [item.id for item in items] == [
        "a", "line-2", "line-4", "a", "5", "5", "line-2", "a", "9",
    ]  # fmt: skip
    repeated = [item for item in items if isinstance(item, Fault)]
    assert [(fault.line, fault.rule) for fault in repeated] == [
        (5, "duplicate-id"),
        (7, "duplicate-id"),
        (8, "duplicate-id"),
        (9, "duplicate-id"),
    ]
    assert "'a' stands on line 1 already" in repeated[0].message
    assert from_json(BASE | {"item_id": "kept"}).extra == {"item_id": "kept"}


@pytest.mark.parametrize("content", [b"", b"\n\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_trajectories(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert rules(path) == [(1, "empty-file")]


def test_bytes_around_the_lines(tmp_path):
    line = json.dumps(BASE).encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  " + line.replace(b'"a"', b'"b"'))
    assert [item.id for item in read(path)] == ["a", "b"]
    path.write_bytes(line + b'\n{"id": "\xff"}\n' + line.replace(b'"a"', b'"b"'))
    assert rules(path) == [(2, "utf8")]
    path.write_bytes(json.dumps(BASE).encode("utf-16"))
    assert rules(path) == [(1, "utf8")]
    assert "UTF-16" in next(scan(path)).faults[0].message


def test_a_long_line_is_one_fault(tmp_path):
    path = save(tmp_path / "x.jsonl", BASE, BASE | {"id": "b", "pad": "x" * 5000}, BASE | {"id": 3})
    items = list(read(path, max_line_bytes=2000))
    assert [item.id for item in items] == ["a", None, "3"]
    assert isinstance(items[1], Fault)
    assert (items[1].line, items[1].rule) == (2, "line-too-long")


def test_a_file_is_read_one_line_at_a_time(tmp_path):
    path = save(tmp_path / "x.jsonl", BASE, "{")
    items = read(path, strict=True)
    assert isinstance(next(items), Trajectory)
    with pytest.raises(ValueError, match="json"):
        next(items)


def test_unreadable_files_raise(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError):
            list(read(path))


def test_from_json_names_the_first_fault():
    with pytest.raises(ValueError, match="reward: the reward must be a finite number"):
        from_json(BASE | {"reward": "x"})
