"""The mesh and the table; what runs on several devices is in tests/eight/."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from race_jax import sharding
from race_jax.sharding import (
    AXES,
    EXPERTS,
    TABLE,
    Rules,
    ambient_mesh,
    ambient_rules,
    constrain,
    make_mesh,
    place,
    shardings_for,
    spec_for,
    state_shardings,
    use_mesh,
)

ONE = jax.devices()[:1]


def mesh(data=1, fsdp=1, tensor=1, context=1):
    return AbstractMesh((data, fsdp, tensor, context), AXES)


def test_the_examples_hold():
    assert doctest.testmod(sharding).failed == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"fsdp": 3},
            "data 1 x fsdp 3 x tensor 1 x context 1 = 3, and the number of devices is 8; set fs",
        ),
        ({"data": 2, "fsdp": 2, "tensor": 3}, "= 12, and the number of devices is 8; set tensor 2"),
        (
            {"data": 3, "fsdp": 3, "tensor": 3},
            "= 27, and the number of devices is 8; choose sizes whose",
        ),
        ({"data": 3}, "data 3 .* beside fsdp -1, and 3 does not divide the 8 .* product 2 or 4"),
        ({"tensor": 16}, "16 does not divide the 8 devices; make their product 8"),
        ({"data": -1, "tensor": -1}, "data and tensor are -1; only one may be"),
        ({"tensor": 0}, "tensor is 0; it must be at least 1, or -1"),
        ({"context": 2.0}, "context is 2.0"),
    ],
)
def test_meshes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=ONE * 8)


def test_the_four_axes_always_exist_and_one_may_be_open():
    for sizes in ({}, {"data": -1}, {"context": -1}, {"fsdp": -1, "data": 1}):
        assert dict(make_mesh(**sizes, devices=ONE).shape) == dict.fromkeys(AXES, 1)


def test_the_table_by_hand():
    assert spec_for(("layers", "embed", "kv_heads", "head_dim")) == PartitionSpec(
        None, ("fsdp", "context"), "tensor", None
    )
    assert spec_for(("batch", "time", "features")) == PartitionSpec(
        ("data", "fsdp"), "context", None
    )
    assert spec_for((None, "vocab")) == PartitionSpec(None, "tensor")
    by = {
        name: spec_for(("experts", "embed", "mlp"), rules=Rules(experts=name)) for name in EXPERTS
    }
    assert by["fsdp"] == PartitionSpec("fsdp", "context", "tensor")
    assert by["tensor"] == PartitionSpec("tensor", ("fsdp", "context"), None)


def test_every_mesh_axis_of_the_table_exists():
    for places in (*TABLE.values(), *(p for table in EXPERTS.values() for p in table.values())):
        assert set(places) <= set(AXES)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (
            ("kv_heads",),
            (3,),
            r"array: kv_heads is 3 .* tensor = 2; make tensor 1 or 3, or keep",
        ),
        (("embed",), (6,), r"embed is 6 .* fsdp x context = 4 x 1 = 4; make .* 3 or 6"),
        (("batch", "time"), (6, 4), r"data x fsdp = 1 x 4 = 4; make .* 3 or 6, or batch 4 or 8"),
        (("heads", "mlp"), (4, 4), "has both heads and mlp on the mesh axis tensor"),
        (("embed", "batch"), (4, 4), "has both embed and batch on the mesh axis fsdp"),
        (("width",), (4,), "'width' is no logical axis; the known ones are batch"),
        (("heads",), (4, 4), r"shape \(4, 4\) is said to have the axes \('heads',\)"),
    ],
)
def test_arrays_that_cannot_lie_so(axes, shape, message):
    with pytest.raises(ValueError, match=message):
        spec_for(axes, shape, mesh(fsdp=4, tensor=2))


def test_what_does_not_divide_is_whole_only_if_asked():
    eight = mesh(fsdp=2, tensor=4)
    axes, shape = ("embed", "kv_heads", "head_dim"), (8, 2, 4)
    with pytest.raises(ValueError, match="kv_heads"):
        spec_for(axes, shape, eight)
    asked = spec_for(axes, shape, eight, Rules(replicate=("kv_heads",)))
    assert asked == PartitionSpec(("fsdp", "context"), None, None)
    # Rows of `extend` come in any number.
    assert spec_for(("rows",), (3,), eight) == PartitionSpec(None)
    assert spec_for(("rows",), (4,), eight) == PartitionSpec(("data", "fsdp"))


def test_rules_that_cannot_be():
    with pytest.raises(ValueError, match="experts is 'data'; choose one of fsdp, tensor"):
        Rules(experts="data")
    with pytest.raises(ValueError, match="'kvheads' is no logical axis"):
        Rules(replicate=("kvheads",))


def test_errors_name_the_parameter():
    shapes = {"layers": {"key": jax.ShapeDtypeStruct((4, 3), np.float32)}}
    with pytest.raises(ValueError, match=r"layers\.key: kv_heads is 3"):
        shardings_for({"layers": {"key": ("embed", "kv_heads")}}, mesh(tensor=2), shapes)


def test_the_mesh_in_use():
    assert ambient_mesh() is None and ambient_rules() == Rules()
    x = jnp.ones((2, 2))
    assert constrain(x, ("batch", "time")) is x
    rules = Rules(experts="tensor")
    with use_mesh(make_mesh(devices=ONE), rules):
        found = ambient_mesh()
        assert found is not None and found.axis_names == AXES and ambient_rules() == rules
    assert ambient_mesh() is None and ambient_rules() == Rules()
    other = jax.make_mesh((1,), ("x",), devices=ONE)
    with jax.set_mesh(other), pytest.raises(ValueError, match="has the axes x; use one that"):
        ambient_mesh()


def test_rules_make_programs_of_their_own():
    traces = []

    @jax.jit
    def run(x):
        traces.append(ambient_rules().experts)
        return constrain(x, ("batch", "time"))

    for experts in ("fsdp", "tensor", "fsdp"):
        with use_mesh(make_mesh(devices=ONE), Rules(experts=experts)):
            run(np.ones((2, 2)))
    assert traces == ["fsdp", "tensor"]


def test_optimizer_state_lies_where_the_parameters_lie():
    one = make_mesh(devices=ONE)
    axes = {"a": {"w": ("embed", "mlp"), "b": ("mlp",)}, "head": ("vocab", "embed")}
    params = {"a": {"w": np.zeros((4, 6)), "b": np.zeros(6)}, "head": np.zeros((8, 4))}
    placed = shardings_for(axes, one, params)
    decayed = {"a": {"w": True, "b": False}, "head": True}
    rule = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.constant_schedule(1e-3), mask=decayed),
        optax.masked(optax.trace(0.9), decayed),
    )
    state = jax.eval_shape(rule.init, params)
    where = state_shardings(state, params, placed)
    mirrored = {(4, 6): placed["a"]["w"], (6,): placed["a"]["b"], (8, 4): placed["head"]}
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True))
    assert sum(leaf.shape in mirrored for leaf, _ in pairs) == 3 + 3 + 2
    for leaf, to in pairs:
        assert to == mirrored.get(leaf.shape, jax.sharding.NamedSharding(one, PartitionSpec()))


def test_factored_state_is_replicated():
    one = make_mesh(devices=ONE)
    params = {"w": np.zeros((256, 128))}
    placed = shardings_for({"w": ("embed", "mlp")}, one, params)
    state = jax.eval_shape(optax.scale_by_factored_rms().init, params)
    specs = {to.spec for to in jax.tree.leaves(state_shardings(state, params, placed))}
    assert specs == {PartitionSpec()}


def test_placing():
    one = make_mesh(devices=ONE)
    params = {"w": np.arange(8.0).reshape(2, 4)}
    got = place(params, shardings_for({"w": ("embed", "mlp")}, one, params))
    np.testing.assert_array_equal(got["w"], params["w"])
    assert got["w"].sharding.spec == PartitionSpec(("fsdp", "context"), "tensor")
