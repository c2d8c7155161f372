"""What the rollout loop asks of a sampler, be it a network on this machine's mesh or a server."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Protocol


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Draw from the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Draw from the this many most probable tokens; 0 for all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1], where 1 is no limit")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0, where 0 is no limit")


@dataclasses.dataclass(frozen=True)
class Request:
    """Tokens to be continued.

    Attributes:
        conversation: A later request with the same name and a prompt that begins with all that went
            before continues from the cache.
        prompt: All token ids so far, at least one.
        max_tokens: Most ids to sample, at least 1.
        stop: Ids that end the completion; the one that did is part of it.
        seed: With the prompt and the sampling it determines the completion, whatever else runs.
        sampling: How tokens are drawn.
        origin: A conversation that begins alike. A sampler that still has its cache may copy it as
            far as the two agree, so that nothing of it is forwarded again.
    """

    conversation: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[int, ...]
    seed: int
    sampling: SamplingConfig = SamplingConfig()
    origin: str | None = None

    def __post_init__(self):
        if not self.prompt:
            raise ValueError(f"the prompt of {self.conversation!r} is empty; give at least one id")
        if self.max_tokens < 1:
            raise ValueError(
                f"max_tokens of {self.conversation!r} is {self.max_tokens}; it must be at least 1"
            )


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was sampled for a request.

    Attributes:
        conversation: The request's.
        tokens: Sampled ids, the stop id included.
        logprobs: One per id, in nats: of the full distribution at the sampling temperature, before
            top-p and top-k; at temperature 0, of the distribution at temperature 1.
        reason: `stop` when a stop id was drawn, `length` when `max_tokens` or the model's context
            were reached, `error` when the request failed and `tokens` is what there was before.
        error: What failed.
    """

    conversation: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Literal["stop", "length", "error"]
    error: str | None = None


class Sampler(Protocol):
    """Continues many conversations at once.

    A caller submits requests, one at a time per conversation, and polls for completions, which come
    in any order. Nothing here raises for one request's fault: that comes back as its completion.
    """

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request."""
        ...

    def poll(self, timeout: float | None = None) -> list[Completion]:
        """Work until something is finished, `timeout` seconds have passed, or nothing is queued."""
        ...

    def forget(self, conversation: str) -> None:
        """Drop a conversation's cache, and its request if one is still queued or running."""
        ...

    def close(self) -> None:
        """Free what the sampler holds."""
        ...
