"""Reading one chat message: its text, its reasoning, its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from race_jax.tokenizer import check_text
from race_jax.toolcalls import read_call
from race_jax.types import Message

ROLES = ("system", "user", "assistant", "tool")

_OPEN, _CLOSE = "<think>", "</think>"


class Parts(NamedTuple):
    """An assistant message in its parts; `calls` are pairs of name and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


def check_roles(messages: Sequence[Message]) -> None:
    """Raise ValueError for an unknown role, or a system message that is not the first message."""
    for n, message in enumerate(messages, 1):
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"message {n} has the role {role!r}; roles are {', '.join(ROLES)}")
        if role == "system" and n > 1:
            raise ValueError(f"message {n} is a system message; only the first message may be one")


def text_of(message: Message) -> str:
    """The content of a message as text.

    Args:
        message: Its `content` is text, None, or a list of `{"type": "text", "text": ...}` parts.

    Raises:
        ValueError: The content is anything else, or not valid Unicode.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content)
    if not isinstance(content, list):
        raise ValueError(f"`content` must be text, not {type(content).__name__}")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("`content` has a part that is not text; images and sounds are not read")
    return check_text("".join(str(text) for text in texts))


def split_reasoning(message: Message) -> tuple[str, str]:
    """Reasoning and content of an assistant message.

    The reasoning is `reasoning_content`, or else `reasoning`. Only a message with neither key is
    split at the tags, and only if it begins with `<think>`: a message that merely quotes a tag
    stays whole.

    Raises:
        ValueError: The reasoning is not text.
    """
    content = text_of(message)
    given = [message[key] for key in ("reasoning_content", "reasoning") if message.get(key)]
    if given:
        if not isinstance(given[0], str):
            raise ValueError(f"`reasoning_content` must be text, not {type(given[0]).__name__}")
        return check_text(given[0]), content
    if any(isinstance(message.get(key), str) for key in ("reasoning_content", "reasoning")):
        return "", content
    begin = content.lstrip()
    if begin.startswith(_OPEN) and _CLOSE in begin:
        reasoning, _, content = begin.removeprefix(_OPEN).partition(_CLOSE)
        return reasoning.strip("\n"), content.lstrip("\n")
    return "", content


def split_message(message: Message) -> Parts:
    """An assistant message in its parts.

    Raises:
        ValueError: Content, reasoning or a call cannot be read.
    """
    reasoning, content = split_reasoning(message)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise ValueError(f"`tool_calls` must be a list, not {type(calls).__name__}")
    return Parts(reasoning, content, [read_call(call) for call in calls])
