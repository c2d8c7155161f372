"""What can be said in the potion shop: the system prompt, the tools, and every word."""

from __future__ import annotations

from typing import Any

from race_jax.envs.word_tokenizer import tool_words

SYSTEM = (
    "You keep a potion shop.",
    " p:h tells a potion's herb, h:s a herb's shelf, s:r a shelf's room, h~h a herb's substitute.",
    " For each order go to the room, take the herb, brew the potion and serve it.",
)
"""The system prompt, sentence by sentence."""

ARGUMENTS = {"go": "room", "take": "herb", "brew": "potion", "serve": "potion"}
"""The tools and the one argument of each."""

_PURPOSE = {
    "go": "Walk to a room.",
    "take": "Take a herb.",
    "brew": "Brew a potion.",
    "serve": "Serve a potion.",
}

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": _PURPOSE[name],
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
    for name, argument in ARGUMENTS.items()
)
"""OpenAI-style schemas of the four tools."""

DONE = "Served. All orders are done."
WRONG = "That was wrong."

PHRASES = (
    "Facts:",
    "\nOrder:",
    "Look up",
    "Look up the substitute",
    "Now take",
    "Now brew",
    "Now serve",
    "You are in",
    ", at the shelf of",
    "You took",
    " for",
    "The shelf is empty, there is no",
    "You brewed",
    "Served. Next order:",
    DONE,
    WRONG,
)
"""All that is said in this world beside facts and names."""


def facts(size: int) -> list[str]:
    """Every fact that a task of this size can state, each with the space before it."""
    pairs = [(a, b) for a in range(1, size + 1) for b in range(1, size + 1)]
    chains = [f" {x}{a}:{y}{b}" for x, y in ("ph", "hs", "sr") for a, b in pairs]
    return chains + [f" h{a}~h{b}" for a, b in pairs if a != b]


def names(size: int) -> list[str]:
    """Every potion, herb, shelf and room."""
    return [f"{kind}{i}" for kind in "phsr" for i in range(1, size + 1)]


def words(size: int) -> list[str]:
    """Every word of a world of this size, for `word_tokenizer`: each becomes one token."""
    spaced = [f" {name}" for name in names(size)]
    said = [*SYSTEM, *PHRASES, *facts(size), *spaced, *names(size)]
    return said + tool_words(TOOLS)
