"""The device mesh, and how arrays with named axes lie on it.

This is the only place that turns names into positions. Networks name the axes of their arrays
(`heads`, `mlp`, `batch` ...), one table maps the names to the axes of the mesh, and XLA inserts the
communication. The mesh always has the same four axes; an axis that is not used has size 1:

    data     copies of the model, each with its own rows
    fsdp     rows too, with parameters and optimizer state cut into pieces, gathered when needed
    tensor   heads, MLP columns and the vocabulary
    context  the tokens of one row
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from race_jax.sharding_faults import does_not_divide, wrong_product
from race_jax.types import Params

Spec = PartitionSpec
"""Where an array's dimensions go; `spec_for` makes it."""

AXES: tuple[str, ...] = ("data", "fsdp", "tensor", "context")
"""The axes of every mesh, slowest first."""

Axes = Sequence[str | None]
"""A logical name for each dimension of an array; None for one that is never cut."""

TABLE: Mapping[str, tuple[str, ...]] = {
    # Parameters. What `embed` cuts is gathered layer by layer. The devices of `context` hold
    # different tokens, and so need not hold the same parameters.
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "linear_heads": ("tensor",),
    "conv": (),
    # Activations and caches.
    "batch": ("data", "fsdp"),
    "time": ("context",),
    "tokens": ("data", "fsdp", "context"),
    "features": (),
    "rows": ("data", "fsdp"),
    "slots": ("data", "fsdp"),
    "entries": (),
}
"""Logical axis -> mesh axes, in arrays without experts."""

EXPERTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "fsdp": {"experts": ("fsdp",), "embed": ("context",)},
    "tensor": {"experts": ("tensor",), "mlp": ()},
}
"""What differs from the table in arrays with an axis of experts, by `Rules.experts`."""
# Rows of `extend` come in whatever number is at hand.
_LENIENT = frozenset({"rows"})


@dataclasses.dataclass(frozen=True)
class Rules:
    """What may be chosen about the table.

    Attributes:
        experts: `fsdp` or `tensor`, the mesh axis that divides the experts among devices.
        replicate: Logical axes that may stay whole where their size does not divide, such as
            `("kv_heads",)` for 2 key heads on `tensor` 4. Without it that is an error.

    Example:
        >>> Rules(experts="fsdp").table(("experts", "embed", "mlp"))["embed"]
        ('context',)
    """

    experts: str = "fsdp"
    replicate: tuple[str, ...] = ()

    def __post_init__(self):
        if self.experts not in EXPERTS:
            raise ValueError(f"experts is {self.experts!r}; choose one of {', '.join(EXPERTS)}.")
        object.__setattr__(self, "replicate", tuple(self.replicate))
        self.table(self.replicate)

    def table(self, axes: Axes) -> Mapping[str, tuple[str, ...]]:
        """Logical axis -> mesh axes, as it holds for an array with `axes`.

        Raises:
            ValueError: If one of them is in no table.
        """
        table = {**TABLE, **EXPERTS[self.experts]} if "experts" in axes else TABLE
        for name in axes:
            if name is not None and name not in table:
                raise ValueError(
                    f"{name!r} is no logical axis; the known ones are "
                    f"{', '.join(sorted({*TABLE, 'experts'}))}."
                )
        return table


_rules = jax.make_user_context(Rules())


def make_mesh(
    data: int = 1,
    fsdp: int | None = None,
    tensor: int = 1,
    context: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arrange devices in the four axes.

    Args:
        data: Size of that axis, at least 1; -1, for one axis only, takes what the others leave.
        fsdp: Alike; by default what the others leave.
        tensor: Alike.
        context: Alike.
        devices: All devices of all processes by default.

    Returns:
        The mesh. On TPUs neighbours of the mesh are neighbours of the torus.

    Raises:
        ValueError: If the product is not the number of devices.

    Example:
        >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 1}
    """
    devices = jax.devices() if devices is None else list(devices)
    if fsdp is None:
        fsdp = 1 if -1 in (data, tensor, context) else -1
    sizes = dict(zip(AXES, (data, fsdp, tensor, context), strict=True))
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"mesh axis {name} is {size!r}; it must be at least 1, or -1.")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh axes {' and '.join(open_axes)} are -1; only one may be.")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = max(len(devices) // fixed, 1)
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(wrong_product(sizes, open_axes, len(devices)))
    return jax.make_mesh(tuple(sizes.values()), AXES, (AxisType.Auto,) * len(AXES), devices=devices)


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Rules | None = None) -> Iterator[Mesh]:
    """Within it, networks and losses cut their activations as the table says.

    Enter it around jitted functions, in each thread; never inside one.

    Args:
        mesh: From `make_mesh`.
        rules: The default ones if None.

    Example:
        >>> with use_mesh(make_mesh(devices=jax.devices()[:1])):
        ...     ambient_mesh().shape["tensor"]
        1
    """
    with jax.set_mesh(mesh), _rules(rules or Rules()):
        yield mesh


def ambient_mesh() -> AbstractMesh | None:
    """The mesh of the surrounding `use_mesh`, or None where there is none.

    None also inside `shard_map`, where a device sees its own piece as a whole. A mesh that
    `make_mesh` did not make is a ValueError.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) >= set(AXES):
        return None
    if tuple(mesh.axis_names) != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"the mesh in use has the axes {', '.join(map(str, mesh.axis_names))}; use one that "
            "race_jax.sharding.make_mesh made."
        )
    return mesh


def ambient_rules() -> Rules:
    """The rules of the surrounding `use_mesh`, or the default ones."""
    return cast(Rules, _rules.value)


