"""What the clients of AgentGym's environment servers share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from race_jax.envs.base import Call, EnvironmentFault, Step, check_split
from race_jax.envs.service import Service, ServiceFault

SPLITS = ("train", "dev", "test")

_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list),
    "truth value": lambda value: isinstance(value, bool),
    "whole number": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float) and math.isfinite(value),
}
_NUMBER = re.compile(r"(?:.*\D)?(\d+)")


@dataclasses.dataclass(frozen=True)
class AgentGymConfig:
    """Where a server is, and which items are the tasks.

    Attributes:
        address: Such as `http://127.0.0.1:36001`.
        timeout: Seconds for one reply, above 0.
        attempts: How often a request that can be repeated is sent, at least 1.
        train: AgentGym's JSON list of item ids for training; None takes the server's own split.
        dev: The same for choosing.
        test: The same for testing.
        one_answer: Whether the first answer ends an episode of searchqa; its server lets an agent
            guess until it is right.
    """

    address: str
    timeout: float = 60.0
    attempts: int = 4
    train: str | None = None
    dev: str | None = None
    test: str | None = None
    one_answer: bool = True


def item_ids(path: str | Path) -> tuple[int, ...]:
    """Read AgentGym's list of item ids.

    Args:
        path: A JSON list of numbers, of texts that end in one such as "webshop_17", or of objects
            with such an `item_id`.

    Raises:
        ValueError: The file is not like that; the message names the entry.
        OSError: The file cannot be read.
    """
    rule = 'it must be a JSON list of numbers or of {"item_id": "webshop_17"}'
    try:
        entries = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {rule}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds a {type(entries).__name__}; {rule}")
    found = []
    for n, entry in enumerate(entries, 1):
        item = entry.get("item_id") if isinstance(entry, Mapping) else entry
        number = None if isinstance(item, bool) else _NUMBER.fullmatch(str(item))
        if number is None or (isinstance(item, float | int) and str(item) != number[1]):
            raise ValueError(f"{path}, entry {n} is {entry!r:.80}; {rule}")
        found.append(int(number[1]))
    return tuple(found)


class AgentGym:
    """What the three servers share: one world per client, made at the first episode and kept.

    Several episodes at a time take several clients.

    Attributes:
        key: What the server calls a world's number.
        command: What starts the server.
        splits: The items of each split.
        renew_after: After how many episodes a new world replaces the old one; 0 for never.

    Args:
        config: Where the server is.

    Raises:
        EnvironmentFault: No server answers there.
    """

    name: str
    system: str
    tools: tuple[Mapping[str, Any], ...]
    reward_range: tuple[float, float] = (0.0, 1.0)
    key: ClassVar[str] = "env_idx"
    command: ClassVar[str]
    splits: ClassVar[Mapping[str, Sequence[int]]] = {}
    renew_after: ClassVar[int] = 0

    def __init__(self, config: AgentGymConfig):
        self.config = config
        start = f"start it with `{self.command} --host 0.0.0.0 --port PORT`"
        self.service = Service(config.address, config.timeout, config.attempts, start=start)
        self.service.check()
        self._world: int | None = None
        self._episodes = 0
        self._going = False

    def tasks(self, split: str) -> Sequence[str]:
        """Names of a split's tasks, which are item numbers of the server.

        Raises:
            ValueError: There is no such split, or its file of item ids is not as it must be.
        """
        files = {"train": self.config.train, "dev": self.config.dev, "test": self.config.test}
        check_split(split, files, self.name)
        path = files[split]
        if path is not None:
            return [self._name(item) for item in item_ids(path)]
        return [self._name(item) for item in self.splits[split]]

    def reset(self, task: str) -> str:
        """Start an episode and return what the agent is told first.

        Raises:
            ValueError: There is no such task.
            EnvironmentFault: The server failed.
        """
        item = self._item(task)
        self._going = False
        if self._episodes == self.renew_after:
            self._drop()
        first = self._again(item) if self._world is not None else None
        if first is None:
            self._world = self._create(item)
            try:
                first = self._reset(item)
            except EnvironmentFault:
                self._drop()
                raise
        self._going = True
        self._episodes += 1
        return first

    def step(self, call: Call) -> Step:
        """Carry out one call.

        A call is sent once: a server that breaks off may have carried it out already. After a fault
        the next episode is given a new world.

        Raises:
            ValueError: There is no episode, or it is over.
            EnvironmentFault: The server failed.
        """
        if not self._going:
            raise ValueError("there is no episode, or it is over; call reset(task) first")
        try:
            step = self._step(str(call.get("name")), call.get("arguments") or {})
            low, high = self.reward_range
            if not low <= step.reward <= high:
                raise ServiceFault(
                    f"{self.service.address}: the reward is {step.reward}; a {self.command} "
                    f"server's is within [{low:g}, {high:g}]"
                )
        except EnvironmentFault:
            self._drop()
            raise
        self._going = not step.done
        return step

    def close(self) -> None:
        """Close the world on the server, if the server can, and the connections."""
        self._drop()
        self.service.close()

    def _again(self, item: int) -> str | None:
        """Start in the world that is there; None if the server has lost it, as by a restart."""
        try:
            return self._reset(item)
        except EnvironmentFault:
            self._drop()
            return None

    def _name(self, item: int) -> str:
        return str(item)

    def _item(self, task: str) -> int:
        if not (task.isascii() and task.isdigit()):
            raise ValueError(f"there is no task {task!r}; {self.name} takes an item number")
        return int(task)

    def _create(self, item: int) -> int:
        raise NotImplementedError

    def _reset(self, item: int) -> str:
        raise NotImplementedError

    def _step(self, name: str, arguments: Mapping[str, Any]) -> Step:
        raise NotImplementedError

    def _drop(self) -> None:
        """Forget the world and ask the server to close it."""
        world, self._world, self._going, self._episodes = self._world, None, False, 0
        if world is None:
            return
        # Older webshop servers have no such route, and one that broke cannot close anything.
        with contextlib.suppress(ServiceFault):
            self.service.post("/close", {self.key: world})

    def body(self, **more: Any) -> dict[str, Any]:
        """A request about this client's world."""
        return {self.key: self._world, **more}

    def checked(self, value: Any, kind: str, what: str) -> Any:
        """`value` if it is of the kind named; EnvironmentFault otherwise."""
        if not _KINDS[kind](value):
            raise ServiceFault(
                f"{self.service.address}: {what} is {value!r:.200}; a {self.command} server sends "
                f"a {kind} there"
            )
        return value

    def part(self, reply: Any, name: str, kind: str) -> Any:
        """One part of a reply, if it is of the kind named; EnvironmentFault otherwise."""
        if not isinstance(reply, Mapping) or name not in reply:
            raise ServiceFault(
                f"{self.service.address}: the reply {reply!r:.200} has no `{name}`, which a "
                f"{self.command} server sends"
            )
        return self.checked(reply[name], kind, f"`{name}`")
