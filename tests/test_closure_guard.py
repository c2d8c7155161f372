import json

import pytest

from race_jax.closure_guard import GuardConfig, GuardState, watch

CONFIG = GuardConfig(limit=0.3, least=8, drop=0.5, backoff=0.25, recovery=1.5, patience=3)


FRESH = GuardState()


def follow(steps, config=CONFIG, state=FRESH):
    """States and signs after each of (success, closing, turns)."""
    out = []
    for success, closing, turns in steps:
        state, sign = watch(state, config, success=success, closing=closing, turns=turns)
        out.append((state, sign))
    return out


def test_closing_at_kept_turns_by_hand():
    steps = [(0.5, 0.1, 20), (0.5, 0.4, 20), (0.5, 0.31, 8), (0.5, 0.3, 8), (0.5, 0.0, 8)]
    got = follow(steps)
    # 1; times 1/4; times 1/4; 0.3 is not above the limit, so times 3/2, twice.
    assert [s.scale for s, _ in got] == pytest.approx([1, 1 / 4, 1 / 16, 3 / 32, 9 / 64])
    assert [s.alarms for s, _ in got] == [0, 1, 2, 0, 0]
    assert got[1][1] == (
        "the policy closes at once with probability 0.40 at 20 turns whose reasoning LoGiC kept "
        "(guard.limit 0.3)"
    )
    assert not got[0][1] and not got[3][1]


def test_few_turns_say_nothing_and_the_scale_never_exceeds_one():
    got = follow([(0.5, 0.9, 7), (0.5, 0.9, 0), (0.5, 0.9, 8), (0.5, 0.1, 9)] + [(0.5, 0.1, 9)] * 9)
    assert [s.scale for s, _ in got[:3]] == [1, 1, 0.25]
    assert got[-1][0].scale == 1


def test_fallen_success_by_hand():
    got = follow([(0.8, 0, 0), (0.0, 0, 0), (0.0, 0, 0), (0.0, 0, 0), (1.0, 0, 0)])
    # 0.8; 0.7 * 0.8 = 0.56; 0.392 < 0.4, the half of 0.8; 0.2744; 0.7 * 0.2744 + 0.3 = 0.49208.
    assert [s.success for s, _ in got] == pytest.approx([0.8, 0.56, 0.392, 0.2744, 0.49208])
    assert [bool(sign) for _, sign in got] == [False, False, True, True, False]
    assert [s.scale for s, _ in got] == pytest.approx([1, 1, 1 / 4, 1 / 16, 3 / 32])
    assert all(s.best == 0.8 for s, _ in got)
    assert got[2][1] == (
        "success has fallen to 0.39 from 0.80, means over some steps (guard.drop 0.5)"
    )


def test_a_run_that_never_succeeds_has_lost_nothing():
    assert all(not sign for _, sign in follow([(0.0, 0, 0)] * 5))


def test_the_state_survives_json_exactly():
    state = follow([(1 / 3, 0.4, 9), (0.1, 0.0, 0), (0.7, 0.2, 30)])[-1][0]
    again = GuardState(**json.loads(json.dumps(state._asdict())))
    assert again == state
    rest = [(0.2, 0.31, 9), (0.1, 0.0, 9)]
    assert follow(rest, state=again) == follow(rest, state=state)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", 0.0),
        ("limit", float("nan")),
        ("least", 0),
        ("drop", 1.5),
        ("backoff", 1.0),
        ("recovery", 0.9),
        ("patience", 0),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"guard\.{field} is .*; it must be"):
        GuardConfig(**{field: value})
