import random

import pytest

from race_jax.tokenizer import CALL, END_CALL, mark_tags, spell
from race_jax.toolcalls import check_tools, convert, parse_call, read_call, render_call


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


F = tool(
    "f",
    s={"type": "string"},
    x={"type": "integer"},
    r={"type": "number"},
    b={"type": "boolean"},
    n={"type": "null"},
    l={"type": "array"},
    o={"type": "object"},
    m={"anyOf": [{"type": "string"}, {"type": "null"}]},
)


def body_of(call):
    return call.removeprefix(CALL).removesuffix(END_CALL)


def test_json_form_as_written_out():
    call = render_call("f", {"b": True, "n": None, "l": [1, 2], "s": "é 1"}, "json")
    args = '{"b": true, "n": null, "l": [1, 2], "s": "é 1"}'
    expected = f'<tool_call>\n{{"name": "f", "arguments": {args}}}\n</tool_call>'
    assert spell(call) == expected


def test_xml_form_as_written_out():
    # Scalars as Python prints them, containers as JSON.
    call = render_call("f", {"b": True, "n": None, "l": [1, "é"], "s": "two\nlines"}, "xml")
    assert spell(call) == (
        "<tool_call>\n<function=f>\n<parameter=b>\nTrue\n</parameter>\n<parameter=n>\nNone\n"
        '</parameter>\n<parameter=l>\n[1, "é"]\n</parameter>\n<parameter=s>\ntwo\nlines\n'
        "</parameter>\n</function>\n</tool_call>"
    )
    assert (
        spell(render_call("f", {}, "xml")) == "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize("form", ["json", "xml"])
def test_types_survive_the_round_trip(form):
    cases = [
        {"b": True, "n": None, "l": [1, 2], "x": 1, "s": "1"},
        {"b": False, "r": 1.5, "o": {"k": [None, True, {"a": "b"}]}, "x": -3},
        {"r": 2, "m": None, "s": "True"},
        {"m": "text", "s": ""},
        {"s": "\n", "l": []},
        {"s": "  spaces \n\n and newlines\n"},
        {"s": "quotes </parameter> and </tool_call> and <|im_end|> and <parameter=x>"},
        {"s": '{"name": "f"}', "o": {}},
        {},
    ]
    for args in cases:
        parsed = parse_call(body_of(render_call("f", args, form)), form, [F])
        assert (parsed.name, parsed.arguments, parsed.error, parsed.notes) == ("f", args, None, ())
        assert [type(v) for v in parsed.arguments.values()] == [type(v) for v in args.values()]


@pytest.mark.parametrize("form", ["json", "xml"])
def test_random_strings_survive_the_round_trip(form):
    rng = random.Random(1)
    pieces = ["a", " ", "\n", "<", ">", "</think>", "é🙂", '"', "\\", "{", "</function>", "=", "\t"]
    for _ in range(300):
        args = {"s": "".join(rng.choices(pieces, k=rng.randrange(12)))}
        parsed = parse_call(body_of(render_call("f", args, form)), form, [F])
        assert (parsed.arguments, parsed.error) == (args, None)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"),
        ("1", {"type": "integer"}, 1),
        ("1", {"type": "number"}, 1),
        ("1.0", {"type": "number"}, 1.0),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("None", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("nil", {"type": ["string", "null"]}, "nil"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("true", {"const": True}, True),
        ("[1]", {"type": "array"}, [1]),
        (' {"a": 1} ', {"type": "object"}, {"a": 1}),
        ("[1]", {}, "[1]"),
        ("[1]", True, "[1]"),
    ],
)
def test_convert(text, schema, value):
    converted = convert(text, schema)
    assert converted == value and type(converted) is type(value)


def test_types_are_found_behind_references():
    root = {
        "$defs": {
            "n": {"type": "integer"},
            "either": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            "a/b": {"allOf": [{"$ref": "#/$defs/either"}]},
            "round": {"$ref": "#/$defs/round"},
            "within": {"anyOf": [{"$ref": "#/$defs/within"}]},
        }
    }
    for name in ("n", "either", "a~1b"):
        assert convert("7", {"$ref": f"#/$defs/{name}"}, root) == 7
    assert convert("null", {"$ref": "#/$defs/a~1b"}, root) is None
    for name in ("round", "within", "gone"):
        assert convert("7", {"$ref": f"#/$defs/{name}"}, root) == "7"
    args = {"properties": {"x": {"$ref": "#/$defs/n"}}}
    for parameters in (
        {**root, **args},
        {"$ref": "#/$defs/args", "$defs": {**root["$defs"], "args": args}},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        text = "<function=f>\n<parameter=x>\n7\n</parameter>\n</function>"
        assert parse_call(text, "xml", [tool]).arguments == {"x": 7}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("one", "integer"),
        ("1.5", "integer"),
        ("yes", "boolean"),
        ("1", "boolean"),
        ("", "null"),
        ("{}", "array"),
        ("[" * 100_000, "array"),
        ("9" * 5000, "integer"),
    ],
)
def test_convert_refuses_what_is_not_of_the_type(text, kind):
    with pytest.raises(ValueError, match=f"not of type {kind}"):
        convert(text, {"type": kind})


