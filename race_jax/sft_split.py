"""Which tokenised trajectories are trained on, which are held out, and what went in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from rich.table import Table

from race_jax.packing import KINDS, OTHER
from race_jax.sft_cache import Cache

OverLong = Literal["drop", "cut"]

Stats = dict[str, float]


class Split(NamedTuple):
    """Indices into a cache.

    Attributes:
        lengths: int64 [N], how many of its tokens each example shows; 0 if it is dropped.
        turns: int64 [N], how many of its turns.
        train: int64, examples to train on.
        held_out: int64, examples kept from training.
        cut: Number of examples that lost turns at their end.
        dropped: Number of examples that do not fit in a row.
    """

    lengths: np.ndarray
    turns: np.ndarray
    train: np.ndarray
    held_out: np.ndarray
    cut: int
    dropped: int


def split_examples(cache: Cache, *, length: int, over_long: OverLong, share: float) -> Split:
    """Bring examples to at most `length` tokens, and set some aside.

    Args:
        cache: The examples.
        length: Tokens of a row.
        over_long: `drop` an example that is longer, or `cut` it after the last turn that fits.
        share: Share of ids to hold out. Whether an id is held out depends on the id alone, so that
            more data moves no trajectory from one side to the other.

    Raises:
        ValueError: A turn does not fit in any row, or nothing is left to train on.
    """
    _check_turns(cache, length)
    full = np.diff(cache.token_ends, prepend=0)
    lengths, turns = full.copy(), np.diff(cache.turn_ends, prepend=0)
    cut = 0
    for index in np.flatnonzero(full > length):
        lengths[index] = turns[index] = 0
        if over_long == "cut":
            begin = cache.turn_ends[index - 1] if index else 0
            ends = cache.turns[begin : cache.turn_ends[index], 1]
            turns[index] = fitting = int(np.searchsorted(ends, length, side="right"))
            lengths[index] = ends[fitting - 1] if fitting else 0
            cut += fitting > 0
    aside = np.fromiter((_is_held_out(name, share) for name in cache.names()), bool, len(cache))
    kept = lengths > 0
    split = Split(
        lengths,
        turns,
        np.flatnonzero(kept & ~aside),
        np.flatnonzero(kept & aside),
        cut,
        int(np.sum(~kept)),
    )
    if not len(split.train):
        if split.dropped == len(cache):
            remedy = f"data.length is {length} and the shortest has {full.min()} tokens; raise it"
            raise ValueError(f"all {len(cache)} trajectories are longer than a row: {remedy}")
        raise ValueError(
            f"all {len(split.held_out)} trajectories that fit are held out; lower data.held_out, "
            f"which is {share}"
        )
    return split


def _check_turns(cache: Cache, length: int) -> None:
    """Refuse a row length below the longest turn: no row could ever hold it."""
    sizes = cache.turns[:, 1] - cache.turns[:, 0]
    at = int(np.argmax(sizes))
    if sizes[at] <= length:
        return
    index = int(np.searchsorted(cache.turn_ends, at, side="right"))
    turn = at - int(cache.turn_ends[index - 1] if index else 0) + 1
    name = next(name for n, name in enumerate(cache.names()) if n == index)
    raise ValueError(
        f"data.length {length} is below the longest turn: turn {turn} of trajectory {name!r} has "
        f"{sizes[at]} tokens; raise data.length, or take the trajectory out of the file"
    )


def _is_held_out(name: str, share: float) -> bool:
    digest = hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def summarise(cache: Cache, split: Split) -> Stats:
    """What went in, in numbers; the turns and tokens are those that are trained on.

    Returns:
        `read`, `faults`, `failed`, `unknown`, `dropped`, `cut`, `other_ids`, `trajectories`,
        `held_out`, `turns`, `skip_turns`, `skip_share`, `tokens`, `policy_tokens`, and
        `policy_reasoning`, `policy_decision`, `policy_action`.
    """
    counts = cache.notes["counts"]
    first_turns = cache.turn_ends - np.diff(cache.turn_ends, prepend=0)
    skips_of = np.add.reduceat(cache.turns[:, 2], first_turns, dtype=np.int64)
    kinds = cache.totals[split.train].sum(axis=0)
    skips = int(skips_of[split.train].sum())
    full = np.diff(cache.token_ends, prepend=0)
    for index in split.train[split.lengths[split.train] < full[split.train]]:
        end = cache.token_ends[index]
        lost = cache.kinds[end - full[index] + split.lengths[index] : end]
        kinds -= np.bincount(lost, minlength=len(KINDS))
        last = cache.turn_ends[index]
        skips -= int(cache.turns[first_turns[index] + split.turns[index] : last, 2].sum())
    turns = int(split.turns[split.train].sum())
    sampled = {f"policy_{name}": int(n) for name, n in zip(KINDS, kinds, strict=True)}
    del sampled[f"policy_{KINDS[OTHER]}"]
    names = ("read", "faults", "failed", "unknown", "other_ids")
    return {
        **{name: counts.get(name, 0) for name in names},
        "dropped": split.dropped,
        "cut": split.cut,
        "trajectories": len(split.train),
        "held_out": len(split.held_out),
        "turns": turns,
        "skip_turns": skips,
        "skip_share": skips / turns,
        "tokens": int(kinds.sum()),
        "policy_tokens": sum(sampled.values()),
        **sampled,
    }


_ROWS = {
    "read": "trajectories in the file",
    "faults": "lines that cannot be used",
    "failed": "left out: failed",
    "unknown": "left out: success not known",
    "other_ids": "with other ids than LoGiC scored",
    "dropped": "left out: longer than a row",
    "cut": "cut at a turn",
    "held_out": "held out",
    "trajectories": "trained on",
    "turns": "turns",
    "skip_share": "turns without reasoning",
    "tokens": "tokens",
    "policy_tokens": "policy tokens",
    "policy_reasoning": "of them reasoning",
    "policy_decision": "of them the closing decision",
    "policy_action": "of them actions",
    "packing_efficiency": "rows filled",
}


def summary_table(stats: Mapping[str, float]) -> Table:
    """`summarise`, and `packing_efficiency`, as a table; zeros of what went wrong are left out."""
    table = Table(title="training data")
    table.add_column("")
    table.add_column("", justify="right")
    for name, title in _ROWS.items():
        quiet = name in ("faults", "failed", "unknown", "other_ids", "dropped", "cut")
        if name not in stats or (quiet and not stats[name]):
            continue
        share = name in ("skip_share", "packing_efficiency")
        table.add_row(title, f"{stats[name]:.1%}" if share else f"{stats[name]:,.0f}")
    return table
