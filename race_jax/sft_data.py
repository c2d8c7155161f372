"""The input of supervised fine-tuning: trajectories in a file to batches of packed rows.

    pipeline = build_pipeline(config, renderer, seed=0, vocab_size=model.vocab_size)
    batch = next(pipeline)            # without end: dict of NumPy arrays [B, T]
    state = pipeline.get_state()      # plain numbers and text, for a checkpoint
    pipeline.set_state(state)         # the next batch is the one that came after get_state
    for batch in pipeline.held_out:   # once over the held-out rows, again at each `for`
        ...
    print(pipeline.table())

A batch holds `tokens`, `targets`, `positions`, `segment_ids`, `kinds` int32 and `loss_mask` bool.
All but the first are about the *targets*: `loss_mask[b, t]` says that the policy sampled
`targets[b, t]`, and `kinds[b, t]` what that token is (`OTHER`, `REASONING`, `DECISION`, `ACTION`).
B is `batch_size` divided by the number of processes: each process has its own rows.

The order depends on the seed and the data alone. Every process shuffles and packs the same indices,
which takes lengths only, and then reads the tokens of its own rows; so a run may go on with another
number of processes and sees the same batches. Each epoch shows every trajectory once, in an order
of its own; a batch may hold the end of one epoch and the beginning of the next.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from rich.table import Table

from race_jax.chat import Renderer
from race_jax.packing import (
    ACTION,
    DECISION,
    OTHER,
    REASONING,
    closing_id,
    decision_place,
    fill_rows,
    make_example,
    plan_rows,
)
from race_jax.settings import check_rules
from race_jax.sft_cache import FORMAT, Cache, Writer, make_cache, open_cache
from race_jax.sft_source import Choice, Reasoning, Success, select
from race_jax.sft_split import OverLong, Split, split_examples, summarise, summary_table

__all__ = [
    "ACTION",
    "DECISION",
    "OTHER",
    "REASONING",
    "HeldOut",
    "Pipeline",
    "SftDataConfig",
    "build_pipeline",
    "closing_id",
]

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SftDataConfig:
    """What is trained on, and in what shape.

    Attributes:
        path: JSON lines: LoGiC's output, or trajectories.
        length: Tokens of a row.
        batch_size: Rows of a batch, over all processes.
        reasoning: `full`, as the teacher wrote it; `cover`, what LoGiC left; `none`, every turn
            closes its block at once.
        epsilon: LoGiC's threshold, for `cover` from a file that holds several.
        success: `required` takes only trajectories whose `success` is true; `not_failed` also those
            where it is not known; `any` takes all.
        over_long: What becomes of a trajectory longer than a row: `drop`, or `cut` after the last
            turn that fits. Both are counted.
        held_out: Share of the trajectories, by a hash of their ids, that is kept from training.
        pack: Put several trajectories in a row; else one row each.
        window: How many trajectories are packed at a time.
        cache: Folder for the tokenised data; by default `race-jax/tokens` in the user's folder for
            caches.
    """

    path: str
    length: int
    batch_size: int
    reasoning: Reasoning
    epsilon: float | None = None
    success: Success = "required"
    over_long: OverLong = "drop"
    held_out: float = 0.05
    pack: bool = True
    window: int = 1024
    cache: str | None = None

    def __post_init__(self):
        rules = {
            "length": (self.length >= 2, "at least 2"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "reasoning": (self.reasoning in ("full", "cover", "none"), "full, cover or none"),
            "success": (
                self.success in ("required", "not_failed", "any"),
                "required, not_failed or any",
            ),
            "over_long": (self.over_long in ("drop", "cut"), "drop or cut"),
            "held_out": (0 <= self.held_out < 1, "at least 0 and below 1"),
            "window": (self.window >= 1, "at least 1"),
        }
        check_rules("data", self, rules)


def build_pipeline(
    config: SftDataConfig,
    renderer: Renderer,
    *,
    seed: int,
    vocab_size: int | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Pipeline:
    """Tokenise once, split, and stand at the first batch.

    Args:
        config: The data.
        renderer: Of the model that is trained; it decides how a turn without reasoning reads.
        seed: Decides the order, from 0 to 2**32 - 1.
        vocab_size: Width of the model's head, to be held against the ids.
        process_index: Which share of each batch to read; by default this JAX process's.
        process_count: Among how many.
        report: Called with each line of the file that cannot be used.

    Raises:
        ValueError: Nothing is left to train on, or a setting does not fit the data or the model.
        OSError: The file cannot be read, or the cache not written.
    """
    count = jax.process_count() if process_count is None else process_count
    index = jax.process_index() if process_index is None else process_index
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must be from 0 to 2**32 - 1")
    if config.batch_size % count:
        raise ValueError(
            f"data.batch_size {config.batch_size} rows cannot be shared among {count} processes; "
            "make it a multiple of their number"
        )
    cache = _tokenised(config, renderer, report)
    largest = cache.notes["largest_id"]
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{config.path} has the token id {largest}, and the model's vocabulary {vocab_size} "
            "entries; tokenizer and model do not belong together"
        )
    split = split_examples(
        cache, length=config.length, over_long=config.over_long, share=config.held_out
    )
    return Pipeline(config, cache, split, seed, (index, count))


def _tokenised(config: SftDataConfig, renderer: Renderer, report: Callable[[str], None]) -> Cache:
    """The cache of this file under these choices, made if it is not there."""
    path = Path(config.path)
    if not path.is_file():
        what = "it is not a regular file" if path.exists() else "there is no such file"
        raise ValueError(f"data.path {config.path}: {what}; name a file of JSON lines")
    choice = Choice(config.reasoning, config.epsilon, config.success)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    key = [FORMAT, digest, *choice, renderer.codec.fingerprint]
    key += [renderer.family.name, renderer.skip_form]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = (Path(config.cache) if config.cache else _cache_home()) / name

    def fill(writer: Writer) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        place = decision_place(renderer)
        for tokens, removed in select(path, renderer, choice, counts, report):
            writer.add(tokens.id, make_example(tokens, place, removed))
        if not writer.count:
            raise ValueError(_nothing(config, counts))
        return {"key": name, "counts": dict(counts)}

    if not folder.is_dir():
        make_cache(folder, fill)
    return open_cache(folder)


def _cache_home() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "race-jax" / "tokens"


def _nothing(config: SftDataConfig, counts: Counter[str]) -> str:
    why = [
        (counts["failed"], "failed", "set data.success to any to train on them"),
        (counts["unknown"], "do not say whether they succeeded", "set data.success to not_failed"),
        (counts["faults"], "cannot be used", "race-jax trajectories check names their faults"),
    ]
    told = "; ".join(f"{n} {what} ({remedy})" for n, what, remedy in why if n)
    return f"{config.path} leaves no trajectory to train on: {told or 'it holds none'}"


class Pipeline:
    """Batches without end; see the module's description.

    Attributes:
        held_out: Batches of held-out rows, or None if there are none.
        stats: What went in, by name.
        fingerprint: Of the data and all settings that decide the order of batches but the seed.
    """

    def __init__(
        self, config: SftDataConfig, cache: Cache, split: Split, seed: int, process: tuple[int, int]
    ):
        """Use `build_pipeline`."""
        size = config.batch_size // process[1]
        part = slice(process[0] * size, (process[0] + 1) * size)
        rows = functools.partial(_read_rows, cache, split, config.length, part)
        self._plan = _Plan(config, split, seed)
        self._batches = _Batches(self._plan, rows)
        self.held_out = HeldOut(config, split, rows) if len(split.held_out) else None
        self.stats = summarise(cache, split) | {"packing_efficiency": self._plan.efficiency()}
        said = dataclasses.asdict(config)
        said = {key: value for key, value in said.items() if key not in ("path", "cache")}
        text = json.dumps([cache.notes["key"], said], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._seed = seed

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> Batch:
        """The next batch, this process's rows of it."""
        return next(self._batches)

    @property
    def epoch(self) -> float:
        """How often the data has been seen: 1.5 after one and a half epochs."""
        return self._plan.epoch(self._batches.window, self._batches.row)

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands; equal on all processes."""
        state = self._batches.get_state()
        return {**state, "seed": self._seed, "fingerprint": self.fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from where `get_state` was called.

        Raises:
            ValueError: The state is of other data, other settings or another seed.
        """
        for name, own in (("fingerprint", self.fingerprint), ("seed", self._seed)):
            if state[name] != own:
                raise ValueError(
                    f"the data position to resume from has {name} {state[name]!r}, this run "
                    f"{own!r}; the data, its settings or the tokenizer have changed"
                )
        self._batches.set_state(state)

    def table(self) -> Table:
        """What went in, to print."""
        return summary_table(self.stats)


