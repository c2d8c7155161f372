"""What a compiled program does, read from its optimised HLO text.

XLA's own cost analysis counts the body of a loop once, however often it runs, and a model's layers
are a loop. So the text is walked here instead: the costs of a loop's body count as many times as
the loop runs. All numbers are those of one device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from race_jax.train.hlo import Computation, Instruction, parse, product_flops, splash_flops

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# One operand in, the same values out.
_SAME = {"copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier", "convert"}


@dataclasses.dataclass
class Traffic:
    """What collectives of one kind do on one device.

    Attributes:
        count: How often one runs.
        bytes: Of the arrays that they exchange: the result of a gather, the operand of the others,
            times how often each runs. A ring of n devices sends (n - 1) / n of it from each, and
            twice that in an all-reduce.
    """

    count: int = 0
    bytes: int = 0


@dataclasses.dataclass
class Costs:
    """What one device does in one run of a program.

    Attributes:
        flops: Of matrix products and convolutions, two per multiplication and addition.
        collectives: By HLO's name of the kind.
        stacked: Bytes that one loop stores step by step for a later one: the activations that the
            forward pass keeps for the backward pass.
        open_loops: Loops whose length is not in the program; their bodies count once.
        opaque: Kernels that state no FLOPs, by name; they count as nothing.
    """

    flops: float = 0.0
    collectives: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    stacked: int = 0
    open_loops: int = 0
    opaque: dict[str, int] = dataclasses.field(default_factory=dict)


def read_costs(text: str) -> Costs:
    """Walk a compiled program.

    Args:
        text: `jax.jit(f).lower(...).compile().as_text()`.

    Returns:
        The costs of one run on one device.

    Raises:
        ValueError: If the text has no entry computation.
    """
    computations, entry = parse(text)
    walk = _Walk(computations)
    walk.visit(entry, 1, {})
    for kind, count, size in walk.shared.values():
        walk.count_collective(kind, count, size)
    return walk.costs


Values = Mapping[int, int | None]
"""Elements of a loop's tuple that are whole numbers known beforehand."""


