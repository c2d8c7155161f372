import dataclasses
import itertools

import numpy as np
import pytest
from toy import RecurrentToy, ToyModel, random_trajectory

from race_jax.logic.cover import find_cover, most_scored
from race_jax.logic.engine import Engine, Failure
from race_jax.logic.noise import RESOLUTION, freeze, noise_floor
from race_jax.logic.scoring import Scorer
from race_jax.logic.search import Outcome, Search
from race_jax.logic.seats import fit_slots
from race_jax.types import TokenTrajectory, TokenTurn

MODEL = ToyModel()
PARAMS = MODEL.init()
EPSILONS = (0.001, 0.05, 0.3, 1.0, 3.0)
TRAJECTORIES = [random_trajectory(seed, 1 + seed % 9) for seed in range(12)]
LENGTH = max(len(t.assemble().tokens) for t in TRAJECTORIES)
SCORER = Scorer(MODEL, PARAMS)
SIZES = (
    {"slots": 16, "rows": 32, "row_tokens": 16},
    {"slots": 3, "rows": 8, "row_tokens": 4},
    {"slots": 1, "rows": 1, "row_tokens": 5},
    {"slots": 2, "rows": 64, "row_tokens": 2},
)


def make(**sizes):
    return Engine(MODEL, PARAMS, length=LENGTH, **sizes)


def assert_same(got, want):
    assert [(r.turn, r.accepted, len(r.decreases)) for r in got.removals] == [
        (r.turn, r.accepted, len(r.decreases)) for r in want.removals
    ]
    for a, b in zip(got.removals, want.removals, strict=True):
        np.testing.assert_allclose(a.decreases, b.decreases, atol=1e-5)
    np.testing.assert_allclose(got.loglik_full, want.loglik_full, atol=1e-5)
    np.testing.assert_allclose(got.loglik_final, want.loglik_final, atol=1e-5)
    assert (got.tokens_minimum, got.tokens_naive) == (want.tokens_minimum, want.tokens_naive)
    assert got.tokens_minimum <= got.tokens_forwarded


@pytest.mark.parametrize("sizes", SIZES)
def test_equals_algorithm_1_at_every_threshold(sizes):
    results = {covers[0].id: covers for covers in make(**sizes).run(TRAJECTORIES, EPSILONS)}
    assert sorted(results) == sorted(t.id for t in TRAJECTORIES)
    shares = set()
    for trajectory in TRAJECTORIES:
        covers = results[trajectory.id]
        assert [c.epsilon for c in covers] == list(EPSILONS)
        for cover in covers:
            assert_same(cover, find_cover(trajectory, SCORER.score, cover.epsilon))
            shares.add(len(cover.removed) / max(len(cover.removals), 1))
    # The sample holds rejected, mixed and accepted trajectories, so all paths were taken.
    assert {0.0, 1.0} < shares


def test_thresholds_together_decide_as_each_alone():
    together = {c[0].id: c for c in make().run(TRAJECTORIES, EPSILONS)}
    for index, epsilon in enumerate(EPSILONS):
        for (alone,) in make().run(TRAJECTORIES, [epsilon]):
            assert_same(together[alone.id][index], alone)


def test_thresholds_together_forward_less_than_each_alone():
    together = make()
    list(together.run(TRAJECTORIES, EPSILONS))
    alone = 0
    for epsilon in EPSILONS:
        engine = make()
        list(engine.run(TRAJECTORIES, [epsilon]))
        alone += engine.stats.tokens
    assert together.stats.tokens < 0.6 * alone


def test_the_engine_can_run_again():
    engine = make(slots=2)
    first = {c[0].id: c[0] for c in engine.run(TRAJECTORIES, [0.3])}
    for (again,) in engine.run(TRAJECTORIES, [0.3]):
        assert_same(again, first[again.id])


def test_programs_do_not_grow_with_trajectories():
    engine = make(slots=4, rows=16, row_tokens=8)
    list(engine.run([random_trajectory(s, 1 + s % 7) for s in range(50)], [0.3]))
    assert engine._step._cache_size() <= len(engine.buckets)


def test_rows_forwarded_come_close_to_the_minimum():
    engine = make(slots=8, rows=16, row_tokens=2)
    covers = [c[0] for c in engine.run(TRAJECTORIES, [0.3])]
    minimum = sum(c.tokens_minimum for c in covers)
    assert minimum <= sum(c.tokens_forwarded for c in covers) <= engine.stats.tokens
    assert engine.stats.tokens < 1.1 * minimum


