"""Where each tensor of a Hugging Face checkpoint lies in the parameters."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from race_jax.models.config import LAYER_TYPES, ModelConfig
from race_jax.types import Params

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""Tensors that old checkpoints carry and nothing needs."""
_LANGUAGE = "model.language_model."
_ASIDE = re.compile(r"(model\.)?visual\..*|mtp\..*")
"""Parts of a multimodal checkpoint beside its language model: vision, and multi-token heads."""

Region = tuple[tuple[int, int], ...]
"""A block of an array: where each axis begins and ends."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a parameter lies in a checkpoint.

    Attributes:
        path: Keys into the nested dict of parameters.
        name: Tensor name; each `{}` stands for an index into the parameter's leading axes: the
            layer, and then the expert.
        inputs: Axes of the parameter, after the indexed ones, that are summed over in its product.
            Checkpoints keep [out, in], parameters [in..., out...]. 0 for arrays that are kept as
            they are.
        dims: As `Slot.dims`, where `inputs` does not say it.
    """

    path: tuple[str, ...]
    name: str
    inputs: int = 0
    dims: tuple[tuple[int, ...], ...] | None = None


_LAYER = "model.layers.{}."
_COMMON = (
    _Entry(("embed",), EMBED),
    _Entry(("norm",), "model.norm.weight"),
    _Entry(("head",), HEAD),
    _Entry(("layers", "attention_norm"), _LAYER + "input_layernorm.weight"),
    _Entry(("layers", "mlp_norm"), _LAYER + "post_attention_layernorm.weight"),
    _Entry(("layers", "attention", "query"), _LAYER + "self_attn.q_proj.weight", 1),
    _Entry(("layers", "attention", "key"), _LAYER + "self_attn.k_proj.weight", 1),
    _Entry(("layers", "attention", "value"), _LAYER + "self_attn.v_proj.weight", 1),
    _Entry(("layers", "attention", "out"), _LAYER + "self_attn.o_proj.weight", 2),
    _Entry(("layers", "attention", "query_bias"), _LAYER + "self_attn.q_proj.bias"),
    _Entry(("layers", "attention", "key_bias"), _LAYER + "self_attn.k_proj.bias"),
    _Entry(("layers", "attention", "value_bias"), _LAYER + "self_attn.v_proj.bias"),
    _Entry(("layers", "attention", "out_bias"), _LAYER + "self_attn.o_proj.bias"),
    _Entry(("layers", "attention", "query_norm"), _LAYER + "self_attn.q_norm.weight"),
    _Entry(("layers", "attention", "key_norm"), _LAYER + "self_attn.k_norm.weight"),
)
_DENSE = (
    _Entry(("layers", "mlp", "gate"), _LAYER + "mlp.gate_proj.weight", 1),
    _Entry(("layers", "mlp", "up"), _LAYER + "mlp.up_proj.weight", 1),
    _Entry(("layers", "mlp", "down"), _LAYER + "mlp.down_proj.weight", 1),
)
_LINEAR = _LAYER + "linear_attn."
_CONV = ((0, 1), (), (2,))
# Entries with one name are parts of one tensor, one after the other in its first dimension.
_DELTANET = (
    _Entry(("layers", "deltanet", "query"), _LINEAR + "in_proj_qkv.weight", 1),
    _Entry(("layers", "deltanet", "key"), _LINEAR + "in_proj_qkv.weight", 1),
    _Entry(("layers", "deltanet", "value"), _LINEAR + "in_proj_qkv.weight", 1),
    _Entry(("layers", "deltanet", "query_conv"), _LINEAR + "conv1d.weight", dims=_CONV),
    _Entry(("layers", "deltanet", "key_conv"), _LINEAR + "conv1d.weight", dims=_CONV),
    _Entry(("layers", "deltanet", "value_conv"), _LINEAR + "conv1d.weight", dims=_CONV),
    _Entry(("layers", "deltanet", "gate"), _LINEAR + "in_proj_z.weight", 1),
    _Entry(("layers", "deltanet", "rate"), _LINEAR + "in_proj_b.weight", 1),
    _Entry(("layers", "deltanet", "decay"), _LINEAR + "in_proj_a.weight", 1),
    _Entry(("layers", "deltanet", "decay_bias"), _LINEAR + "dt_bias"),
    _Entry(("layers", "deltanet", "decay_log"), _LINEAR + "A_log"),
    _Entry(("layers", "deltanet", "norm"), _LINEAR + "norm.weight"),
    _Entry(("layers", "deltanet", "out"), _LINEAR + "out_proj.weight", 2),
)
_EXPERT = _LAYER + "mlp.experts.{}."
_EXPERTS = (
    _Entry(("layers", "mlp", "router"), _LAYER + "mlp.gate.weight", 1),
    _Entry(("layers", "mlp", "gate"), _EXPERT + "gate_proj.weight", 1),
    _Entry(("layers", "mlp", "up"), _EXPERT + "up_proj.weight", 1),
    _Entry(("layers", "mlp", "down"), _EXPERT + "down_proj.weight", 1),
)
_FUSED = {
    _LAYER + "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    _LAYER + "mlp.experts.down_proj": ("down_proj",),
}
"""Tensors of all experts of a layer together, [E, out, in], parts one after the other in `out`."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One tensor of a checkpoint, or a part of one, and its place in the parameters.

    Attributes:
        path: Keys into the nested dict of parameters.
        index: Where the tensor lies on the parameter's leading axes. It covers the others whole.
        dims: For each dimension of the tensor, the other axes of the parameter (counted from 0)
            that it runs over, in row-major order.
        offsets: Where the part begins in each dimension of the tensor.
        shape: The tensor's shape.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[Slot, ...]:
        """Itself: the tensor lies in one place."""
        return (self,)

    @property
    def order(self) -> tuple[int, ...]:
        """The parameter's axes after the indexed ones, in the order in which they are stored."""
        return tuple(axis for dim in self.dims for axis in dim)

    def locate(self, size: Sequence[int], region: Region) -> Piece | None:
        """The piece of the tensor that falls into `region` of a parameter of shape `size`."""
        lead = len(self.index)
        if any(not a <= i < b for i, (a, b) in zip(self.index, region, strict=False)):
            return None
        core, inner = tuple(size[lead:]), region[lead:]
        cuts, stored, within = [], [], []
        for dim, offset in zip(self.dims, self.offsets, strict=True):
            rest = math.prod(core[axis] for axis in dim[1:])
            whole = all(inner[axis] == (0, core[axis]) for axis in dim[1:])
            first, last = (inner[dim[0]] if whole else (0, core[dim[0]])) if dim else (0, 1)
            cuts.append(slice(offset + first * rest, offset + last * rest))
            for place, axis in enumerate(dim):
                cut = place == 0 and whole
                stored.append(last - first if cut else core[axis])
                within.append(slice(None) if cut else slice(*inner[axis]))
        start = tuple(i - a for i, (a, _) in zip(self.index, region, strict=False))
        return Piece(tuple(cuts), tuple(stored), tuple(within), start + (0,) * len(core))


