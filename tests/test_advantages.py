import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.advantages import degenerate_groups, group_relative, leave_one_out


def reference(rewards, groups, normalize=True, ddof=0):
    out = np.zeros(len(rewards))
    for group in set(groups):
        members = np.flatnonzero(np.asarray(groups) == group)
        values = np.asarray(rewards, np.float64)[members]
        out[members] = values - values.mean()
        if normalize:
            spread = values.std(ddof=ddof) if len(values) > ddof else 0
            out[members] = out[members] / spread if spread else 0
    return out


def test_a_group_by_hand():
    # 0, 0, 0, 1: mean 1/4, variance 3/16, deviation sqrt(3)/4.
    got = group_relative(jnp.array([0.0, 0, 0, 1]), jnp.zeros(4, jnp.int32), num_groups=1)
    np.testing.assert_allclose(got, [-1 / 3**0.5] * 3 + [3**0.5], atol=1e-6)


def test_the_sample_deviation_is_a_setting():
    # 0, 1: mean 1/2; population deviation 1/2, sample deviation sqrt(1/2).
    pair = jnp.array([0.0, 1.0]), jnp.zeros(2, jnp.int32)
    np.testing.assert_allclose(group_relative(*pair, num_groups=1), [-1, 1], atol=1e-6)
    got = group_relative(*pair, num_groups=1, ddof=1)
    np.testing.assert_allclose(got, [-(0.5**0.5), 0.5**0.5], atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_give_exactly_zero(ddof):
    # The mean of seven float32 0.1 is not 0.1: rounding must not become an advantage.
    values, sizes = [1.0, 0.1, 0.0, -100.0, 1e30], [1, 2, 3, 7, 8]
    groups = [(value, size) for value in values for size in sizes]
    rewards = jnp.array([value for value, size in groups for _ in range(size)])
    ids = jnp.array([n for n, (_, size) in enumerate(groups) for _ in range(size)])
    count = len(groups)
    got = group_relative(rewards, ids, num_groups=count, ddof=ddof)
    np.testing.assert_array_equal(got, 0)
    got = group_relative(rewards, ids, num_groups=count, normalize_std=False)
    np.testing.assert_array_equal(got, 0)
    np.testing.assert_array_equal(leave_one_out(rewards, ids, num_groups=count), 0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equals_the_definition_with_groups_in_any_order(normalize, ddof):
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 5, 40)
    rewards = rng.normal(size=40).astype(np.float32)
    got = group_relative(
        jnp.asarray(rewards), jnp.asarray(groups), num_groups=6, normalize_std=normalize, ddof=ddof
    )
    np.testing.assert_allclose(got, reference(rewards, groups, normalize, ddof), atol=1e-5)
    order = rng.permutation(40)
    turned = group_relative(
        jnp.asarray(rewards[order]),
        jnp.asarray(groups[order]),
        num_groups=6,
        normalize_std=normalize,
        ddof=ddof,
    )
    np.testing.assert_allclose(turned, np.asarray(got)[order], atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 100.0, 1e30])
def test_the_scale_of_rewards_does_not_matter(scale):
    rewards, ids = jnp.array([0.0, 1.0, 1.0, 3.0]), jnp.zeros(4, jnp.int32)
    got = group_relative(rewards * scale, ids, num_groups=1)
    np.testing.assert_allclose(got, group_relative(rewards, ids, num_groups=1), rtol=1e-5)


def test_a_score_of_minus_a_hundred_is_only_a_low_reward():
    got = group_relative(jnp.array([-100.0, 0.0]), jnp.zeros(2, jnp.int32), num_groups=1)
    np.testing.assert_allclose(got, [-1, 1], atol=1e-6)


def test_leave_one_out_by_hand():
    # 0 - (1 + 5)/2 = -3, 1 - 5/2 = -1.5, 5 - 1/2 = 4.5; a group of one has no others.
    rewards, ids = jnp.array([0.0, 1.0, 5.0, 7.0]), jnp.array([0, 0, 0, 1])
    got = leave_one_out(rewards, ids, num_groups=2)
    np.testing.assert_allclose(got, [-3, -1.5, 4.5, 0], atol=1e-6)


def test_a_reward_that_is_no_number_spoils_its_own_group_only():
    rewards, ids = jnp.array([jnp.nan, 1.0, 0.0, 1.0]), jnp.array([0, 0, 1, 1])
    got = group_relative(rewards, ids, num_groups=2)
    assert np.isnan(got[:2]).all()
    np.testing.assert_allclose(got[2:], [-1, 1], atol=1e-6)


def test_rows_of_no_group_get_zero_and_change_no_group():
    rewards, ids = jnp.array([0.0, 1.0, 9.0, jnp.inf]), jnp.array([0, 0, -1, 7])
    got = group_relative(rewards, ids, num_groups=2)
    np.testing.assert_allclose(got, [-1, 1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(leave_one_out(rewards, ids, num_groups=2), [-1, 1, 0, 0], atol=1e-6)


def test_jitted_and_vmapped():
    rewards = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    ids = jnp.arange(8) % 2
    function = jax.jit(jax.vmap(lambda r: group_relative(r, ids, num_groups=2)))
    want = [group_relative(row, ids, num_groups=2) for row in rewards]
    np.testing.assert_allclose(function(rewards), want, atol=1e-6)


def test_errors_name_the_rule():
    ids = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="must both be"):
        group_relative(jnp.zeros(2), ids, num_groups=1)
    with pytest.raises(ValueError, match="num_groups is 0"):
        group_relative(jnp.zeros(3), ids, num_groups=0)
    with pytest.raises(ValueError, match="ddof is 2"):
        group_relative(jnp.zeros(3), ids, num_groups=1, ddof=2)


def test_groups_that_teach_nothing_are_named():
    rewards = jnp.array([0.1, 0.1, 0.1, 0.0, 1.0, 5.0, 9.0])
    ids = jnp.array([0, 0, 0, 1, 1, 2, -1])
    np.testing.assert_array_equal(
        degenerate_groups(rewards, ids, num_groups=4), [True, False, True, False]
    )
