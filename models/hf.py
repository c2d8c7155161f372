"""Hugging Face checkpoints: safetensors and `config.json` to parameters and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from race_jax.models.config import ModelConfig
from race_jax.models.decoder import Model
from race_jax.models.hybrid import make_model
from race_jax.models.network import abstract_params, check_dtype, param_axes
from race_jax.models.shards import Exporter, Leaf, write_safetensors
from race_jax.models.weights import (
    EMBED,
    HEAD,
    Joint,
    Slot,
    checkpoint_slots,
    fused_slots,
    hub_name,
    leaf_at,
)
from race_jax.types import Params

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED = ("F32", "F16", "BF16")
_QUANTISED = re.compile(
    r".*\.(qweight|qzeros|scales|g_idx|weight_scale|weight_scale_inv|weight_packed|absmax"
    r"|activation_scale|input_scale)"
)
_MAPPED = 1 << 28  # bytes read before a file is opened anew, which frees the pages mapped so far

Shardings = Params | Callable[[tuple[str, ...]], Sharding] | None


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    shardings: Shardings = None,
    context_length: int | None = None,
) -> Model:
    """Read a checkpoint directory in Hugging Face form.

    Weights are read tensor by tensor, and of each tensor the blocks that devices of this process
    hold. They go straight to their devices, are cast there, and fill the stacked arrays layer by
    layer, so the host holds about one tensor at a time.

    Args:
        path: A directory with `config.json` and either `model.safetensors` or an index and its
            shards, stored in float32, float16 or bfloat16.
        dtype: `float32` or `bfloat16`, the dtype of the parameters and of the arithmetic.
        shardings: How parameters lie on devices: a pytree like `param_axes(config)` with a
            `jax.sharding.Sharding` for each parameter, or a function from a parameter's logical
            axes to its sharding. None for all on the default device.
        context_length: Tokens, in place of what the configuration allows.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If the directory or one of its files is missing.
        ValueError: If the configuration is not supported, a file is damaged, or a tensor is
            unknown, missing, of the wrong shape or of an unsupported dtype; or if `shardings` does
            not fit the parameters.

    Example:
        >>> load_model("checkpoint", "bfloat16")  # doctest: +SKIP
    """
    directory, target = Path(path), check_dtype(dtype)
    config = load_config(directory)
    abstract = abstract_params(config, dtype)
    leaves = _empty_leaves(config, abstract, target, shardings)
    names = _Names(config, checkpoint_slots(config, abstract), fused_slots(config, abstract))
    for file in weight_files(directory):
        _read_file(file, names, leaves)
    missing = sorted(set(names.slots) - set(names.seen))
    if missing:
        raise ValueError(
            f"{directory} lacks {_listed(missing)}, which its config.json calls for. Copy the "
            "complete checkpoint, or the config.json that belongs to it."
        )
    params = jax.tree.map(lambda leaf: leaf.array(), leaves)
    if config.tie_word_embeddings and HEAD in names.seen:
        _check_tied_head(names.seen[HEAD], params["embed"])
    return make_model(config, params, context_length)


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """Read `config.json` of a checkpoint directory.

    Raises:
        FileNotFoundError: If the directory or the file is missing.
        ValueError: If the file is not a JSON object or the configuration is not supported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} is not a directory; give the folder of a Hugging Face checkpoint, with "
            f"{_CONFIG} and {_SINGLE} in it."
        )
    file = directory / _CONFIG
    data = _read_json(file)
    try:
        return ModelConfig.from_hf(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def weight_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a checkpoint: the single one, or the shards that the index names.

    Raises:
        FileNotFoundError: If there are none, or a shard is missing.
        ValueError: If the index cannot be read.
    """
    directory = Path(directory)
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        raise FileNotFoundError(
            f"{directory} has neither {_SINGLE} nor {_INDEX}. Weights are read from safetensors "
            "only; convert other formats with transformers' save_pretrained."
        )
    mapping = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ValueError(
            f"{directory / _INDEX} has no weight_map from tensor names to files; copy it again."
        )
    files = sorted({str(name) for name in mapping.values()})
    lost = [name for name in files if not (directory / name).is_file()]
    if lost:
        raise FileNotFoundError(
            f"{directory} lacks {_listed(lost)}, named in {_INDEX}. Copy every shard."
        )
    return [directory / name for name in files]


def save_model(model: Model, path: str | os.PathLike[str], *, shard_bytes: float = 5e9) -> None:
    """Write a checkpoint directory that `load_model` and transformers read.

    Everything is written into a temporary directory beside `path` first. If `path` does not exist,
    that directory is renamed to it, so a reader finds all or nothing. If it does, each file is
    renamed into it, and weights of an earlier save are replaced; other files stay.

    Tensors come to the host one at a time (experts a layer at a time). Where parameters lie on
    devices of several processes, all of them must call this alike; the first one writes, and all
    return when it is done.

    Args:
        model: What to write, in the dtype of its parameters.
        path: The directory.
        shard_bytes: Largest size of one safetensors file, in bytes; a larger tensor gets a file of
            its own.

    Raises:
        ValueError: If `shard_bytes` is not positive or `path` is a file.
        OSError: If writing fails; `path` is then as it was.
    """
    target = Path(path)
    if not shard_bytes > 0:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be above 0.")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a directory to save the model in.")
    exporter = Exporter(model.params)
    slots = checkpoint_slots(model.config, model.params)
    plan = _plan_files(slots, exporter.dtype.itemsize, shard_bytes)
    if not exporter.spread:
        _save_as(model, target, exporter, plan)
        return
    try:
        if jax.process_index() == 0:
            _save_as(model, target, exporter, plan)
        else:
            for slots in plan.values():
                for slot in slots.values():
                    exporter.take(slot)
    finally:
        multihost_utils.sync_global_devices("race_jax.models.save_model")


def _save_as(
    model: Model, target: Path, exporter: Exporter, plan: dict[str, dict[str, Slot | Joint]]
) -> None:
    """Write into a temporary directory, and rename what is in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_files(model, scratch, exporter, plan)
        os.chmod(scratch, 0o777 & ~_umask())
        for file in scratch.iterdir():
            os.chmod(file, 0o666 & ~_umask())
        if target.exists():
            _move_into(scratch, target)
        else:
            os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _empty_leaves(config: ModelConfig, abstract: Params, dtype: Any, shardings: Shardings) -> Any:
    """A pytree of `Leaf`, one for each parameter."""
    if shardings is None:
        return jax.tree.map(lambda x: Leaf(x.shape, dtype, None), abstract)
    places = shardings
    if callable(shardings):
        axes = param_axes(config)
        places = jax.tree.map(lambda _, names: shardings(names), abstract, axes)

    def one(path: tuple, leaf: Any, place: Any) -> Leaf:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(place, Sharding):
            raise ValueError(
                f"shardings has {place!r} for {name}; it must be a jax.sharding.Sharding."
            )
        try:
            place.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"the sharding of {name} does not fit its shape: {error}") from error
        return Leaf(leaf.shape, dtype, place)

    given, wanted = (jax.tree.structure(tree) for tree in (places, abstract))
    if given != wanted:
        raise ValueError(
            f"shardings has the structure {given}, and the parameters have {wanted}; make it from "
            "param_axes(config)."
        )
    return jax.tree_util.tree_map_with_path(one, abstract, places)


