"""What tells the chat formats of the Qwen families apart: system block, tool block, trimming."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from race_jax.tokenizer import CALL, END_CALL, IM_END, IM_START, spell
from race_jax.toolcalls import CallForm, Tools, dump

_JSON_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_JSON_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    f"within {CALL}{END_CALL} XML tags:\n{CALL}\n"
    f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{END_CALL}'
)
_XML_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_XML_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO "
    f"suffix:\n\n{CALL}\n<function=example_function_name>\n<parameter=example_parameter_1>\n"
    "value_1\n</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second "
    "parameter\nthat can span\nmultiple lines\n</parameter>\n</function>\n"
    f"{END_CALL}\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block "
    f"must be nested within {CALL}{END_CALL} XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the "
    "function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family's chat format.

    Attributes:
        name: The family.
        call_form: How it writes tool calls.
        trim: What it cuts off the ends of messages: nothing, the newlines before an assistant's
            content, or all white space around every message.
        default_system: System text that it puts where a chat has none.
    """

    name: str
    call_form: CallForm
    trim: Literal["none", "newlines", "all"]
    default_system: str | None = None

    @property
    def call_gap(self) -> str:
        """What stands between an assistant's content and its first call."""
        return "\n" if self.call_form == "json" else "\n\n"

    def trim_content(self, text: str) -> str:
        """An assistant's content as the family renders it."""
        if self.trim == "newlines":
            return text.lstrip("\n")
        return self.trim_other(text)

    def trim_other(self, text: str) -> str:
        """A system, user or tool message as the family renders it."""
        return text.strip() if self.trim == "all" else text

    def trim_reasoning(self, text: str) -> str:
        """Reasoning as the family renders it; white space alone is no reasoning."""
        text = text.strip() if self.trim == "all" else text.strip("\n")
        return text if text.strip() else ""


FAMILIES: Mapping[str, Family] = {
    "qwen2_5": Family(
        "qwen2_5",
        "json",
        "none",
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    "qwen3": Family("qwen3", "json", "newlines"),
    "qwen3_5": Family("qwen3_5", "xml", "all"),
}
"""The chat formats, by name."""

_OF_MODEL = {
    "qwen2": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
}


def family_of(model_type: str) -> str:
    """The chat family of a checkpoint's `model_type`; ValueError for one that is not known."""
    if model_type not in _OF_MODEL:
        raise ValueError(
            f"no chat format is known for model_type {model_type!r}; "
            f"known are {', '.join(sorted(_OF_MODEL))}"
        )
    return _OF_MODEL[model_type]


def system_block(family: Family, system: str | None, tools: Tools) -> str:
    """The marked system message, which also holds the tool schemas.

    Args:
        family: The format.
        system: System text, or None if the chat has no system message.
        tools: Tool schemas.
    """
    text = family.default_system if system is None else family.trim_other(system)
    if tools:
        lines = "".join("\n" + dump(tool, "a tool") for tool in tools)
        if family.call_form == "json":
            block = _JSON_HEAD + lines + _JSON_TAIL
            text = block if text is None else f"{text}\n\n{block}"
        else:
            text = _XML_HEAD + lines + _XML_TAIL + (f"\n\n{text}" if text else "")
    return "" if text is None else f"{IM_START}system\n{text}{IM_END}\n"


def read_system(family: Family, body: str) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """Take a marked system message apart again.

    The end of the tool block holds real control tokens, which no text can forge.

    Args:
        family: The format.
        body: The message between its role line and its end.

    Returns:
        The system text, None where it is the family's default, and the tool schemas.
    """
    if family.call_form == "json":
        before, found, _ = body.partition(_JSON_TAIL)
        text, _, lines = before.rpartition(_JSON_HEAD) if found else (body, "", "")
        system = text.removesuffix("\n\n") if found else body
        absent = bool(found) and not text
    else:
        before, found, after = body.partition(_XML_TAIL)
        lines = before.removeprefix(_XML_HEAD) if found else ""
        system = after.removeprefix("\n\n") if found else body
        absent = bool(found) and not after
    tools = [json.loads(spell(line)) for line in lines.split("\n") if line]
    return (None if absent or system == family.default_system else system), tools
