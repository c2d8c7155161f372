"""What LoGiC decided, shown to a person: console table, curve, and one self-contained HTML page.

Everything here reads the records that `race-jax logic` writes: one JSON object per line, one per
trajectory and threshold.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from race_jax import jsonl
from race_jax.report_page import render_page
from race_jax.report_view import Record, number

MAX_TRAJECTORIES = 500
"""How many transcripts a page holds unless told otherwise; totals always cover every record."""

REMEDY = "make such a file with `race-jax logic --model DIR --trajectories FILE --out FILE`"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_threshold(value: object) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0  # type: ignore[arg-type]


def _each(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(test(item) for item in value)


def _or_null(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or test(value)


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


_Rule = tuple[str, bool, Callable[[object], bool], str]
"""Key, whether a record must have it, test of its value, and what the value should be."""

_RECORD_RULES: tuple[_Rule, ...] = (
    ("id", True, lambda v: isinstance(v, str) and v != "", "a text that is not empty"),
    ("epsilon", True, _is_threshold, "a finite number of at least 0"),
    ("turns", True, lambda v: _each(_is(Mapping))(v) and v != [], "a list of one object per turn"),
    ("model", False, _or_null(_is(str)), "a text"),
    ("dtype", False, _or_null(_is(str)), "a text"),
    ("skip_form", False, _or_null(_is(str)), "a text"),
    ("noise_floor", False, _or_null(_is_number), "a number"),
    ("loglik_full", False, _or_null(_each(_or_null(_is_number))), "a list of numbers"),
    ("loglik_final", False, _or_null(_each(_or_null(_is_number))), "a list of numbers"),
    ("tokens_forwarded", False, _or_null(_is_count), "a count"),
    ("tokens_minimum", False, _or_null(_is_count), "a count"),
    ("tokens_naive", False, _or_null(_is_count), "a count"),
    ("messages", False, _or_null(_each(_is_message)), "a list of chat messages with a role each"),
    ("original_reasoning", False, _or_null(_each(_or_null(_is(str)))), "a list of texts"),
    ("success", False, _or_null(_is(bool)), "true, false or null"),
    ("reward", False, _or_null(_is_number), "a number"),
)
_TURN_RULES: tuple[_Rule, ...] = (
    ("decision", True, lambda v: v in ("THINK", "SKIP"), '"THINK" or "SKIP"'),
    ("tested", False, _is(bool), "true or false"),
    ("uncertain", False, _is(bool), "true or false"),
    ("max_decrease", False, _or_null(_is_number), "a number or null"),
    ("reasoning_tokens", False, _is_count, "a count"),
    ("action_tokens", False, _is_count, "a count"),
)


def _broken_rule(value: Mapping[str, Any], rules: Sequence[_Rule], where: str = "") -> str:
    for key, needed, test, words in rules:
        if key not in value:
            if needed:
                return f"{where}key `{key}` is missing"
        elif not test(value[key]):
            shown = repr(value[key])
            shown = shown if len(shown) <= 60 else shown[:60] + "..."
            return f"{where}key `{key}` is {shown}, not {words}"
    return ""


def find_fault(record: object) -> str:
    """The first rule of the output format that `record` breaks, in words; empty if none.

    Only `id`, `epsilon` and `turns`, with a `decision` each, must be present; what else is there
    must be of its kind.
    """
    if not isinstance(record, Mapping):
        return f"the line holds {type(record).__name__}, not an object"
    fault = _broken_rule(record, _RECORD_RULES)
    if fault:
        return fault
    turns = record["turns"]
    for index, turn in enumerate(turns, 1):
        where = f"turn {index}: "
        fault = _broken_rule(turn, _TURN_RULES, where)
        if fault:
            return fault
        if turn.get("turn", index) != index:
            return f"{where}key `turn` is {turn['turn']!r}; turns are numbered from 1 in order"
        worst = turn.get("worst_turn")
        if worst is not None and not (_is_count(worst) and index <= worst <= len(turns)):
            return f"{where}key `worst_turn` is {worst!r}, not a turn from here to {len(turns)}"
    return _decreases_fault(record.get("decreases"), len(turns))


def _decreases_fault(decreases: object, turns: int) -> str:
    if decreases is None:
        return ""
    if not isinstance(decreases, Mapping):
        return "key `decreases` is not an object with one list per tested turn"
    for key, values in decreases.items():
        turn = int(key) if key.isascii() and key.isdigit() and len(key) < 7 else 0
        if not 1 <= turn <= turns:
            return f"key `decreases` has the key {key!r}, not a turn from 1 to {turns}"
        if not _each(_or_null(_is_number))(values) or len(values) > turns - turn + 1:
            return (
                f"key `decreases`, turn {turn}: not a list of at most {turns - turn + 1} "
                "numbers or nulls"
            )
    return ""


def read_records(path: str | os.PathLike[str], *, faults: list[str] | None = None) -> list[Record]:
    """Read a LoGiC output file.

    Args:
        path: The JSONL file.
        faults: Receives one sentence per line that was skipped, naming line and rule. Without it
            each becomes a warning.

    Returns:
        The good records in file order, at most one per trajectory and threshold.

    Raises:
        ValueError: No such file, an empty file, or no line of it is LoGiC output.
    """
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"{source}: there is no such file; {REMEDY}")
    records: list[Record] = []
    found: list[str] = []
    seen: dict[tuple[str, float], int] = {}
    for index, line in jsonl.lines(source):
        if line is not None and not line.strip():
            continue
        record, fault = _parse(line)
        if not fault:
            key = (record["id"], float(record["epsilon"]))
            if key in seen:
                fault = f"repeats {key[0]!r} at epsilon {key[1]:g} from line {seen[key]}"
            seen.setdefault(key, index)
        if fault:
            found.append(f"{source} line {index}: {fault}")
        else:
            records.append(record)
    if not records:
        reason = f"{found[0]}; no line is" if found else f"{source}: the file is empty, not"
        raise ValueError(f"{reason} LoGiC output; {REMEDY}")
    for fault in found:
        if faults is None:
            warnings.warn(f"{fault}; skipped", stacklevel=2)
        else:
            faults.append(fault)
    return records


def _parse(line: bytes | None) -> tuple[Any, str]:
    if line is None:
        return None, "longer than a line can be"
    try:
        # Laxer than `jsonl.loads`: a page can show half of a surrogate pair, training cannot.
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"byte {error.start + 1} is not UTF-8"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"
    return record, find_fault(record)


@dataclasses.dataclass(frozen=True)
class EpsilonRow:
    """Totals of all trajectories at one threshold.

    Attributes:
        epsilon: Threshold, nats per token.
        trajectories: Number of records.
        turns: Number of turns.
        tested: Turns whose removal was tried.
        skipped: Turns without reasoning in the result, removed or without it from the start.
        uncertain: Decisions within the noise floor of the threshold.
        reasoning_before: Reasoning tokens of the trajectories as they came.
        reasoning_after: Reasoning tokens of the THINK turns; the skip form is not counted.
        tokens_forwarded: Tokens given to the model, with `tokens_minimum` and `tokens_naive` over
            the records that have all three; None when no record has.
        tokens_minimum: The fewest that an exact run forwards.
        tokens_naive: What one full pass per candidate forwards.
    """

    epsilon: float
    trajectories: int
    turns: int
    tested: int
    skipped: int
    uncertain: int
    reasoning_before: int
    reasoning_after: int
    tokens_forwarded: int | None
    tokens_minimum: int | None
    tokens_naive: int | None

    @property
    def skip_share(self) -> float:
        """SKIP turns over turns, 0 to 1."""
        return self.skipped / self.turns if self.turns else 0.0

    @property
    def saved_share(self) -> float:
        """Share of the reasoning tokens that went, 0 to 1; 0 when there were none."""
        if not self.reasoning_before:
            return 0.0
        return 1.0 - self.reasoning_after / self.reasoning_before


def summarise(records: Sequence[Record]) -> list[EpsilonRow]:
    """Totals per threshold, the smallest threshold first.

    Shares are ratios of sums over all trajectories, not means of each trajectory's share.

    Args:
        records: Records of any number of trajectories and thresholds.

    Returns:
        One row per threshold.
    """
    groups: dict[float, list[Record]] = {}
    for record in records:
        groups.setdefault(float(record["epsilon"]), []).append(record)
    return [_totals(epsilon, groups[epsilon]) for epsilon in sorted(groups)]


def _totals(epsilon: float, records: Sequence[Record]) -> EpsilonRow:
    turns = [turn for record in records for turn in record["turns"]]
    work_keys = ("tokens_forwarded", "tokens_minimum", "tokens_naive")
    measured = [r for r in records if all(r.get(key) is not None for key in work_keys)]
    work = {key: sum(r[key] for r in measured) if measured else None for key in work_keys}
    return EpsilonRow(
        epsilon=epsilon,
        trajectories=len(records),
        turns=len(turns),
        tested=sum(bool(turn.get("tested")) for turn in turns),
        skipped=sum(turn["decision"] == "SKIP" for turn in turns),
        uncertain=sum(bool(turn.get("uncertain")) for turn in turns),
        reasoning_before=sum(turn.get("reasoning_tokens", 0) for turn in turns),
        reasoning_after=sum(
            turn.get("reasoning_tokens", 0) for turn in turns if turn["decision"] == "THINK"
        ),
        **work,
    )


def summary_table(records: Sequence[Record]) -> Table:
    """The totals per threshold as a table for the console; fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0), title="LoGiC by threshold")
    for heading in ("epsilon", "traj.", "turns", "tested", "skipped", "reasoning\ntokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("saved", "un-\ncertain", "forwarded\n/ minimum"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summarise(records):
        table.add_row(
            number(row.epsilon, 6),
            f"{row.trajectories:,}",
            f"{row.turns:,}",
            f"{row.tested:,}",
            f"{row.skip_share:.1%}",
            f"{row.reasoning_before:,} → {row.reasoning_after:,}",
            f"{row.saved_share:.1%}",
            f"{row.uncertain:,}",
            _ratio(row.tokens_forwarded, row.tokens_minimum),
        )
    return table


def _ratio(above: int | None, below: int | None) -> str:
    return f"{above / below:.2f}" if above is not None and below else "–"


def plot_sweep(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw skip share and reasoning tokens saved against the threshold, as a PNG.

    Args:
        records: Records at one threshold or more.
        path: The image to write.

    Raises:
        ValueError: No records.
        OSError: The file cannot be written.
    """
    # A figure of its own, not pyplot's: no global state, no display, no import cost elsewhere.
    from matplotlib.figure import Figure

    rows = summarise(records)
    if not rows:
        raise ValueError("there are no records to plot; run `race-jax logic` first")
    figure = Figure(figsize=(6.4, 3.8), dpi=160, layout="constrained")
    axes = figure.subplots()
    epsilons = [row.epsilon for row in rows]
    if epsilons[0] > 0:
        axes.set_xscale("log")
    else:
        smallest = next((value for value in epsilons if value > 0), 1.0)
        axes.set_xscale("symlog", linthresh=smallest)
    shares = [100 * row.skip_share for row in rows]
    saved = [100 * row.saved_share for row in rows]
    axes.plot(epsilons, shares, "o-", color="#1b5e93", label="turns skipped")
    axes.plot(epsilons, saved, "s--", color="#8f4a00", label="reasoning tokens saved")
    axes.set(xlabel="epsilon, nats per token", ylabel="share, %", ylim=(-2, 102))
    axes.grid(True, color="#d8dde2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    with jsonl.replacing(Path(path)) as image:
        figure.savefig(image, format="png")


def write_report(
    records: Sequence[Record],
    out: str | os.PathLike[str],
    *,
    title: str = "LoGiC report",
    source: str = "",
    faults: Sequence[str] = (),
    max_trajectories: int = MAX_TRAJECTORIES,
) -> None:
    """Write the page: totals, the curve over thresholds, and every trajectory's transcript.

    The page loads nothing from anywhere and is written to a temporary name first, so that a failure
    leaves an earlier report as it was.

    Args:
        records: Records of any number of trajectories and thresholds.
        out: The HTML file to write.
        title: Heading of the page.
        source: Where the records came from, named on the page.
        faults: Sentences about lines that were skipped, listed on the page.
        max_trajectories: How many transcripts to include, first in file order; totals cover all.

    Raises:
        ValueError: No records, a broken record, or `max_trajectories` below 1.
        OSError: The file cannot be written.
    """
    if not records:
        raise ValueError(f"there are no records to report on; {REMEDY}")
    if max_trajectories < 1:
        raise ValueError(f"max_trajectories {max_trajectories}: show at least 1 trajectory")
    for index, record in enumerate(records, 1):
        fault = find_fault(record)
        if fault:
            raise ValueError(f"record {index}: {fault}; not LoGiC output; {REMEDY}")
    pieces = render_page(
        records,
        summarise(records),
        title=title,
        source=source,
        faults=faults,
        max_trajectories=max_trajectories,
    )
    with jsonl.replacing(Path(out)) as page:
        for piece in pieces:
            page.write(piece.encode())
