"""What the story comes to: LoGiC against the construction, and the models side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from race_jax import jsonl
from race_jax.logic.records import THINK
from race_jax.rollout.measures import Measures, measure
from race_jax.rollout.results import read_rollouts


@dataclasses.dataclass(frozen=True)
class Row:
    """A model's evaluation.

    Attributes:
        name: What the model is called.
        all: Over all episodes.
        solved: Over those that solved their task: a failed one ends early and so looks cheap.
    """

    name: str
    all: Measures
    solved: Measures

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"name": self.name, "all": self.all.as_dict(), "solved": self.solved.as_dict()}


def read_row(name: str, path: str | Path) -> Row:
    """Measure the rollouts of a file.

    Raises:
        ValueError: It holds something else.
        OSError: It cannot be read.
    """
    solved = (rollout for rollout in read_rollouts(path) if rollout.success)
    return Row(name, measure(read_rollouts(path), name), measure(solved, name))


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Write all measures as JSON, replacing the file when they are whole."""
    with jsonl.replacing(path) as file:
        file.write(json.dumps([row.as_dict() for row in rows], indent=1).encode())


def story_table(rows: Sequence[Row], title: str) -> Table:
    """Success and reasoning tokens of models side by side, in rising order of training."""
    counts = {row.all.episodes for row in rows}
    episodes = " or ".join(map(str, sorted(counts)))
    table = Table(
        title=title,
        caption=f"{episodes} episodes each; 95 %: interval of the success rate; reasoning tokens "
        "per episode, of all and of solved ones (a failed one ends early and looks cheap)",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("")
    for column in ("success", "95 %", "reasoning", "of solved", "skipped turns", "turns"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row.all.interval
        table.add_row(
            Text(row.name),
            f"{100 * row.all.success:.1f} %",
            f"{100 * low:.0f}-{100 * high:.0f}",
            f"{row.all.reasoning_tokens:.1f}",
            f"{row.solved.reasoning_tokens:.1f}" if row.solved.episodes else "-",
            f"{100 * row.all.skip_ratio:.1f} %",
            f"{row.all.turns:.1f}",
        )
    return table


@dataclasses.dataclass(frozen=True)
class CoverCounts:
    """LoGiC's covers at one threshold against the turns that need their reasoning.

    Attributes:
        epsilon: The threshold, nats per token.
        turns: All turns.
        skipped: Those without reasoning in the cover.
        before: Reasoning tokens of all turns.
        after: Those that the cover keeps.
        needed: Tested turns that need their reasoning.
        kept: Tested turns that keep it.
        hits: Tested turns that need it and keep it.
    """

    epsilon: float
    turns: int
    skipped: int
    before: int
    after: int
    needed: int
    kept: int
    hits: int

    @property
    def recall(self) -> float | None:
        """Needed turns kept / needed turns."""
        return self.hits / self.needed if self.needed else None

    @property
    def precision(self) -> float | None:
        """Needed turns kept / turns kept."""
        return self.hits / self.kept if self.kept else None


def count_covers(
    records: Sequence[Mapping[str, Any]], needed: Mapping[str, Sequence[bool]]
) -> list[CoverCounts]:
    """Compare covers with the construction, one result per threshold, rising.

    Args:
        records: LoGiC's output.
        needed: For each trajectory's id, whether each turn needs its reasoning.
    """
    found = []
    for epsilon in sorted({record["epsilon"] for record in records}):
        rows = [
            (turn, need)
            for record in records
            if record["epsilon"] == epsilon
            for turn, need in zip(record["turns"], needed[record["id"]], strict=True)
        ]
        tested = [(turn["decision"] == THINK, need) for turn, need in rows if turn["tested"]]
        found.append(
            CoverCounts(
                epsilon,
                turns=len(rows),
                skipped=sum(turn["decision"] != THINK for turn, _ in rows),
                before=sum(turn["reasoning_tokens"] for turn, _ in rows),
                after=sum(t["reasoning_tokens"] for t, _ in rows if t["decision"] == THINK),
                needed=sum(need for _, need in tested),
                kept=sum(kept for kept, _ in tested),
                hits=sum(kept and need for kept, need in tested),
            )
        )
    return found


def cover_table(
    records: Sequence[Mapping[str, Any]], needed: Mapping[str, Sequence[bool]]
) -> Table:
    """Per threshold: what LoGiC saves, and how far its THINK turns are the needed ones.

    recall = needed turns kept / needed turns; precision = needed turns kept / turns kept; both over
    the turns that LoGiC tested, which leaves out every first turn.

    Args:
        records: LoGiC's output.
        needed: For each trajectory's id, whether each turn needs its reasoning.
    """
    table = Table(
        title="Against the turns that need their reasoning by construction",
        caption="recall: needed turns that are kept; precision: kept turns that are needed;\n"
        "both of the tested turns, so without each first one",
    )
    for column in ("epsilon", "turns skipped", "reasoning tokens saved", "recall", "precision"):
        table.add_column(column, justify="right")
    for count in count_covers(records, needed):
        table.add_row(
            f"{count.epsilon:g}",
            _percent(count.skipped / count.turns if count.turns else None),
            _percent((count.before - count.after) / count.before if count.before else None),
            _percent(count.recall),
            _percent(count.precision),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
