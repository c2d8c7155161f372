"""LoGiC, Algorithm 1 of RACE: which turns of a finished trajectory can go without their reasoning.

`find_cover` is the algorithm as the paper writes it, one full pass per candidate, over any function
that scores actions. The engine (`race_jax.logic.engine`) takes the same decisions from cached
prefixes; the tests hold the two against each other.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from race_jax.types import Assembled, TokenTrajectory

EPSILON = 0.001
"""The paper's threshold, in nats per token."""

Score = Callable[[Assembled], np.ndarray]
"""The mean log-likelihood of every action of a sequence: RACE eq. 4, one value per turn."""


@dataclasses.dataclass(frozen=True)
class Removal:
    """One tested removal.

    Attributes:
        turn: The turn whose reasoning was taken out, from 0.
        decreases: d_j for j = turn, turn + 1, ... in order; it ends at the first turn that violates
            the threshold, since later turns cannot change the decision.
        accepted: Whether every d_j was at most epsilon.
    """

    turn: int
    decreases: tuple[float, ...]
    accepted: bool

    @property
    def max_decrease(self) -> float:
        """The largest d_j among the computed ones, nats per token."""
        return max(self.decreases)

    @property
    def worst_turn(self) -> int:
        """The turn, from 0, whose action lost most."""
        return self.turn + int(np.argmax(self.decreases))


@dataclasses.dataclass(frozen=True)
class Cover:
    """What LoGiC decided about one trajectory at one threshold.

    Attributes:
        id: The trajectory's name.
        epsilon: Threshold, nats per token.
        removals: The tested turns in order.
        loglik_full: float64 [turns], l_j with all reasoning in place.
        loglik_final: float64 [turns], l_j under the compressed trajectory.
        tokens_forwarded: Tokens given to the model for this result, rows' padding and early exit's
            overrun included; passes shared with other thresholds count in each.
        tokens_minimum: The fewest tokens that an exact run with prefix caches forwards for this
            trajectory alone.
        tokens_naive: What one full pass per candidate forwards.
        tokens_shared: Prompt tokens whose cache came from another trajectory; not forwarded.
    """

    id: str
    epsilon: float
    removals: tuple[Removal, ...]
    loglik_full: np.ndarray
    loglik_final: np.ndarray
    tokens_forwarded: int
    tokens_minimum: int
    tokens_naive: int
    tokens_shared: int = 0

    @property
    def removed(self) -> tuple[int, ...]:
        """Turns, from 0, whose reasoning LoGiC took out: the S_i of RACE eqs. 13 and 14."""
        return tuple(r.turn for r in self.removals if r.accepted)


def check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """The thresholds, each once, rising.

    Raises:
        ValueError: None given, or one that is negative, infinite or not a number.
    """
    for value in epsilons:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (real and math.isfinite(value) and value >= 0):
            raise ValueError(
                f"epsilon {value!r}: a threshold is a finite number of nats per token, at least 0 "
                f"(the paper uses {EPSILON})"
            )
    if not epsilons:
        raise ValueError("no epsilon given: name at least one threshold, such as 0.001")
    # Adding nought turns -0.0 into 0.0.
    return tuple(sorted({float(value) + 0.0 for value in epsilons}))


def require_finite(values: np.ndarray, name: str) -> np.ndarray:
    """`values`, or an error if the model produced something that is no likelihood.

    Raises:
        ValueError: A value is infinite or not a number.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ValueError(
            f"trajectory {name}: the likelihood of action {bad[0] + 1} is {values[bad[0]]}; the "
            "checkpoint or its dtype overflows on this input (try --dtype float32)"
        )
    return values


def find_fault(trajectory: TokenTrajectory) -> str:
    """Why a trajectory has no likelihoods to compare, in words; empty if it has."""
    if not trajectory.turns:
        return "it has no turn, so no action to score; leave it out"
    for number, turn in enumerate(trajectory.turns, 1):
        if not turn.action:
            return f"the action of turn {number} has no tokens; leave the trajectory out"
    if not (trajectory.prompt or trajectory.turns[0].reasoning or trajectory.turns[0].skip):
        return "nothing stands before its first action; a prompt must, if only one token"
    return ""


def last_scored(sequence: Assembled, turn: int) -> int:
    """How many tokens of `sequence` must be forwarded to score the action of `turn`."""
    return int(sequence.actions[turn, 1]) - 1


def first_forwarded(sequence: Assembled, turn: int) -> int:
    """Where forwarding must begin to score the actions from `turn` on.

    At the turn's first token; one before it if that is the action's own, for want of a skip form.
    """
    return int(min(sequence.starts[turn], sequence.actions[turn, 0] - 1))


def most_scored(trajectory: TokenTrajectory) -> int:
    """How many tokens the longest candidate forwards.

    The full trajectory's count, unless a skip form is longer than the reasoning that it replaces.
    """
    turns = [trajectory.turns[t] for t in trajectory.reasoned if t > 0]
    longer = sum(max(len(turn.skip) - len(turn.reasoning), 0) for turn in turns)
    return last_scored(trajectory.assemble(), len(trajectory.turns) - 1) + longer


def find_cover(trajectory: TokenTrajectory, score: Score, epsilon: float = EPSILON) -> Cover:
    """Algorithm 1, one full pass per candidate.

    For t = 2..T: take r_t out, keep what was taken out before, and accept iff

        d_j = l_j - l~_j <= epsilon   for all j in t..T.

    Args:
        trajectory: A finished trajectory.
        score: l_j of every action of a sequence, [turns].
        epsilon: Threshold, nats per token, at least 0. Equality accepts.

    Returns:
        The decisions. Turn 1 keeps its reasoning always; a turn that has none is not tested.

    Raises:
        ValueError: The trajectory or the threshold cannot be used, or a likelihood is not finite.

    Reference: RACE Algorithm 1, eqs. 6 to 11.
    """
    (epsilon,) = check_epsilons([epsilon])
    fault = find_fault(trajectory)
    if fault:
        raise ValueError(f"trajectory {trajectory.id}: {fault}")
    sequence = trajectory.assemble()
    last = len(trajectory.turns) - 1
    full = current = require_finite(score(sequence), trajectory.id)
    minimum = naive = last_scored(sequence, last)
    removed: list[int] = []
    removals = []
    for t in trajectory.reasoned:
        if t == 0:
            continue
        candidate = trajectory.assemble([*removed, t])
        values = require_finite(score(candidate), trajectory.id)
        decreases = current[t:] - values[t:]
        violating = np.flatnonzero(decreases > epsilon)
        end = last if violating.size == 0 else t + int(violating[0])
        naive += last_scored(candidate, last)
        minimum += last_scored(candidate, end) - first_forwarded(candidate, t)
        accepted = violating.size == 0
        removals.append(Removal(t, tuple(decreases[: end - t + 1].tolist()), accepted))
        if accepted:
            removed.append(t)
            current = np.concatenate([current[:t], values[t:]])
    return Cover(trajectory.id, epsilon, tuple(removals), full, current, naive, minimum, naive)
