"""Worker processes: what they leave behind when they end, and when the main process does."""

import os
import subprocess
import sys
import time

import pytest
from rollout_samples import Echo, Parent

from race_jax.rollout.hosts import Fault, LocalHost
from race_jax.rollout.workers import WorkerHost


def drain(host, seconds=30):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        replies = host.poll(1.0)
        if replies:
            return replies
    raise AssertionError("nothing came")


def gone(pid, seconds=5):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_killing_a_worker_kills_what_it_started_and_restarts_count_episodes():
    host = WorkerHost(Parent, 1, step_timeout=5.0, restart_after=2)
    host.open("x", "a")
    ((key, opening),) = drain(host)
    assert key == "x" and opening.tools == Echo.tools
    host.step("x", {"name": "say", "arguments": {"word": "hang"}})
    worker = host._workers[0].process
    host.release("x")  # in the middle of a step
    assert not worker.is_alive() and host._workers == []
    assert gone(int(opening.observation))
    for key in ("y", "z"):
        host.open(key, "a")
        assert drain(host)[0][0] == key
        (again,) = host._workers
        assert again.process.pid != worker.pid
        host.release(key)
    assert host._workers == [] and again.episodes == 2
    host.close()
    assert not again.process.is_alive()


def test_a_worker_killed_from_outside_is_noticed_while_it_is_idle_between_calls():
    host = WorkerHost(Echo, 1)
    host.open("x", "a")
    drain(host)
    host._workers[0].process.kill()
    host._workers[0].process.join()
    host.step("x", {"name": "say", "arguments": {"word": "a"}})
    ((_, fault),) = drain(host)
    assert isinstance(fault, Fault) and "died with exit code -9" in fault.error
    host.release("x")
    host.open("y", "a")
    assert drain(host)[0][0] == "y"
    host.close()


@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 1, "restart_after": -1}])
def test_host_settings_are_checked(settings):
    with pytest.raises(ValueError, match="it must be at least"):
        WorkerHost(Echo, **settings)
    with pytest.raises(ValueError, match="capacity is 0"):
        LocalHost(Echo, 0)


LAST_WORDS = """
from rollout_samples import Parent
from race_jax.rollout.workers import WorkerHost
if __name__ == "__main__":
    host = WorkerHost(Parent, 1)
    host.open("x", "a")
    while not (found := host.poll(1.0)):
        pass
    if {hang}:
        host.step("x", {{"name": "say", "arguments": {{"word": "hang"}}}})
    print(host._workers[0].process.pid, found[0][1].observation, flush=True)
    import time
    time.sleep(600)
"""


@pytest.mark.parametrize("hang", [False, True])
def test_workers_end_with_all_they_started_when_the_main_process_is_killed(tmp_path, hang):
    script = tmp_path / "main.py"
    script.write_text(LAST_WORDS.format(hang=hang))
    folder = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": folder}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2 and all(gone(pid, 20) for pid in pids)
