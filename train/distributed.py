"""The devices and processes of a run: their mesh, starting them, and keeping them in step.

All processes run the same program on one mesh over all their devices. A process that stops calling
while another still does leaves it waiting for ever, so everything here that decides whether to go
on decides it for all.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from race_jax.sharding import Rules, sharding_for

Batch = Mapping[str, np.ndarray]
"""Arrays [B, T] of one process, by name."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The mesh, and where arrays lie on it.

    Attributes:
        data: Copies of the model.
        fsdp: Pieces into which parameters and rows are cut; null takes what the others leave. So
            does -1 on any one axis.
        tensor: Pieces into which heads, MLP columns and the vocabulary are cut.
        context: Pieces into which the tokens of a row are cut.
        experts: `fsdp` or `tensor`, the axis that divides experts.
        replicate: Logical axes that may stay whole where they do not divide, such as `kv_heads`.
    """

    data: int = 1
    fsdp: int | None = None
    tensor: int = 1
    context: int = 1
    experts: Literal["fsdp", "tensor"] = "fsdp"
    replicate: tuple[str, ...] = ()

    def sizes(self) -> dict[str, Any]:
        """Arguments of `make_mesh`."""
        names = ("data", "fsdp", "tensor", "context")
        return {name: getattr(self, name) for name in names}

    def rules(self) -> Rules:
        """The rules of the mesh."""
        return Rules(self.experts, self.replicate)


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run find one another.

    Attributes:
        mode: `off` for one process; `environment` for what JAX detects: TPU pods (also on GKE),
            SLURM, Open MPI, Kubernetes; `flags` for the three below; `auto` takes `flags` where
            `coordinator` is given, `environment` where a variable of a cluster says that there are
            several processes, and `off` otherwise.
        coordinator: `HOST:PORT` of process 0, reachable from all, or None.
        processes: How many there are, or None.
        process_id: Which one this is, from 0, or None.
        timeout: Seconds to wait for the others at the start.
    """

    mode: Literal["auto", "off", "environment", "flags"] = "auto"
    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    timeout: int = 300

    def __post_init__(self):
        modes = ("auto", "off", "environment", "flags")
        if self.mode not in modes:
            raise ValueError(
                f"distributed.mode is {self.mode!r}; it must be one of {', '.join(modes)}."
            )
        if self.timeout < 1:
            raise ValueError(f"distributed.timeout is {self.timeout}; it must be at least 1 s.")
        flags = {name: getattr(self, name) for name in ("coordinator", "processes", "process_id")}
        missing = [name for name, value in flags.items() if value is None]
        if self.mode in ("off", "environment"):
            if len(missing) < len(flags):
                raise ValueError(
                    f"distributed.mode is {self.mode}, which reads none of {', '.join(flags)}; "
                    "leave them out, or choose flags."
                )
            return
        if missing and (self.mode == "flags" or len(missing) < len(flags)):
            raise ValueError(
                f"distributed lacks {', '.join(missing)}; give coordinator, processes and "
                "process_id together, or choose the mode environment."
            )
        if missing:
            return
        host, _, port = str(self.coordinator).rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"distributed.coordinator is {self.coordinator!r}; it must be HOST:PORT of "
                "process 0."
            )
        assert self.processes is not None and self.process_id is not None
        if not 0 <= self.process_id < self.processes:
            raise ValueError(
                f"distributed.process_id is {self.process_id} of {self.processes} processes; it "
                f"must be from 0 to {self.processes - 1}."
            )


def start(config: DistributedConfig) -> None:
    """Join the other processes, before anything else of JAX runs. A second call does nothing.

    Args:
        config: How to find them.

    Raises:
        ValueError: If the environment names no cluster, or the others do not come in time.

    Example:
        >>> start(DistributedConfig(mode="off"))
        >>> jax.process_count()
        1
    """
    if jax.distributed.is_initialized():
        return
    given = config.coordinator is not None
    seen = cluster_size(os.environ) > 1
    if config.mode == "off" or (config.mode == "auto" and not given and not seen):
        return
    # What CPUs talk through; other devices bring their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process_id,
            initialization_timeout=config.timeout,
        )
    except ValueError as error:
        raise ValueError(
            f"no cluster was found in the environment ({error}); give distributed.coordinator, "
            "distributed.processes and distributed.process_id, or the mode off."
        ) from error


