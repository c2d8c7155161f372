"""Calls against the tools' schemas."""

import pytest
from rollout_samples import tool

from race_jax.rollout.calls import CallChecker, checker_of
from race_jax.toolcalls import ParsedCall


def fault(parameters, **arguments):
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return CallChecker([schema]).fault(ParsedCall("call_1", "f", arguments, ""))


A = {"a": {"type": "integer"}}


def test_arguments_that_the_schema_names_fit():
    assert fault({"properties": A}, a=1) is None
    assert fault({"properties": A}) is None
    assert fault({}, anything=1) is None


def test_what_does_not_fit_is_said_with_its_place():
    nested = {"properties": {"list": {"type": "array", "items": {"type": "string"}}}}
    assert fault(nested, list=["x", 2]) == (
        "wrong arguments for 'f': at ['list'][1]: 2 is not of type 'string'"
    )
    assert "'a' is a required property" in fault({"properties": A, "required": ["a"]})
    assert "is not one of" in fault({"properties": {"a": {"enum": ["x"]}}}, a="y")
    long = fault({"properties": A}, a="x" * 10_000)
    assert len(long) < 400 and long.endswith("is not of type 'integer'")


def test_arguments_that_the_schema_does_not_name_are_refused_unless_it_lets_them():
    assert "'b' was unexpected" in fault({"properties": A}, b=1)
    assert fault({"properties": A, "additionalProperties": True}, b=1) is None
    either = {"properties": A, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]}
    assert fault(either, b=1) is None
    assert fault({"properties": A, "patternProperties": {"^b": {}}}, b=1) is None


def test_references_stay_within_the_schema():
    inner = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert fault(inner, a=1) is None
    assert "not of type 'integer'" in fault(inner, a="x")
    deep = {"$defs": inner["$defs"], "properties": {"a": {"type": "array", "items": N}}}
    assert "at ['a'][1]: 'x' is not of type 'integer'" in fault(deep, a=[1, "x"])
    top = {"$defs": {"args": inner | {"$defs": {}}, "n": {"type": "integer"}}}
    assert "not of type 'integer'" in fault({**top, "$ref": "#/$defs/args"}, a="x")
    own = {"$id": "http://x/f.json", "$defs": inner["$defs"]}
    own["properties"] = {"a": {"$ref": "f.json#/$defs/n"}}
    assert "not of type 'integer'" in fault(own, a="x")


N = {"$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}, "http://127.0.0.1:9/s"),
        ({"properties": {"a": {"anyOf": [N, {"type": "null"}]}}}, "#/.defs/n"),
        ({"$defs": {"n": {"$ref": "#/gone"}}, "properties": {"a": N}}, "#/gone"),
        ({"properties": {"a": {"type": "array", "items": {"$dynamicRef": "#n"}}}}, "#n"),
    ],
)
def test_a_reference_to_elsewhere_is_refused_at_the_opening(schema, pointer):
    with pytest.raises(ValueError, match=rf"tool 'f': its parameters refer to '{pointer}"):
        fault(schema)


def test_references_that_come_to_themselves_are_refused_and_recursion_is_not():
    around = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    for schema in ({"$ref": "#"}, {"$defs": around, "properties": {"x": {"$ref": "#/$defs/a"}}}):
        with pytest.raises(ValueError, match="comes to itself"):
            fault(schema, a=1)
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": N}}}
    schema = {"$defs": {"n": tree}, "properties": {"a": N}}
    assert fault(schema, a={"kids": [{"kids": []}]}) is None
    assert "['kids'][0]['kids']: 3 is not" in fault(schema, a={"kids": [{"kids": 3}]})


def test_what_only_looks_like_a_reference_is_none():
    assert fault({"properties": {"$ref": {"type": "integer"}}}, **{"$ref": 1}) is None
    assert fault({"properties": {"a": {"const": {"$ref": "x"}}}}, a={"$ref": "x"}) is None


def test_a_schema_without_end_refuses_the_call():
    endless = {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}
    assert "have no end" in fault(endless, a=1)


def test_parameters_that_are_no_object_are_refused():
    for kind in ("string", ["string", "null"]):
        with pytest.raises(ValueError, match=r"'f': its parameters are of the type .*string"):
            fault({"type": kind})
    assert fault({"type": ["object", "null"]}, a=1) is None


def test_checkers_of_equal_tools_are_kept():
    assert checker_of([tool("f", "a")]) is checker_of([tool("f", "a")])
    assert checker_of([tool("f", "a")]) is not checker_of([tool("f", "b")])
    for tools in (["f"], [tool("f"), tool("f")], [tool("f", type=3)]):
        for _ in range(2):
            with pytest.raises(ValueError, match="tool"):
                checker_of(tools)
