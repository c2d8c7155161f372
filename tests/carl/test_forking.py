"""Trees of rollouts: where they branch, what they cost, how they go on after a stop."""

import dataclasses
import functools

import numpy as np
import pytest
from carl_samples import Digits, grow

from race_jax.carl.forking import ForkConfig, pick_state
from race_jax.carl.tree import Node, Tree, credit_trees, fork_at, rebuild
from race_jax.rollout.loop import RunFailed
from race_jax.rollout.results import Rollout


@pytest.fixture(scope="module")
def grown():
    return grow()


def test_a_tree_has_as_many_leaves_as_episodes_and_one_edge_per_sampled_turn(grown):
    rollouts, sampler = grown
    for task, tree in rebuild(rollouts).items():
        assert task in "ab" and len(tree.rollouts) == 8
        assert sum(node.reward is not None for node in tree.nodes) == 8
        sampled = [request for request in sampler.requests if f"/{task}/" in request.conversation]
        assert tree.edges == len(sampled)
        for n, node in enumerate(tree.nodes):
            assert node.parent < n
            children = [m for m, other in enumerate(tree.nodes) if other.parent == n]
            assert len(children) == node.actions
            nats = [tree.nodes[m].nats for m in children]
            assert node.entropy == pytest.approx(np.mean(nats) if nats else 0.0)


def test_a_fork_repeats_the_turns_before_it_and_asks_for_the_cache_of_their_episode(grown):
    rollouts, sampler = grown
    by_name = {r.id: r for r in rollouts}
    forks = [r for r in rollouts if r.fork]
    assert forks
    for rollout in forks:
        sample, turn = rollout.fork
        origin = by_name[f"digits/{rollout.task}/{sample}"]
        state = fork_at(origin, turn).state
        first = sampler.of(rollout.id)[0]
        assert first.prompt == state and first.origin == origin.id
        assert rollout.tokens.prompt == origin.tokens.prompt
        assert rollout.tokens.turns[:turn] == origin.tokens.turns[:turn]
        assert rollout.notes[:turn] == origin.notes[:turn]
        assert len(rollout.notes) > turn


def test_children_of_a_state_are_drawn_with_seeds_of_their_own(grown):
    _, sampler = grown
    seeds = [(request.prompt, request.seed) for request in sampler.requests]
    assert len(set(seeds)) == len(seeds)


def test_what_trees_left_with_the_sampler_is_forgotten_at_their_end(grown):
    rollouts, sampler = grown
    assert set(sampler.forgotten) == {r.id for r in rollouts}


def test_the_lowest_density_is_forked_each_time(grown):
    rollouts, _ = grown
    for task in "ab":
        tree = Tree("digits", task)
        mine = sorted((r for r in rollouts if r.task == task), key=lambda r: r.sample)
        for rollout in mine:
            if rollout.sample >= 2:
                densities = [tree.nodes[n].density for n in tree.states]
                node = pick_state(tree, ForkConfig(first=2, forks=6), 0, rollout.sample)
                assert tree.nodes[node].density == min(densities)
                sample, turn = rollout.fork or (0, 0)
                assert tree.paths[sample][turn] == node
            tree.add(rollout)


def hand_tree(entropies, actions):
    tree = Tree("digits", "a")
    pairs = enumerate(zip(entropies, actions, strict=True))
    tree.nodes = [Node(n - 1, 0, n, 0.0, a, h) for n, (h, a) in pairs]
    tree.nodes.append(Node(len(entropies) - 1, 0, len(entropies), 0.1, reward=1.0))
    return tree


@pytest.mark.parametrize(
    ("entropies", "actions", "node"),
    [
        ((0.5, 0.9, 0.2), (1, 1, 1), 1),
        ((0.5, 0.9, 0.2), (1, 2, 1), 0),  # 0.5 / 1 is more than 0.9 / 2
        ((0.4, 0.4, 0.4), (1, 1, 1), 0),  # a tie: the first
        ((0.8, 0.4, 0.4), (2, 1, 1), 1),  # a tie: the one with fewer actions
        ((0.0, 0.0, 0.0), (2, 1, 1), 1),  # no entropy anywhere
        ((0.0, 0.0, 0.1), (1, 1, 9), 2),  # a little is more than none
    ],
)
def test_density_by_hand(entropies, actions, node):
    assert pick_state(hand_tree(entropies, actions), ForkConfig(), 0, 1) == node


