"""LoGiC four ways: torch loops, a JAX loop, cached prefixes, and cached prefixes with early exit.

All take the same decisions on the same trajectories with the same checkpoint; only the work
differs. The loops forward every candidate from its first token, as a script beside the paper would.
Two torch loops: one projects every position to logits, as most code does; the other gathers the
hidden states of action tokens before the head.

    python bench/logic.py --model DIR --trajectories FILE [--turns 8,16,30] [--every 1]

The loops of long trajectories take minutes each. With `--every K` they run every K-th candidate,
spread evenly, and their time is scaled by tokens; the engine always runs all of its work. Times are
of warm programs; compile time is printed on its own. Needs torch and transformers beside race-jax.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from race_jax.chat import renderer_for
from race_jax.families import family_of
from race_jax.logic.cover import Cover, last_scored
from race_jax.logic.engine import Engine
from race_jax.logic.lanes import Lanes, default_lanes
from race_jax.logic.scoring import Scorer, action_means, bucket_length, scored_positions
from race_jax.logic.search import Search
from race_jax.models import Model, load_config, load_model
from race_jax.tokenizer import load_tokenizer
from race_jax.train.runtime import enable_compilation_cache
from race_jax.trajectories import read
from race_jax.types import Assembled, TokenTrajectory, TokenTurn, Trajectory


class PatientSearch(Search):
    """Cached prefixes without early exit: every candidate is scored to its end."""

    def _reject_above(self, j: int) -> None:
        if j < len(self.trajectory.turns) - 1:
            return
        for ledger in [x for x in self.alive if max(self.decreases) > x.epsilon]:
            self._close(ledger, j, accepted=False)
            self.alive.remove(ledger)


def load_cut(path: str, renderer, turns: int, count: int) -> list[TokenTrajectory]:
    """The first `count` trajectories, cut to `turns` turns or continued with the next one's."""
    items = [item for item in read(path) if isinstance(item, Trajectory)]
    tokens = [renderer.encode(item) for item in items]
    if len(tokens) < count:
        raise SystemExit(f"{path} has {len(tokens)} trajectories, {count} are needed")
    out = []
    for first in range(count):
        gathered: list[TokenTurn] = []
        for other in itertools.islice(itertools.cycle(tokens), first, first + len(tokens)):
            # An episode's last turn may end without observation; inside an episode none does.
            gathered += [turn for turn in other.turns if turn.observation]
        out.append(dataclasses.replace(tokens[first], turns=tuple(gathered[:turns])))
    return out


def candidates(trajectory: TokenTrajectory, cover: Cover) -> list[Assembled]:
    """The sequences that a loop without caches forwards."""
    sequences, removed = [trajectory.assemble()], []
    for removal in cover.removals:
        sequences.append(trajectory.assemble([*removed, removal.turn]))
        if removal.accepted:
            removed.append(removal.turn)
    return sequences


def torch_score(network, sequence: Assembled, *, full: bool) -> np.ndarray:
    """l_j by transformers, one pass."""
    stop = int(sequence.actions[-1, 1]) - 1
    ids = torch.from_numpy(sequence.tokens[None, :stop]).long()
    positions, targets = (torch.from_numpy(x).long() for x in scored_positions(sequence))
    with torch.inference_mode():
        hidden = network.model(ids).last_hidden_state[0]
        if full:
            logprobs = network.lm_head(hidden).float().log_softmax(-1)[positions, targets]
        else:
            logits = network.lm_head(hidden[positions]).float()
            logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return action_means(sequence, logprobs.numpy())


def time_loop(score: Callable[[Assembled], np.ndarray], work: list[Assembled], every: int) -> float:
    """Seconds of a loop over `work`, measured on every `every`-th sequence."""
    score(work[0])
    chosen = work[:: max(every, 1)]
    begun = time.perf_counter()
    for sequence in chosen:
        score(sequence)
    spent = time.perf_counter() - begun
    return spent * sum(map(length, work)) / sum(map(length, chosen))


def length(sequence: Assembled) -> int:
    """Tokens of one uncached pass."""
    return last_scored(sequence, len(sequence.actions) - 1)


