r"""Gated DeltaNet as pure functions: in chunks, token by token, and its causal convolution.

Each value head keeps a state S [dk, dv]. A token with key k, value v, decay exp(g) and rate b moves
it, and its query reads it:

    S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

In chunks of C tokens this is products of matrices: what the tokens of a chunk owe to one another is
solved at once (a unit lower triangular system), and a state passes from chunk to chunk. No
exponential here has a positive argument, so strong decay underflows to 0 and nothing overflows.

A sequence may be cut anywhere, over rows or over devices, and the pieces stay exact:

* `fresh` marks tokens before which the state is dropped: where a segment begins.
* `delta_chunked` takes the state before its first token and returns the one after its last.
* `causal_conv` takes the inputs before its first token; `conv_window` says what to hand on.
* A piece acts on the state as S_out = A S_in + B, whatever S_in is; `delta_transition` returns A
  and B. Devices that hold consecutive pieces can so exchange (A, B) instead of waiting for one
  another: device j enters with S_j = A_{j-1} S_{j-1} + B_{j-1}, from S_0 = 0, and then runs
  `delta_chunked` from S_j. Where a segment begins inside a piece, A is 0.

Dim letters: C tokens of a chunk, K key heads, G value heads for each key head, V = K G value heads.

Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
_BLOCK = 16  # chunks whose inner products are alive at once
_SMALL = 8  # triangular blocks up to this size are multiplied without a matrix product
_HIGHEST = jax.lax.Precision.HIGHEST


class Delta(NamedTuple):
    """What the tokens of rows ask of the states. All arrays are float32 but for `fresh`.

    Attributes:
        q: Queries [B, T, K, dk], of unit length divided by sqrt(dk).
        k: Keys [B, T, K, dk], of unit length.
        v: Values [B, T, V, dv].
        decay: Logarithm of what is kept of the state, [B, T, V], at most 0.
        rate: How far the state moves towards the value, [B, T, V], in [0, 1].
        fresh: bool [B, T], whether the state is dropped before the token. A token with `decay` and
            `rate` 0 that is not fresh leaves no trace.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    rate: jax.Array
    fresh: jax.Array


class Chunks(NamedTuple):
    """What chunks do to a state, and read from it. Leading axes are the caller's.

    Attributes:
        read: Queries decayed from the chunk's beginning, [..., K, G, C, dk].
        pairs: What each token reads of each token's new value, [..., K, G, C, C].
        forget: Keys that ask the state what is to be replaced, [..., K, G, C, dk].
        value: New values before the state's answer is taken off, [..., K, G, C, dv].
        write: Keys decayed to the chunk's end, [..., K, G, C, dk].
        keep: Share of the state that is left at the chunk's end, [..., K, G].
    """

    read: jax.Array
    pairs: jax.Array
    forget: jax.Array
    value: jax.Array
    write: jax.Array
    keep: jax.Array


def unit(x: jax.Array) -> jax.Array:
    """Unit length: x / sqrt(sum(x^2) + 1e-6) over the last axis, in float32; 0 stays 0."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def find_fresh(segment_ids: jax.Array) -> jax.Array:
    """Where a segment begins: bool [B, T], true where the id is not that of the token before."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)


def causal_conv(x: jax.Array, kernel: jax.Array, window: jax.Array, fresh: jax.Array) -> jax.Array:
    """silu(sum_j kernel[..., W - 1 - j] x_{t-j}) over the W latest inputs of the token's segment.

    Args:
        x: [B, T, ...].
        kernel: [..., W]; the last tap is the token's own.
        window: [B, W - 1, ...], the inputs before the first token; 0 where there are none.
        fresh: bool [B, T], whether the token begins a segment.

    Returns:
        float32 [B, T, ...].
    """
    length, taps = x.shape[1], kernel.shape[-1]
    inputs = jnp.concatenate([window, x], axis=1).astype(jnp.float32)
    runs = jnp.pad(jnp.cumsum(fresh, axis=1), ((0, 0), (taps - 1, 0)))
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        shifted = jax.lax.slice_in_dim(inputs, tap, tap + length, axis=1)
        own = runs[:, tap : tap + length] == runs[:, taps - 1 :]
        own = own.reshape(own.shape + (1,) * (x.ndim - 2))
        total += jnp.where(own, shifted, 0) * kernel[..., tap].astype(jnp.float32)
    return jax.nn.silu(total)


