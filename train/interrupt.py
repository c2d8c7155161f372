"""Stopping in good order: a signal is taken between steps, and all processes agree on it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Within it, a first SIGTERM or SIGINT sets the event; a second one acts as it always does.

    Preemptible machines send SIGTERM shortly before they are taken away. Signals reach the main
    thread only; elsewhere the event is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}

    def back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(*_: object) -> None:
        event.set()
        back()

    for number in signals:
        signal.signal(number, note)
    try:
        yield event
    finally:
        back()


def any_process(flag: bool) -> bool:
    """Whether `flag` is set in any process: all must stop after the same step."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental.multihost_utils import process_allgather

    return bool(np.any(process_allgather(np.asarray(flag))))


def largest(count: int) -> int:
    """The largest `count` of any process: all must run the same program."""
    if jax.process_count() == 1:
        return count
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.asarray(count))))
