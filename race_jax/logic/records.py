"""LoGiC's output: one JSON object per trajectory and threshold."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from race_jax.logic.cover import Cover
from race_jax.types import Message, TokenTrajectory, Trajectory, is_turn

THINK, SKIP = "THINK", "SKIP"
SEGMENTS = ("reasoning", "skip", "action", "observation")


def digest_of(tokens: TokenTrajectory) -> str:
    """A short name for exactly these token ids and segments, the `input_id` of a record."""
    ids: list[int] = [*tokens.prompt]
    for turn in tokens.turns:
        for part in (turn.reasoning, turn.skip, turn.action, turn.observation):
            ids += [-1, *part]
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:12]


def _round(values) -> list[float]:
    """Seven decimals: below float32's resolution of these values, and easy to read."""
    return [round(float(v), 7) for v in values]


def cover_record(
    cover: Cover,
    tokens: TokenTrajectory,
    trajectory: Trajectory,
    messages: list[Message],
    *,
    noise_floor: float,
    opener: int = 0,
    save_tokens: bool = False,
) -> dict[str, Any]:
    """The record of one cover, in the order in which its keys are documented.

    Args:
        cover: The decisions.
        tokens: What was scored.
        trajectory: Where it came from.
        messages: The compressed trajectory.
        noise_floor: How far the same likelihood moves with padding and chunking, nats per token.
        opener: Tokens of the think block's opening that each reasoning segment begins with; they
            are not sampled, so they do not count as reasoning.
        save_tokens: Whether to add the token ids.

    Returns:
        A JSON-ready object, without the settings of the run. Turns count from 1.
    """
    removals = {r.turn: r for r in cover.removals}
    turns = []
    for t, turn in enumerate(tokens.turns):
        test = removals.get(t)
        kept = bool(turn.reasoning) and not (test and test.accepted)
        near = bool(test) and abs(test.max_decrease - cover.epsilon) < noise_floor
        turns.append(
            {
                "turn": t + 1,
                "decision": THINK if kept else SKIP,
                "tested": test is not None,
                "max_decrease": round(test.max_decrease, 7) if test else None,
                "worst_turn": test.worst_turn + 1 if test else None,
                "uncertain": near,
                "reasoning_tokens": max(len(turn.reasoning) - opener, 0),
                "action_tokens": len(turn.action),
            }
        )
    last = len(tokens.turns)
    record = {
        "id": cover.id,
        "epsilon": cover.epsilon,
        "noise_floor": noise_floor,
        "turns": turns,
        "loglik_full": _round(cover.loglik_full),
        "loglik_final": _round(cover.loglik_final),
        "decreases": {
            str(r.turn + 1): _round(r.decreases) + [None] * (last - r.turn - len(r.decreases))
            for r in cover.removals
        },
        "tokens_forwarded": cover.tokens_forwarded,
        "tokens_minimum": cover.tokens_minimum,
        "tokens_naive": cover.tokens_naive,
        "tokens_shared": cover.tokens_shared,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "original_reasoning": [
            str(m.get("reasoning_content") or "") for m in trajectory.messages if is_turn(m)
        ],
        "tools": [dict(tool) for tool in trajectory.tools],
        "messages": messages,
    }
    if save_tokens:
        record["tokens"] = {
            "prompt": list(tokens.prompt),
            "turns": [
                {part: list(getattr(turn, part)) for part in SEGMENTS} for turn in tokens.turns
            ],
        }
    return record
