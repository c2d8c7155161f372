import json
import random
from pathlib import Path

import pytest

from race_jax.trajectories import from_json, read, write
from race_jax.types import TokenTrajectory, TokenTurn, Trajectory

REAL = Path(__file__).parents[2] / "shared" / "data" / "scienceworld_trajectories.jsonl"

MESSAGES = (
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "Gone.", "reasoning_content": "Hm."},
)


def random_text(rng, *, filled=False):
    pieces = [
        "\n", " ", "\t", "a", "word", "é", "\U0001f600", "\u2028", "\x85", "\r", '"', "\\", "{}",
        "</think>", "<think>", "Action:", "Thought:", "\ufeff", "\x00", "<|im_end|>",
    ]  # fmt: skip
    text = "".join(rng.choices(pieces, k=rng.randrange(8)))
    return "x" + text if filled or text.lstrip().startswith("<think>") else text


def random_value(rng, depth=2):
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return [
        None,
        rng.random() < 0.5,
        rng.randrange(-5, 2**60),
        rng.gauss(0, 1e9),
        random_text(rng),
    ][kind]


def random_messages(rng, turns):
    messages = [{"role": "system", "content": random_text(rng)}] * rng.randrange(2)
    messages.append({"role": "user", "content": random_text(rng)})
    if rng.random() < 0.3:
        canned = {"role": "assistant", "content": random_text(rng), "reasoning_content": ""}
        messages += [canned | {"loss": False}, {"role": "user", "content": "q"}]
    for turn in range(turns):
        calls = [
            {
                "id": f"call_{turn}_{n}",
                "type": "function",
                "function": {"name": f"f{n}", "arguments": {random_text(rng): random_value(rng)}},
            }
            for n in range(rng.randrange(3))
        ]
        message = {
            "role": "assistant",
            "content": random_text(rng, filled=not calls),
            "reasoning_content": random_text(rng),
        }
        messages.append(message | ({"tool_calls": calls} if calls else {}))
        rng.shuffle(calls)
        messages += [
            {"role": "tool", "content": random_text(rng), "tool_call_id": c["id"], "name": "f"}
            for c in calls
        ] or [{"role": "user", "content": random_text(rng), "note": random_value(rng)}]
    return tuple(
        messages[:-1] if rng.random() < 0.3 and messages[-1]["role"] == "user" else messages
    )


def random_tokens(rng, name, turns):
    def ids(low):
        return tuple(rng.randrange(2**31) for _ in range(rng.randrange(low, 5)))

    return TokenTrajectory(
        name,
        ids(1),
        tuple(TokenTurn(ids(0), ids(0), ids(1), ids(turn < turns - 1)) for turn in range(turns)),
    )


def random_trajectory(rng, name):
    turns = rng.randrange(1, 4)
    form = rng.choice(["messages", "tokens", "both"])
    return Trajectory(
        id=name,
        messages=() if form == "tokens" else random_messages(rng, turns),
        tools=({"type": "function", "function": {"name": "f0"}},) * rng.randrange(2),
        reward=rng.choice([None, rng.gauss(0, 1), -100.0]),
        success=rng.choice([None, True, False]),
        extra={f"x{random_text(rng)}": random_value(rng) for _ in range(rng.randrange(3))},
        tokens=None if form == "messages" else random_tokens(rng, name, turns),
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_reads_back_equal(tmp_path, seed):
    rng = random.Random(seed)
    trajectories = [random_trajectory(rng, f"{random_text(rng)}-{n}") for n in range(60)]
    path = tmp_path / "x.jsonl"
    assert write(path, trajectories) == 60
    assert path.read_bytes().count(b"\n") == 60
    again = list(read(path, strict=True))
    assert again == trajectories
    # Once more, and through the same file: writing is idempotent to the byte.
    data = path.read_bytes()
    assert write(path, (item for item in read(path) if isinstance(item, Trajectory))) == 60
    assert path.read_bytes() == data


def test_spans_and_turns_agree_on_random_layouts():
    rng = random.Random(5)
    for _ in range(200):
        turns = rng.randrange(1, 5)
        tokens = random_tokens(rng, "s", turns)
        ids, spans, want = [], [], []

        def put(kind, part, ids=ids, spans=spans):
            spans.append({"kind": kind, "start": len(ids), "end": len(ids) + len(part)})
            ids += part

        put("prompt", tokens.prompt)
        for turn in tokens.turns:
            if turn.reasoning:
                put("reasoning", turn.reasoning)
            elif turn.skip:
                put("skip", turn.skip)
            put("action", turn.action)
            if turn.observation:
                put("observation", turn.observation)
            skip = (7,) if turn.reasoning else turn.skip
            want.append(TokenTurn(turn.reasoning, skip, turn.action, turn.observation))
        read_back = from_json({"id": "s", "token_ids": ids, "spans": spans, "skip": [7]}).tokens
        assert read_back == TokenTrajectory("s", tokens.prompt, tuple(want))
        assert read_back.assemble().tokens.tolist() == ids


def test_what_cannot_be_read_is_not_written(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("old")
    good = Trajectory("a", MESSAGES)
    bad = [
        (Trajectory("b", ()), "form"),
        (Trajectory("b", MESSAGES[:1]), "no-turn"),
        (Trajectory("b", MESSAGES, reward=float("nan")), "reward"),
        (Trajectory("b", MESSAGES, extra={"x": float("nan")}), "cannot be written as JSON"),
        (Trajectory("b", MESSAGES, extra={"x": "\ud800"}), "cannot be written as JSON"),
        (Trajectory("b", MESSAGES, extra={"reward": 1}), r"extra keys \['reward'\]"),
        (Trajectory("b", MESSAGES, extra={"conversations": []}), "extra keys"),
        (Trajectory("b", MESSAGES, extra={"tokens": {}}), "extra keys"),
        (Trajectory("b", MESSAGES, extra={"token_ids": [], "spans": []}), "extra keys"),
        (good, "twice"),
    ]
    for trajectory, says in bad:
        with pytest.raises(ValueError, match=says):
            write(path, [good, trajectory])
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.skipif(not REAL.exists(), reason="the ScienceWorld trajectories are not at hand")
def test_real_trajectories(tmp_path):
    sources = [json.loads(line) for line in REAL.read_text(encoding="utf-8").splitlines()]
    trajectories = list(read(REAL, strict=True))
    assert len(trajectories) == len(sources) == 28
    for source, trajectory in zip(sources, trajectories, strict=True):
        assert isinstance(trajectory, Trajectory)
        assert trajectory.id == source["id"]
        assert list(trajectory.tools) == source["tools"]
        assert (trajectory.reward, trajectory.success) == (source["reward"], source["success"])
        assert trajectory.extra == {key: source[key] for key in ("env", "task", "variation")}
        assert len(trajectory.messages) == len(source["messages"])
        for message, raw in zip(trajectory.messages, source["messages"], strict=True):
            for call in raw.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            assert message == raw
    write(tmp_path / "x.jsonl", (item for item in trajectories if isinstance(item, Trajectory)))
    assert list(read(tmp_path / "x.jsonl")) == trajectories
