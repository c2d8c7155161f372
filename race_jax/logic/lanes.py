"""Engines side by side, each in a thread of its own.

A step of the engine on a CPU has long stretches that one core runs alone: the small products of
attention to a cache, and all that lies between the large ones. A second engine fills the other
cores meanwhile. On an accelerator one engine keeps the device busy by itself.
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from race_jax.logic.cover import Cover, check_epsilons
from race_jax.logic.engine import Engine, Failure, Stats
from race_jax.sharding import ambient_mesh
from race_jax.types import TokenTrajectory


class _Stopped(Exception):
    """Ends a lane whose results nobody waits for."""


def default_lanes() -> int:
    """Two where a CPU of two cores or more computes, and no mesh; else one."""
    cpu = jax.default_backend() == "cpu" and ambient_mesh() is None
    return 2 if cpu and (os.cpu_count() or 1) > 1 else 1


class Lanes:
    """Several engines on one stream of trajectories; runs like a single one."""

    def __init__(self, engine: Engine, count: int | None = None):
        """Set `count` engines beside one another.

        Args:
            engine: The first; the others share its programs and parameters, and have caches of the
                same size of their own.
            count: How many, at least 1; `default_lanes()` by default.

        Raises:
            ValueError: `count` is not positive, or above 1 on a mesh.
        """
        count = default_lanes() if count is None else count
        if count < 1:
            raise ValueError(f"lanes is {count}: it must be at least 1")
        if count > 1 and ambient_mesh() is not None:
            # Two programs with collectives may meet the devices in different orders and wait for
            # one another.
            raise ValueError(f"lanes is {count}: on a mesh it must be 1")
        self.engines = [engine, *(copy.copy(engine) for _ in range(count - 1))]
        self.reset()

    def reset(self) -> None:
        """Forget what was spent."""
        for engine in self.engines:
            engine.stats = Stats()

    @property
    def stats(self) -> Stats:
        """What all engines have spent together."""
        return functools.reduce(Stats.plus, (engine.stats for engine in self.engines))

    def warm(self) -> None:
        """Compile every program."""
        self.engines[0].warm()

    def run(
        self,
        trajectories: Iterable[TokenTrajectory],
        epsilons: Sequence[float],
        on_step: Callable[[Stats], None] | None = None,
    ) -> Iterator[list[Cover] | Failure]:
        """Decide every trajectory, as `Engine.run` does; the lanes take them one by one.

        `trajectories` and `on_step` are called from any of the threads, by one at a time.

        Raises:
            Exception: What a lane or `trajectories` raised, after the results before it.
        """
        check_epsilons(epsilons)
        if len(self.engines) == 1:
            yield from self.engines[0].run(trajectories, epsilons, on_step)
            return
        results: queue.SimpleQueue = queue.SimpleQueue()
        reading, telling, stop = threading.Lock(), threading.Lock(), threading.Event()
        source = iter(trajectories)

        def feed() -> Iterator[TokenTrajectory]:
            while True:
                with reading:
                    item = None if stop.is_set() else next(source, None)
                if item is None:
                    return
                yield item

        def after_step(_: Stats) -> None:
            if stop.is_set():
                raise _Stopped
            if on_step:
                with telling:
                    on_step(self.stats)

        def work(engine: Engine) -> None:
            end: BaseException | None = None
            try:
                for item in engine.run(feed(), epsilons, after_step):
                    results.put(item)
            except BaseException as error:
                end = error
            results.put(_End(end))

        threads = [
            threading.Thread(target=work, args=(engine,), daemon=True) for engine in self.engines
        ]
        for thread in threads:
            thread.start()
        open_lanes = len(threads)
        try:
            while open_lanes:
                item = results.get()
                if not isinstance(item, _End):
                    yield item
                elif item.error:
                    raise item.error
                else:
                    open_lanes -= 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()


class _End:
    """What a lane leaves last: nothing, or the error that ended it."""

    def __init__(self, error: BaseException | None):
        self.error = error
