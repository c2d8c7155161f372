import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from race_jax.train.interrupt import interrupt, on_interrupt, stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_is_noted_and_a_second_acts_as_always(number):
    seen = []
    before = signal.signal(number, lambda *_: seen.append("own"))
    try:
        with stop_requests() as stop:
            assert not stop.is_set()
            os.kill(os.getpid(), number)
            assert stop.is_set()
            assert seen == []
            os.kill(os.getpid(), number)
            assert seen == ["own"]
        os.kill(os.getpid(), number)
        assert seen == ["own", "own"]
    finally:
        signal.signal(number, before)


def test_other_threads_are_left_alone():
    found = []

    def work():
        before = signal.getsignal(signal.SIGTERM)
        with stop_requests() as stop:
            found.append(signal.getsignal(signal.SIGTERM) is before and not stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


def test_an_interrupt_within_a_callback_of_the_collector_is_not_lost():
    inside = []

    def callback(phase, info):
        if not inside:
            inside.append(phase)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), on_interrupt(interrupt):
        gc.callbacks.append(callback)
        try:
            gc.collect()
            time.sleep(20)
        finally:
            gc.callbacks.remove(callback)
    assert inside == ["start"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_interrupts_are_ignored_they_stay_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with on_interrupt(interrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_module_that_is_interrupted_while_it_is_imported_cannot_swallow_it(tmp_path):
    module = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
except BaseException: pass
def run() -> int: return 0
"""
    (tmp_path / "swallowing.py").write_text(module)
    script = """
import signal, sys
from race_jax.train import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.COMMANDS[("swallow",)] = cli.Command("swallowing", "run", "")
sys.exit(cli.main(["swallow"]))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.strip().startswith(
        "race-jax swallow: interrupted; what was finished is kept"
    )
