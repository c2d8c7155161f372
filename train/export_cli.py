"""`race-jax export`: a run's checkpoint as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from race_jax import jsonl
from race_jax.checkpoint import Checkpoints
from race_jax.models import (
    abstract_params,
    load_config,
    load_model,
    make_model,
    param_axes,
    save_model,
)
from race_jax.tokenizer import IM_END, load_tokenizer, spell
from race_jax.train.optimizer import LoraConfig, init_lora, merge_lora
from race_jax.train.runtime import model_fingerprint
from race_jax.types import Params

GENERATION = "generation_config.json"
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *(GENERATION, "preprocessor_config.json", "LICENSE"),
)
"""Files of the base model's folder that belong to the trained model as they are."""


def export(
    run: str,
    out: str,
    step: str = "best",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    model: str | None = None,
) -> int:
    """Write a run's weights as a Hugging Face directory, adapters merged in.

    Tokenizer, chat template and generation settings come from the model that the run began with.
    If that has no generation settings, the end-of-turn token is noted as the one to stop at.

    Args:
        run: Folder of the run, the `out` of `race-jax sft`.
        out: Directory to write.
        step: `best` for the lowest held-out loss, `latest`, or a step's number. `best` takes the
            latest if no checkpoint has a held-out loss.
        dtype: Dtype of the weights in the files.
        model: Folder of the model that the run began with, if it is elsewhere now.

    Returns:
        Exit code 0.

    Raises:
        ValueError: There is no such checkpoint, or the model is another one than the run's.
        FileNotFoundError: A folder is missing.
        OSError: The directory cannot be written.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype {dtype}: choose bfloat16 or float32.")
    folder = Path(run) / "checkpoints"
    with Checkpoints(folder, read_only=True) as checkpoints:
        number = choose_step(checkpoints, step)
        settings = checkpoints.notes(number)["settings"]
        base = model or settings["model"]
        if model_fingerprint(base) != settings["model_fingerprint"]:
            raise ValueError(
                f"{base} is not the model that {run} began with; name that one with --model."
            )
        if Path(out).exists() and Path(out).samefile(base):
            raise ValueError(f"--out {out} is the model that the run began with; name another.")
        params = trained_params(checkpoints, number, base, LoraConfig(**settings["lora"]))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    save_model(make_model(load_config(base), params), out)
    for name in COPIED:
        if (Path(base) / name).is_file():
            copy_whole(Path(base) / name, Path(out) / name)
    if not (Path(base) / GENERATION).is_file():
        ends = load_tokenizer(base).convert_tokens_to_ids(spell(IM_END))
        with jsonl.replacing(Path(out) / GENERATION) as file:
            file.write(json.dumps({"eos_token_id": ends}, indent=2).encode() + b"\n")
    Console(highlight=False, soft_wrap=True).print(f"{out}: step {number} of {run}, {dtype}")
    return 0


def choose_step(checkpoints: Checkpoints, step: str) -> int:
    """The checkpoint that `best`, `latest` or a number names.

    Raises:
        ValueError: There is none.
    """
    there = checkpoints.steps
    if not there:
        raise ValueError(f"{checkpoints.folder} holds no complete checkpoint.")
    if step == "latest":
        return there[-1]
    if step == "best":
        return checkpoints.best or there[-1]
    if not step.isdecimal() or int(step) not in there:
        raise ValueError(
            f"--step {step}: choose best, latest or one of {', '.join(map(str, there))}."
        )
    return int(step)


def trained_params(checkpoints: Checkpoints, step: int, base: str, lora: LoraConfig) -> Params:
    """A checkpoint's parameters in float32, adapters merged into the base model's.

    Args:
        checkpoints: The run's.
        step: One of its steps.
        base: Folder of the model that it began with.
        lora: The run's adapters.
    """
    config = load_config(base)
    one = SingleDeviceSharding(jax.local_devices()[0])
    axes, shapes = param_axes(config), abstract_params(config)
    if lora.rank:
        shapes = jax.eval_shape(lambda: init_lora(shapes, axes, lora, jax.random.key(0)))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=one), shapes)
    trained = checkpoints.restore(step, {"trained": like}, partial=True)["trained"]
    if not lora.rank:
        return trained
    return merge_lora(load_model(base, "float32").params, trained, axes, lora)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file under a temporary name and rename it."""
    with jsonl.replacing(target) as file, open(source, "rb") as original:
        shutil.copyfileobj(original, file)