def cluster_size(environment: Mapping[str, str]) -> int:
    """How many processes the variables of a cluster speak of; 1 where there are none.

    Args:
        environment: `os.environ`. Read are SLURM's number of tasks (with `SLURM_PROCID`, which only
            `srun` sets), Open MPI's, and the workers that GKE and Cloud TPU list.

    Example:
        >>> cluster_size({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
        4
    """
    slurm = environment.get("SLURM_NTASKS", "1") if "SLURM_PROCID" in environment else "1"
    counts = [slurm, environment.get("OMPI_COMM_WORLD_SIZE", "1")]
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    slices = environment.get("MEGASCALE_NUM_SLICES", "1")
    sizes = [int(count) for count in (*counts, slices) if count.isdigit()]
    return max(*sizes, len(hosts.split(",")), 1)


def row_share(mesh: Mesh) -> tuple[int, int]:
    """Which share of the rows of a batch this process reads.

    Processes whose devices hold the same rows, and differ in `tensor` or `context` only, read the
    same share.

    Args:
        mesh: From `make_mesh`.

    Returns:
        (index, count): the share and how many there are.

    Raises:
        ValueError: If processes share some of their rows and not all.
    """
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    owners = owners.reshape(mesh.shape["data"] * mesh.shape["fsdp"], -1)
    held = {p: tuple(np.flatnonzero((owners == p).any(axis=1)).tolist()) for p in np.unique(owners)}
    shares = sorted(set(held.values()))
    if len(owners) != sum(map(len, shares)):
        raise ValueError(
            f"the mesh {dict(mesh.shape)} gives processes overlapping parts of the rows; choose "
            "data x fsdp so that it divides the number of processes or is a multiple of it."
        )
    return shares.index(held[jax.process_index()]), len(shares)


def to_mesh(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """The rows of all processes as global arrays over `data`, `fsdp` and `context`.

    Args:
        batch: This process's share of the rows, whole rows [B, T]; the same shapes everywhere.
        mesh: From `make_mesh`.

    Returns:
        Arrays [B * shares, T].

    Raises:
        ValueError: If the rows or tokens do not divide over the mesh.

    Example:
        >>> from race_jax.sharding import make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> to_mesh({"tokens": np.zeros((2, 8), np.int32)}, mesh)["tokens"].shape
        (2, 8)
    """
    shares = row_share(mesh)[1]

    def one(name: str, value: np.ndarray) -> jax.Array:
        shape = (value.shape[0] * shares, *value.shape[1:])
        where = sharding_for(("batch", "time"), mesh, shape, name=name)
        return jax.make_array_from_process_local_data(where, value, shape)

    return {name: one(name, value) for name, value in batch.items()}


def largest_of_all(values: ArrayLike) -> np.ndarray:
    """The element-wise largest `values` over all processes; every process calls it.

    Example:
        >>> int(largest_of_all(3)), bool(largest_of_all(False))
        (3, False)
    """
    if jax.process_count() == 1:
        return np.asarray(values)
    return np.max(multihost_utils.process_allgather(np.asarray(values)), axis=0)


def in_step(
    batches: Iterable[Batch], mesh: Mesh, fields: Mapping[str, np.dtype | type]
) -> Iterator[dict[str, jax.Array]]:
    """Batches of all processes together, until the last process has none left.

    In each round the processes tell one another whether they have a batch and how large it is. One
    that has run dry feeds rows of padding: 0 everywhere, so no segment and no loss. Smaller
    batches are padded alike. So all make the same number of rounds, with the same shapes.

    Args:
        batches: This process's, of [B, T] arrays; any number, none included.
        mesh: From `make_mesh`.
        fields: Names and dtypes of the arrays, for a process that never has any.

    Yields:
        Global arrays, as `to_mesh` makes them.

    Raises:
        ValueError: In every process, if one has a batch with other names than `fields`.
    """
    own = iter(batches)
    while True:
        batch = next(own, None)
        wrong = batch is not None and set(batch) != set(fields)
        size = (0, 0) if batch is None or wrong else next(iter(batch.values())).shape
        told = largest_of_all(np.asarray([batch is not None, wrong, *size], np.int64))
        if told[1]:
            mine = f", and this process has {', '.join(batch)}" if wrong and batch else ""
            raise ValueError(f"a batch must hold {', '.join(fields)}{mine}; give all of them.")
        if not told[0]:
            return
        rows, length = int(told[2]), int(told[3])
        yield to_mesh(_padded(batch or {}, fields, rows, length), mesh)


def _padded(
    batch: Batch, fields: Mapping[str, np.dtype | type], rows: int, length: int
) -> dict[str, np.ndarray]:
    """The batch at the size [rows, length], with 0 in what is new."""
    out = {name: np.zeros((rows, length), dtype) for name, dtype in fields.items()}
    for name, value in batch.items():
        out[name][: value.shape[0], : value.shape[1]] = value
    return out


def fetch(value: jax.Array) -> np.ndarray:
    """A global array whole, in every process; every process must call it."""
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))
