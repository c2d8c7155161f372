"""The report's page: the frame around the trajectories, and the curve over thresholds.

The templates hold all markup but the heat maps' cells, of which there are too many for a template's
loop. Every text passes through `visible` and is escaped by Jinja on its way out.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from race_jax.report_view import Record, number, percent, view_trajectory, visible


def curve(rows: Sequence[Any]) -> dict[str, Any] | None:
    """Coordinates of the curve over thresholds, log x axis; None with fewer than two thresholds.

    A threshold of 0 has no place on a log axis: it stands at the left edge under its own label.
    """
    positive = [row.epsilon for row in rows if row.epsilon > 0]
    if len(rows) < 2 or not positive:
        return None
    left, right, top, bottom = 40.0, 348.0, 12.0, 186.0
    start = left + (36 if rows[0].epsilon == 0 else 8)
    low, high = math.log10(positive[0]), math.log10(positive[-1])
    span = high - low or 1.0

    def x_of(epsilon: float) -> float:
        if epsilon == 0:
            return left + 8
        return round(start + (right - 8 - start) * (math.log10(epsilon) - low) / span, 1)

    def y_of(share: float) -> float:
        return round(bottom - (bottom - top) * share, 1)

    decades = [10.0**p for p in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    marks = decades if len(decades) >= 2 else [positive[0], positive[-1]]
    ticks = [(x_of(value), f"{value:g}") for value in dict.fromkeys(marks)]
    if rows[0].epsilon == 0:
        ticks.insert(0, (x_of(0.0), "0"))
    points = [
        {
            "i": i,
            "x": x_of(row.epsilon),
            "skip": y_of(row.skip_share),
            "saved": y_of(row.saved_share),
            "row": row,
        }
        for i, row in enumerate(rows)
    ]
    return {
        "points": points,
        "skip": " ".join(f"{p['x']},{p['skip']}" for p in points),
        "saved": " ".join(f"{p['x']},{p['saved']}" for p in points),
        "ticks": ticks,
        "grid": [(y_of(v / 100), v) for v in (0, 25, 50, 75, 100)],
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
    }


def _facts(records: Sequence[Record], key: str) -> str:
    values = list(dict.fromkeys(r[key] for r in records if r.get(key) is not None))
    if all(isinstance(value, float) for value in values) and len(values) > 1:
        return f"{number(min(values))} to {number(max(values))}"
    shown = [number(value) if isinstance(value, float) else str(value) for value in values]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def page_environment() -> jinja2.Environment:
    """Where the pages' templates lie, and how text gets into them: visible and escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(number=number, percent=percent)
    return environment


def page_hash(text: str) -> str:
    """What the page's security policy calls this style or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render_page(
    records: Sequence[Record],
    rows: Sequence[Any],
    *,
    title: str,
    source: str,
    faults: Sequence[str],
    max_trajectories: int,
) -> Iterator[str]:
    """The page in pieces, so that a large one is never in memory as a whole.

    Args:
        records: Checked records.
        rows: Their totals per threshold, `race_jax.report.summarise`.
        title: Heading.
        source: Name of the file the records came from.
        faults: Sentences about skipped lines.
        max_trajectories: How many transcripts to include.

    Returns:
        Pieces of HTML.
    """
    place = {row.epsilon: i for i, row in enumerate(rows)}
    groups: dict[str, dict[int, Record]] = {}
    for record in records:
        groups.setdefault(record["id"], {})[place[float(record["epsilon"])]] = record
    # The page opens at the smallest threshold that removed something.
    chosen = next((i for i, r in enumerate(rows) if r.reasoning_after < r.reasoning_before), 0)
    environment = page_environment()
    style = environment.get_template("report.css.jinja").render(count=len(rows))
    script = environment.get_template("report.js.jinja").render()
    shown = list(groups.values())[:max_trajectories]
    return environment.get_template("report.html.jinja").generate(
        title=title,
        source=source,
        rows=rows,
        chosen=chosen,
        curve=curve(rows),
        facts=[
            ("File", source),
            ("Scorer", _facts(records, "model")),
            ("Precision", _facts(records, "dtype")),
            ("Skip form", _facts(records, "skip_form")),
            ("Noise floor", _facts(records, "noise_floor")),
        ],
        mixed=[
            words
            for key, words in (
                ("model", "scorers"),
                ("dtype", "dtypes"),
                ("skip_form", "skip forms"),
            )
            if len({r[key] for r in records if r.get(key) is not None}) > 1
        ],
        faults=faults,
        total=len(groups),
        trajectories=(
            view_trajectory(n, dict(sorted(group.items()))) for n, group in enumerate(shown)
        ),
        shown=len(shown),
        style=Markup(style),
        script=Markup(script),
        style_hash=page_hash(style),
        script_hash=page_hash(script),
    )
