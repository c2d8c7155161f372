"""Tool schemas and tool calls: checked, rendered and parsed, in the JSON and the XML form."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from race_jax.tokenizer import CALL, END_CALL, check_text, spell

CallForm = Literal["json", "xml"]
Tools = Sequence[Mapping[str, Any]]

_NAME = re.compile(r"[^\s<>=\"\\]+")
_XML_NAME = re.compile(r"[^\s<>=]+")
_FUNCTION = re.compile(r"<function=([^\s<>=]+)>\n?(.*)\Z", re.DOTALL)
# A parameter ends at the closing tag that another parameter, or nothing, follows: a value may
# quote the tag.
_PARAMETER = re.compile(r"<parameter=(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_PARAMETER_BODY = re.compile(r"([^\s<>=]+)>\n?(.*)\Z", re.DOTALL)
_MOST_REFERENCES = 16
_PYTHON_WORDS = {"True": True, "true": True, "False": False, "false": False}


@dataclasses.dataclass(frozen=True)
class ParsedCall:
    """One tool call that a policy wrote.

    Attributes:
        id: The call's name for its reply.
        name: Tool name; empty when it could not be read.
        arguments: Arguments by name, typed by the tool's schema.
        raw: The call as written, tags included.
        error: Why it is not a call that can be executed; None if it is.
        notes: What was wrong in it and could be passed over, such as a parameter left out.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str
    error: str | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def check_tools(tools: Tools) -> None:
    """Raise ValueError unless `tools` are function schemas with distinct names."""
    names: set[str] = set()
    for n, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(
                f'tool {n} is not of the form {{"type": "function", "function": {{...}}}}'
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"tool {n} has the name {name!r}; {_NAME_RULE}")
        if name in names:
            raise ValueError(f"two tools have the name {name!r}; names must differ")
        names.add(name)
        parameters = function.get("parameters", {})
        if not isinstance(parameters, Mapping):
            raise ValueError(
                f"tool {name!r}: `parameters` must be a JSON Schema object, "
                f"not {type(parameters).__name__}"
            )
        kinds = parameters.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(
                f"tool {name!r}: its parameters are of the type {kinds!r}; it must be 'object', "
                "for calls have named arguments"
            )
        if not isinstance(parameters.get("properties", {}), Mapping):
            raise ValueError(f"tool {name!r}: `properties` must be an object")
        dump(tool, f"tool {name!r}")


_NAME_RULE = 'a name is text without spaces, quotes, backslashes and "<", ">", "="'


