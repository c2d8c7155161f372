"""Finished rollouts and their covers to the rows of a policy update.

Each trajectory becomes one example as it was sampled: eq. 13's tokens with their advantage, the
log-probabilities they were sampled with, and which of them the cover masks. Eq. 14 asks for
`</think>` in the *compressed* context, which was never sampled, so a trajectory with removed turns
brings a second example: itself without the removed reasoning, up to the last turn that closes at
once. Removals later in a trajectory leave what stands before an earlier turn as it is, so one such
example serves all turns of the trajectory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from race_jax.losses import Reduction
from race_jax.packing import ACTION, DECISION, OTHER, fill_rows, make_example, plan_rows
from race_jax.rollout.results import Rollout
from race_jax.types import TokenTrajectory

Arrays = dict[str, np.ndarray]


class Judged(NamedTuple):
    """A trajectory with all that an update needs to know of it.

    Attributes:
        tokens: Its ids.
        logprobs: One per sampled id in nats, all turns' one after the other.
        advantage: A_i.
        removed: S_i, turns from 0 whose reasoning the cover took out; empty if it failed.
        kept: Turns from 0 whose reasoning the cover tested and kept; empty if it failed.
    """

    tokens: TokenTrajectory
    logprobs: tuple[float, ...]
    advantage: float
    removed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


def judged(
    rollout: Rollout, tokens: TokenTrajectory, advantage: float, removed: Collection[int] | None
) -> Judged:
    """A rollout as an update needs it.

    Args:
        rollout: With these tokens.
        tokens: Its ids.
        advantage: A_i.
        removed: S_i; None where LoGiC found no cover.

    Raises:
        ValueError: Ids were given to the policy within its turns.
    """
    if removed is None:
        return Judged(tokens, sampled_logprobs(rollout), advantage)
    # The first turn is kept without a test, so it says nothing about the need to reason.
    kept = tuple(t for t in tokens.reasoned if t > 0 and t not in removed)
    return Judged(tokens, sampled_logprobs(rollout), advantage, tuple(removed), kept)


class RowStats(NamedTuple):
    """What the rows of an update hold.

    Attributes:
        policy: Policy tokens, the weight of eq. 13.
        masked: Those that the cover masks.
        turns: Turns of all trajectories, the weight of eq. 14.
        closings: Turns that eq. 14 sums over.
        sampled: Tokens of the trajectories as sampled.
        extra: Tokens forwarded on top of them for the compressed contexts of eq. 14.
        padding: Places of the rows that hold nothing.
    """

    policy: int
    masked: int
    turns: int
    closings: int
    sampled: int
    extra: int
    padding: int


def outcome_reward(rollout: Rollout, bonus: float = 0.0) -> float:
    """R + bonus * (turns without reasoning / turns); the bonus on successful trajectories only.

    Args:
        rollout: A finished episode.
        bonus: AdaptThink's delta, 0.05 there; 0 gives the environment's reward.

    Reference: the AdaptThink baseline of RACE.
    """
    if not (bonus and rollout.success and rollout.notes):
        return rollout.reward
    quick = sum(note.reasoning_tokens == 0 for note in rollout.notes)
    return rollout.reward + bonus * quick / len(rollout.notes)


def sampled_logprobs(rollout: Rollout) -> tuple[float, ...]:
    """The log-probabilities that a rollout's ids were sampled with, one after the other.

    Raises:
        ValueError: Ids were given to the policy within its turns, so they have none.
    """
    if any(note.forced for note in rollout.notes):
        raise ValueError(
            f"the rollout {rollout.id} has turns whose first ids were not sampled; a policy update "
            "takes rollouts of the agent `react`"
        )
    return tuple(value for note in rollout.notes for value in note.logprobs)


def policy_example(item: Judged, place: int, *, masking: bool = True) -> Arrays:
    """A trajectory as sampled, for eq. 13.

    Args:
        item: The trajectory.
        place: From `packing.decision_place`.
        masking: Whether the reasoning of removed turns is left out of K.

    Returns:
        Arrays [n] for `fill_rows`: `tokens`, `kinds`, `completion` (in P), `keep` (in K),
        `old_logprobs`, `advantages`, `close_weight` (0), and `asked`, true where a kept turn could
        have closed at once.

    Raises:
        ValueError: There is not one log-probability per sampled id.
    """
    example = make_example(item.tokens, place)
    completion = example.kinds != OTHER
    if completion.sum() != len(item.logprobs):
        raise ValueError(
            f"the trajectory {item.tokens.id} has {completion.sum()} sampled ids and "
            f"{len(item.logprobs)} log-probabilities; there must be one each"
        )
    keep = completion.copy()
    if masking:
        for t in item.removed:
            begin, end, _ = example.turns[t]
            keep[begin:end] &= example.kinds[begin:end] == ACTION
    asked = np.zeros(len(completion), bool)
    asked[[int(example.turns[t, 0]) + place for t in item.kept]] = True
    old = np.zeros(len(completion), np.float32)
    old[completion] = item.logprobs
    return {
        "tokens": example.tokens,
        "kinds": example.kinds,
        "completion": completion,
        "keep": keep,
        "old_logprobs": old,
        "advantages": np.where(completion, item.advantage, 0).astype(np.float32),
        "close_weight": np.zeros(len(completion), np.float32),
        "asked": asked & (example.kinds == DECISION),
    }


def closure_example(
    tokens: TokenTrajectory, removed: Collection[int], place: int, weight: float
) -> Arrays | None:
    """A trajectory without the removed reasoning, for eq. 14.

    Args:
        tokens: The trajectory.
        removed: S_i.
        place: From `packing.decision_place`.
        weight: Factor of each turn's term in the loss's sum.

    Returns:
        Arrays as of `policy_example`, of the ids up to the `</think>` of the last turn in S_i;
        only the `</think>` of turns in S_i count. None without such turns.
    """
    if not removed:
        return None
    example = make_example(tokens, place, removed)
    at = np.asarray([int(example.turns[t, 0]) + place for t in sorted(removed)])
    count = int(at[-1]) + 1
    kinds, close = np.full(count, OTHER, np.uint8), np.zeros(count, np.float32)
    kinds[at], close[at] = DECISION, weight
    nothing = np.zeros(count, bool)
    return {
        "tokens": example.tokens[:count],
        "kinds": kinds,
        "completion": nothing,
        "keep": nothing,
        "old_logprobs": np.zeros(count, np.float32),
        "advantages": np.zeros(count, np.float32),
        "close_weight": close,
        "asked": nothing,
    }


def make_batch(
    items: Sequence[Judged],
    *,
    place: int,
    length: int,
    rows: int,
    closure: float,
    masking: bool = True,
    reduction: Reduction = "token-mean",
) -> tuple[Arrays, RowStats]:
    """Trajectories of all groups to the rows of one update.

    The step divides one sum by one weight W, that of the policy loss. A closing token's term
    therefore carries lambda * W / (sum_i T_i), so that the quotient is

        L_actor = L_GRPO + lambda * L_close

    Args:
        items: At least one trajectory, failed ones too.
        place: From `packing.decision_place`.
        length: Tokens of a row.
        rows: The number of rows is a multiple of this.
        closure: lambda, at least 0; at 0 no compressed context is laid out.
        masking: Whether the cover masks reasoning in eq. 13.
        reduction: The rule of the policy loss; W is its weight.

    Returns:
        Arrays [B, T] as `fill_rows` gives them, and what they hold. B / rows is 1, 2, 3, 4, 6, 8,
        12, ..., so that few programs are compiled.

    Raises:
        ValueError: There is no trajectory, one is longer than a row, or lambda is negative.
    """
    if not items:
        raise ValueError("there is no trajectory to make rows of")
    if not (np.isfinite(closure) and closure >= 0):
        raise ValueError(f"lambda is {closure}; it must be a finite number, at least 0")
    sampled = [policy_example(item, place, masking=masking) for item in items]
    for item, example in zip(items, sampled, strict=True):
        if len(example["tokens"]) > length:
            raise ValueError(
                f"the trajectory {item.tokens.id} has {len(example['tokens'])} tokens and a row "
                f"{length}; raise the row's length or lower the limit of a trajectory"
            )
    policy = int(sum(example["completion"].sum() for example in sampled))
    turns = sum(len(item.tokens.turns) for item in items)
    total = policy if reduction == "token-mean" else len(items)
    compressed = []
    if closure:
        weight = closure * total / turns
        made = (closure_example(item.tokens, item.removed, place, weight) for item in items)
        compressed = [example for example in made if example is not None]
    examples = sampled + compressed
    lengths = [len(example["tokens"]) for example in examples]
    plan = plan_rows(lengths, length)
    plan += [[]] * (rows * round_parts(-(-len(plan) // rows)) - len(plan))
    batch = fill_rows([[examples[n] for n in row] for row in plan], length)
    stats = RowStats(
        policy=policy,
        masked=int(sum((e["completion"] & ~e["keep"]).sum() for e in sampled)),
        turns=turns,
        closings=sum(len(item.removed) for item in items) if closure else 0,
        sampled=sum(lengths[: len(sampled)]),
        extra=sum(lengths[len(sampled) :]),
        padding=len(plan) * length - sum(lengths),
    )
    return batch, stats


def round_parts(parts: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (parts - 1).bit_length()
    return power * 3 // 4 if power >= 4 and parts <= power * 3 // 4 else power


def task_order(tasks: int, seed: int, step: int, count: int) -> list[int]:
    """The tasks of a step: each pass takes all tasks in an order of its own, `count` at a time.

    What is left at the end of a pass and would not fill a step is left out of it, so that no step
    has a task twice.

    Args:
        tasks: How many there are.
        seed: Of the orders.
        step: From 0.
        count: Tasks of a step.

    Raises:
        ValueError: There are fewer tasks than a step takes.
    """
    if count > tasks:
        raise ValueError(f"a step takes {count} tasks, but there are {tasks}; lower prompts")
    epoch, at = divmod(step, tasks // count)
    order = np.random.default_rng((seed, epoch)).permutation(tasks)
    return order[at * count : (at + 1) * count].tolist()
