"""LoGiC at speed: cached prefixes, early exit, and many trajectories in one batch.

Every step forwards one array of rows, each a run of `row_tokens` consecutive tokens of some
trajectory. A trajectory owns a slot of the cache, which holds the prefix state of its accepted
context, and fills as many rows as it surely needs: the rest of its first pass, or its candidate up
to the next unscored action. Rows left over go to candidates that have passed their own action and
will most likely need them. So nothing is forwarded twice, little is forwarded in vain, and each
product is as large as the batch although the pieces are short.

A candidate overwrites the slot beyond the tested turn. What it overwrites is copied out first and
put back if the removal is rejected; if it is accepted, the candidate's cache is the new cache. A
recurrent model's state only moves forward: it is copied out wherever a later test will begin, so a
step ends there.

Trajectories of one environment begin alike: system prompt, tools, often the task. Where a prompt's
beginning is in some slot's cache already, it is copied instead of forwarded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from race_jax.logic.cover import Cover, check_epsilons, find_fault, first_forwarded, most_scored
from race_jax.logic.scoring import score_rows
from race_jax.logic.search import Outcome, Search
from race_jax.logic.seats import Batch, Seat, plan
from race_jax.logprobs import float32_head
from race_jax.prefixes import common_length
from race_jax.types import LanguageModel, Params, TokenTrajectory


@dataclasses.dataclass(frozen=True)
class Failure:
    """A trajectory that could not be scored, and why."""

    id: str
    reason: str


@dataclasses.dataclass
class Stats:
    """What an engine has spent.

    Attributes:
        steps: Forward calls.
        tokens: Tokens forwarded, all padding included: rows times row_tokens, summed.
        finished: Trajectories done or failed.
        shared: Prompt tokens copied from another slot instead.
        work: Progress in tokens of input: each trajectory's length times the share of it decided.
    """

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    shared: int = 0
    work: float = 0.0

    def plus(self, other: Stats) -> Stats:
        """Both together."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Stats(*(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclasses.dataclass
class _Resident:
    """The prompt whose prefix state a slot holds, and how much of it is there."""

    prompt: np.ndarray
    valid: int


