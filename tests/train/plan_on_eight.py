"""Plans for eight virtual CPU devices; prints what was found as JSON."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from race_jax.sharding import make_mesh, use_mesh
from race_jax.train.costs import read_costs
from race_jax.train.distributed import MeshConfig
from race_jax.train.plan import plan
from race_jax.train.plan_config import PlanConfig
from race_jax.train.step import ComputeConfig
from race_jax.train.topology import describe

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def collectives():
    """One of each kind, three times each, with [4, 8] float32 on each device."""
    mesh = make_mesh(devices=jax.devices())

    def local(x):
        def step(x, _):
            x = jax.lax.psum(x, "fsdp") / 8
            x = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
            x = jnp.tanh(jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True))
            x = jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 8) for i in range(8)])
            x = jax.lax.all_to_all(jnp.tanh(x), "fsdp", split_axis=1, concat_axis=0, tiled=True)
            return x.reshape(4, 8), None

        return jax.lax.scan(step, x, None, length=3)[0]

    spec = PartitionSpec("fsdp")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with use_mesh(mesh):
        text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 8), jnp.float32)).compile().as_text()
    found = read_costs(text).collectives
    return {kind: dataclasses.astuple(traffic) for kind, traffic in found.items()}


def fault(config):
    """What is wrong with it."""
    try:
        plan(config, describe("cpu:8"))
    except ValueError as error:
        return str(error)
    return ""


def main():
    """Print everything."""
    make = functools.partial(PlanConfig, MODEL, sequence_length=64, rows=8)
    found = [
        *plan(
            make("sft", mesh=MeshConfig(context=2), compute=ComputeConfig("float32", 2)),
            describe("cpu:8"),
        ),
        *plan(make("logic_scoring", mesh=MeshConfig(tensor=2)), describe("cpu:8")),
    ]
    faults = {
        "product": fault(make("sft", mesh=MeshConfig(fsdp=3))),
        "heads": fault(make("sft", mesh=MeshConfig(tensor=8))),
        "rows": fault(make("rl", rows=4)),
        "axes": fault(make("decode", mesh=MeshConfig(data=-1, context=-1))),
    }
    reports = {report.program: dataclasses.asdict(report) for report in found}
    print(json.dumps({"reports": reports, "faults": faults, "collectives": collectives()}))


main()
