"""What a run needs of each chip: its real programs, compiled ahead of time and taken apart."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import jax
from jax.sharding import NamedSharding

from race_jax.models.kernels import compile_for
from race_jax.sharding import make_mesh, use_mesh
from race_jax.train.costs import Costs, read_costs
from race_jax.train.plan_config import PlanConfig
from race_jax.train.programs import Program, make_programs
from race_jax.train.topology import GIB, Topology


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one chip.

    Attributes:
        parameters: Weights as they lie between steps.
        optimizer: Its state; 0 where nothing is trained.
        cache: Keys, values and states of sequences in progress.
        inputs: The batch, and what the chip's layouts pad.
        activations: What the forward pass keeps for the backward pass.
        temporaries: All else that lives within the program, gradients included; with the
            activations if the program was not compiled to its end.
        code: The program itself.
        limit: What a chip has for programs; None if nobody says.
    """

    parameters: int
    optimizer: int
    cache: int
    inputs: int
    activations: int
    temporaries: int
    code: int
    limit: int | None

    @property
    def total(self) -> int:
        """Their sum."""
        parts = (self.parameters, self.optimizer, self.cache, self.inputs, self.activations)
        return sum(parts) + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether a chip has that much."""
        return self.limit is None or self.total <= self.limit


@dataclasses.dataclass(frozen=True)
class Report:
    """One program on one topology.

    Attributes:
        program: Its name.
        shape: What it takes at once, in words.
        topology: Its name.
        chips: How many.
        mesh: Sizes of the mesh's axes.
        memory: Bytes of one chip.
        model_flops: What the mathematics needs for all chips, each product once.
        costs: What one chip does; None if the program was not compiled to its end.
        seconds: How long lowering and compiling took.
        advice: The first thing to change, or empty.
    """

    program: str
    shape: str
    topology: str
    chips: int
    mesh: dict[str, int]
    memory: Memory
    model_flops: float
    costs: Costs | None
    seconds: float
    advice: str = ""

    @property
    def compiled_flops(self) -> float | None:
        """FLOPs of matrix products on all chips."""
        return self.costs.flops * self.chips if self.costs else None


def plan(config: PlanConfig, topology: Topology) -> list[Report]:
    """Compile each of a run's programs for a topology.

    No weight is allocated, and nothing runs.

    Args:
        config: The run.
        topology: From `topology.describe`.

    Returns:
        A report for each program.

    Raises:
        ValueError: If the mesh does not fit the topology, or a dimension the mesh.
    """
    sizes = config.mesh.sizes()
    mesh = make_mesh(**sizes, devices=topology.devices)
    reports = []
    with use_mesh(mesh, config.mesh.rules()), compile_for(topology.platform):
        for program in make_programs(config, mesh):
            report = compile_program(program, topology, dict(mesh.shape))
            reports.append(dataclasses.replace(report, advice=advise(report, config)))
    return reports


def compile_program(program: Program, topology: Topology, mesh: dict[str, int]) -> Report:
    """Lower, compile and analyse one program; one that needs too much memory is reported too."""
    start = time.perf_counter()
    known = {name: local_bytes(tree) for name, tree in program.resident.items()}
    needed, costs, stats = None, None, None
    if topology.memory is None or sum(known.values()) <= topology.memory:
        try:
            compiled = program.lower().compile()
            costs, stats = read_costs(compiled.as_text()), compiled.memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            needed = needed_bytes(str(error))
            if needed is None:
                raise
    memory = split_memory(known, stats, costs, needed, topology.memory)
    return Report(
        program.name,
        program.shape,
        topology.name,
        len(topology.devices),
        mesh,
        memory,
        program.model_flops,
        costs,
        time.perf_counter() - start,
    )


def local_bytes(tree: Any) -> int:
    """Bytes of one device's part of arrays, or shapes with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape
        if isinstance(leaf.sharding, NamedSharding):
            shape = leaf.sharding.shard_shape(shape)
        size = leaf.dtype.itemsize
        for dim in shape:
            size *= dim
        total += size
    return total


def needed_bytes(message: str) -> int | None:
    """How much memory the compiler says a program needs that does not fit; None if it says not.

    Example:
        >>> needed_bytes("required for HLO temporaries (2.00G) exceeds available HBM (1.00G).")
        2147483648
    """
    found = re.search(
        r"(?:required[^(]*\(|Used )([\d.]+)([KMGT])\)? (?:exceeds available HBM|of [\d.]+\w hbm)",
        message,
    )
    if found is None:
        return None
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))


def split_memory(
    known: dict[str, int], stats: Any, costs: Costs | None, needed: int | None, limit: int | None
) -> Memory:
    """Say what a program's memory is for.

    Args:
        known: Bytes of `parameters`, `optimizer`, `cache`, `inputs` on one chip.
        stats: The compiler's analysis, or None if it stopped.
        costs: Of the compiled program, or None.
        needed: Where it stopped, how many bytes it asked for.
        limit: What a chip has.
    """
    parts = {name: known.get(name, 0) for name in ("parameters", "optimizer", "cache", "inputs")}
    if stats is None or costs is None:
        rest = max((needed or 0) - sum(parts.values()), 0)
        return Memory(**parts, activations=0, temporaries=rest, code=0, limit=limit)
    parts["inputs"] += max(stats.argument_size_in_bytes - sum(parts.values()), 0)
    made = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    kept = min(costs.stacked, made)
    return Memory(
        **parts,
        activations=kept,
        temporaries=made - kept,
        code=stats.generated_code_size_in_bytes,
        limit=limit,
    )


def advise(report: Report, config: PlanConfig) -> str:
    """The first thing to change in a run whose program does not fit, or empty."""
    memory, mesh = report.memory, report.mesh
    if memory.fits or memory.limit is None:
        return ""
    state = memory.parameters + memory.optimizer
    if config.trains and config.compute.remat == "none":
        return "compute.remat: block, so that the backward pass recomputes each block"
    if state > 0.7 * memory.limit:
        remedy = (
            f"weights and optimizer take {state / GIB:.1f} GiB of each chip: divide them further, "
            f"with mesh.fsdp above {mesh['fsdp']} or mesh.context above {mesh['context']} on more "
            "chips"
        )
        return remedy + (", or train adapters (lora.rank: 16)" if config.trains else "")
    if memory.cache > 0.4 * memory.limit:
        return f"fewer sequences at a time: rows {max(config.rows // 2, 1)}"
    spread = mesh["data"] * mesh["fsdp"]
    if config.trains and config.rows // config.compute.micro_batches > spread:
        more = config.rows // config.compute.micro_batches // spread * config.compute.micro_batches
        return f"smaller parts of a batch: compute.micro_batches {more}"
    halved = f"or sequence_length {config.sequence_length // 2}"
    if mesh["fsdp"] % 2 == 0:
        moved = f"mesh.context {2 * mesh['context']} and mesh.fsdp {mesh['fsdp'] // 2}"
        return f"fewer tokens of a row on each chip: {moved}, {halved}"
    more = f"{2 * report.chips} chips with mesh.context {2 * mesh['context']}"
    return f"fewer tokens of a row on each chip: {more}, {halved}"
