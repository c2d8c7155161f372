"""Host objects that pass between the parts: trajectories as messages and as token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

Params = Any
"""A pytree of model parameters."""
Cache = Any
"""A pytree that holds the prefix state of several sequences, one per slot."""
Rows = Any
"""A pytree of cache entries copied out of a cache."""
States = Any
"""A pytree of recurrent states copied out of a cache."""
Message = dict[str, Any]
"""One chat message: `role`, `content`, and for assistants `reasoning_content`, `tool_calls`."""


def is_turn(message: Mapping[str, Any]) -> bool:
    """Whether the policy took this message: an assistant's, unless its `loss` is false or 0."""
    loss = message.get("loss")
    return message.get("role") == "assistant" and (loss is None or bool(loss))


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A finished episode in chat-message form, or as token ids with span kinds.

    Attributes:
        id: Name, unique in its file.
        messages: System, user, assistant and tool messages in order. Each assistant message is one
            turn, unless it carries `loss` false: then it is part of the prompt. Empty when the
            trajectory came as token ids.
        tools: Tool schemas, each `{"type": "function", "function": {...}}`.
        reward: Outcome, any scale; None when unknown.
        success: Whether the task was solved; None when unknown.
        extra: The source's other keys, kept as they are.
        tokens: The trajectory as token ids, when the source gave it so.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    success: bool | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: TokenTrajectory | None = None


@dataclasses.dataclass(frozen=True)
class TokenTurn:
    r"""One turn as token ids: (reasoning or skip) + action + observation.

    Attributes:
        reasoning: The sampled reasoning, through its closing `</think>\n\n`; empty when the turn
            was taken without reasoning.
        skip: What stands there when the turn does not reason.
        action: Content and tool calls, through the end-of-turn token. These are the M tokens of
            RACE eq. 4.
        observation: All that the environment and the template add before the next sampled token,
            the next generation prompt included; may be empty at the last turn.
    """

    reasoning: tuple[int, ...]
    skip: tuple[int, ...]
    action: tuple[int, ...]
    observation: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TokenTrajectory:
    """A trajectory as token ids. Turns are numbered from 0 here, from 1 in files and reports.

    Attributes:
        id: Name, unique in its file.
        prompt: Ids up to and including the first generation prompt.
        turns: The turns in order, at least one.
    """

    id: str
    prompt: tuple[int, ...]
    turns: tuple[TokenTurn, ...]

    @property
    def reasoned(self) -> tuple[int, ...]:
        """Indices of the turns that carry reasoning."""
        return tuple(t for t, turn in enumerate(self.turns) if turn.reasoning)

    def assemble(self, removed: Collection[int] = ()) -> Assembled:
        """Lay the trajectory out as one sequence, with the reasoning of `removed` turns taken out.

        Args:
            removed: Turn indices whose reasoning is replaced by the skip form.

        Returns:
            The ids and where each turn and action lies in them.
        """
        ids = list(self.prompt)
        starts, actions = [], []
        for t, turn in enumerate(self.turns):
            starts.append(len(ids))
            ids += turn.skip if t in removed or not turn.reasoning else turn.reasoning
            actions.append((len(ids), len(ids) + len(turn.action)))
            ids += turn.action
            ids += turn.observation
        return Assembled(
            np.asarray(ids, np.int32), np.asarray(starts, np.int32), np.asarray(actions, np.int32)
        )


class Assembled(NamedTuple):
    """A trajectory laid out as one sequence.

    Attributes:
        tokens: int32 [T_tokens].
        starts: int32 [turns], where each turn's first sampled token lies.
        actions: int32 [turns, 2], the half-open range of each turn's action tokens.
    """

    tokens: np.ndarray
    starts: np.ndarray
    actions: np.ndarray


class LanguageModel(Protocol):
    """What the algorithms ask of a network: pure functions of params and arrays.

    `forward` sees whole rows; `extend` appends rows of tokens to cached sequences. Both return the
    hidden states after the final norm, in float32, so that the head can run in float32 on the
    positions that are needed.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the head."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens that the model takes in one sequence."""
        ...

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Hidden states float32 [B, T, D] of rows `tokens` int32 [B, T]."""
        ...

    def head(self, params: Params) -> jax.Array:
        """The output matrix [V, D]."""
        ...

    def init_cache(self, params: Params, slots: int, length: int) -> Cache:
        """An empty cache for `slots` sequences of at most `length` tokens, and one spare slot."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether a slot holds states that only move forward, beside entries per token.

        Such a slot can be continued only from where it stands, or from states that `read_states`
        copied there. Rows of one call that share a slot must then be in order, and only the last
        may be short.
        """
        ...

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        slots: jax.Array,
        starts: jax.Array,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Append row r (int32 [R, Q]) to slot `slots[r]` at position `starts[r]`.

        The first `counts[r]` tokens of a row count, all of them by default; what follows may leave
        entries behind, but no trace in a recurrent state. Rows may continue one another in the same
        slot. Returns hidden float32 [R, Q, D].
        """
        ...

    def read_rows(self, cache: Cache, slots: jax.Array, starts: jax.Array, size: int) -> Rows:
        """Copy `size` entries from each `(slots[r], starts[r])` out of the cache."""
        ...

    def write_rows(self, cache: Cache, rows: Rows, slots: jax.Array, starts: jax.Array) -> Cache:
        """Put rows that `read_rows` copied back."""
        ...

    def read_states(self, cache: Cache, slots: jax.Array) -> States:
        """Copy the recurrent states of `slots` as they stand; nothing where there are none."""
        ...

    def write_states(self, cache: Cache, states: States, slots: jax.Array) -> Cache:
        """Put states that `read_states` copied back."""
        ...
