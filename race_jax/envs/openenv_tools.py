"""The tools of an OpenEnv environment: read off its action schema, or listed by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from race_jax.envs.openenv_session import Refused, Session
from race_jax.envs.service import Service, ServiceFault


def action_of(service: Service, actions: str) -> tuple[bool, Mapping[str, Any]]:
    """Whether actions are calls of tools that the environment lists, and the actions' schema.

    Args:
        service: The server.
        actions: `auto`, `schema` or `tools`, as in `OpenEnvConfig`.

    Raises:
        EnvironmentFault: The server sends no schema.
    """
    reply = service.get("/schema")
    schema = reply.get("action") if isinstance(reply, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ServiceFault(
            f"GET {service.address}/schema: there is no object `action` in {reply!r:.200}; an "
            "OpenEnv server sends the schema of its actions there"
        )
    calls = set(_asked(schema)) in (set(), {"tool_name", "arguments"})
    return (calls if actions == "auto" else actions == "tools"), schema


def one_tool(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool whose arguments are the action's fields, but for those that the server fills in."""
    parameters = {key: value for key, value in schema.items() if key != "title"}
    description = str(parameters.pop("description", "") or "Act in the environment.")
    if isinstance(parameters.get("properties"), Mapping):
        parameters["properties"] = _asked(schema)
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _asked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action's fields that the server does not fill in: it has metadata and fixed values."""
    named, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(named, Mapping):
        return {"": None}
    return {
        key: value
        for key, value in named.items()
        if key in required
        or not (
            key == "metadata" or (isinstance(value, Mapping) and {"const", "default"} <= set(value))
        )
    }


def listed_tools(session: Session) -> tuple[Mapping[str, Any], ...]:
    """The tools that the environment lists.

    Raises:
        EnvironmentFault: It lists none, or the server failed.
    """
    try:
        listed = session.step({"type": "list_tools"}).observation.get("tools")
    except Refused as why:
        raise ServiceFault(
            f"{session.where}: the environment lists no tools ({why}); set `actions: schema`"
        ) from None
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(t, Mapping) for t in listed)
    ):
        raise ServiceFault(
            f"{session.where}: the list of tools is {listed!r:.200}; it must hold some"
        )
    return tuple(
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": str(tool.get("description") or ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in listed
    )


def tool_result(observation: Mapping[str, Any]) -> str:
    """What a tool replied: its texts, or its value as JSON, or what went wrong."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, Mapping):
        return f"Error: {error.get('message')}"
    content = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(content, list):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    parts = [part for part in content if isinstance(part, Mapping)]
    told = "\n".join(
        str(part.get("text")) if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in parts
    )
    failed = isinstance(result, Mapping) and result.get("is_error")
    return f"Error: {told}" if failed else told
