"""ScienceWorld: 30 tasks in the text simulation of a school lab, run by the package's own JVM."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

from race_jax.envs.base import Call, EnvironmentFault, Step, check_split
from race_jax.envs.scienceworld_text import ELECTRICAL, SYSTEM, TOOLS, VARIATIONS, command

VERSION = "1.2.3"
"""The one version that is accepted: rooms and ambiguity lists read differently in others."""

SPLITS = ("train", "dev", "test")

JAVA_OPTIONS = (
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
"""What every JVM is started with.

The simulator walks through hash sets of objects, whose order depends by default on all episodes
that ran before in the same JVM. With one hash for all objects an episode depends on its task and
its actions alone, so that it can be replayed.
"""

SIMPLIFICATIONS = (
    "easy",
    "noElectricalAction",
    "openContainers",
    "openDoors",
    "selfWateringFlowerPots",
    "teleportAction",
)


@dataclasses.dataclass(frozen=True)
class ScienceWorldConfig:
    """How episodes are run.

    Attributes:
        step_limit: The episode ends when more moves than this are made, at least 1. Looking round,
            the inventory and unknown commands cost no move, `wait1` costs 2 and `wait` 11.
        simplification: The simulator's simplifications, joined by commas; empty for none.
        java_memory: Cap on the JVM's heap, as Java writes it: `512m`, `2g`.
        restart_after: Episodes after which the JVM, which gives no memory back, is replaced; at
            least 1.
        timeout: Seconds after which a silent JVM counts as dead, above 0.
    """

    step_limit: int = 100
    simplification: str = ""
    java_memory: str = "512m"
    restart_after: int = 30
    timeout: float = 60.0

    def __post_init__(self):
        for name in ("step_limit", "restart_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; it must be above 0 seconds")
        if not re.fullmatch(r"[1-9][0-9]*[kmgKMG]", self.java_memory):
            raise ValueError(
                f"java_memory is {self.java_memory!r}; write a number and a unit, such as 512m"
            )
        for part in self.simplification.split(",") if self.simplification else ():
            if part not in SIMPLIFICATIONS:
                raise ValueError(
                    f"simplification {self.simplification!r} holds {part!r}; there are "
                    f"{', '.join(SIMPLIFICATIONS)}, joined by commas without spaces"
                )


class ScienceWorld:
    """ScienceWorld as an environment; the JVM starts at the first reset.

    The reward is the simulator's score over 100: parts of a task count, 1 is success, and -1
    follows a focus on the wrong object, which ends the episode.

    Where a command has several readings the observation lists them by number, and `choose` answers.
    Any other call then cancels the request and is not carried out itself; the simulator says so.

    Args:
        config: How episodes are run.

    Raises:
        ValueError: The package or Java is missing, or the package has another version.
    """

    name = "scienceworld"
    system = SYSTEM
    reward_range = (-1.0, 1.0)
    tools = TOOLS

    def __init__(self, config: ScienceWorldConfig | None = None):
        self.config = config or ScienceWorldConfig()
        _check_package()
        self._java = _find_java()
        self._jvm: _Jvm | None = None
        self._episodes = 0
        self._task = ""
        self._last = ""
        self._done = True

    def tasks(self, split: str) -> Sequence[str]:
        """Names of a split's tasks, such as `melt/3`: the task and its variation.

        Raises:
            ValueError: There is no such split.
        """
        check_split(split, SPLITS, "ScienceWorld")
        at = SPLITS.index(split)
        return [
            f"{name}/{variation}"
            for name, counts in VARIATIONS.items()
            if name not in self._excluded
            for variation in range(sum(counts[:at]), sum(counts[: at + 1]))
        ]

    def reset(self, task: str) -> str:
        """Start an episode and return the task and the view of the first room.

        Raises:
            ValueError: There is no such task.
            EnvironmentFault: The JVM does not start, or fails.
        """
        name, variation = self._parse(task)
        self._done = True
        self._task, self._last = task, "reset"
        if self._jvm and (self._episodes >= self.config.restart_after or not self._jvm.alive):
            self.close()
        if self._jvm is None:
            self._jvm = _Jvm(self._java, self.config)
            self._episodes = 0
        self._episodes += 1
        self._ask("load", name, variation, self.config.simplification, False)
        self._ask("reset")
        task_text = self._ask("getTaskDescription")
        room = self._ask("step", "look around")
        self._done = False
        return f"{task_text}\n\n{room}"

    def step(self, call: Call) -> Step:
        """Carry out one call.

        Raises:
            ValueError: There is no episode, it is over, or the call fits no schema of `tools`.
            EnvironmentFault: The JVM died or failed.
        """
        if self._done:
            raise ValueError("the episode is over; call reset(task) before the next step")
        line = command(call)
        self._last = line
        # The package's own step() also lists all valid commands, which takes 20 times as long.
        observation = self._ask("step", line)
        score = round(100 * self._ask("getScore"))
        over = self._ask("getCompleted") or self._ask("getNumMoves") > self.config.step_limit
        self._done = bool(over) or score < 0
        return Step(observation, score / 100, self._done, score == 100)

    def close(self) -> None:
        """End the JVM; the next reset starts another."""
        self._done = True
        if self._jvm is not None:
            self._jvm.close()
            self._jvm = None

    @property
    def _excluded(self) -> tuple[str, ...]:
        return ELECTRICAL if "noElectricalAction" in self.config.simplification else ()

    def _parse(self, task: str) -> tuple[str, int]:
        """Name and number of a task's variation."""
        name, _, number = task.rpartition("/")
        if name not in VARIATIONS or not re.fullmatch("[0-9]+", number):
            raise ValueError(
                f"there is no task {task!r}; ScienceWorld takes a name and a variation, such as "
                f"melt/3, and the names are {', '.join(VARIATIONS)}"
            )
        count = sum(VARIATIONS[name])
        if int(number) >= count:
            raise ValueError(
                f"there is no task {task!r}; the variations of {name} are 0 to {count - 1}"
            )
        if name in self._excluded:
            raise ValueError(
                f"task {task!r} needs electrical actions, but simplification is "
                f"{self.config.simplification!r}; leave noElectricalAction out for it"
            )
        return name, int(number)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the simulator; any failure ends the episode and the JVM."""
        assert self._jvm is not None
        try:
            return self._jvm.ask(method, *arguments)
        except EnvironmentFault as fault:
            self.close()
            raise EnvironmentFault(
                f"ScienceWorld task {self._task!r}, last action {self._last!r}: {fault}"
            ) from fault.__cause__


def count_variations() -> dict[str, tuple[int, int, int]]:
    """Ask the simulator how many variations of each task are for train, dev and test.

    Raises:
        ValueError: The variations of a split are not one range, or not in this order.
    """
    _check_package()
    jvm = _Jvm(_find_java(), ScienceWorldConfig())
    counts = {}
    try:
        for name in jvm.ask("getTaskNames"):
            jvm.ask("load", name, 0, "", False)
            splits = [list(jvm.ask(f"getVariations{split.capitalize()}")) for split in SPLITS]
            in_order = itertools.chain.from_iterable(splits)
            if list(in_order) != list(range(sum(map(len, splits)))):
                raise ValueError(f"the variations of {name} are not split in order: {splits}")
            counts[name] = tuple(map(len, splits))
    finally:
        jvm.close()
    return counts


def _check_package() -> None:
    """Raise ValueError unless the package is there in the one version that is accepted."""
    remedy = f"install it with: pip install 'race-jax[scienceworld]' (scienceworld=={VERSION})"
    try:
        version = importlib.metadata.version("scienceworld")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"the package scienceworld is not installed; {remedy}") from None
    if version != VERSION:
        raise ValueError(
            f"the package scienceworld has version {version}, but episodes can be compared only "
            f"under version {VERSION}; {remedy}"
        )


def _find_java() -> str:
    """Path of the Java launcher; ValueError without one."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    found = found or shutil.which("java")
    if found is None:
        raise ValueError(
            "ScienceWorld runs on Java 8 or later, but there is no `java` in JAVA_HOME or on the "
            "PATH; install a runtime, for example: apt-get install default-jre-headless"
        )
    return found


