"""A tool with one parameter of each type, and messages in short."""

from race_jax.types import Trajectory

F = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "b": {"type": "boolean"},
                "n": {"type": "null"},
                "l": {"type": "array"},
                "x": {"type": "integer"},
                "s": {"type": "string"},
            },
        },
    },
}


def user(content):
    return {"role": "user", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


def assistant(content, reasoning="", calls=(), **keys):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, **keys}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(**arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def trajectory(*messages, tools=(F,)):
    return Trajectory("t", messages, tools)
