"""One trajectory of the report: records turned into the plain values that its template shows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

Record = Mapping[str, Any]
"""One line of a LoGiC output file: one trajectory at one threshold."""

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def visible(value: object) -> object:
    """`value`, with characters that would vanish, reorder text or not encode made visible.

    Control characters become their Unicode pictures, invisible and bidirectional controls their
    code points in brackets, lone surrogates their JSON escapes.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = value.replace("\r\n", "\n") if "\r" in value else value
    text = _HIDDEN.sub(_picture, text)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"[U+{code:04X}]"


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: `digits` significant digits, a true minus sign, a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    size = abs(value)
    if size < (1e-4 if digits > 2 else 1e-3) or size >= 1e6:
        mantissa, exponent = f"{value:.{max(digits - 2, 0)}e}".split("e")
        text = f"{_trim(mantissa)}e{int(exponent)}"
    else:
        # Whole digits are never rounded away.
        text = _trim(f"{value:.{max(digits - 1 - math.floor(math.log10(size)), 0)}f}")
    return text.replace("-", "−")


def _trim(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".") if "." in decimal else decimal


def percent(share: float) -> str:
    """A share from 0 to 1 as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


# Texts


def message_text(content: object) -> str:
    """A message's content as text: parts are joined, anything odd is shown as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "\n".join(texts)
    return json.dumps(content, ensure_ascii=False, indent=1)


def clip(text: str, characters: int, lines: int) -> tuple[str, str]:
    """Split a long text into what is shown at once and the rest.

    The cut falls at a line's end where one is near. Nothing is clipped unless that hides enough to
    be worth a click.
    """
    head = "\n".join(text[: characters + 1].split("\n")[:lines])
    if len(head) > characters:
        head = head[:characters]
        cut = max(head.rfind("\n"), head.rfind(" "))
        head = head[:cut] if cut > characters // 2 else head
    rest = text[len(head) :]
    if len(rest) < 80 and rest.count("\n") < 3:
        return text, ""
    return head, rest


def block(text: str, characters: int, lines: int) -> dict[str, Any]:
    """A text as the templates take it: its head, its rest and its size."""
    head, rest = clip(text, characters, lines)
    return {"head": head, "rest": rest.removeprefix("\n"), "size": len(text)}


