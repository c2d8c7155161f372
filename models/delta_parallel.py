"""Gated DeltaNet of whole rows on a mesh: heads over `tensor`, tokens over `context`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from race_jax.models.deltanet import (
    Delta,
    causal_conv,
    conv_window,
    delta_chunked,
    delta_transition,
)
from race_jax.models.hybrid_blocks import Projected, Triple, make_delta
from race_jax.sharding import Spec, ambient_mesh, spec_for

Precision = jax.lax.Precision | None


def mix_rows(
    projected: Projected, kernels: Triple, fresh: jax.Array, precision: Precision
) -> jax.Array:
    """Convolution and gated DeltaNet of whole rows, each from an empty state.

    Where `context` cuts the rows, a device needs two things of those before it: the last inputs of
    its left neighbour, for the convolution, and the state that its first token finds. Every device
    works out what its tokens do to any state (S -> A S + B), all exchange (A, B), and each leads an
    empty state through the pieces before its own. Nobody waits for a neighbour's tokens.

    Args:
        projected: Of rows [B, T].
        kernels: Of queries, keys and values.
        fresh: bool [B, T], where segments begin.
        precision: Of the products.

    Returns:
        float32 [B, T, V, dv].

    Raises:
        ValueError: If a dimension does not divide, or a device gets fewer tokens than the
            convolution looks back.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return _mix(projected, kernels, fresh, precision, 1)
    parts, past = mesh.shape["context"], kernels[0].shape[-1] - 1
    if parts > 1 and fresh.shape[1] < parts * past:
        raise ValueError(
            f"rows have time {fresh.shape[1]}, which is {fresh.shape[1] // parts} for each of "
            f"context = {parts}, and the convolution looks back {past}; pad them to "
            f"{parts * past} at least, or make context smaller."
        )

    def spec(x: jax.Array, *rest: str | None) -> Spec:
        return spec_for(("batch", "time", *rest), x.shape, name="gated DeltaNet")

    wide = ("linear_heads", "head_dim")
    q, k, v = (spec(x, *wide) for x in projected.inputs)
    rates = spec(projected.rate, "linear_heads")
    taps = tuple(spec_for((*wide, "conv"), x.shape, name="the convolution") for x in kernels)
    parts_of = Projected._make([(q, k, v), spec(projected.gate, *wide), rates, rates])
    specs = (parts_of, taps, spec(fresh))

    def local(projected: Projected, kernels: Triple, fresh: jax.Array) -> jax.Array:
        return _mix(projected, kernels, fresh, precision, parts)

    run = jax.shard_map(local, in_specs=specs, out_specs=v, check_vma=False)
    return run(projected, kernels, fresh)


def _mix(
    projected: Projected, kernels: Triple, fresh: jax.Array, precision: Precision, parts: int
) -> jax.Array:
    """`mix_rows` on one device, of `parts` that hold consecutive pieces of the rows."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        past = kernel.shape[-1] - 1
        window = jnp.zeros((x.shape[0], past, *x.shape[2:]), x.dtype)
        if parts > 1:
            steps = [(j, j + 1) for j in range(parts - 1)]  # the first device receives zeros
            window = jax.lax.ppermute(conv_window(x, window, fresh), "context", steps)
        return causal_conv(x, kernel, window, fresh)

    q, k, v = (convolve(*pair) for pair in zip(projected.inputs, kernels, strict=True))
    delta = make_delta(projected, (q, k, v), fresh)
    state = _entering_state(delta, precision, parts) if parts > 1 else None
    return delta_chunked(delta, state, precision=precision)[0]


def _entering_state(delta: Delta, precision: Precision, parts: int) -> jax.Array:
    """The states [B, V, dk, dv] that this device's first tokens find."""
    moves = jax.lax.all_gather(delta_transition(delta, precision=precision), "context")
    device = jax.lax.axis_index("context")

    def step(state: jax.Array, item: tuple) -> tuple[jax.Array, None]:
        (keep, add), piece = item
        moved = jnp.einsum("bvkj,bvjd->bvkd", keep, state, precision=precision) + add
        return jnp.where(piece < device, moved, state), None

    empty = jnp.zeros(moves[1].shape[1:], jnp.float32)
    return jax.lax.scan(step, empty, (moves, jnp.arange(parts)))[0]
