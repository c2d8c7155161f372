"""TPU slices that need not be there: their devices, as far as a compiler must know them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Family:
    """A generation of TPU.

    Attributes:
        memory: Bytes of a chip that a program may use, as its compiler states them when a program
            needs more.
        shapes: The slices that one can have, smallest first.
    """

    memory: int
    shapes: tuple[str, ...]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
FAMILIES = {
    "v5e": Family(int(15.75 * GIB), _FLAT),
    "v5p": Family(int(95.74 * GIB), _CUBES),
    "v6e": Family(int(31.25 * GIB), _FLAT),
}
"""The families that can be planned for, by the name that stands before the colon."""

_NAME = "a family and a slice, such as v5e:4x4, v5p:2x2x2 or v6e:2x4"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
        name: As given, such as `v5p:4x4x4`.
        devices: JAX devices, one per chip.
        memory: Bytes of a chip that a program may use; None where nobody says.
    """

    name: str
    devices: Sequence[Any]
    memory: int | None

    @property
    def platform(self) -> str:
        """What its devices are: `tpu` or `cpu`."""
        return self.devices[0].platform


def slices(name: str) -> list[str]:
    """The topologies that a name stands for: itself, or all of a family, smallest first.

    Args:
        name: `v5p:4x4x4`, a family such as `v5p`, or `cpu:8`.

    Raises:
        ValueError: If there is no such family or slice.
    """
    family, colon, shape = name.partition(":")
    if family == "cpu":
        if not shape.isdigit() or int(shape) < 1:
            raise ValueError(f"--topology {name}: write cpu: and the number of devices, cpu:8.")
        return [name]
    if family not in FAMILIES:
        raise ValueError(
            f"--topology {name}: no such family; the known ones are {', '.join(FAMILIES)}, and a "
            f"topology is {_NAME}."
        )
    shapes = FAMILIES[family].shapes
    if not colon:
        return [f"{family}:{each}" for each in shapes]
    if shape not in shapes:
        raise ValueError(
            f"--topology {name}: {family} has no slice {shape or 'without a shape'}; it has "
            f"{', '.join(shapes)}."
        )
    return [name]


def describe(name: str) -> Topology:
    """The devices of one topology. No accelerator is needed, nor touched where there is one.

    Args:
        name: `v5p:4x4x4`, or `cpu:8` for CPU devices of this process.

    Raises:
        ValueError: If there is no such topology, libtpu is not installed, or this process has too
            few CPU devices.
    """
    (name,) = slices(name)
    family, _, shape = name.partition(":")
    if family == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < int(shape):
            raise ValueError(
                f"--topology {name}: this process has {len(devices)} CPU devices; set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={shape}."
            )
        return Topology(name, devices[: int(shape)], None)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology {name}: jax[tpu] is not installed, and the TPU compiler comes with it; "
            "pip install 'jax[tpu]'. No TPU is needed."
        )
    return Topology(name, _tpu_devices(name), FAMILIES[family].memory)


def _tpu_devices(name: str) -> Sequence[Any]:
    # Otherwise libtpu asks the network what machine this is, waits long for an answer, and loads
    # in one process of a machine alone.
    for key, value in (
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    bounds = {"chips_per_host_bounds": (1, 1, 1)} if name.endswith(":1x1") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices
    expected = math.prod(int(size) for size in name.partition(":")[2].split("x"))
    if len(devices) != expected:
        raise ValueError(
            f"--topology {name}: libtpu describes {len(devices)} devices and not {expected}; "
            "install the version of libtpu that belongs to this jax: pip install 'jax[tpu]'."
        )
    return devices


def stay_on_cpu() -> None:
    """Keep JAX from looking for accelerators; of no effect once it has looked."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
