"""What to say of sizes that do not fit a mesh: what is wrong, and the nearest that work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def wrong_product(sizes: dict[str, int], open_axes: list[str], count: int) -> str:
    """What to say of a mesh that does not use all devices."""
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if name not in open_axes)
    product = math.prod(size for name, size in sizes.items() if name not in open_axes)
    if open_axes:
        steps = [d for d in range(1, count + 1) if count % d == 0]
        near = [d for d in steps if d < product][-1:] + [d for d in steps if d > product][:1]
        remedy = f"make their product {' or '.join(map(str, near))}"
        return (
            f"the mesh has {shown} = {product} beside {open_axes[0]} -1, and {product} does not "
            f"divide the {count} devices; {remedy}."
        )
    rests = {name: product // size for name, size in sizes.items()}
    fits = [f"{name} {count // rest}" for name, rest in rests.items() if count % rest == 0]
    remedy = f"set {' or '.join(fits)}" if fits else f"choose sizes whose product is {count}"
    return f"the mesh is {shown} = {product}, and the number of devices is {count}; {remedy}."


def does_not_divide(
    name: str, axis: str, size: int, places: Sequence[str], sizes: Mapping[str, int]
) -> str:
    """What to say of a dimension that does not divide, with the nearest settings that do."""
    count = math.prod(sizes[place] for place in places)
    where = " x ".join(places)
    given = " x ".join(str(sizes[place]) for place in places)
    sums = f"{given} = {count}" if len(places) > 1 else given
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below, above = [d for d in divisors if d < count], [d for d in divisors if d > count]
    near = below[-1:] + above[:1]
    remedy = f"make {where} {' or '.join(map(str, near))}"
    if axis in ("batch", "time", "slots"):
        low, high = size // count * count, -(-size // count) * count
        remedy += f", or {axis} {' or '.join(str(x) for x in dict.fromkeys((low, high)) if x)}"
    else:
        remedy += f', or keep it whole on every device with Rules(replicate=("{axis}",))'
    return f"{name}: {axis} is {size} and does not divide over {where} = {sums}; {remedy}."
