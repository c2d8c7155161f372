"""Trajectories to training examples, and examples to rows of one length.

A row holds several examples one after the other, each a segment of its own: `segment_ids` count
from 1 in a row, 0 is padding, and `positions` start at 0 in every segment. Attention, recurrent
states and the loss must not look across; `race_jax.models` keeps to that.

The label shift stands here, in `next_in_segment`, and nowhere else: what a row says about targets
at place t is about token t + 1 of the same segment. A segment's last place has no target.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from race_jax.chat import Renderer
from race_jax.turns import OPENER
from race_jax.types import TokenTrajectory

OTHER, REASONING, DECISION, ACTION = range(4)
"""Kinds of tokens: not sampled by the policy; sampled up to and including the closed block, but for
the one token that decides whether the turn reasons at all; that token; the action."""

KINDS = ("other", "reasoning", "decision", "action")
"""Their names, by number."""


class Example(NamedTuple):
    """A trajectory as it is trained on, up to the end of its last action.

    Attributes:
        tokens: int32 [n].
        kinds: uint8 [n], what each token is. The policy sampled those that are not `OTHER`.
        turns: int32 [turns, 3]: a turn's first sampled token, the end of its action, and 1 if it
            was taken without reasoning.
    """

    tokens: np.ndarray
    kinds: np.ndarray
    turns: np.ndarray


def decision_place(renderer: Renderer) -> int:
    """The place, among a turn's own tokens, where closing at once and reasoning part ways.

    0 where the generation prompt opens the block: the first sampled token is `</think>` or it is
    not. With the family's own empty block both begin with the opener, or a part of it.
    """
    opener = renderer.codec.encode(OPENER)[: renderer.opener_len]
    pairs = zip(opener, renderer.skip_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def closing_id(renderer: Renderer) -> int:
    """The token that stands at `decision_place` in a turn without reasoning."""
    return renderer.skip_ids[decision_place(renderer)]


def make_example(tokens: TokenTrajectory, place: int, removed: Collection[int] = ()) -> Example:
    """Lay a trajectory out for training.

    Every token that a policy samples is in the loss, and no other: reasoning with what closes it,
    or the skip form; the action with its end-of-turn token. Prompt, generation prompts,
    observations and messages that are no turns are not. What follows the last action is left out.

    Args:
        tokens: The trajectory.
        place: As `decision_place` gives it.
        removed: Turn indices (from 0) that are taken without their reasoning.
    """
    ids = list(tokens.prompt)
    kinds = [OTHER] * len(ids)
    turns = []
    for t, turn in enumerate(tokens.turns):
        skips = t in removed or not turn.reasoning
        opening = turn.skip if skips else turn.reasoning
        begin = len(ids)
        ids += opening + turn.action
        kinds += [REASONING] * len(opening) + [ACTION] * len(turn.action)
        if place < len(opening):
            kinds[begin + place] = DECISION
        turns.append((begin, len(ids), int(skips)))
        if t + 1 < len(tokens.turns):
            ids += turn.observation
            kinds += [OTHER] * len(turn.observation)
    return Example(
        np.asarray(ids, np.int32), np.asarray(kinds, np.uint8), np.asarray(turns, np.int32)
    )


def plan_rows(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Which examples share a row: best fit, longest first.

    Args:
        lengths: Tokens of each example, from 1 to `capacity`.
        capacity: Tokens of a row.

    Returns:
        Rows of indices into `lengths`, each index once. Rows and the indices in them are in the
        order of the examples, so that shuffled examples give shuffled rows. The same lengths give
        the same rows on every host.

    Raises:
        ValueError: An example has no tokens or does not fit.
    """
    lengths = np.asarray(lengths, np.int64)
    bad = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if bad.size:
        raise ValueError(
            f"example {bad[0]} has {lengths[bad[0]]} tokens; rows hold from 1 to {capacity}"
        )
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), rising
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            rows.append([])
            left, row = capacity, len(rows) - 1
        else:
            left, row = free.pop(at)
        rows[row].append(index)
        if left > length:
            bisect.insort(free, (left - length, row))
    return sorted(sorted(row) for row in rows)


def next_in_segment(values: np.ndarray, segment_ids: np.ndarray, fill: int = 0) -> np.ndarray:
    """values[..., t + 1] at t, and `fill` where t + 1 is in another segment or t is padding.

    Args:
        values: [..., T].
        segment_ids: int32 [..., T], 0 at padding.
        fill: Stands where there is no next token.
    """
    out = np.full_like(values, fill)
    same = (segment_ids[..., 1:] == segment_ids[..., :-1]) & (segment_ids[..., 1:] > 0)
    out[..., :-1] = np.where(same, values[..., 1:], fill)
    return out


def fill_rows(
    rows: Sequence[Sequence[Mapping[str, np.ndarray]]], length: int
) -> dict[str, np.ndarray]:
    """Examples to arrays [B, T].

    Args:
        rows: For each row the examples in it: `tokens` int32 [n], `kinds` uint8 [n], and any other
            arrays [n] that say something about each token as a token, such as the log-probability
            it was sampled with. An example that is no single sequence says how it lies:
            `positions` int32, by default counted from 0; `ends` int32, the first place of the
            example that does not see the token any more, by default its length; `pieces` int32
            from 1, by default one, where the last token of a piece has no next one.
        length: T.

    Returns:
        `tokens`, `positions`, `segment_ids` int32; `targets` int32, the next token of the segment
        or piece; `loss_mask` bool, the target was sampled by the policy; `kinds` int32 and all
        others, shifted with the targets. `ends` int32 of the row, j + 1 at padding, if an example
        brings some.

    Raises:
        ValueError: A row's examples do not fit.
    """
    shape = (len(rows), length)
    kinds_of = {"tokens": np.int32, "kinds": np.uint8, "positions": np.int32, "pieces": np.int32}
    names = {name: x.dtype for row in rows for example in row for name, x in example.items()}
    of_token = {name: np.zeros(shape, dtype) for name, dtype in (names | kinds_of).items()}
    if "ends" in of_token:
        of_token["ends"][:] = np.arange(1, length + 1)
    segment_ids = np.zeros(shape, np.int32)
    for r, row in enumerate(rows):
        at = pieces = 0
        for segment, example in enumerate(row, 1):
            count = len(example["tokens"])
            end = at + count
            if end > length:
                raise ValueError(f"row {r}: its examples have more than {length} tokens together")
            given = {"positions": np.arange(count), "pieces": np.ones(count, np.int32), **example}
            if "ends" in of_token:
                given["ends"] = given.get("ends", count) + at
            # The pieces of a row are numbered on from those of the example before.
            given["pieces"] = given["pieces"] + pieces
            for name, values in given.items():
                of_token[name][r, at:end] = values
            segment_ids[r, at:end] = segment
            at, pieces = end, int(given["pieces"][-1]) if count else pieces
    laid = {n: of_token.pop(n) for n in ("tokens", "positions", "ends") if n in of_token}
    pieces_of = of_token.pop("pieces")
    shifted = {name: next_in_segment(x, pieces_of) for name, x in of_token.items()}
    kinds = shifted.pop("kinds").astype(np.int32)
    return {
        **laid,
        "targets": next_in_segment(laid["tokens"], pieces_of),
        "segment_ids": segment_ids,
        "loss_mask": kinds != OTHER,
        "kinds": kinds,
        **shifted,
    }