def run_engine(
    network: Model,
    trajectories: list[TokenTrajectory],
    epsilon: float,
    kind: type[Search],
    lanes: int,
    **sizes,
) -> tuple[float, list[Cover], int]:
    """Seconds, covers and padded tokens of one warm engine run."""
    longest = max(length(t.assemble()) for t in trajectories)
    engine = Lanes(Engine(network, network.params, length=longest, search=kind, **sizes), lanes)
    engine.warm()
    begun = time.perf_counter()
    covers = [c[0] for c in engine.run(trajectories, [epsilon])]
    return time.perf_counter() - begun, covers, engine.stats.tokens


def measure(network, peer, trajectories, epsilon: float, args) -> list[tuple]:
    """One row per method: acceptance, least tokens, name, seconds, tokens."""
    sizes = {
        "lanes": args.lanes,
        "slots": -(-args.slots // args.lanes),
        "rows": args.rows,
        "row_tokens": args.row_tokens,
    }
    seconds, covers, forwarded = run_engine(
        network, trajectories, epsilon, Search, share_prompts=False, **sizes
    )
    by_id = {c.id: c for c in covers}
    work = [s for t in trajectories for s in candidates(t, by_id[t.id])]
    tokens = sum(map(length, work))
    scorer = Scorer(network, network.params)
    for size in sorted({bucket_length(length(s)) for s in work}):
        scorer.warm(size)
    loops = [
        ("torch, full logits", lambda s: torch_score(peer, s, full=True)),
        ("torch, gathered head", lambda s: torch_score(peer, s, full=False)),
        ("JAX loop", scorer.score),
    ]
    rows = [(name, time_loop(score, work, args.every), tokens) for name, score in loops]
    if not args.brief:
        spent, _, used = run_engine(
            network, trajectories, epsilon, PatientSearch, share_prompts=False, **sizes
        )
        rows.append(("cached", spent, used))
    rows.append(("cached, early exit", seconds, forwarded))
    if len(trajectories) > 1:
        spent, _, used = run_engine(network, trajectories, epsilon, Search, **sizes)
        rows.append(("and prompts shared", spent, used))
    accepted = sum(len(c.removed) for c in covers) / sum(len(c.removals) for c in covers)
    minimum = sum(c.tokens_minimum for c in covers)
    return [(accepted, minimum, *row) for row in rows]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory, float32 is used")
    parser.add_argument("--trajectories", required=True)
    parser.add_argument("--turns", default="8,16,30")
    parser.add_argument("--epsilons", default="0,0.1,1e9", help="few, some and all pass")
    parser.add_argument("--count", type=int, default=2, help="trajectories per row")
    parser.add_argument("--every", type=int, default=1, help="run every K-th loop candidate")
    parser.add_argument("--brief", action="store_true", help="leave out caches without early exit")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=16)
    parser.add_argument("--lanes", type=int, default=default_lanes())
    args = parser.parse_args()
    enable_compilation_cache()
    config = load_config(args.model)
    renderer = renderer_for(load_tokenizer(args.model), family_of(config.model_type))
    network = load_model(args.model)
    peer = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    console = Console(width=150)
    table = Table(title=f"LoGiC, float32, {args.count} trajectories per row")
    for name in ("turns", "accepted", "epsilon", "method", "tokens", "of minimum", "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right")
    table.add_column("x faster than\ntorch, gathered", justify="right")
    table.add_column("x faster than\ntorch, full logits", justify="right")
    for turns in map(int, args.turns.split(",")):
        trajectories = load_cut(args.trajectories, renderer, turns, args.count)
        for epsilon in map(float, args.epsilons.split(",")):
            rows = measure(network, peer, trajectories, epsilon, args)
            full, gathered = rows[0][3], rows[1][3]
            for accepted, minimum, name, seconds, tokens in rows:
                table.add_row(
                    str(turns),
                    f"{accepted:.0%}",
                    f"{epsilon:.3g}",
                    name,
                    f"{tokens:,}",
                    f"{tokens / minimum:.2f}",
                    f"{seconds:.1f}",
                    f"{gathered / seconds:.2f}",
                    f"{full / seconds:.2f}",
                )
            table.add_section()
            console.print(*(f"{r[2]}: {r[3]:.1f} s, {r[4]:,} tokens;" for r in rows))
            console.print(f"done: {turns} turns, acceptance {rows[0][0]:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
