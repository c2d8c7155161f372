"""`race-jax trajectories`: check a file of trajectories, or bring it to chat-message form."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Iterator

from race_jax.trajectories import Fault, Line, scan, write
from race_jax.types import Trajectory, is_turn


@dataclasses.dataclass
class Summary:
    """Counts over the lines of a file."""

    trajectories: int = 0
    turns: int = 0
    reasoned: int = 0
    known: int = 0
    solved: int = 0
    faults: int = 0
    faulty_lines: int = 0
    forms: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, line: Line) -> None:
        """Count one line."""
        self.faults += len(line.faults)
        self.faulty_lines += bool(line.faults)
        if line.form:
            self.forms[line.form] += 1
        if line.trajectory is None:
            return
        self.trajectories += 1
        reasoned = _reasoned(line.trajectory)
        self.turns += len(reasoned)
        self.reasoned += sum(reasoned)
        self.known += line.trajectory.success is not None
        self.solved += bool(line.trajectory.success)

    def __str__(self) -> str:
        per = f" ({self.turns / self.trajectories:.1f} per trajectory)" if self.trajectories else ""
        forms = ", ".join(f"{form} {count}" for form, count in sorted(self.forms.items()))
        lines = f" on {self.faulty_lines} lines" if self.faults else ""
        rows = [
            ("trajectories", str(self.trajectories)),
            ("turns", f"{self.turns}{per}"),
            ("with reasoning", f"{self.reasoned}{_share(self.reasoned, self.turns)}"),
            ("success", f"{self.solved} of {self.known} known{_share(self.solved, self.known)}"),
            ("forms", forms or "none"),
            ("faults", f"{self.faults}{lines}"),
        ]
        return "\n".join(f"{name:<16}{value}" for name, value in rows)


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def _reasoned(trajectory: Trajectory) -> list[bool]:
    """For each turn whether it carries reasoning."""
    if trajectory.tokens is not None:
        return [bool(turn.reasoning) for turn in trajectory.tokens.turns]
    turns = [message for message in trajectory.messages if is_turn(message)]
    return [bool(turn["reasoning_content"].strip()) for turn in turns]


def _show(file: str, fault: Fault) -> str:
    return f"{file}:{fault.line}: {fault.rule}: {fault.message}"


def _check_limit(limit_faults: int) -> None:
    if limit_faults < 0:
        raise ValueError(f"limit_faults is {limit_faults}; it must be 0 or more")


def check(file: str, limit_faults: int = 50) -> int:
    """Check a file of trajectories and name the line and the rule of each fault.

    Args:
        file: A file of JSON lines in any of the forms that are read.
        limit_faults: How many faults to print; all are counted.

    Returns:
        Exit status: 0 without faults, 1 with faults, 2 if the file cannot be read.

    Raises:
        ValueError: `limit_faults` is negative.
    """
    _check_limit(limit_faults)
    summary = Summary()
    try:
        for line in scan(file):
            for fault in line.faults[: max(0, limit_faults - summary.faults)]:
                print(_show(file, fault))
            summary.add(line)
    except OSError as error:
        print(f"{file} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    if summary.faults > limit_faults:
        print(f"... and {summary.faults - limit_faults} more faults")
    print(summary)
    return 1 if summary.faults else 0


def convert(file: str, out: str, limit_faults: int = 50) -> int:
    """Write the trajectories of a file in chat-message form, without the faulty lines.

    Args:
        file: A file of JSON lines in any of the forms that are read.
        out: The file to make or replace; it may be the same one.
        limit_faults: How many of the lines that are left out to name.

    Returns:
        Exit status: 0 without faults, 1 if lines were left out, 2 if a file cannot be read or
        written. If no line is good, `out` is not touched.

    Raises:
        ValueError: `limit_faults` is negative.
    """
    _check_limit(limit_faults)
    faults = 0

    def good() -> Iterator[Trajectory]:
        nonlocal faults
        any_good = False
        for line in scan(file):
            if line.trajectory is not None:
                any_good = True
                yield line.trajectory
                continue
            faults += 1
            if faults <= limit_faults:
                print(_show(file, line.faults[0]), file=sys.stderr)
        if not any_good:
            raise ValueError(f"{file} has no trajectory to convert; {out} was not written")

    try:
        written = write(out, good())
    except OSError as error:
        print(f"{error.filename or file}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1 if faults else 2
    print(f"{written} trajectories written to {out}, {faults} lines left out")
    return 1 if faults else 0
