"""Tokens per second of sampling: this library's sampler against transformers' generate.

    python bench/rollout.py [--model FOLDER | --family qwen3_5] [--slots 8] [--chats 8] [--turns 4]

Two jobs, each by both on the same checkpoint and the same prompts, alternately, float32:

- batch: one turn of `chats` prompts of equal length.
- multi-turn: `turns` turns of `chats` conversations whose prompts, observations and completions are
  ragged. This sampler goes on from its cache. `generate` is given all that went before, padded on
  the left, as a rollout loop around it does; a second peer keeps each conversation's cache and goes
  on alone, a batch of one.

Completions have fixed lengths on both sides, so that equal work is done. Without --model a random
checkpoint of the family is made, about 150 million weights. Needs torch and transformers beside
race-jax.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scoring import EXTRA, NAMES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from race_jax.models import load_model
from race_jax.models.sampler import LocalSampler
from race_jax.rollout.protocol import Request

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


class Job:
    """Prompts, observations and how many tokens each turn of each conversation takes."""

    def __init__(self, chats: int, turns: int, prompt: int, new: int, vocab: int, ragged: bool):
        rng = np.random.default_rng(0)

        def sizes(middle: int) -> np.ndarray:
            spread = rng.uniform(0.5, 1.5, (turns, chats)) if ragged else np.ones((turns, chats))
            return np.maximum(1, (middle * spread)).astype(int)

        self.new, self.chats, self.turns = sizes(new), chats, turns
        lengths = [sizes(prompt)[0], *sizes(prompt // 4)[1:]]
        self.texts = [
            [tuple(rng.integers(10, vocab, n).tolist()) for n in lengths[t]] for t in range(turns)
        ]

    @property
    def sampled(self) -> int:
        """Tokens to draw."""
        return int(self.new.sum())


def ours(sampler: LocalSampler, job: Job) -> None:
    """All conversations, each going on as soon as its turn is drawn."""
    ids, turn = [()] * job.chats, [0] * job.chats

    def submit(n: int) -> None:
        ids[n] += job.texts[turn[n]][n]
        most = int(job.new[turn[n], n])
        sampler.submit(Request(str(n), ids[n], most, (), 1000 * n + turn[n]))

    for n in range(job.chats):
        submit(n)
    while done := sampler.poll():
        for completion in done:
            n = int(completion.conversation)
            assert len(completion.tokens) == job.new[turn[n], n]
            ids[n] += completion.tokens
            turn[n] += 1
            if turn[n] < job.turns:
                submit(n)
            else:
                sampler.forget(str(n))


def drawing(count: int) -> dict[str, int | bool]:
    """What `generate` needs to draw exactly `count` tokens from the full distribution."""
    fixed = {"max_new_tokens": count, "min_new_tokens": count}
    return {"do_sample": True, "top_k": 0, "pad_token_id": 0, **fixed}


@torch.inference_mode()
def batched(model, job: Job) -> None:
    """`generate` turn by turn on all conversations, padded on the left."""
    ids = [()] * job.chats
    for turn in range(job.turns):
        ids = [x + job.texts[turn][n] for n, x in enumerate(ids)]
        width = max(map(len, ids))
        tokens = torch.zeros((job.chats, width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for n, x in enumerate(ids):
            tokens[n, width - len(x) :], mask[n, width - len(x) :] = torch.tensor(x), 1
        most = int(job.new[turn].max())
        out = model.generate(
            tokens,
            attention_mask=mask,
            **drawing(most),
        )
        drawn = out[:, width:].tolist()
        ids = [x + tuple(drawn[n][: job.new[turn, n]]) for n, x in enumerate(ids)]


@torch.inference_mode()
def one_by_one(model, job: Job) -> None:
    """`generate` on each conversation alone, going on from its cache."""
    for n in range(job.chats):
        cache, ids = DynamicCache(config=model.config), ()
        for turn in range(job.turns):
            ids += job.texts[turn][n]
            most = int(job.new[turn, n])
            out = model.generate(
                torch.tensor([ids]),
                past_key_values=cache,
                **drawing(most),
            )
            ids = tuple(out[0].tolist())


def make_checkpoint(folder: Path, family: str) -> Path:
    """A random checkpoint of `SHAPE` in a family."""
    config = AutoConfig.for_model(NAMES[family], **SHAPE, **EXTRA[NAMES[family]])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Run both jobs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--family", default="qwen3", choices=NAMES)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--times", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or make_checkpoint(Path(folder), args.family)
        peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        peer.generation_config.eos_token_id = None
        model = load_model(path, dtype="float32")
    vocab = model.vocab_size
    jobs = {
        "batch": Job(args.chats, 1, args.prompt, args.new, vocab, ragged=False),
        "multi-turn": Job(args.chats, args.turns, args.prompt, args.new, vocab, ragged=True),
    }
    length = args.turns * 2 * (args.prompt + 2 * args.new)
    sampler = LocalSampler(
        model, model.params, known=vocab, slots=args.slots, length=min(length, model.context_length)
    )
    table = Table("job", "sampler", "tokens drawn", "tokens/s", "ours / this", box=None)
    peers = {"generate, batched": batched, "generate, one by one": one_by_one}
    for name, job in jobs.items():
        runs = {"race-jax": lambda job=job: ours(sampler, job)}
        for peer_name, run in peers.items():
            if name == "multi-turn" or run is batched:
                runs[peer_name] = lambda job=job, run=run: run(peer, job)
        begun = time.perf_counter()
        ours(sampler, job)
        first = time.perf_counter() - begun
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(args.times):
            for kind, run in runs.items():
                begun = time.perf_counter()
                run()
                best[kind] = min(best[kind], time.perf_counter() - begun)
        for kind, seconds in best.items():
            rate = job.sampled / seconds
            ratio = "" if kind == "race-jax" else f"{seconds / best['race-jax']:.2f}"
            table.add_row(name, kind, f"{job.sampled:,}", f"{rate:.1f}", ratio)
        stated = (
            f"{name}: first run {first:.1f} s, compiling included; best {best['race-jax']:.1f} s"
        )
        Console().print(stated, highlight=False)
    Console().print(table, highlight=False)
    stats = sampler.stats
    Console().print(
        f"programs compiled: {programs(sampler)}; prompt tokens forwarded {stats.prefilled:,}, "
        f"filling {stats.padded:,}, copied {stats.shared:,}; jax {jax.__version__}, "
        f"torch {torch.__version__}",
        highlight=False,
    )


def programs(sampler: LocalSampler) -> int:
    """How many shapes were compiled."""
    jitted = (sampler._decode, sampler._extend, sampler._read, sampler._write)
    return sum(function._cache_size() for function in jitted)


if __name__ == "__main__":
    main()
