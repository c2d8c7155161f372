"""Trajectories in files: JSON lines in four forms in, chat-message form out.

`read` streams a file and gives a `Trajectory` or a `Fault` per line, `write` makes a file that
`read` gives back unchanged. The forms are described in docs/trajectories.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from race_jax.jsonl import MAX_LINE_BYTES, JsonError, dumps, lines, loads, replacing
from race_jax.trajectory_conversations import from_conversations
from race_jax.trajectory_messages import Report, normalise, short, tools_of
from race_jax.trajectory_tokens import PARTS, from_spans, from_turns
from race_jax.types import TokenTrajectory, Trajectory, is_turn

RULES: Mapping[str, str] = {
    "empty-file": "The file holds at least one trajectory.",
    "utf8": "The text is valid UTF-8, without halves of surrogate pairs.",
    "line-too-long": "A line has at most 256 MiB, unless the caller says otherwise.",
    "json": "Each line is one whole JSON value.",
    "duplicate-key": "No object in a line holds the same key twice.",
    "number": "Numbers are finite.",
    "not-object": "Each line is a JSON object.",
    "form": "The object has one of the forms below.",
    "id": "The id is a non-empty string or an integer.",
    "duplicate-id": "No two trajectories share an id.",
    "tools": "Tools are a list of schemas, each a function with a name.",
    "reward": "The reward is a finite number or null.",
    "success": "Success is true, false or null.",
    "messages": "There is a list of at least one message, each an object.",
    "role": "Roles are system, user, assistant and tool.",
    "content": "Content is text or a list of text parts.",
    "reasoning": "Reasoning is text, in one place, on assistant messages only.",
    "think-block": "A think block in content comes first, is closed, and is the only reasoning.",
    "tool-calls": "Calls have a name and arguments that are an object or its JSON text.",
    "tool-reply": "A tool message answers one call of the assistant message before it.",
    "loss": "`loss` is true, false or null.",
    "system-order": "A system message is the first message.",
    "no-prompt": "Something stands before the first assistant message.",
    "consecutive-assistant": "Two assistant messages have a message between them.",
    "no-turn": "There is at least one turn.",
    "empty-action": "Each turn has content or a tool call, or action ids.",
    "token-ids": "Token ids are lists of integers from 0 to 2**31 - 1.",
    "span-kind": "Spans are objects of a known kind.",
    "span-range": "Spans lie within the ids.",
    "span-overlap": "Spans do not overlap.",
    "span-gap": "Spans leave no ids out.",
    "span-order": "A prompt, then per turn reasoning or skip, action, observation.",
    "turn-count": "Messages and token ids of one trajectory have the same number of turns.",
}
"""The rules that a `Fault` can name, and what each demands."""

_KEYS = ("id", "tools", "reward", "success", "messages")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A rule that a line breaks.

    Attributes:
        line: Line number from 1.
        id: Id of the trajectory, None if it could not be read.
        rule: A key of `RULES`.
        message: Where in the line, what is there, and what should be.
    """

    line: int
    id: str | None
    rule: str
    message: str


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a file: a trajectory, or at least one fault.

    Attributes:
        number: Line number from 1.
        form: `messages`, `conversations`, `tokens` or `spans`, with `messages+tokens` and
            `messages+spans` for both; empty if none was recognised.
        trajectory: The trajectory, None if there are faults.
        faults: All faults that could be told apart, the first one first.
    """

    number: int
    form: str
    trajectory: Trajectory | None
    faults: tuple[Fault, ...]


def read(
    path: str | Path, *, strict: bool = False, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Trajectory | Fault]:
    """Read trajectories line by line; memory holds one line, and the ids seen so far.

    Args:
        path: A file of JSON lines. Blank lines are passed over.
        strict: Raise at the first fault.
        max_line_bytes: The longest line to hold, in bytes.

    Yields:
        For each line its trajectory, or the first of its faults.

    Raises:
        ValueError: A line has a fault, and `strict` is set.
        OSError: The file cannot be read.
    """
    for line in scan(path, max_line_bytes=max_line_bytes):
        if line.trajectory is not None:
            yield line.trajectory
            continue
        fault = line.faults[0]
        if strict:
            raise ValueError(f"{path}:{fault.line}: {fault.rule}: {fault.message}")
        yield fault


def scan(path: str | Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """As `read`, with the form and all faults of each line.

    Args:
        path: A file of JSON lines.
        max_line_bytes: The longest line to hold, in bytes.

    Yields:
        Each line that is not blank. A file without any gives one `empty-file` fault.

    Raises:
        OSError: The file cannot be read.
    """
    seen: dict[str, int] = {}
    empty = True
    for number, data in lines(path, max_line_bytes):
        if data is not None and not data.strip():
            continue
        empty = False
        if number == 1 and data is not None and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            message = "the file is UTF-16; save it as UTF-8"
            yield Line(number, "", None, (Fault(number, None, "utf8", message),))
            return
        yield _line(number, data, seen)
    if empty:
        message = "the file has no line with a trajectory"
        yield Line(1, "", None, (Fault(1, None, "empty-file", message),))


def _line(number: int, data: bytes | None, seen: dict[str, int]) -> Line:
    """Parse one line; `seen` maps ids to the lines where they first stood."""
    noted: list[tuple[str, str]] = []

    def report(rule: str, message: str) -> None:
        noted.append((rule, message))

    form, trajectory, name = "", None, None
    if data is None:
        report("line-too-long", "the line is too long to hold in memory as one trajectory")
    else:
        try:
            record = _record(data, report)
        except JsonError as error:
            report(error.rule, str(error))
        else:
            if record is not None:
                form, name, trajectory = _trajectory(record, f"line-{number}", report)
    if name is not None:
        first = seen.setdefault(name, number)
        if first != number:
            noted.insert(0, ("duplicate-id", f"id {short(name)} stands on line {first} already"))
    faults = tuple(Fault(number, name, rule, message) for rule, message in noted)
    return Line(number, form, None if faults else trajectory, faults)


def _record(data: bytes, report: Report) -> Mapping[str, Any] | None:
    parsed = loads(data)
    if not isinstance(parsed.value, Mapping):
        remedy = "; write one object per line" if isinstance(parsed.value, list) else ""
        report("not-object", f"the line is {short(parsed.value, 40)}, not a JSON object{remedy}")
        return None
    if parsed.repeated is not None:
        report("duplicate-key", f"key {short(parsed.repeated)} stands twice in one object")
    reward = parsed.value.get("reward")
    # The reward has a rule of its own, which says more.
    own = isinstance(reward, float) and not math.isfinite(reward)
    if parsed.nonfinite > own:
        report("number", "NaN or an infinite number stands in the line; use null")
    return parsed.value


def from_json(record: Mapping[str, Any], *, default_id: str = "line-1") -> Trajectory:
    """Turn one record, in any of the forms, into a trajectory.

    Args:
        record: The parsed JSON object.
        default_id: The id if the record has none.

    Raises:
        ValueError: The record breaks a rule; the message names the first.
    """
    noted: list[tuple[str, str]] = []
    _, _, trajectory = _trajectory(
        record, default_id, lambda rule, message: noted.append((rule, message))
    )
    if noted or trajectory is None:
        rule, message = noted[0]
        raise ValueError(f"{rule}: {message}")
    return trajectory


def _trajectory(
    record: Mapping[str, Any], default_id: str, report: Report
) -> tuple[str, str | None, Trajectory | None]:
    """Form, id and trajectory of a record; the trajectory counts only if nothing is reported."""
    id_key = "item_id" if record.get("id") is None and "item_id" in record else "id"
    name = _name(record.get(id_key), default_id, report)
    form, used = _form(record)
    if not form:
        report(
            "form",
            "no `messages`, `conversations`, `tokens` (with `prompt` and `turns`) or `token_ids` "
            f"with `spans`; the keys are {short(list(record))}",
        )
        return form, name, None
    messages, tokens = (), None
    if "conversations" in used:
        if "messages" in record:
            report("form", "both `messages` and `conversations` are there; keep one")
        system = record.get("system")
        beside = isinstance(system, str) and bool(system)
        used += ("system",) if beside or not system else ()
        chat = from_conversations(record["conversations"], system if beside else None, report)
        if chat:
            messages = normalise(chat, "conversations", report, ahead=int(beside))
    elif "messages" in used:
        ids = "tokens" in used or "spans" in used
        messages = normalise(record["messages"], "messages", report, sampled=ids)
    if "tokens" in record and "token_ids" in record and "spans" in record:
        report("form", "both `tokens` and `token_ids` with `spans` are there; keep one")
    if "tokens" in used:
        tokens = from_turns(record["tokens"], name or "", report)
    elif "spans" in used:
        spans = record["token_ids"], record["spans"], record.get("skip")
        tokens = from_spans(*spans, name or "", report)
    if messages and tokens is not None:
        _check_count(sum(m["role"] is not None and is_turn(m) for m in messages), tokens, report)
    trajectory = Trajectory(
        id=name or "",
        messages=messages,
        tools=tools_of(record.get("tools"), report),
        reward=_reward(record.get("reward"), report),
        success=_success(record.get("success"), report),
        extra={k: v for k, v in record.items() if k not in (*_KEYS, *used, id_key)},
        tokens=tokens,
    )
    return form, name, trajectory


def _form(record: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Name of the form, and the keys that it takes up; no name if there is no form."""
    parts: list[str] = []
    used: tuple[str, ...] = ()
    if "conversations" in record:
        parts, used = ["conversations"], ("conversations",)
    elif "messages" in record:
        parts, used = ["messages"], ("messages",)
    # A count under `tokens`, or ids without spans, are keys like any other.
    if isinstance(record.get("tokens"), Mapping):
        parts.append("tokens")
        used += ("tokens",)
    elif "token_ids" in record and "spans" in record:
        parts.append("spans")
        used += ("token_ids", "spans", "skip")
    return "+".join(parts), used


