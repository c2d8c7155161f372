"""Attention and caches on a mesh: what each device does with its piece, and what they exchange.

Where no mesh is in use, every function here is the plain one of `attention` and `cache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from race_jax.models import cache as caches
from race_jax.models.attention import (
    MASKED,
    Jobs,
    Mixture,
    add_scores,
    cached_attention,
    job_sizes,
    masked_attention,
    plan_jobs,
    segment_attention,
)
from race_jax.models.cache import KVCache
from race_jax.models.kernels import choose_kernel, kernel_attention
from race_jax.models.products import product
from race_jax.sharding import Axes, Spec, ambient_mesh, ambient_rules, constrain, spec_for
from race_jax.types import Params

_BLOCK = 128  # queries whose scores are alive at once
_ROWS = ("data", "fsdp")
STREAM = ("batch", "time", "features")
"""Logical axes of the residual stream of whole rows."""
ROW_STREAM = ("rows", None, "features")
"""And of rows that a cache is extended by."""
_CACHE_AXES = ("layers", "slots", "kv_heads", "entries", "head_dim")


def kv_copies(heads: int) -> int:
    """How often each of `heads` key heads is held, so that `tensor` divides them; 1 by default.

    Above 1 only where the rules let `kv_heads` be replicated and `tensor` is a multiple of it: then
    every device holds the one head that its queries read.

    Raises:
        ValueError: If `tensor` neither divides the heads nor is a multiple of them.
    """
    mesh = ambient_mesh()
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    if heads % tensor == 0 or "kv_heads" not in ambient_rules().replicate:
        return 1  # If it does not divide, the constraint that follows says so.
    if tensor % heads:
        near = [d for d in range(1, 2 * tensor + heads) if heads % d == 0 or d % heads == 0]
        below, above = [d for d in near if d < tensor], [d for d in near if d > tensor]
        raise ValueError(
            f"kv_heads is {heads} and tensor is {tensor}; one must divide the other, even when key "
            f"heads are replicated. Make tensor {below[-1]} or {above[0]}."
        )
    return tensor // heads


def hold(params: Params, axes: Callable[..., Params], *arguments: Any) -> Params:
    """The parameters, which with their gradients stay where the table says.

    Args:
        params: Parameters inside a jitted function.
        axes: Gives their logical axes; called only where a mesh is in use.
        *arguments: What to call it with.
    """
    if ambient_mesh() is None:
        return params
    return jax.tree.map(constrain, params, axes(*arguments))


def embed(table: jax.Array, tokens: jax.Array, axes: Axes) -> jax.Array:
    """Rows of the embedding in float32; NaN for ids that it lacks.

    On a mesh every device looks up its columns of its part of the vocabulary, for its own tokens
    and those of the devices that hold the other columns, and they exchange what they found. So the
    table never moves, only as much as the result holds.

    Args:
        table: [V, D].
        tokens: int32 [B, T].
        axes: The two logical axes of `tokens`; None for one that is never cut.

    Returns:
        float32 [B, T, D].
    """
    mesh = ambient_mesh()
    if mesh is None:
        rows = table.at[tokens].get(mode="fill", fill_value=jnp.nan)
        return rows.astype(jnp.float32)
    stored = spec_for(("vocab", "embed"), table.shape, name="the embedding")
    lies = spec_for(axes, tokens.shape, name="tokens")
    columns, vocab = stored[1] or (), len(table)
    # Which dimension of `tokens` each axis that cuts the columns cuts too; None for neither.
    shared = [next((d for d in (0, 1) if axis in (lies[d] or ())), None) for axis in columns]
    exchanges = list(zip(columns, shared, strict=True))[::-1]  # the innermost axis first

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        for axis, dim in exchanges[::-1]:
            if dim is not None:
                tokens = jax.lax.all_gather(tokens, axis, axis=dim, tiled=True)
        place = tokens
        if stored[0] is not None:
            place = tokens - jax.lax.axis_index(stored[0]) * len(table)
        own = (place >= 0) & (place < len(table))
        rows = jnp.where(own[..., None], table[jnp.where(own, place, 0)], 0)
        if stored[0] is not None:
            rows = jax.lax.psum(rows, stored[0])
        rows = jnp.where(((tokens >= 0) & (tokens < vocab))[..., None], rows, jnp.nan)
        for axis, dim in exchanges:
            if dim is None:
                rows = jax.lax.all_gather(rows, axis, axis=2, tiled=True)
            else:
                rows = jax.lax.all_to_all(rows, axis, split_axis=dim, concat_axis=2, tiled=True)
        return rows.astype(jnp.float32)

    out = spec_for((*axes, "features"), (*tokens.shape, table.shape[1]), name="tokens")
    return jax.shard_map(local, in_specs=(stored, lies), out_specs=out, check_vma=False)(
        table, tokens
    )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    attention: str = "auto",
    ends: jax.Array | None = None,
) -> jax.Array:
    """`segment_attention` with rows, heads and tokens divided among the devices of the mesh.

    Where `context` cuts the tokens, and for trees, plain XLA runs.

    Args:
        q: [B, T, N, H].
        k: [B, T, K, H].
        v: [B, T, K, H].
        segment_ids: int32 [B, T].
        attention: `auto`, `xla`, `cudnn` or `splash`, as `choose_kernel` takes it.
        ends: int32 [B, T] where rows hold trees, as of `segment_attention`.

    Returns:
        [B, T, N, H].

    Raises:
        ValueError: If a dimension does not divide, T must be a multiple of twice `context`; if the
            kernel cannot run here; or if rows that hold trees are cut by `context` or given to a
            kernel other than xla.
    """
    mesh = ambient_mesh()
    kernel = choose_kernel(attention, q.dtype, q.shape[3])
    if ends is not None:
        return _attend_trees(q, k, v, segment_ids, attention, ends)
    if mesh is None:
        return kernel_attention(kernel, q, k, v, segment_ids)
    copies = kv_copies(k.shape[2])
    k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k, v))
    parts = mesh.shape["context"]
    if parts > 1 and attention in ("cudnn", "splash"):
        raise ValueError(
            f"attention is {attention}, and context = {parts} cuts the rows, which only xla can "
            "work on; choose auto or xla, or make context 1."
        )
    if parts > 1 and q.shape[1] % (2 * parts):
        unit = 2 * parts
        low, high = q.shape[1] // unit * unit, -(-q.shape[1] // unit) * unit
        raise ValueError(
            f"rows have time {q.shape[1]}, and context = {parts} cuts them into {unit} equal "
            f"pieces, two for each device; pad them to {high}"
            + (f", or cut them to {low}." if low else ".")
        )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        if parts == 1:
            return kernel_attention(kernel, q, k, v, segment_ids)
        return _context_attention(q, k, v, segment_ids, parts)

    def spec(x: jax.Array, heads: str) -> Spec:
        return spec_for(("batch", "time", heads, "head_dim"), x.shape, name="attention")

    ids = spec_for(("batch", "time"), segment_ids.shape, name="segment_ids")
    specs = (spec(q, "heads"), spec(k, "kv_heads"), spec(v, "kv_heads"), ids)
    # The kernels do not say on which devices their results differ, so the check is XLA's alone.
    check = parts > 1 or kernel == "xla"
    run = jax.shard_map(local, in_specs=specs, out_specs=specs[0], check_vma=check)
    return run(q, k, v, segment_ids)


def _attend_trees(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    attention: str,
    ends: jax.Array,
) -> jax.Array:
    """`attend` on rows that hold trees; XLA divides rows and heads by itself."""
    mesh = ambient_mesh()
    if attention not in ("auto", "xla") or (mesh is not None and mesh.shape["context"] > 1):
        raise ValueError(
            "rows hold trees, whose attention runs in xla on whole rows; make context 1 and "
            "attention auto, or lay trees out path by path (share: false)."
        )
    return segment_attention(q, k, v, segment_ids, ends)


def _context_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, parts: int
) -> jax.Array:
    """Attention of this device's tokens, with keys and values gathered over `context`.

    A token sees only what is before it, so the last device would have most to do. The row is cut
    into 2 C pieces instead; device j works on the queries of pieces j and 2 C - 1 - j, which see
    j + 1 and 2 C - j pieces of keys: 2 C + 1 for every device, and no product in vain.
    """
    rows, length, heads, width = q.shape
    half, kv_heads = length // 2, k.shape[2]
    device = jax.lax.axis_index("context")
    scaled = (q / math.sqrt(width)).astype(q.dtype).swapaxes(1, 2)
    scaled = scaled.reshape(rows, kv_heads, heads // kv_heads, length, width)
    own = _swap_halves(jnp.stack(jnp.split(scaled, 2, axis=3)), parts, forward=True)
    ids = _swap_halves(jnp.stack(jnp.split(segment_ids, 2, axis=1)), parts, forward=True)
    pieces = jnp.stack([device, 2 * parts - 1 - device])
    k, v = (jax.lax.all_gather(x.swapaxes(1, 2), "context", axis=2, tiled=True) for x in (k, v))
    seen = jax.lax.all_gather(segment_ids, "context", axis=1, tiled=True)

    @jax.checkpoint
    def block(item: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return _piece_pairs(*item, k, v, seen, device, parts)

    size = min(_BLOCK, half)
    pad, count = -half % size, -(-half // size)
    own = jnp.pad(own, [(0, 0)] * 4 + [(0, pad), (0, 0)])
    own = jnp.moveaxis(own.reshape(*own.shape[:4], count, size, width), 4, 0)
    ids = jnp.pad(ids, [(0, 0), (0, 0), (0, pad)], constant_values=-1)
    ids = jnp.moveaxis(ids.reshape(2, rows, count, size), 2, 0)
    places = pieces[:, None] * half + jnp.arange(half + pad)
    places = jnp.moveaxis(places.reshape(2, count, size), 1, 0)
    out = jnp.moveaxis(jax.lax.map(block, (own, ids, places)), 0, 4)
    out = out.reshape(*out.shape[:4], -1, width)[..., :half, :]
    out = jnp.concatenate(list(_swap_halves(out, parts, forward=False)), axis=3)
    return out.reshape(rows, heads, length, width).swapaxes(1, 2)


def _swap_halves(pair: jax.Array, parts: int, *, forward: bool) -> jax.Array:
    """Bring pieces 2 j and 2 j + 1 of device j, stacked, to those that work on them, or back."""

    def owner(piece: int) -> int:
        return min(piece, 2 * parts - 1 - piece)

    even = [(j, owner(2 * j)) for j in range(parts)]
    odd = [(j, owner(2 * j + 1)) for j in range(parts)]
    # On an even device the lower piece is the even one: j and 2 C - 1 - j differ in parity.
    lower_is_even = jax.lax.axis_index("context") % 2 == 0
    if forward:
        first = jax.lax.ppermute(pair[0], "context", even)
        second = jax.lax.ppermute(pair[1], "context", odd)
        return jnp.where(lower_is_even, jnp.stack([first, second]), jnp.stack([second, first]))
    pair = jnp.where(lower_is_even, pair, pair[::-1])
    first = jax.lax.ppermute(pair[0], "context", [(b, a) for a, b in even])
    second = jax.lax.ppermute(pair[1], "context", [(b, a) for a, b in odd])
    return jnp.stack([first, second])


def _piece_pairs(
    q: jax.Array,
    own: jax.Array,
    places: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    device: jax.Array,
    parts: int,
) -> jax.Array:
    """Online softmax of two blocks of queries [2, B, K, G, Q, H] over the pieces that each sees."""
    piece = k.shape[2] // (2 * parts)

    def step(carry: Mixture, index: jax.Array) -> tuple[Mixture, None]:
        second = (index > device).astype(jnp.int32)
        begin = jnp.where(index > device, index - device - 1, index) * piece
        keys = jax.lax.dynamic_slice_in_dim(k, begin, piece, axis=2)
        values = jax.lax.dynamic_slice_in_dim(v, begin, piece, axis=2)
        ids = jax.lax.dynamic_slice_in_dim(seen, begin, piece, axis=1)
        spots = begin + jnp.arange(piece)
        allowed = (own[second][:, :, None] == ids[:, None]) & (places[second][:, None] >= spots)
        scores = product("bkgqh,bksh->bkgqs", q[second], keys)
        scores = jnp.where(allowed[:, None, None], scores, MASKED)
        half = add_scores(
            jax.tree.map(lambda x: x[second], carry), scores, "bkgqs,bksh->bkgqh", values
        )
        return jax.tree.map(lambda x, y: x.at[second].set(y), carry, half), None

    # Zeros that differ from device to device as far as the types know, as the results will.
    zeros = jnp.where(jnp.isnan(q), 0.0, 0.0)
    carry = Mixture(zeros[..., 0] + MASKED, zeros[..., 0], zeros)
    done, _ = jax.lax.scan(step, carry, jnp.arange(2 * parts + 1))
    return (done.mixed / done.total[..., None]).astype(q.dtype)


class Places(NamedTuple):
    """Where rows of `extend` lie in each device's piece of the cache.

    Leaves have a leading axis of pieces when a mesh is in use.

    Attributes:
        slots: int32 [R], slots of the piece; its last one for rows of other pieces.
        starts: int32 [R]; 0 for rows of other pieces, so that they cost next to nothing.
        mine: bool [R], whether the row's slot is in this piece.
        jobs: How the rows attend together, or None.
    """

    slots: jax.Array
    starts: jax.Array
    mine: jax.Array
    jobs: Jobs | None


def _pieces() -> int:
    """Into how many pieces the slots of a cache are cut."""
    mesh = ambient_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in _ROWS)


def init_cache(
    layers: int, slots: int, length: int, heads: int, width: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache, cut by slots over `data` and `fsdp` and by heads over `tensor`.

    Each piece has a spare slot of its own at its end.
    """
    if ambient_mesh() is None:
        return caches.init_cache(layers, slots, length, heads, width, dtype)
    pieces, heads = _pieces(), heads * kv_copies(heads)
    each = -(-slots // pieces)

    def make() -> KVCache:
        empty = caches.init_cache(layers, pieces * (each + 1) - 1, length, heads, width, dtype)
        return KVCache(*(constrain(x, _CACHE_AXES) for x in empty))

    return jax.jit(make)()


def store_slots(slots: jax.Array, total: int) -> jax.Array:
    """Where slots lie in a store of `total`; on a mesh each piece of it ends in a spare one."""
    slots = jnp.asarray(slots)
    if ambient_mesh() is None:
        return slots
    pieces = _pieces()
    each = total // pieces - 1
    at = slots // each * (each + 1) + slots % each
    return jnp.where(slots < pieces * each, at, total - 1)


def plan_places(
    cache: Any, slots: jax.Array, starts: jax.Array, queries: int | None = None
) -> Places:
    """Say for each piece of the cache which rows are its own.

    Args:
        cache: A pytree of arrays [L, slots + 1, ...].
        slots: int32 [R].
        starts: int32 [R].
        queries: Query rows of each row (tokens times heads per group), to plan jobs; None plans
            none.
    """

    def plan(slots: jax.Array) -> Jobs | None:
        return None if queries is None else plan_jobs(slots, job_sizes(len(slots), queries))

    slots, starts = jnp.asarray(slots), jnp.asarray(starts)
    if ambient_mesh() is None:
        return Places(slots, starts, jnp.ones_like(slots, bool), plan(slots))
    pieces = _pieces()
    each = jax.tree.leaves(cache)[0].shape[1] // pieces - 1

    def one(piece: jax.Array) -> Places:
        local = slots - piece * each
        mine = (local >= 0) & (local < each)
        local = jnp.where(mine, local, each)
        return Places(local, jnp.where(mine, starts, 0), mine, plan(local))

    return jax.vmap(one)(jnp.arange(pieces))


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    places: Places,
) -> tuple[jax.Array, KVCache]:
    """Append keys and values to one layer of the cache, and attend to it.

    On a mesh every device works for the rows whose slots it holds, wherever the rows themselves
    lie: queries, keys and values of all rows come to it, and its results go back.

    Args:
        q: [R, Q, N, H].
        k: [R, Q, K, H].
        v: [R, Q, K, H].
        cache: From `init_cache`.
        layer: int32 [].
        places: From `plan_places`; its `jobs` decide between the two ways to attend.

    Returns:
        [R, Q, N, H] and the cache.
    """

    def local(arrays: tuple, places: Places) -> tuple[jax.Array, KVCache]:
        q, k, v, cache, layer = arrays
        cache = caches.append(cache, layer, k, v, places.slots, places.starts)
        if places.jobs is None:
            return _gathered_attention(q, cache, layer, places), cache
        at = (layer, places.slots, places.starts, places.jobs)
        return cached_attention(q, cache.k, cache.v, *at), cache

    if ambient_mesh() is None:
        return local((q, k, v, cache, layer), places)
    copies = kv_copies(k.shape[2])
    k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k, v))

    def spec(x: jax.Array, heads: str) -> Spec:
        return spec_for(("rows", None, heads, "head_dim"), x.shape, name="attention")

    cut = spec(q, "heads")[0] is not None

    def mapped(arrays: tuple, places: Places) -> tuple[jax.Array, KVCache]:
        *rows, cache, layer = arrays
        if cut:
            rows = [jax.lax.all_gather(x, _ROWS, axis=0, tiled=True) for x in rows]
        mixed, cache = local((*rows, cache, layer), places)
        mixed = jnp.where(places.mine[:, None, None, None], mixed, 0)
        if cut:
            return jax.lax.psum_scatter(mixed, _ROWS, scatter_dimension=0, tiled=True), cache
        return jax.lax.psum(mixed, _ROWS), cache

    stores = _cache_specs(cache)
    specs = (spec(q, "heads"), spec(k, "kv_heads"), spec(v, "kv_heads"), stores, spec_for(()))
    return _on_pieces(mapped, (q, k, v, cache, layer), specs, places, (specs[0], stores))