@dataclasses.dataclass(frozen=True)
class Joint:
    """One tensor whose parts, in order of its first dimension, lie in several parameters."""

    parts: tuple[Slot, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.parts[0].shape


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one device takes of one tensor.

    Attributes:
        cuts: The block of the tensor to read.
        sizes: That block's shape, with each dimension split into the parameter's axes.
        within: What to keep of it, where a device's share is no block of the tensor.
        start: Where it goes in the device's part of the parameter.
    """

    cuts: tuple[slice, ...]
    sizes: tuple[int, ...]
    within: tuple[slice, ...]
    start: tuple[int, ...]


def leaf_at(params: Params, path: Sequence[str]) -> Any:
    """The parameter at `path`, or None where there is none."""
    for key in path:
        params = params.get(key) if params is not None else None
    return params


def hub_name(config: ModelConfig, name: str) -> str | None:
    """The name that `checkpoint_slots` gives to a tensor of a file; None if nothing needs it."""
    if IGNORED.fullmatch(name):
        return None
    if not config.family.hybrid:
        return name
    if name.startswith(_LANGUAGE):
        return "model." + name.removeprefix(_LANGUAGE)
    return None if _ASIDE.fullmatch(name) else name


def checkpoint_slots(config: ModelConfig, abstract: Params) -> dict[str, Slot | Joint]:
    """Every tensor that a checkpoint of this configuration holds, in the form of the hub.

    Args:
        config: The configuration.
        abstract: The parameters or their shapes.

    Returns:
        Name -> place, in the order in which tensors are saved.
    """
    found: dict[str, list[Slot]] = {}
    mlp = _EXPERTS if config.num_experts else _DENSE
    linear, full = (config.layers_of(kind) for kind in LAYER_TYPES)
    layers = {"deltanet": linear, "attention": full} if config.family.hybrid else {}
    for entry in (*_COMMON, *mlp, *_DELTANET):
        leaf = leaf_at(abstract, entry.path)
        if leaf is None:
            continue
        lead = entry.name.count("{}")
        dims = _dims(entry, len(leaf.shape) - lead)
        core = tuple(leaf.shape[lead:])
        shape = tuple(math.prod(core[axis] for axis in dim) for dim in dims)
        numbers = layers.get(entry.path[-2]) if lead else None
        for index in itertools.product(*map(range, leaf.shape[:lead])):
            named = index if numbers is None else (numbers[index[0]], *index[1:])
            slot = Slot(entry.path, index, dims, (0,) * len(dims), shape)
            found.setdefault(entry.name.format(*named), []).append(slot)
    return {name: slots[0] if len(slots) == 1 else _join(slots) for name, slots in found.items()}


def _dims(entry: _Entry, count: int) -> tuple[tuple[int, ...], ...]:
    """`Slot.dims` of a parameter with `count` axes after the indexed ones."""
    if entry.dims is not None:
        return entry.dims
    axes = tuple(range(count))
    if entry.inputs:
        return axes[entry.inputs :], axes[: entry.inputs]
    if entry.name.endswith(".bias"):
        return (axes,)
    return tuple((axis,) for axis in axes)


def _join(slots: Sequence[Slot]) -> Joint:
    """Places of whole tensors as places of the parts of one."""
    ends = list(itertools.accumulate(slot.shape[0] for slot in slots))
    parts = []
    for slot, end in zip(slots, ends, strict=True):
        offsets = (end - slot.shape[0], *slot.offsets[1:])
        shape = (ends[-1], *slot.shape[1:])
        parts.append(dataclasses.replace(slot, offsets=offsets, shape=shape))
    return Joint(tuple(parts))


def fused_slots(config: ModelConfig, abstract: Params) -> dict[str, dict[str, Slot]]:
    """Tensors in which newer files keep all experts of a layer together.

    Returns:
        Name -> for each of its parts, the place, under the name that the hub's form gives to the
        part of expert `{}`.
    """
    fused: dict[str, dict[str, Slot]] = {}
    for layer in range(config.num_hidden_layers if config.num_experts else 0):
        for name, parts in _FUSED.items():
            found = {}
            for place, part in enumerate(parts):
                path = ("layers", "mlp", part.removesuffix("_proj"))
                e, d, f = leaf_at(abstract, path).shape[1:]
                shape, offsets = (e, len(parts) * f, d), (0, place * f, 0)
                hub = f"{_LAYER.format(layer)}mlp.experts.{{}}.{part}.weight"
                found[hub] = Slot(path, (layer,), ((0,), (2,), (1,)), offsets, shape)
            fused[name.format(layer)] = found
    return fused