@dataclasses.dataclass
class _Names:
    """The tensors that a configuration calls for, and those found so far."""

    config: ModelConfig
    slots: dict[str, Slot | Joint]
    fused: dict[str, dict[str, Slot]]
    seen: dict[str, Path] = dataclasses.field(default_factory=dict)

    def match(self, stored: str, file: Path) -> list[Slot]:
        """Where a tensor found in `file` goes: nowhere, to one place, or to several in parts."""
        name = hub_name(self.config, stored)
        if name is None:
            return []
        if name in self.fused:
            parts = self.fused[name]
            for hub in parts:
                for expert in range(self.config.num_experts):
                    self._see(hub.format(expert), file)
            return list(parts.values())
        if name == HEAD and self.config.tie_word_embeddings:
            self._see(name, file)
            return list(self.slots[EMBED].parts)
        if name not in self.slots:
            if _QUANTISED.fullmatch(name):
                raise ValueError(
                    f"{file} holds {stored}, so its weights are quantised; supported are float32, "
                    "float16 and bfloat16. Use the checkpoint in bfloat16, or convert it."
                )
            raise ValueError(
                f"{file} holds the tensor {stored}, which a {self.config.model_type} model of "
                "this config.json does not have. Use the config.json that belongs to it."
            )
        self._see(name, file)
        return list(self.slots[name].parts)

    def _see(self, name: str, file: Path) -> None:
        if name in self.seen:
            raise ValueError(f"{name} is in {self.seen[name].name} and again in {file.name}.")
        self.seen[name] = file


