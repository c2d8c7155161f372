"""Stopping in good order: a signal is noted, and taken between steps."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Within it, a first SIGTERM or SIGINT sets the event; a second one acts as it always does.

    Preemptible machines send SIGTERM shortly before they are taken away. Signals reach the main
    thread only; elsewhere the event is never set.
    """
    event = threading.Event()
    if not _takes_signals():
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


@contextlib.contextmanager
def on_interrupt(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within it, SIGINT calls `act` where it would have raised KeyboardInterrupt.

    Where signals are taken otherwise, in a job whose shell ignores them for instance, and in other
    threads than the main one, nothing changes.
    """
    usual = signal.default_int_handler
    if not _takes_signals() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, if need be a moment later.

    What is raised in a callback of the garbage collector is printed and forgotten, and JAX has one,
    which is mostly the first to run after a long call into native code.
    """
    callbacks = [call.__code__ for call in gc.callbacks if isinstance(call, FunctionType)]
    if frame is not None and frame.f_code in callbacks:
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
        return
    signal.default_int_handler(number, frame)


def _takes_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
