"""Hugging Face checkpoints: safetensors and `config.json` to parameters and back."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from race_jax.models.config import ModelConfig
from race_jax.models.decoder import Model, abstract_params, check_dtype
from race_jax.types import Params

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a parameter lies in a checkpoint.

    Attributes:
        path: Keys into the nested dict of parameters.
        name: Tensor name; `{}` stands for the layer.
        inputs: Leading axes of the parameter that are summed over in its product. Checkpoints keep
            [out, in], parameters [in..., out...]. 0 for arrays that are kept as they are.
    """

    path: tuple[str, ...]
    name: str
    inputs: int = 0


_LAYER = "model.layers.{}."
_ENTRIES = (
    _Entry(("embed",), _EMBED),
    _Entry(("norm",), "model.norm.weight"),
    _Entry(("head",), _HEAD),
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
    _Entry(("layers", "mlp", "gate"), _LAYER + "mlp.gate_proj.weight", 1),
    _Entry(("layers", "mlp", "up"), _LAYER + "mlp.up_proj.weight", 1),
    _Entry(("layers", "mlp", "down"), _LAYER + "mlp.down_proj.weight", 1),
)
_IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One tensor of a checkpoint: its place in the parameters and its stored shape."""

    path: tuple[str, ...]
    layer: int | None
    inputs: int
    shape: tuple[int, ...]


def load_model(
    path: str | os.PathLike[str], dtype: str = "float32", *, context_length: int | None = None
) -> Model:
    """Read a checkpoint directory in Hugging Face form.

    Weights are read tensor by tensor, cast, and put straight into the stacked arrays.

    Args:
        path: A directory with `config.json` and either `model.safetensors` or an index and its
            shards, stored in float32, float16 or bfloat16.
        dtype: `float32` or `bfloat16`, the dtype of the parameters and of the arithmetic.
        context_length: Tokens, in place of what the configuration allows.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If the directory or one of its files is missing.
        ValueError: If the configuration is not supported, a file is damaged, or a tensor is
            unknown, missing, of the wrong shape or of an unsupported dtype.
    """
    directory, target = Path(path), check_dtype(dtype)
    config = load_config(directory)
    abstract = abstract_params(config, dtype)
    slots = _slots(config, abstract)
    arrays = jax.tree.map(lambda leaf: np.empty(leaf.shape, target), abstract)
    seen: dict[str, Path] = {}
    tied_head = None
    for file in weight_files(directory):
        for name, tensor in _tensors(file, slots, config):
            if name in seen:
                raise ValueError(f"{name} is in {seen[name].name} and again in {file.name}.")
            seen[name] = file
            if name == _HEAD and config.tie_word_embeddings:
                tied_head = tensor.astype(target)
            else:
                _place(arrays, slots[name], tensor)
    missing = sorted(set(slots) - set(seen))
    if missing:
        raise ValueError(
            f"{directory} lacks {_listed(missing)}, which its config.json calls for. Copy the "
            "complete checkpoint, or the config.json that belongs to it."
        )
    if tied_head is not None and not np.array_equal(tied_head, arrays["embed"]):
        raise ValueError(
            f"{directory} ties the head to the embedding (tie_word_embeddings true) and yet stores "
            f"a {_HEAD} that differs from {_EMBED}. Set tie_word_embeddings to false to use it, or "
            "remove the tensor."
        )
    return Model(config, jax.tree.map(jnp.asarray, arrays), context_length)


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
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_files(model, scratch, shard_bytes)
        os.chmod(scratch, 0o777 & ~_umask())
        for file in scratch.iterdir():
            os.chmod(file, 0o666 & ~_umask())
        if target.exists():
            _move_into(scratch, target)
        else:
            os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _slots(config: ModelConfig, abstract: Params) -> dict[str, _Slot]:
    """Every tensor that a checkpoint of this configuration must hold."""
    slots = {}
    for entry in _ENTRIES:
        leaf: Any = abstract
        for key in entry.path:
            leaf = leaf.get(key) if leaf is not None else None
        if leaf is None:
            continue
        layered = "{}" in entry.name
        shape = leaf.shape[1:] if layered else leaf.shape
        slot = _Slot(entry.path, None, entry.inputs, _stored_shape(entry, shape))
        if not layered:
            slots[entry.name] = slot
            continue
        for layer in range(config.num_hidden_layers):
            slots[entry.name.format(layer)] = dataclasses.replace(slot, layer=layer)
    return slots


def _stored_shape(entry: _Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter's tensor in a checkpoint."""
    if entry.inputs:
        return (int(np.prod(shape[entry.inputs :])), int(np.prod(shape[: entry.inputs])))
    return (int(np.prod(shape)),) if entry.name.endswith(".bias") else shape


def _tensors(
    file: Path, slots: dict[str, _Slot], config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of each tensor of a safetensors file, checked before it is read."""
    try:
        with safe_open(file, framework="numpy") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if _IGNORED.fullmatch(name):
                    continue
                expected = slots.get(name)
                if name == _HEAD and config.tie_word_embeddings:
                    expected = slots[_EMBED]
                if expected is None:
                    raise ValueError(
                        f"{file} holds the tensor {name}, which a {config.model_type} model of "
                        "this config.json does not have. Use the config.json that belongs to it."
                    )
                view = handle.get_slice(name)
                if tuple(view.get_shape()) != expected.shape:
                    raise ValueError(
                        f"{file}: {name} has shape {tuple(view.get_shape())}, and config.json "
                        f"calls for {expected.shape}. Use the config.json that belongs to it."
                    )
                if view.get_dtype() not in _STORED:
                    raise ValueError(
                        f"{file}: {name} is stored as {view.get_dtype()}; supported are "
                        f"{', '.join(_STORED)}. Convert the checkpoint to bfloat16."
                    )
                yield name, handle.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}). Copy it again."
        ) from error


def _place(arrays: Params, slot: _Slot, tensor: np.ndarray) -> None:
    """Cast `tensor` into its place in the stacked arrays."""
    leaf = arrays
    for key in slot.path:
        leaf = leaf[key]
    view = leaf if slot.layer is None else leaf[slot.layer]
    view[...] = (tensor.T if slot.inputs else tensor).reshape(view.shape)


def _write_files(model: Model, directory: Path, shard_bytes: float) -> None:
    """Write weights, index and configuration into an empty directory."""
    slots = _slots(model.config, model.params)
    names = list(slots)
    item = np.dtype(model.params["embed"].dtype).itemsize
    sizes = {name: int(np.prod(slots[name].shape)) * item for name in names}
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in names:
        if shards[-1] and sizes[name] > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= sizes[name]
    where = {}
    for i, members in enumerate(shards, start=1):
        file = _SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _take(model.params, slots[name]) for name in members}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(members, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(directory / _INDEX, index)
    config = {**model.config.to_hf(), "dtype": str(model.params["embed"].dtype)}
    config.pop("torch_dtype", None)
    _write_json(directory / _CONFIG, config)


def _take(params: Params, slot: _Slot) -> np.ndarray:
    """One tensor as a checkpoint stores it."""
    leaf = params
    for key in slot.path:
        leaf = leaf[key]
    value = np.asarray(leaf if slot.layer is None else leaf[slot.layer])
    if slot.inputs:
        value = value.reshape(slot.shape[::-1]).T
    return np.ascontiguousarray(value.reshape(slot.shape))


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