def test_trajectories_are_taken_as_slots_become_free():
    taken = []

    def source():
        for trajectory in TRAJECTORIES:
            taken.append(trajectory.id)
            yield trajectory

    run = make(slots=2).run(source(), [0.3])
    next(run)
    assert len(taken) < len(TRAJECTORIES)
    run.close()


def test_prompts_that_begin_alike_are_forwarded_once():
    system = tuple(range(3, 30)) * 3
    alike = [
        dataclasses.replace(t, prompt=(*system, *t.prompt))
        for t in TRAJECTORIES
        if len(t.turns) > 2
    ]
    length = LENGTH + len(system)
    sizes = {"slots": 3, "rows": 8, "row_tokens": 4}
    sharing = Engine(MODEL, PARAMS, length=length, **sizes)
    plain = Engine(MODEL, PARAMS, length=length, share_prompts=False, **sizes)
    apart = {c[0].id: c for c in plain.run(alike, EPSILONS)}
    for covers in sharing.run(alike, EPSILONS):
        for got, want in zip(covers, apart[covers[0].id], strict=True):
            assert [(r.turn, r.accepted) for r in got.removals] == [
                (r.turn, r.accepted) for r in want.removals
            ]
            np.testing.assert_allclose(got.loglik_full, want.loglik_full, atol=1e-5)
            assert got.tokens_forwarded + got.tokens_shared >= got.tokens_minimum
    assert plain.stats.shared == 0
    # All but the first take at least the system prompt from another's cache.
    assert sharing.stats.shared >= (len(alike) - 1) * (len(system) - sizes["row_tokens"])
    assert sharing.stats.tokens <= plain.stats.tokens - 0.9 * sharing.stats.shared


def test_a_failure_inside_a_shared_prompt_does_not_hold_the_others_up():
    params = dict(PARAMS, embed=PARAMS["embed"].at[31].set(np.nan))
    system = tuple(range(3, 30)) * 3
    turns = random_trajectory(3, 4, vocab=31).turns
    sound = [TokenTrajectory(f"s{i}", (*system, 4 + i), turns) for i in range(5)]
    bad = [TokenTrajectory(f"b{i}", (*system, 31, i), turns) for i in range(3)]
    order = [bad[0], sound[0], bad[1], *sound[1:], bad[2]]
    engine = Engine(MODEL, params, length=LENGTH + 200, slots=2, rows=2, row_tokens=4)
    results = list(engine.run(order, [0.3]))
    assert sum(isinstance(r, Failure) for r in results) == 3
    assert len(results) == 8


def test_a_parked_search_takes_its_prompt_along():
    # A search that returns from host memory overwrites a slot's cache; whoever is seated beside it
    # must not copy what the slot held before.
    rng = np.random.default_rng(2)
    base = rng.integers(3, 32, 60)
    family = []
    for i in range(8):
        trajectory = random_trajectory(200 + i, int(rng.integers(1, 6)))
        cut, other = int(rng.integers(0, 60)), rng.integers(3, 32, int(rng.integers(0, 30)))
        turned = (base + int(rng.integers(0, 3)) - 3) % 29 + 3
        prompt = (*turned[:cut].tolist(), *other.tolist(), 5)
        family.append(dataclasses.replace(trajectory, id=f"t{i}", prompt=prompt))
    length = max(most_scored(t) for t in family)
    engine = Engine(MODEL, PARAMS, length=length, slots=2, rows=8, row_tokens=2)
    results = {covers[0].id: covers for covers in engine.run(family, EPSILONS[:4])}
    assert engine.stats.shared > 0
    for trajectory in family:
        for cover in results[trajectory.id]:
            want = find_cover(trajectory, SCORER.score, cover.epsilon)
            assert cover.removed == want.removed
            np.testing.assert_allclose(cover.loglik_full, want.loglik_full, atol=1e-5)
            np.testing.assert_allclose(cover.loglik_final, want.loglik_final, atol=1e-5)


@pytest.mark.parametrize("skip", [(), (1, 9, 9, 9, 2)])
def test_skip_forms_without_ids_and_longer_than_the_reasoning(skip):
    turns = tuple(
        dataclasses.replace(turn, skip=skip, reasoning=turn.reasoning[: 2 if skip else None])
        for turn in TRAJECTORIES[8].turns
    )
    system = tuple(range(3, 19))
    pair = [TokenTrajectory(name, system, turns) for name in "ab"]
    # Exactly as long as needed, and the prompt ends with a row: nothing is there to spare.
    length = max(most_scored(t) for t in pair)
    engine = Engine(MODEL, PARAMS, length=length, slots=2, rows=8, row_tokens=4)
    for covers in engine.run(pair, EPSILONS):
        for cover in covers:
            want = find_cover(pair[0], SCORER.score, cover.epsilon)
            assert cover.removed == want.removed and cover.tokens_minimum == want.tokens_minimum
            np.testing.assert_allclose(cover.loglik_full, want.loglik_full, atol=1e-5)
            np.testing.assert_allclose(cover.loglik_final, want.loglik_final, atol=1e-5)
    assert engine.stats.shared > 0


