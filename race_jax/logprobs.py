"""Log-probabilities of given tokens, without ever holding [T, V] logits.

The head is the widest product of a small model and the largest array of any model. So the hidden
states that are needed are gathered first, and projected a chunk at a time. Everything here is
float32 at temperature 1, whatever the dtype of the trunk: a threshold of 0.001 nats lies far below
bfloat16's steps. The normaliser runs over all V rows of the head, padding rows of the vocabulary
included, as transformers' does.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from race_jax.sharding import TABLE, ambient_mesh, spec_for
from race_jax.types import LanguageModel, Params

CHUNK = 256


def _chunk_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, axis: str | None = None
) -> jax.Array:
    """Log-probabilities [C] of `targets` [C] under `hidden` [C, D] and `head` [V, D].

    With a mesh axis, `head` is this device's rows of the whole; the maximum, the sum and the
    target's logit are then combined over the axis, three numbers per token.
    """
    logits = jax.lax.dot_general(
        hidden.astype(jnp.float32),
        head.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
    )
    # Subtracting the maximum first keeps the difference exact where the target is the maximum, so
    # that no rounding can make a log-probability positive.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    if axis is None:
        shifted = logits - top
        picked = jnp.take_along_axis(shifted, targets[:, None], axis=-1)[:, 0]
        return jnp.minimum(picked - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)), 0.0)
    shifted = logits - jax.lax.pmax(top, axis)
    size = len(head)
    place = targets - jax.lax.axis_index(axis) * size
    own = (place >= 0) & (place < size)
    picked = jnp.take_along_axis(shifted, jnp.where(own, place, 0)[:, None], axis=-1)[:, 0]
    picked = jax.lax.psum(jnp.where(own, picked, 0), axis)
    total = jax.lax.psum(jnp.sum(jnp.exp(shifted), axis=-1), axis)
    known = (targets >= 0) & (targets < size * jax.lax.axis_size(axis))
    return jnp.where(known, jnp.minimum(picked - jnp.log(total), 0.0), jnp.nan)


def _pad_rows(hidden: jax.Array, targets: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    extra = -len(targets) % chunk
    return jnp.pad(hidden, ((0, extra), (0, 0))), jnp.pad(targets, (0, extra))


def float32_head(model: LanguageModel, params: Params) -> jax.Array:
    """The head [V, D] in float32; make it again whenever the parameters change."""
    return model.head(params).astype(jnp.float32)


def token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, *, chunk: int = CHUNK
) -> jax.Array:
    """Log-probability of each target token: log softmax(hidden_n . head)[targets_n].

    Differentiable; the backward pass recomputes each chunk's logits, so memory is [chunk, V] in
    both directions, flat in N.

    On a mesh the rows are divided over its other axes and the vocabulary over `tensor`; logits are
    never gathered.

    Args:
        hidden: float [N, D] or [B, T, D], the states at the positions *before* the targets. Whole
            batches [B, T, D] stay where they lie on a mesh.
        head: float [V, D].
        targets: int32 [N] or [B, T] in [0, V).
        chunk: Rows projected at a time, on each device.

    Returns:
        float32 [N] or [B, T] in nats, at most 0.

    Reference: the log pi of RACE eq. 4.
    """
    if ambient_mesh() is None:
        return _local_logprobs(hidden, head, targets, chunk)
    shape = targets.shape
    if len(shape) == 1:
        hidden, targets = _pad_rows(hidden, targets, _spread())
    axes = ("tokens",) if len(shape) == 1 else ("batch", "time")
    rows = spec_for(axes, targets.shape, name="targets")
    states = spec_for((*axes, None), hidden.shape, name="hidden")
    scored = jax.shard_map(
        functools.partial(_local_logprobs, chunk=chunk, axis="tensor"),
        in_specs=(states, spec_for(("vocab", None), head.shape, name="head"), rows),
        out_specs=rows,
    )(hidden, head, targets)
    return scored[: shape[0]]


def _spread() -> int:
    """Over how many devices flat rows are divided."""
    mesh = ambient_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in TABLE["tokens"])


def _local_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, chunk: int, axis: str | None = None
) -> jax.Array:
    """`token_logprobs` on one device, in chunks."""
    size = targets.size
    chunk = min(chunk, max(size, 1))
    rows, wanted = _pad_rows(hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), chunk)

    @jax.checkpoint
    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _chunk_logprobs(block[0], head, block[1], axis)

    blocks = (rows.reshape(-1, chunk, rows.shape[-1]), wanted.reshape(-1, chunk))
    return jax.lax.map(one, blocks).reshape(-1)[:size].reshape(targets.shape)


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
        float32 [N] in nats; 0 at and beyond `count` rounded up to a chunk, of each device on a
        mesh.
    """
    size = len(targets)
    if size == 0:
        return jnp.zeros(0, jnp.float32)
    if ambient_mesh() is None:
        return _leading_logprobs(hidden, head, targets, count, min(chunk, size))
    # Neighbouring rows go to different devices, so that the leading ones are divided evenly.
    spread = _spread()
    hidden, targets = _pad_rows(hidden, targets, spread)
    each = len(targets) // spread

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, count: jax.Array):
        return _leading_logprobs(
            hidden[:, 0], head, targets[:, 0], count, min(chunk, each), "tensor"
        )[:, None]

    rows = spec_for((None, "tokens"))
    vocab = spec_for(("vocab", None), head.shape, name="head")
    scored = jax.shard_map(
        local,
        in_specs=(spec_for((None, "tokens", None)), vocab, rows, spec_for(())),
        out_specs=rows,
        check_vma=False,
    )(
        hidden.reshape(each, spread, -1),
        head,
        targets.reshape(each, spread),
        (jnp.asarray(count) + spread - 1) // spread,
    )
    return scored.reshape(-1)[:size]


def _leading_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    chunk: int,
    axis: str | None = None,
) -> jax.Array:
    """`leading_token_logprobs` on one device."""
    rows, wanted = _pad_rows(hidden, targets, chunk)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * chunk
        block = jax.lax.dynamic_slice_in_dim(rows, start, chunk)
        target = jax.lax.dynamic_slice_in_dim(wanted, start, chunk)
        values = _chunk_logprobs(block, head, target, axis)
        return jax.lax.dynamic_update_slice_in_dim(out, values, start, 0)

    blocks = (count + chunk - 1) // chunk
    out = jax.lax.fori_loop(0, blocks, body, jnp.zeros(len(wanted), jnp.float32))
    return out[: len(targets)]
