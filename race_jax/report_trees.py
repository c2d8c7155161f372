"""Rollout trees drawn for a person: states and actions of a task on the page of rollouts.

A tree is drawn as its episodes grew: the first one is the top row, and each further one leaves a
row where it forked. Nodes link to the turns of the transcripts on the same page, so the drawing
holds no text of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from race_jax.carl.advantages import EdgeCredit
from race_jax.carl.criticality import tool_of
from race_jax.carl.tree import Tree, credit_trees, rebuild
from race_jax.report_view import number
from race_jax.rollout.results import Rollout

COLUMN, ROW, MARGIN = 76, 34, 26
"""Pixels between turns, between rows, and around the drawing."""
BEND = 8
"""Pixels of the bend where a branch leaves its state."""


def render_trees(
    environment: jinja2.Environment, rollouts: Sequence[Rollout], shown: int, faults: list[str]
) -> Markup | None:
    """The page's section of trees.

    Args:
        environment: From `report_page.page_environment`.
        rollouts: All of a file.
        shown: How many of them, from the first on, have a transcript on the page.
        faults: Receives why trees cannot be drawn.

    Returns:
        Markup; None if no rollout forks from another one. Trees that cannot be made, since a
        rollout is missing, are told of in a sentence.
    """
    if not any(rollout.fork for rollout in rollouts):
        return None
    places = {rollout.id: n for n, rollout in enumerate(rollouts[:shown])}
    fault, views = "", []
    try:
        trees = [tree for tree in rebuild(rollouts).values() if tree.edges]
        credits = credit_trees(trees)
    except ValueError as error:
        fault = f"The trees cannot be drawn: {error}"
        faults.append(fault)
    else:
        pairs = zip(trees, credits, strict=True)
        views = [view_tree(n, tree, credit, places) for n, (tree, credit) in enumerate(pairs)]
    template = environment.get_template("report_trees.html.jinja")
    return Markup(template.render(trees=views, fault=fault))


def view_tree(
    index: int, tree: Tree, credit: EdgeCredit, places: Mapping[str, int]
) -> dict[str, Any]:
    """All that the page shows of one tree.

    Args:
        index: Its place on the page, from 0.
        tree: With at least one edge.
        credit: Of its nodes.
        places: By rollout, the place of its transcript on the page.

    Returns:
        Plain values for the template.
    """
    rows = _rows(tree.children)
    values = np.asarray(credit.values, np.float64)
    low, span = float(values.min()), float(np.ptp(values)) or 1.0
    most = max(node.entropy for node in tree.nodes) or 1.0
    nodes = []
    for n, node in enumerate(tree.nodes):
        rollout = tree.rollouts[node.sample]
        place = places.get(rollout.id) if n else None
        nodes.append(
            {
                "index": n,
                "node": node,
                "leaf": node.reward is not None,
                "x": MARGIN + COLUMN * node.turn,
                "y": MARGIN + ROW * rows[n],
                "value": float(values[n]),
                "shade": round(10 * (float(values[n]) - low) / span),
                "radius": round(5 + 5 * node.entropy / most, 1),
                "advantage": float(credit.advantages[n]),
                "trained": bool(credit.trainable[n]),
                "tool": tool_of(rollout, node.turn - 1) if n else "",
                "rollout": rollout.id,
                "link": None if place is None else f"r{place}-{node.turn}",
                "path": _edge(tree, rows, n),
                "label": _label(n, tree, float(values[n]), credit),
            }
        )
    return {
        "index": index,
        "tree": tree,
        "nodes": nodes,
        "width": 2 * MARGIN + COLUMN * max(node.turn for node in tree.nodes) + 30,
        "height": 2 * MARGIN + ROW * max(rows),
        "leaves": len(tree.rollouts),
        "trained": int(credit.trainable.sum()),
        "value": float(values[0]),
        "linked": all(x["link"] for x in nodes[1:]),
    }


def _rows(children: Sequence[Sequence[int]]) -> list[int]:
    """The row of each node: its first child stays in its own, the others begin further ones."""
    rows, used, stack = [0] * len(children), 0, [0]
    while stack:
        node = stack.pop()
        stack += reversed(children[node])
        if children[node]:
            rows[children[node][0]] = rows[node]
        elif stack:
            used += 1
            rows[stack[-1]] = used
    return rows


def _edge(tree: Tree, rows: Sequence[int], node: int) -> str:
    """The line into a node, as an SVG path."""
    above = tree.nodes[node].parent
    if above < 0:
        return ""
    x = MARGIN + COLUMN * tree.nodes[above].turn
    begin, end = (MARGIN + ROW * rows[n] for n in (above, node))
    if begin == end:
        return f"M{x} {begin}h{COLUMN}"
    return f"M{x} {begin}V{end - BEND}q0 {BEND} {BEND} {BEND}h{COLUMN - BEND}"


def _label(n: int, tree: Tree, value: float, credit: EdgeCredit) -> str:
    """A node in words, for those who do not see it."""
    node = tree.nodes[n]
    words = [f"after turn {node.turn}" if n else "the beginning", f"value {number(value)}"]
    if node.reward is None:
        words += [f"entropy {number(node.entropy)} nats", f"actions {node.actions}"]
        words.append(f"density {number(node.density)}")
    else:
        words[0] = f"the end after turn {node.turn}"
    if n:
        words.append(f"advantage {number(float(credit.advantages[n]))}")
        words.append("trained" if credit.trainable[n] else "not trained")
    return ", ".join(words)