def spec_for(
    axes: Axes,
    shape: Sequence[int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules | None = None,
    *,
    name: str = "an array",
) -> PartitionSpec:
    """Where an array's dimensions go.

    Args:
        axes: A logical axis for each dimension.
        shape: The dimensions; None checks no sizes.
        mesh: Its sizes count; the one in use by default.
        rules: Those in use by default.
        name: What to call the array in an error.

    Raises:
        ValueError: If a dimension does not divide over its mesh axes, two dimensions go to one mesh
            axis, or an axis is unknown.

    Example:
        >>> print(spec_for(("vocab", "embed")))
        P('tensor', ('fsdp', 'context'))
    """
    rules = rules or ambient_rules()
    mesh = mesh or ambient_mesh()
    if shape is not None and len(shape) != len(axes):
        raise ValueError(f"{name} of shape {tuple(shape)} is said to have the axes {tuple(axes)}.")
    table = rules.table(axes)
    parts: list[tuple[str, ...]] = []
    for index, axis in enumerate(axes):
        places = () if axis is None else table[axis]
        if axis is not None and shape is not None and mesh is not None and places:
            count = math.prod(mesh.shape[place] for place in places)
            if shape[index] % count:
                if axis not in _LENIENT and axis not in rules.replicate:
                    raise ValueError(does_not_divide(name, axis, shape[index], places, mesh.shape))
                places = ()
        parts.append(places)
    for (i, one), (j, two) in itertools.combinations(enumerate(parts), 2):
        for place in set(one) & set(two):
            raise ValueError(
                f"{name} has both {axes[i]} and {axes[j]} on the mesh axis {place}; give one of "
                "them a logical axis that the table puts elsewhere."
            )
    return PartitionSpec(*((p[0] if len(p) == 1 else p) if p else None for p in parts))


def sharding_for(
    axes: Axes,
    mesh: Mesh,
    shape: Sequence[int] | None = None,
    rules: Rules | None = None,
    *,
    name: str = "an array",
) -> NamedSharding:
    """`spec_for` bound to a mesh.

    Example:
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> print(sharding_for(("batch", "time"), mesh).spec)
        P(('data', 'fsdp'), 'context')
    """
    return NamedSharding(mesh, spec_for(axes, shape, mesh, rules, name=name))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Whole on every device of a mesh."""
    return NamedSharding(mesh, PartitionSpec())


def only(spec: Spec, axis: str) -> Spec:
    """What one mesh axis cuts in a spec; what others cut is whole."""
    return PartitionSpec(*(place if place == axis else None for place in spec))


def shardings_for(axes: Params, mesh: Mesh, shapes: Params, rules: Rules | None = None) -> Params:
    """Where each parameter goes.

    Args:
        axes: From `param_axes`: a pytree with tuples of logical axes as leaves.
        mesh: From `make_mesh`.
        shapes: The parameters, or their shapes from `abstract_params`, parallel to `axes`.
        rules: Those in use by default.

    Returns:
        A pytree of `NamedSharding`, parallel to both.

    Raises:
        ValueError: As `spec_for` does, with the parameter's name.

    Example:
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> shapes = {"head": jax.ShapeDtypeStruct((8, 4), np.float32)}
        >>> print(shardings_for({"head": ("vocab", "embed")}, mesh, shapes)["head"].spec)
        P('tensor', ('fsdp', 'context'))
    """

    def one(path: tuple, leaf: Any, names: Axes) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return sharding_for(names, mesh, leaf.shape, rules, name=name)

    return jax.tree_util.tree_map_with_path(one, shapes, axes)


def place(params: Params, shardings: Params) -> Params:
    """Put arrays where `shardings`, parallel to them, says.

    Every process passes the same values, whole, and gets the same global arrays.
    """

    def one(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, params, shardings)


def state_shardings(state: Any, params: Params, shardings: Params) -> Any:
    """Where the optimizer's state goes: what mirrors a parameter lies where the parameter lies.

    A leaf mirrors a parameter if its path ends with the parameter's path and it has that shape, as
    the moments of Adam do; masked and chained transformations are found too. All else, such as
    counts and factored moments, is replicated.

    Args:
        state: The state or its shapes: `jax.eval_shape(optimizer.init, params)`.
        params: The parameters or their shapes.
        shardings: From `shardings_for`.

    Returns:
        A pytree of `NamedSharding` parallel to `state`; use it as `out_shardings` of the jitted
        `optimizer.init` and of the step.

    Example:
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> shapes = {"head": jax.ShapeDtypeStruct((8, 4), np.float32)}
        >>> placed = shardings_for({"head": ("vocab", "embed")}, mesh, shapes)
        >>> state = {"mean": shapes, "count": jax.ShapeDtypeStruct((), int)}
        >>> print(state_shardings(state, shapes, placed)["mean"]["head"].spec)
        P('tensor', ('fsdp', 'context'))
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    placed = jax.tree.leaves(shardings)
    known = {
        tuple(map(str, path)): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, placed, strict=True)
    }
    whole = replicated(placed[0].mesh)

    def one(path: tuple, leaf: Any) -> NamedSharding:
        words = tuple(map(str, path))
        for start in range(len(words) + 1):
            shape, sharding = known.get(words[start:], (None, whole))
            if shape == leaf.shape:
                return sharding
        return whole

    return jax.tree_util.tree_map_with_path(one, state)


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Cut an activation as the table says; `x` itself where no mesh is in use.

    Args:
        x: An array inside a jitted function.
        axes: A logical axis for each dimension.

    Raises:
        ValueError: As `spec_for` does.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec_for(axes, x.shape, mesh, name="activations"))