class _Walk:
    """Adds up costs, from the entry down."""

    def __init__(self, computations: Mapping[str, Computation]):
        self.computations = computations
        self.costs = Costs()
        # An asynchronous collective on a TPU is repeated in the text of all that runs beside it.
        self.shared: dict[str, tuple[str, int, int]] = {}

    def visit(
        self, name: str, times: int, known: Values, *, fused: bool = False, inner: bool = False
    ) -> None:
        """Add `times` runs of a computation.

        Args:
            name: Which one.
            times: How often it runs.
            known: Elements of its parameter.
            fused: Whether it is a part of one fused instruction.
            inner: Whether it runs within the passes that stack: what loops store for one another
                there does not outlive a step of them.
        """
        computation = self.computations[name]
        passes = set() if inner or fused else self._stacks(computation)
        for item in computation.instructions.values():
            if item.opcode == "while":
                self._loop(computation, item, times, known, inner or item.name in passes)
                continue
            self.costs.flops += times * product_flops(item, computation.instructions)
            self._collective(item, computation, times, fused)
            if item.opcode == "custom-call":
                self._kernel(computation, item, times)
            within = fused or item.opcode == "fusion"
            for called in _called(item):
                self.visit(called, times, {}, fused=within, inner=inner)

    def _loop(
        self, computation: Computation, item: Instruction, times: int, known: Values, inner: bool
    ) -> None:
        body = self.computations[item.attribute(r"body=%?([\w.\-]+)") or ""]
        start = computation.instructions[item.operands[0]]
        values = {
            index: _constant(computation, operand, known)
            for index, operand in enumerate(start.operands)
        }
        kept = {i: v for i, v in values.items() if _passes(body, i)}
        trips = self._trips(item, body, values)
        if trips is None:
            self.costs.open_loops += 1
        self.visit(body.name, times * (1 if trips is None else trips), kept, inner=inner)

    def _trips(self, item: Instruction, body: Computation, values: Values) -> int | None:
        """How often a loop runs; None if that is data."""
        stated = item.attribute(r'known_trip_count[^}]*?"n":"?(\d+)')
        if stated:
            return int(stated)
        condition = self.computations[item.attribute(r"condition=%?([\w.\-]+)") or ""]
        test = condition.root
        if test.opcode != "compare" or test.attribute(r"direction=(\w+)") != "LT":
            return None
        index = _element(condition, test.operands[0])
        limit = _constant(condition, test.operands[1], values)
        start = None if index is None else values.get(index)
        step = None if index is None else _step(body, index)
        if start is None or limit is None or not step:
            return None
        return max(0, -(-(limit - start) // step))

    def _collective(self, item: Instruction, computation: Computation, times: int, fused: bool):
        kind = item.opcode.removesuffix("-start")
        if kind not in _KINDS:
            return
        known = computation.instructions
        size = sum(s.bytes for name in item.operands for s in known[name].shapes)
        if kind == "all-gather":
            whole = sum(shape.bytes for shape in item.shapes)
            size = whole - size if item.opcode.endswith("-start") else whole
        channel = item.attribute(r"channel_id=(\d+)")
        if fused and channel:
            if times > self.shared.get(channel, ("", 0, 0))[1]:
                self.shared[channel] = (kind, times, size)
            return
        self.count_collective(kind, times, size)

    def count_collective(self, kind: str, times: int, size: int) -> None:
        """Add `times` runs of one collective."""
        traffic = self.costs.collectives.setdefault(kind, Traffic())
        traffic.count += times
        traffic.bytes += times * size

    def _kernel(self, computation: Computation, item: Instruction, times: int) -> None:
        """A custom call: what it says it costs, or that it says nothing."""
        target = item.attribute(r'custom_call_target="([^"]*)"') or ""
        flops = item.attribute(r'"?cost_estimate"?:\{[^}]*?"flops":"?([\d.e+]+)')
        if flops:
            self.costs.flops += times * float(flops)
        elif target == "tpu_custom_call":
            name = re.sub(r"[.\d]+$", "", item.name)
            shapes = [s for o in item.operands for s in computation.instructions[o].shapes]
            attention = splash_flops(name, shapes)
            self.costs.flops += times * attention
            if attention:
                return
            self.costs.opaque[name] = self.costs.opaque.get(name, 0) + times

    def _stacks(self, computation: Computation) -> set[str]:
        """Add what a loop piles up, step by step, for a later loop; returns both loops' names."""
        loops = [i for i in computation.instructions.values() if i.opcode == "while"]
        seen: set[tuple[str, int]] = set()
        passes: set[str] = set()
        for loop in loops:
            body = self.computations[loop.attribute(r"body=%?([\w.\-]+)") or ""]
            start = computation.instructions[loop.operands[0]]
            for index, operand in enumerate(start.operands):
                source = _source(computation, operand)
                if source is None or source in seen or not _passes(body, index):
                    continue
                maker = computation.instructions[source[0]]
                made = self.computations[maker.attribute(r"body=%?([\w.\-]+)") or ""]
                if not _passes(made, source[1]) and len(maker.shapes[source[1]].dims) > 1:
                    seen.add(source)
                    passes |= {maker.name, loop.name}
                    self.costs.stacked += maker.shapes[source[1]].bytes
        return passes


def _called(item: Instruction) -> Iterator[str]:
    """The computations that an instruction runs once, but for those that fold elements."""
    if item.opcode in ("fusion", "async-start", "call", "custom-call"):
        name = item.attribute(r"(?:calls|to_apply)=%?([\w.\-]+)")
        if name:
            yield name
    elif item.opcode == "conditional":
        listed = item.attribute(r"branch_computations=\{([^}]*)\}")
        if listed:
            yield from re.findall(r"%?([\w.\-]+)", listed)
        else:
            yield from re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", item.attributes)


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the parameter an instruction is."""
    item = computation.instructions[name]
    while item.opcode in _SAME:
        item = computation.instructions[item.operands[0]]
    if item.opcode != "get-tuple-element":
        return None
    if computation.instructions[item.operands[0]].opcode != "parameter":
        return None
    return int(item.attribute(r"index=(\d+)") or 0)


def _passes(body: Computation, index: int) -> bool:
    """Whether a loop's body leaves that element of its tuple as it was."""
    root = body.root
    return index < len(root.operands) and _element(body, root.operands[index]) == index


def _constant(computation: Computation, name: str, known: Values) -> int | None:
    """The whole number that an instruction is, if that is known."""
    item = computation.instructions[name]
    while item.opcode in _SAME and item.operands:
        item = computation.instructions[item.operands[0]]
    if item.opcode == "constant" and re.fullmatch(r"-?\d+", item.inner):
        return int(item.inner)
    index = _element(computation, item.name)
    return None if index is None else known.get(index)


def _step(body: Computation, index: int) -> int | None:
    """What a loop's body adds to its counter: a chain of additions of constants."""
    total, item = 0, body.instructions[body.root.operands[index]]
    while item.opcode in _SAME or item.opcode == "add":
        if item.opcode == "add":
            added = _constant(body, item.operands[1], {})
            if added is None:
                return None
            total += added
        item = body.instructions[item.operands[0]]
    return total if _element(body, item.name) == index else None


def _source(computation: Computation, name: str) -> tuple[str, int] | None:
    """The loop, and the element of its result, that an instruction is."""
    item = computation.instructions[name]
    while item.opcode in _SAME:
        item = computation.instructions[item.operands[0]]
    if item.opcode != "get-tuple-element":
        return None
    maker = computation.instructions[item.operands[0]]
    return (
        (maker.name, int(item.attribute(r"index=(\d+)") or 0)) if maker.opcode == "while" else None
    )
