"""Stopping in good order: a signal is noted, and taken between steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


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