class HeldOut:
    """The held-out rows in batches of the training shape; the last one is filled up with padding.

    Iterate over it as often as needed. Every batch has loss on some process; a process's own part
    may be all padding.
    """

    def __init__(self, config: SftDataConfig, split: Split, read: Callable[..., Batch]):
        """Plan the rows."""
        self._rows = _pack(config, split, split.held_out)
        self._size, self._read = config.batch_size, read

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._size)

    def __iter__(self) -> Iterator[Batch]:
        for at in range(0, len(self._rows), self._size):
            rows = self._rows[at : at + self._size]
            yield self._read(rows + [[]] * (self._size - len(rows)))


def _read_rows(
    cache: Cache, split: Split, length: int, part: slice, rows: list[list[int]]
) -> Batch:
    """Arrays of the rows of `part`."""

    def example(index: int) -> dict[str, np.ndarray]:
        begin = cache.token_ends[index - 1] if index else 0
        where = slice(begin, begin + split.lengths[index])
        return {"tokens": cache.tokens[where], "kinds": cache.kinds[where]}

    return fill_rows([[example(i) for i in row] for row in rows[part]], length)


def _pack(config: SftDataConfig, split: Split, indices: np.ndarray) -> list[list[int]]:
    """Rows of the examples at `indices`."""
    if not config.pack:
        return [[int(i)] for i in indices]
    rows = plan_rows(split.lengths[indices], config.length)
    return [[int(indices[i]) for i in row] for row in rows]


