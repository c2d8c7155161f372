"""ShareGPT and AgentGym conversations, turned into chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from race_jax.trajectory_messages import CLOSE, Report, short, split_think, strict
from race_jax.types import Message

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function_response": "tool",
}


def split_react(text: str) -> tuple[str, str] | None:
    r"""Split `Thought:\n...\n\nAction:\n...` at its last `Action:`, as AgentGym's servers do.

    Blanks and one newline after each label, and white space before `Action:`, are taken out. The
    rest of the action is kept as it is.

    Args:
        text: What the model wrote.

    Returns:
        Thought and action, or None when the text does not have that form.
    """
    head, label, action = text.rpartition("Action:")
    head = head.strip()
    if not label or (head and not head.startswith("Thought:")):
        return None
    return _after_label(head.removeprefix("Thought:")), _after_label(action)


def _after_label(text: str) -> str:
    return text.lstrip(" \t").removeprefix("\n")


def from_conversations(raw: Any, system: str | None, report: Report) -> list[Any]:
    """Turn ShareGPT or AgentGym `conversations` into chat messages, still to normalise.

    Args:
        raw: Entries `{"from", "value", "loss"?}`; an entry with `role` is a chat message already.
        system: Text of a system message that stood beside the conversation.
        report: Called for each entry that cannot be turned.

    Returns:
        One message per entry, behind the system message.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        report("messages", f"`conversations` must be a list of entries, not {short(raw)}")
        return []
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    called = False
    for index, entry in enumerate(raw):
        where = f"conversations[{index}]"
        message = entry
        if isinstance(entry, Mapping) and "from" in entry:
            message = _entry(entry, called, where, report)
        if isinstance(message, Mapping) and message.get("role") != "tool":
            text = message.get("content")
            called = bool(message.get("tool_calls")) or (
                isinstance(text, str) and "<tool_call>" in text
            )
        messages.append(message)
    return messages


def _entry(entry: Mapping[str, Any], called: bool, where: str, report: Report) -> Message:
    speaker, value = entry["from"], entry.get("value")
    message: Message = {k: v for k, v in entry.items() if k not in ("from", "value")}
    if speaker == "observation":
        return message | {"role": "tool" if called else "user", "content": value}
    if speaker == "function_call":
        try:
            reasoning, text = split_think(value if isinstance(value, str) else "")
            calls = strict(text)
        except ValueError as error:
            report("tool-calls", f"{where}: a function call must be JSON text: {error}")
            # A stand-in, so that what follows is checked as if the call were there.
            reasoning, calls = "", [{"name": "unknown", "arguments": {}}]
        calls = calls if isinstance(calls, list) else [calls]
        return message | {
            "role": "assistant",
            "content": "",
            "reasoning_content": reasoning,
            "tool_calls": calls,
        }
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    message |= {"role": role or speaker, "content": value}
    is_prompt = entry.get("loss") is not None and not entry["loss"]
    if role == "assistant" and isinstance(value, str) and CLOSE not in value and not is_prompt:
        split = split_react(value)
        if split is not None:
            message["reasoning_content"], message["content"] = split
    return message