def test_a_value_of_another_type_stays_text_with_a_note():
    parsed = parse_call("<function=f>\n<parameter=x>\nmany\n</parameter>\n</function>", "xml", [F])
    assert (parsed.error, parsed.arguments) == (None, {"x": "many"})
    assert "'x' is not of the type" in parsed.notes[0]


def test_without_a_schema_xml_values_are_text():
    text = "<function=g>\n<parameter=x>\n1\n</parameter>\n</function>"
    assert parse_call(text, "xml", [F]).arguments == {"x": "1"}
    assert parse_call(text, "xml").arguments == {"x": "1"}


MALFORMED_JSON = [
    '{"name":"f","arguments":{"x":1}',
    '{"name":"f" "arguments":{}}',
    '["f", {}]',
    '{"arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "[1]"}',
    '{"name": "a b", "arguments": {}}',
    "f(x=1)",
    "",
    "[" * 100_000,
    "{'name': 'f', 'arguments': {}}",
]


@pytest.mark.parametrize("body", MALFORMED_JSON, ids=lambda body: body[:20] or "empty")
def test_malformed_json_is_an_error_and_stays_raw(body):
    parsed = parse_call(f"\n{body}\n", "json", [F], "call_7")
    assert parsed.error is not None and parsed.error.startswith("malformed tool call: ")
    assert (parsed.id, parsed.name, parsed.arguments) == ("call_7", "", {})
    assert parsed.raw == f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    "body",
    [
        "<function=f\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=>\n</function>",
        "<function=a b>\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>",
        "function=f",
        "",
    ],
)
def test_a_bad_xml_header_is_no_call(body):
    parsed = parse_call(f"\n{body}\n", "xml", [F])
    assert parsed.error is not None and parsed.name == ""
    assert body in parsed.raw


@pytest.mark.parametrize(
    "bad",
    [
        "<parameter=\nv\n</parameter>",
        "<parameter=a: [1]</parameter>",
        "<parameter=>1</parameter>",
        "<parameter=a b>\n1\n</parameter>",
        "<parameter=a\n1\n</parameter>",
    ],
)
def test_a_bad_parameter_is_skipped_and_the_good_ones_are_kept(bad):
    first, last = "<parameter=x>1</parameter>", "<parameter=s>\nend\n</parameter>"
    text = f"<function=f>\n{first}\n{bad}\n{last}\n</function>"
    parsed = parse_call(text, "xml", [F])
    assert (parsed.error, parsed.arguments) == (None, {"x": 1, "s": "end"})
    assert len(parsed.notes) == 1 and "left out" in parsed.notes[0]
    alone = parse_call(f"<function=f>\n{bad}\n</function>", "xml", [F])
    assert (alone.error, alone.arguments) == (None, {})


