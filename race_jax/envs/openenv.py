"""OpenEnv: environments on servers of openenv-core, by their WebSocket and HTTP routes."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from race_jax.envs.base import Call, EnvironmentFault, Step, check_split
from race_jax.envs.openenv_session import LostSession, Refused, Seen, Session
from race_jax.envs.openenv_tools import action_of, listed_tools, one_tool, tool_result
from race_jax.envs.search_index import read_rows
from race_jax.envs.service import Service, ServiceFault

SYSTEM = (
    "You act in an environment by calling tools. Each reply shows what your call has brought. Go "
    "on until the task is done."
)
BEGUN = "The episode has begun."

SPLITS = ("train", "dev", "test")
Actions = Literal["auto", "schema", "tools"]
Rewards = Literal["sum", "last"]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class OpenEnvConfig:
    """Where a server is, what its episodes are, and how they are judged.

    A split is a range of seeds, `[first, past the last]`, or a JSONL file with one task a line:
    `{"id": ..., "reset": {...}, "prompt": ...}`. `reset` holds the options that the environment's
    reset takes, and `prompt` stands in for the setting; both can be left out, and a line without
    `id` gets its place in the file, from 0.

    Attributes:
        address: Such as `http://127.0.0.1:8000`.
        actions: `schema` makes one tool of the server's action schema, `tools` asks the environment
            for its tools (MCP), and `auto` asks where the action schema is that of such a call.
        tool: Name of the one tool.
        answer_tool: The tool that a turn of text without a call goes to; empty for none.
        prompt: What the agent is told before the first observation, such as the task.
        system: System prompt.
        fields: Fields of the observation that the agent is shown; empty for all.
        reward: `sum` adds the rewards of an episode's steps, `last` takes the last one that is not
            null, for environments that tell the return so far.
        reward_range: Least and greatest return of an episode.
        success_at: From this return on an episode counts as solved once it is over; None takes the
            greatest.
        success_field: A truth value of the observation that says so instead.
        train: Tasks to train on.
        dev: Tasks to choose by.
        test: Tasks to test on.
        timeout: Seconds for one reply, above 0.
        attempts: How often a lost session, or a server without room for one, is tried again as an
            episode begins, at least 1.
        pause: Seconds before the second attempt; each later pause is twice as long.
    """

    address: str
    actions: Actions = "auto"
    tool: str = "act"
    answer_tool: str = ""
    prompt: str = ""
    system: str = SYSTEM
    fields: Sequence[str] = ()
    reward: Rewards = "sum"
    reward_range: tuple[float, float] = (0.0, 1.0)
    success_at: float | None = None
    success_field: str = ""
    train: str | tuple[int, int] = (1000, 10_000)
    dev: str | tuple[int, int] = (500, 600)
    test: str | tuple[int, int] = (0, 100)
    timeout: float = 60.0
    attempts: int = 5
    pause: float = 0.5

    def __post_init__(self):
        for name, kind in (("actions", Actions), ("reward", Rewards)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it can be {', '.join(get_args(kind))}"
                )
        for split in SPLITS:
            _check_seeds(split, getattr(self, split))
        span = self.reward_range
        if len(span) != 2 or not -math.inf < span[0] <= span[1] < math.inf:
            raise ValueError(f"reward_range is {span}; it must be the least and greatest return")
        if isinstance(self.fields, str):
            raise ValueError(f"fields is {self.fields!r}; it must be a list of names")


def _check_seeds(split: str, given: Any) -> None:
    if isinstance(given, str):
        return
    numbers = list(given) if isinstance(given, list | tuple) else []
    if (
        len(numbers) != 2
        or any(type(n) is not int for n in numbers)
        or not 0 <= numbers[0] <= numbers[1]
    ):
        raise ValueError(
            f"{split} is {given!r}; it must be a JSONL file of tasks, or the first seed and the "
            "one past the last, such as [0, 100]"
        )


@dataclasses.dataclass(frozen=True)
class _Task:
    """What an episode begins with: reset options, and what the agent is told."""

    options: Mapping[str, Any]
    prompt: str


class OpenEnv:
    """An environment on an OpenEnv server: one session per client, kept from episode to episode.

    Several episodes at a time take several clients, and a server with `max_concurrent_envs` to
    match. An episode can be copied by replay where the environment follows from its reset options;
    where it does not, the copy differs and `replay` says so.

    Args:
        config: Server, tasks and reward.

    Raises:
        ValueError: The package `websockets` is not installed.
        EnvironmentFault: No server answers there, it has no room, or it names no actions.
    """

    name = "openenv"

    def __init__(self, config: OpenEnvConfig):
        self.config = config
        self.system, self.answer_tool = config.system, config.answer_tool
        low, high = config.reward_range
        self.reward_range = (float(low), float(high))
        self._service = Service(
            config.address,
            config.timeout,
            config.attempts,
            config.pause,
            start="start it with the environment's own command, such as `uvicorn server.app:app`",
        )
        self._service.check()
        self._calls_tools, schema = action_of(self._service, config.actions)
        self._tasks: dict[str, dict[str, _Task]] = {}
        self._session: Session | None = None
        self._going = False
        self._return = 0.0
        self.tools: tuple[Mapping[str, Any], ...] = (
            self._in_session(listed_tools)
            if self._calls_tools
            else (one_tool(config.tool, schema),)
        )

    def tasks(self, split: str) -> Sequence[str]:
        """Names of a split's tasks: `seed_17`, or the file's ids.

        Raises:
            ValueError: There is no such split, or its file is faulty.
        """
        return list(self._split(split))

    def reset(self, task: str) -> str:
        """Start an episode and return what the agent is told first.

        Raises:
            ValueError: There is no such task.
            EnvironmentFault: The server failed.
        """
        found = next((held[task] for s in SPLITS if task in (held := self._split(s))), None)
        if found is None:
            raise ValueError(f"there is no task {task!r}; tasks(split) names those that there are")
        self._going = False
        seen = self._begin(found.options)
        if seen.done:
            raise ServiceFault(f"{self.config.address}: task {task!r} is over as it begins")
        self._going, self._return = True, 0.0
        self._count(seen)
        told = self._told(seen.observation)
        prompt = found.prompt or self.config.prompt
        return "\n\n".join(text for text in (prompt, told) if text) or BEGUN

    def step(self, call: Call) -> Step:
        """Carry out one call; it is sent once.

        Raises:
            ValueError: There is no episode, or it is over.
            EnvironmentFault: The server failed.
        """
        if not self._going or self._session is None:
            raise ValueError("there is no episode, or it is over; call reset(task) first")
        action = dict(call.get("arguments") or {})
        if self._calls_tools:
            action = {"type": "call_tool", "tool_name": str(call.get("name")), "arguments": action}
        try:
            seen = self._session.step(action)
            self._count(seen)
            self._fail_on_transport(seen.observation)
        except Refused as why:
            return Step(f"Error: the action was refused: {why}"[:1000], self._return, False)
        except EnvironmentFault:
            self._drop()
            raise
        self._going = not seen.done
        solved = seen.done and self._solved(seen.observation)
        return Step(self._told(seen.observation), self._return, seen.done, solved)

    def close(self) -> None:
        """End the session, and close the connections."""
        self._drop()
        self._service.close()

    def _in_session(self, work: Callable[[Session], _T]) -> _T:
        """Do it; in a new session if the old one is lost, or until the server has room for one."""
        attempts = self.config.attempts + (self._session is not None)
        for attempt in range(1, attempts + 1):
            try:
                if self._session is None:
                    self._session = Session(self.config.address, self.config.timeout)
                return work(self._session)
            except EnvironmentFault as fault:
                self._drop()
                if attempt == attempts or not isinstance(fault, LostSession):
                    raise
                time.sleep(self.config.pause * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def _begin(self, options: Mapping[str, Any]) -> Seen:
        try:
            return self._in_session(lambda session: session.reset(options))
        except Refused as why:
            raise ServiceFault(
                f"{self.config.address}: the reset options {dict(options)!r:.200} were refused: "
                f"{why}"
            ) from None

    def _drop(self) -> None:
        session, self._session, self._going = self._session, None, False
        if session is not None:
            session.close()

    def _count(self, seen: Seen) -> None:
        """Add a step's reward to the episode's return."""
        if seen.reward is not None:
            self._return = seen.reward + (self._return if self.config.reward == "sum" else 0.0)
        low, high = self.reward_range
        # What rounding makes of ten times 0.1 is not out of range.
        if not low - 1e-6 <= self._return <= high + 1e-6:
            raise ServiceFault(
                f"{self.config.address}: the episode's return is {self._return:g}, but "
                f"reward_range is [{low:g}, {high:g}]; set it, and `reward`, as the server rewards"
            )
        self._return = min(max(self._return, low), high)

    def _solved(self, observation: Mapping[str, Any]) -> bool:
        field = self.config.success_field
        if not field:
            at = self.config.success_at
            return self._return >= (self.reward_range[1] if at is None else at)
        if not isinstance(observation.get(field), bool):
            raise ServiceFault(
                f"{self.config.address}: the last observation has no truth value {field!r}, which "
                f"success_field names; it has {', '.join(map(str, observation)) or 'nothing'}"
            )
        return observation[field]

    def _fail_on_transport(self, observation: Mapping[str, Any]) -> None:
        """What a tool never got is no doing of the agent's."""
        error = observation.get("error") if self._calls_tools else None
        if isinstance(error, Mapping) and error.get("error_type") in ("transport_error", "timeout"):
            raise ServiceFault(
                f"{self.config.address}: {error['error_type']}: {error.get('message')}"
            )

    def _told(self, observation: Mapping[str, Any]) -> str:
        """The observation as text."""
        if self._calls_tools and "tool_name" in observation:
            return tool_result(observation)
        names = self.config.fields or list(observation)
        missing = [name for name in names if name not in observation]
        if missing:
            raise ServiceFault(
                f"{self.config.address}: the observation has no field {missing[0]!r}, which "
                f"`fields` names; it has {', '.join(map(str, observation)) or 'nothing'}"
            )
        shown = {name: observation[name] for name in names if observation[name] is not None}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return json.dumps(shown, ensure_ascii=False) if shown else ""

    def _split(self, split: str) -> dict[str, _Task]:
        check_split(split, SPLITS, self.name)
        if split not in self._tasks:
            self._tasks[split] = _read_tasks(getattr(self.config, split))
        return self._tasks[split]


def _read_tasks(given: str | tuple[int, int]) -> dict[str, _Task]:
    if not isinstance(given, str):
        return {f"seed_{seed}": _Task({"seed": seed}, "") for seed in range(*given)}
    tasks: dict[str, _Task] = {}
    for place, (number, row) in enumerate(read_rows(given, "tasks")):
        where = f"{given}, line {number}"
        name, options, prompt = (
            str(row.get("id", place)),
            row.get("reset", {}),
            row.get("prompt", ""),
        )
        if name in tasks:
            raise ValueError(f"{where}: a second task is named {name!r}; names must differ")
        if not isinstance(options, dict):
            raise ValueError(f"{where}: `reset` is {options!r:.80}; it must be an object")
        if not isinstance(prompt, str):
            raise ValueError(f"{where}: `prompt` is {prompt!r:.80}; it must be text")
        unknown = sorted(set(row) - {"id", "reset", "prompt"})
        if unknown:
            raise ValueError(f"{where}: {unknown[0]!r} is unknown; a task has id, reset and prompt")
        tasks[name] = _Task(options, prompt)
    return tasks
