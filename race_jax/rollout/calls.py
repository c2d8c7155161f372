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
        ValueError: They are no function schemas with distinct names and valid parameters.
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
            kinds = schema["type"]
            if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
                raise ValueError(
                    f"tool {function['name']!r}: its parameters are of the type {kinds!r}; it must "
                    "be 'object', for calls have named arguments"
                )
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
        except Unresolvable as missing:
            return f"the schema of {call.name!r} refers to what is not there: {missing}"
        if error is None:
            return None
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        place = f"at {where}: " if where else ""
        return f"wrong arguments for {call.name!r}: {place}{bound_text(error.message, 300)}"


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
