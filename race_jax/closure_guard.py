"""A guard against collapse: lambda of the closure loss backs off when closing spreads too far.

The closure loss teaches `</think>` at turns whose reasoning LoGiC removed. What it teaches can
spread to turns that need their reasoning; then no episode succeeds, no cover is found, and nothing
is left that could undo it. Two signs show this early: the probability of closing at once at turns
whose reasoning LoGiC *kept*, and success that falls far below the best of the run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from race_jax.settings import check_rules

SMOOTHING = 0.7
"""Weight of the past in the running success: about three steps."""


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """When lambda backs off, and how.

    Attributes:
        enabled: Whether it does; without it lambda follows its settings alone.
        limit: Highest mean probability of closing at once, over kept turns.
        least: Kept turns in a step without which that mean says nothing.
        drop: Share of the best running success that may be lost.
        backoff: Factor on lambda after a step that shows either sign.
        recovery: Factor on lambda after a step that shows neither, up to lambda's own value.
        patience: Steps in a row with a sign, after which the run ends.
    """

    enabled: bool = True
    limit: float = 0.3
    least: int = 8
    drop: float = 0.5
    backoff: float = 0.25
    recovery: float = 1.1
    patience: int = 20

    def __post_init__(self):
        rules = {
            "limit": (0 < self.limit <= 1, "above 0 and at most 1"),
            "least": (self.least >= 1, "at least 1"),
            "drop": (0 < self.drop <= 1, "above 0 and at most 1"),
            "backoff": (0 <= self.backoff < 1, "from 0 to below 1"),
            "recovery": (1 <= self.recovery < math.inf, "at least 1"),
            "patience": (self.patience >= 1, "at least 1"),
        }
        check_rules("guard", self, rules)


class GuardState(NamedTuple):
    """What the guard remembers from step to step; finite numbers only, so ready for JSON.

    Attributes:
        scale: Factor on lambda, in [0, 1].
        success: Running success; below 0 before the first step.
        best: The highest it has been.
        alarms: Steps in a row with a sign of collapse.
    """

    scale: float = 1.0
    success: float = -1.0
    best: float = 0.0
    alarms: int = 0


def watch(
    state: GuardState, config: GuardConfig, *, success: float, closing: float, turns: int
) -> tuple[GuardState, str]:
    """Take a step's numbers.

        s <- 0.7 s + 0.3 success;  best <- max(best, s)
        alarm if closing > limit (with at least `least` turns behind it), or s < (1 - drop) best
        scale <- scale * backoff on an alarm, else min(1, scale * recovery)

    A scale of 0, which `backoff` 0 makes, stays.

    Args:
        state: After the step before.
        config: The guard's settings.
        success: Share of the step's episodes that solved their task.
        closing: Mean probability of closing at once at kept turns; any value if `turns` is 0.
        turns: How many turns are behind it.

    Returns:
        The state after the step, and the sign of collapse in words; empty if there is none.
    """
    level = success if state.success < 0 else SMOOTHING * state.success + (1 - SMOOTHING) * success
    best = max(state.best, level)
    sign = ""
    if turns >= config.least and closing > config.limit:
        sign = (
            f"the policy closes at once with probability {closing:.2f} at {turns} turns whose "
            f"reasoning LoGiC kept (guard.limit {config.limit})"
        )
    elif level < (1 - config.drop) * best:
        sign = (
            f"success has fallen to {level:.2f} from {best:.2f}, means over some steps "
            f"(guard.drop {config.drop})"
        )
    scale = state.scale * config.backoff if sign else min(1.0, state.scale * config.recovery)
    return GuardState(scale, level, best, state.alarms + 1 if sign else 0), sign
