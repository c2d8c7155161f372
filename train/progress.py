"""Progress of long work: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Meter:
    """Shows the share of work done, a rate and the time left; a context manager."""

    def __init__(self, console: Console, label: str, total: float, *, every: float = 10.0):
        """Set up.

        Args:
            console: Where to show it.
            label: What is going on.
            total: All work, in any unit.
            every: Seconds between lines where the console is no terminal.
        """
        self.console, self.label, self.total, self.every = console, label, total, every
        self.begun = self.told = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self.bar = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )
        self.task = self.bar.add_task(label, total=total, text="")

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def update(self, done: float, text: str = "") -> None:
        """Report that `done` of the total is done; `text` holds the figures of the moment."""
        now, spent = time.monotonic(), self.spent
        share = min(done / self.total, 1.0) if self.total else 1.0
        left = f"{duration(spent * (1 - share) / share)} left" if share > 0.01 else "time left: -"
        text = f"{share:4.0%}  {text}  {left}"
        self.bar.update(self.task, completed=min(done, self.total), text=text)
        if not self.console.is_terminal and now - self.told >= self.every:
            self.told = now
            self.console.print(f"{self.label}: {text}")
