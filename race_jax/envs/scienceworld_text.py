"""What ScienceWorld's agent is shown: the prompt, the tools and the commands they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from race_jax.envs.base import Call

SYSTEM = (
    "You act in ScienceWorld, a text simulation of an elementary science lab. Each round brings an "
    "observation; answer it with exactly one function call that brings the task closer to done. "
    "Name only objects that are present. If the simulation says that it does not know an action, "
    "try another."
)

VARIATIONS = {
    "boil": (14, 7, 9),
    "melt": (14, 7, 9),
    "freeze": (14, 7, 9),
    "change-the-state-of-matter-of": (14, 7, 9),
    "use-thermometer": (270, 135, 135),
    "measure-melting-point-known-substance": (218, 109, 109),
    "measure-melting-point-unknown-substance": (150, 75, 75),
    "power-component": (10, 5, 5),
    "power-component-renewable-vs-nonrenewable-energy": (10, 5, 5),
    "test-conductivity": (450, 225, 225),
    "test-conductivity-of-unknown-substances": (300, 150, 150),
    "find-living-thing": (150, 75, 75),
    "find-non-living-thing": (150, 75, 75),
    "find-plant": (150, 75, 75),
    "find-animal": (150, 75, 75),
    "grow-plant": (62, 31, 33),
    "grow-fruit": (62, 31, 33),
    "chemistry-mix": (16, 8, 8),
    "chemistry-mix-paint-secondary-color": (18, 9, 9),
    "chemistry-mix-paint-tertiary-color": (18, 9, 9),
    "lifespan-longest-lived": (62, 31, 32),
    "lifespan-shortest-lived": (62, 31, 32),
    "lifespan-longest-lived-then-shortest-lived": (62, 31, 32),
    "identify-life-stages-1": (6, 3, 5),
    "identify-life-stages-2": (4, 2, 4),
    "inclined-plane-determine-angle": (84, 42, 42),
    "inclined-plane-friction-named-surfaces": (692, 346, 348),
    "inclined-plane-friction-unnamed-surfaces": (80, 40, 42),
    "mendelian-genetics-known-plant": (60, 30, 30),
    "mendelian-genetics-unknown-plant": (240, 120, 120),
}
"""How many variations of each task are for train, dev and test; in this order, from number 0.

`race_jax.envs.scienceworld.count_variations()` asks the simulator for them.
"""

ELECTRICAL = tuple(name for name in VARIATIONS if "power-component" in name or "conduct" in name)
"""Tasks that cannot be solved under the simplification `noElectricalAction`."""


def _tool(name: str, description: str, *arguments: str, optional: str = "") -> dict[str, Any]:
    named = (*arguments, optional) if optional else arguments
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in named},
        "required": list(arguments),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: tuple[Mapping[str, Any], ...] = (
    _tool("open", "Open a door or a container.", "obj"),
    _tool("close", "Close a door or a container.", "obj"),
    _tool("goto", "Walk through an open door into an adjoining place.", "location"),
    _tool("pickup", "Take an object into the inventory.", "obj"),
    _tool("drop", "Put an object from the inventory down.", "obj"),
    _tool("move", "Move an object into a container.", "obj", "container"),
    _tool("pour", "Pour a liquid into a container.", "liq", "container"),
    _tool("mix", "Mix what a container holds.", "container"),
    _tool("focus", "Signal intent on the task object.", "obj"),
    _tool("look_around", "Describe the current room."),
    _tool("examine", "Describe an object in detail.", "obj"),
    _tool("use", "Use a device, optionally on a target.", "obj", optional="target"),
    _tool("activate", "Turn a device on.", "obj"),
    _tool("deactivate", "Turn a device off.", "obj"),
    _tool("connect", "Connect two electrical terminals.", "obj", "target"),
    _tool("disconnect", "Disconnect an electrical component.", "obj"),
    _tool("read", "Read a note or a book.", "obj"),
    _tool("wait", "Let ten steps of time pass."),
    _tool("wait1", "Let one step of time pass."),
    _tool("inventory", "List what is being carried."),
    _tool("choose", "Answer a request to pick among ambiguous readings by its number.", "option"),
)
"""The tools; every gold path of the 30 tasks can be walked with them."""

_COMMANDS = {
    "open": "open {obj}",
    "close": "close {obj}",
    "goto": "go to {location}",
    "pickup": "pick up {obj}",
    "drop": "drop {obj}",
    "move": "move {obj} to {container}",
    "pour": "pour {liq} into {container}",
    "mix": "mix {container}",
    "focus": "focus on {obj}",
    "look_around": "look around",
    "examine": "examine {obj}",
    "use": "use {obj}",
    "activate": "activate {obj}",
    "deactivate": "deactivate {obj}",
    "connect": "connect {obj} to {target}",
    "disconnect": "disconnect {obj}",
    "read": "read {obj}",
    "wait": "wait",
    "wait1": "wait1",
    "inventory": "inventory",
    "choose": "{option}",
}


def command(call: Call) -> str:
    """The simulator's command for a call that fits a schema of `TOOLS`.

    Args:
        call: `{"name": str, "arguments": mapping}`. Runs of white space in an argument, line
            breaks among them, become one space: a command is one line.

    Raises:
        ValueError: There is no such tool, or the arguments do not fit its schema.
    """
    name, arguments = call["name"], call["arguments"]
    if name not in _COMMANDS:
        raise ValueError(f"ScienceWorld has no tool {name!r}; it has {', '.join(_COMMANDS)}")
    words = {key: " ".join(str(value).split()) for key, value in arguments.items()}
    pattern = _COMMANDS[name]
    # "use X on" is no command, so an empty target is as good as none.
    if name == "use" and words.get("target"):
        pattern = "use {obj} on {target}"
    try:
        return pattern.format_map(words)
    except KeyError as missing:
        raise ValueError(f"the call of {name} lacks its argument {missing}") from None