def test_the_running_mean_of_a_state_by_hand(grown):
    rollouts, _ = grown
    origin = next(r for r in rollouts if r.sample == 0 and r.task == "a")

    def with_nats(value, sample, fork=None):
        notes = tuple(
            dataclasses.replace(note, logprobs=(-value,) * len(note.logprobs))
            for note in origin.notes
        )
        return dataclasses.replace(origin, notes=notes, sample=sample, fork=fork)

    tree = Tree("digits", "a")
    tree.add(with_nats(1.0, 0))
    tree.add(with_nats(4.0, 1, (0, 1)))
    tree.add(with_nats(7.0, 2, (1, 1)))
    # Turn 1 of sample 0 and of sample 1 begin in one state: (1 + 4 + 7) / 3.
    state = tree.paths[0][1]
    assert tree.paths[1][1] == tree.paths[2][1] == state
    assert (tree.nodes[state].entropy, tree.nodes[state].actions) == (4.0, 3)
    assert (tree.nodes[0].entropy, tree.nodes[0].actions) == (1.0, 1)


def test_random_forks_reach_all_states_and_arpo_follows_its_probability():
    tree = hand_tree((0.5,) * 4, (1,) * 4)
    config = ForkConfig(rule="random")
    picked = [pick_state(tree, config, 0, n) for n in range(400)]
    counts = np.bincount(picked, minlength=4)
    assert counts.sum() == 400 and counts.min() > 60  # 100 expected, deviation below 9
    assert picked == [pick_state(tree, config, 0, n) for n in range(400)]
    never = ForkConfig(rule="arpo", alpha=0.0, beta=0.0)
    assert pick_state(tree, never, 0, 1) == 0
    always = ForkConfig(rule="arpo", alpha=1.0, beta=0.0)
    assert pick_state(tree, always, 0, 1) == 1
    # Half a nat above the root, and only there: 0.2 + 2 * 0.5 is more than any draw.
    tree.nodes[3].entropy = 1.0
    rising = ForkConfig(rule="arpo", alpha=0.0, beta=2.0)
    assert pick_state(tree, rising, 0, 1) == 3


def test_a_run_that_was_cut_short_goes_on_with_the_same_tree(grown):
    whole = {r.id: r for r in grown[0]}
    for kept in (1, 3, 5, 11):
        done = list(whole.values())[:kept]
        rest, _ = grow(done=done)
        assert not {r.id for r in done} & {r.id for r in rest}
        found = {r.id: r for r in [*done, *rest]}
        assert found.keys() == whole.keys()
        for name, rollout in found.items():
            assert rollout.tokens == whole[name].tokens and rollout.fork == whole[name].fork


def test_rollouts_of_trees_survive_their_records(grown):
    for rollout in grown[0]:
        again = Rollout.from_record(rollout.record())
        assert (again.fork, again.tokens, again.reward) == (
            rollout.fork,
            rollout.tokens,
            rollout.reward,
        )


def test_an_environment_that_does_not_repeat_itself_loses_those_forks_only():
    fickle = functools.partial(Digits, fickle=True)
    config = ForkConfig(first=2, forks=6, rule="random")
    rollouts, _ = grow(("a",), make=fickle, config=config, seed=1)
    spoilt = [r for r in rollouts if r.stop == "diverged"]
    assert spoilt and all(r.fork for r in spoilt)
    assert all("did not repeat" in r.error for r in spoilt)
    tree = rebuild(rollouts)["a"]
    assert (tree.dropped, tree.diverged) == (len(spoilt), len(spoilt))
    assert len(tree.rollouts) == 8 - len(spoilt)
    # A state that could not be reached is not tried again.
    assert len({r.fork for r in spoilt}) == len(spoilt)
    (credit,) = credit_trees([tree])
    assert np.isfinite(credit.advantages).all()


def test_an_environment_that_opens_otherwise_makes_no_branch_of_the_first_prompt():
    class Moody(Digits):
        opened = 0

        def reset(self, task):
            Moody.opened += 1
            return super().reset(task) + " again" * (Moody.opened % 2)

    rollouts, _ = grow(("a",), make=Moody, config=ForkConfig(first=4, forks=4))
    tree = rebuild(rollouts)["a"]
    prompts = {rollout.tokens.prompt for rollout in rollouts if not rollout.faulty}
    assert len(prompts) == 2
    # Of the root's other openings none is in, and the root is not tried again.
    assert {rollout.tokens.prompt for rollout in tree.rollouts.values()} == {
        tree.rollouts[0].tokens.prompt
    }
    assert tree.nodes[0].closed
    assert tree.dropped == tree.diverged == len(rollouts) - len(tree.rollouts) > 0


