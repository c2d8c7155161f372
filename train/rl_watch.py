"""What a run of RL looks out for: collapse into closing, and starts that teach nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from race_jax.closure_guard import GuardConfig, GuardState, watch
from race_jax.masked import masked_sum
from race_jax.rollout.loop import RunFailed
from race_jax.rollout.measures import Measures, stops_line
from race_jax.train.rl_config import PolicyLossConfig
from race_jax.train.step import Arrays, ComputeConfig, Probe, logprobs_at

ASKED = 64
"""Kept turns of a row of which the guard asks; more would not change a mean."""
BARREN = 5
"""Steps without a single success after which a run says so, and again after as many more."""
TURNS = 64
"""Turns of a first step without which it says nothing about the start policy."""


def closing_probe(close: int, compute: ComputeConfig) -> Probe:
    """What asks, on the hidden states of an update, how probable closing at once was at kept turns.

    Args:
        close: Id of what closes a block at its first place.
        compute: How the update computes.

    Returns:
        A function that gives `closing`, the sum of pi(close), and `asked`, its terms; nothing for
        rows that do not say which turns were kept.
    """

    def probe(hidden: jax.Array, head: jax.Array, batch: Arrays) -> dict[str, jax.Array]:
        if "asked" not in batch:
            return {}
        asked = {
            "loss_mask": batch["asked"],
            "targets": jnp.full_like(batch["targets"], close),
        }
        places = min(ASKED, batch["asked"].shape[1])
        nats, there = logprobs_at(hidden, head, asked, places, compute)
        return {
            "closing": masked_sum(jnp.exp(nats), there["loss_mask"]),
            "asked": jnp.sum(there["loss_mask"], dtype=jnp.float32),
        }

    return probe


class Guard:
    """`race_jax.closure_guard` in a run: keeps its state, and says what it does.

    Attributes:
        state: After the last step; it goes into the checkpoint.
    """

    def __init__(self, config: GuardConfig, closing: bool, notes: Mapping[str, Any]):
        """Begin, or go on.

        Args:
            config: Its settings.
            closing: Whether the run has a closure loss at all.
            notes: Those of the checkpoint that the run goes on from.
        """
        self.config, self.active = config, config.enabled and closing
        self.state = GuardState(**notes.get("guard", {}))

    @property
    def scale(self) -> float:
        """Factor on lambda in the next step."""
        return self.state.scale if self.active else 1.0

    def note(self, step: int, numbers: Mapping[str, float]) -> str:
        """Take a step's numbers; what is to be shown, if anything.

        Raises:
            RunFailed: So many steps in a row showed a sign of collapse that the run ends.
        """
        if not self.active:
            return ""
        before = self.state
        after, sign = watch(
            before,
            self.config,
            success=numbers["rl/success"],
            closing=numbers.get("rl/close_at_kept", 0.0),
            turns=int(numbers.get("rl/kept_turns", 0)),
        )
        if after.alarms >= self.config.patience:
            raise RunFailed(
                f"step {step}: {sign}, and so or alike for {after.alarms} steps in a row "
                "(guard.patience), although lambda backed off: the policy has collapsed into "
                "closing. Begin a new run, with a lower loss.closure or optimizer.lr, a "
                "loss.closure_warmup, or a start from more cover SFT."
            )
        self.state = after
        if sign and not before.alarms:
            return (
                f"step {step}: {sign}. This is how RL collapses into closing everywhere, so lambda "
                f"is multiplied by {self.config.backoff} from here on, each step until it stops."
            )
        if before.scale < 1 and after.scale == 1:
            return f"step {step}: lambda is back at its own value."
        return ""


def check_start(
    found: Measures, loss: PolicyLossConfig, guard: GuardConfig, *, covered: bool
) -> str:
    """Whether the start policy, by its first step, can be taught to close; a warning, if any.

    Args:
        found: Measures of all episodes of step 1.
        loss: The run's loss.
        guard: The run's guard; one that is off lets everything pass.
        covered: Whether LoGiC runs.

    Raises:
        ValueError: It closes no block at once, or none at all, and the closure loss is on.
    """
    turns = round(found.turns * found.episodes)
    if turns < TURNS or not covered:
        return ""
    if found.truncated == turns:
        fault = (
            f"each of the {turns} turns of step 1 was cut off by a limit before it ended: the "
            "policy does not close its blocks"
        )
    elif found.skip_ratio == 0:
        fault = (
            f"none of the {turns} turns of step 1 went without reasoning: the policy never closes "
            "a block at once, so every removal looks harmful to LoGiC"
        )
    else:
        return ""
    remedy = "cover SFT comes first (race-jax sft with data.reasoning: cover)"
    if not (loss.closure and guard.enabled):
        return f"{fault}; {remedy}"
    raise ValueError(
        f"{fault}, and the closure loss would swamp the policy loss; {remedy}. To go on "
        "nevertheless, set loss.closure: 0 or guard.enabled: false. The finished episodes are kept."
    )


def count_barren(records: Iterable[Mapping[str, Any]]) -> int:
    """Steps at the end of a run's records in which no episode succeeded."""
    count = 0
    for record in records:
        count = 0 if record.get("rl/success", 1) else count + 1
    return count


def barren_notice(steps: int, found: Measures) -> str:
    """What to say after so many steps without a single success; empty most of the time.

    Args:
        steps: Steps without success, the last one included.
        found: Measures of the last step's episodes.
    """
    if not steps or steps % BARREN:
        return ""
    turns = max(found.turns * found.episodes, 1)
    causes = []
    if found.truncated > turns / 4:
        causes.append("turns are cut off (raise rollout.max_turn_tokens)")
    if found.stops.get("max_turns", 0) > found.episodes / 4:
        causes.append("episodes run out of turns (raise rollout.max_turns)")
    if found.stops.get("length", 0) > found.episodes / 4:
        causes.append("episodes run out of tokens (raise rollout.max_tokens)")
    if found.invalid > found.turns / 4:
        causes.append("calls are invalid (the start policy has not learnt the tools: SFT first)")
    if found.reward > 0:
        causes.append("rewards come but no success (is the task ever counted as solved?)")
    causes = causes or ["the start policy is too weak (SFT first), or the tasks too hard"]
    return (
        f"no episode has succeeded for {steps} steps, so nothing is learnt but from differences "
        f"in reward. Likely causes: {'; '.join(causes)}. Last {stops_line(found)}"
    )
