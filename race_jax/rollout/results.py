"""Finished episodes: as objects, as records that are trajectories too, in groups and in files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from race_jax.jsonl import JsonlLog, loads
from race_jax.rollout.limits import FAULTS, StopReason
from race_jax.settings import differing_settings
from race_jax.trajectories import from_json, to_json
from race_jax.trajectory_messages import short
from race_jax.types import Message, TokenTrajectory, Trajectory

KEY = "rollout"
"""Key of a record under which all stands that a trajectory of another source does not have."""

MADE_UNDER = "made_under"
"""Key, under `KEY` of a file's first record, of the settings that the file was made under."""


@dataclasses.dataclass(frozen=True)
class TurnNote:
    """What is known of a sampled turn beside its ids.

    Attributes:
        logprobs: One per sampled id in nats: those of reasoning (or skip) and action, without the
            first `forced`.
        reasoning_tokens: Ids of reasoning, its closing included; 0 in a SKIP turn.
        truncated: Whether a limit cut the turn off.
        carried_out: Calls that the environment carried out.
        errors: Why other calls, or the turn, were not carried out, as the policy was told.
        forced: Ids at the turn's beginning that were given, not sampled.
        drafted: Ids that were sampled for the turn and thrown away.
    """

    logprobs: tuple[float, ...]
    reasoning_tokens: int
    truncated: bool
    carried_out: int
    errors: tuple[str, ...] = ()
    forced: int = 0
    drafted: int = 0

    def record(self) -> dict[str, Any]:
        """Ready for JSON; log-probs to seven decimals, which is below float32's resolution."""
        return {**dataclasses.asdict(self), "logprobs": [round(v, 7) for v in self.logprobs]}


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A finished episode.

    Attributes:
        id: `env/task/sample`.
        env: Name of the environment.
        task: Name of the task.
        sample: Which of the task's samples, from 0.
        messages: The chat, with each text as the environment and the policy wrote it.
        tools: Schemas of the tools.
        reward: The episode's return where it ended.
        success: Whether the task was solved.
        stop: Why it ended.
        error: What failed, if something did.
        tokens: The ids; None if there is no turn.
        notes: One per turn.
        seconds: How long it took.
        parts: Further conversations of an agent that splits its task; their notes count too.
        fork: Which sample of the task the first turns are from, and how many there are; None if
            all are its own.
    """

    id: str
    env: str
    task: str
    sample: int
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    reward: float
    success: bool
    stop: StopReason
    error: str | None
    tokens: TokenTrajectory | None
    notes: tuple[TurnNote, ...]
    seconds: float = 0.0
    parts: tuple[Rollout, ...] = ()
    fork: tuple[int, int] | None = None

    @property
    def all_notes(self) -> tuple[TurnNote, ...]:
        """The notes of all conversations."""
        return self.notes + tuple(note for part in self.parts for note in part.notes)

    @property
    def faulty(self) -> bool:
        """Whether environment or sampler spoilt it."""
        return self.stop in FAULTS

    def record(self, settings: str = "") -> dict[str, Any]:
        """The record of a file, which `race_jax.trajectories` reads too if there is a turn.

        Args:
            settings: Digest of the settings that it was made under.
        """
        extra = {
            KEY: {
                "env": self.env,
                "task": self.task,
                "sample": self.sample,
                "stop": self.stop,
                "error": self.error,
                "seconds": round(self.seconds, 3),
                "settings": settings,
                "turns": [note.record() for note in self.notes],
            }
        }
        if self.fork is not None:
            extra[KEY]["fork"] = list(self.fork)
        if self.parts:
            extra[KEY]["parts"] = [part.record(settings) for part in self.parts]
        return to_json(
            Trajectory(
                id=self.id,
                messages=self.messages,
                tools=self.tools,
                reward=self.reward,
                success=self.success,
                extra=extra,
                tokens=self.tokens,
            )
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Rollout:
        """The rollout of a record.

        Raises:
            ValueError: The record is not one that `record` makes.
        """
        if not isinstance(record, Mapping):
            raise ValueError(f"the record is {short(record)}, no rollout; it must be an object")
        name, notes = record.get("id"), record.get(KEY)
        if not isinstance(notes, Mapping) or notes.get("stop") not in get_args(StopReason):
            what = "the record" if name is None else f"the record {name!r}"
            raise ValueError(
                f"{what} is no rollout: it has no `{KEY}` with a `stop`, as those of race-jax "
                "evaluate, rl and carl have"
            )
        turns = notes.get("turns", ())
        if not isinstance(turns, list | tuple):
            raise ValueError(
                f"the rollout {name!r} has the turns {short(turns)}; they must be a list"
            )
        # Without a turn it is no trajectory, so only its bare facts can be read.
        trajectory = from_json(record) if turns else Trajectory(str(name), ())
        if len(turns) != (len(trajectory.tokens.turns) if trajectory.tokens else 0):
            raise ValueError(f"the rollout {name!r} has notes on {len(turns)} turns, not on all")
        try:
            return cls(
                id=trajectory.id,
                env=notes["env"],
                task=notes["task"],
                sample=notes["sample"],
                messages=trajectory.messages,
                tools=trajectory.tools,
                reward=float(record["reward"]),
                success=bool(record["success"]),
                stop=cast(StopReason, notes["stop"]),
                error=notes.get("error"),
                tokens=trajectory.tokens,
                notes=tuple(
                    TurnNote(**{**turn, "logprobs": tuple(turn["logprobs"]), "errors": errors})
                    for turn in turns
                    for errors in [tuple(turn["errors"])]
                ),
                seconds=notes.get("seconds", 0.0),
                parts=tuple(cls.from_record(part) for part in notes.get("parts", ())),
                fork=_fork_of(notes.get("fork")),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the rollout {name!r} cannot be read: {error!r}") from None


def _fork_of(given: Any) -> tuple[int, int] | None:
    """Sample and turns of a record's fork."""
    if given is None:
        return None
    if (
        not isinstance(given, list | tuple)
        or len(given) != 2
        or not all(type(number) is int and number >= 0 for number in given)
    ):
        raise ValueError(
            f"its fork is {short(given)}; it must be [sample, turns], both whole and at least 0"
        )
    return given[0], given[1]


