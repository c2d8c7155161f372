"""Two real processes against one, and the settings by which they find one another."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from race_jax.sharding import make_mesh
from race_jax.train.distributed import (
    DistributedConfig,
    cluster_size,
    in_step,
    largest_of_all,
    row_share,
    start,
    to_mesh,
)

WORKER = Path(__file__).parent / "two_processes.py"
LIMIT = 240  # seconds, for a machine that is busy


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_together(count, sizes, folder):
    """Run `count` processes with eight devices between them; none outlives the call."""
    flags = (
        f"--xla_force_host_platform_device_count={8 // count} --xla_backend_optimization_level=0"
    )
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    coordinator = f"localhost:{free_port()}"
    started = []
    try:
        for index in range(count):
            arguments = [str(index), str(count), coordinator, json.dumps(sizes), str(folder)]
            log = (folder / f"{count}-{index}.log").open("w+")
            command = [sys.executable, str(WORKER), *arguments]
            started.append(
                (subprocess.Popen(command, env=environment, stdout=log, stderr=log), log)
            )
        end = time.monotonic() + LIMIT
        for process, log in started:
            code = process.wait(timeout=max(1, end - time.monotonic()))
            log.seek(0)
            assert code == 0, log.read()
    finally:
        for process, log in started:
            process.kill()
            process.wait()
            log.close()
    return [dict(np.load(folder / f"{count}-{index}.npz")) for index in range(count)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_together(1, {"fsdp": 4, "tensor": 2}, tmp_path_factory.mktemp("one"))[0]


def test_one_process_decides_for_itself():
    assert largest_of_all(True) and not largest_of_all(False)
    assert largest_of_all([3, 5]).tolist() == [3, 5]


# Rows are divided over the processes, or every process has a part of the heads and tokens of all.
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 2, "context": 4}]
)
def test_two_processes_reach_the_numbers_of_one(alone, tmp_path, sizes):
    for got in run_together(2, sizes, tmp_path):
        for name in ("logprobs", "embed", "key"):
            np.testing.assert_allclose(got[name], alone[name], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(got["total"], alone["total"], rtol=1e-5)
        # Three batches here and one there are three rounds together, and four in one process.
        assert got["rounds"] == (3 if "data" in sizes else 4) and alone["rounds"] == 4
        np.testing.assert_allclose(got["sums"], alone["sums"], rtol=1e-5)


def test_one_process_needs_nothing():
    start(DistributedConfig())
    mesh = make_mesh(devices=jax.devices()[:1])
    assert row_share(mesh) == (0, 1) and jax.process_count() == 1
    rows = {"tokens": np.ones((1, 4), np.int32)}
    got = list(in_step([rows, rows], mesh, {"tokens": np.int32}))
    assert len(got) == 2 and got[0]["tokens"].shape == (1, 4)
    assert list(in_step([], mesh, {"tokens": np.int32})) == []


def test_a_batch_with_other_fields():
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="must hold tokens, and this process has words"):
        list(in_step([{"words": np.ones((1, 4))}], mesh, {"tokens": np.int32}))


def test_rows_that_do_not_divide_are_named():
    class Fake:
        shape = {"data": 4, "fsdp": 1, "tensor": 1, "context": 1}  # noqa: RUF012
        devices = np.array(jax.devices()[:1] * 4).reshape(4, 1, 1, 1)
        size = 4

    with pytest.raises(ValueError, match=r"tokens: batch is 3 .* data x fsdp = 4 x 1 = 4"):
        to_mesh({"tokens": np.zeros((3, 4), np.int32)}, Fake())


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, 4),
        ({"SLURM_NTASKS": "4"}, 1),  # inside an allocation, but not started by srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c"}, 3),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, 2),
    ],
)
def test_what_the_environment_says(environment, size):
    assert cluster_size(environment) == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "on"}, "mode is 'on'; it must be one of auto, off"),
        ({"timeout": 0}, "timeout is 0"),
        ({"coordinator": "a:1"}, "lacks processes, process_id"),
        ({"mode": "flags"}, "lacks coordinator, processes, process_id"),
        ({"mode": "off", "processes": 2}, "mode is off, which reads none"),
        ({"coordinator": "a", "processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"coordinator": "a:1", "processes": 2, "process_id": 2}, "process_id is 2 of 2"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**settings)


def test_an_environment_without_a_cluster():
    # In a process of its own: whatever it detects must not reach this one.
    code = (
        "from race_jax.train.distributed import DistributedConfig, start\n"
        "start(DistributedConfig(mode='environment', timeout=5))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and "no cluster was found in the environment" in run.stderr
