"""What the benchmarks of updates share: shape, command line, our step, processes, the table."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


def time_our_step(
    times: int, model: Any, batch: Mapping[str, Any], loss: Any, compute: Any, **settings: Any
) -> dict[str, float]:
    """Times of our update of `model` with AdamW on `batch`.

    Args:
        times: As of `time_updates`.
        model: Hand it over without keeping it: a second reference would count in the peak.
        batch: Arrays [B, T].
        loss: As `make_step` takes it.
        compute: A `ComputeConfig`.
        settings: Others of `make_step`.
    """
    import jax

    from race_jax.models import make_model
    from race_jax.train.optimizer import LoraConfig, OptimizerConfig, make_optimizer, matrices
    from race_jax.train.state import Trainee, init_state
    from race_jax.train.step import make_step, places_in

    trainee = Trainee(make_model(model.config, {}), {}, LoraConfig())
    rule = make_optimizer(
        OptimizerConfig(lr=1e-6, schedule="constant", warmup=0.0), 100, matrices(trainee.axes)
    )
    state = init_state(trainee, rule, model.params, jax.random.key(0))
    del model
    step = make_step(trainee, rule, loss, compute, **settings)
    places = places_in(batch["loss_mask"], batch["loss_mask"].shape[1], 4)

    def update() -> float:
        nonlocal state
        state, metrics = step(state, {}, batch, places)
        return float(metrics["loss"])

    return time_updates(times, update)


def start(
    parser: argparse.ArgumentParser,
    methods: Mapping[str, Callable[[argparse.Namespace], Mapping[str, float]]],
) -> argparse.Namespace:
    """The command line of a benchmark; in a process of `run_all`, its method, and then the end."""
    parser.add_argument("--times", type=int, default=3, help="runs, of which the fastest counts")
    parser.add_argument("--method", choices=methods, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method:
        print(json.dumps(methods[args.method](args)))
        sys.exit()
    return args


def run_all(methods: Iterable[str], folder: str = "") -> dict[str, Result]:
    """Each method's numbers, from a process of its own: so its peak of memory is its own.

    Args:
        methods: Of those given to `start`.
        folder: Where they find a checkpoint, if they need one.
    """
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
