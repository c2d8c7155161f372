"""Keys and values of several sequences, one per slot."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """What a decoder keeps of the tokens it has seen.

    Attributes:
        k: Rotated keys [L, slots + 1, S, K, H]; the last slot is a spare that takes empty rows.
        v: Values, alike.
    """

    k: jax.Array
    v: jax.Array


def init_cache(
    layers: int, slots: int, length: int, heads: int, width: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache for `slots` sequences of at most `length` tokens, and the spare slot."""
    for name, value in (("slots", slots), ("length", length)):
        if value < 1:
            raise ValueError(f"a cache needs {name} of at least 1, and got {value}.")
    shape = (layers, slots + 1, length, heads, width)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(
    store: jax.Array, layer: jax.Array, fresh: jax.Array, slots: jax.Array, starts: jax.Array
) -> jax.Array:
    """Write row r of `fresh` [R, Q, K, H] to positions `starts[r]`.. of `slots[r]`."""

    def put(r: jax.Array, store: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(fresh, r, keepdims=True)[None]
        return jax.lax.dynamic_update_slice(store, row, (layer, slots[r], starts[r], 0, 0))

    return jax.lax.fori_loop(0, fresh.shape[0], put, store)


def read_rows(cache: KVCache, slots: jax.Array, starts: jax.Array, size: int) -> KVCache:
    """Copy `size` entries from each `(slots[r], starts[r])`: arrays [L, R, size, K, H]."""

    def read(store: jax.Array) -> jax.Array:
        layers, _, _, heads, width = store.shape

        def one(place: tuple[jax.Array, jax.Array]) -> jax.Array:
            at = (0, place[0], place[1], 0, 0)
            return jax.lax.dynamic_slice(store, at, (layers, 1, size, heads, width))[:, 0]

        return jnp.moveaxis(jax.lax.map(one, (slots, starts)), 0, 1)

    return KVCache(read(cache.k), read(cache.v))


def write_rows(cache: KVCache, rows: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
    """Put rows that `read_rows` copied back to `(slots[r], starts[r])`, in order of r."""

    def write(store: jax.Array, rows: jax.Array) -> jax.Array:
        def put(r: jax.Array, store: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(rows, r, 1, axis=1)
            return jax.lax.dynamic_update_slice(store, row, (0, slots[r], starts[r], 0, 0))

        return jax.lax.fori_loop(0, rows.shape[1], put, store)

    return KVCache(write(cache.k, rows.k), write(cache.v, rows.v))