def conv_window(x: jax.Array, window: jax.Array, fresh: jax.Array) -> jax.Array:
    """The window for what follows `x`: its last W - 1 inputs, 0 where they are another segment's.

    Args:
        x: [B, T, ...].
        window: [B, W - 1, ...], the one that `x` began with.
        fresh: bool [B, T].

    Returns:
        [B, W - 1, ...].
    """
    size = window.shape[1]
    runs = jnp.pad(jnp.cumsum(fresh, axis=1), ((0, 0), (size, 0)))
    inputs = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    own = runs[:, x.shape[1] :] == runs[:, -1:]
    return jnp.where(own.reshape(own.shape + (1,) * (x.ndim - 2)), inputs[:, x.shape[1] :], 0)


def delta_chunked(
    delta: Delta,
    state: jax.Array | None = None,
    *,
    precision: jax.lax.Precision | None = _HIGHEST,
) -> tuple[jax.Array, jax.Array]:
    """Outputs and final states of rows, in chunks of 64 tokens.

    Segments may begin anywhere. Chunks are worked on 16 at a time and recomputed in the backward
    pass, so memory beyond the result does not grow with T.

    Args:
        delta: Rows [B, T, ...].
        state: float32 [B, V, dk, dv], the states before the first tokens; None for 0.
        precision: Of the products; they are summed in float32 in any case.

    Returns:
        float32 [B, T, V, dv], and the states after the last tokens.
    """
    batch, length, keys, width = delta.k.shape
    values, out_width = delta.v.shape[2:]
    size = chunk_size(length)
    count = -(-length // size)
    block = min(count, _BLOCK)
    blocks = -(-count // block)
    pad = blocks * block * size - length

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, blocks, block, size, *x.shape[2:]), 0, 2)

    if state is None:
        state = jnp.zeros((batch, values, width, out_width), jnp.float32)
    state = state.reshape(batch, keys, values // keys, width, out_width)

    def step(state: jax.Array, part: Delta) -> tuple[jax.Array, jax.Array]:
        def through(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
            out, state = pass_chunk(chunk, state, precision)
            return state, out

        return jax.lax.scan(through, state, prepare_chunks(part, precision))

    body = jax.checkpoint(step, prevent_cse=False) if blocks > 1 else step
    state, out = jax.lax.scan(body, state, Delta(*map(split, delta)))
    # [blocks, block, B, K, G, C, dv] -> [B, T, V, dv]
    out = out.transpose(2, 0, 1, 5, 3, 4, 6).reshape(batch, -1, values, out_width)
    return out[:, :length], state.reshape(batch, values, width, out_width)


def delta_transition(
    delta: Delta, *, precision: jax.lax.Precision | None = _HIGHEST
) -> tuple[jax.Array, jax.Array]:
    """What rows do to any state that they are entered with: S_out = A S_in + B.

    A is found as the state of further value columns that start at the identity and take no values.

    Args:
        delta: Rows [B, T, ...]. Queries are not read.
        precision: Of the products.

    Returns:
        A float32 [B, V, dk, dk] and B float32 [B, V, dk, dv].
    """
    batch, _, values, out_width = delta.v.shape
    width = delta.k.shape[-1]
    wide = jnp.pad(delta.v, ((0, 0), (0, 0), (0, 0), (width, 0)))
    start = jnp.eye(width, width + out_width)
    start = jnp.broadcast_to(start, (batch, values, *start.shape))
    _, state = delta_chunked(delta._replace(v=wide), start, precision=precision)
    return state[..., :width], state[..., width:]


def delta_step(
    delta: Delta, state: jax.Array, *, precision: jax.lax.Precision | None = _HIGHEST
) -> tuple[jax.Array, jax.Array]:
    """One token of each row: the recurrent form, for decoding.

    Args:
        delta: Rows [B, ...] without an axis of time.
        state: float32 [B, V, dk, dv].
        precision: Of the products.

    Returns:
        float32 [B, V, dv] and the states after the token.
    """
    groups = delta.v.shape[1] // delta.k.shape[1]
    q, k = (jnp.repeat(x, groups, axis=1) for x in (delta.q, delta.k))
    keep = jnp.where(delta.fresh[:, None], 0, jnp.exp(delta.decay))
    state = state * keep[..., None, None]
    answer = jnp.einsum("bvk,bvkd->bvd", k, state, precision=precision)
    moved = (delta.v - answer) * delta.rate[..., None]
    state = state + k[..., None] * moved[..., None, :]
    return jnp.einsum("bvk,bvkd->bvd", q, state, precision=precision), state


def chunk_size(length: int) -> int:
    """Tokens of a chunk for rows of `length` tokens: a power of two, at most 64."""
    return min(CHUNK, 1 << max(length - 1, 0).bit_length())


def prepare_chunks(delta: Delta, precision: jax.lax.Precision | None = _HIGHEST) -> Chunks:
    """Everything about chunks that needs no state.

    Args:
        delta: Chunks [..., C, heads, width], C a power of two.
        precision: Of the products.
    """
    keys, groups = delta.k.shape[-2], delta.v.shape[-2] // delta.k.shape[-2]

    axis = delta.fresh.ndim - 1

    def by_head(x: jax.Array) -> jax.Array:  # [..., C, V, ...] -> [..., K, G, C, ...]
        x = x.swapaxes(axis, axis + 1)
        return x.reshape(*x.shape[:axis], keys, groups, *x.shape[axis + 1 :])

    decay, rate, v = by_head(delta.decay), by_head(delta.rate), by_head(delta.v)
    k, q = (jnp.moveaxis(x, -2, -3)[..., None, :, :] for x in (delta.k, delta.q))
    total = jnp.cumsum(decay, axis=-1)
    runs = jnp.cumsum(delta.fresh, axis=-1)[..., None, None, :]
    size = runs.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    linked = (runs[..., :, None] == runs[..., None, :]) & lower
    between = jnp.where(linked, total[..., :, None] - total[..., None, :], 0)
    between = jnp.where(linked, jnp.exp(between), 0)
    since = jnp.where(runs == 0, jnp.exp(total), 0)
    until = jnp.where(runs == runs[..., -1:], jnp.exp(total[..., -1:] - total), 0)

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision)

    overlap = product("...id,...jd->...ij", k, k)
    inverse = _invert(jnp.where(jnp.tril(lower, -1), overlap * between * rate[..., None], 0))
    return Chunks(
        read=q * since[..., None],
        pairs=product("...id,...jd->...ij", q, k) * between,
        forget=product("...ij,...jd->...id", inverse, k * (rate * since)[..., None]),
        value=product("...ij,...jd->...id", inverse, v * rate[..., None]),
        write=k * until[..., None],
        keep=since[..., -1],
    )


def pass_chunk(
    chunk: Chunks, state: jax.Array, precision: jax.lax.Precision | None = _HIGHEST
) -> tuple[jax.Array, jax.Array]:
    """Lead states through one chunk each.

    Args:
        chunk: Chunks [..., K, G, C, width].
        state: float32 [..., K, G, dk, dv].
        precision: Of the products.

    Returns:
        float32 [..., K, G, C, dv] and the states after it.
    """

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision)

    value = chunk.value - product("...ck,...kd->...cd", chunk.forget, state)
    out = product("...ck,...kd->...cd", chunk.read, state)
    out += product("...ij,...jd->...id", chunk.pairs, value)
    added = product("...ck,...cd->...kd", chunk.write, value)
    return out, chunk.keep[..., None, None] * state + added


