"""Trajectories as token ids, checked and brought to turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from race_jax.trajectory_messages import Report, short
from race_jax.types import TokenTrajectory, TokenTurn

KINDS = ("prompt", "reasoning", "skip", "action", "observation")
PARTS = ("reasoning", "skip", "action", "observation")
_MAX_ID = 2**31 - 1


class _Broken(Exception):
    """A fault was reported and nothing further can be checked."""


def _noting(report: Report) -> tuple[list[str], Report]:
    """A `report` that also keeps the rules it was called for, and that list."""
    faults: list[str] = []

    def note(rule: str, message: str) -> None:
        faults.append(rule)
        report(rule, message)

    return faults, note


def from_turns(raw: Mapping[str, Any], name: str, report: Report) -> TokenTrajectory | None:
    """Read `{"prompt": [ids], "turns": [{"reasoning", "skip", "action", "observation"}]}`.

    Args:
        raw: The object that stood under `tokens`.
        name: Id of the trajectory.
        report: Called for each fault.

    Returns:
        The trajectory, or None if a fault was reported.
    """
    faults, note = _noting(report)
    prompt = _ids(raw.get("prompt"), "tokens.prompt", note)
    if not prompt and not faults:
        note("span-order", "tokens.prompt is empty; it holds all ids before the first turn")
    given = raw.get("turns")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        note("no-turn", f"tokens.turns must be a list of at least one turn, not {short(given)}")
        return None
    turns = []
    for index, item in enumerate(given):
        where = f"tokens.turns[{index}]"
        if not isinstance(item, Mapping):
            note("token-ids", f"{where} must be an object, not {short(item)}")
            continue
        before = len(faults)
        parts = [_ids(item.get(part, ()), f"{where}.{part}", note) for part in PARTS]
        turn = TokenTurn(*parts)
        if len(faults) == before:
            _check_turn(turn, where, index == len(given) - 1, note)
        turns.append(turn)
    return None if faults else TokenTrajectory(name, prompt, tuple(turns))


def _ids(raw: Any, where: str, report: Report) -> tuple[int, ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        report("token-ids", f"{where} must be a list of token ids, not {short(raw)}")
        return ()
    for index, value in enumerate(raw):
        if type(value) is not int or not 0 <= value <= _MAX_ID:
            report(
                "token-ids",
                f"{where}[{index}] is {short(value)}; ids are integers from 0 to 2**31 - 1",
            )
            return ()
    return tuple(raw)


def _check_turn(turn: TokenTurn, where: str, last: bool, report: Report) -> None:
    if not turn.action:
        report("empty-action", f"{where} has no action ids")
    if not turn.observation and not last:
        report(
            "span-order",
            f"{where} has no observation; before the next turn at least the next generation "
            "prompt belongs there",
        )


def from_spans(
    ids: Any, spans: Any, skip: Any, name: str, report: Report
) -> TokenTrajectory | None:
    """Read one list of ids and the spans that say what each of them is.

    Args:
        ids: All ids in order.
        spans: Objects `{"kind", "start", "end"}` with half-open ranges that cover the ids in
            order, without gap or overlap: a prompt, then for each turn reasoning or skip (or
            neither), action, observation.
        skip: Ids that stand in place of removed reasoning, for all turns; None if not given.
        name: Id of the trajectory.
        report: Called for each fault.

    Returns:
        The trajectory, or None if a fault was reported.
    """
    faults, note = _noting(report)
    tokens = _ids(ids, "token_ids", note)
    skip_ids = _ids(() if skip is None else skip, "skip", note)
    if not isinstance(spans, Sequence) or isinstance(spans, str) or not spans:
        note("span-kind", f"`spans` must be a list of spans, not {short(spans)}")
    if faults:
        return None
    try:
        cuts = _cuts(tokens, spans, note)
        prompt, parts = _group(cuts, note)
    except _Broken:
        return None
    turns = []
    for index, part in enumerate(parts):
        reasoning = part.get("reasoning", ())
        turn = TokenTurn(
            reasoning,
            part.get("skip", skip_ids if reasoning else ()),
            part.get("action", ()),
            part.get("observation", ()),
        )
        _check_turn(turn, f"turn {index} of `spans`", index == len(parts) - 1, note)
        turns.append(turn)
    if not turns:
        note("no-turn", "`spans` has no action")
    return None if faults else TokenTrajectory(name, prompt, tuple(turns))


def _cuts(
    tokens: tuple[int, ...], spans: Sequence[Any], report: Report
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Where, kind and ids of each span, after checking that they tile the ids."""
    cuts, end = [], 0
    for index, span in enumerate(spans):
        where = f"spans[{index}]"
        kind = span.get("kind") if isinstance(span, Mapping) else None
        if kind not in KINDS:
            report("span-kind", f"{where}: kind {short(kind)} is not one of {', '.join(KINDS)}")
            raise _Broken
        start, stop = span.get("start"), span.get("end")
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= len(tokens):
            report(
                "span-range",
                f"{where}: start {short(start)} and end {short(stop)} must be integers with "
                f"0 <= start <= end <= {len(tokens)}, the number of ids",
            )
            raise _Broken
        if start != end:
            rule, what = ("span-gap", "leaves out") if start > end else ("span-overlap", "repeats")
            low, high = sorted((start, end))
            report(
                rule,
                f"{where} starts at {start}, the one before ends at {end}: "
                f"it {what} ids {low} to {high - 1}",
            )
            raise _Broken
        cuts.append((where, kind, tokens[start:stop]))
        end = stop
    if end != len(tokens):
        report("span-gap", f"the spans end at {end}, but there are {len(tokens)} ids")
        raise _Broken
    return cuts


def _group(
    cuts: Sequence[tuple[str, str, tuple[int, ...]]], report: Report
) -> tuple[tuple[int, ...], list[dict[str, tuple[int, ...]]]]:
    """Gather spans into the prompt and turns."""
    where, kind, prompt = cuts[0]
    if kind != "prompt" or not prompt:
        report("span-order", f"{where}: the first span must be a prompt with at least one id")
        raise _Broken
    follows = {
        "prompt": ("reasoning", "skip", "action"),
        "reasoning": ("action",),
        "skip": ("action",),
        "action": ("reasoning", "skip", "action", "observation"),
        "observation": ("reasoning", "skip", "action"),
    }
    turns: list[dict[str, tuple[int, ...]]] = []
    before = "prompt"
    for where, kind, ids in cuts[1:]:
        if kind not in follows[before]:
            report("span-order", f"{where}: {kind} cannot follow {before}")
            raise _Broken
        if kind in ("reasoning", "skip") or (
            kind == "action" and before not in ("reasoning", "skip")
        ):
            turns.append({})
        turns[-1][kind] = ids
        before = kind
    if before in ("reasoning", "skip"):
        report("span-order", f"{where}: {before} has no action after it")
        raise _Broken
    return prompt, turns
