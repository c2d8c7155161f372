"""Rows of tokens that move the recurrent states of a cache: in order, or all slots at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from race_jax.models.cache import KVCache
from race_jax.models.deltanet import (
    Chunks,
    Delta,
    causal_conv,
    chunk_size,
    delta_step,
    pass_chunk,
    prepare_chunks,
)


class HybridStates(NamedTuple):
    """What gated DeltaNet keeps, for all slots of a cache or for some.

    Attributes:
        state: float32 [L, slots, V, dk, dv], the states.
        windows: The latest W - 1 inputs of the convolution, of queries, keys and values,
            [L, slots, W - 1, heads, width].
    """

    state: jax.Array
    windows: tuple[jax.Array, jax.Array, jax.Array]


class HybridCache(NamedTuple):
    """What a hybrid keeps of the tokens it has seen; each part has its own blocks' layers.

    Attributes:
        entries: Keys and values of the blocks with attention.
        states: Of the blocks with gated DeltaNet; its last slot is the spare one too.
    """

    entries: KVCache
    states: HybridStates


class Rows(NamedTuple):
    """Which slots rows of tokens belong to. Rows that share one are neighbours, in order.

    Attributes:
        slots: int32 [R], indices into the stores.
        starts: int32 [R]; a row that starts at 0 finds an empty state.
        counts: int32 [R], tokens that count, at most the rows' length; only the last row of a slot
            may have fewer.
    """

    slots: jax.Array
    starts: jax.Array
    counts: jax.Array


def convolve_rows(
    x: jax.Array, kernel: jax.Array, store: jax.Array, layer: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of rows, each after the inputs that its slot holds.

    Args:
        x: [R, Q, ...].
        kernel: [..., W].
        store: Windows [L, slots + 1, W - 1, ...].
        layer: int32 [], which of them.
        rows: Where the rows belong.

    Returns:
        float32 [R, Q, ...], and the store.
    """
    size, still = store.shape[2], jnp.zeros(x.shape[:2], bool)
    if x.shape[1] == 1:

        def shift(windows: jax.Array) -> tuple[jax.Array, jax.Array]:
            inputs = jnp.concatenate([windows, x.astype(store.dtype)], axis=1)
            counted = (rows.counts > 0).reshape(-1, *(1,) * (x.ndim - 1))
            return windows, jnp.where(counted, inputs[:, 1:], windows)

        windows, store = _in_turns(shift, store, layer, rows)
        return causal_conv(x, kernel, windows, still), store

    def step(store: jax.Array, item: tuple[jax.Array, Rows]) -> tuple[jax.Array, jax.Array]:
        x, row = item
        window = jnp.where(row.starts == 0, 0, store[layer, row.slots])
        inputs = jnp.concatenate([window, x.astype(store.dtype)])
        after = jax.lax.dynamic_slice_in_dim(inputs, row.counts, size)
        return store.at[layer, row.slots].set(after), window

    store, windows = jax.lax.scan(step, store, (x, rows))
    return causal_conv(x, kernel, windows, still), store


def pass_rows(
    delta: Delta,
    store: jax.Array,
    layer: jax.Array,
    rows: Rows,
    precision: jax.lax.Precision | None,
) -> tuple[jax.Array, jax.Array]:
    """Lead the state of each row's slot through the row.

    What the tokens of a row owe to one another is worked out for all rows at once; then the states
    pass from row to row.

    Args:
        delta: Rows [R, Q, ...]. `fresh` is not read: `rows` says where sequences begin.
        store: States float32 [L, slots + 1, V, dk, dv].
        layer: int32 [], which of them.
        rows: Where the rows belong.
        precision: Of the products.

    Returns:
        float32 [R, Q, V, dv], and the store.
    """
    count, length, values, width = delta.v.shape
    counted = (jnp.arange(length) < rows.counts[:, None])[..., None]
    delta = delta._replace(
        decay=jnp.where(counted, delta.decay, 0),
        rate=jnp.where(counted, delta.rate, 0),
        fresh=jnp.zeros((count, length), bool),
    )

    def enter(store: jax.Array, slot: jax.Array, empty: jax.Array) -> jax.Array:
        return jnp.where(empty, 0, store[layer, slot])

    if length == 1:
        tokens = jax.tree.map(lambda x: x[:, 0], delta)
        step = functools.partial(delta_step, tokens, precision=precision)
        out, store = _in_turns(step, store, layer, rows)
        return out[:, None], store

    size = chunk_size(length)
    parts = -(-length // size)

    def split(x: Any) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, parts * size - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(count * parts, size, *x.shape[2:])

    def through(store: jax.Array, item: tuple) -> tuple[jax.Array, jax.Array]:
        chunk, slot, empty = item
        state = enter(store, slot, empty)
        heads = chunk.keep.shape
        out, after = pass_chunk(chunk, state.reshape(*heads, *state.shape[1:]), precision)
        return store.at[layer, slot].set(after.reshape(state.shape)), out

    chunks: Chunks = prepare_chunks(Delta(*map(split, delta)), precision)
    begins = jnp.pad((rows.starts == 0)[:, None], ((0, 0), (0, parts - 1))).reshape(-1)
    items = (chunks, jnp.repeat(rows.slots, parts), begins)
    store, out = jax.lax.scan(through, store, items)
    # [R parts, K, G, C, dv] -> [R, Q, V, dv]
    out = out.transpose(0, 3, 1, 2, 4).reshape(count, parts * size, values, width)
    return out[:, :length], store


def _in_turns(
    step: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    store: jax.Array,
    layer: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """Run the first row of every slot at once, then the second of every slot, and so on.

    Args:
        step: From what rows find in their slots [R, ...] to their outputs and to what they leave.
        store: [L, slots + 1, ...].
        layer: int32 [], which of them.
        rows: Where the rows belong.

    Returns:
        The outputs [R, ...], and the store.
    """
    index = jnp.arange(len(rows.slots))
    before = (rows.slots[:, None] == rows.slots) & (index[:, None] > index)
    # Nobody reads the spare slot, so its rows need not wait for one another.
    turn = jnp.where(rows.slots == store.shape[1] - 1, 0, jnp.sum(before, axis=1))

    def choose(which: jax.Array, a: jax.Array | int, b: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *(1,) * (b.ndim - 1)), a, b)

    def body(now: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        store, out = carry
        read, after = step(choose(rows.starts == 0, 0, store[layer, rows.slots]))
        at = jnp.where(turn == now, rows.slots, store.shape[1])  # others are dropped
        store = store.at[layer, at].set(after, mode="drop")
        return store, choose(turn == now, read, out)

    shape = jax.eval_shape(lambda store: step(store[0, rows.slots])[0], store)
    carry = (store, jnp.zeros(shape.shape, shape.dtype))
    store, out = jax.lax.fori_loop(0, jnp.max(turn) + 1, body, carry)
    return out, store
