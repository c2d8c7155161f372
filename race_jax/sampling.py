"""Drawing the next token from logits: an inverse distribution function in two levels.

The log-probability that comes with a token is that of the whole distribution at the sampling
temperature, over all V rows of the head as in `race_jax.logprobs`, before top-p, top-k and before
unknown ids are left out. So a trainer that divides its logits by the same temperature finds the
same number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK = 512  # tokens per block of the distribution's upper level


class Rule(NamedTuple):
    """How each row draws; `SamplingConfig` has the meaning.

    Attributes:
        temperature: float32 [S], at least 0; 0 takes the most probable token.
        top_p: float32 [S], in (0, 1].
        top_k: int32 [S]; 0 for all.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array


def uniforms(keys: jax.Array, counts: jax.Array) -> jax.Array:
    """One number in [0, 1) per row, which its own key and count alone determine.

    Args:
        keys: uint32 [S, 2], the data of threefry keys.
        counts: int32 [S], how many numbers each row has drawn before.

    Returns:
        float32 [S].
    """

    def one(key: jax.Array, count: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, count))

    return jax.vmap(one)(keys, counts)


def draw(
    logits: jax.Array, rule: Rule, chance: jax.Array, known: int
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row.

    With p = softmax(logits / temperature), the token is the first whose cumulative probability
    exceeds `chance`, among the ids below `known` that top-k and then top-p leave. Tokens that tie
    with the last one kept are kept too.

    Args:
        logits: float32 [S, V].
        rule: How each row draws.
        chance: float32 [S], in [0, 1).
        known: Ids from here on are never drawn, in [1, V].

    Returns:
        Tokens int32 [S], and their log-probabilities float32 [S] in nats: log p over all V; at
        temperature 0, those at temperature 1.
    """
    greedy = rule.temperature == 0
    scaled = logits / jnp.where(greedy, 1, rule.temperature)[:, None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    shifted = scaled - top
    normaliser = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    allowed = jnp.where(jnp.arange(logits.shape[-1]) < known, shifted, -jnp.inf)
    best = jnp.argmax(allowed, axis=-1)
    # Where padding rows of the head lead, the known tokens' weights could all underflow.
    allowed -= jnp.take_along_axis(allowed, best[:, None], axis=-1)
    cut = (rule.top_p < 1) | (rule.top_k > 0)
    allowed = jax.lax.cond(jnp.any(cut & ~greedy), _truncate, lambda x, _: x, allowed, rule)
    tokens = jnp.where(greedy, best, _invert(jnp.exp(allowed), chance)).astype(jnp.int32)
    picked = jnp.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0]
    return tokens, jnp.minimum(picked - normaliser, 0.0)


def _invert(weights: jax.Array, chance: jax.Array) -> jax.Array:
    """The first index at which the running sum of `weights` [S, V] exceeds its share `chance` [S].

    Sums run over blocks first, then within the one block: a sum over all V would cost more than a
    small model's step.
    """
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % _BLOCK))).reshape(rows, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    block, before = _first_above(sums, chance * jnp.sum(sums, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    place, _ = _first_above(inside, chance * jnp.sum(sums, axis=-1) - before)
    return block * _BLOCK + place


def _first_above(weights: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the running sum first exceeds `level`, and the sum before; weights there are positive.

    Rounding may leave no such index, then it is the last of positive weight.
    """
    running = jnp.cumsum(weights, axis=-1)
    spots = jnp.arange(weights.shape[-1])
    last = jnp.max(jnp.where(weights > 0, spots, 0), axis=-1)
    above = (running > level[:, None]) & (weights > 0)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
    return index, jnp.take_along_axis(running - weights, index[:, None], axis=-1)[:, 0]


def _truncate(shifted: jax.Array, rule: Rule) -> jax.Array:
    """Leave what top-k and then top-p keep; the rest becomes -inf.

    Both are thresholds, found by bisection over the order of float32: a sort of V numbers costs
    several times as much.
    """
    size = shifted.shape[-1]
    k = jnp.where(rule.top_k > 0, jnp.minimum(rule.top_k, size), size)

    def enough(floor: jax.Array) -> jax.Array:
        return jnp.sum(shifted >= floor[:, None], axis=-1) >= k

    kept = jnp.where(shifted >= _highest(enough, len(k))[:, None], shifted, -jnp.inf)
    weights = jnp.exp(kept)
    wanted = rule.top_p * jnp.sum(weights, axis=-1)

    def reached(floor: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept >= floor[:, None], weights, 0), axis=-1) >= wanted

    floor = jnp.where(rule.top_p < 1, _highest(reached, len(k)), -jnp.inf)
    return jnp.where(kept >= floor[:, None], kept, -jnp.inf)


def _highest(holds, rows: int) -> jax.Array:
    """For each row the greatest float32 in [-inf, 0] at which `holds`; it holds at -inf.

    The bits of floats below zero, read as integers, rise as the floats fall.
    """
    bottom = jnp.full(rows, 0x7F800000, jnp.int32)  # of infinity, the sign left out

    def step(_: int, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = span  # the answer's magnitude lies in [low, high], and high holds
        middle = low + (high - low) // 2
        good = holds(-jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    _, found = jax.lax.fori_loop(0, 31, step, (jnp.zeros_like(bottom), bottom))
    return -jax.lax.bitcast_convert_type(found, jnp.float32)
