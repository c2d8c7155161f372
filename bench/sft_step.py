"""One step of supervised training against torch: time and peak memory, same model and batch.

Every method runs in a process of its own, so that its peak of resident memory is its own. The peers
are transformers' model in torch with gradient checkpointing and AdamW: once with full logits, as
its own loss has them, and once with a head that projects and recomputes chunk by chunk.

    python bench/sft_step.py [--tokens 2048] [--rows 1] [--dtype float32] [--share 1.0]

`--share` is the share of tokens that carry loss. Needs torch and transformers beside race-jax.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
from rich.console import Console
from updates import (
    CHUNK,
    SHAPE,
    peak_mib,
    ratios_table,
    run_all,
    start,
    time_our_step,
    time_updates,
)

VOCAB = 151_936


def make_batch(args) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and whether each carries loss, [B, T + 1] and [B, T]."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (args.rows, args.tokens + 1), np.int32)
    return tokens, rng.random((args.rows, args.tokens)) < args.share


def run_jax(args) -> dict[str, float]:
    """Our step."""
    from race_jax.models import load_model
    from race_jax.train.step import ComputeConfig, sft_loss

    before = peak_mib()
    tokens, mask = make_batch(args)
    positions = np.broadcast_to(np.arange(args.tokens, dtype=np.int32), mask.shape)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "segment_ids": np.ones_like(positions),
        "loss_mask": mask,
    }
    compute = ComputeConfig(args.dtype, 1, "block", CHUNK)
    told = time_our_step(args.times, load_model(args.folder), batch, sft_loss, compute)
    return {**told, "mib": peak_mib() - before}


def run_torch(args, *, chunked: bool) -> dict[str, float]:
    """Transformers' model, with our loss over all or over chunks of the positions."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    before = peak_mib()
    network = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.train()
    rule = torch.optim.AdamW(network.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    tokens, mask = make_batch(args)
    ids = torch.from_numpy(tokens).long()
    wanted = torch.from_numpy(mask).reshape(-1)

    def part(hidden, targets):
        logits = network.lm_head(hidden).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            hidden = network.model(ids[:, :-1], use_cache=False).last_hidden_state
            flat, targets = hidden.reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1)
            if not chunked:
                logits = network.lm_head(flat).float()
                each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
                return (each * wanted).sum() / wanted.sum()
            flat, targets = flat[wanted], targets[wanted]
            parts = zip(flat.split(CHUNK), targets.split(CHUNK), strict=True)
            return sum(checkpoint(part, *x, use_reentrant=False) for x in parts) / wanted.sum()

    def update() -> float:
        loss = forward()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        rule.step()
        rule.zero_grad()
        return loss.item()

    return {**time_updates(args.times, update), "mib": peak_mib() - before}


METHODS = {
    "torch, full logits": lambda args: run_torch(args, chunked=False),
    "torch, chunked head": lambda args: run_torch(args, chunked=True),
    "race-jax": run_jax,
}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--share", type=float, default=1.0, help="share of tokens with loss")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = start(parser, METHODS)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": args.layers, "vocab_size": VOCAB}
    config = AutoConfig.for_model("qwen3", **SHAPE, **sizes, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        results = run_all(METHODS, folder)
    title = (
        f"one step, {args.rows} x {args.tokens:,} tokens, {args.share:.0%} with loss, {args.dtype}"
    )
    Console(width=110).print(ratios_table(title, results))


if __name__ == "__main__":
    main()