def _call(call: object) -> dict[str, Any]:
    """A tool call as name and arguments; `inline` if it fits on a line."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return {"name": "", "raw": message_text(call), "arguments": (), "inline": False}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"name": function["name"], "raw": arguments, "arguments": (), "inline": False}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raw = json.dumps(arguments, ensure_ascii=False)
        return {"name": function["name"], "raw": raw, "arguments": (), "inline": False}
    pairs = [
        (str(key), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in arguments.items()
    ]
    length = sum(len(key) + len(value) + 4 for key, value in pairs)
    inline = length <= 100 and not any("\n" in value for _, value in pairs)
    return {"name": function["name"], "raw": "", "arguments": pairs, "inline": inline}


# One trajectory


def verdict(turn: Mapping[str, Any], index: int, epsilon: float) -> dict[str, Any]:
    """Why a turn was kept or removed, as a sentence with at most one turn to link to.

    Args:
        turn: The record's entry of this turn.
        index: The turn's number, from 1.
        epsilon: Threshold.

    Returns:
        `lead`, `before`, `link` (a turn's number or None) and `after`.
    """
    keep = turn["decision"] == "THINK"
    worst, most = turn.get("worst_turn"), turn.get("max_decrease")
    if not turn.get("tested"):
        if not keep:
            return _sentence("No reasoning", "the turn came without any, so nothing was tested.")
        text = "the first turn always is." if index == 1 else "its removal was not tested."
        return _sentence("Kept", text)
    link = None if worst == index else worst
    if keep:
        action = "this turn’s own action" if worst == index else "the action of "
        action = "an action" if worst is None else action
        ratio = f" ({number(most / epsilon, 2)} ε)" if most is not None and epsilon > 0 else ""
        loss = "more than ε" if most is None else f"{_beside(most, epsilon)} nats per token{ratio}"
        return _sentence("Kept", f"without this reasoning {action}", link, f" would lose {loss}.")
    if most is None:
        return _sentence("Removed", "no action loses more than ε.")
    if most <= 0:
        return _sentence("Removed", "no action from here on becomes less likely.")
    text = f"no action from here on loses more than {_beside(most, epsilon)} nats per token"
    if link is not None:
        return _sentence("Removed", f"{text} (the most: ", link, ").")
    return _sentence("Removed", f"{text}{' (the most: its own)' if worst else ''}.")


def _beside(decrease: float, epsilon: float) -> str:
    """The decrease, with more digits where three would make it look equal to the threshold."""
    same = number(decrease) == number(epsilon) and decrease != epsilon
    return number(decrease, 6 if same else 3)


def _sentence(lead: str, before: str, link: int | None = None, after: str = "") -> dict[str, Any]:
    return {"lead": lead, "before": before, "link": link, "after": after}


def split_messages(messages: Sequence[Record]) -> tuple[list[Record], list[list[Record]]]:
    """The prompt, and one list per turn: its assistant message and what follows it."""
    prompt: list[Record] = []
    turns: list[list[Record]] = []
    for message in messages:
        if message["role"] == "assistant" and message.get("loss", True):
            turns.append([message])
        elif turns:
            turns[-1].append(message)
        else:
            prompt.append(message)
    return prompt, turns


def _reasoning(records: Sequence[Record], splits: Sequence[list[list[Record]]], t: int) -> str:
    """The reasoning of turn `t` (from 0) before removal, from wherever the file still has it."""
    for record in records:
        original = record.get("original_reasoning") or []
        if t < len(original) and original[t]:
            return original[t]
    # A smaller threshold keeps more: another record of the trajectory may still carry the text.
    for turns in splits:
        text = message_text(turns[t][0].get("reasoning_content")) if t < len(turns) else ""
        if text:
            return text
    return ""


def view_message(message: Record, characters: int = 600, lines: int = 9) -> dict[str, Any]:
    """A chat message as the templates take it."""
    name = message.get("name")
    return {
        "role": str(message["role"]),
        "name": name if isinstance(name, str) else "",
        "text": block(message_text(message.get("content")), characters, lines),
        "calls": [_call(call) for call in message.get("tool_calls") or ()],
    }


def view_trajectory(index: int, records: Mapping[int, Record]) -> dict[str, Any]:
    """All that the page shows of one trajectory.

    Args:
        index: Its place on the page, from 0.
        records: Its record for each threshold index that has one.

    Returns:
        Plain values for the templates.
    """
    present = list(records.values())
    splits = [split_messages(record.get("messages") or ()) for record in present]
    prompt, bodies = max(splits, key=lambda split: len(split[1]))
    count = len(present[0]["turns"])
    turns = [_view_turn(t, records, bodies, [split[1] for split in splits]) for t in range(count)]
    task = next((message_text(m.get("content")) for m in prompt if m["role"] == "user"), "")
    return {
        "index": index,
        "id": present[0]["id"],
        "task": " ".join(task[:400].split())[:180],
        "success": next((r["success"] for r in present if r.get("success") is not None), None),
        "reward": next((r["reward"] for r in present if r.get("reward") is not None), None),
        "count": count,
        "totals": {i: _view_totals(record) for i, record in records.items()},
        "prompt": [view_message(message, 1600, 24) for message in prompt],
        "turns": turns,
        "heat": {i: heat_map(index, record) for i, record in records.items()},
        "matched": not bodies or len(bodies) == count,
        "has_text": bool(bodies),
    }


def _view_turn(
    t: int,
    records: Mapping[int, Record],
    bodies: Sequence[list[Record]],
    all_bodies: Sequence[list[list[Record]]],
) -> dict[str, Any]:
    states, views = [], []
    for i, record in records.items():
        turn = record["turns"][t] if t < len(record["turns"]) else {"decision": "THINK"}
        keep = turn["decision"] == "THINK"
        states.append(f"k{i}" if keep else f"s{i}")
        views.append(
            {
                "i": i,
                "keep": keep,
                "uncertain": bool(turn.get("uncertain")),
                "verdict": verdict(turn, t + 1, float(record["epsilon"])),
                "full": _at(record.get("loglik_full"), t),
                "final": _at(record.get("loglik_final"), t),
            }
        )
    first = next(iter(records.values()))["turns"][t]
    body = bodies[t] if t < len(bodies) else []
    tokens = first.get("reasoning_tokens", 0)
    return {
        "number": t + 1,
        "states": " ".join(states),
        "views": views,
        "reasoning": block(_reasoning(list(records.values()), all_bodies, t), 1800, 24),
        "reasoning_tokens": tokens,
        "action_tokens": first.get("action_tokens"),
        "had_reasoning": bool(tokens) or any(view["keep"] for view in views),
        "action": view_message(body[0]) if body else None,
        "after": [view_message(message) for message in body[1:]],
    }


def _at(values: Sequence[float | None] | None, t: int) -> float | None:
    return values[t] if values and t < len(values) else None


def _view_totals(record: Record) -> dict[str, Any]:
    turns = record["turns"]
    skips = [turn["decision"] == "SKIP" for turn in turns]
    sizes = [turn.get("reasoning_tokens", 0) for turn in turns]
    before = sum(sizes)
    kept = [size for size, skip in zip(sizes, skips, strict=True) if not skip]
    step = min(7.0, 200 / len(turns))
    # One path per kind keeps a row at two elements however many turns it has.
    bars = {False: "", True: ""}
    for t, skip in enumerate(skips):
        x, width = round(t * step, 2), round(step * 0.72, 2)
        top = 9 if skip else 1
        bars[skip] += f"M{x} {top}h{width}V13h-{width}z"
    return {
        "skipped": sum(skips),
        "share": sum(skips) / len(turns),
        "before": before,
        "after": sum(kept),
        "saved": 1 - sum(kept) / before if before else 0.0,
        "uncertain": sum(bool(turn.get("uncertain")) for turn in turns),
        "width": round(step * len(turns), 1),
        "think_bars": bars[False],
        "skip_bars": bars[True],
    }


# Heat map


def heat_steps(epsilon: float) -> list[float]:
    """Upper ends of the heat map's shades above 0: the threshold, then three larger ones."""
    base = epsilon if epsilon > 0 else 0.001
    factor = 10 if base < 0.005 else 3
    return [epsilon, base * factor, base * factor**2, base * factor**3]


def shade(decrease: float | None, steps: Sequence[float]) -> str:
    """The heat map's class of one decrease: `n` not computed, `a` for none, then `b` to `f`."""
    if decrease is None:
        return "n"
    if decrease <= 0:
        return "a"
    for name, top in zip("bcde", steps, strict=True):
        if decrease <= top:
            return name
    return "f"


def heat_map(index: int, record: Record) -> dict[str, Any]:
    """Rows of likelihood decreases, one per tested turn, with ready-made cells."""
    turns, epsilon = record["turns"], float(record["epsilon"])
    steps = heat_steps(epsilon)
    rows = []
    for key, values in sorted((record.get("decreases") or {}).items(), key=lambda kv: int(kv[0])):
        t = int(key)
        worst = turns[t - 1].get("worst_turn")
        cells = [f'<td colspan="{t - 1}" class="z"></td>'] if t > 1 else []
        padded = [*values, *[None] * (len(turns) - t + 1 - len(values))]
        for j, decrease in enumerate(padded, t):
            mark = " w" if j == worst and decrease is not None else ""
            text = "" if decrease is None else number(decrease, 2)
            cells.append(f'<td class="{shade(decrease, steps)}{mark}">{text}</td>')
        keep = turns[t - 1]["decision"] == "THINK"
        rows.append({"turn": t, "keep": keep, "cells": Markup("".join(cells))})
    return {"rows": rows, "columns": range(1, len(turns) + 1), "steps": steps, "epsilon": epsilon}
