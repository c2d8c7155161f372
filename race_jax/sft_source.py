"""What a file of trajectories gives to supervised fine-tuning: which ones, with which reasoning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from race_jax.chat import Renderer
from race_jax.jsonl import JsonError, lines, loads
from race_jax.logic.records import SKIP, digest_of
from race_jax.report import find_fault
from race_jax.trajectories import from_json, scan
from race_jax.trajectory_messages import short
from race_jax.types import TokenTrajectory, Trajectory, is_turn

Reasoning = Literal["full", "cover", "none"]
Success = Literal["required", "not_failed", "any"]


class Choice(NamedTuple):
    """Which trajectories are taken, and what of them.

    Attributes:
        reasoning: `full`, as the teacher wrote it; `cover`, what LoGiC left; `none`, every turn
            without.
        epsilon: LoGiC's threshold, for `cover` from a file that holds several.
        success: `required` takes a trajectory only if its `success` is true; `not_failed` takes it
            also where success is not known; `any` takes all.
    """

    reasoning: Reasoning
    epsilon: float | None
    success: Success


class Selected(NamedTuple):
    """A trajectory that is taken.

    Attributes:
        tokens: Its ids, all reasoning in place.
        removed: Turns, from 0, whose reasoning goes.
    """

    tokens: TokenTrajectory
    removed: frozenset[int]


class _Fault(ValueError):
    """A line that cannot be used; the others can."""


def select(
    path: str | Path,
    renderer: Renderer,
    choice: Choice,
    counts: Counter[str],
    report: Callable[[str], None],
) -> Iterator[Selected]:
    """Read a file of LoGiC's output, or of trajectories, once; memory holds a line and the ids.

    Args:
        path: JSON lines.
        renderer: Of the model that is trained.
        choice: What to take.
        counts: Grows by `read`, `faults`, `failed`, `unknown`, and `other_ids`: trajectories whose
            ids here differ from those that LoGiC scored, for another tokenizer, skip form or text.
        report: Called with each line that cannot be used.

    Yields:
        The trajectories that are taken, rendered.

    Raises:
        ValueError: The choice does not fit the file.
        OSError: The file cannot be read.
    """
    covers = _holds_covers(path)
    if choice.reasoning == "cover" and covers is None:
        raise ValueError(f"{path} has no line that can be read, so it holds no output of LoGiC")
    if choice.reasoning == "cover" and not covers:
        raise ValueError(
            f"{path} holds trajectories, not LoGiC's output, so it has no cover; run race-jax "
            "logic on it first, or set reasoning to full (as they are) or none"
        )
    if choice.epsilon is not None and (not covers or choice.reasoning != "cover"):
        raise ValueError(
            f"epsilon {choice.epsilon} chooses among the covers of LoGiC's output; with reasoning "
            f"{choice.reasoning} of {path} there is nothing to choose: leave it out"
        )
    read = _covers(path, renderer, choice, report, counts) if covers else _raw(path, report, counts)
    for trajectory, skipped, digest in read:
        counts["read"] += 1
        if not _wanted(trajectory, choice.success, counts):
            continue
        try:
            yield _selected(trajectory, skipped, digest, renderer, choice.reasoning, counts)
        except ValueError as error:
            counts["faults"] += 1
            report(f"{path}: {error}")


def _wanted(trajectory: Trajectory, success: Success, counts: Counter[str]) -> bool:
    if success == "any" or trajectory.success is True:
        return True
    if trajectory.success is None:
        counts["unknown"] += success == "required"
        return success == "not_failed"
    counts["failed"] += 1
    return False


def _selected(
    trajectory: Trajectory,
    skipped: frozenset[int],
    digest: str | None,
    renderer: Renderer,
    reasoning: Reasoning,
    counts: Counter[str],
) -> Selected:
    tokens = renderer.encode(trajectory)
    counts["other_ids"] += digest is not None and digest != digest_of(tokens)
    turns = range(len(tokens.turns))
    if skipped and max(skipped) >= len(turns):
        raise ValueError(
            f"trajectory {trajectory.id!r}: {len(turns)} turns, but a decision on turn "
            f"{max(skipped) + 1}"
        )
    removed = {"full": frozenset(), "cover": skipped, "none": frozenset(turns)}[reasoning]
    return Selected(tokens, removed)


Read = Iterator[tuple[Trajectory, frozenset[int], str | None]]
"""Trajectories with all reasoning, the turns that LoGiC emptied, and the digest of its ids."""


def _raw(path: str | Path, report: Callable[[str], None], counts: Counter[str]) -> Read:
    for line in scan(path):
        faults = [f"{fault.rule}: {fault.message}" for fault in line.faults]
        item = line.trajectory
        if item is not None and _is_cover(item.extra):
            faults = ["LoGiC's output in a file of trajectories; keep the two apart"]
        if item is None or faults:
            counts["faults"] += 1
            report(f"{path}:{line.number}: {'; '.join(faults)}")
            continue
        yield item, frozenset(), None


def _covers(
    path: str | Path,
    renderer: Renderer,
    choice: Choice,
    report: Callable[[str], None],
    counts: Counter[str],
) -> Read:
    """The records of the chosen threshold; of any, each trajectory once, where none is needed."""
    needed = choice.reasoning == "cover"
    wanted = choice.epsilon
    seen: set[str] = set()
    epsilons: set[float] = set()
    for number, record in _records(path, report, counts):
        epsilons.add(record["epsilon"])
        if needed and wanted is None and len(epsilons) > 1:
            continue  # An error by now; the other thresholds are read to be named in it.
        if needed and wanted is not None and record["epsilon"] != wanted:
            continue
        if record["id"] in seen:
            if needed:
                counts["faults"] += 1
                report(f"{path}:{number}: id {short(record['id'])} stands twice at one epsilon")
            continue
        seen.add(record["id"])
        try:
            yield _restored(record)
        except ValueError as error:
            counts["faults"] += 1
            report(f"{path}:{number}: {error}")
    held = ", ".join(f"{value:g}" for value in sorted(epsilons))
    if needed and wanted is None and len(epsilons) > 1:
        raise ValueError(f"{path} holds several thresholds; set epsilon to one of {held}")
    if needed and wanted is not None and epsilons and wanted not in epsilons:
        raise ValueError(f"{path} holds no cover at epsilon {wanted:g}; it has {held}")


def _records(
    path: str | Path, report: Callable[[str], None], counts: Counter[str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and records of LoGiC's output; faults are told and passed over."""
    for number, data in lines(path):
        if data is not None and not data.strip():
            continue
        try:
            if data is None:
                raise _Fault("the line is too long to hold in memory")
            record = loads(data).value
            fault = find_fault(record)
            if fault:
                raise _Fault(f"not a record of LoGiC: {fault}")
        except (JsonError, _Fault) as error:
            counts["faults"] += 1
            report(f"{path}:{number}: {error}")
            continue
        yield number, record