def test_a_tree_read_back_has_the_entropies_of_the_one_that_was_grown(grown):
    rollouts, _ = grown
    tiny = -3.2e-8  # rounds to nothing in a record
    mine = []
    for rollout in sorted((r for r in rollouts if r.task == "a"), key=lambda r: r.sample):
        notes = tuple(
            dataclasses.replace(note, logprobs=tuple(v * 1e-6 + tiny for v in note.logprobs))
            for note in rollout.notes
        )
        mine.append(dataclasses.replace(rollout, notes=notes))
    kept = rebuild(mine)["a"]
    read = rebuild(Rollout.from_record(rollout.record()) for rollout in mine)["a"]
    assert [node.entropy for node in kept.nodes] == [node.entropy for node in read.nodes]
    assert [node.nats for node in kept.nodes] == [node.nats for node in read.nodes]


def test_an_environment_that_never_repeats_itself_ends_the_run_and_says_why():
    fickle = functools.partial(Digits, turns=6, fickle=True)
    config = ForkConfig(first=1, forks=9, rule="arpo", alpha=1.0)
    with pytest.raises(RunFailed, match=r"did not repeat what it had said.*task and calls alone"):
        grow(("a",), make=fickle, config=config, max_faults=3)


def test_an_episode_that_ends_before_its_fork_diverged(grown):
    origin = next(r for r in grown[0] if r.fork is None)
    done = [dataclasses.replace(origin, sample=0)]
    shorter = functools.partial(Digits, turns=1)
    config = ForkConfig(first=1, forks=1, rule="arpo", alpha=1.0)
    (rollout,), _ = grow((origin.task,), make=shorter, config=config, done=done)
    assert rollout.stop == "diverged" and "ended before the fork" in rollout.error


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"first": 0}, "tree.first is 0; it must be at least 1"),
        ({"forks": -1}, "tree.forks is -1; it must be at least 0"),
        ({"forks": 0}, "a tree needs at least 2 episodes"),
        ({"rule": "entropy"}, "one of density, random, arpo"),
        ({"alpha": 1.5}, "a probability"),
        ({"beta": float("nan")}, "finite"),
    ],
)
def test_settings_that_make_no_tree_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        ForkConfig(**settings)


def test_rollouts_that_fit_no_tree_are_refused(grown):
    origin = next(r for r in grown[0] if r.fork is None and r.task == "a")
    tree = Tree("digits", "a")
    tree.add(origin)
    with pytest.raises(ValueError, match="in the tree already"):
        tree.add(origin)
    with pytest.raises(ValueError, match="no rollout of digits/a"):
        tree.add(dataclasses.replace(origin, task="b"))
    with pytest.raises(ValueError, match="no such sample"):
        tree.add(dataclasses.replace(origin, sample=9, fork=(5, 1)))
    with pytest.raises(ValueError, match="the tree holds 3 turns of that one"):
        tree.add(dataclasses.replace(origin, sample=9, fork=(origin.sample, 3)))
    with pytest.raises(ValueError, match="cannot be left at turn 3"):
        fork_at(origin, 3)
    with pytest.raises(ValueError, match="digits/a: the tree has 0 valid nodes"):
        credit_trees([Tree("digits", "a")])


def test_the_update_set_and_the_cost_are_within_the_bounds_on_episodes_of_fixed_length():
    forks, turns, tasks = 16, 6, [str(n) for n in range(40)]
    config = ForkConfig(first=1, forks=forks, rule="random")
    make = functools.partial(Digits, turns=turns)
    grown = rebuild(grow(tasks, make=make, config=config)[0])
    ratios = []
    for tree, credit in zip(grown.values(), credit_trees(list(grown.values())), strict=True):
        assert forks + 1 <= credit.trainable.sum() <= 2 * forks
        ratios.append(tree.edges / (forks * turns))
    # Forks at random states of the trunk and its branches cost half an episode or less on average.
    assert 1 / forks < np.mean(ratios) < 1 / forks + 0.6
