"""One trajectory's way through LoGiC, as a state machine that only counts and decides.

A `Search` says which tokens it wants forwarded next, takes their log-probabilities, and decides. It
knows nothing of devices, so the decisions can be tested without a network. Several thresholds walk
together for as long as they decide alike; where they part, the search splits.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from race_jax.logic.cover import Cover, Removal, first_forwarded, last_scored, require_finite
from race_jax.logic.scoring import action_means
from race_jax.types import Assembled, TokenTrajectory


class Outcome(enum.Enum):
    """What a batch of log-probabilities settled."""

    OPEN = "more tokens are needed"
    SCORED = "the full trajectory is scored"
    ACCEPTED = "every threshold takes the removal"
    REJECTED = "no threshold takes the removal"
    SPLIT = "some thresholds take the removal, others do not"


@dataclasses.dataclass
class Ledger:
    """What one threshold has decided and spent so far."""

    epsilon: float
    removals: list[Removal] = dataclasses.field(default_factory=list)
    forwarded: int = 0
    minimum: int = 0
    naive: int = 0
    shared: int = 0


class Search:
    """LoGiC on one trajectory, for one or more thresholds that have decided alike so far.

    Attributes:
        trajectory: The trajectory.
        ledgers: The thresholds that walk together, rising.
        sequence: What is being forwarded: the full trajectory or a candidate.
        turn: The turn under test; None while the full trajectory is scored.
        cursor: The next token to forward.
        results: The finished covers of this trajectory, shared by the searches that split from one.
    """

    def __init__(
        self, trajectory: TokenTrajectory, epsilons: tuple[float, ...], *, recurrent: bool = False
    ):
        """Begin with the full trajectory.

        Args:
            trajectory: The trajectory.
            epsilons: Thresholds, rising.
            recurrent: The model's state must be kept where each later test begins.
        """
        self.trajectory, self.recurrent = trajectory, recurrent
        self.ledgers = [Ledger(epsilon) for epsilon in epsilons]
        self.alive = list(self.ledgers)
        self.results: list[Cover] = []
        self.removed: tuple[int, ...] = ()
        self.untested = [t for t in trajectory.reasoned if t > 0]
        self.turn: int | None = None
        self.full = self.current = np.zeros(0)
        self._load(trajectory.assemble(), 0)
        self.length = self.stop
        for ledger in self.ledgers:
            ledger.minimum = ledger.naive = self.stop

    def _load(self, sequence: Assembled, start: int) -> None:
        """Make `sequence` the one to forward, from token `start` on."""
        self.sequence = sequence
        self.start = self.cursor = start
        self.stop = last_scored(sequence, len(self.trajectory.turns) - 1)
        self.logprobs = np.zeros(len(sequence.tokens), np.float32)
        self.is_target = np.zeros(len(sequence.tokens) + 1, bool)
        for begin, end in sequence.actions:
            self.is_target[begin:end] = True
        self.values: list[float] = []
        self.decreases: list[float] = []
        # Where the candidates of later turns will branch off, as `first_forwarded` will say.
        turns, begins = self.trajectory.turns, sequence.starts
        self.keeps = {int(begins[t]) - (not turns[t].skip): t for t in self.untested}

    @property
    def rest(self) -> int:
        """Tokens from the cursor to the last that any action needs."""
        return max(self.stop - self.cursor, 0)

    @property
    def reach(self) -> int:
        """Tokens that one step may forward: a recurrent state has to be kept where tests begin."""
        if not self.recurrent:
            return self.rest
        fence = min((place for place in self.keeps if place > self.cursor), default=self.stop)
        return min(fence - self.cursor, self.rest)

    @property
    def keep(self) -> int | None:
        """The turn whose test branches off at the cursor, if the model's state must be kept."""
        return self.keeps.get(self.cursor) if self.recurrent else None

    @property
    def sure(self) -> int:
        """Tokens that an exact run must forward next: to the end of the next unscored action."""
        if self.turn is None:
            return self.rest
        following = self.turn + len(self.decreases)
        return max(last_scored(self.sequence, following) - self.cursor, 0)

    @property
    def promising(self) -> bool:
        """Whether the tested turn's own action has passed, so that most likely all will."""
        return self.turn is not None and len(self.decreases) > 0

    @property
    def work(self) -> float:
        """Input tokens times thresholds, times the share of the passes that are done."""
        passes = 1 + sum(t > 0 for t in self.trajectory.reasoned)
        begun = 0 if self.turn is None else passes - len(self.untested) - 1
        current = 1 - self.rest / max(self.stop - self.start, 1)
        return self.length * len(self.ledgers) * min(begun + current, passes) / passes

    def advance(self, tokens: int, charged: int) -> None:
        """Note that the next `tokens` were given to the model, in rows of `charged` tokens."""
        self.cursor += tokens
        for ledger in self.alive:
            ledger.forwarded += charged

    @property
    def untouched(self) -> bool:
        """Whether nothing has been forwarded yet."""
        return self.turn is None and self.cursor == 0

    def skip(self, tokens: int) -> None:
        """Begin behind the first `tokens`, whose cache another trajectory's prompt provides."""
        self.cursor = tokens
        for ledger in self.ledgers:
            ledger.shared = tokens

    def settle(self) -> Outcome:
        """Decide as far as the forwarded tokens allow.

        Raises:
            ValueError: A likelihood is not finite.
        """
        if self.turn is None:
            return self._settle_full()
        turns = len(self.trajectory.turns)
        while self.turn + len(self.decreases) < turns and self.sure == 0:
            j = self.turn + len(self.decreases)
            begin, end = self.sequence.actions[j]
            value = float(self.logprobs[begin:end].astype(np.float64).mean())
            require_finite(np.asarray([value]), self.trajectory.id)
            self.values.append(value)
            self.decreases.append(float(self.current[j] - value))
            self._reject_above(j)
            if not self.alive:
                return Outcome.REJECTED
        if self.turn + len(self.decreases) < turns:
            return Outcome.OPEN
        for ledger in self.alive:
            self._close(ledger, turns - 1, accepted=True)
        return Outcome.ACCEPTED if len(self.alive) == len(self.ledgers) else Outcome.SPLIT

    def _settle_full(self) -> Outcome:
        if self.rest:
            return Outcome.OPEN
        logprobs = np.concatenate([self.logprobs[a:b] for a, b in self.sequence.actions])
        self.full = require_finite(action_means(self.sequence, logprobs), self.trajectory.id)
        self.current = self.full
        return Outcome.SCORED

    def _reject_above(self, j: int) -> None:
        """Let the thresholds that action j violates leave the test."""
        for ledger in [x for x in self.alive if self.decreases[-1] > x.epsilon]:
            self._close(ledger, j, accepted=False)
            self.alive.remove(ledger)

    def _close(self, ledger: Ledger, j: int, *, accepted: bool) -> None:
        assert self.turn is not None
        ledger.removals.append(Removal(self.turn, tuple(self.decreases), accepted))
        ledger.minimum += last_scored(self.sequence, j) - self.start

    def split(self) -> Search:
        """Take the thresholds that accepted out into a search of their own, and return it."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.untested = list(self.untested)
        other.ledgers = list(self.alive)
        self.ledgers = [x for x in self.ledgers if x not in self.alive]
        other.accept()
        return other

    def accept(self) -> None:
        """Make the candidate the sequence that later turns are compared with."""
        assert self.turn is not None
        self.current = np.concatenate([self.current[: self.turn], self.values])
        self.removed = (*self.removed, self.turn)

    def next_test(self) -> bool:
        """Load the next candidate; False when every turn is decided."""
        if not self.untested:
            return False
        self.turn = self.untested.pop(0)
        candidate = self.trajectory.assemble([*self.removed, self.turn])
        self._load(candidate, first_forwarded(candidate, self.turn))
        self.alive = list(self.ledgers)
        for ledger in self.ledgers:
            ledger.naive += self.stop
        return True

    def covers(self) -> list[Cover]:
        """The finished results, one per threshold."""
        return [
            Cover(
                self.trajectory.id,
                ledger.epsilon,
                tuple(ledger.removals),
                self.full,
                self.current,
                ledger.forwarded,
                ledger.minimum,
                ledger.naive,
                ledger.shared,
            )
            for ledger in self.ledgers
        ]