def _restored(record: Mapping[str, Any]) -> tuple[Trajectory, frozenset[int], str | None]:
    """A record's trajectory with the reasoning that LoGiC took out put back.

    Ids come before messages: those that a policy sampled are not what its text encodes to.
    """
    kept = {key: record.get(key) for key in ("id", "tools", "reward", "success")}
    if record.get("tokens"):
        trajectory = from_json({**kept, "tokens": record["tokens"]})
        counts = [len(trajectory.tokens.turns) if trajectory.tokens else 0]
    else:
        messages = [dict(message) for message in record.get("messages") or ()]
        turns = [message for message in messages if is_turn(message)]
        originals = record.get("original_reasoning") or []
        if not originals:
            raise _Fault(
                f"trajectory {record['id']!r} came as token ids, and the record does not hold "
                "them; run race-jax logic with --save-tokens"
            )
        for message, reasoning in zip(turns, originals, strict=False):
            message["reasoning_content"] = reasoning
        trajectory = from_json({**kept, "messages": messages})
        counts = [len(turns), len(originals)]
    decisions = [turn["decision"] for turn in record["turns"]]
    if any(count != len(decisions) for count in counts):
        raise _Fault(
            f"trajectory {record['id']!r}: {len(decisions)} decisions on {counts[-1]} turns; the "
            "record was changed after race-jax logic wrote it"
        )
    skipped = frozenset(t for t, decision in enumerate(decisions) if decision == SKIP)
    return trajectory, skipped, record.get("input_id")


def _is_cover(record: Mapping[str, Any]) -> bool:
    return "epsilon" in record and "turns" in record


def _holds_covers(path: str | Path) -> bool | None:
    """Whether the first line that can be read is LoGiC's; None if there is no such line."""
    for _, data in lines(path):
        if data is None or not data.strip():
            continue
        try:
            value = loads(data).value
        except JsonError:
            continue
        return isinstance(value, Mapping) and _is_cover(value)
    return None