def dump(value: Any, what: str) -> str:
    """JSON as the chat templates write it; ValueError naming `what` if it is none."""
    try:
        return check_text(json.dumps(value, ensure_ascii=False, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def read_call(call: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of an entry of `tool_calls`.

    Args:
        call: `{"function": {"name", "arguments"}}` or `{"name", "arguments"}`, the arguments a
            mapping or its JSON text.

    Raises:
        ValueError: It is neither.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"a tool call must be an object with a `function`, not {call!r:.80}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a tool call has the name {name!r}; {_NAME_RULE}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the arguments of the call to {name!r} are not valid JSON: {error}"
            ) from error
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"the arguments of the call to {name!r} must be an object (or its JSON text), "
            f"not {type(arguments).__name__}"
        )
    if not all(isinstance(key, str) for key in arguments):
        raise ValueError(f"the call to {name!r} has an argument whose name is not text")
    return name, dict(arguments)


def render_call(name: str, arguments: Mapping[str, Any], form: CallForm) -> str:
    """The marked string of one call, tags included.

    Raises:
        ValueError: The arguments cannot be written in this form.
    """
    what = f"the call to {name!r}"
    check_text(name)
    if form == "json":
        body = f'{{"name": "{name}", "arguments": {dump(arguments, what)}}}'
        return f"{CALL}\n{body}\n{END_CALL}"
    lines = [f"<function={name}>\n"]
    for key, value in arguments.items():
        if not _XML_NAME.fullmatch(key):
            raise ValueError(f"{what} has the argument name {key!r}; {_NAME_RULE}")
        # As the family's template: containers as JSON, everything else as Python prints it.
        nested = isinstance(value, Mapping | list | tuple)
        text = dump(value, what) if nested else check_text(str(value))
        lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return f"{CALL}\n{''.join(lines)}</function>\n{END_CALL}"


def parse_call(body: str, form: CallForm, tools: Tools = (), call_id: str = "call_1") -> ParsedCall:
    """Read what stands between the tags of a call; what cannot be read is an `error` in the result.

    Args:
        body: Marked string between `<tool_call>` and `</tool_call>`.
        form: The family's form; the other form is an error, never an empty success.
        tools: Tool schemas; the XML form takes the types of its arguments from them.
        call_id: The call's id.
    """
    text = spell(body).strip()
    raw = spell(f"{CALL}{body}{END_CALL}")
    try:
        if form == "json":
            name, arguments, notes = *_parse_json(text), ()
        else:
            name, arguments, notes = _parse_xml(text, tools)
    except (ValueError, RecursionError) as error:
        return ParsedCall(call_id, "", {}, raw, f"malformed tool call: {error}")
    return ParsedCall(call_id, name, arguments, raw, None, notes)


def _parse_json(text: str) -> tuple[str, dict[str, Any]]:
    if text.startswith("<function"):
        raise ValueError("it is in the XML form; this model's calls are JSON objects")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    if not isinstance(value, dict) or "name" not in value:
        raise ValueError('it is not an object {"name": ..., "arguments": {...}}')
    return read_call({"name": value["name"], "arguments": value.get("arguments")})


def _parse_xml(text: str, tools: Tools) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    if text.startswith("{"):
        raise ValueError("it is in the JSON form; this model's calls are <function=...> blocks")
    if not text.endswith("</function>"):
        raise ValueError("it does not end in </function>")
    header = _FUNCTION.match(text.removesuffix("</function>"))
    if header is None:
        raise ValueError("it does not begin with <function=NAME>")
    name, body = header.groups()
    schemas, root = _schemas(name, tools)
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    rest = body
    for found in _PARAMETER.finditer(body):
        rest = rest.replace(found[0], "", 1)
        # A tag at the start of a line begins a parameter: one before it was never closed.
        *unclosed, last = found[1].split("\n<parameter=")
        parameter = _PARAMETER_BODY.match(last)
        bad = unclosed if parameter else [*unclosed, last]
        notes += [f"a parameter was left out, it cannot be read: {text!r:.80}" for text in bad]
        if parameter is None:
            continue
        key, value = parameter.groups()
        value = value.removesuffix("\n")
        try:
            arguments[key] = convert(value, schemas.get(key, {}), root)
        except (ValueError, RecursionError):
            arguments[key] = value
            notes.append(f"the value of {key!r} is not of the type that the tool asks for")
    if rest.strip():
        notes.append(f"text outside the parameters was passed over: {rest.strip()!r:.80}")
    return name, arguments, tuple(notes)


def _schemas(name: str, tools: Tools) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The schemas of a tool's arguments, and the schema that they stand in."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            root = function.get("parameters") or {}
            named = _resolved(root, root).get("properties", {})
            return {**named, **root.get("properties", {})}, root
    return {}, {}


def convert(text: str, schema: Any, root: Any = None) -> Any:
    """Give the text of an XML parameter the type that its schema asks for.

    Args:
        text: The value as written.
        schema: JSON Schema of the parameter. Without a type the text stays as it is.
        root: The schema that it stands in, which its references are about.

    Returns:
        The typed value. Of several types the first that fits, text last.

    Raises:
        ValueError: The text is of none of the types.
    """
    kinds = _types(schema, root)
    for kind in kinds:
        if kind == "string":
            continue
        try:
            return _as_type(text.strip(), kind)
        except (ValueError, RecursionError):
            continue
    if not kinds or "string" in kinds:
        return text
    raise ValueError(f"{text!r:.80} is not of type {' or '.join(kinds)}")


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """What a schema's references within `root`, such as `#/$defs/Item`, come to in the end."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        pointer = schema.get("$ref")
        if not isinstance(pointer, str) or not isinstance(root, Mapping):
            return schema
        resolver = Registry().resolver_with_root(DRAFT202012.create_resource(root))
        try:
            schema = resolver.lookup(pointer).contents
        except Unresolvable:
            return {}
    return {}


def _types(schema: Any, root: Any, depth: int = 0) -> list[str]:
    schema = _resolved(schema, root)
    kind = schema.get("type")
    if kind is not None:
        return [kind] if isinstance(kind, str) else list(kind)
    if depth == _MOST_REFERENCES:
        return []
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    found = [name for part in parts for name in _types(part, root, depth + 1)]
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return list(dict.fromkeys(found + [_type_of(value) for value in values]))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before int: a bool is one
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _as_type(text: str, kind: str) -> Any:
    if kind == "integer":
        return int(text)
    if kind == "number":
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if kind == "boolean":
        if text in _PYTHON_WORDS:
            return _PYTHON_WORDS[text]
    elif kind == "null":
        if text in ("None", "null"):
            return None
    elif kind in ("array", "object"):
        value = json.loads(text)
        if isinstance(value, list if kind == "array" else dict):
            return value
    raise ValueError(f"{text!r:.80} is not of type {kind}")
