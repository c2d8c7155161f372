"""Tokenised trajectories on disk, written once and mapped into memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from race_jax.packing import KINDS, Example

FORMAT = 2
"""Changes whenever caches of an earlier program must not be read."""

_ARRAYS: Mapping[str, tuple[type, tuple[int, ...]]] = {
    "tokens": (np.int32, ()),
    "kinds": (np.uint8, ()),
    "turns": (np.int32, (3,)),
    "totals": (np.int64, (len(KINDS),)),
    "token_ends": (np.int64, ()),
    "turn_ends": (np.int64, ()),
}


class Cache(NamedTuple):
    """N tokenised trajectories. The long arrays are mapped: the system keeps in memory what it can.

    Attributes:
        tokens: int32 [sum of lengths].
        kinds: uint8, beside `tokens`.
        turns: int32 [sum of turns, 3], as `Example.turns`, for all examples in a row.
        totals: int64 [N, kinds], how many tokens of each kind an example has.
        token_ends: int64 [N], where each example ends in `tokens`.
        turn_ends: int64 [N], where each example ends in `turns`.
        notes: What the writer put beside them.
        folder: Where they lie.
    """

    tokens: np.ndarray
    kinds: np.ndarray
    turns: np.ndarray
    totals: np.ndarray
    token_ends: np.ndarray
    turn_ends: np.ndarray
    notes: Mapping[str, Any]
    folder: Path

    def __len__(self) -> int:
        return len(self.token_ends)

    def names(self) -> Iterator[str]:
        """The trajectories' ids in order, read from disk one by one."""
        with open(self.folder / "names.jsonl", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


class Writer:
    """Appends examples to the files of a cache that is being made."""

    def __init__(self, folder: Path):
        """Open the files in `folder`, which exists."""
        self._stack = contextlib.ExitStack()
        enter = self._stack.enter_context
        self._files = {name: enter((folder / f"{name}.bin").open("wb")) for name in _ARRAYS}
        self._names = enter((folder / "names.jsonl").open("wb"))
        self._tokens = self._turns = 0
        self.count = 0
        self.largest_id = 0

    def add(self, name: str, example: Example) -> None:
        """Append one example."""
        self.count += 1
        self._tokens += len(example.tokens)
        self._turns += len(example.turns)
        self.largest_id = max(self.largest_id, int(example.tokens.max(initial=0)))
        values = {
            **example._asdict(),
            "totals": np.bincount(example.kinds, minlength=len(KINDS)),
            "token_ends": self._tokens,
            "turn_ends": self._turns,
        }
        for key, (dtype, _) in _ARRAYS.items():
            self._files[key].write(np.asarray(values[key], dtype).tobytes())
        self._names.write(json.dumps(name).encode() + b"\n")

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


def make_cache(folder: Path, fill: Callable[[Writer], Mapping[str, Any]]) -> None:
    """Write a cache; it appears under its name only once it is whole.

    Args:
        folder: Its name. If another process makes the same cache first, that one stays.
        fill: Adds the examples and returns the notes to put beside them. If it raises, nothing is
            left behind.

    Raises:
        OSError: The files cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with this number
    temporary.mkdir(parents=True)
    try:
        with contextlib.closing(Writer(temporary)) as writer:
            notes = dict(fill(writer)) | {"count": writer.count, "largest_id": writer.largest_id}
        (temporary / "notes.json").write_text(json.dumps(notes, indent=1), encoding="utf-8")
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_cache(folder: Path) -> Cache:
    """Map a cache that `make_cache` made.

    Raises:
        ValueError: Its files are not whole.
        OSError: They cannot be read.
    """
    files = [folder / "notes.json", *(folder / f"{name}.bin" for name in _ARRAYS)]
    if not all(file.is_file() for file in files):
        raise ValueError(f"{folder} is not whole; delete it, and it is made again")
    notes = json.loads(files[0].read_text(encoding="utf-8"))
    arrays = {}
    for name, (dtype, tail) in _ARRAYS.items():
        path = folder / f"{name}.bin"
        arrays[name] = (
            np.memmap(path, dtype, "r").reshape(-1, *tail)
            if path.stat().st_size
            else np.zeros((0, *tail), dtype)
        )
    # These two are read at every step, and are short.
    ends = {name: np.array(arrays.pop(name)) for name in ("token_ends", "turn_ends")}
    whole = len(ends["token_ends"]) == notes["count"] and (
        not notes["count"]
        or (ends["token_ends"][-1], ends["turn_ends"][-1])
        == (len(arrays["tokens"]), len(arrays["turns"]))
    )
    if not whole or len(arrays["kinds"]) != len(arrays["tokens"]):
        raise ValueError(f"{folder} is not whole; delete it, and it is made again")
    return Cache(**arrays, **ends, notes=notes, folder=folder)