def _name(raw: Any, default: str, report: Report) -> str | None:
    if raw is None:
        return default
    if isinstance(raw, int) and not isinstance(raw, bool):
        return str(raw)
    if isinstance(raw, str) and raw.strip():
        return raw
    report("id", f"the id must be a non-empty string or an integer, not {short(raw)}")
    return None


def _reward(raw: Any, report: Report) -> float | None:
    if raw is None:
        return None
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        try:
            if math.isfinite(raw):
                return float(raw)
        except OverflowError:
            pass
    report("reward", f"the reward must be a finite number or null, not {short(raw)}")
    return None


def _success(raw: Any, report: Report) -> bool | None:
    if raw is not None and not isinstance(raw, bool):
        report("success", f"success must be true, false or null, not {short(raw)}")
        return None
    return raw


def _check_count(turns: int, tokens: TokenTrajectory, report: Report) -> None:
    if turns != len(tokens.turns):
        report("turn-count", f"{turns} turns as messages, {len(tokens.turns)} as token ids")


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The record of a trajectory in chat-message form, with its token ids if it has them.

    Args:
        trajectory: The trajectory. `extra` keys stand beside the others.

    Raises:
        ValueError: An `extra` key has a meaning of its own.
    """
    record: dict[str, Any] = {"id": trajectory.id}
    taken = {"id", *_KEYS, "conversations", *_form(trajectory.extra)[1]} & set(trajectory.extra)
    if taken:
        raise ValueError(
            f"trajectory {trajectory.id!r}: extra keys {sorted(taken)} have a meaning of their "
            "own in a file; rename them"
        )
    record |= trajectory.extra
    record["tools"] = [dict(tool) for tool in trajectory.tools]
    if trajectory.messages:
        record["messages"] = [dict(message) for message in trajectory.messages]
    record["reward"], record["success"] = trajectory.reward, trajectory.success
    if trajectory.tokens is not None:
        if "tokens" in trajectory.extra:
            raise ValueError(f"trajectory {trajectory.id!r}: rename the extra key 'tokens'")
        record["tokens"] = {
            "prompt": list(trajectory.tokens.prompt),
            "turns": [
                {part: list(getattr(turn, part)) for part in PARTS}
                for turn in trajectory.tokens.turns
            ],
        }
    return record


def write(path: str | Path, trajectories: Iterable[Trajectory]) -> int:
    """Write trajectories as JSON lines that `read` gives back.

    The file appears only once it is whole, so `trajectories` may come from the same path.

    Args:
        path: The file to make or replace.
        trajectories: The trajectories, with distinct ids.

    Returns:
        How many were written.

    Raises:
        ValueError: A trajectory breaks a rule of `RULES`, so that it could not be read again.
        OSError: The file cannot be written.
    """
    seen: set[str] = set()
    with replacing(path) as file:
        for trajectory in trajectories:
            record = to_json(trajectory)
            try:
                from_json(record)
            except ValueError as error:
                raise ValueError(
                    f"trajectory {trajectory.id!r} cannot be written: {error}"
                ) from None
            if trajectory.id in seen:
                raise ValueError(f"trajectory {trajectory.id!r} is there twice; ids must differ")
            seen.add(trajectory.id)
            file.write(dumps(record))
    return len(seen)
