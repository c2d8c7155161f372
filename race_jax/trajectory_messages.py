"""Chat messages, brought to one form and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from race_jax.jsonl import loads
from race_jax.types import Message, is_turn

Report = Callable[[str, str], None]
"""Takes the rule that is broken and a message that says where and how."""

OPEN, CLOSE = "<think>", "</think>"
ROLES = ("system", "user", "assistant", "tool")
_ROLE_ALIASES = {"developer": "system"}


def short(value: Any, width: int = 60) -> str:
    """A value on one line, cut to `width` characters, for messages."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def strict(text: str) -> Any:
    """The value of JSON text inside a record.

    Raises:
        ValueError: Not JSON, a repeated key, or a number that is not finite.
    """
    parsed = loads(text)
    if parsed.repeated is not None:
        raise ValueError(f"key {short(parsed.repeated)} stands twice in an object")
    if parsed.nonfinite:
        raise ValueError("a number is not finite")
    return parsed.value


def split_think(content: str) -> tuple[str, str]:
    r"""Split a completion into reasoning and content at its first `</think>`.

    From `<think>\n{reasoning}\n</think>\n\n{content}` exactly the newlines shown are taken out,
    each if it is there, and white space before `<think>`. All other text is kept as it is. The
    opening tag, and then its newline, may be missing: a generation prompt can have supplied them.

    Args:
        content: What the model wrote.

    Returns:
        The reasoning and the content; the reasoning is empty when there is no block.

    Raises:
        ValueError: The block is never closed, or text stands before it.
    """
    opening, closing = content.find(OPEN), content.find(CLOSE)
    if closing < 0:
        if content.lstrip().startswith(OPEN):
            raise ValueError(f"{OPEN} is opened and never closed; the turn has no action")
        return "", content
    if 0 <= opening < closing:
        if content[:opening].strip():
            raise ValueError(
                f"text stands before {OPEN}; put the block first, or give the reasoning as "
                "reasoning_content"
            )
        reasoning = content[opening + len(OPEN) : closing].removeprefix("\n")
    else:
        reasoning = content[:closing]
    rest = content[closing + len(CLOSE) :]
    return reasoning.removesuffix("\n"), rest.removeprefix("\n").removeprefix("\n")


def normalise(
    raw: Any, name: str, report: Report, ahead: int = 0, sampled: bool = False
) -> tuple[Message, ...]:
    """Bring chat messages to one form and check them, each and in their order.

    Args:
        raw: The messages as read.
        name: Key that they stood under, for the reports.
        report: Called for each fault.
        ahead: How many of the messages, at the front, did not stand under that key.
        sampled: Whether the turns' token ids stand beside them. Then a turn counts by its ids, and
            its message may hold whatever a policy wrote: nothing, or a stray tag.

    Returns:
        The messages; use them only if nothing was reported.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        report("messages", f"`{name}` must be a list of at least one message, not {short(raw)}")
        return ()
    messages: list[Message] = []
    broken: set[int] = set()

    def note(rule: str, message: str) -> None:
        if sampled and rule in ("empty-action", "think-block"):
            return
        broken.add(len(messages))
        report(rule, message)

    for index, item in enumerate(raw):
        messages.append(_message(item, f"{name}[{index - ahead}]", note))
    _check_order(messages, broken, name, note, ahead)
    return tuple(messages)


def _message(raw: Any, where: str, report: Report) -> Message:
    if not isinstance(raw, Mapping):
        report("messages", f"{where} must be an object, not {short(raw)}")
        return {"role": None}
    role = raw.get("role")
    role = _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        report("role", f"{where}: role {short(raw.get('role'))} is not one of {', '.join(ROLES)}")
        return {"role": None}
    message: Message = {"role": role, "content": _content(raw, role, where, report)}
    if role == "assistant":
        reasoning, message["content"] = _reasoning(raw, message["content"], where, report)
        message["reasoning_content"] = reasoning
    elif raw.get("reasoning_content") or raw.get("reasoning"):
        report("reasoning", f"{where}: only assistant messages carry reasoning, not {role}")
    calls = _calls(raw.get("tool_calls"), where, report)
    if calls and role != "assistant":
        report("tool-calls", f"{where}: only assistant messages call tools, not {role}")
    elif calls:
        message["tool_calls"] = calls
    for key, value in raw.items():
        if key in ("role", "content", "reasoning", "reasoning_content", "tool_calls"):
            continue
        if key == "loss":
            if value not in (None, False, True):
                report("loss", f"{where}: loss must be true, false or null, not {short(value)}")
            elif value is not None:
                message["loss"] = bool(value)
        elif role == "tool" and key in ("tool_call_id", "name"):
            if isinstance(value, str):
                message[key] = value
            elif value is not None:
                report("tool-reply", f"{where}: {key} must be a string, not {short(value)}")
        else:
            message[key] = value
    return message


def _content(raw: Mapping[str, Any], role: str, where: str, report: Report) -> str:
    content = raw.get("content")
    if isinstance(content, str):
        return content
    if content is None and role in ("assistant", "tool"):
        return ""
    if isinstance(content, Sequence):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
            for part in content
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    report("content", f"{where}: content must be text or text parts, not {short(content)}")
    return ""


def _reasoning(raw: Mapping[str, Any], content: str, where: str, report: Report) -> tuple[str, str]:
    """Reasoning and content; a source that has a reasoning key at all has split them itself."""
    given = []
    for key in ("reasoning_content", "reasoning"):
        value = raw.get(key)
        if isinstance(value, str):
            given.append(value)
        elif value is not None:
            report("reasoning", f"{where}: {key} must be text, not {short(value)}")
            return "", content
    texts = {text for text in given if text}
    if len(texts) > 1:
        report("reasoning", f"{where}: reasoning_content and reasoning differ; keep one of them")
        return "", content
    reasoning = texts.pop() if texts else ""
    if not given:
        try:
            reasoning, content = split_think(content)
        except ValueError as error:
            report("think-block", f"{where}: {error}")
            return "", content
    if content.lstrip().startswith(OPEN):
        said = "after the reasoning" if reasoning or not given else "beside empty reasoning"
        report(
            "think-block",
            f"{where}: content begins with {OPEN} {said}; keep one block, or reasoning_content",
        )
    return reasoning, content


def _calls(raw: Any, where: str, report: Report) -> list[dict[str, Any]]:
    if raw is None:
        return []
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        report("tool-calls", f"{where}: tool_calls must be a list, not {short(raw)}")
        return []
    calls, ids = [], set()
    for index, item in enumerate(raw):
        place = f"{where}.tool_calls[{index}]"
        try:
            call = _call(item)
        except ValueError as error:
            report("tool-calls", f"{place}: {error}")
            continue
        if call.get("id") in ids:
            report("tool-calls", f"{place}: id {short(call['id'])} stands twice in the message")
        if "id" in call:
            ids.add(call["id"])
        calls.append(call)
    return calls


def _call(raw: Any) -> dict[str, Any]:
    """One call, from `{"function": {"name", "arguments"}}` or the bare inner object."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"a call must be an object, not {short(raw)}")
    if raw.get("type") not in (None, "function"):
        raise ValueError(f"type must be 'function', not {short(raw['type'])}")
    function = raw.get("function", raw)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"a call needs a function with a name, not {short(function)}")
    call: dict[str, Any] = {"type": "function"}
    if raw.get("id") is not None:
        if not isinstance(raw["id"], str):
            raise ValueError(f"id must be a string, not {short(raw['id'])}")
        call = {"id": raw["id"], **call}
    call["function"] = {"name": name, "arguments": _arguments(function.get("arguments"))}
    return call


