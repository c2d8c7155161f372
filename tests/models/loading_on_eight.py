"""Checks of sharded reading and writing, for a process with 8 virtual devices.

Run by test_loading.py with the directories of checkpoints; an assertion that fails ends it.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from race_jax.models import abstract_params, hf, load_config, load_model, param_axes, save_model
from race_jax.sharding import Rules, make_mesh, shardings_for


def equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool(np.array_equal(np.asarray(x), np.asarray(y))), a, b)
    )


def watch_reads():
    """Count the numbers read from files."""
    counts = []
    plain = hf._Reader.read

    def read(self, name, cuts):
        block = plain(self, name, cuts)
        counts.append(block.size)
        return block

    hf._Reader.read = read
    return counts


def check(path, counts):
    whole = load_model(path)
    config = load_config(path)
    abstract = abstract_params(config)
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract))
    for experts in ("fsdp", "tensor"):
        mesh, rules = make_mesh(fsdp=2, tensor=2, context=2), Rules(experts=experts)
        places = shardings_for(param_axes(config), mesh, abstract, rules)
        counts.clear()
        model = load_model(path, shardings=places)
        assert jax.tree.map(lambda x: x.sharding, model.params) == places
        assert equal(model.params, whole.params)
        # Every number was read once, those too that several devices hold.
        assert sum(counts) == size, (sum(counts), size)
        with tempfile.TemporaryDirectory() as out:
            save_model(model, Path(out) / "saved", shard_bytes=20_000)
            assert len(list((Path(out) / "saved").glob("*.safetensors"))) > 1
            assert equal(load_model(Path(out) / "saved").params, whole.params)
    # Heads cut within: what a device needs is no block of the stored tensor.
    mesh = make_mesh(tensor=4, fsdp=2)

    def within(axes):
        cut = {"head_dim": "tensor", "embed": "fsdp"}
        return NamedSharding(mesh, PartitionSpec(*(cut.get(axis) for axis in axes)))

    model = load_model(path, "bfloat16", shardings=within)
    assert equal(model.params, load_model(path, "bfloat16").params)
    assert model.params["layers"]["attention"]["key"].sharding.spec[3] == "tensor"


if __name__ == "__main__":
    assert jax.device_count() == 8
    spy = watch_reads()
    for name in sys.argv[1:]:
        check(Path(name), spy)
    print(json.dumps({"checked": len(sys.argv) - 1}))