class _Plan:
    """Windows of rows, one after the other without end; a pure function of seed and data."""

    def __init__(self, config: SftDataConfig, split: Split, seed: int):
        self._config, self._split = config, split
        self.batch_size = config.batch_size
        self._count = len(split.train)
        self._held: tuple[int, list[list[int]]] = (-1, [])
        self._per_epoch = -(-self._count // config.window)
        # Each pass through `repeat` is shuffled anew.
        self._order = grain.MapDataset.range(self._count).seed(seed).shuffle().repeat()

    def rows(self, window: int) -> list[list[int]]:
        """The rows of a window. No window spans two epochs, so no row holds an example twice."""
        if self._held[0] != window:
            self._held = (window, self._rows(window))
        return self._held[1]

    def _rows(self, window: int) -> list[list[int]]:
        epoch, part = divmod(window, self._per_epoch)
        begin = part * self._config.window
        end = min(begin + self._config.window, self._count)
        base = epoch * self._count
        order = np.array([self._order[base + k] for k in range(begin, end)], np.int64)
        return _pack(self._config, self._split, self._split.train[order])

    def epoch(self, window: int, row: int) -> float:
        """Epochs behind row `row` of a window."""
        return (window + row / max(len(self.rows(window)), 1)) / self._per_epoch

    def efficiency(self, most: int = 16) -> float:
        """Share of the places of rows that hold tokens, over the first windows of epoch 0."""
        rows = [row for w in range(min(most, self._per_epoch)) for row in self.rows(w)]
        tokens = sum(int(self._split.lengths[row].sum()) for row in rows)
        return tokens / (len(rows) * self._config.length)


class _Batches(grain.DatasetIterator[Batch]):
    """Batches of a plan's rows, as Grain's iterators go."""

    def __init__(self, plan: _Plan, read: Callable[[list[list[int]]], Batch]):
        super().__init__()
        self._plan, self._read = plan, read
        self.window = self.row = 0

    def __next__(self) -> Batch:
        size = self._plan.batch_size
        chosen: list[list[int]] = []
        while len(chosen) < size:
            rows = self._plan.rows(self.window)
            taken = rows[self.row : self.row + size - len(chosen)]
            chosen += taken
            self.row += len(taken)
            if self.row == len(rows):
                self.window, self.row = self.window + 1, 0
        return self._read(chosen)

    def get_state(self) -> dict[str, Any]:
        return {"window": self.window, "row": self.row}

    def set_state(self, state: dict[str, Any]) -> None:
        self.window, self.row = int(state["window"]), int(state["row"])
