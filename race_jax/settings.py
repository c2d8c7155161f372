"""Settings of runs: which break a rule, and which differ from others, by name and value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

MISSING = "<not set>"
"""Stands for the value of a field that one side lacks."""


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; sequences as lists, as JSON gives them back."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            flat[f"{prefix}{name}"] = list(plain) if isinstance(plain, tuple) else plain
    return flat


def differing_settings(
    old: Mapping[str, Any], new: Mapping[str, Any], *, free: Collection[str] = ()
) -> list[str]:
    """One text for each field that differs: its name and both values.

    Args:
        old: Settings from before, nested or flat.
        new: Settings of now.
        free: Fields, or groups of fields, that may differ.
    """
    was, now = flatten_settings(old), flatten_settings(new)

    def may_differ(name: str) -> bool:
        return any(name == f or name.startswith(f"{f}.") for f in free)

    return [
        f"{name} was {was.get(name, MISSING)!r} and is now {now.get(name, MISSING)!r}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name, MISSING) != now.get(name, MISSING) and not may_differ(name)
    ]


def check_rules(group: str, settings: object, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ValueError for the first setting that breaks its rule.

    Args:
        group: What stands before the field's name in the message.
        settings: Holds the values.
        rules: By field: whether the rule is kept, and the rule, after "it must be".

    Example:
        >>> check_rules("tree", ForkConfig(), {"forks": (False, "at least 0")})
        ValueError: tree.forks is 16; it must be at least 0.
    """
    for name, (kept, rule) in rules.items():
        if not kept:
            raise ValueError(f"{group}.{name} is {getattr(settings, name)!r}; it must be {rule}.")
