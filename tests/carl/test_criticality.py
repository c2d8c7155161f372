"""How much hangs on a state: by hand, and from episodes that leave it."""

import dataclasses
import functools

import numpy as np
import pytest
from carl_samples import Digits, draw_words, grow, trees
from rollout_samples import ScriptedSampler, word_renderer

from race_jax.carl.criticality import (
    Judgement,
    by_key,
    compare_by_entropy,
    comparison_line,
    forked_states,
    plot_criticality,
    resampled_states,
    resampling_jobs,
    tool_of,
)
from race_jax.carl.tree import credit_trees
from race_jax.rollout.hosts import LocalHost
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import Runner


def state(entropy, criticality, turn=0, tool="say"):
    return Judgement("a", turn, tool, entropy, criticality, 4, (0.0, 1.0))


def play(jobs):
    renderer = word_renderer()
    sampler = ScriptedSampler(draw_words(renderer))
    runner = Runner(
        sampler, renderer, LocalHost(Digits), RolloutConfig(max_turns=8, max_tokens=4000), keep=True
    )
    return list(runner.run(jobs)), sampler


@pytest.fixture(scope="module")
def origin():
    return next(r for r in grow(("a",))[0] if r.sample == 0)


def test_one_action_is_sampled_and_the_rest_is_greedy(origin):
    jobs = resampling_jobs(origin, 3, [0, 2])
    assert [job.sample for job in jobs] == [1, 2, 3, 7, 8, 9]
    rollouts, sampler = play(jobs)
    for job in jobs:
        turn = (job.sample - 1) // 3
        requests = sampler.of(job.id)
        assert [r.sampling.temperature for r in requests] == [1.0] + [0.0] * (2 - turn)
        rollout = next(r for r in rollouts if r.sample == job.sample)
        assert rollout.tokens.turns[:turn] == origin.tokens.turns[:turn]
        assert rollout.fork == ((0, turn) if turn else None)
    assert len({r.seed for r in sampler.requests}) == len(sampler.requests)


def test_states_by_hand(origin):
    jobs = resampling_jobs(origin, 2, [0, 1, 2])
    rollouts, _ = play(jobs)

    def marked(rollout, reward, nats, **changes):
        turn = (rollout.sample - 1) // 2
        notes = list(rollout.notes)
        values = (-nats,) * len(notes[turn].logprobs)
        notes[turn] = dataclasses.replace(notes[turn], logprobs=values)
        return dataclasses.replace(rollout, reward=reward, notes=tuple(notes), **changes)

    by_sample = {r.sample: r for r in rollouts}
    given = [
        origin,  # no resampled action
        marked(by_sample[1], 1.0, 0.2),
        marked(by_sample[2], 0.0, 0.6),
        marked(by_sample[3], 0.5, 0.1),
        marked(by_sample[4], 0.5, 0.1),
        marked(by_sample[5], 0.5, 0.1),
        marked(by_sample[6], 0.5, 0.1, stop="env_error"),  # leaves one outcome: no state
    ]
    first, second = resampled_states(given[::-1], 2)
    assert (first.turn, first.tool, first.actions, first.outcomes) == (0, "say", 2, (1.0, 0.0))
    # Outcomes 1 and 0: mean 1/2, each 1/2 away.
    assert first.criticality == pytest.approx(0.5) and first.entropy == pytest.approx(0.4)
    assert (second.turn, second.criticality) == (1, 0.0)


def test_forked_states_of_trees_have_the_spread_of_their_childrens_values():
    grown = list(trees().values())
    for tree, credit in zip(grown, credit_trees(grown), strict=True):
        found = forked_states(tree, credit)
        wanted = [n for n, node in enumerate(tree.nodes) if node.actions > 1]
        assert len(found) == len(wanted)
        for got in found:
            assert got.actions == len(got.outcomes) >= 2
            assert got.criticality == pytest.approx(np.std(got.outcomes))
        assert tool_of(tree.rollouts[0], 0) == "say" and tool_of(tree.rollouts[0], 99) == ""


def test_comparison_by_hand():
    states = [state(0.1, 0.0), state(0.2, 0.3), state(0.3, 0.2), state(0.4, 0.4)]
    told = compare_by_entropy(states)
    assert told.median == pytest.approx(0.25)
    assert (told.low, told.high) == ((0.0, 0.3), (0.2, 0.4))
    # 0.2 > 0.0, 0.2 < 0.3, 0.4 > both: (3 - 1) / 4.
    assert told.delta == pytest.approx(0.5)
    assert told.p is not None and 0 < told.p < 1
    assert comparison_line(told).startswith("Cliff's delta +0.50, Brunner-Munzel p 0.")


@pytest.mark.parametrize(
    ("states", "delta"),
    [
        ([state(0.1, 0.0)], None),
        ([state(0.1, 0.0), state(0.1, 0.3)], None),  # one entropy only
        ([state(0.1, 0.0), state(0.2, 0.0)], 0.0),
        ([state(h, 0.0) for h in (0.1, 0.2, 0.3, 0.4)], 0.0),  # no spread
        ([state(h, float(h > 0.25)) for h in (0.1, 0.2, 0.3, 0.4)], 1.0),  # all apart
    ],
)
def test_where_the_test_is_not_defined_it_says_so(states, delta, recwarn):
    told = compare_by_entropy(states)
    assert (told.delta, told.p) == (delta, None)
    assert "not defined" in comparison_line(told) or "the same entropy" in comparison_line(told)
    assert not recwarn.list


def test_many_states_with_a_real_difference_are_found():
    rng = np.random.default_rng(0)
    entropies = rng.random(200)
    told = compare_by_entropy([state(h, h + rng.normal()) for h in entropies])
    assert told.delta > 0.1 and told.p < 0.05


def test_means_by_key():
    table = by_key([state(0.1, 0.2, 10), state(0.3, 0.4, 10), state(1, 1, 2)], lambda s: s.turn)
    assert list(table) == ["2", "10"]
    assert table["10"] == pytest.approx({"states": 2, "criticality": 0.3, "entropy": 0.2})


@pytest.mark.parametrize("count", [1, 40])
def test_plot(tmp_path, count):
    states = [state(0.1 * n, 0.1 * n % 0.5, n % 7, f"$tool_{n % 3}") for n in range(count)]
    plot_criticality(states, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no state with two outcomes"):
        plot_criticality([], tmp_path / "none.png")


def test_a_turn_that_is_not_there_is_refused(origin):
    with pytest.raises(ValueError, match="cannot be left at turn 3"):
        resampling_jobs(origin, 2, [3])


def test_a_longer_world_keeps_its_prefix():
    make = functools.partial(Digits, turns=5)
    first = next(r for r in grow(("a",), make=make)[0] if r.sample == 0)
    (job,) = resampling_jobs(first, 1, [4])
    assert len(job.fork.completions) == 4 and job.greedy_from == 5
