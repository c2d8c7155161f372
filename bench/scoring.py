"""Log-probabilities of a tenth of the positions: this library against transformers in torch.

Random checkpoints of the given shape are made in a temporary folder, and both sides load the same
files. Torch runs twice: projecting every position, as most code does, and gathering the hidden
states of the wanted positions before the head.

    python bench/scoring.py [--families qwen3,qwen3_5] [--lengths 512,2048,4096] [--dtypes float32]

A second table shows the temporary memory of log-probabilities and their gradients with respect to
hidden states and head, as the compiler reports it, at growing length. Needs torch and transformers
beside race-jax.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from race_jax.logprobs import leading_token_logprobs, token_logprobs
from race_jax.models import Model, load_model

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
EXTRA = {
    "qwen3": {},
    "qwen3_5_text": {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
NAMES = {"qwen3": "qwen3", "qwen3_5": "qwen3_5_text"}
SHARE = 10
"""One position in so many is scored."""


def best_of(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    run()
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    return min(spent)


def jax_scorer(network: Model, tokens: np.ndarray, spots: np.ndarray):
    """A run on one row of tokens, and how long its program took to compile."""
    head = network.head(network.params).astype(jnp.float32)
    length = tokens.shape[1]
    positions = np.arange(length, dtype=np.int32)[None]
    segments = np.ones((1, length), np.int32)
    targets = tokens[0, spots + 1]

    def score(params, head, tokens):
        hidden = network.forward(params, tokens, positions, segments)
        return leading_token_logprobs(hidden[0, spots], head, targets, len(spots))

    begun = time.perf_counter()
    program = jax.jit(score).lower(network.params, head, tokens).compile()
    compiled = time.perf_counter() - begun
    return lambda: np.asarray(program(network.params, head, tokens)), compiled


def torch_scorer(peer, tokens: np.ndarray, spots: np.ndarray, *, full: bool):
    """The same by transformers."""
    ids = torch.from_numpy(tokens).long()
    places = torch.from_numpy(spots).long()
    targets = ids[0, places + 1]

    def run() -> np.ndarray:
        with torch.inference_mode():
            hidden = peer.model(ids).last_hidden_state[0]
            if full:
                logits = peer.lm_head(hidden).float().log_softmax(-1)[places]
            else:
                logits = peer.lm_head(hidden[places]).float().log_softmax(-1)
            return logits.gather(1, targets[:, None])[:, 0].numpy()

    return run


def time_family(family: str, args, table: Table, console: Console) -> None:
    """Add a family's rows to the table."""
    name = NAMES[family]
    config = AutoConfig.for_model(
        name, **SHAPE, **EXTRA[name], num_hidden_layers=args.layers, dtype="float32"
    )
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for dtype in args.dtypes.split(","):
            network = load_model(folder, dtype=dtype)
            peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            for length in map(int, args.lengths.split(",")):
                tokens = rng.integers(0, SHAPE["vocab_size"], (1, length), np.int32)
                spots = np.sort(rng.choice(length - 1, length // SHARE, replace=False))
                ours, compiled = jax_scorer(network, tokens, spots)
                gathered = torch_scorer(peer, tokens, spots, full=False)
                error = float(np.abs(ours() - gathered()).max())
                spent = best_of(ours, args.times)
                slow = best_of(torch_scorer(peer, tokens, spots, full=True), args.times)
                fair = best_of(gathered, args.times)
                row = (family, dtype, f"{length:,}", f"{slow / spent:.2f}", f"{fair / spent:.2f}")
                row = (*row, f"{compiled:.1f}", f"{error:.0e}")
                console.print("  ".join(row))
                table.add_row(*row)


def memory_table(args) -> Table:
    """Temporary bytes of log-probabilities and gradients, by length."""
    table = Table(title=f"memory of log-probabilities, V = {SHAPE['vocab_size']:,}, float32")
    for name in ("tokens", "log-probs, MiB", "with gradients, MiB", "logits alone would be, MiB"):
        table.add_column(name, justify="right")
    vocab, width = SHAPE["vocab_size"], SHAPE["hidden_size"]
    head = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    for length in map(int, args.memory.split(",")):
        hidden = jax.ShapeDtypeStruct((length, width), jnp.float32)
        targets = jax.ShapeDtypeStruct((length,), jnp.int32)

        def loss(hidden, head, targets):
            return jnp.sum(token_logprobs(hidden, head, targets))

        programs = (token_logprobs, jax.grad(loss, argnums=(0, 1)))
        sizes = [
            jax.jit(program).lower(hidden, head, targets).compile().memory_analysis()
            for program in programs
        ]
        mib = [f"{size.temp_size_in_bytes / 2**20:,.0f}" for size in sizes]
        table.add_row(f"{length:,}", *mib, f"{length * vocab * 4 / 2**20:,.0f}")
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="qwen3,qwen3_5")
    parser.add_argument("--lengths", default="512,2048,4096")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=3, help="runs, of which the fastest counts")
    parser.add_argument("--memory", default="1024,2048,4096,8192")
    args = parser.parse_args()
    console = Console(width=120)
    table = Table(title=f"log-probabilities of {100 // SHARE} % of positions, {args.layers} layers")
    for name in (
        "family",
        "dtype",
        "tokens",
        "x faster than\ntorch, full logits",
        "x faster than\ntorch, gathered",
        "compile, s",
        "largest\ndifference",
    ):
        table.add_column(name, justify="right")
    for family in args.families.split(","):
        time_family(family, args, table, console)
    console.print(table)
    console.print(memory_table(args))


if __name__ == "__main__":
    main()
