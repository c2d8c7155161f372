import os
import signal
import threading

import pytest

from race_jax.train.interrupt import stop_requests


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
