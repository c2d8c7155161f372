"""One RL update against TRL's GRPOTrainer, and LoGiC against checking by generation.

    python bench/rl_step.py [--trajectories 8] [--turns 6] [--layers 4] [--times 3]

The same random Qwen3 checkpoint and the same episodes for all, float32, gradient checkpointing, old
log-probabilities given, token-mean loss, clip to norm 1, AdamW. Every method runs in a process of
its own, so that its peak of resident memory is its own:

- race-jax: GRPO, all reasoning kept.
- race-jax, cover-aware: half of the reasoning masked, and the compressed contexts of the closure
  loss forwarded on top.
- TRL: `GRPOTrainer.compute_loss` of a trainer built as users build it, with `loss_type="bnpo"`, its
  token-mean, and `tool_mask` for observations; then torch's AdamW.

- Tunix, where it can be imported: its `grpo_loss_fn` on its own Qwen3 with its block checkpointing,
  `token-mean`, gradients of parts summed, optax's AdamW. Its trainer, which wants a cluster of
  roles, is left out. Its logits for this checkpoint differ from those of transformers, so its first
  loss does too; why, and so whether the work is quite the same, is not known.

A second table takes the same model's time for LoGiC on half of the episodes, as if those had
succeeded, and for the check that the paper finds too slow: K drafts of each tested turn's action
without its reasoning, sampled by this library's own sampler, prefixes cached.

Needs torch, transformers and trl beside race-jax. Tunix (google-tunix) is optional.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import tempfile

from rich.console import Console
from rich.table import Table
from rl_peers import ACTION, episodes, length_of, run_trl, run_tunix
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


def run_jax(args) -> dict[str, float]:
    """Our update, with what it masks and closes if `args.cover`."""
    from race_jax.models import load_model
    from race_jax.rl_data import make_batch
    from race_jax.rl_loss import actor_loss, actor_measures
    from race_jax.train.step import ComputeConfig

    before = peak_mib()
    batch, _ = make_batch(
        episodes(args), place=0, length=length_of(args), rows=args.rows, closure=0.02
    )
    parts = len(batch["tokens"]) // args.rows
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    told = time_our_step(
        args.times,
        load_model(args.folder),
        batch,
        functools.partial(actor_loss, **clips),
        ComputeConfig("float32", parts, "block", CHUNK),
        measure=functools.partial(actor_measures, **clips),
    )
    return {**told, "mib": peak_mib() - before}


def run_logic(args) -> dict[str, float]:
    """LoGiC on the solved half, a removal tested at every turn but the first."""
    from race_jax.logic.engine import Engine
    from race_jax.models import load_model

    model = load_model(args.folder)
    engine = Engine(model, model.params, length=length_of(args) + 8, slots=args.trajectories)
    solved = [item.tokens for item in episodes(args) if item.advantage > 0]

    def check() -> float:
        # Every removal is accepted here, which costs LoGiC most.
        return float(len(list(engine.run(solved, [1e9]))))

    return {**time_updates(args.times, check), "mib": peak_mib()}


def run_drafts(args) -> dict[str, float]:
    """K drafts of every tested turn's action on the solved half, a turn of all at a time."""
    from race_jax.models import load_model
    from race_jax.models.sampler import LocalSampler
    from race_jax.rollout.protocol import Request

    model = load_model(args.folder)
    solved = [item.tokens for item in episodes(args) if item.advantage > 0]
    sampler = LocalSampler(
        model,
        model.params,
        known=args.vocab,
        slots=len(solved) * args.drafts,
        length=length_of(args) + 8,
        chunk=64,
    )

    def check() -> float:
        for t in range(1, args.turns):
            for tokens in solved:
                context = [*tokens.prompt]
                for n, turn in enumerate(tokens.turns[: t + 1]):
                    context += turn.reasoning if n < t else turn.skip
                    context += (*turn.action, *turn.observation) if n < t else ()
                for k in range(args.drafts):
                    name = f"{tokens.id}/{k}"
                    sampler.submit(Request(name, tuple(context), ACTION, (), 1000 * t + k))
            waiting = len(solved) * args.drafts
            while waiting:
                waiting -= len(sampler.poll())
        for tokens in solved:
            for k in range(args.drafts):
                sampler.forget(f"{tokens.id}/{k}")
        return float(sampler.stats.sampled)

    told = time_updates(args.times, check)
    sampler.close()
    return {**told, "mib": peak_mib()}


def covered(args) -> dict[str, float]:
    """Our update with masking and closure."""
    args.cover = True
    return run_jax(args)


UPDATES = {
    "TRL, GRPOTrainer's loss": run_trl,
    "Tunix, its loss": run_tunix,
    "race-jax": run_jax,
    "race-jax, cover-aware": covered,
}
CHECKS = {"LoGiC": run_logic, "drafts": run_drafts}


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, default=2, help="rows forwarded at a time")
    parser.add_argument("--drafts", type=int, default=4, help="K")
    parser.set_defaults(cover=False)
    args = start(parser, UPDATES | CHECKS)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": args.layers, "vocab_size": args.vocab}
    config = AutoConfig.for_model("qwen3", **SHAPE, **sizes, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        there = importlib.util.find_spec("tunix") is not None
        chosen = [m for m in UPDATES if there or UPDATES[m] is not run_tunix]
        updates = run_all(chosen, folder)
        checks = run_all(CHECKS, folder)
    title = f"one update, {args.trajectories} trajectories of {length_of(args):,} tokens, float32"
    console = Console(width=110)
    console.print(ratios_table(title, updates))
    update = updates["race-jax, cover-aware"]["seconds"]
    count = args.trajectories - args.trajectories // 2
    table = Table(title=f"finding covers of {count} of them")
    for name in ("method", "seconds", "x LoGiC", "x the cover-aware update"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, result in checks.items():
        seconds = result["seconds"]
        table.add_row(
            f"{args.drafts} drafts per turn" if method == "drafts" else method,
            f"{seconds:.2f}",
            f"{seconds / checks['LoGiC']['seconds']:.1f}",
            f"{seconds / update:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
