"""Credit of many trees against a recursion, and an update with shared prefixes or without.

    python bench/tree.py [--trees 1024] [--grown 1] [--forks 8] [--length 2048] [--times 3]

First table: values, advantages and update sets of `--trees` trees of one whole episode and
`--forks` forks, `race_jax.carl.advantages.edge_advantages` in one call on padded arrays, from and
to NumPy, against the recursion that one writes from the paper's equations; then single trees that
are deep or wide, with the time per node. All values are compared. Compilation is left out.

Second table: one update (log-probs, loss, gradients, clip, AdamW) on `--grown` trees whose forks
the density rule chose, on a random Qwen3 in float32, in rows of `--length` tokens: each state laid
out once per row, or each path alone. Every method runs in a process of its own, so that its peak of
resident memory is its own. The first losses must be the same.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from updates import CHUNK, SHAPE, peak_mib, ratios_table, run_all, start, time_our_step

PROMPT, REASONING, ACTION, OBSERVATION = 256, 48, 24, 128
CLOSE, BLANK, END = 1, 2, 3


def grow_parents(rng: np.random.Generator, forks: int, turns: int) -> np.ndarray:
    """`parent` of a tree of one episode and `forks` more, each from a random inner state."""
    parent, depth, inner = [-1], [0], [0]
    for episode in range(1 + forks):
        at = int(rng.choice(inner)) if episode else 0
        for level in range(depth[at] + 1, turns + 1):
            parent.append(at)
            depth.append(level)
            at = len(parent) - 1
            if level < turns:
                inner.append(at)
    return np.array(parent, np.int32)


def to_arrays(parents: list[np.ndarray], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """`parent`, `rewards`, `is_leaf`, `valid` of trees padded to one size, [trees, nodes]."""
    size = max(map(len, parents))
    parent = np.full((len(parents), size), -1, np.int32)
    leaf, valid = np.zeros(parent.shape, bool), np.zeros(parent.shape, bool)
    for row, one in enumerate(parents):
        parent[row, : len(one)] = one
        valid[row, : len(one)] = True
        leaf[row, np.setdiff1d(np.arange(len(one)), one)] = True
    return parent, np.where(leaf, rng.uniform(size=parent.shape), 0).astype(np.float32), leaf, valid


def recurse(parent: np.ndarray, rewards: np.ndarray) -> tuple[list[float], list[float], list[bool]]:
    """V, A and the update set of a tree, as eqs. 9 to 11 read."""
    nodes, above = range(len(parent)), parent.tolist()
    children: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        if above[node] >= 0:
            children[above[node]].append(node)
    values = [0.0] * len(parent)

    def value(node: int) -> float:
        below = children[node]
        found = sum(map(value, below)) / len(below) if below else float(rewards[node])
        values[node] = found
        return found

    value(0)
    edge = [above[node] >= 0 and len(children[above[node]]) > 1 for node in nodes]
    return values, [values[n] - values[above[n]] if edge[n] else 0.0 for n in nodes], edge


def fastest(times: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the fastest of `times` calls after a first one, and what it gave."""
    found, spent = call(), []
    for _ in range(times):
        begun = time.perf_counter()
        found = call()
        spent.append(time.perf_counter() - begun)
    return min(spent), found


def credit_table(args) -> Table:
    """Time of credit, for many trees and for deep and wide ones."""
    import jax

    from race_jax.carl.advantages import edge_advantages

    rng = np.random.default_rng(0)
    sets = {
        f"{args.trees:,} trees": [grow_parents(rng, args.forks, 8) for _ in range(args.trees)],
        "one chain, depth 200": [np.arange(-1, 200, dtype=np.int32)],
        "one chain, depth 4,095": [np.arange(-1, 4095, dtype=np.int32)],
        "one root, 4,095 leaves": [np.concatenate([[-1], np.zeros(4095, np.int32)])],
    }
    credit = jax.jit(jax.vmap(edge_advantages))
    table = Table(title="values, advantages and update sets")
    for name in ("trees", "nodes", "us a node", "recursion", "x slower", "largest difference"):
        table.add_column(name, justify="left" if name == "trees" else "right")
    sys.setrecursionlimit(10_000)
    for name, parents in sets.items():
        arrays = to_arrays(parents, rng)
        mine, found = fastest(args.times, lambda a=arrays: jax.device_get(credit(*a)))
        theirs, wanted = fastest(
            args.times,
            lambda p=parents, a=arrays: [recurse(one, a[1][n]) for n, one in enumerate(p)],
        )
        apart = 0.0
        for n, (values, advantages, trained) in enumerate(wanted):
            size = len(values)
            if found.trainable[n, :size].tolist() != trained:
                raise SystemExit(f"{name}: the update sets differ at tree {n}")
            apart = max(apart, float(np.abs(found.values[n, :size] - values).max()))
            apart = max(apart, float(np.abs(found.advantages[n, :size] - advantages).max()))
        nodes = sum(map(len, parents))
        table.add_row(
            name,
            f"{nodes:,}",
            f"{mine / nodes * 1e6:.3f}",
            f"{theirs / nodes * 1e6:.3f}",
            f"{theirs / mine:.1f}",
            f"{apart:.1e}",
        )
    return table


