"""Teacher-forced likelihoods of actions: one whole pass per sequence, in a few compiled shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from race_jax.logprobs import float32_head, leading_token_logprobs
from race_jax.types import Assembled, Cache, LanguageModel, Params


def bucket_length(length: int, *, smallest: int = 64) -> int:
    """The padded length for `length` tokens: two steps per doubling, 64, 96, 128, 192, 256 ...

    Args:
        length: Tokens, at least 1.
        smallest: The shortest bucket.
    """
    if length <= smallest:
        return smallest
    step = 1 << max((length - 1).bit_length() - 2, 0)
    return -(-length // step) * step


def scored_positions(sequence: Assembled, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The label shift, once: where to read hidden states and which tokens they must predict.

    Args:
        sequence: The laid-out trajectory.
        stop: Consider only actions that end at or before this token; all by default.

    Returns:
        (positions, targets), int32 [M]: the state at `positions[m]` predicts `targets[m]`.
    """
    stop = len(sequence.tokens) if stop is None else stop
    ranges = [np.arange(a, b, dtype=np.int32) for a, b in sequence.actions if b <= stop]
    tokens = np.concatenate(ranges) if ranges else np.zeros(0, np.int32)
    return tokens - 1, sequence.tokens[tokens]


def action_means(sequence: Assembled, logprobs: np.ndarray) -> np.ndarray:
    """l(a | h) = (1/M) sum_m log pi(a_m | h, a_<m) for every action.

    Args:
        sequence: The laid-out trajectory.
        logprobs: float [M], in the order of `scored_positions`.

    Returns:
        float64 [turns], nats per token.

    Reference: RACE eq. 4.
    """
    sizes = sequence.actions[:, 1] - sequence.actions[:, 0]
    sums = np.add.reduceat(logprobs.astype(np.float64), np.cumsum(sizes) - sizes)
    return sums / sizes


def score_rows(
    model: LanguageModel,
    params: Params,
    head: jax.Array,
    cache: Cache,
    tokens: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    places: jax.Array,
    targets: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One step of the engine: append rows to cached sequences, and score some of their tokens.

    Args:
        model: Pure forward functions.
        params: The model's parameters.
        head: float32 [V, D].
        cache: Of the model; donate it.
        tokens: int32 [R, Q], and with `slots`, `starts`, `counts` as `LanguageModel.extend` has
            them.
        slots: int32 [R].
        starts: int32 [R].
        counts: int32 [R].
        places: int32 [R Q], indices into the R Q tokens; those behind `count` are not read.
        targets: int32 [R Q], the token that the state at each place must predict.
        count: int32, how many places there are.

    Returns:
        Log-probabilities float32 [R Q] in nats, as `leading_token_logprobs`, and the cache.
    """
    hidden, cache = model.extend(params, cache, tokens, slots, starts, counts)
    states = hidden.reshape(-1, hidden.shape[-1])[places]
    return leading_token_logprobs(states, head, targets, count), cache


class Scorer:
    """Scores every action of a sequence in one uncached pass.

    Shapes come from `bucket_length`, so many lengths share a few compiled programs. The functions
    are pure: parameters are arguments, and may be sharded.
    """

    def __init__(self, model: LanguageModel, params: Params):
        """Set up for one checkpoint.

        Args:
            model: Pure forward functions.
            params: The model's parameters; the head is cast to float32 once, here.
        """
        self.model = model
        self.params = params
        self.head = float32_head(model, params)

    @functools.cached_property
    def _logprobs(self):
        @jax.jit
        def logprobs(params, head, tokens, length, positions, targets, count):
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            real = index < length
            hidden = self.model.forward(
                params, tokens, jnp.where(real, index, 0), real.astype(jnp.int32)
            )
            return leading_token_logprobs(hidden[0, positions], head, targets, count)

        return logprobs

    def warm(self, length: int) -> None:
        """Compile the program that scores `length` tokens."""
        self._run(np.zeros(length, np.int32), np.zeros((2, 0), np.int32), bucket_length(length))

    def _run(self, tokens: np.ndarray, where: np.ndarray, size: int) -> np.ndarray:
        """Log-probabilities of `where[1]` at positions `where[0]`, in one pass of padded `size`."""
        count = where.shape[1]
        row = np.zeros((1, size), np.int32)
        row[0, : len(tokens)] = tokens
        padded = np.zeros((2, size), np.int32)
        padded[:, :count] = where
        out = self._logprobs(self.params, self.head, row, len(tokens), *padded, count)
        return np.asarray(out)[:count]

    def score(self, sequence: Assembled, *, bucket: int | None = None) -> np.ndarray:
        """l_j for every action.

        Args:
            sequence: The laid-out trajectory.
            bucket: Padded length; by default `bucket_length` of what must be forwarded.

        Returns:
            float64 [turns], nats per token.

        Raises:
            ValueError: The sequence is longer than the model's context.

        Reference: RACE eq. 4.
        """
        length = int(sequence.actions[-1, 1]) - 1
        if length > self.model.context_length:
            raise ValueError(
                f"{length} tokens to score, but the model's context is "
                f"{self.model.context_length} tokens"
            )
        size = bucket or bucket_length(length)
        where = np.stack(scored_positions(sequence))
        out = self._run(sequence.tokens[:length], where, size)
        return action_means(sequence, out)
