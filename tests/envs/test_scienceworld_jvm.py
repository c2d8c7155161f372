import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from scienceworld_samples import call, needs_simulator

from race_jax.envs.base import EnvironmentFault
from race_jax.envs.scienceworld import ScienceWorld, ScienceWorldConfig
from race_jax.envs.scienceworld_text import VARIATIONS


def javas():
    """The JVMs that this process started and that still run."""
    children = psutil.Process().children(recursive=True)
    return {c.pid for c in children if c.name() == "java" and c.status() != "zombie"}


def gone(pid, seconds=5.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == "zombie" and os.getpid() != 1:
                return psutil.Process(pid).ppid() != os.getpid()
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@needs_simulator
def test_forty_episodes_leave_no_process_and_bounded_memory():
    before, this = javas(), psutil.Process()
    world = ScienceWorld(ScienceWorldConfig(restart_after=15))
    files, size, used, sizes = this.num_fds(), this.memory_info().rss, set(), []
    tasks = [f"{name}/{n}" for n in (0, 1) for name in VARIATIONS if "friction" not in name][:40]
    assert len(tasks) == 40
    for task in tasks:
        world.reset(task)
        for _ in range(3):
            world.step(call("look_around"))
        (java,) = javas() - before
        used.add(java)
        sizes.append(psutil.Process(java).memory_info().rss)
    world.close()
    assert len(used) == 3  # episodes 1-15, 16-30 and 31-40
    assert javas() == before and all(gone(pid) for pid in used)
    assert max(sizes) < 900e6  # 512 MB of heap, and what a JVM needs besides
    assert this.memory_info().rss - size < 100e6
    assert this.num_fds() <= files


@needs_simulator
def test_a_killed_jvm_is_a_fault_that_names_task_and_action_and_the_next_reset_works():
    world = ScienceWorld()
    try:
        first = world.reset("melt/3")
        world.step(call("look_around"))
        os.kill(pid_of(world), signal.SIGKILL)
        with pytest.raises(
            EnvironmentFault, match="'melt/3', last action 'wait1': the JVM has died"
        ):
            world.step(call("wait1"))
        with pytest.raises(ValueError, match="the episode is over"):
            world.step(call("wait1"))
        assert world.reset("melt/3") == first
        assert world.step(call("look_around")).observation in first
    finally:
        world.close()
    with pytest.raises(ValueError, match="the episode is over"):
        world.step(call("wait1"))


def pid_of(world):
    return world._jvm._process.pid


LOST = """
import logging, os, signal, threading, time
from race_jax.envs.base import EnvironmentFault
from race_jax.envs.scienceworld import ScienceWorld
world = ScienceWorld()
world.reset("melt/3")
os.kill(world._jvm._process.pid, signal.SIGSTOP)
threading.Timer(0.5, os.kill, (world._jvm._process.pid, signal.SIGKILL)).start()
try:
    world.step({"name": "wait1", "arguments": {}})
except EnvironmentFault as fault:
    print(fault)
print(logging.getLogger().handlers)
"""


@needs_simulator
def test_a_jvm_that_dies_at_work_is_one_fault_and_no_noise():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    fault, handlers = done.stdout.splitlines()
    assert "task 'melt/3', last action 'wait1': the JVM has died (exit status -9)" in fault
    assert (handlers, done.stderr, done.returncode) == ("[]", "", 0)


@needs_simulator
def test_a_stopped_jvm_is_a_fault_after_the_timeout_and_is_removed():
    world = ScienceWorld(ScienceWorldConfig(timeout=20.0))
    world.reset("melt/3")
    world._jvm._server._gateway_client.gateway_parameters.read_timeout = 0.3
    world._jvm._server._gateway_client.close()  # so that the next connection has that limit
    pid = pid_of(world)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentFault, match="task 'melt/3', last action 'wait1'"):
        world.step(call("wait1"))
    assert gone(pid)


@needs_simulator
def test_a_java_that_does_not_start_is_a_fault_with_its_words(monkeypatch, tmp_path):
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'no room for a heap' >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(EnvironmentFault, match="does not start ScienceWorld: no room for a heap"):
        ScienceWorld().reset("melt/3")


ORPHAN = """
import sys, time
from race_jax.envs.scienceworld import ScienceWorld
world = ScienceWorld()
world.reset("melt/3")
print(world._jvm._process.pid, flush=True)
if sys.argv[1] == "exit":
    sys.exit()
time.sleep(60)
"""


@needs_simulator
@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGKILL"])
def test_the_jvm_ends_with_the_process_that_started_it(end):
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, end], stdout=subprocess.PIPE, text=True
    ) as child:
        pid = int(child.stdout.readline())
        if end != "exit":
            child.send_signal(signal.Signals[end])
        child.wait(10)
    assert gone(pid)


@needs_simulator
def test_a_forgotten_world_takes_its_jvm_along():
    world = ScienceWorld()
    world.reset("melt/3")
    pid = pid_of(world)
    del world
    assert gone(pid)
