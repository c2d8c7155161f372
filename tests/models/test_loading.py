"""Reading straight into device arrays, and writing from them: placement, memory, refusals."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from race_jax.models import load_model, param_axes
from race_jax.models.shards import write_safetensors
from race_jax.models.weights import Slot

BENCH = Path(__file__).resolve().parents[2] / "bench" / "loading.py"


def run(*command, flags=""):
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])


def test_pieces_of_a_worked_tensor():
    # A parameter [layers 3, D 4, N 2, H 6] whose layer 1 is stored as [N * H = 12, D = 4].
    slot = Slot(("q",), (1,), ((1, 2), (0,)), (0, 0), (12, 4))
    size = (3, 4, 2, 6)
    assert slot.locate(size, ((2, 3), (0, 4), (0, 2), (0, 6))) is None
    head = slot.locate(size, ((0, 3), (2, 4), (1, 2), (0, 6)))
    assert head.cuts == (slice(6, 12), slice(2, 4))
    assert (head.sizes, head.start) == ((1, 6, 2), (1, 0, 0, 0))
    # Cut within the heads, entries 3..5 of both are no block: all 12 rows are read.
    within = slot.locate(size, ((1, 2), (0, 4), (0, 2), (3, 6)))
    assert within.cuts == (slice(0, 12), slice(0, 4))
    assert within.sizes == (2, 6, 4) and within.within[1] == slice(3, 6)


def test_sharded_reading_and_writing_on_eight_devices(pairs):
    paths = [pairs(name).path for name in ("loads", "loads-moe", "loads-hybrid")]
    script = Path(__file__).with_name("loading_on_eight.py")
    flags = "--xla_force_host_platform_device_count=8"
    assert run(script, *paths, flags=flags) == {"checked": 3}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_host_holds_about_one_tensor(tmp_path, family):
    spec = importlib.util.spec_from_file_location("bench_loading", BENCH)
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    config = bench.shape_config(0.4, family)
    largest = bench.write_checkpoint(config, tmp_path / "model", 1e8)
    found = run(BENCH, "--shard-gigabytes", "0.1", "--measure", tmp_path)
    assert found["arrays"] > 3.5e8 and largest < 1.1e8
    # Compiled programs take some 50 MB beside. Holding the model once would take 400.
    for moment in ("read", "write"):
        assert found[moment] < largest + 1e8, found


def test_one_sharding_for_all_from_a_function_or_a_tree(tiny):
    place = SingleDeviceSharding(jax.devices()[0])
    seen = []

    def choose(axes):
        seen.append(axes)
        return place

    plain = load_model(tiny.path)
    axes = param_axes(plain.config)
    by_function = load_model(tiny.path, shardings=choose)
    by_tree = load_model(tiny.path, shardings=jax.tree.map(lambda _: place, plain.params))
    for model in (by_function, by_tree):
        assert jax.tree.all(
            jax.tree.map(lambda a, b: bool((a == b).all()), model.params, plain.params)
        )
        assert model.params["embed"].committed
    assert ("vocab", "embed") in seen
    assert len(seen) == len(jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)))


def test_shardings_that_do_not_fit_are_refused(tiny):
    place = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match=r"shardings has the structure .* param_axes"):
        load_model(tiny.path, shardings={"embed": place})
    with pytest.raises(ValueError, match=r"shardings has 3 for embed; it must be a jax\.sharding"):
        load_model(tiny.path, shardings=lambda axes: 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_written_files_are_read_by_the_library(tmp_path, rng, dtype):
    arrays = {
        "a": jnp.asarray(rng.standard_normal((3, 5)), dtype),
        "longer.name": jnp.asarray(rng.standard_normal(7), dtype),
        "empty": jnp.zeros((0, 4), dtype),
    }
    host = {name: np.asarray(array) for name, array in arrays.items()}
    shapes = {name: array.shape for name, array in host.items()}
    write_safetensors(tmp_path / "own", shapes, jnp.dtype(dtype), iter(host.values()))
    read = load_file(tmp_path / "own")
    assert read.keys() == host.keys()
    for name in host:
        assert read[name].dtype == host[name].dtype
        np.testing.assert_array_equal(read[name], host[name])
    save_file(host, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "own").stat().st_size == (tmp_path / "theirs").stat().st_size


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.0.mlp.up_proj.qzeros",
        "model.layers.0.mlp.up_proj.weight_packed",
    ],
)
def test_quantised_tensors_are_named(tiny, tmp_path, name):
    path = shutil.copytree(tiny.path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, name: np.ones((2, 2), np.float32)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds {re.escape(name)}, so its weights are quantised"):
        load_model(path)


def test_a_cut_file_is_refused_while_it_is_read(tiny, tmp_path):
    path = shutil.copytree(tiny.path, tmp_path / "model")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        load_model(path)


def test_a_tied_head_is_compared_in_the_dtype_of_the_model(pairs, tmp_path):
    path = shutil.copytree(pairs("qwen2-tied-yarn").path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")
    assert "head" not in load_model(path, "bfloat16").params
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"stores a lm_head\.weight that differs"):
        load_model(path)
