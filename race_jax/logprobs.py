"""Log-probabilities of given tokens, without ever holding [T, V] logits.

The head is the widest product of a small model and the largest array of any model. So the hidden
states that are needed are gathered first, and projected a chunk at a time. Everything here is
float32 at temperature 1, whatever the dtype of the trunk: a threshold of 0.001 nats lies far below
bfloat16's steps. The normaliser runs over all V rows of the head, padding rows of the vocabulary
included, as transformers' does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 256


def _chunk_logprobs(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probabilities [C] of `targets` [C] under `hidden` [C, D] and `head` [V, D]."""
    logits = jax.lax.dot_general(
        hidden.astype(jnp.float32),
        head.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
    )
    # Subtracting the maximum first keeps the difference exact where the target is the maximum, so
    # that no rounding can make a log-probability positive.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(shifted, targets[:, None], axis=-1)[:, 0]
    return jnp.minimum(picked - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)), 0.0)


def _pad_rows(hidden: jax.Array, targets: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    extra = -len(targets) % chunk
    return jnp.pad(hidden, ((0, extra), (0, 0))), jnp.pad(targets, (0, extra))


def token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, *, chunk: int = CHUNK
) -> jax.Array:
    """Log-probability of each target token: log softmax(hidden_n . head)[targets_n].

    Differentiable; the backward pass recomputes each chunk's logits, so memory is [chunk, V] in
    both directions, flat in N.

    Args:
        hidden: float [N, D], the states at the positions *before* the targets.
        head: float [V, D].
        targets: int32 [N] in [0, V).
        chunk: Rows projected at a time.

    Returns:
        float32 [N] in nats, at most 0.

    Reference: the log pi of RACE eq. 4.
    """
    chunk = min(chunk, max(len(targets), 1))
    rows, wanted = _pad_rows(hidden, targets, chunk)

    @jax.checkpoint
    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _chunk_logprobs(block[0], head, block[1])

    blocks = (rows.reshape(-1, chunk, rows.shape[-1]), wanted.reshape(-1, chunk))
    return jax.lax.map(one, blocks).reshape(-1)[: len(targets)]


def leading_token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, count: jax.Array, *, chunk: int = 64
) -> jax.Array:
    """`token_logprobs` of the first `count` rows only; the work follows `count`, not N.

    One compiled program serves every count. For inference: a loop whose length is data has no
    gradient.

    Args:
        hidden: float [N, D].
        head: float [V, D].
        targets: int32 [N] in [0, V).
        count: int32 scalar in [0, N].
        chunk: Rows projected at a time; at most this many rows of padding are projected.

    Returns:
        float32 [N] in nats; 0 at and beyond `count` rounded up to a chunk.
    """
    size = len(targets)
    if size == 0:
        return jnp.zeros(0, jnp.float32)
    chunk = min(chunk, size)
    rows, wanted = _pad_rows(hidden, targets, chunk)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * chunk
        block = jax.lax.dynamic_slice_in_dim(rows, start, chunk)
        target = jax.lax.dynamic_slice_in_dim(wanted, start, chunk)
        values = _chunk_logprobs(block, head, target)
        return jax.lax.dynamic_update_slice_in_dim(out, values, start, 0)

    blocks = (count + chunk - 1) // chunk
    return jax.lax.fori_loop(0, blocks, body, jnp.zeros(len(wanted), jnp.float32))[:size]
