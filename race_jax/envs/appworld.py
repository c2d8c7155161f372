"""AppWorld through its environment server: functions of apps, judged by tests of their state."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from race_jax.envs.base import Call, Step, check_split
from race_jax.envs.service import Service, ServiceFault
from race_jax.toolcalls import check_tools

try:
    import fcntl
except ImportError:  # No advisory locks outside POSIX.
    fcntl = None

SYSTEM = (
    "You do a task for a person by calling functions of that person's apps. A function's name is"
    " that of its app, two underscores and its own; api_docs__show_api_doc tells what it takes and"
    " returns. Most functions need an access_token, which the app's login returns; the person's"
    " accounts and passwords are in supervisor__show_account_passwords. What lists things shows a"
    " page at a time, so read on until a page is empty. Nobody can answer questions: decide for"
    " yourself. Change nothing but what the task asks for. At the end call"
    " supervisor__complete_task, with the answer if the task asks for one."
)

ALWAYS = ("api_docs", "supervisor")
"""Apps whose functions are always offered."""

COMPLETE = "supervisor__complete_task"
"""The function that ends an episode."""

_FUNCTION = re.compile(r"([a-z_]+?)__([a-z][a-z0-9_]*)")
_SPLITS = ("train", "dev", "test")
_MADE_BY = "make it with race_jax/envs/appworld_export.py, run by the Python that has AppWorld"


@dataclasses.dataclass(frozen=True)
class AppWorldConfig:
    """Where the servers are, what is offered and how it is judged.

    Attributes:
        addresses: Of servers started by `appworld serve environment`. A server holds one world, so
            each episode at a time takes one of them; they must be as many as there are workers.
        functions: The file that `appworld_export.py` writes.
        apps: Whose functions are offered, besides `api_docs` and `supervisor`; empty for all 457.
        test: Which of AppWorld's two test sets is the test split.
        reward: `success`: 1 if all tests pass, else 0; `tests`: the share that passes.
        experiment: Name of the folder that the servers write to, in AppWorld's root. Each server
            adds its port, since AppWorld deletes what another left there of the same task.
        max_output: Most characters of a function's output that are kept, at least 200; of a longer
            one the middle is left out.
        max_interactions: Most calls of an episode, at least 1.
        seed: Of AppWorld's own draws.
        call_seconds: Seconds that the server gives a call, at least 1.
        timeout: Seconds for a reply, above `call_seconds`.
        attempts: How often a request that can be repeated is sent, at least 1.
    """

    addresses: tuple[str, ...]
    functions: str
    apps: tuple[str, ...] = ()
    test: Literal["test_normal", "test_challenge"] = "test_normal"
    reward: Literal["success", "tests"] = "success"
    experiment: str = "race-jax"
    max_output: int = 20_000
    max_interactions: int = 1000
    seed: int = 100
    call_seconds: int = 100
    timeout: float = 120.0
    attempts: int = 4

    def __post_init__(self):
        if not self.addresses:
            raise ValueError("addresses is empty; name at least one server")
        if isinstance(self.addresses, str):
            raise ValueError(f"addresses is {self.addresses!r}; it must be a list of addresses")
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"addresses names a server twice: {', '.join(self.addresses)}")
        if self.test not in ("test_normal", "test_challenge"):
            raise ValueError(f"test is {self.test!r}; it is test_normal or test_challenge")
        if self.reward not in ("success", "tests"):
            raise ValueError(f"reward is {self.reward!r}; it is success or tests")
        if not re.fullmatch(r"[\w.-]+", self.experiment):
            raise ValueError(
                f"experiment is {self.experiment!r}; it names a folder: letters, digits, _ . -"
            )
        if self.max_output < 200:
            raise ValueError(f"max_output is {self.max_output}; it must be at least 200 characters")
        if self.max_interactions < 1:
            raise ValueError(f"max_interactions is {self.max_interactions}; it must be at least 1")
        if self.call_seconds < 1:
            raise ValueError(f"call_seconds is {self.call_seconds}; it must be at least 1")
        if not self.timeout > self.call_seconds:
            raise ValueError(
                f"timeout is {self.timeout}; it must be above call_seconds={self.call_seconds}, "
                f"so that the server's own limit is met first"
            )


class AppWorld:
    """AppWorld in its function-calling form.

    A call becomes one line of code, `print(apis.app.function(**arguments))`; what that prints is
    the observation, a failure's traceback too. An episode ends with `supervisor__complete_task`,
    and is judged then; one that is cut off has reward 0.

    Args:
        config: Where the servers are, what is offered and how it is judged.

    Raises:
        ValueError: The file of functions is not as it must be.
        EnvironmentFault: One of the servers is down.

    Attributes:
        evaluation: AppWorld's own report on the last episode that was completed, or None.
    """

    name = "appworld"
    system = SYSTEM
    reward_range = (0.0, 1.0)

    def __init__(self, config: AppWorldConfig):
        self.config = config
        self.tools, self._tasks = read_functions(config.functions, config.apps)
        self._known = {tool["function"]["name"] for tool in self.tools}
        for address in config.addresses:
            self._connect(address).check()
        self.evaluation: Mapping[str, Any] | None = None
        self._server: Service | None = None
        self._lease: int | None = None
        self._task: str | None = None

    def tasks(self, split: str) -> Sequence[str]:
        """Ids of a split's tasks.

        Raises:
            ValueError: There is no such split, or the file of functions was made without data.
        """
        check_split(split, _SPLITS, "appworld")
        dataset = self.config.test if split == "test" else split
        if not self._tasks.get(dataset):
            raise ValueError(
                f"{self.config.functions} has no task ids of {dataset}; run `appworld download "
                f"data` and make the file again"
            )
        return self._tasks[dataset]

    def reset(self, task: str) -> str:
        """Start an episode and return the task and whom it is for.

        Raises:
            ValueError: `task` is no id, or all servers are taken by other workers.
            EnvironmentFault: The server failed, as it does for an id that it does not have.
        """
        if not re.fullmatch(r"\w+_\d+", task):
            raise ValueError(f"there is no task {task!r}; an id of AppWorld is like 82e2fac_1")
        self._task, self.evaluation = None, None
        server = self._take()
        port = server.address.rpartition(":")[2]
        output = self._ask(
            "/initialize",
            task,
            again=True,
            experiment_name=f"{self.config.experiment}-{re.sub(r'[^0-9A-Za-z]', '-', port)}",
            max_interactions=self.config.max_interactions,
            timeout_seconds=self.config.call_seconds,
            random_seed=self.config.seed,
        )
        try:
            person = output["supervisor"]
            text = (
                f"{output['instruction']}\n\nThe task is from {person['first_name']} "
                f"{person['last_name']} (email {person['email']}, phone {person['phone_number']}). "
                f"It is now {output['datetime']}."
            )
        except (TypeError, KeyError) as error:
            raise ServiceFault(
                f"{server.address}: the reply {output!r:.200} to /initialize lacks {error}"
            ) from None
        self._task = task
        return text

    def step(self, call: Call) -> Step:
        """Carry out one call.

        Raises:
            ValueError: There is no episode, it is over, or the call fits no schema of `tools`.
            EnvironmentFault: The server failed.
        """
        task = self._task
        if task is None:
            raise ValueError("there is no episode, or it is over; call reset(task) first")
        name = call["name"]
        if name not in self._known:
            raise ValueError(f"there is no tool {name!r}; see `tools` for those that are offered")
        line = code(call)
        self._task = None  # A fault ends the episode.
        output = self._ask("/execute", task, code=line)
        if not isinstance(output, str):
            raise ServiceFault(f"the output of /execute is {output!r:.200}, not a text")
        observation = bounded(output.rstrip("\n"), self.config.max_output)
        if name == COMPLETE and self._ask("/task_completed", task, again=True) is True:
            return self._judged(task, observation)
        self._task = task
        return Step(observation, 0.0, False)

    def close(self) -> None:
        """Close the world and leave the server to others."""
        server, self._server, self._task = self._server, None, None
        if server is not None:
            server.close()
        if self._lease is not None:
            os.close(self._lease)
            self._lease = None

    def _judged(self, task: str, observation: str) -> Step:
        report = self._ask("/evaluate", task, again=True, suppress_errors=True, report=False)
        try:
            passed, count, success = len(report["passes"]), report["num_tests"], report["success"]
            share = passed / count
        except (TypeError, KeyError, ZeroDivisionError):
            raise ServiceFault(f"the report {report!r:.300} of /evaluate is incomplete") from None
        if not 0 <= share <= 1 or not isinstance(success, bool):
            raise ServiceFault(f"the report {report!r:.300} of /evaluate contradicts itself")
        self.evaluation = report
        reward = share if self.config.reward == "tests" else float(success)
        return Step(observation, reward, True, success)

    def _ask(self, route: str, task: str, again: bool = False, **body: Any) -> Any:
        assert self._server is not None
        reply = self._server.post(route, {"task_id": task, **body}, again)
        if not isinstance(reply, Mapping) or "output" not in reply:
            raise ServiceFault(
                f"{self._server.address}{route}: the reply {reply!r:.200} has no `output`, which "
                f"an AppWorld environment server sends"
            )
        return reply["output"]

    def _connect(self, address: str) -> Service:
        start = f"start it with `appworld serve environment --port {address.rpartition(':')[2]}`"
        return Service(address, self.config.timeout, self.config.attempts, start=start)

    def _take(self) -> Service:
        """The server of this client; the first time, one that no other worker holds."""
        if self._server is not None:
            return self._server
        for address in self.config.addresses:
            lease = _lock(address)
            if lease is not None:
                self._lease, self._server = lease, self._connect(address)
                self._server.check()
                return self._server
        raise ValueError(
            f"all {len(self.config.addresses)} servers of `addresses` are in use on this machine; "
            f"a server holds one world, so start more of them or run fewer workers"
        )


def read_functions(
    path: str | Path, apps: Sequence[str] = ()
) -> tuple[tuple[Mapping[str, Any], ...], Mapping[str, Sequence[str]]]:
    """Read the file that `appworld_export.py` writes.

    Args:
        path: The file.
        apps: Whose functions to keep, besides `ALWAYS`; empty for all.

    Returns:
        The schemas, and the task ids by AppWorld's name of the set.

    Raises:
        ValueError: The file is not as it must be, or has no such app.
        OSError: The file cannot be read.
    """
    try:
        record = json.loads(Path(path).read_bytes())
        tools, tasks = tuple(record["tools"]), dict(record["tasks"])
        check_tools(tools)
        names = [tool["function"]["name"] for tool in tools]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no file of AppWorld's functions ({error}); {_MADE_BY}"
        ) from None
    found = {name.partition("__")[0] for name in names}
    for app in (*ALWAYS, *apps):
        if app not in found:
            raise ValueError(
                f"{path} has no functions of {app!r}; it has {', '.join(sorted(found))}"
            )
    wanted = {*ALWAYS, *apps} if apps else found
    kept = (tool for tool, name in zip(tools, names, strict=True) if _app(name) in wanted)
    return tuple(kept), tasks


def code(call: Call) -> str:
    """The line of code that carries out a call.

    Raises:
        ValueError: The name is not that of a function, or the arguments are no JSON.
    """
    name = _FUNCTION.fullmatch(call["name"])
    if name is None:
        raise ValueError(
            f"{call['name']!r} is no function of AppWorld; names are like app__function"
        )
    try:
        # Through JSON and back all is of types whose text is a Python literal.
        arguments = json.loads(json.dumps(dict(call["arguments"]), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the arguments of {call['name']} are no JSON: {error}") from None
    return f"print(apis.{name[1]}.{name[2]}(**{arguments!r}))"


def bounded(text: str, limit: int) -> str:
    """`text`, or its beginning and end where it has more characters than `limit`."""
    if len(text) <= limit:
        return text
    half = (limit - 60) // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"


def scenario_completion(solved: Mapping[str, bool]) -> float:
    """Share of scenarios whose every task is solved, which AppWorld reports beside the tasks'.

    Args:
        solved: Whether each task was solved, by id; the tasks `x_1`, `x_2`, ... are a scenario.

    Returns:
        In [0, 1]; 0 without tasks.
    """
    scenarios: dict[str, bool] = {}
    for task, done in solved.items():
        name = task.rpartition("_")[0]
        scenarios[name] = scenarios.get(name, True) and done
    return sum(scenarios.values()) / len(scenarios) if scenarios else 0.0


def _app(name: str) -> str:
    return name.partition("__")[0]


def _lock(address: str) -> int | None:
    """A file descriptor that holds a server for this client as long as it is open."""
    owner = os.getuid() if hasattr(os, "getuid") else 0
    key = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    path = os.path.join(tempfile.gettempdir(), f"race-jax-{owner}-appworld-{key}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
    return descriptor
