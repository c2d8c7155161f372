"""Keys and values of several sequences, one per slot."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """What a decoder keeps of the tokens it has seen.

    Attributes:
        k: Rotated keys [L, slots + 1, K, S, H]; the last slot is a spare that takes empty rows.
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
    shape = (layers, slots + 1, heads, length, width)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(
    cache: KVCache,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
) -> KVCache:
    """Write row r of `k` and `v` [R, Q, K, H] to positions `starts[r]`.. of `slots[r]`."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

    def put(r: jax.Array, cache: KVCache) -> KVCache:
        at = (layer, slots[r], 0, starts[r], 0)
        return KVCache(
            jax.lax.dynamic_update_slice(cache.k, k[r][None, None], at),
            jax.lax.dynamic_update_slice(cache.v, v[r][None, None], at),
        )

    return jax.lax.fori_loop(0, k.shape[0], put, cache)


def read_rows(cache: KVCache, slots: jax.Array, starts: jax.Array, size: int) -> KVCache:
    """Copy `size` entries from each `(slots[r], starts[r])`: arrays [L, R, K, size, H]."""

    def read(store: jax.Array) -> jax.Array:
        layers, _, heads, _, width = store.shape

        def one(place: tuple[jax.Array, jax.Array]) -> jax.Array:
            at = (0, place[0], 0, place[1], 0)
            return jax.lax.dynamic_slice(store, at, (layers, 1, heads, size, width))[:, 0]

        return jnp.moveaxis(jax.lax.map(one, (slots, starts)), 0, 1)

    return KVCache(read(cache.k), read(cache.v))


def write_rows(cache: KVCache, rows: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
    """Put rows that `read_rows` copied back to `(slots[r], starts[r])`, in order of r."""

    def put(r: jax.Array, cache: KVCache) -> KVCache:
        at = (0, slots[r], 0, starts[r], 0)
        row = KVCache(*(jax.lax.dynamic_slice_in_dim(x, r, 1, axis=1) for x in rows))
        return KVCache(
            *(jax.lax.dynamic_update_slice(x, y, at) for x, y in zip(cache, row, strict=True))
        )

    return jax.lax.fori_loop(0, rows.k.shape[1], put, cache)
