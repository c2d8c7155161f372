"""Environments by name, as settings files call them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from race_jax.envs.base import Environment


class _Place(NamedTuple):
    """Where an environment and its settings live, and whether each step takes next to no time."""

    module: str
    environment: str
    settings: str
    quick: bool = False
    settings_module: str | None = None


def _agentgym(environment: str) -> _Place:
    return _Place("agentgym", environment, "AgentGymConfig", False, "agentgym_base")


_PLACES = {
    "potions": _Place("potions", "PotionShop", "PotionShopConfig", quick=True),
    "scienceworld": _Place("scienceworld", "ScienceWorld", "ScienceWorldConfig"),
    "search": _Place("search", "DeepSearch", "DeepSearchConfig"),
    "webshop": _Place("webshop", "WebShop", "WebShopConfig", quick=True),
    "appworld": _Place("appworld", "AppWorld", "AppWorldConfig"),
    "openenv": _Place("openenv", "OpenEnv", "OpenEnvConfig"),
    "agentgym-sciworld": _agentgym("AgentGymSciWorld"),
    "agentgym-webshop": _agentgym("AgentGymWebShop"),
    "agentgym-searchqa": _agentgym("AgentGymSearchQA"),
}


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """Which environment, and how many run at once.

    Attributes:
        name: `potions`, `scienceworld`, `search`, `webshop`, `appworld`, `openenv`,
            `agentgym-sciworld`, `agentgym-webshop` or `agentgym-searchqa`.
        settings: The environment's own settings.
        workers: Processes that run one episode each; 0 runs all in this process. By default 0 for
            `potions` and `webshop`, whose steps take next to no time, and 4 for the others.
        restart_after: Episodes after which a worker is replaced; 0 for never.
    """

    name: str = "potions"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    workers: int | None = None
    restart_after: int = 0

    def __post_init__(self):
        if self.name not in _PLACES:
            raise ValueError(
                f"there is no environment {self.name!r}; there are {', '.join(_PLACES)}"
            )
        for name, value in (("workers", self.workers or 0), ("restart_after", self.restart_after)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")

    @property
    def processes(self) -> int:
        """Worker processes; 0 for none."""
        if self.workers is None:
            return 0 if _PLACES[self.name].quick else 4
        return self.workers

    def maker(self) -> Callable[[], Environment]:
        """What builds the environment, in another process too."""
        return functools.partial(make_environment, self.name, self.settings)


def make_environment(name: str, settings: Mapping[str, Any]) -> Environment:
    """Build an environment.

    Args:
        name: As in `EnvironmentConfig`.
        settings: Fields of its settings.

    Raises:
        ValueError: A setting is unknown, missing or out of range, or what the environment needs is
            not installed.
        EnvironmentFault: A server that it needs is down.
    """
    place = _PLACES[name]
    module = importlib.import_module(f"race_jax.envs.{place.module}")
    other = importlib.import_module(f"race_jax.envs.{place.settings_module or place.module}")
    config = getattr(other, place.settings)
    known = [field.name for field in dataclasses.fields(config)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"environment {name!r} has no setting {unknown[0]!r}; it has {', '.join(known)}"
        )
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    try:
        return getattr(module, place.environment)(config(**given))
    except TypeError as error:
        said = _mistyped(config, settings) or str(error)
        raise ValueError(f"the settings of environment {name!r}: {said}") from None


def _mistyped(config: type, settings: Mapping[str, Any]) -> str:
    """Which setting is missing or of another type than its field; empty if none is."""
    # Imported here: only who has made a mistake needs it.
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(config)
    try:
        parser.parse_object(dict(settings))
    except ArgumentError as error:
        return " ".join(str(error).split())
    return ""
