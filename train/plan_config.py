"""What `race-jax plan` is asked: a model, a program, sizes and a mesh."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from race_jax.models import ModelConfig
from race_jax.train.distributed import MeshConfig
from race_jax.train.optimizer import LoraConfig
from race_jax.train.sft_setup import SftConfig
from race_jax.train.step import ComputeConfig

Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """A run to plan for.

    Attributes:
        model: A `config.json`, the folder that it lies in, or its fields.
        program: `logic_scoring`, `sft`, `rl` or `decode`.
        sequence_length: Tokens of a row, T; of a cached sequence for scoring and decoding.
        rows: Rows of a batch, all micro-batches together; for scoring and decoding, sequences that
            the cache holds.
        head_share: Share of the places of a row that the head sees, in (0, 1]: the action tokens
            that are scored, or the policy's tokens in training.
        row_tokens: Tokens that the LoGiC engine appends to each sequence in a step.
        mesh: How devices are arranged.
        compute: As for training; scoring and decoding read `dtype` alone.
        lora: Adapters in place of full training; rank 0 trains all.
    """

    model: str | dict[str, Any]
    program: Literal["logic_scoring", "sft", "rl", "decode"]
    sequence_length: int = 65536
    rows: int = 1
    head_share: float = 0.1
    row_tokens: int = 16
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

    def __post_init__(self):
        for name in ("sequence_length", "rows", "row_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if not 0 < self.head_share <= 1:
            raise ValueError(f"head_share is {self.head_share}; it must be above 0, at most 1.")

    @property
    def trains(self) -> bool:
        """Whether the run changes parameters."""
        return self.program in ("sft", "rl")

    @property
    def places(self) -> int:
        """Places of a row that the head sees, in eighths of the row as training rounds them."""
        unit = -(-self.sequence_length // 8)
        most = math.ceil(self.head_share * self.sequence_length)
        return min(-(-most // unit) * unit, self.sequence_length)


def read_config(path: str, model: str | None = None) -> PlanConfig:
    """Read a YAML file: of a plan, or of a run of `race-jax sft`.

    Args:
        path: The file.
        model: A `config.json` in place of the one that the file names.

    Raises:
        ValueError: If a key is unknown, or a value breaks its rule.
        OSError: If a file cannot be read.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no settings; write them as `name: value`.")
    if "data" in data and "program" not in data:
        config = _plan_of_sft(path)
    else:
        config = _parse(path, PlanConfig)
    return dataclasses.replace(config, model=model) if model else config


def _plan_of_sft(path: str) -> PlanConfig:
    """What a supervised run computes in a step, were all of its batch policy tokens."""
    run = _parse(path, SftConfig)
    return PlanConfig(
        run.model,
        "sft",
        run.data.length,
        run.data.batch_size,
        head_share=1.0,
        mesh=run.mesh,
        compute=run.compute,
        lora=run.lora,
    )


def _parse(path: str, kind: type[Settings]) -> Settings:
    """The settings of a file as the command line reads them."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        return kind(**vars(parser.instantiate(parser.parse_path(path))))
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}") from None


def model_config(model: str | dict[str, Any]) -> ModelConfig:
    """The shape of the network that a run names.

    Raises:
        ValueError: If the file is no JSON object, or describes no model that is supported.
        OSError: If it cannot be read.
    """
    if isinstance(model, dict):
        return ModelConfig.from_hf(model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"the model's {path} is not here; name a config.json, such as --model "
            "configs/models/qwen3_5_9b.json. Weights are not needed."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"model {path} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"model {path} holds no JSON object; name a model's config.json.")
    return ModelConfig.from_hf(data)
