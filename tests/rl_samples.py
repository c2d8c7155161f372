"""Runs of RL and CARL that take seconds, on outcomes that the sampled ids decide."""

import dataclasses
import json

import jax
import numpy as np
from rich.console import Console

from race_jax.checkpoint import Checkpoints
from race_jax.envs.factory import EnvironmentConfig
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.results import read_rollouts
from race_jax.train import rl_setup
from race_jax.train.optimizer import OptimizerConfig
from race_jax.train.rl_config import CoverConfig, PolicyLossConfig, RlConfig
from race_jax.train.samplers import SamplerConfig
from race_jax.train.state import abstract_state
from race_jax.train.step import ComputeConfig

QUIET = Console(quiet=True)


def judge_anew(path):
    """Rollouts with outcomes that their ids decide: a random model solves nothing by itself."""
    for rollout in read_rollouts(path):
        turns = rollout.tokens.turns if rollout.tokens else ()
        number = sum(sum(turn.action) for turn in turns)
        yield dataclasses.replace(rollout, reward=float(number % 5), success=number % 2 == 0)


def settings_of(model, out, **changes):
    """What both kinds of runs are told."""
    return {
        "model": str(model),
        "out": str(out),
        "env": EnvironmentConfig("potions", {"size": 4, "orders": 1}),
        "prompts": 2,
        "rollout": RolloutConfig(max_turns=3, max_turn_tokens=40, max_tokens=320),
        "sampler": SamplerConfig(slots=4, chunk=64),
        "optimizer": OptimizerConfig(lr=1e-2, schedule="constant", warmup=0.0),
        "compute": ComputeConfig(dtype="float32"),
        **changes,
    }


def config_of(model, out, **changes):
    given = {
        "steps": 3,
        "group": 3,
        "logic": CoverConfig(epsilon=5.0, slots=2, rows=2),
        "loss": PolicyLossConfig(closure=0.5),
        "rows": 12,
        **changes,
    }
    return RlConfig(**settings_of(model, out, **given))


def state_of(config):
    with Checkpoints(f"{config.out}/checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest is not None
        run = rl_setup.Run(config)
        like = abstract_state(run.trainee, run.rule, run.mesh)
        return jax.tree.map(np.asarray, checkpoints.restore(checkpoints.latest, like))


def told(config):
    with open(f"{config.out}/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "memory/"))} for r in records]
