"""Environments in processes of their own, which may hang or die without harm to the run."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from race_jax.envs.base import Call, Environment
from race_jax.envs.factory import EnvironmentConfig
from race_jax.rollout.hosts import Fault, Host, LocalHost, Reply, opening_of, step_of

START_TIMEOUT = 120.0
"""Seconds that a process may take to start and to build its environment."""
_LEAVE_TIMEOUT = 5.0


@dataclasses.dataclass
class _Worker:
    """One process and what it has in hand.

    Attributes:
        name: In messages.
        process: It.
        pipe: To it.
        key: The episode that it runs.
        doing: What it was asked last.
        deadline: When it must have answered; None if it was asked nothing.
        ready: Whether it has built its environment.
        episodes: How many it has begun.
    """

    name: str
    process: SpawnProcess
    pipe: Connection
    key: str | None = None
    doing: str = "starting"
    deadline: float | None = None
    ready: bool = False
    episodes: int = 0


class WorkerHost:
    """Environments in worker processes.

    A worker that takes too long is killed, with all processes that it started; one that died is
    noticed at once. Either way its episode gets a `Fault` that names worker and call, and the next
    episode a new process. Processes are spawned, never forked: what runs in this one stays here.

    Args:
        make: Builds an environment; goes to the processes, so it must be picklable (a class, a
            function of a module, or a `functools.partial` of one).
        workers: Processes, and episodes at once.
        step_timeout: Seconds that a call, or the beginning of an episode, may take.
        restart_after: Episodes after which a process is replaced, against leaks; 0 for never.
        start_timeout: Seconds that a process may take to build its environment.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        workers: int,
        *,
        step_timeout: float = 120.0,
        restart_after: int = 0,
        start_timeout: float = START_TIMEOUT,
    ):
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        if restart_after < 0:
            raise ValueError(f"restart_after is {restart_after}; it must be at least 0")
        self._make = make
        self.capacity = workers
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._restart_after = restart_after
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._leaving: list[_Worker] = []
        self._started = 0
        self._any_ready = False

    def open(self, key: str, task: str) -> None:
        """Begin an episode."""
        worker = next((w for w in self._workers if w.key is None), None) or self._start()
        worker.key = key
        worker.episodes += 1
        self._ask(worker, ("open", task), f"as task {task!r} began")

    def step(self, key: str, call: Call) -> None:
        """Carry out a call."""
        self._ask(self._of(key), ("step", dict(call)), f"at {dict(call)!r:.300}")

    def _of(self, key: str) -> _Worker:
        return next(worker for worker in self._workers if worker.key == key)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        self._started += 1
        name = f"environment worker {self._started}"
        process = self._context.Process(
            target=_serve, args=(theirs, self._make), name=name, daemon=True
        )
        process.start()
        theirs.close()
        worker = _Worker(name, process, ours)
        self._workers.append(worker)
        return worker

    def _ask(self, worker: _Worker, message: tuple[str, Any], doing: str) -> None:
        worker.doing = doing
        allowed = self._step_timeout + (0 if worker.ready else self._start_timeout)
        worker.deadline = time.monotonic() + allowed
        # If it is dead, its end of the pipe tells so at the next poll.
        with contextlib.suppress(OSError):
            worker.pipe.send(message)

    def poll(self, timeout: float) -> list[tuple[str, Reply]]:
        """What has come; waits `timeout` seconds at most if nothing has."""
        self._reap()
        asked = [worker for worker in self._workers if worker.deadline is not None]
        now = time.monotonic()
        until = min([now + timeout, *(w.deadline for w in asked if w.deadline is not None)])
        speaking = wait([w.pipe for w in asked], max(until - now, 0.0)) if asked else []
        replies: list[tuple[str, Reply]] = []
        now = time.monotonic()
        for worker in asked:
            key, reply = worker.key, None
            if worker.pipe in speaking:
                reply = self._hear(worker)
            elif worker.deadline is not None and now >= worker.deadline:
                reply = self._lost(worker, "timeout", "did not answer in time, and was killed")
            if reply is not None and key is not None:
                replies.append((key, reply))
        return replies

    def _hear(self, worker: _Worker) -> Reply | None:
        """Read one message; None if no reply to the episode is in it."""
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(_LEAVE_TIMEOUT)
            code = worker.process.exitcode
            return self._lost(worker, "env_error", f"died with exit code {code}")
        if kind == "ready":
            worker.ready = self._any_ready = True
            worker.deadline = time.monotonic() + self._step_timeout
            return None
        if kind == "broken":
            if not self._any_ready:
                raise ValueError(f"the environment cannot be built: {value}")
            return self._lost(worker, "env_error", f"could not build its environment: {value}")
        if kind == "fault":
            return self._lost(worker, "env_error", value)
        worker.deadline = None
        return value

    def _lost(self, worker: _Worker, stop: Any, why: str) -> Fault:
        fault = Fault(stop, f"{worker.name} (pid {worker.process.pid}), {worker.doing}: {why}")
        self._kill(worker)
        return fault

    def _kill(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        # Its process group holds what it started itself, a Java machine for instance.
        if hasattr(os, "killpg") and worker.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join(_LEAVE_TIMEOUT)
        worker.pipe.close()

    def release(self, key: str) -> None:
        """The episode is over; a worker that still works on it is killed."""
        worker = next((worker for worker in self._workers if worker.key == key), None)
        if worker is None:
            return
        worker.key = None
        if worker.deadline is not None:
            self._kill(worker)
        elif self._restart_after and worker.episodes >= self._restart_after:
            self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        """Let a worker end by itself."""
        self._workers.remove(worker)
        self._leaving.append(worker)
        worker.deadline = time.monotonic() + _LEAVE_TIMEOUT
        with contextlib.suppress(OSError):
            worker.pipe.send(("close", None))

    def _reap(self) -> None:
        for worker in list(self._leaving):
            late = worker.deadline is not None and time.monotonic() >= worker.deadline
            if late or worker.process.exitcode is not None:
                self._leaving.remove(worker)
                self._kill(worker)

    def close(self) -> None:
        """End all processes: idle ones by themselves, others by force."""
        for worker in list(self._workers):
            if worker.deadline is None:
                self._dismiss(worker)
            else:
                self._kill(worker)
        for worker in self._leaving:
            left = (worker.deadline or 0.0) - time.monotonic()
            worker.process.join(max(left, 0.0))
            self._kill(worker)
        self._leaving = []


def _serve(pipe: Connection, make: Callable[[], Environment]) -> None:
    """What a worker process runs, until it is told to end or the other side is gone."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        env = make()
    except Exception as error:  # Told to the other side, which decides what follows.
        pipe.send(("broken", f"{type(error).__name__}: {error}"[:1000]))
        return
    try:
        pipe.send(("ready", None))
        while True:
            kind, value = pipe.recv()
            if kind == "close":
                return
            try:
                reply = opening_of(env, value) if kind == "open" else step_of(env, value)
                pipe.send(("reply", reply))
            except Exception as error:  # Whatever it raises, it is the environment's fault.
                pipe.send(("fault", f"{type(error).__name__}: {error}"[:1000]))
    except (EOFError, OSError):
        _end_group(env)
    finally:
        env.close()


def _follow_parent() -> None:
    """End this process, whatever it is at, soon after the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        time.sleep(_LEAVE_TIMEOUT)
        _end_group()


def _end_group(env: Environment | None = None) -> None:
    """Close the environment, and end this process with all that it started."""
    with contextlib.suppress(Exception):
        if env is not None:
            env.close()
    if hasattr(os, "killpg"):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def make_host(config: EnvironmentConfig, step_timeout: float, capacity: int) -> Host:
    """What runs the environment: worker processes, or this one.

    Args:
        config: The environment.
        step_timeout: Seconds for a step, in a worker.
        capacity: Most episodes at once, in this process.
    """
    if not config.processes:
        return LocalHost(config.maker(), capacity)
    return WorkerHost(
        config.maker(),
        config.processes,
        step_timeout=step_timeout,
        restart_after=config.restart_after,
    )
