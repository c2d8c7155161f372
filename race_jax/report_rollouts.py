"""Rollouts shown to a person: one self-contained page with turns, rewards and log-probs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from race_jax import jsonl
from race_jax.report_page import page_environment, page_hash
from race_jax.report_trees import render_trees
from race_jax.report_view import (
    block,
    message_text,
    split_messages,
    view_message,
    visible,
)
from race_jax.rollout.measures import Measures, measure
from race_jax.rollout.results import KEY, Rollout
from race_jax.types import TokenTurn

LEAST = 99_999
"""What stands for log-probs that are not finite or lower, in negative thousandths of a nat."""

Decode = Callable[[int], str]
"""Text of one id."""


def is_rollouts(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins with a rollout.

    Raises:
        OSError: It cannot be read.
    """
    notes = jsonl.first_object(Path(path)).get(KEY)
    return isinstance(notes, dict) and "stop" in notes


def _sampled(turn: TokenTurn) -> tuple[int, ...]:
    return (turn.reasoning or turn.skip) + turn.action


def _conversations(rollout: Rollout) -> Iterator[Rollout]:
    yield rollout
    for part in rollout.parts:
        yield from _conversations(part)


class _Words:
    """Texts of ids, each held once per page."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._places: dict[int, int] = {}
        self.texts: list[str] = []

    def place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self.texts)
            self.texts.append(str(visible(self._decode(token))))
        return self._places[token]


def _packed(logprobs: Sequence[float]) -> str:
    return " ".join(
        str(min(round(-value * 1000), LEAST) if math.isfinite(value) else LEAST)
        for value in logprobs
    )


def _turns(rollout: Rollout, words: _Words | None, first: int) -> Iterator[dict[str, Any]]:
    _, bodies = split_messages(rollout.record()["messages"])
    spans = rollout.tokens.turns if rollout.tokens else ()
    for t, (turn, note) in enumerate(zip(spans, rollout.notes, strict=True)):
        body = bodies[t] if t < len(bodies) else []
        sampled = _sampled(turn)[note.forced :]
        known = [value for value in note.logprobs if math.isfinite(value)]
        yield {
            "number": first + t,
            "think": note.reasoning_tokens > 0,
            "note": note,
            "spans": [
                ("reasoning", len(turn.reasoning)),
                ("skip", len(turn.skip) if not turn.reasoning else 0),
                ("action", len(turn.action)),
                ("observation", len(turn.observation)),
            ],
            "mean": sum(known) / len(known) if known else None,
            "least": min(known) if known else None,
            "words": " ".join(str(words.place(i)) for i in sampled) if words else "",
            "logprobs": _packed(note.logprobs),
            "cut": max(len(turn.reasoning or turn.skip) - note.forced, 0),
            "reasoning": block(
                message_text(body[0].get("reasoning_content")) if body else "", 1800, 24
            ),
            "action": view_message(body[0]) if body else None,
            "after": [view_message(message) for message in body[1:]],
        }


def view_rollout(index: int, rollout: Rollout, words: _Words | None) -> dict[str, Any]:
    """All that the page shows of one rollout.

    Args:
        index: Its place on the page, from 0.
        rollout: The rollout.
        words: Receives the texts of its ids; None shows no ids.

    Returns:
        Plain values for the template.
    """
    conversations, first = [], 1
    for part in _conversations(rollout):
        prompt, _ = split_messages(part.record()["messages"])
        turns = list(_turns(part, words, first))
        first += len(turns)
        shown = [view_message(message, 1600, 24) for message in prompt]
        conversations.append({"id": part.id, "prompt": shown, "turns": turns})
    notes = rollout.all_notes
    return {
        "index": index,
        "rollout": rollout,
        "conversations": conversations,
        "count": len(notes),
        "reasoning": sum(note.reasoning_tokens for note in notes),
        "sampled": sum(len(note.logprobs) + note.drafted for note in notes),
        "thinking": sum(note.reasoning_tokens > 0 for note in notes),
        "invalid": sum(len(note.errors) for note in notes),
        "truncated": sum(note.truncated for note in notes),
    }


def write_rollouts(
    rollouts: Sequence[Rollout],
    out: str | os.PathLike[str],
    *,
    title: str = "Rollouts",
    source: str = "",
    decode: Decode | None = None,
    max_trajectories: int = 500,
    faults: list[str] | None = None,
) -> Measures:
    """Write the page of rollouts; it loads nothing from anywhere.

    Args:
        rollouts: The rollouts.
        out: The HTML file to write; replaced only when the new one is whole.
        title: Heading.
        source: Where they came from, named on the page.
        decode: Text of one id. Without it only means of log-probs are shown.
        max_trajectories: How many to include, first in file order; totals cover all.
        faults: Receives what could not be shown, as the page says too.

    Returns:
        The measures that stand on top of the page.

    Raises:
        ValueError: No rollouts, or `max_trajectories` below 1.
        OSError: The file cannot be written.
    """
    if not rollouts:
        raise ValueError("there are no rollouts to report on; make some with `race-jax evaluate`")
    if max_trajectories < 1:
        raise ValueError(f"max_trajectories {max_trajectories}: show at least 1 trajectory")
    words = _Words(decode) if decode else None
    views = [view_rollout(n, r, words) for n, r in enumerate(rollouts[:max_trajectories])]
    totals = measure(rollouts, source)
    environment = page_environment()
    style = environment.get_template("report.css.jinja").render(count=0)
    style += environment.get_template("report_rollouts.css.jinja").render()
    script = environment.get_template("report_rollouts.js.jinja").render()
    trees = render_trees(environment, rollouts, len(views), [] if faults is None else faults)
    if trees is not None:
        style += environment.get_template("report_trees.css.jinja").render()
        script += environment.get_template("report_trees.js.jinja").render()
    values: Mapping[str, Any] = {
        "title": title,
        "source": source,
        "totals": totals,
        "total": len(rollouts),
        "rollouts": views,
        "trees": trees or "",
        "vocabulary": json.dumps(words.texts) if words else "",
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": page_hash(style),
        "script_hash": page_hash(script),
    }
    with jsonl.replacing(Path(out)) as page:
        for piece in environment.get_template("report_rollouts.html.jinja").generate(values):
            page.write(piece.encode())
    return totals
