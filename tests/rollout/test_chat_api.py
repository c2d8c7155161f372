"""Chat endpoints over real HTTP."""

import builtins
import json

import pytest
from env_servers import broken, dropped, free_port, html, saying, serving, slow

from race_jax.rollout.chat_api import ChatApi, ChatConfig
from race_jax.trajectories import from_json

pytest.importorskip("openai")

CHAT = [{"role": "user", "content": "2 + 2?"}]
ROUTE = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def reply(content="4", reason="stop", **message):
    message = {"role": "assistant", "content": content, **message}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "judge",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
    }


def api(server, **changes):
    given = {"timeout": 1.0, "retries": 2, "address": f"{server.address}/v1", **changes}
    return ChatApi(ChatConfig("judge", **given))


def test_a_reply_becomes_a_message_of_a_trajectory():
    function = {"name": "add", "arguments": '{"a": 2}'}
    calls = [{"id": "x", "type": "function", "function": function}]
    answer = reply(None, "tool_calls", tool_calls=calls, reasoning_content="Two and two.")
    with serving(lambda *_: answer) as server:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        endpoint = api(server, temperature=0.0, max_tokens=9, extra={"top_k": 3})
        found = endpoint.ask(CHAT, tools)
        body = server.seen[-1][2]
    assert (found.error, found.reason, found.tokens) == (None, "tool_calls", 7)
    read = from_json({"messages": [*CHAT, found.message]})
    turn = read.messages[1]
    assert turn["reasoning_content"] == "Two and two."
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert (body["model"], body["messages"], body["tools"]) == ("judge", CHAT, tools)
    assert (body["temperature"], body["max_tokens"], body["top_k"]) == (0.0, 9, 3)


def test_what_is_not_set_is_left_to_the_endpoint():
    with serving(lambda *_: reply(reasoning="Hm.")) as server:
        found = api(server).ask(CHAT)
        assert not {"temperature", "max_tokens", "tools"} & set(server.seen[-1][2])
    assert found.message["reasoning_content"] == "Hm."


@pytest.mark.parametrize("fault", [broken, dropped, slow])
def test_faults_that_pass_are_tried_again(fault):
    with serving(lambda *_: reply()) as server:
        server.faults[ROUTE] = [fault]
        found = api(server).ask(CHAT)
        assert (found.error, found.message["content"]) == (None, "4")
        assert server.routes() == [ROUTE] * 2


def bad_request(handler):
    handler.reply(400, json.dumps({"error": {"message": "too long"}}).encode())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (bad_request, "too long"),
        (html, "no chat completion but '<html><body>Please log in"),
        (saying({}), "no chat completion"),
        (saying({"choices": []}), "no chat completion"),
    ],
)
def test_faults_that_do_not_pass_are_in_the_reply(fault, message):
    with serving(lambda *_: reply()) as server:
        server.faults[ROUTE] = [fault]
        found = api(server).ask(CHAT)
        assert found.message is None and message in found.error
        assert server.address in found.error
        assert server.routes() == [ROUTE]


def test_an_endpoint_that_is_down_is_in_the_reply():
    address = f"http://127.0.0.1:{free_port()}/v1"
    found = ChatApi(ChatConfig("judge", address, retries=0)).ask(CHAT)
    assert found.message is None and address in found.error


def test_many_chats_keep_their_order():
    def answer(method, route, body):
        return reply(body["messages"][0]["content"] * 2)

    with serving(answer) as server:
        chats = [[{"role": "user", "content": str(n)}] for n in range(20)]
        found = [r.message["content"] for r in api(server, concurrency=4).ask_all(chats)]
    assert found == [str(n) * 2 for n in range(20)]


def test_a_missing_key_or_package_is_told(monkeypatch):
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set"):
        ChatApi(ChatConfig("judge"))
    real = builtins.__import__

    def without_openai(name, *args, **kwargs):
        if name == "openai":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_openai)
    with pytest.raises(ValueError, match=r"race-jax\[api\]"):
        ChatApi(ChatConfig("judge", "http://127.0.0.1:1"))


@pytest.mark.parametrize(
    "changes", [{"model": ""}, {"timeout": 0}, {"retries": -1}, {"concurrency": 0}]
)
def test_settings_are_checked(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is"):
        ChatConfig(**{"model": "judge", **changes})