class _Jvm:
    """A JVM with the simulator in it.

    It ends with `close()`, when this object is forgotten, or when this process ends in any way: it
    reads from a pipe that then breaks. It never calls back, so there is no server on this side.
    """

    def __init__(self, java: str, config: ScienceWorldConfig):
        # Packages of an extra, which a type checker need not find.
        py4j: Any = importlib.import_module("py4j.java_gateway")
        # It tells some failures to the root logger, which sets that up for the whole program. All
        # of them are raised here, so they go to its own logger, where a program can hear them.
        py4j.logging = py4j.logger
        files: Any = importlib.import_module("scienceworld.constants")
        self._errors = (py4j.Py4JError, OSError)
        options = [f"-Xmx{config.java_memory}", *JAVA_OPTIONS]
        with tempfile.TemporaryFile() as said:
            try:
                port, token, process = py4j.launch_gateway(
                    classpath=files.JAR_PATH,
                    cwd=files.BASEPATH,
                    java_path=java,
                    javaopts=options,
                    die_on_exit=True,
                    enable_auth=True,
                    return_proc=True,
                    redirect_stderr=said,
                )
            # Of a JVM that does not start, py4j reads an empty text as the number of its port.
            except (ValueError, *self._errors) as error:
                said.seek(0)
                why = said.read(2000).decode(errors="replace").strip() or str(error)
                raise EnvironmentFault(f"{java} does not start ScienceWorld: {why}") from error
        self._process = process
        # Without memory management nothing is sent to a JVM that has died; the one object that is
        # kept there lives as long as the JVM does.
        parameters = py4j.GatewayParameters(
            port=port,
            auth_token=token,
            enable_memory_management=False,
            read_timeout=config.timeout,
        )
        gateway = py4j.JavaGateway(gateway_parameters=parameters)
        self._finalizer = weakref.finalize(self, _stop, process, gateway, os.getpid())
        try:
            self._server: Any = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        except self._errors as error:
            self.close()
            raise EnvironmentFault(f"the JVM does not load ScienceWorld: {error}") from error

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the simulator; EnvironmentFault if it or the JVM fails."""
        if not self.alive:
            raise EnvironmentFault(f"the JVM {self._state()}")
        try:
            return getattr(self._server, method)(*arguments)
        except self._errors as error:
            first_line = str(error).partition("\n")[0]
            raise EnvironmentFault(f"the JVM {self._state()}: {first_line}") from error

    def _state(self) -> str:
        """Whether the JVM that failed to answer still runs; a dying one is given a moment."""
        try:
            return f"has died (exit status {self._process.wait(timeout=0.5)})"
        except subprocess.TimeoutExpired:
            return "runs, but does not answer"

    def close(self) -> None:
        self._finalizer()


def _stop(process: subprocess.Popen[bytes], gateway: Any, owner: int) -> None:
    """End a JVM; a fork of the process that started it leaves it alone."""
    if os.getpid() != owner:
        return
    gateway.close()
    try:
        if process.stdin is not None:
            process.stdin.close()  # which the JVM takes as its end
        process.wait(timeout=1)
    except (subprocess.TimeoutExpired, OSError):
        process.kill()
        process.wait()
