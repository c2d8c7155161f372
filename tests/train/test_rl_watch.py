import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.closure_guard import GuardConfig, GuardState
from race_jax.rollout.loop import RunFailed
from race_jax.rollout.measures import measure
from race_jax.train.rl_config import PolicyLossConfig
from race_jax.train.rl_watch import (
    BARREN,
    Guard,
    barren_notice,
    check_start,
    closing_probe,
    count_barren,
)
from race_jax.train.step import ComputeConfig

CONFIG = GuardConfig(limit=0.3, least=2, backoff=0.5, recovery=2.0, patience=3)


def test_the_probe_by_hand():
    # Two states, three tokens: logits (0, ln 2, ln 5) give 1/8, 2/8 and 5/8; equal ones a third.
    head = jnp.log(jnp.array([[1.0, 1.0], [2.0, 1.0], [5.0, 1.0]]))
    hidden = jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [7.0, 7.0]]])
    batch = {
        "asked": jnp.array([[True, True, True, False]]),
        "targets": jnp.array([[2, 2, 2, 2]]),
    }
    got = jax.jit(closing_probe(1, ComputeConfig(dtype="float32")))(hidden, head, batch)
    assert float(got["closing"]) == pytest.approx(1 / 4 + 1 / 3 + 1 / 4, abs=1e-6)
    assert float(got["asked"]) == 3
    nothing = {**batch, "asked": jnp.zeros((1, 4), bool)}
    got = closing_probe(1, ComputeConfig(dtype="float32"))(hidden * np.nan, head, nothing)
    assert float(got["closing"]) == 0 and float(got["asked"]) == 0


def numbers(closing, success=0.5, turns=9):
    return {"rl/success": success, "rl/close_at_kept": closing, "rl/kept_turns": turns}


def test_a_guard_speaks_when_it_begins_and_when_it_is_done():
    guard = Guard(CONFIG, True, {})
    said = [guard.note(n, numbers(c)) for n, c in enumerate((0.1, 0.4, 0.5, 0.1, 0.1, 0.1), 1)]
    assert guard.scale == 1
    assert [bool(text) for text in said] == [False, True, False, False, True, False]
    assert "closes at once with probability 0.40 at 9 turns whose reasoning LoGiC kept" in said[1]
    assert "lambda is multiplied by 0.5" in said[1]
    assert said[4] == "step 5: lambda is back at its own value."


def test_a_guard_goes_on_from_a_checkpoint_and_gives_up_after_its_patience():
    guard = Guard(CONFIG, True, {})
    guard.note(1, numbers(0.4))
    guard = Guard(CONFIG, True, json.loads(json.dumps({"guard": guard.state._asdict()})))
    assert guard.scale == 0.5
    guard.note(2, numbers(0.4))
    with pytest.raises(RunFailed, match=r"3 steps in a row.*collapsed into closing"):
        guard.note(3, numbers(0.4))
    # The step that ended the run is not part of it.
    assert guard.state.alarms == 2


@pytest.mark.parametrize("active", [False, True])
def test_a_guard_that_is_off_does_nothing(active):
    guard = Guard(dataclasses.replace(CONFIG, enabled=not active), active, {})
    assert not guard.note(1, numbers(0.9))
    assert guard.scale == 1 and guard.state == GuardState()


def found(**changes):
    base = measure([], "step")
    told = {"episodes": 32, "turns": 4.0, "skip_ratio": 0.0, "truncated": 3, **changes}
    return dataclasses.replace(base, **told)


def test_a_start_that_never_closes_is_refused_and_cover_sft_named():
    with pytest.raises(ValueError, match=r"none of the 128 turns .* cover SFT comes first"):
        check_start(found(), PolicyLossConfig(), GuardConfig(), covered=True)
    with pytest.raises(ValueError, match=r"each of the 128 turns .* was cut off by a limit"):
        check_start(found(truncated=128), PolicyLossConfig(), GuardConfig(), covered=True)
    told = check_start(found(), PolicyLossConfig(closure=0), GuardConfig(), covered=True)
    assert "never closes" in told
    told = check_start(found(), PolicyLossConfig(), GuardConfig(enabled=False), covered=True)
    assert "never closes" in told


@pytest.mark.parametrize(
    ("changes", "covered"), [({"skip_ratio": 0.01}, True), ({"turns": 1.9}, True), ({}, False)]
)
def test_a_start_that_closes_now_and_then_or_was_hardly_seen_may_go_on(changes, covered):
    assert not check_start(found(**changes), PolicyLossConfig(), GuardConfig(), covered=covered)


def test_steps_without_success_are_counted_over_a_resume_and_told_with_causes():
    records = [{"rl/success": 0.0}, {"rl/success": 0.5}, {"rl/success": 0.0}, {"rl/success": 0}]
    assert count_barren(records) == 2
    assert count_barren([]) == count_barren(records[:2]) == 0
    assert [bool(barren_notice(n, found())) for n in range(BARREN + 2)] == [
        n == BARREN for n in range(BARREN + 2)
    ]
    said = barren_notice(BARREN, found(stops={"max_turns": 30, "done": 2}, reward=0.25))
    assert "for 5 steps" in said and "raise rollout.max_turns)" in said
    assert "is the task ever counted as solved?" in said and "max_turns 30, done 2" in said
    assert "too weak" in barren_notice(BARREN, found())
    said = barren_notice(BARREN, found(truncated=100, invalid=3.0, stops={"length": 32}))
    for cause in ("max_turn_tokens", "max_tokens", "the tools: SFT first"):
        assert cause in said
