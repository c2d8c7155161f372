"""Held-out loss by kind of token, and whether a model closes the block where it should.

The first token that a policy samples in a turn decides the turn: `</think>` closes the block at
once (a SKIP turn), anything else begins to reason (a THINK turn). On held-out turns of both kinds
the model's own probability of `</think>` there is the rate at which it would close at once when
sampled at temperature 1. A model that has learnt *when* to skip closes on SKIP turns and not on
THINK turns; one that has only learnt to skip closes on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from race_jax.packing import ACTION, DECISION, REASONING
from race_jax.train.distributed import largest_of_all
from race_jax.train.optimizer import compute_params, matrices
from race_jax.train.state import Trainee
from race_jax.train.step import Arrays, ComputeConfig, logprobs_at, places_in
from race_jax.types import Params

Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Per number: a sum and its weight, added over batches and divided once."""


def make_evaluation(trainee: Trainee, compute: ComputeConfig, close: int) -> Callable[..., Sums]:
    """The jitted `(trained, frozen, batch, places, decisions) -> sums` over a held-out batch.

    Args:
        trainee: The model and what is trained.
        compute: How to compute.
        close: Id of `</think>`.

    Returns:
        A function of the trained and the frozen parameters, arrays [B, T] with `kinds`, and the
        most places with loss and with a decision in any row. It gives sums in nats and numbers of
        tokens for `loss`, `loss_reasoning`, `loss_decision`, `loss_action`, and sums of
        probabilities and numbers of turns for `close_on_skip` and `close_on_think`.
    """
    wide = matrices(trainee.axes)

    def run(trained: Params, frozen: Params, batch: Arrays, places: int, decisions: int) -> Sums:
        params = compute_params(trainee.params(trained, frozen), wide, compute.dtype)
        keys = ("tokens", "positions", "segment_ids")
        hidden = trainee.model.forward(params, *(batch[key] for key in keys))
        head = trainee.model.head(params)

        nats, there = logprobs_at(hidden, head, batch, places, compute)
        kinds = jnp.where(there["loss_mask"], there["kinds"], 0)

        def mean(mask: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask)

        decided = batch["loss_mask"] & (batch["kinds"] == DECISION)
        asked = {
            "loss_mask": decided,
            "skip": batch["targets"] == close,
            "targets": jnp.full_like(batch["targets"], close),
        }
        closing, turns = logprobs_at(hidden, head, asked, decisions, compute)
        skip = turns["skip"]
        chance = jnp.exp(closing)
        return {
            "loss": mean(there["loss_mask"], -nats),
            "loss_reasoning": mean(kinds == REASONING, -nats),
            "loss_decision": mean(kinds == DECISION, -nats),
            "loss_action": mean(kinds == ACTION, -nats),
            "close_on_skip": mean(turns["loss_mask"] & skip, chance),
            "close_on_think": mean(turns["loss_mask"] & ~skip, chance),
        }

    return jax.jit(run, static_argnames=("places", "decisions"))


def evaluate(
    evaluation: Callable[..., Sums],
    trained: Params,
    frozen: Params,
    batches: Iterable[Mapping[str, np.ndarray]],
    place: Callable[[Mapping[str, np.ndarray]], Arrays],
) -> dict[str, float]:
    """Go over held-out batches.

    Args:
        evaluation: From `make_evaluation`.
        trained: Trained parameters.
        frozen: Parameters under adapters, or an empty dict.
        batches: Host arrays.
        place: Puts them on the devices.

    Returns:
        `eval/...` numbers; losses and rates with no tokens or turns behind them are left out.
    """
    total: dict[str, np.ndarray] = {}
    for batch in batches:
        width = batch["tokens"].shape[1]
        mask = np.asarray(batch["loss_mask"], bool)
        decided = mask & (np.asarray(batch["kinds"]) == DECISION)
        most = largest_of_all([places_in(places, width) for places in (mask, decided)]).tolist()
        sums = evaluation(trained, frozen, place(batch), *most)
        for name, pair in sums.items():
            total[name] = total.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    found = {f"eval/{name}": float(s / w) for name, (s, w) in total.items() if w > 0}
    for kind in ("skip", "think"):
        found[f"eval/turns_{kind}"] = float(total[f"close_on_{kind}"][1]) if total else 0.0
    return found


def shown(found: Mapping[str, float]) -> str:
    """The numbers of `evaluate` in a line."""
    names = ("loss", "loss_reasoning", "loss_decision", "loss_action")
    rates = ("close_on_skip", "close_on_think")
    parts = [
        f"{n.replace('_', ' ')} {found[f'eval/{n}']:.4f}" for n in names if f"eval/{n}" in found
    ]
    parts += [
        f"closes on {n.rpartition('_')[2].upper()} turns {found[f'eval/{n}']:.1%}"
        for n in rates
        if f"eval/{n}" in found
    ]
    return ", ".join(parts)


def close_table(rounds: Mapping[str, Mapping[str, float]]) -> Table:
    """The 2 x 2 table: what the model does at once on held-out SKIP and THINK turns.

    Args:
        rounds: Results of `evaluate` by a title for each, such as `step 0`.
    """
    table = Table(title="At the first token of a held-out turn, the model")
    table.add_column("turn")
    table.add_column("turns", justify="right")
    for title in rounds:
        table.add_column(f"closes\n{title}", justify="right")
        table.add_column(f"thinks\n{title}", justify="right")
    for kind in ("skip", "think"):
        cells = []
        for found in rounds.values():
            rate = found.get(f"eval/close_on_{kind}")
            cells += ["-", "-"] if rate is None else [f"{rate:.1%}", f"{1 - rate:.1%}"]
        count = max((found.get(f"eval/turns_{kind}", 0) for found in rounds.values()), default=0)
        table.add_row(kind.upper(), f"{count:.0f}", *cells)
    return table