def test_candidates_longer_than_the_engine_are_refused():
    turn = TokenTurn((1,), (1, 9, 2), (5, 6), (7,))
    trajectory = TokenTrajectory("long", (3, 4), (turn, turn, turn))
    assert most_scored(trajectory) == 2 + 3 * 4 - 2 + 2 * 2
    (result,) = Engine(MODEL, PARAMS, length=15).run([trajectory], [9.0])
    assert isinstance(result, Failure) and "16 tokens to score" in result.reason
    ((cover,),) = Engine(MODEL, PARAMS, length=16).run([trajectory], [9.0])
    assert cover.removed == (1, 2)


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (TokenTrajectory("bad", (3,), ()), "no turn"),
        (TokenTrajectory("bad", (3,), (TokenTurn((5,), (1,), (), ()),)), "action of turn 1 has no"),
        (TokenTrajectory("bad", (), (TokenTurn((), (), (3,), ()),)), "before its first action"),
    ],
)
def test_trajectories_without_likelihoods_are_named(trajectory, message):
    sound = TRAJECTORIES[1]
    failure, (cover,) = make(slots=1).run([trajectory, sound], [0.1])
    assert failure.id == "bad" and message in failure.reason and cover.id == sound.id
    with pytest.raises(ValueError, match=f"trajectory bad: .*{message}"):
        find_cover(trajectory, SCORER.score)


def test_the_same_trajectory_twice_gives_two_whole_results():
    results = list(make(slots=2).run([TRAJECTORIES[7]] * 2, EPSILONS))
    assert [[c.epsilon for c in covers] for covers in results] == [list(EPSILONS)] * 2


def test_an_accepted_likelihood_is_the_candidate_s_to_the_last_bit():
    # What is compared next must be what was computed: l - (l - l~) would be rounded.
    trajectory = TokenTrajectory("t", (3,), (TokenTurn((4,), (1,), (5, 5, 5), (6,)),) * 2)
    search = Search(trajectory, (1e9,))
    before, after = np.float32([-5, -1, -1]), np.float32([-0.1, -0.1, -0.2])
    full, removed = (x.astype(np.float64).mean() for x in (before, after))
    assert full - (full - removed) != removed
    for values in (before, after):
        for begin, end in search.sequence.actions:
            search.logprobs[begin:end] = values
        search.cursor = search.stop
        assert search.settle() in (Outcome.SCORED, Outcome.ACCEPTED)
        if search.turn is None:
            search.next_test()
    search.accept()
    assert search.current[1] == removed


def test_one_turn_and_no_reasoning_need_one_pass():
    bare = TokenTrajectory(
        "bare", (3, 4), tuple(TokenTurn((), (1, 2), (5, 6), (7,)) for _ in range(3))
    )
    single = TokenTrajectory("single", (3, 4), (TokenTurn((8, 1, 2), (1, 2), (5,), ()),))
    for (cover,) in make().run([bare, single], [0.1]):
        assert cover.removals == () and cover.tokens_minimum == cover.tokens_naive
        np.testing.assert_array_equal(cover.loglik_full, cover.loglik_final)


def test_a_bad_trajectory_costs_only_itself():
    # Token 31's embedding is not a number: the likelihoods that see it are none either.
    params = dict(PARAMS, embed=PARAMS["embed"].at[31].set(np.nan))
    sound = [random_trajectory(seed, 4, vocab=31) for seed in range(6)]
    poison = TokenTurn((3, 31, 2), (1, 2), (5, 6), (7,))
    bad = dataclasses.replace(sound[0], id="bad", turns=(*sound[0].turns[:2], poison))
    engine = Engine(MODEL, params, length=LENGTH, slots=3)
    results = list(engine.run([*sound[:3], bad, *sound[3:]], EPSILONS))
    failures = [r for r in results if isinstance(r, Failure)]
    assert [f.id for f in failures] == ["bad"]
    assert "is nan" in failures[0].reason
    assert sorted(c[0].id for c in results if not isinstance(c, Failure)) == sorted(
        t.id for t in sound
    )
    assert engine.stats.finished == 7


