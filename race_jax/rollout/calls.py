"""Whether a call that a policy wrote can be carried out, by the tools' schemas."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from race_jax.jsonl import dumps
from race_jax.rollout.limits import bound_text
from race_jax.toolcalls import ParsedCall, Tools, check_tools
from race_jax.trajectory_messages import short
from race_jax.turns import ParsedTurn

_NAMING = {"patternProperties", "allOf", "anyOf", "oneOf", "if", "$ref"}
"""Keywords that may name further properties."""


class CallChecker:
    """Checks calls against the schemas of an episode's tools.

    Args:
        tools: The schemas.

    Raises:
        ValueError: They are no function schemas with distinct names and valid parameters, or refer
            to what does not stand in the schema itself.
    """

    def __init__(self, tools: Tools):
        check_tools(tools)
        self._validators: dict[str, Draft202012Validator] = {}
        for tool in tools:
            function = tool["function"]
            schema = _closed(function.get("parameters") or {})
            try:
                Draft202012Validator.check_schema(schema)
            except SchemaError as error:
                raise ValueError(
                    f"tool {function['name']!r}: its parameters are no JSON Schema: {error.message}"
                ) from None
            _check_references(schema, function["name"])
            # With a registry of its own, a reference to elsewhere is never fetched.
            validator = Draft202012Validator(schema, registry=Registry())
            self._validators[function["name"]] = validator

    def fault(self, call: ParsedCall) -> str | None:
        """What keeps a call from being carried out, in words for the policy; None if nothing."""
        if call.error is not None:
            return call.error
        validator = self._validators.get(call.name)
        if validator is None:
            known = ", ".join(self._validators) or "none"
            return f"there is no tool {short(call.name)}; the tools are: {known}"
        try:
            error = best_match(validator.iter_errors(dict(call.arguments)))
        except RecursionError:
            return f"the schema of {call.name!r}, or the call's arguments, have no end"
        if error is None:
            return None
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        place = f"at {where}: " if where else ""
        return f"wrong arguments for {call.name!r}: {place}{bound_text(error.message, 300)}"


def _check_references(schema: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless all references of a tool's parameters lead somewhere within them."""
    root = DRAFT202012.create_resource(schema)
    waiting = [(root, Registry().resolver_with_root(root))]
    while waiting:
        at, resolver = waiting.pop()
        waiting += [(part, resolver.in_subresource(part)) for part in at.subresources()]
        passed: list[Any] = []
        resource = at.contents
        while pointer := _reference(resource):
            if resource in passed:
                raise ValueError(f"tool {name!r}: the reference {short(pointer)} comes to itself")
            passed.append(resource)
            try:
                found = resolver.lookup(pointer)
            except Unresolvable:
                raise ValueError(
                    f"tool {name!r}: its parameters refer to {short(pointer)}, which does not "
                    "stand in them; references must be like '#/$defs/Item', and none is fetched"
                ) from None
            resource, resolver = found.contents, found.resolver


def _reference(schema: Any) -> str | None:
    """What a schema itself refers to."""
    if not isinstance(schema, Mapping):
        return None
    return schema.get("$ref", schema.get("$dynamicRef"))


def checker_of(tools: Tools) -> CallChecker:
    """The checker of these tools; kept, because schemas take long to check when they are many.

    Raises:
        ValueError: As `CallChecker`.
    """
    check_tools(tools)
    try:
        text = json.dumps([dict(tool) for tool in tools], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schemas of the tools cannot be written as JSON: {error}") from None
    return _kept(text)


@functools.lru_cache(maxsize=16)
def _kept(text: str) -> CallChecker:
    return CallChecker(json.loads(text))


def text_argument(tools: Tools, name: str) -> str:
    """The one required argument of a tool.

    Raises:
        ValueError: There is no such tool, or it requires none or several.
    """
    for tool in tools:
        if tool["function"]["name"] == name:
            required = (tool["function"].get("parameters") or {}).get("required", ())
            if len(required) == 1:
                return required[0]
            raise ValueError(
                f"tool {name!r} takes turns without a call, so it must require one argument, and "
                f"not {len(required)}"
            )
    raise ValueError(f"there is no tool {name!r}, which is to take turns without a call")


def plain_calls(turn: ParsedTurn) -> ParsedTurn:
    """The turn, in which a call whose arguments have no JSON form counts as malformed.

    NaN and halves of surrogate pairs pass Python's parser, but can be neither sent nor written.
    """
    calls = []
    for call in turn.calls:
        try:
            dumps({"arguments": call.arguments})
        except ValueError:
            why = "malformed tool call: an argument holds a number or a text that JSON cannot hold"
            call = dataclasses.replace(call, arguments={}, error=why)
        calls.append(call)
    return dataclasses.replace(turn, calls=tuple(calls))


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an arguments object, which takes no other names unless it says that it does."""
    closed = {"type": "object", **schema}
    if "properties" in closed and not _NAMING & set(closed):
        closed.setdefault("additionalProperties", False)
    return closed
