"""Causal attention within segments, and attention of new tokens to a cache."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from race_jax.models.products import product

MASKED = -1e30  # finite, so that a row with nothing to see gives numbers and finite gradients
_OUTER = 16  # query chunks written out in the program; each sees only the keys up to its end
_INNER = 128  # queries whose scores are alive at once
_KEYS = 128  # keys per step of the attention to a cache
_MERGED = 192  # most query rows (tokens times heads per group) of one product
# Scores of one step. XLA splits larger element-wise work over its threads, and for pieces of this
# kind the hand-over costs more than it saves.
_SCORES = 24576


def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention in which a token sees itself and earlier tokens of its own segment.

    With `ends` a row holds trees, depth first: the token at place j is seen from places j to
    `ends[j] - 1`, which are itself and all that follows it on some branch.

    The scores of a block of queries live only while that block is worked on, forward and backward,
    so memory grows with T and not with T^2. Padding (segment 0) sees padding alone.

    Args:
        q: [B, T, N, H].
        k: [B, T, K, H]; query head n reads key head n // (N / K).
        v: [B, T, K, H].
        segment_ids: int32 [B, T]; not read where there are `ends`.
        ends: int32 [B, T], the first place from which each token is not seen any more.

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    rows, length, heads, width = q.shape
    kv_heads = k.shape[2]
    scaled = (q / math.sqrt(width)).astype(q.dtype).swapaxes(1, 2)
    scaled = scaled.reshape(rows, kv_heads, heads // kv_heads, length, width)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    chunk = -(-length // (_OUTER * _INNER)) * _INNER
    parts = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        parts.append(
            _chunk_attention(
                scaled[..., start:end, :],
                k[..., :end, :],
                v[..., :end, :],
                segment_ids,
                start,
                ends,
            )
        )
    out = jnp.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
    return out.reshape(rows, heads, length, width).swapaxes(1, 2)


def _chunk_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    start: int,
    ends: jax.Array | None,
) -> jax.Array:
    """Queries `start`.. [B, K, G, C, H] on the keys [B, K, S, H] up to their end, in blocks."""
    rows, kv_heads, groups, size, width = q.shape
    seen = segment_ids[:, : k.shape[2]]
    own = segment_ids[:, start : start + size]
    spots = jnp.arange(k.shape[2])

    @jax.checkpoint
    def block(q: jax.Array, own: jax.Array, places: jax.Array) -> jax.Array:
        if ends is None:
            same = own[:, :, None] == seen[:, None, :]
        else:
            same = places[:, None] < ends[:, None, : k.shape[2]]
        allowed = same & (places[:, None] >= spots)
        return masked_attention(q, k, v, allowed)

    if size <= _INNER:
        return block(q, own, start + jnp.arange(size))
    pad = -size % _INNER
    places = (start + jnp.arange(size + pad)).reshape(-1, _INNER)
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, pad), (0, 0)])
    q = jnp.moveaxis(q.reshape(rows, kv_heads, groups, -1, _INNER, width), 3, 0)
    own = jnp.pad(own, [(0, 0), (0, pad)]).reshape(rows, -1, _INNER).swapaxes(0, 1)
    out = jax.lax.map(lambda part: block(*part), (q, own, places))
    return jnp.moveaxis(out, 0, 3).reshape(rows, kv_heads, groups, -1, width)[..., :size, :]


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """Softmax attention under an explicit mask, with the softmax in float32.

    Args:
        q: [B, K, G, Q, H], divided by sqrt(H) already.
        k: [B, K, S, H].
        v: [B, K, S, H].
        allowed: bool [B, Q, S], true somewhere in each row.

    Returns:
        [B, K, G, Q, H] in the dtype of `q`.
    """
    scores = product("bkgqh,bksh->bkgqs", q, k)
    scores = jnp.where(allowed[:, None, None], scores, MASKED)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    mixed = product("bkgqs,bksh->bkgqh", weights.astype(v.dtype), v)
    return (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(q.dtype)


class Mixture(NamedTuple):
    """An online softmax over keys that come in pieces; leading axes are the caller's.

    Attributes:
        top: float32 [...], the highest score so far.
        total: float32 [...], the sum of the weights exp(score - top).
        mixed: float32 [..., H], the values summed with these weights.
    """

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


def add_scores(so_far: Mixture, scores: jax.Array, spec: str, values: jax.Array) -> Mixture:
    """Take one more piece of keys into an online softmax.

    Where all scores so far are `MASKED`, they count until the first other one shrinks them to
    nothing.

    Args:
        so_far: Of the pieces before.
        scores: float32 [..., S], `MASKED` where a key is not seen.
        spec: How weights like `scores` and `values` make something like `so_far.mixed`.
        values: Of the piece.
    """
    top = jax.lax.stop_gradient(jnp.maximum(so_far.top, jnp.max(scores, axis=-1)))
    weights = jnp.exp(scores - top[..., None])
    shrink = jnp.exp(so_far.top - top)
    added = product(spec, weights.astype(values.dtype), values)
    return Mixture(
        top,
        so_far.total * shrink + jnp.sum(weights, axis=-1),
        so_far.mixed * shrink[..., None] + added,
    )


class Jobs(NamedTuple):
    """Which rows attend together: runs of neighbours in one slot, cut into pieces of a few sizes.

    Attributes:
        first: int32 [sizes, R]; the first row of each piece of that size, then filler.
        number: int32 [sizes]; how many pieces of that size there are.
    """

    first: jax.Array
    number: jax.Array


def job_sizes(rows: int, queries: int) -> tuple[int, ...]:
    """The sizes of pieces, falling to 1, for `rows` rows of `queries` query rows each."""
    sizes = [1]
    while 2 * sizes[0] <= rows and 2 * sizes[0] * queries <= _MERGED:
        sizes.insert(0, 2 * sizes[0])
    return tuple(sizes)


def plan_jobs(slots: jax.Array, sizes: tuple[int, ...]) -> Jobs:
    """Cut runs of equal `slots` int32 [R] into pieces of `sizes`, the largest first."""
    index = jnp.arange(slots.shape[0])
    opens = jnp.concatenate([jnp.array([True]), slots[1:] != slots[:-1]])
    run = jnp.cumsum(opens) - 1
    start = jnp.full_like(index, slots.shape[0]).at[run].min(index)[run]
    place, length = index - start, jnp.zeros_like(index).at[run].add(1)[run]
    firsts, counts, before = [], [], jnp.zeros_like(index)
    for size in sizes:
        within = (length - before) // size * size
        mine = (place >= before) & (place < before + within) & ((place - before) % size == 0)
        firsts.append(jnp.argsort(~mine, stable=True))
        counts.append(jnp.sum(mine))
        before += within
    return Jobs(jnp.stack(firsts), jnp.stack(counts))


def cached_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    jobs: Jobs,
) -> jax.Array:
    """Attention of rows of new tokens to a cache that holds them already.

    Neighbouring rows of one slot share the reading of its keys, which costs as much as the products
    when rows are short. Each piece runs an online softmax over blocks of keys, up to its last token
    and not to the end of the cache.

    Args:
        q: [R, Q, N, H].
        keys: [L, slots + 1, K, S, H].
        values: [L, slots + 1, K, S, H].
        layer: int32 [], which layer of the cache.
        slots: int32 [R].
        starts: int32 [R], position of each row's first token; `starts + Q` is at most S.
        jobs: From `plan_jobs(slots, job_sizes(R, Q * N / K))`.

    Returns:
        [R, Q, N, H] in the dtype of `q`.
    """
    rows, size, heads, width = q.shape
    kv_heads = keys.shape[2]
    groups = heads // kv_heads
    grouped = (q / math.sqrt(width)).astype(q.dtype).reshape(rows, size, kv_heads, groups, width)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, size * groups, width)
    offsets = jnp.repeat(jnp.arange(size), groups)

    def job(piece: int, together: int, firsts: jax.Array, index: jax.Array, out: jax.Array):
        first, head = firsts[index // (kv_heads // together)], index % (kv_heads // together)
        at = (first, head * together, 0, 0)
        queries = jax.lax.dynamic_slice(grouped, at, (piece, together, *grouped.shape[2:]))
        begin = jax.lax.dynamic_slice_in_dim(starts, first, piece)
        places = (begin[:, None] + offsets).reshape(-1)
        mixed = _online_softmax(
            queries.swapaxes(0, 1).reshape(together, -1, width),
            places,
            keys,
            values,
            (layer, slots[first], head * together),
            jnp.min(begin),
            jnp.max(places),
        )
        mixed = mixed.reshape(together, piece, -1, width).swapaxes(0, 1).astype(q.dtype)
        return jax.lax.dynamic_update_slice(out, mixed, at)

    out = jnp.zeros_like(grouped)
    for i, piece in enumerate(job_sizes(rows, size * groups)):
        fits = max(1, _SCORES // (piece * size * groups * _KEYS))
        together = max(h for h in range(1, kv_heads + 1) if kv_heads % h == 0 and h <= fits)
        work = functools.partial(job, piece, together, jobs.first[i])
        out = jax.lax.fori_loop(0, jobs.number[i] * (kv_heads // together), work, out)
    out = out.reshape(rows, kv_heads, size, groups, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape)


def _online_softmax(
    q: jax.Array,
    places: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    at: tuple[jax.Array, jax.Array, jax.Array],
    low: jax.Array,
    high: jax.Array,
) -> jax.Array:
    """Queries [K, M, H] at positions `places` [M] in low..high, on (layer, slot, first head)."""
    kv_heads, count, width = q.shape
    block = min(_KEYS, keys.shape[3])

    def load(store: jax.Array, begin: jax.Array) -> jax.Array:
        shape = (1, 1, kv_heads, block, width)
        return jax.lax.dynamic_slice(store, (*at, begin, 0), shape)[0, 0]

    def step(masked: bool, index: jax.Array, carry: Mixture) -> Mixture:
        # The last block is moved back where it would pass the cache's end.
        begin = jnp.minimum(index * block, keys.shape[3] - block)
        v = load(values, begin)
        scores = product("kmh,ksh->kms", q, load(keys, begin))
        if masked:
            spots = begin + jnp.arange(block)
            seen = (spots >= index * block) & (spots <= places[:, None])
            scores = jnp.where(seen, scores, MASKED)
            # What lies beyond the last token is stale, and 0 times a stale NaN is NaN.
            v = jnp.where((spots <= high)[:, None], v, 0)
        return add_scores(carry, scores, "kms,ksh->kmh", v)

    carry = Mixture(
        jnp.full((kv_heads, count), MASKED),
        jnp.zeros((kv_heads, count)),
        jnp.zeros((kv_heads, count, width)),
    )
    full = low // block
    carry = jax.lax.fori_loop(0, full, functools.partial(step, False), carry)
    carry = jax.lax.fori_loop(full, high // block + 1, functools.partial(step, True), carry)
    return carry.mixed / carry.total[..., None]