class Engine:
    """Runs LoGiC over many trajectories with one checkpoint."""

    def __init__(
        self,
        model: LanguageModel,
        params: Params,
        *,
        length: int,
        slots: int = 16,
        rows: int = 32,
        row_tokens: int = 16,
        share_prompts: bool = True,
        search: type[Search] = Search,
    ):
        """Set up programs for one cache shape.

        Args:
            model: Pure forward functions.
            params: The model's parameters.
            length: The most tokens of any trajectory.
            slots: Trajectories in flight.
            rows: Rows per step at most; smaller steps use a half, a quarter or an eighth.
            row_tokens: Tokens per row, Q. Small rows waste less, large rows attend faster.
            share_prompts: Copy the cache of a prompt's beginning from another trajectory; not with
                a recurrent model, whose state there is gone.
            search: How one trajectory's removals are tested.

        Raises:
            ValueError: `length` exceeds the model's context, or a size is not positive.
        """
        for name, value in (("slots", slots), ("rows", rows), ("row_tokens", row_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if length > model.context_length:
            raise ValueError(
                f"length is {length} tokens, but the model's context is {model.context_length}"
            )
        self.model, self.params, self.head = model, params, float32_head(model, params)
        self.length, self.slots, self.row_tokens = length, slots, row_tokens
        self.share_prompts = share_prompts and not model.recurrent
        self.search = search
        self.buckets = sorted({max(rows >> shift, 1) for shift in range(4)})
        self.stats = Stats()
        # The last row of a sequence may reach row_tokens - 1 beyond its end.
        self.cache_length = length + row_tokens
        self._step = jax.jit(functools.partial(score_rows, model), donate_argnums=(2,))
        self._read = jax.jit(model.read_rows, static_argnums=(3,))
        self._write = jax.jit(model.write_rows, donate_argnums=(0,))
        self._read_states = jax.jit(model.read_states)
        self._write_states = jax.jit(model.write_states, donate_argnums=(0,))

    def update(self, params: Params) -> None:
        """Score with other parameters from the next run on."""
        self.params, self.head = params, float32_head(self.model, params)

    def warm(self) -> None:
        """Compile every program, on rows that belong to nobody."""
        cache = self.model.init_cache(self.params, self.slots, self.cache_length)
        for rows in self.buckets:
            tokens = np.zeros((rows, self.row_tokens), np.int32)
            slots, starts = np.full(rows, self.slots, np.int32), np.zeros(rows, np.int32)
            where = np.zeros(tokens.size, np.int32)
            copied = self._read(cache, slots, starts, self.row_tokens)
            cache = self._write(cache, copied, slots, starts)
            _, cache = self._step(
                self.params, self.head, cache, tokens, slots, starts, starts, where, where, 0
            )

    def run(
        self,
        trajectories: Iterable[TokenTrajectory],
        epsilons: Sequence[float],
        on_step: Callable[[Stats], None] | None = None,
    ) -> Iterator[list[Cover] | Failure]:
        """Decide every trajectory at every threshold, in the order in which they finish.

        Args:
            trajectories: Taken one by one as slots become free.
            epsilons: Thresholds, nats per token.
            on_step: Called after every step.

        Yields:
            The covers of one trajectory, thresholds rising; or why it has none.

        Raises:
            ValueError: A threshold is negative or not finite.
        """
        thresholds = check_epsilons(epsilons)
        source = iter(trajectories)
        parked: deque[tuple[Search, Any, dict[int, Any]]] = deque()
        seats: list[Seat] = []
        residents: dict[int, _Resident] = {}
        settled = 0.0
        cache = self.model.init_cache(self.params, self.slots, self.cache_length)
        while True:
            cache, failures = self._seat(seats, parked, residents, source, thresholds, cache)
            yield from failures
            if not seats:
                return
            cache, waiting = self._share(seats, residents, cache)
            ready = [seat for seat in seats if seat not in waiting]
            batch = plan(ready, self.buckets, self.row_tokens, self.slots)
            cache = self._run_batch(batch, cache)
            self._note_residents(seats, residents)
            cache, finished = self._settle(seats, parked, residents, cache)
            open_work = sum(x.work for x in [*(s.search for s in seats), *(p[0] for p in parked)])
            settled += sum(x.work for x in finished if isinstance(x, Search))
            self.stats.work = (settled + open_work) / len(thresholds)
            if on_step:
                on_step(self.stats)
            for item in finished:
                if isinstance(item, Failure):
                    self.stats.finished += 1
                    yield item
                    continue
                item.results.extend(item.covers())
                if len(item.results) == len(thresholds):
                    self.stats.finished += 1
                    yield sorted(item.results, key=lambda c: c.epsilon)

    def _seat(self, seats, parked, residents, source, thresholds, cache):
        """Fill free slots: parked searches first, so that few wait, then new trajectories."""
        failures = []
        while len(seats) < self.slots:
            slot = min(set(range(self.slots)) - {seat.slot for seat in seats})
            if parked:
                search, rows, states = parked.popleft()
                cache = self._write(cache, rows, np.asarray([slot]), np.asarray([0]))
                seats.append(Seat(search, slot, states=states))
                cache = self._resume(seats[-1], cache)
                prompt = np.asarray(search.trajectory.prompt)
                residents[slot] = _Resident(prompt, len(prompt))
                continue
            trajectory = next(source, None)
            if trajectory is None:
                break
            reason = find_fault(trajectory)
            if not reason and (longest := most_scored(trajectory)) > self.length:
                reason = f"{longest} tokens to score, but this run takes {self.length}"
            if reason:
                self.stats.finished += 1
                failures.append(Failure(trajectory.id, reason))
                continue
            search = self.search(trajectory, thresholds, recurrent=self.model.recurrent)
            seats.append(Seat(search, slot))
        return cache, failures

    def _resume(self, seat: Seat, cache):
        """Set a recurrent model's state to where the seat's test begins."""
        turn = seat.search.turn
        if not self.model.recurrent or turn is None:
            return cache
        states = seat.states.pop(turn)
        return self._write_states(cache, states, np.asarray([seat.slot]))

    def _share(self, seats, residents: dict[int, _Resident], cache):
        """Start untouched seats behind a prompt that is cached; returns those that should wait.

        A seat waits while the slot that it could copy from is still filling.
        """
        filling = {
            seat.slot for seat in seats if seat.search.turn is None and not seat.search.untouched
        }
        leaders: list[np.ndarray] = []
        waiting: list[Seat] = []
        for seat in seats:
            if not (self.share_prompts and seat.search.untouched):
                continue
            prompt = np.asarray(seat.search.trajectory.prompt)
            common = {slot: common_length(prompt, r.prompt) for slot, r in residents.items()}
            usable = {slot: min(n, residents[slot].valid) for slot, n in common.items()}
            soon = [n for slot, n in common.items() if slot in filling and slot != seat.slot]
            soon += [common_length(prompt, leader) for leader in leaders]
            donor = max(usable, key=lambda slot: (usable[slot], slot == seat.slot), default=None)
            now = usable[donor] if donor is not None else 0
            now = min(now, first_forwarded(seat.search.sequence, 0))
            if max(soon, default=0) >= now + self.row_tokens:
                waiting.append(seat)
            elif donor is None or now < self.row_tokens:
                leaders.append(prompt)
            else:
                now -= now % self.row_tokens
                if donor != seat.slot:
                    cache = self._copy(cache, donor, seat.slot, now // self.row_tokens)
                seat.search.skip(now)
                self.stats.shared += now
                residents[seat.slot] = _Resident(prompt, now)
        return cache, waiting

    def _copy(self, cache, donor: int, slot: int, rows: int):
        """Copy the first `rows` rows of one slot to another, in the shapes that steps use."""
        most = self.buckets[-1]
        for first in range(0, rows, most):
            index = np.arange(first, first + most, dtype=np.int32)
            inside = index < rows
            starts = np.where(inside, index * self.row_tokens, 0)
            source = np.where(inside, donor, self.slots).astype(np.int32)
            target = np.where(inside, slot, self.slots).astype(np.int32)
            copied = self._read(cache, source, starts, self.row_tokens)
            cache = self._write(cache, copied, target, starts)
        return cache

    @staticmethod
    def _note_residents(seats: list[Seat], residents: dict[int, _Resident]) -> None:
        """Note how far each slot's prompt has come."""
        for seat in seats:
            search = seat.search
            if not search.untouched:
                prompt = np.asarray(search.trajectory.prompt)
                valid = len(prompt) if search.turn is not None else min(search.cursor, len(prompt))
                residents[seat.slot] = _Resident(prompt, valid)

    def _run_batch(self, batch: Batch, cache):
        """Forward one step and hand the log-probabilities to the searches."""
        if any(seat.search.turn is not None for seat in batch.owners):
            before = self._read(cache, batch.slots, batch.starts, self.row_tokens)
            for seat in dict.fromkeys(batch.owners):
                if seat.search.turn is not None:
                    mine = np.full_like(batch.slots, self.slots)
                    for r, owner in enumerate(batch.owners):
                        if owner is seat:
                            mine[r] = seat.slot
                    seat.undo.append((before, mine, batch.starts))
        where = np.zeros((2, batch.tokens.size), np.int32)
        count = 0
        for seat, picks, aims in batch.targets:
            where[0, count : count + len(picks)] = picks
            where[1, count : count + len(picks)] = seat.search.sequence.tokens[aims]
            count += len(picks)
        out, cache = self._step(
            self.params,
            self.head,
            cache,
            batch.tokens,
            batch.slots,
            batch.starts,
            batch.counts,
            where[0],
            where[1],
            count,
        )
        logprobs = np.asarray(out)
        offset = 0
        for seat, picks, aims in batch.targets:
            seat.search.logprobs[aims] = logprobs[offset : offset + len(picks)]
            offset += len(picks)
            if (turn := seat.search.keep) is not None:
                seat.fresh[turn] = self._read_states(cache, np.asarray([seat.slot]))
        self.stats.steps += 1
        self.stats.tokens += batch.tokens.size
        return cache

    def _abandon(self, bad: Seat, seats, parked, residents, cache):
        """Give up on a trajectory at every threshold, and clear its slots.

        What is not a number in a slot would reach the next trajectory there, masked or not: nought
        times it is none either.
        """
        results = bad.search.results
        for seat in [s for s in seats if s.search.results is results]:
            slot, zero = np.asarray([seat.slot]), np.asarray([0])
            rows = self._read(cache, slot, zero, self.cache_length)
            cache = self._write(cache, jax.tree.map(jnp.zeros_like, rows), slot, zero)
            residents.pop(seat.slot, None)
            seats.remove(seat)
        kept = [item for item in parked if item[0].results is not results]
        parked.clear()
        parked.extend(kept)
        return cache

    def _settle(self, seats, parked, residents, cache):
        """Let every search decide; returns the cache and the searches that ended or failed."""
        finished = []
        for seat in list(seats):
            search = seat.search
            if seat not in seats:
                continue
            try:
                outcome = search.settle()
            except ValueError as error:
                cache = self._abandon(seat, seats, parked, residents, cache)
                finished.append(Failure(search.trajectory.id, str(error)))
                continue
            if outcome is Outcome.OPEN:
                continue
            if outcome is Outcome.ACCEPTED:
                search.accept()
            if outcome in (Outcome.ACCEPTED, Outcome.SCORED):
                seat.adopt()
            if outcome is Outcome.SPLIT:
                accepted = search.split()
                if accepted.next_test():
                    slot, zero = np.asarray([seat.slot]), np.asarray([0])
                    rows = self._read(cache, slot, zero, self.cache_length)
                    states = {**seat.states, **seat.fresh}
                    parked.append((accepted, jax.device_get(rows), states))
                else:
                    finished.append(accepted)
            if outcome in (Outcome.REJECTED, Outcome.SPLIT):
                # The latest first: a row that ended early was filled up, and the next began there.
                for rows, mine, starts in reversed(seat.undo):
                    cache = self._write(cache, rows, mine, starts)
            seat.undo.clear()
            seat.fresh = {}
            if search.next_test():
                cache = self._resume(seat, cache)
            else:
                seats.remove(seat)
                finished.append(search)
        return cache, finished
