r"""Sampled ids of a turn, cut where reasoning ends; nothing is decoded and encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from race_jax.chat import Renderer
from race_jax.tokenizer import THINK
from race_jax.turns import OPENER


class Spans(NamedTuple):
    r"""The ids of one turn in order: `reasoning` or `skip`, then `action`.

    Attributes:
        reasoning: Reasoning through its `</think>\n\n`; empty if the block holds none.
        skip: An empty block as sampled, else empty.
        action: All else, never empty. A turn that ends before its action begins has no block that
            could be removed, so all its ids stand here.
        begun: Whether the action was begun.
    """

    reasoning: tuple[int, ...]
    skip: tuple[int, ...]
    action: tuple[int, ...]
    begun: bool


def split_sampled(sampled: Sequence[int], renderer: Renderer) -> Spans:
    r"""Cut a turn at the first `</think>` id.

    Args:
        sampled: All ids of the turn, its stop id included.
        renderer: Of the context that they continue; it says whether that opened the block.
    """
    ids = tuple(sampled)
    # Only a block that begins as the renderer's do could be put in place of another one.
    begins = renderer.codec.encode(OPENER), renderer.skip_ids
    opened = renderer.skip_form == "close" or any(ids[: len(b)] == b for b in begins)
    if not opened:
        return Spans((), (), ids, True)
    if renderer.end_of_reasoning not in ids:
        return Spans((), (), ids, False)
    end = ids.index(renderer.end_of_reasoning) + 1
    thought = renderer.codec.decode(ids[: end - 1]).replace(THINK, "")
    # The blank line belongs to the closing, in however many tokens it was sampled.
    start = end
    while end < len(ids) and "\n\n".startswith(renderer.codec.decode(ids[start : end + 1])):
        end += 1
    block, action = ids[:end], ids[end:]
    if not action:
        return Spans((), (), ids, False)
    return Spans(block, (), action, True) if thought.strip() else Spans((), block, action, True)