def _gathered_attention(
    q: jax.Array, cache: KVCache, layer: jax.Array, places: Places
) -> jax.Array:
    """Attention of [R, Q, N, H] to all keys of the rows' slots at once."""
    rows, size, heads, width = q.shape
    positions = places.starts[:, None] + jnp.arange(size)
    allowed = positions[:, :, None] >= jnp.arange(cache.k.shape[3])
    scaled = (q / math.sqrt(width)).astype(q.dtype).swapaxes(1, 2)
    scaled = scaled.reshape(rows, cache.k.shape[2], -1, size, width)
    # What lies beyond the last token is stale, and 0 times a stale NaN is NaN.
    v = jnp.where(allowed[:, None, -1, :, None], cache.v[layer, places.slots], 0)
    mixed = masked_attention(scaled, cache.k[layer, places.slots], v, allowed)
    return mixed.reshape(rows, heads, size, width).swapaxes(1, 2)


def read_rows(cache: KVCache, slots: jax.Array, starts: jax.Array, size: int) -> KVCache:
    """`cache.read_rows`; on a mesh the rows lie whole on every device but for their heads."""
    if ambient_mesh() is None:
        return caches.read_rows(cache, slots, starts, size)
    places = plan_places(cache, slots, starts)

    def local(cache: KVCache, places: Places) -> KVCache:
        rows = caches.read_rows(cache, places.slots, places.starts, size)
        mine = places.mine[:, None, None, None]
        return KVCache(*(jax.lax.psum(jnp.where(mine, x, 0), _ROWS) for x in rows))

    return _on_pieces(local, cache, _cache_specs(cache), places, _row_specs(cache))


