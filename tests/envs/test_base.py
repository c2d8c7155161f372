import pytest

from race_jax.envs.base import Diverged, Environment, replay
from race_jax.envs.potions import PotionShop


def episode(world: Environment, task: str, count: int):
    """The right calls of a task, and what is observed on the way."""
    assert isinstance(world, PotionShop)
    observations, calls = [world.reset(task)], []
    for _ in range(count):
        _, name, arguments, _ = world.oracle()
        calls.append({"name": name, "arguments": arguments})
        observations.append(world.step(calls[-1]).observation)
    return calls, observations


def test_a_copy_goes_on_as_the_episode_does():
    world = PotionShop()
    calls, observations = episode(world, "5", 3)
    copy = replay(PotionShop, "5", calls, observations)
    assert isinstance(copy, PotionShop)
    assert copy is not world
    while True:
        assert copy.oracle() == world.oracle()
        _, name, arguments, _ = world.oracle()
        step = world.step({"name": name, "arguments": arguments})
        assert copy.step({"name": name, "arguments": arguments}) == step
        if step.done:
            break
    assert step.success


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_replay_that_sees_something_else_is_an_error_that_closes_the_copy(wrong):
    calls, observations = episode(PotionShop(), "5", 3)
    observations[wrong] += "!"
    closed = []

    class Noted(PotionShop):
        def close(self):
            closed.append(self)

    with pytest.raises(Diverged, match=rf"task '5': observation {wrong} of the replay is "):
        replay(Noted, "5", calls, observations)
    assert len(closed) == 1