def test_an_unclosed_parameter_never_swallows_the_next():
    text = "<function=f>\n<parameter=s>\na\n<parameter=x>\n1\n</parameter>\n</function>"
    parsed = parse_call(text, "xml", [F])
    assert (parsed.arguments, len(parsed.notes)) == ({"x": 1}, 1)
    text = "<function=f>\n<parameter=s>\na\n</function>"
    parsed = parse_call(text, "xml", [F])
    assert (parsed.arguments, len(parsed.notes)) == ({}, 1)


def test_the_other_familys_form_is_an_error_with_the_text_kept():
    args = {"x": 1}
    for form, other in (("json", "xml"), ("xml", "json")):
        call = render_call("f", args, other)
        parsed = parse_call(body_of(call), form, [F])
        assert parsed.error is not None and f"in the {other.upper()} form" in parsed.error
        assert parsed.raw == spell(call)


def test_compact_calls_are_read():
    assert parse_call('{"name":"f","arguments":{}}', "json").arguments == {}
    assert parse_call('{"name":"f"}', "json").error is None
    compact = "<function=f><parameter=x>1</parameter></function>"
    assert parse_call(compact, "xml", [F]).arguments == {"x": 1}


def test_read_call_takes_mappings_and_json_text():
    expected = ("f", {"x": 1})
    assert read_call({"function": {"name": "f", "arguments": {"x": 1}}}) == expected
    assert read_call({"name": "f", "arguments": '{"x": 1}'}) == expected
    assert read_call({"name": "f", "arguments": ""}) == ("f", {})
    assert read_call({"name": "f"}) == ("f", {})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("f", "must be an object"),
        ({"function": "f"}, "must be an object"),
        ({"name": ""}, "has the name ''"),
        ({"name": "a>b"}, "has the name 'a>b'"),
        ({"name": "f", "arguments": "{x: 1}"}, "call to 'f' are not valid JSON"),
        ({"name": "f", "arguments": "[1]"}, "must be an object .* not list"),
        ({"name": "f", "arguments": [1]}, "must be an object .* not list"),
        ({"name": "f", "arguments": {1: 2}}, "name is not text"),
    ],
)
def test_read_call_errors(call, message):
    with pytest.raises(ValueError, match=message):
        read_call(call)


def test_render_errors():
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        render_call("f", {"x": {1, 2}}, "json")
    with pytest.raises(ValueError, match="argument name 'a b'"):
        render_call("f", {"a b": 1}, "xml")
    for form in ("json", "xml"):
        with pytest.raises(ValueError, match="lone surrogate"):
            render_call("f", {"x": "\ud800"}, form)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([F, F], "two tools have the name 'f'"),
        (["f"], "tool 1 is not of the form"),
        ([{"name": "f"}], "tool 1 is not of the form"),
        ([{"function": {"name": "f", "parameters": "x"}}], "tool 'f': `parameters` must be"),
        ([{"function": {"name": "f", "parameters": {"properties": []}}}], "`properties` must be"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "the type 'array'"),
        ([{"function": {"name": "f", "parameters": {"type": ["null"]}}}], "the type ..null"),
        ([{"function": {"name": None}}], "has the name None"),
        ([{"function": {"name": "f", "x": {1}}}], "cannot be written as JSON"),
        ([{"function": {"name": "f", "description": "\udfff"}}], "lone surrogate"),
    ],
)
def test_check_tools_errors(tools, message):
    check_tools([F, tool("g")])
    with pytest.raises(ValueError, match=message):
        check_tools(tools)


def test_a_quoted_tag_in_an_argument_is_text():
    text = "</tool_call>\n<tool_call>"
    call = render_call("f", {"s": text}, "json")
    assert (call.count(CALL), call.count(END_CALL)) == (1, 1)
    assert mark_tags(spell(call)).count(CALL) == 2