@jax.custom_jvp
def _invert(lower: jax.Array) -> jax.Array:
    """The inverse of I + `lower`, strictly lower triangular [..., C, C], C a power of two.

    Diagonal blocks are inverted in pairs, and the pairs in pairs:

        [X 0; Y Z]^-1 = [X^-1 0; -Z^-1 Y X^-1 Z^-1]

    as stable as substitution. A series of powers of `lower` would not be: tokens with equal keys
    and little decay make powers that grow like binomials and cancel.
    """
    total = lower.shape[-1]
    lead = lower.shape[:-2]
    blocks = jnp.ones((total, *lead, 1, 1), lower.dtype)
    size = 1
    while size < total:
        count = total // (2 * size)
        at = jnp.arange(count)
        tiles = lower.reshape(*lead, count, 2, size, count, 2, size)
        corner = tiles[..., at, 1, :, at, 0, :]
        first, second = blocks[0::2], blocks[1::2]
        corner = -_multiply(second, _multiply(corner, first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return blocks[0]


@_invert.defjvp
def _invert_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = _invert(*primals)
    inner = jnp.einsum("...ij,...jk->...ik", tangents[0], inverse, precision=_HIGHEST)
    return inverse, -jnp.einsum("...ij,...jk->...ik", inverse, inner, precision=_HIGHEST)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of small square matrices."""
    if a.shape[-1] <= _SMALL:
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=_HIGHEST)


def scale_queries(q: jax.Array) -> jax.Array:
    """Queries of unit length divided by sqrt(dk)."""
    return unit(q) / math.sqrt(q.shape[-1])
