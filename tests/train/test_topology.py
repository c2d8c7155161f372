import importlib.util
import math

import pytest

from race_jax.train.topology import FAMILIES, describe, slices


def test_a_slice_stands_for_itself_and_a_family_for_all_of_its_slices():
    assert slices("v5p:4x4x4") == ["v5p:4x4x4"]
    found = slices("v6e")
    assert found[:3] == ["v6e:1x1", "v6e:2x2", "v6e:2x4"]
    for name in FAMILIES:
        chips = [math.prod(map(int, shape.split("x"))) for shape in FAMILIES[name].shapes]
        assert chips == sorted(chips)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v9:2x2", "no such family; the known ones are v5e, v5p, v6e, and a topology is a family"),
        ("4x4", "no such family"),
        ("v5e:3x3", "v5e has no slice 3x3; it has 1x1, 2x2, 2x4, 4x4"),
        ("v5p:4x4", "v5p has no slice 4x4; it has 2x2x1, 2x2x2"),
        ("v5p:", "v5p has no slice without a shape"),
        ("cpu:0", "the number of devices, cpu:8"),
        ("cpu", "the number of devices, cpu:8"),
    ],
)
def test_what_does_not_exist(name, words):
    with pytest.raises(ValueError, match=words):
        slices(name)


def test_more_cpu_devices_than_there_are():
    with pytest.raises(ValueError, match="xla_force_host_platform_device_count=4096"):
        describe("cpu:4096")


def test_without_the_compiler(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name)
    )
    with pytest.raises(ValueError, match=r"jax\[tpu\] is not installed.*No TPU is needed"):
        describe("v5e:4x4")
