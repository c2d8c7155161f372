"""Which tokens go into the next step: seats, how many, and how a step's rows are given out."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from race_jax.logic.search import Search
from race_jax.types import LanguageModel, Params


@dataclasses.dataclass(eq=False)
class Seat:
    """A search in its slot, with what must be put back if the candidate fails.

    Attributes:
        search: The search.
        slot: Its slot of the cache.
        undo: Cache rows that the candidate wrote over.
        states: Recurrent states where the tests of later turns begin, by turn.
        fresh: The same, of the candidate.
    """

    search: Search
    slot: int
    undo: list[tuple[Any, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    states: dict[int, Any] = dataclasses.field(default_factory=dict)
    fresh: dict[int, Any] = dataclasses.field(default_factory=dict)

    def adopt(self) -> None:
        """Take the candidate's states for the trajectory's own."""
        self.states, self.fresh = {**self.states, **self.fresh}, {}


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of one step, and where its log-probabilities belong."""

    tokens: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    owners: list[Seat]
    targets: list[tuple[Seat, np.ndarray, np.ndarray]]


def plan(seats: Sequence[Seat], buckets: Sequence[int], row_tokens: int, spare: int) -> Batch:
    """Give out the rows of one step: what is sure first, then what is likely.

    Args:
        seats: Whoever may forward, in order of arrival; at least one.
        buckets: The row counts that have a program, rising.
        row_tokens: Tokens per row.
        spare: The slot that empty rows write to.

    Returns:
        The batch; the searches' cursors have moved behind it.
    """
    wanted = sum(_share(seats, buckets[-1], row_tokens).values())
    above = next(b for b in buckets if b >= wanted)
    below = max((b for b in buckets if b <= wanted), default=above)
    # A bucket that stays a tenth empty costs more than the rows that wait for the next step.
    bucket = above if wanted >= 0.9 * above else below
    share = _share(seats, bucket, row_tokens)
    for seat in sorted(seats, key=lambda seat: not seat.search.promising):
        if seat.search.turn is not None:
            _give(share, seat, seat.search.rest, bucket, row_tokens)
    return _lay_out(share, bucket, row_tokens, spare)


def _give(share: dict[Seat, int], seat: Seat, tokens: int, limit: int, row_tokens: int) -> None:
    """Raise a seat's rows to what `tokens` take, as far as the limit allows."""
    rows = -(-min(tokens, seat.search.reach) // row_tokens)
    room = limit - sum(share.values())
    share[seat] = max(share[seat], min(rows, share[seat] + room))


def _share(seats: Sequence[Seat], limit: int, row_tokens: int) -> dict[Seat, int]:
    """Rows per seat, at most `limit` together: candidates, first passes, then growing blocks."""
    share = dict.fromkeys(seats, 0)
    for seat in sorted(seats, key=lambda seat: seat.search.turn is None):
        _give(share, seat, seat.search.sure, limit, row_tokens)
    for seat in seats:
        if seat.search.promising:
            # Blocks that double: as much again as has already held.
            _give(share, seat, seat.search.cursor - seat.search.start, limit, row_tokens)
    return share


def _lay_out(share: dict[Seat, int], bucket: int, row_tokens: int, spare: int) -> Batch:
    """Write each seat's next rows into the arrays of a step."""
    tokens = np.zeros((bucket, row_tokens), np.int32)
    slots = np.full(bucket, spare, np.int32)
    starts = np.zeros(bucket, np.int32)
    counts = np.zeros(bucket, np.int32)
    owners: list[Seat] = []
    targets = []
    for seat, rows in share.items():
        if rows == 0:
            continue
        search = seat.search
        first, begin = len(owners), search.cursor
        taken = search.sequence.tokens[begin : begin + min(rows * row_tokens, search.reach)]
        tokens[first : first + rows].reshape(-1)[: len(taken)] = taken
        slots[first : first + rows] = seat.slot
        starts[first : first + rows] = begin + row_tokens * np.arange(rows)
        left = len(taken) - row_tokens * np.arange(rows)
        counts[first : first + rows] = np.minimum(left, row_tokens)
        owners += [seat] * rows
        aims = begin + 1 + np.flatnonzero(search.is_target[begin + 1 : begin + 1 + len(taken)])
        targets.append((seat, first * row_tokens + aims - 1 - begin, aims))
        search.advance(len(taken), rows * row_tokens)
    return Batch(tokens, slots, starts, counts, owners, targets)


def fit_slots(
    model: LanguageModel,
    params: Params,
    length: int,
    slots: int,
    epsilons: int = 1,
    turns: int = 0,
) -> int:
    """How many of `slots` caches fit, with those of parked searches counted in.

    Args:
        model: Pure forward functions.
        params: The model's parameters.
        length: Cache length in tokens.
        slots: The most that are wanted.
        epsilons: Thresholds; where they part, each may hold a copy in host memory.
        turns: The most turns of a trajectory; a recurrent model keeps a state for each.

    Returns:
        Between 1 and `slots`: at most 0.3 of the free host memory, or half of what the
        accelerator has left.
    """
    cache = jax.eval_shape(lambda p: model.init_cache(p, 1, length), params)
    one = jax.ShapeDtypeStruct((1,), np.int32)
    each = _size(cache) / 2 + turns * _size(jax.eval_shape(model.read_states, cache, one))
    free = 0.3 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        left = 0.5 * (stats["bytes_limit"] - stats["bytes_in_use"])
        return int(min(max(left // each - 1, 1), max(free // (each * epsilons), 1), slots))
    # A candidate's undo copies and the spare slot double the need.
    return int(min(max(free // (each * (epsilons + 1)), 1), slots))


def _size(tree: Any) -> int:
    """Bytes of a tree of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