def _arguments(raw: Any) -> dict[str, Any]:
    value = raw
    if isinstance(raw, str):
        try:
            value = strict(raw)
        except ValueError as error:
            raise ValueError(f"arguments {short(raw)}: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"arguments must be an object or its JSON text, not {short(raw)}")
    return dict(value)


def _check_order(
    messages: Sequence[Message], broken: set[int], name: str, report: Report, ahead: int
) -> None:
    """Check what messages must be to one another; broken ones are not reported again.

    `waiting` holds the ids of the calls that no reply has answered yet, None for a call without
    id; it is None itself when the calls are unknown or stand in the text.
    """
    waiting: list[str | None] | None = []
    before, turns = None, 0
    for index, message in enumerate(messages):
        role, where = message["role"], f"{name}[{index - ahead}]"
        if role == "system" and index:
            report("system-order", f"{where}: a system message may only be the first message")
        elif role == "assistant":
            if index == 0:
                report("no-prompt", f"{where}: an assistant message has nothing before it")
            if before == "assistant":
                report(
                    "consecutive-assistant",
                    f"{where}: two assistant messages in a row; join them, or put the observation "
                    "between them",
                )
            calls = message.get("tool_calls", ())
            in_text = index in broken or "<tool_call>" in message["content"]
            waiting = None if in_text else [call.get("id") for call in calls]
            if is_turn(message):
                turns += 1
                if not calls and not message["content"].strip() and index not in broken:
                    report("empty-action", f"{where}: neither content nor tool calls")
        elif role == "tool":
            if waiting is not None and index not in broken:
                _check_reply(message.get("tool_call_id"), waiting, where, report)
        else:
            waiting = None if role is None else []
        before = role
    if not turns and not any(message["role"] is None for message in messages):
        report("no-turn", f"`{name}` has no assistant message that is a turn")


def _check_reply(
    call_id: str | None, waiting: list[str | None], where: str, report: Report
) -> None:
    """Take the call that a tool message answers off `waiting`."""
    if not waiting:
        report("tool-reply", f"{where}: a tool message without an open call before it")
    elif call_id is None:
        waiting.pop(0)
    elif call_id in waiting:
        waiting.remove(call_id)
    elif None in waiting:
        waiting.remove(None)
    else:
        ids = ", ".join(map(short, waiting))
        report(
            "tool-reply",
            f"{where}: tool_call_id {short(call_id)} names no open call of the assistant message "
            f"before it ({ids})",
        )


def tools_of(raw: Any, report: Report) -> tuple[Mapping[str, Any], ...]:
    """Tool schemas as `{"type": "function", "function": {...}}`, from a list or its JSON text."""
    value = raw
    if isinstance(raw, str):
        try:
            value = strict(raw) if raw.strip() else None
        except ValueError as error:
            report("tools", f"`tools` is text, but {error}")
            return ()
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        report("tools", f"`tools` must be a list of schemas, not {short(raw)}")
        return ()
    tools = []
    for index, item in enumerate(value):
        tool = item
        if isinstance(item, Mapping) and "function" not in item and "name" in item:
            bare = {key: entry for key, entry in item.items() if key != "type"}
            tool = {"type": "function", "function": bare}
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            report("tools", f"tools[{index}]: a schema needs a function with a name")
            continue
        tools.append(tool)
    return tuple(tools)