class _Reader:
    """Blocks of the tensors of a safetensors file.

    The file is mapped into memory, where pages once read stay for as long as it is open. So it is
    opened anew from time to time.
    """

    def __init__(self, file: Path):
        self.file, self.read_bytes = file, 0
        self.handle: Any = safe_open(file, framework="numpy")

    def read(self, name: str, cuts: tuple[slice, ...]) -> np.ndarray:
        """The block `cuts` of a tensor, as a copy."""
        if self.read_bytes > _MAPPED:
            self.handle, self.read_bytes = safe_open(self.file, framework="numpy"), 0
        block = self.handle.get_slice(name)[cuts]
        self.read_bytes += block.nbytes
        return block


def _read_file(file: Path, names: _Names, leaves: Any) -> None:
    """Check each tensor of a safetensors file, and fill the parameters with it."""
    try:
        reader = _Reader(file)
        for name in reader.handle.offset_keys():
            slots = names.match(name, file)
            if not slots:
                continue
            view = reader.handle.get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if dtype not in _STORED:
                raise ValueError(
                    f"{file}: {name} is stored as {dtype}; supported are {', '.join(_STORED)}. "
                    "Convert the checkpoint to bfloat16."
                )
            if shape != slots[0].shape:
                raise ValueError(
                    f"{file}: {name} has shape {shape}, and config.json calls for "
                    f"{slots[0].shape}. Use the config.json that belongs to it."
                )
            if name == HEAD and names.config.tie_word_embeddings:
                continue
            for slot in slots:
                leaf_at(leaves, slot.path).fill(slot, functools.partial(reader.read, name))
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}). Copy it again."
        ) from error


def _check_tied_head(file: Path, embed: jax.Array) -> None:
    """Raise if a file stores a head that differs from the embedding that it is tied to."""
    reader = _Reader(file)
    for shard in embed.addressable_shards:
        cuts = zip(shard.index, embed.shape, strict=True)
        rows, columns = (cut.indices(size) for cut, size in cuts)
        for begin in range(rows[0], rows[1], 4096):
            end = min(begin + 4096, rows[1])
            head = reader.read(HEAD, (slice(begin, end), slice(*columns[:2])))
            own = np.asarray(shard.data[begin - rows[0] : end - rows[0]])
            if not np.array_equal(head.astype(own.dtype), own):
                raise ValueError(
                    f"{file.parent} ties the head to the embedding (tie_word_embeddings true) and "
                    f"yet stores a {HEAD} that differs from {EMBED}. Set tie_word_embeddings to "
                    "false to use it, or remove the tensor."
                )


def _plan_files(
    slots: dict[str, Slot | Joint], item: int, shard_bytes: float
) -> dict[str, dict[str, Slot | Joint]]:
    """Which tensors go into which file, with `item` bytes per number."""
    shards: list[dict[str, Slot | Joint]] = [{}]
    room = shard_bytes
    for name, slot in slots.items():
        size = math.prod(slot.shape) * item
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = slot
        room -= size
    if len(shards) == 1:
        return {_SINGLE: shards[0]}
    total = len(shards)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": x for i, x in enumerate(shards, start=1)}


def _write_files(
    model: Model, directory: Path, exporter: Exporter, plan: dict[str, dict[str, Slot | Joint]]
) -> None:
    """Write weights, index and configuration into an empty directory."""
    where, total = {}, 0
    for file, slots in plan.items():
        shapes = {name: slot.shape for name, slot in slots.items()}
        tensors = (exporter.take(slot) for slot in slots.values())
        write_safetensors(directory / file, shapes, exporter.dtype, tensors)
        where |= dict.fromkeys(slots, file)
        total += sum(math.prod(shape) for shape in shapes.values()) * exporter.dtype.itemsize
    if len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(directory / _INDEX, index)
    config = {**model.config.to_hf(), "dtype": exporter.dtype.name}
    config.pop("torch_dtype", None)
    _write_json(directory / _CONFIG, config)


def _move_into(scratch: Path, target: Path) -> None:
    """Rename every file of `scratch` into `target`; drop weights that are not among them."""
    fresh = sorted(scratch.iterdir(), key=lambda file: (file.suffix == ".json", file.name))
    for file in fresh:
        os.replace(file, target / file.name)
    names = {file.name for file in fresh}
    old = [*target.glob("model.safetensors"), *target.glob("model-*-of-*.safetensors")]
    for file in [*old, *target.glob(_INDEX)]:
        if file.name not in names:
            file.unlink()


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. Copy the complete checkpoint directory.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}). Copy it again.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(data).__name__}.")
    return data


def _write_json(file: Path, data: dict[str, Any]) -> None:
    """Write JSON as transformers lays it out."""
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _listed(names: list[str]) -> str:
    """Names in a sentence, the first few of many."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _umask() -> int:
    """The process's file mode mask, which a temporary directory ignores."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
