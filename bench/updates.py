"""What the benchmarks of updates share: the shape, a process per method, and the table."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from rich.table import Table

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
CHUNK = 256
Result = Mapping[str, float]


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def time_updates(times: int, update: Callable[[], float]) -> dict[str, float]:
    """The fastest of `times` updates after a first one, in seconds, and the first one's loss."""
    losses, spent = [], []
    for _ in range(times + 1):
        begun = time.perf_counter()
        losses.append(update())
        spent.append(time.perf_counter() - begun)
    return {"seconds": min(spent[1:]), "loss": losses[0]}


def run_all(methods: Iterable[str], folder: str) -> dict[str, Result]:
    """Each method's numbers, from a process of its own: so its peak of memory is its own."""
    results = {}
    for method in methods:
        command = [sys.executable, *sys.argv, "--method", method, "--folder", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[method] = json.loads(done.stdout.splitlines()[-1])
    return results


def ratios_table(title: str, results: Mapping[str, Result]) -> Table:
    """Time and memory of all methods against `race-jax`."""
    ours = results["race-jax"]
    table = Table(title=title)
    for name in ("method", "seconds", "peak MiB", "x slower", "x more memory", "first loss"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, result in results.items():
        table.add_row(
            method,
            f"{result['seconds']:.2f}",
            f"{result['mib']:,.0f}",
            f"{result['seconds'] / ours['seconds']:.2f}",
            f"{result['mib'] / ours['mib']:.2f}",
            f"{result['loss']:.5f}",
        )
    return table
