"""`race-jax plan`: what a run needs of each chip of a TPU slice, on a machine that has none."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from race_jax.train.plan import Report, plan
from race_jax.train.plan_config import PlanConfig, read_config
from race_jax.train.topology import GIB, describe, slices, stay_on_cpu

COLUMNS = (
    *("program", "compiled", "slice", "mesh", "parameters", "optimizer", "cache", "inputs"),
    *("activations", "temporaries", "of chip", "FLOPs: compiled / model", "collectives", "fits"),
    "command",
)
"""Of the rows that `--row` prints."""


def run_plan(config: str, topology: str, model: str | None = None, row: bool = False) -> int:
    """Compile a run's programs for a TPU slice, and say what they need of each chip.

    No TPU is needed, but its compiler is: pip install 'jax[tpu]'. No weights are read or made.

    Args:
        config: YAML file of the run: model, program, sizes, mesh; or the one of `race-jax sft`.
        topology: Slice, such as v5p:4x4x4; or a family, such as v5p, for its smallest slice that
            fits.
        model: A config.json in place of the run's model, or the folder that it lies in.
        row: Print one row of a Markdown table per program.

    Returns:
        0 if every program fits, otherwise 1.
    """
    wanted = read_config(config, model)
    names = slices(topology)
    stay_on_cpu()
    console = Console(highlight=False, soft_wrap=True)
    found: list[Report] = []
    for reports, fault in attempts(wanted, names):
        if fault and len(names) == 1:
            raise ValueError(fault)
        if fault:
            if not row:
                console.print(f"{fault}\n", style="dim", markup=False)
            continue
        found = reports
        if all(report.memory.fits for report in reports):
            break
        if not row and len(names) > 1:
            worst = max(reports, key=lambda report: report.memory.total)
            console.print(f"{worst.topology}: {verdict(worst)}\n", style="dim", markup=False)
    if not found:
        raise ValueError(f"--topology {topology}: the mesh fits none of {', '.join(names)}.")
    command = f"race-jax plan --config {config} --topology {topology}"
    command += f" --model {model}" if model else ""
    for report in found:
        if row:
            print(markdown(report, wanted, command))
        else:
            show(console, report, wanted)
    return 0 if all(report.memory.fits for report in found) else 1


def attempts(config: PlanConfig, names: list[str]) -> Iterator[tuple[list[Report], str]]:
    """The reports for each slice in turn, or why it cannot take the run."""
    for name in names:
        topology = describe(name)
        try:
            yield plan(config, topology), ""
        except ValueError as error:
            yield [], f"{name}: {error}"


def verdict(report: Report) -> str:
    """Whether it fits, in a sentence."""
    memory = report.memory
    if memory.limit is None:
        return "nobody says what these devices have"
    if memory.fits:
        return f"fits, {(memory.limit - memory.total) / GIB:.2f} GiB of each chip are left"
    more = "at least " if report.costs is None and not memory.temporaries else ""
    needs = f"needs {more}{memory.total / GIB:.2f} GiB of {memory.limit / GIB:.2f} GiB"
    return f"does not fit: {report.program} {needs} per chip"


def described(report: Report, config: PlanConfig) -> str:
    """What was compiled, in words."""
    model = config.model if isinstance(config.model, str) else config.model.get("model_type")
    return f"{model} in {config.compute.dtype}: {report.shape}"


def mesh_words(report: Report) -> str:
    """Axes of the mesh that are used."""
    used = [f"{axis} {size}" for axis, size in report.mesh.items() if size > 1]
    return ", ".join(used) or "one device"


def show(console: Console, report: Report, config: PlanConfig) -> None:
    """Print one report."""
    memory, costs = report.memory, report.costs
    versions = ", ".join(f"{name} {version}" for name, version in compilers().items())
    print_line = functools.partial(console.print, markup=False)
    print_line(f"{report.program} on {report.topology}: {report.chips} chips, {mesh_words(report)}")
    print_line(f"compiled in {report.seconds:.0f} s by {versions}: {described(report, config)}")
    table = Table("GiB per chip", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    names = ("parameters", "optimizer", "cache", "inputs", "activations", "temporaries", "code")
    for name in names:
        label = name
        if name == "temporaries" and costs is None:
            label = "activations and temporaries"
        if not (name == "activations" and costs is None):
            table.add_row(label, f"{getattr(memory, name) / GIB:.2f}")
    limit = "" if memory.limit is None else f" of {memory.limit / GIB:.2f}"
    table.add_row("total", f"{memory.total / GIB:.2f}{limit}")
    console.print(table)
    compiled = report.compiled_flops
    if costs is not None and compiled is not None:
        print_line(
            f"FLOPs: compiled {compiled:.3g}, model {report.model_flops:.3g}, "
            f"ratio {compiled / report.model_flops:.2f}; {costs.flops:.3g} per chip"
        )
        for kind, traffic in sorted(costs.collectives.items()):
            print_line(f"{kind}: {traffic.count:,} times, {traffic.bytes / GIB:.2f} GiB per chip")
        if costs.open_loops:
            print_line(f"{costs.open_loops} loops run as often as the data says; counted once each")
        for target, count in costs.opaque.items():
            print_line(f"{count:,} runs of the kernel {target} state no FLOPs; counted as none")
    print_line(verdict(report))
    if report.advice:
        print_line(f"first change: {report.advice}")
    print_line("")


def markdown(report: Report, config: PlanConfig, command: str) -> str:
    """One report as a row of a table, with `COLUMNS`."""
    memory, costs = report.memory, report.costs

    def size(value: int) -> str:
        return f"{value / GIB:.2f}"

    parts = [report.program, described(report, config), report.topology, mesh_words(report)]
    parts += [size(x) for x in (memory.parameters, memory.optimizer, memory.cache, memory.inputs)]
    parts += [size(memory.activations), size(memory.temporaries)]
    limit = "" if memory.limit is None else f" / {size(memory.limit)}"
    parts.append(size(memory.total) + limit)
    compiled = report.compiled_flops
    parts.append("-" if compiled is None else f"{compiled / report.model_flops:.2f}")
    traffic = sorted(costs.collectives.items()) if costs else []
    parts.append(", ".join(f"{kind} {size(t.bytes)}" for kind, t in traffic) or "-")
    parts += ["yes" if memory.fits else f"no: {report.advice}", f"`{command}`"]
    return "| " + " | ".join(parts) + " |"


def compilers() -> dict[str, str]:
    """Versions of what compiles."""
    found = {}
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
