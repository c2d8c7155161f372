"""Causal attention within segments, and attention of new tokens to a cache."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a row with nothing to see gives numbers and finite gradients
_OUTER = 16  # query chunks written out in the program; each sees only the keys up to its end
_INNER = 128  # queries whose scores are alive at once


def segment_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Softmax attention in which a token sees itself and earlier tokens of its own segment.

    The scores of a block of queries live only while that block is worked on, forward and backward,
    so memory grows with T and not with T^2. Padding (segment 0) sees padding alone.

    Args:
        q: [B, T, N, H].
        k: [B, T, K, H]; query head n reads key head n // (N / K).
        v: [B, T, K, H].
        segment_ids: int32 [B, T].

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    length = q.shape[1]
    chunk = max(_INNER, -(-length // _OUTER))
    chunk = -(-chunk // _INNER) * _INNER
    parts = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        parts.append(_chunk_attention(q[:, start:end], k[:, :end], v[:, :end], segment_ids, start))
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def _chunk_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, start: int
) -> jax.Array:
    """Queries `start` .. `start` + C on the keys up to their end, in blocks of queries."""
    rows, size = q.shape[:2]
    seen = segment_ids[:, : k.shape[1]]
    own = segment_ids[:, start : start + size]
    block = jax.checkpoint(_block_attention)
    if size <= _INNER:
        return block(q, k, v, own, seen, start + jnp.arange(size))
    pad = -size % _INNER

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, _INNER, *x.shape[2:]), 1, 0)

    places = (start + jnp.arange(size + pad)).reshape(-1, _INNER)
    out = jax.lax.map(
        lambda part: block(part[0], k, v, part[1], seen, part[2]), (split(q), split(own), places)
    )
    return jnp.moveaxis(out, 0, 1).reshape(rows, size + pad, *q.shape[2:])[:, :size]


def _block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    own: jax.Array,
    seen: jax.Array,
    places: jax.Array,
) -> jax.Array:
    """Attention of queries at `places` int32 [Q], of segments `own` [B, Q], to keys 0..S."""
    allowed = (own[:, :, None] == seen[:, None, :]) & (
        places[:, None] >= jnp.arange(k.shape[1])[None, :]
    )
    return masked_attention(q, k, v, allowed)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """Softmax attention under an explicit mask, with the softmax in float32.

    Args:
        q: [B, Q, N, H].
        k: [B, S, K, H].
        v: [B, S, K, H].
        allowed: bool [B, Q, S].

    Returns:
        [B, Q, N, H] in the dtype of `q`.
    """
    rows, size, heads, width = q.shape
    groups = heads // k.shape[2]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(rows, size, k.shape[2], groups, width)
    scores = jnp.einsum(
        "bqkgh,bskh->bkgqs", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(allowed[:, None, None], scores / math.sqrt(width), _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum(
        "bkgqs,bskh->bqkgh", weights, v, precision=precision, preferred_element_type=jnp.float32
    )
    return mixed.reshape(q.shape).astype(q.dtype)
