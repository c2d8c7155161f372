"""Parameters to and from their devices, one tensor of a checkpoint at a time."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from race_jax.models.weights import Joint, Piece, Region, Slot, leaf_at
from race_jax.sharding import replicated
from race_jax.types import Params

Read = Callable[[tuple[slice, ...]], np.ndarray]
"""Reads a block of one tensor of a file."""
_NO_MESH = Mesh(np.empty((), object), ())  # for programs of one device inside `use_mesh`
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Leaf:
    """One parameter while its tensors arrive, as one buffer per device of this process.

    Args:
        shape: The parameter's shape.
        dtype: The parameter's dtype.
        sharding: How it lies on the devices; None for the default device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None):
        self.shape, self.dtype, self.sharding = tuple(shape), dtype, sharding
        self.places: dict[Region, list[Any]] = {}  # of devices; None for the default one
        self.buffers: dict[Any, jax.Array] = {}
        if sharding is None:
            self.places[tuple((0, n) for n in self.shape)] = [None]
            return
        for device, index in sharding.addressable_devices_indices_map(self.shape).items():
            cuts = zip(index or (slice(None),) * len(self.shape), self.shape, strict=True)
            region = tuple(cut.indices(size)[:2] for cut, size in cuts)
            self.places.setdefault(region, []).append(device)

    def fill(self, slot: Slot, read: Read) -> None:
        """Copy what the devices of this process need of a tensor, and wait until it is there.

        Without the wait, copies would queue up faster than devices take them, and fill the host.
        """
        for region, devices in self.places.items():
            piece = slot.locate(self.shape, region)
            if piece is None:
                continue
            block = read(piece.cuts).reshape(piece.sizes)[piece.within]
            with jax.set_mesh(_NO_MESH):
                for device in devices:
                    self._put(block, slot, piece, region, device)

    def _put(
        self, block: np.ndarray, slot: Slot, piece: Piece, region: Region, device: Any
    ) -> None:
        moved = jax.device_put(block, device) if device is not None else jnp.asarray(block)
        order = tuple(np.argsort(slot.order).tolist())
        lead = len(slot.index)
        if not lead:
            done = _lay_out(moved, order, self.dtype)
        else:
            buffer = self.buffers.get(device)
            if buffer is None:
                sizes = tuple(b - a for a, b in region)
                buffer = jnp.zeros(sizes, self.dtype, device=device)
            start = np.asarray(piece.start, np.int32)
            done = _insert(buffer, moved, start, order, lead)
        self.buffers[device] = jax.block_until_ready(done)

    def array(self) -> jax.Array:
        """The parameter, once all tensors are in."""
        if self.sharding is None:
            return self.buffers.pop(None)
        parts = [self.buffers.pop(device) for devices in self.places.values() for device in devices]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _lay_out(block: jax.Array, order: tuple[int, ...], dtype: Any) -> jax.Array:
    """A stored block as a parameter."""
    return block.transpose(order).astype(dtype)


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _insert(
    buffer: jax.Array, block: jax.Array, start: jax.Array, order: tuple[int, ...], lead: int
) -> jax.Array:
    """A stored block at its place in the stacked parameter, which is updated in place."""
    block = block.transpose(order).astype(buffer.dtype)
    block = block.reshape((1,) * lead + block.shape)
    return jax.lax.dynamic_update_slice(buffer, block, tuple(start))


class Exporter:
    """Tensors of a checkpoint out of parameters on devices.

    Only what is asked for comes to the host: a whole parameter where it is one tensor, one layer of
    it where it is stacked. The last layer is kept, since its experts are asked for one by one.

    Args:
        params: Nested dict of arrays, on devices of this process or of several.
    """

    def __init__(self, params: Params):
        self.params = params
        self.dtype = np.dtype(params["embed"].dtype)
        self.key: Any = None
        self.slab: np.ndarray = np.empty(0)

    @property
    def spread(self) -> bool:
        """Whether some parameter lies on devices of other processes too."""
        leaves = jax.tree.leaves(self.params)
        return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)

    def take(self, slot: Slot | Joint) -> np.ndarray:
        """The tensor as a checkpoint stores it. All processes must ask alike if it is spread."""
        parts = [self._take(part) for part in slot.parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _take(self, slot: Slot) -> np.ndarray:
        key = (slot.path, slot.index[:1])
        if key != self.key:
            self.key, self.slab = None, np.empty(0)
            leaf = leaf_at(self.params, slot.path)
            layer = np.int32(slot.index[0]) if slot.index else None
            cut = _on_devices(leaf) if isinstance(leaf, jax.Array) else _slab
            self.slab = np.asarray(cut(leaf, layer, slot.order, len(slot.index)))
            self.key = key
        part = self.slab[slot.index[1:]]
        sizes = iter(part.shape)
        shape = [math.prod(next(sizes) for _ in dim) for dim in slot.dims]
        return np.ascontiguousarray(part.reshape(shape))


def _on_devices(leaf: jax.Array) -> Callable[..., jax.Array]:
    """`_slab` as a program, whose result every process holds."""
    whole = None
    if not leaf.is_fully_addressable:
        assert isinstance(leaf.sharding, NamedSharding)
        whole = replicated(leaf.sharding.mesh)
    return jax.jit(_slab, static_argnums=(2, 3), out_shardings=whole)


def _slab(leaf: Any, layer: Any, order: tuple[int, ...], lead: int) -> Any:
    """One layer of a stacked parameter, or all of another, with its axes in stored order."""
    part = leaf if layer is None else leaf[layer]
    kept = max(lead - 1, 0)
    return part.transpose((*range(kept), *(kept + axis for axis in order)))


def write_safetensors(
    file: str | os.PathLike[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Any,
    tensors: Iterable[np.ndarray],
) -> None:
    """Write a safetensors file, holding one tensor at a time.

    Args:
        file: Where.
        shapes: Name -> shape, in the order of `tensors`.
        dtype: float32, float16 or bfloat16, the dtype of all.
        tensors: The tensors, made as they are needed.
    """
    dtype = np.dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor, (name, shape) in zip(tensors, shapes.items(), strict=True):
            assert tensor.shape == shape and tensor.dtype == dtype, name
            out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