def write_rows(cache: KVCache, rows: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
    """`cache.write_rows`, for rows that `read_rows` copied."""
    if ambient_mesh() is None:
        return caches.write_rows(cache, rows, slots, starts)
    places = plan_places(cache, slots, starts)

    def local(arrays: tuple[KVCache, KVCache], places: Places) -> KVCache:
        return caches.write_rows(*arrays, places.slots, places.starts)

    specs = (_cache_specs(cache), _row_specs(cache))
    return _on_pieces(local, (cache, rows), specs, places, specs[0])


def _cache_specs(cache: KVCache) -> Any:
    """Where a cache lies."""
    return KVCache._make(spec_for(_CACHE_AXES, x.shape, name="a cache") for x in cache)


def _row_specs(cache: KVCache) -> Any:
    """Where rows copied out of a cache lie: whole but for their heads."""
    axes = ("layers", None, "kv_heads", "entries", "head_dim")
    return KVCache._make(spec_for(axes, x.shape, name="rows of a cache") for x in cache)


def _on_pieces(function: Callable, arrays: Any, specs: Any, places: Places, out_specs: Any) -> Any:
    """`function(arrays, places)` on every device, with its own piece's places."""
    mine = jax.tree.map(lambda _: spec_for(("slots",)), places)

    def local(arrays: Any, places: Places) -> Any:
        return function(arrays, jax.tree.map(lambda x: x[0], places))

    mapped = jax.shard_map(local, in_specs=(specs, mine), out_specs=out_specs, check_vma=False)
    return mapped(arrays, places)
