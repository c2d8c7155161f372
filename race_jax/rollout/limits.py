"""The limits of an episode: its settings, its stop reasons, and what bounds texts and seeds."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from typing import Any, Literal, get_args

from race_jax.rollout.protocol import SamplingConfig
from race_jax.trajectory_messages import short

StopReason = Literal[
    "done",
    "max_turns",
    "length",
    "invalid_calls",
    "env_error",
    "timeout",
    "sampler_error",
    "diverged",
]
"""Why an episode ended: the environment said so, a limit was reached, or something failed; the last
one means that an environment did not repeat what it had said under the same calls."""

FAULTS = ("env_error", "timeout", "sampler_error", "diverged")
"""Stop reasons that are no doing of the policy's."""

CallsPerTurn = Literal["one", "several"]

_SURROGATE = re.compile("[\ud800-\udfff]")

MAX_REPLY = 500
"""Characters of a message that answers an invalid call."""


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Limits and sampling of episodes.

    Attributes:
        max_turns: Turns of an episode, at least 1.
        max_turn_tokens: Ids sampled in one turn, at least 1.
        max_tokens: Ids of a whole trajectory, prompt and observations included, at least 2. The
            sampler's context length bounds it too.
        calls_per_turn: With `one`, the first call of a turn is carried out and the others are
            answered with a message; with `several`, all are carried out in order.
        max_invalid: So many turns in a row without a call that could be carried out end the
            episode, at least 1.
        max_observation: Characters of one observation; what is longer loses its middle.
        step_timeout: Seconds that the environment may take for one step, or to begin.
        episode_timeout: Seconds from an episode's beginning.
        max_faults: So many episodes in a row that environment or sampler spoilt end the run, at
            least 1.
        sampling: How tokens are drawn.
        seed: With task, sample and turn it determines the seed of each request.
    """

    max_turns: int = 30
    max_turn_tokens: int = 4096
    max_tokens: int = 65_536
    calls_per_turn: CallsPerTurn = "one"
    max_invalid: int = 3
    max_observation: int = 16_000
    step_timeout: float = 120.0
    episode_timeout: float = 3600.0
    max_faults: int = 16
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    seed: int = 0

    def __post_init__(self):
        least = {
            "max_turns": 1,
            "max_turn_tokens": 1,
            "max_tokens": 2,
            "max_invalid": 1,
            "max_observation": 100,
            "max_faults": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {bound}")
        for name in ("step_timeout", "episode_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a number of seconds above 0")
        if self.calls_per_turn not in get_args(CallsPerTurn):
            raise ValueError(
                f"calls_per_turn is {self.calls_per_turn!r}; it must be 'one' or 'several'"
            )


def request_seed(seed: int, task: str, sample: int, turn: int) -> int:
    """The seed of one request, in [0, 2**31), which every sampler takes.

    It depends on nothing else, so an episode comes out the same whatever runs beside it.
    """
    text = f"{seed}\0{task}\0{sample}\0{turn}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def bound_text(text: Any, limit: int) -> str:
    """An environment's text in at most `limit` characters and in valid Unicode.

    Too long a text loses its middle, and says so there. Halves of surrogate pairs become U+FFFD.

    Args:
        text: The text.
        limit: Characters, at least 100.

    Raises:
        ValueError: It is no text.
    """
    if not isinstance(text, str):
        raise ValueError(f"an observation is {short(text)}; it must be text")
    if len(text) > limit:
        # The note takes less than the 60 characters that are cut for it.
        cut = len(text) - limit + 60
        head = (limit - 60) * 3 // 4
        text = f"{text[:head]}\n[... {cut} characters left out ...]\n{text[head + cut :]}"
    return _SURROGATE.sub("\ufffd", text)
