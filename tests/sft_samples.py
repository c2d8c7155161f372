"""A tiny checkpoint and a few trajectories of the embedded world, for runs that take seconds."""

import dataclasses
import json

from checkpoint_samples import save_tiny

from race_jax.envs.potions import PotionShopConfig, oracle_trajectory
from race_jax.sft_data import SftDataConfig
from race_jax.train.optimizer import OptimizerConfig
from race_jax.train.sft_setup import SftConfig
from race_jax.train.step import ComputeConfig
from race_jax.trajectories import write

WORLD = PotionShopConfig(4, orders=1)


def make_checkpoint(folder, seed=0, **changes):
    """A random Qwen3 of one layer with the world's tokenizer."""
    changes = {"num_key_value_heads": 2, **changes}
    save_tiny(folder, WORLD.size, seed, **changes)
    template = {"chat_template": "{{ messages }}"}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    (folder / "chat_template.jinja").write_text(template["chat_template"])
    return folder


def make_trajectories(path, count=24):
    """Episodes that reason only where the world needs it, so with SKIP and THINK turns."""

    def sparse(item):
        needed = iter(item.extra["needed"])
        messages = [
            {**m, "reasoning_content": m["reasoning_content"] if next(needed) else ""}
            if m["role"] == "assistant"
            else m
            for m in item.messages
        ]
        return dataclasses.replace(item, messages=tuple(messages))

    write(path, (sparse(oracle_trajectory(seed, WORLD)) for seed in range(count)))
    return path


def make_config(folder, out, **changes):
    """Six steps of two rows; with 24 trajectories the fourth begins the second epoch."""
    data = {
        "path": str(folder / "train.jsonl"),
        "length": 512,
        "batch_size": 2,
        "reasoning": "full",
        "held_out": 0.2,
        **changes.pop("data", {}),
    }
    settings = {
        "model": str(folder / "model"),
        "out": str(out),
        "data": SftDataConfig(**data),
        "steps": 6,
        "optimizer": OptimizerConfig(lr=1e-2, warmup=0.0),
        "compute": ComputeConfig(dtype="float32", head_chunk=64),
        "eval_every": 3,
        **changes,
    }
    return SftConfig(**settings)


def make_workspace(folder):
    """Checkpoint and trajectories in one folder."""
    make_checkpoint(folder / "model")
    make_trajectories(folder / "train.jsonl")
    return folder