def test_a_failure_under_a_candidate_gives_one_failure_and_no_cover():
    # The skip form is poisoned, so the full pass is sound and every candidate fails.
    params = dict(PARAMS, embed=PARAMS["embed"].at[31].set(np.nan))
    turns = tuple(TokenTurn((3, 4, 2), (31,), (5, 6), (7,)) for _ in range(4))
    bad = TokenTrajectory("bad", (3, 4), turns)
    results = list(Engine(MODEL, params, length=LENGTH).run([bad], EPSILONS))
    assert [type(r) for r in results] == [Failure]


def test_a_trajectory_longer_than_the_engine_is_named():
    long = random_trajectory(1, 30)
    results = list(make().run([long, TRAJECTORIES[0]], [0.1]))
    assert isinstance(results[0], Failure) and results[0].id == long.id
    assert str(LENGTH) in results[0].reason
    assert len(results) == 2


def test_progress_rises_to_the_input_s_length():
    seen = []
    list(make(slots=3).run(TRAJECTORIES, EPSILONS, lambda stats: seen.append(stats.work)))
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(seen))
    total = sum(int(t.assemble().actions[-1, 1]) - 1 for t in TRAJECTORIES)
    np.testing.assert_allclose(seen[-1], total)


def test_noise_floor_is_small_in_float32_and_seen_when_arithmetic_differs():
    floor = noise_floor(make(), SCORER, TRAJECTORIES[:2])
    assert RESOLUTION <= floor < 1e-5
    assert noise_floor(make(), SCORER, []) == RESOLUTION
    other = Scorer(MODEL, dict(PARAMS, mix=PARAMS["mix"] * 1.01))
    assert noise_floor(make(), other, TRAJECTORIES[:2]) > 1e-4


def test_freezing_keeps_the_sequence_and_leaves_nothing_to_test():
    for trajectory in TRAJECTORIES:
        frozen = freeze(trajectory)
        assert frozen.reasoned == ()
        np.testing.assert_array_equal(frozen.assemble().tokens, trajectory.assemble().tokens)


@pytest.mark.parametrize("name", ["slots", "rows", "row_tokens"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        make(**{name: 0})


def test_the_context_bounds_the_length():
    with pytest.raises(ValueError, match="context is 4096"):
        Engine(MODEL, PARAMS, length=5000)


def test_slots_shrink_with_memory_but_never_vanish():
    assert fit_slots(MODEL, PARAMS, 100, 16) == 16
    assert fit_slots(MODEL, PARAMS, 10**12, 16) == 1


RECURRENT = RecurrentToy()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("skip", [None, (), (1, 9, 9, 9, 2)])
def test_a_recurrent_model_continues_from_the_states_that_were_kept(sizes, skip):
    trajectories = [random_trajectory(seed, 2 + seed % 6) for seed in range(8)]
    if skip is not None:
        trajectories = [
            dataclasses.replace(
                t, turns=tuple(dataclasses.replace(turn, skip=skip) for turn in t.turns)
            )
            for t in trajectories
        ]
    length = max(most_scored(t) for t in trajectories)
    engine = Engine(RECURRENT, PARAMS, length=length, **sizes)
    results = {covers[0].id: covers for covers in engine.run(trajectories, EPSILONS)}
    taken = set()
    for trajectory in trajectories:
        for cover in results[trajectory.id]:
            assert_same(cover, find_cover(trajectory, SCORER.score, cover.epsilon))
            taken |= {removal.accepted for removal in cover.removals}
    assert taken == {True, False}


def test_a_recurrent_models_prompt_is_never_copied():
    prompt = tuple(range(3, 30))
    same = [dataclasses.replace(t, prompt=prompt) for t in TRAJECTORIES]
    length = max(most_scored(t) for t in same)
    engine = Engine(RECURRENT, PARAMS, length=length, slots=2, rows=8, row_tokens=4)
    for (cover,) in engine.run(same, [0.3]):
        trajectory = next(t for t in same if t.id == cover.id)
        assert_same(cover, find_cover(trajectory, SCORER.score, 0.3))
    assert engine.stats.shared == 0


def test_slots_leave_room_for_the_states_of_every_turn(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 1000 if name == "SC_AVPHYS_PAGES" else 64)
    # 0.3 of 64,000 bytes; a slot holds a state of 64 bytes, and as much again for undoing.
    plain = fit_slots(RECURRENT, PARAMS, 100, 1000)
    assert plain == 150
    assert fit_slots(RECURRENT, PARAMS, 100, 1000, turns=9) == 15
