"""Credit on rollout trees: by hand, against recursion, and against an exact decision process."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.carl.advantages import Credit, check_tree, edge_advantages

# A root with children 1 and 2; 1 forks into the leaves 3 (reward 1) and 4 (reward 0); 2 goes on
# through 5 to the leaf 6 (reward 1).
HAND = {
    "parent": np.array([-1, 0, 0, 1, 1, 2, 5], np.int32),
    "rewards": np.array([np.nan, 9, 9, 1, 0, -9, 1], np.float32),
    "is_leaf": np.array([0, 0, 0, 1, 1, 0, 1], bool),
    "valid": np.ones(7, bool),
}
R2, R3 = 2**0.5, 3**0.5
# Leaves 1, 0, 1: mean 2/3, variance 2/9. V over leaves: 1: 1/2; the others' own.
BY_HAND = {
    Credit.CARL: [0, -1 / 4, 1 / 4, 1 / 2, -1 / 2, 0, 0],
    Credit.INHERIT: [0, -1 / 4, 1 / 4, 1 / 2, -1 / 2, 1 / 4, 1 / 4],
    Credit.TREERPO: [0, -1, 1, 1, -1, 0, 0],
    # Global and local gain over the root of the leaves below: (-1/6 - 1/6)/sqrt 2, (1/3 + 1/3)/1,
    # 1/3 + 1/2, -2/3 - 1/2, 1/3 + 0, 1/3 + 0.
    Credit.TREERL: [0, -1 / 3 / R2, 2 / 3, 5 / 6, -7 / 6, 1 / 3, 1 / 3],
    # Of a leaf: (1 - 2/3)/(sqrt 2/3) = 1/sqrt 2 or -2/sqrt 2; of node 1 their mean.
    Credit.ARPO: [0, -1 / (2 * R2), 1 / R2, 1 / R2, -2 / R2, 1 / R2, 1 / R2],
    Credit.OUTCOME: [0, -1 / 6, 1 / 3, 1 / 3, -2 / 3, 0, 0],
}
FORKED = [False, True, True, True, True, False, False]
ALL_EDGES = [False] + [True] * 6


def random_tree(rng, size, padded):
    """A tree of `size` nodes in a random order of growth; its last nodes are padding."""
    parent = np.full(padded, -1, np.int32)
    for node in range(1, size):
        parent[node] = rng.integers(max(0, node - 6), node)
    is_leaf = np.ones(padded, bool)
    is_leaf[parent[1:size]] = False
    valid = np.arange(padded) < size
    rewards = np.where(is_leaf & valid, rng.normal(size=padded), np.nan)
    parent[size:] = rng.integers(-1, size, padded - size)
    return {
        "parent": parent,
        "rewards": rewards.astype(np.float32),
        "is_leaf": is_leaf,
        "valid": valid,
    }


def recursion(tree, credit=Credit.CARL, baseline="mean"):
    """The definitions, one node at a time in float64."""
    parent, rewards, is_leaf, valid = (tree[k] for k in ("parent", "rewards", "is_leaf", "valid"))
    size = len(parent)
    below = [[c for c in range(1, size) if valid[c] and parent[c] == u] for u in range(size)]
    reward = np.where(is_leaf & valid, rewards, 0).astype(np.float64)

    def value(u):
        return reward[u] if is_leaf[u] else np.mean([value(c) for c in below[u]])

    def leaves(u):
        return [u] if is_leaf[u] else [leaf for c in below[u] for leaf in leaves(c)]

    def leaf_mean(u):
        return np.mean(reward[leaves(u)])

    ends = reward[leaves(0)]

    def inherited(v):
        u = parent[v]
        if v == 0:
            return 0.0
        return value(v) - value(u) if len(below[u]) > 1 else inherited(u)

    values, advantages = np.zeros(size), np.zeros(size)
    for v in np.flatnonzero(valid):
        u = parent[v]
        by_leaves = credit in (Credit.TREERL, Credit.ARPO)
        values[v] = leaf_mean(v) if by_leaves else value(v)
        if v == 0:
            continue
        siblings = [value(c) for c in below[u]]
        if credit is Credit.CARL and baseline == "mean":
            advantages[v] = value(v) - value(u)
        elif credit is Credit.CARL and len(siblings) > 1:
            advantages[v] = value(v) - np.mean([value(c) for c in below[u] if c != v])
        elif credit is Credit.INHERIT:
            advantages[v] = inherited(v)
        elif credit is Credit.TREERPO and np.std(siblings) > 1e-6:
            advantages[v] = (value(v) - np.mean(siblings)) / np.std(siblings)
        elif credit is Credit.TREERL:
            gain = 2 * leaf_mean(v) - leaf_mean(0) - leaf_mean(u)
            advantages[v] = gain / np.sqrt(len(leaves(v)))
        elif credit is Credit.ARPO and np.std(ends) > 1e-6:
            advantages[v] = np.mean((reward[leaves(v)] - ends.mean()) / ends.std())
        elif credit is Credit.OUTCOME and len(siblings) > 1:
            advantages[v] = leaf_mean(v) - ends.mean()
    return values, advantages


@pytest.mark.parametrize("credit", list(Credit))
def test_seven_nodes_by_hand(credit):
    got = edge_advantages(**HAND, credit=credit)
    by_leaves = credit in (Credit.TREERL, Credit.ARPO)
    want = [2 / 3 if by_leaves else 3 / 4, 1 / 2, 1, 1, 0, 1, 1]
    np.testing.assert_allclose(got.values, want, atol=1e-6)
    np.testing.assert_allclose(got.advantages, BY_HAND[credit], atol=1e-6)
    few = credit in (Credit.CARL, Credit.TREERPO, Credit.OUTCOME)
    np.testing.assert_array_equal(got.trainable, FORKED if few else ALL_EDGES)
    assert got.advantages[0] == 0 and not got.trainable[0]


def test_leave_one_out_by_hand():
    # V(1) = 1/2 against V(2) = 1, 1 against 0, and each the other way round.
    got = edge_advantages(**HAND, baseline="leave_one_out")
    np.testing.assert_allclose(got.advantages, [0, -1 / 2, 1 / 2, 1, -1, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(got.trainable, FORKED)


@pytest.mark.parametrize(
    ("credit", "baseline"), [(c, "mean") for c in Credit] + [(Credit.CARL, "leave_one_out")]
)
def test_a_thousand_trees_against_recursion(credit, baseline):
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, rng.integers(2, 25), 24) for _ in range(1000)]
    stacked = {k: jnp.asarray(np.stack([tree[k] for tree in trees])) for k in HAND}
    got = jax.vmap(lambda tree: edge_advantages(**tree, credit=credit, baseline=baseline))(stacked)
    for n in range(0, 1000, 1 if credit is Credit.CARL else 10):
        values, advantages = recursion(trees[n], credit, baseline)
        np.testing.assert_allclose(got.values[n], values, atol=1e-5)
        # A deviation of siblings that are nearly equal magnifies rounding.
        np.testing.assert_allclose(got.advantages[n], advantages, atol=1e-5, rtol=1e-3)


def test_padding_and_branches_given_up_do_not_matter():
    want = edge_advantages(**HAND)
    padded = {
        "parent": np.array([*HAND["parent"], 0, 3, -1]),
        "rewards": np.array([*HAND["rewards"], np.inf, np.nan, 5]),
        "is_leaf": np.array([*HAND["is_leaf"], True, False, True]),
        "valid": np.array([*HAND["valid"], False, False, False]),
    }
    got = edge_advantages(**padded)
    for name in got._fields:
        np.testing.assert_array_equal(getattr(got, name)[:7], getattr(want, name))
        np.testing.assert_array_equal(getattr(got, name)[7:], 0)
    # Without node 4, node 1 has one child, whose action trains nothing.
    pruned = {**HAND, "valid": np.arange(7) != 4}
    got = edge_advantages(**pruned)
    np.testing.assert_array_equal(got.trainable, [0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(got.advantages, 0, atol=1e-6)


@pytest.mark.parametrize("credit", list(Credit))
def test_equal_rewards_give_no_advantage(credit):
    # Means of float32 0.1 differ in the last digit, which no deviation may magnify.
    rng = np.random.default_rng(1)
    for size in (7, 24):
        tree = random_tree(rng, size, 24)
        tree["rewards"] = np.where(tree["is_leaf"], np.float32(0.1), np.nan)
        np.testing.assert_allclose(edge_advantages(**tree, credit=credit).advantages, 0, atol=1e-6)


def test_a_chain_of_depth_200_and_a_star_of_4096():
    """The same number of steps for both shapes: one up the nodes, whatever the depth."""
    chain = {
        "parent": np.arange(-1, 200, dtype=np.int32),
        "rewards": np.full(201, 0.7, np.float32),
        "is_leaf": np.arange(201) == 200,
        "valid": np.ones(201, bool),
    }
    got = edge_advantages(**chain)
    np.testing.assert_array_equal(got.values, np.float32(0.7))
    assert not got.trainable.any()
    star = {
        "parent": np.array([-1] + [0] * 4095, np.int32),
        "rewards": np.arange(4096, dtype=np.float32),
        "is_leaf": np.arange(4096) > 0,
        "valid": np.ones(4096, bool),
    }
    got = edge_advantages(**star)
    np.testing.assert_allclose(got.values[0], 2048, rtol=1e-6)
    np.testing.assert_allclose(got.advantages[1:], np.arange(1, 4096) - 2048.0, atol=0.01)
    assert got.trainable[1:].all()


@pytest.mark.parametrize("credit", list(Credit))
@pytest.mark.parametrize("batch", [(), (8,)])
def test_no_step_of_a_loop_touches_more_than_its_node(credit, batch):
    """In the compiled program no loop copies its array at each step: time is linear in nodes."""
    size = 4096
    shapes = [jax.ShapeDtypeStruct((*batch, size), t) for t in (jnp.int32, jnp.float32, bool, bool)]

    def function(*tree):
        return edge_advantages(*tree, credit=credit)

    function = jax.vmap(function) if batch else function
    program = jax.jit(function).lower(*shapes).compile().as_text()
    blocks = {}  # the program's computations by name; each ends in a brace at a line's start
    for block in program.split("\n}\n"):
        name = re.search(r"^(?:ENTRY )?%?([\w.-]+) \(", block, re.MULTILINE)
        blocks[name[1] if name else ""] = block
    waiting = re.findall(r"body=%?([\w.-]+)", program)
    assert waiting
    reached = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += re.findall(r"(?:calls|to_apply|body)=%?([\w.-]+)", blocks[name])
    whole = re.compile(r"\[(\d+,)*(4096|4097)(,\d+)*\]\S* copy\(")
    assert not [name for name in reached if whole.search(blocks[name])]


def process_trees(count, seed):
    """Trees of a known process, forked unevenly.

    At the root the policy goes left with probability 0.3. Left ends with 1 at probability 0.9,
    right at 0.2. The root is sampled twice; a left state is then forked into three children, a
    right one into one. So V(left) = 0.9, V(right) = 0.2, V(root) = 0.41.
    """
    rng = np.random.default_rng(seed)
    left = rng.random((count, 2)) < 0.3
    # Nodes: root 0; states 1 and 2; leaves 3 to 5 below 1, 6 to 8 below 2.
    parent = np.tile(np.array([-1, 0, 0, 1, 1, 1, 2, 2, 2], np.int32), (count, 1))
    outcome = rng.random((count, 6)) < np.repeat(np.where(left, 0.9, 0.2), 3, axis=1)
    rewards = np.concatenate([np.zeros((count, 3)), outcome], axis=1).astype(np.float32)
    is_leaf = np.tile(np.arange(9) > 2, (count, 1))
    single = np.repeat(~left, 3, axis=1) & (np.arange(6) % 3 > 0)
    valid = np.concatenate([np.ones((count, 3), bool), ~single], axis=1)
    return left, dict(parent=parent, rewards=rewards, is_leaf=is_leaf, valid=valid)


EXACT = {"left": 0.9, "right": 0.2, "root": 0.3 * 0.9 + 0.7 * 0.2}


def off_by(samples, exact):
    """How many standard errors the mean of `samples` lies from `exact`."""
    samples = np.asarray(samples, np.float64)
    return abs(samples.mean() - exact) / (samples.std() / np.sqrt(len(samples)))


def test_estimates_are_unbiased_where_the_paper_says_so_and_biased_where_it_says_so():
    left, trees = process_trees(40_000, 0)

    def credit(kind, baseline="mean"):
        return jax.vmap(lambda t: edge_advantages(**t, credit=kind, baseline=baseline))(trees)

    carl, others = credit(Credit.CARL), credit(Credit.CARL, "leave_one_out")
    assert off_by(carl.values[:, 0], EXACT["root"]) < 4
    for name, chosen in (("left", left[:, 0]), ("right", ~left[:, 0])):
        assert off_by(carl.values[chosen, 1], EXACT[name]) < 4
        # Given the action, the baseline holds the action's own value: with two children, half.
        exact = EXACT[name] - EXACT["root"]
        assert off_by(carl.advantages[chosen, 1], exact / 2) < 4
        assert off_by(others.advantages[chosen, 1], exact) < 4
    # Counting leaves gives forked states three votes, and the advantages have a mean of their own.
    for kind in (Credit.TREERL, Credit.ARPO):
        biased = credit(kind)
        assert off_by(biased.values[:, 0], EXACT["root"]) > 10
        assert off_by(biased.advantages[:, 1], 0) > 10
    assert off_by(carl.advantages[:, 1], 0) < 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": [-1, 0, 0, 4, 1, 2, 5]}, "node 3 .* before its child"),
        ({"parent": [-1, 0, 2, 1, 1, 2, 5]}, "node 2 .* before its child"),
        ({"parent": [-1, 0, 0, 1, 1, -1, 5]}, "2 roots"),
        ({"parent": [-2, 0, 0, 1, 1, 2, 5]}, "0 roots"),
        ({"parent": [-1, 0, 0, 1, 1, 4, 5]}, "node 5 .* its parent is a leaf"),
        ({"rewards": [0, 0, 0, 1, np.nan, 0, 1]}, "node 4 .* without a finite reward"),
        ({"is_leaf": [0, 0, 0, 1, 1, 0, 0]}, "node 6 .* neither children nor an outcome"),
        ({"valid": [1, 1, 0, 1, 1, 1, 1]}, "node 5 .* parent is not valid"),
        ({"valid": [1, 0, 0, 0, 0, 0, 0]}, "1 valid nodes"),
    ],
)
def test_what_is_no_tree_is_refused(changes, message):
    broken = {**HAND, **{k: np.array(v, HAND[k].dtype) for k, v in changes.items()}}
    with pytest.raises(ValueError, match=message):
        edge_advantages(**broken)
    with pytest.raises(ValueError, match=message):
        check_tree(**broken)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="grpo"):
        edge_advantages(**HAND, credit="grpo")
    with pytest.raises(ValueError, match="baseline is 'median'"):
        edge_advantages(**HAND, baseline="median")
    with pytest.raises(ValueError, match="baseline of its own"):
        edge_advantages(**HAND, credit="treerl", baseline="leave_one_out")
    with pytest.raises(ValueError, match=r"must all be \[n\]"):
        edge_advantages(**{**HAND, "valid": np.ones(6, bool)})
