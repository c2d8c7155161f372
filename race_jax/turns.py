"""Marked chat strings back to messages: what a policy wrote in a turn, and the turns' context."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from race_jax.families import Family
from race_jax.tokenizer import (
    CALL,
    END_CALL,
    END_RESPONSE,
    END_THINK,
    IM_END,
    IM_START,
    RESPONSE,
    THINK,
    spell,
)
from race_jax.toolcalls import ParsedCall, Tools, parse_call
from race_jax.types import Message

OPENER = f"{THINK}\n"
"""What opens a thinking block; every family's generation prompt ends in it here."""

MESSAGE = re.compile(f"{IM_START}(\\w+)\n([^{IM_START}{IM_END}]*){IM_END}\n?")
"""One chat message: its role and its body."""

_REPLY = re.compile(f"{RESPONSE}\n(.*?)\n{END_RESPONSE}\n?", re.DOTALL)
_CALL = re.compile(f"{CALL}([^{CALL}{END_CALL}]*)({END_CALL}?)")


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """What a policy wrote in one turn.

    Attributes:
        reasoning: The reasoning; empty in a SKIP turn.
        content: The text outside the calls.
        calls: The calls in order, those that cannot be executed too.
        error: What is wrong with the turn, in words that can be shown to the policy; None if
            nothing is.
        text: The action as written.
    """

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]
    error: str | None
    text: str

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls that can be executed, in message form."""
        return [call.as_dict() for call in self.calls if call.error is None]

    def message(self) -> Message:
        """The turn as an assistant message; a malformed call stays in its content as written."""
        raw = [call.raw for call in self.calls if call.error is not None]
        content = "\n".join(text for text in (self.content, *raw) if text)
        message: Message = {
            "role": "assistant",
            "content": self.text if raw and not self.tool_calls else content,
            "reasoning_content": self.reasoning,
        }
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


def parse_marked(
    marked: str, opened: bool, family: Family, tools: Tools = (), first_call: int = 1
) -> ParsedTurn:
    """Read one turn.

    Args:
        marked: What the policy wrote, from its first own token; what follows `<|im_end|>` is
            not read.
        opened: Whether the thinking block was open before it.
        family: The chat format.
        tools: Tool schemas, for the types of XML arguments.
        first_call: Number of the first call, for its id.
    """
    marked = marked.partition(IM_END)[0]
    reasoning, error = "", None
    if opened:
        thought, closed, marked = marked.partition(END_THINK)
        reasoning = family.trim_reasoning(spell(thought).removesuffix("\n"))
        marked = marked.removeprefix("\n\n")
        error = None if closed else f"the reasoning is not closed by {spell(END_THINK)}"
    text = spell(marked)
    content, calls = _split_calls(marked, family, tools, first_call)
    if error is None and not content.strip() and not calls:
        error = "the turn holds neither text nor a tool call"
    error = error or next((call.error for call in calls if call.error), None)
    return ParsedTurn(reasoning, content, calls, error, text)


def _split_calls(
    action: str, family: Family, tools: Tools, first_call: int
) -> tuple[str, tuple[ParsedCall, ...]]:
    """The text outside the calls, and the calls."""
    calls: list[ParsedCall] = []
    outside: list[str] = []
    at = 0
    for n, found in enumerate(_CALL.finditer(action), first_call):
        outside.append(action[at : found.start()])
        at = found.end()
        call = parse_call(found[1], family.call_form, tools, f"call_{n}")
        if not found[2]:
            why = f"malformed tool call: no {spell(END_CALL)} closes it"
            call = ParsedCall(call.id, "", {}, spell(found[0]), why)
        calls.append(call)
    outside.append(action[at:])
    if calls:
        outside[0] = outside[0].removesuffix(family.call_gap)
    first = family.trim_content(spell(outside[0]))
    others = [spell(text).strip() for text in outside[1:]]
    return "\n".join(text for text in (first, *others) if text), tuple(calls)


def read_history(marked: str, family: Family, tools: Tools = ()) -> list[Message]:
    """Read marked messages that are no turns back; ValueError where no message begins."""
    messages: list[Message] = []
    at = 0
    while at < len(marked):
        block = MESSAGE.match(marked, at)
        if block is None:
            raise ValueError(f"no chat message begins at {spell(marked[at:])!r:.80}")
        at = block.end()
        role, body = block.groups()
        if role == "assistant":
            thinks = body.startswith(THINK)
            turn = parse_marked(body.removeprefix(OPENER), thinks, family, tools)
            messages.append({**turn.message(), "loss": False})
        elif role == "user" and body.startswith(RESPONSE):
            replies = _REPLY.findall(body)
            messages += [{"role": "tool", "content": spell(reply)} for reply in replies]
        else:
            messages.append({"role": role, "content": spell(body)})
    return messages


def number_calls(messages: list[Message]) -> list[Message]:
    """Number the calls of a chat, and give each reply the id and name of its call."""
    number = 0
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            waiting = list(message.get("tool_calls", ()))
            for call in waiting:
                number += 1
                call["id"] = f"call_{number}"
        elif message["role"] == "tool" and waiting:
            call = waiting.pop(0)
            message["tool_call_id"], message["name"] = call["id"], call["function"]["name"]
    return messages
