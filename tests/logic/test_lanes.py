import threading

import numpy as np
import pytest
from toy import ToyModel, random_trajectory

from race_jax.logic.cover import most_scored
from race_jax.logic.engine import Engine, Failure
from race_jax.logic.lanes import Lanes, default_lanes
from race_jax.sharding import make_mesh, use_mesh
from race_jax.types import TokenTrajectory

MODEL = ToyModel()
PARAMS = MODEL.init()
EPSILONS = (0.05, 1.0)
TRAJECTORIES = [random_trajectory(seed, 1 + seed % 7) for seed in range(10)]
LENGTH = max(len(t.assemble().tokens) for t in TRAJECTORIES)


def make(count, **sizes):
    sizes = {"slots": 2, "rows": 8, "row_tokens": 4, "share_prompts": False, **sizes}
    return Lanes(Engine(MODEL, PARAMS, length=LENGTH, **sizes), count)


def by_id(results):
    return {covers[0].id: covers for covers in results}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_decisions_do_not_depend_on_the_number_of_lanes(count):
    lanes = make(count)
    got = by_id(lanes.run(TRAJECTORIES, EPSILONS))
    want = by_id(Engine(MODEL, PARAMS, length=LENGTH).run(TRAJECTORIES, EPSILONS))
    assert sorted(got) == sorted(want)
    for name, covers in want.items():
        for a, b in zip(got[name], covers, strict=True):
            assert (a.epsilon, a.removed, a.tokens_minimum) == (
                b.epsilon,
                b.removed,
                b.tokens_minimum,
            )
            np.testing.assert_allclose(a.loglik_final, b.loglik_final, atol=1e-5)
    assert lanes.stats.finished == len(TRAJECTORIES)
    np.testing.assert_allclose(lanes.stats.work, sum(map(most_scored, TRAJECTORIES)))


def test_more_lanes_than_trajectories():
    assert len(list(make(4).run(TRAJECTORIES[:1], [1.0]))) == 1
    assert list(make(4).run([], [1.0])) == []


def test_each_step_reports_the_sum_of_all_lanes():
    seen = []
    lanes = make(2)
    list(lanes.run(TRAJECTORIES, EPSILONS, seen.append))
    assert len(seen) == lanes.stats.steps
    assert max(s.tokens for s in seen) == lanes.stats.tokens
    assert [s.steps for s in seen] == sorted(s.steps for s in seen)


def test_a_bad_trajectory_is_a_failure_and_the_rest_goes_on():
    empty = TokenTrajectory("empty", (1, 2), ())
    results = list(make(2).run([*TRAJECTORIES[:3], empty, *TRAJECTORIES[3:]], [1.0]))
    failed = [item for item in results if isinstance(item, Failure)]
    assert [f.id for f in failed] == ["empty"]
    assert len(results) == len(TRAJECTORIES) + 1


def test_an_error_of_the_source_is_raised_and_no_thread_stays():
    def source():
        yield from TRAJECTORIES[:4]
        raise ValueError("line 5 changed")

    before = threading.active_count()
    with pytest.raises(ValueError, match="line 5 changed"):
        list(make(2).run(source(), [1.0]))
    assert threading.active_count() == before


def test_an_error_of_the_callback_is_raised():
    def refuse(stats):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        list(make(2).run(TRAJECTORIES, [1.0], refuse))


def test_lanes_end_when_nobody_waits_for_the_rest():
    before = threading.active_count()
    taken = []

    def source():
        for trajectory in TRAJECTORIES * 50:
            taken.append(trajectory)
            yield trajectory

    run = make(2).run(source(), [1.0])
    next(run)
    run.close()
    assert threading.active_count() == before
    assert len(taken) < len(TRAJECTORIES) * 50


@pytest.mark.parametrize("count", [0, -1])
def test_refuses_no_lanes(count):
    with pytest.raises(ValueError, match="at least 1"):
        make(count)


def test_one_lane_on_a_mesh():
    with use_mesh(make_mesh()):
        assert default_lanes() == 1
        with pytest.raises(ValueError, match="on a mesh it must be 1"):
            make(2)


def test_refuses_a_bad_threshold_before_any_thread_starts():
    before = threading.active_count()
    with pytest.raises(ValueError, match="epsilon"):
        list(make(2).run(TRAJECTORIES, [float("nan")]))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("backend", "cores", "want"), [("cpu", 8, 2), ("cpu", 1, 1), ("tpu", 8, 1)]
)
def test_two_lanes_only_where_a_cpu_has_cores_to_fill(monkeypatch, backend, cores, want):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert default_lanes() == want
