"""Optimised HLO text as computations of instructions, and the FLOPs of one instruction."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
"""Products of each kernel: scores and mix; scores, weights' gradient, values', keys'; and so on."""
_SPLASH_BLOCK = 512
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's dtype, by HLO's name, and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of a device's layout."""
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS[self.dtype] if self.dtype in _BITS else int(digits[0]) if digits else 0
        return self.size * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `%name = shapes opcode(operands), attributes`. `inner` is what stands in `()`."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    inner: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def attribute(self, pattern: str) -> str | None:
        """The first group of `pattern` in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next(i for i in self.instructions.values() if i.root)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of the entry.

    Raises:
        ValueError: If there is no entry.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if name and re.match(r"\}($|, execution_thread)", line):
            found = filter(None, map(_read_line, lines))
            computations[name] = Computation(name, {item.name: item for item in found})
            name = ""
        elif name and line.startswith("  "):
            lines.append(line.strip())
        elif name and lines:
            lines[-1] += line  # kernels write attributes over several lines
        elif line.endswith("{") and "->" in line:
            head = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            assert head
            name, lines = head[2], []
            entry = name if head[1] else entry
    if not entry:
        raise ValueError("the text is no HLO module: it has no ENTRY computation.")
    return computations, entry


def _read_line(line: str) -> Instruction | None:
    root = line.startswith("ROOT ")
    name, sign, rest = line.removeprefix("ROOT ").partition(" = ")
    if not sign:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind = rest[:end]
    found = re.match(r"\s*([\w\-]+)\(", rest[end:])
    if found is None:
        return None
    start = end + found.end() - 1
    stop = _closing(rest, start)
    inner = rest[start + 1 : stop]
    shapes = tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", kind)
    )
    operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    label = name.removeprefix("%")
    return Instruction(label, shapes, found[1], inner, operands, rest[stop + 1 :], root)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    raise ValueError(f"an HLO line has a bracket that does not close: {text[:80]}")


def product_flops(item: Instruction, known: Mapping[str, Instruction]) -> float:
    """FLOPs of a matrix product or convolution; 0 for anything else."""
    if item.opcode not in ("dot", "convolution", "ragged-dot"):
        return 0
    left, right = (known[name].shapes[0] for name in item.operands[:2])
    if item.opcode == "dot":
        dims = item.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        inner = math.prod(left.dims[int(d)] for d in dims.split(",") if d)
        return 2.0 * item.shapes[0].size * inner
    if item.opcode == "ragged-dot":
        # Every row meets one matrix.
        return 2.0 * left.size * right.dims[-1]
    return _convolution_flops(item, left, right)


def _convolution_flops(item: Instruction, left: Shape, right: Shape) -> float:
    """Products of true entries: TPUs write batched products as convolutions with many holes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", item.attributes)
    assert labels
    count = 2.0
    for axis, letter in enumerate(labels[3]):
        if letter in "bf":
            count *= item.shapes[0].dims[axis]
    count *= right.dims[labels[2].index("i")]
    spatial = sorted(letter for letter in labels[3] if letter.isdigit())
    for place, letter in enumerate(spatial):
        sizes = (
            left.dims[labels[1].index(letter)],
            right.dims[labels[2].index(letter)],
            item.shapes[0].dims[labels[3].index(letter)],
        )
        count *= _pairs(item, place, *sizes)
    return count


def _pairs(item: Instruction, place: int, left: int, right: int, out: int) -> int:
    """How many pairs of output and kernel positions meet a true entry, along one dimension."""

    def window(key: str, default: str) -> str:
        values = item.attribute(rf"window=\{{[^}}]*?\b{key}=([\w\-]+)")
        return values.split("x")[place] if values else default

    stride, spread = int(window("stride", "1")), int(window("rhs_dilate", "1"))
    holes, low = int(window("lhs_dilate", "1")), int(window("pad", "0_0").split("_")[0])
    total = 0
    for tap in range(right):
        # Output o meets entry (o * stride + tap * spread - low) / holes of the input.
        shift = tap * spread - low
        if holes == 1:
            first = max(0, -(shift // stride))
            last = min(out - 1, (left - 1 - shift) // stride)
            total += max(0, last - first + 1)
        else:
            spots = (o * stride + shift for o in range(out))
            total += sum(s >= 0 and s % holes == 0 and s // holes < left for s in spots)
    return total


def splash_flops(name: str, operands: Sequence[Shape]) -> float:
    """FLOPs of JAX's splash attention on TPUs, which does not state them; 0 for other kernels.

    Args:
        name: Of the kernel.
        operands: Of the call. The first of rank 3 or more in a float type are the queries,
            [..., N, T, H].

    Returns:
        Of the causal half, in which a block on the diagonal counts whole.
    """
    products = [count for part, count in _SPLASH.items() if name.startswith(part)]
    wide = [s for s in operands if len(s.dims) > 2 and s.dtype in ("bf16", "f32")]
    if not products or not wide:
        return 0
    *lead, length, width = wide[0].dims
    pairs = length * (length + min(_SPLASH_BLOCK, length)) / 2
    return 2.0 * products[0] * math.prod(lead) * pairs * width
