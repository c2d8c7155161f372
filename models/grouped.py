"""Products of groups of rows with a matrix each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from race_jax.models.products import exact, product

_SMALLEST, _LARGEST = 8, 128  # rows of one product


def grouped_matmul(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group of rows times its own matrix, in the dtype of the weight, summed in float32.

    y_i = x_i W_g(i). TPUs have an instruction for it (`jax.lax.ragged_dot`). Elsewhere XLA would
    multiply all rows with all matrices, so there a loop takes a block of rows of one group at a
    time; it does as many products as there are rows, rounded up in each group.

    Args:
        x: [M, D], sorted by group; rows past the last group give 0.
        weight: [E, D, F], float32 or bfloat16.
        sizes: int32 [E], rows of each group, at most M in all.

    Returns:
        float32 [M, F].
    """
    return jax.lax.platform_dependent(
        x.astype(weight.dtype), weight, sizes, tpu=_ragged, default=_blocked
    )


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    out = jax.lax.ragged_dot(
        x, weight, sizes, precision=exact(weight.dtype), preferred_element_type=jnp.float32
    )
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), out, 0)


class _Blocks(NamedTuple):
    """Blocks of rows, each of one group.

    Attributes:
        total: int32 [], how many there are.
        ends: int32 [E], blocks of the groups up to each, itself included.
        firsts: int32 [E], first row of each group.
        sizes: int32 [E], rows of each group.
    """

    total: jax.Array
    ends: jax.Array
    firsts: jax.Array
    sizes: jax.Array


def _plan(sizes: jax.Array, block: int) -> _Blocks:
    ends = jnp.cumsum(-(-sizes // block))
    return _Blocks(ends[-1], ends, jnp.cumsum(sizes) - sizes, sizes)


def _block_rows(rows: int, groups: int) -> int:
    """Rows per block: about the mean group, as a power of two within bounds."""
    block = _SMALLEST
    while block < _LARGEST and block * groups < rows:
        block *= 2
    return block


def _find(blocks: _Blocks, index: jax.Array, block: int) -> tuple[jax.Array, ...]:
    """Group of a block, its place among the group's blocks, and its first row."""
    group = jnp.searchsorted(blocks.ends, index, side="right", method="compare_all")
    place = index - (blocks.ends[group] - -(-blocks.sizes[group] // block))
    return group, place, blocks.firsts[group] + place * block


def _multiply(
    spec: str, x: jax.Array, weight: jax.Array, sizes: jax.Array, width: int
) -> jax.Array:
    """The product of each block of `x` with its group's matrix: float32 [M, width]."""
    block = _block_rows(len(x), len(weight))
    blocks = _plan(sizes, block)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        # A block that runs past its group writes rows that the next one, in order, writes again.
        group, _, row = _find(blocks, index, block)
        part = jax.lax.dynamic_slice_in_dim(padded, row, block)
        own = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(out, product(spec, part, own), row, axis=0)

    out = jnp.zeros((len(padded), width), jnp.float32)
    out = jax.lax.fori_loop(0, blocks.total, step, out)[: len(x)]
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), out, 0)


@jax.custom_vjp
def _blocked(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return _multiply("cd,df->cf", x, weight, sizes, weight.shape[2])


def _blocked_forward(
    x: jax.Array, weight: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _blocked(x, weight, sizes), (x, weight, sizes)


def _blocked_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], given: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, weight, sizes = saved
    given = given.astype(weight.dtype)
    to_x = _multiply("cf,df->cd", given, weight, sizes, weight.shape[1])
    block = _block_rows(len(x), len(weight))
    blocks = _plan(sizes, block)
    x, given = (jnp.pad(rows, ((0, block), (0, 0))) for rows in (x, given))

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The blocks of a group follow one another, so one sum in float32 is enough.
        group, place, row = _find(blocks, index, block)
        own = (place * block + jnp.arange(block))[:, None] < blocks.sizes[group]
        parts = (
            jnp.where(own, jax.lax.dynamic_slice_in_dim(rows, row, block), 0) for rows in (x, given)
        )
        total = jnp.where(place == 0, 0, carry[1]) + product("cd,cf->df", *parts)
        out = jax.lax.dynamic_update_index_in_dim(carry[0], total.astype(weight.dtype), group, 0)
        return out, total

    start = (jnp.zeros_like(weight), jnp.zeros(weight.shape[1:], jnp.float32))
    to_weight, _ = jax.lax.fori_loop(0, blocks.total, step, start)
    return to_x.astype(x.dtype), to_weight, None


_blocked.defvjp(_blocked_forward, _blocked_backward)
