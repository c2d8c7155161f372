"""How an agent plays an episode: advice, tools of its own, and who decides whether it thinks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from race_jax.toolcalls import ParsedCall


@dataclasses.dataclass(frozen=True)
class OwnTool:
    """A tool that the episode itself answers; the environment does not hear of it.

    Attributes:
        schema: As an environment's tools have it.
        reply: What the agent is told.
        ends: Whether a call ends the episode.
        thought: Whether a call is reasoning: then the turn's tokens count as such.
    """

    schema: Mapping[str, Any]
    reply: str
    ends: bool = False
    thought: bool = False

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.schema["function"]["name"]


@dataclasses.dataclass(frozen=True)
class Manner:
    """How an agent plays.

    Attributes:
        advice: Stands at the end of the system prompt.
        tools: Tools of its own, beside the environment's.
        closed: Whether every turn's block is closed before the policy's first token, so that it
            cannot reason there.
        drafts: So many turns are sampled with the block closed; if they agree, one of them is
            taken, else the turn is sampled anew with the block open. 0 for none.
        agreement: Share of the drafts that must agree, in (0, 1].
    """

    advice: str = ""
    tools: tuple[OwnTool, ...] = ()
    closed: bool = False
    drafts: int = 0
    agreement: float = 1.0

    def tool(self, name: str) -> OwnTool | None:
        """The own tool of this name."""
        return next((tool for tool in self.tools if tool.name == name), None)


PLAIN = Manner()
"""The model as it is."""


def canonical(calls: Sequence[ParsedCall]) -> str:
    """A text that equal actions share: same tools, and same arguments but for their spelling.

    Case, white space at the ends and in rows, the order of keys and the form of numbers do not
    count: `{"n": 2}` and `{"n": " 2.0"}` are equal.

    Args:
        calls: The calls of a turn, in order.
    """
    return json.dumps([[call.name, _plain(call.arguments)] for call in calls], sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return str(value).casefold()
    text = re.sub(r"\s+", " ", str(value)).strip().casefold()
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text) and len(text) < 300:
        return repr(float(text))
    return text


def agreed(
    drafts: Sequence[Any], action: Callable[[Any], str | None], agreement: float
) -> Any | None:
    """The first draft whose action enough of them share; None if there is none.

    Args:
        drafts: At least one.
        action: A draft's action in canonical form; None where it cannot be carried out.
        agreement: Share of the drafts, in (0, 1].
    """
    actions = [action(draft) for draft in drafts]
    counts = Counter(found for found in actions if found is not None)
    if not counts:
        return None
    best, count = counts.most_common(1)[0]
    # What rounding makes of 2/3 must not ask for three of three.
    if count < agreement * len(drafts) - 1e-9:
        return None
    return drafts[actions.index(best)]