def grow(args) -> list:
    """Trees of invented episodes, their forks where the density rule puts them."""
    from race_jax.carl.forking import ForkConfig, pick_state
    from race_jax.carl.rows import JudgedTree
    from race_jax.carl.tree import Tree, credit_trees
    from race_jax.rollout.results import Rollout, TurnNote
    from race_jax.types import TokenTrajectory, TokenTurn

    rng, config = np.random.default_rng(0), ForkConfig(forks=args.forks)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(10, args.vocab, count).tolist())

    def turn(t: int) -> tuple[TokenTurn, TurnNote]:
        reasoning, action = (*ids(REASONING - 2), CLOSE, BLANK), (*ids(ACTION - 1), END)
        seen = ids(OBSERVATION) if t + 1 < args.turns else ()
        old = rng.normal(-12, 0.3, len(reasoning) + len(action)).tolist()
        return TokenTurn(reasoning, (CLOSE, BLANK), action, seen), TurnNote(
            tuple(old), REASONING, False, 1
        )

    trees = []
    for number in range(args.grown):
        tree, prompt = Tree("bench", str(number)), ids(PROMPT)
        for sample in range(config.leaves):
            begun, fork = [], None
            node = pick_state(tree, config, 0, sample) if sample else 0
            assert node is not None
            if node:
                state = tree.nodes[node]
                origin = tree.rollouts[state.sample]
                assert origin.tokens is not None
                fork = (state.sample, state.turn)
                begun = list(zip(origin.tokens.turns, origin.notes, strict=True))[: state.turn]
            both = begun + [turn(t) for t in range(len(begun), args.turns)]
            turns, notes = zip(*both, strict=True)
            name, reward = f"bench/{number}/{sample}", float(rng.integers(2))
            tokens = TokenTrajectory(name, prompt, turns)
            rollout = Rollout(
                name, "bench", str(number), sample, (), (), reward, reward == 1, "done", None,
                tokens, notes, fork=fork,
            )  # fmt: skip
            tree.add(rollout)
        trees.append(tree)
    return [JudgedTree(t, c, {}) for t, c in zip(trees, credit_trees(trees), strict=True)]


def run_update(args, share: bool) -> dict[str, float]:
    """One update on the trees."""
    from race_jax.carl.rows import make_tree_batch
    from race_jax.models import init_model
    from race_jax.rl_loss import actor_loss
    from race_jax.train.step import ComputeConfig

    before = peak_mib()
    batch, stats = make_tree_batch(grow(args), place=0, length=args.length, rows=1, share=share)
    rows = len(batch["tokens"])
    told = time_our_step(
        args.times,
        init_model(model_config(args), 0),
        batch,
        functools.partial(actor_loss, clip_low=0.2, clip_high=0.2),
        ComputeConfig("float32", rows, "block", CHUNK),
    )
    return {**told, "mib": peak_mib() - before, "rows": rows, "tokens": stats.sampled}


def model_config(args):
    """A Qwen3 in the shape that the benchmarks of updates share."""
    from race_jax.models import ModelConfig

    sizes = {"num_hidden_layers": args.layers, "vocab_size": args.vocab}
    return ModelConfig.from_hf({"model_type": "qwen3", **SHAPE, **sizes})


METHODS = {
    "race-jax": functools.partial(run_update, share=True),
    "race-jax, path by path": functools.partial(run_update, share=False),
}


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trees", type=int, default=1024, help="whose credit is found")
    parser.add_argument("--grown", type=int, default=1, help="trees of an update")
    parser.add_argument("--forks", type=int, default=8, help="N, forks of each tree")
    parser.add_argument("--turns", type=int, default=6, help="turns of an episode of an update")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    args = start(parser, METHODS)
    console = Console(width=110)
    console.print(credit_table(args))
    results = run_all(METHODS)
    console.print(ratios_table(f"one update on {args.grown} trees, float32", results))
    for method, result in results.items():
        console.print(f"{method}: {result['tokens']:,} tokens in {result['rows']} rows")


if __name__ == "__main__":
    main()