class Group(NamedTuple):
    """All samples of a task, spoilt ones too.

    Attributes:
        env: Name of the environment.
        task: Name of the task.
        rollouts: By sample.
    """

    env: str
    task: str
    rollouts: tuple[Rollout, ...]

    @property
    def usable(self) -> tuple[Rollout, ...]:
        """Those that hold a turn and that neither environment nor sampler spoilt."""
        return tuple(r for r in self.rollouts if r.tokens is not None and not r.faulty)


def gather(rollouts: Iterable[Rollout], samples: int) -> Iterator[Group]:
    """Put rollouts together by task.

    Args:
        rollouts: In any order.
        samples: How many there are of each task.

    Yields:
        Each group as soon as it is complete, and at the end those that never were.
    """
    open_groups: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        key = rollout.env, rollout.task
        group = open_groups.setdefault(key, [])
        group.append(rollout)
        if len(group) == samples:
            yield _group(open_groups.pop(key))
    for group in open_groups.values():
        yield _group(group)


def _group(rollouts: Sequence[Rollout]) -> Group:
    ordered = sorted(rollouts, key=lambda rollout: rollout.sample)
    return Group(ordered[0].env, ordered[0].task, tuple(ordered))


def digest_settings(settings: Mapping[str, Any]) -> str:
    """A short name for exactly these settings, which must be ready for JSON."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


class OtherSettings(ValueError):
    """A file holds rollouts that were made under other settings."""


class RolloutFile:
    """A file of rollouts that a stopped run continues; a context manager.

    Its first record holds the settings, and every record their digest. Rollouts without a single
    turn are no trajectories. They go to a file beside it, whose name ends in `.failed.jsonl`, and
    are run again.

    Attributes:
        path: The file.
        done: Names of the rollouts that it holds.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        """Open the file, or make it.

        Args:
            path: The file.
            settings: All that decides the rollouts.

        Raises:
            OtherSettings: The file holds rollouts made under other settings; the message names the
                fields that differ.
            ValueError: The file holds something else.
            OSError: It cannot be opened.
        """
        self.path = Path(path)
        self._given = dict(settings)
        self.failed = self.path.with_suffix(".failed.jsonl")
        self.settings = digest_settings(settings)
        self.done: set[str] = set()
        self._log = JsonlLog(self.path, owns=lambda record: KEY in record)
        try:
            for number, record in enumerate(self._log.records(), 1):
                self._note(number, record)
            self._failures = JsonlLog(self.failed, owns=lambda record: KEY in record)
        except BaseException:
            self._log.close()
            raise

    def _note(self, number: int, record: Mapping[str, Any]) -> None:
        notes = record.get(KEY)
        if not isinstance(notes, Mapping) or "id" not in record:
            raise ValueError(
                f"{self.path}, line {number} is no rollout; name another file for rollouts"
            )
        if notes.get("settings") != self.settings:
            raise OtherSettings(
                f"{self.path} holds rollouts made under other settings "
                f"({self._differences(notes)}); continue under the same, or name another file"
            )
        self.done.add(record["id"])

    def _differences(self, notes: Mapping[str, Any]) -> str:
        """Which settings a record was made under that are not those of now."""
        made = notes.get(MADE_UNDER)
        if not isinstance(made, Mapping):
            return "which ones it does not say, as files of earlier versions do not"
        given = json.loads(json.dumps(self._given))
        return "; ".join(differing_settings(made, given)) or "in how they are written"

    def append(self, rollout: Rollout) -> None:
        """Add a rollout; when this returns, it is on disk."""
        log = self._log if rollout.tokens is not None else self._failures
        record = rollout.record(self.settings)
        if rollout.tokens is not None and not self.done:
            record[KEY][MADE_UNDER] = self._given
        log.append(record)
        if rollout.tokens is not None:
            self.done.add(rollout.id)

    def close(self) -> None:
        """Release the files; the one of failures goes if it is empty."""
        self._log.close()
        self._failures.close()
        if self.failed.exists() and self.failed.stat().st_size == 0:
            self.failed.unlink()

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rollouts(path: str | Path) -> Iterator[Rollout]:
    """Read a file of rollouts, and then those beside it that failed without a turn.

    A failure counts only if no later try came to a turn.

    Raises:
        ValueError: A line is no rollout; the message names it.
        OSError: The file cannot be read.
    """
    seen: set[str] = set()
    for rollout in _read(Path(path)):
        seen.add(rollout.id)
        yield rollout
    failed = Path(path).with_suffix(".failed.jsonl")
    if failed.exists():
        latest = {rollout.id: rollout for rollout in _read(failed)}
        yield from (rollout for name, rollout in latest.items() if name not in seen)


def _read(path: Path) -> Iterator[Rollout]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield Rollout.from_record(loads(line).value)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
