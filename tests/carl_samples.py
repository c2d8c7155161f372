"""A world of digits, a policy that draws them by seed, and the trees that the two make."""

import numpy as np
from rollout_samples import ScriptedSampler, completion, tool, turn_ids, word_renderer

from race_jax.carl.forking import ForkConfig, grow_trees
from race_jax.carl.tree import rebuild
from race_jax.envs.base import Step
from race_jax.rollout.hosts import LocalHost
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import Runner

WORDS = ("red", "blue", "green", "white")


class Digits:
    """Takes `turns` calls and rewards how many were `red`; `fickle` never says the same twice."""

    name = "digits"
    system = ""
    reward_range = (0.0, 1.0)
    tools = (tool("say", "word"),)
    count = 0

    def __init__(self, turns=3, fickle=False):
        self.turns, self.fickle = turns, fickle

    def reset(self, task):
        self.said = []
        return f"task {task}"

    def step(self, call):
        self.said.append(call["arguments"]["word"])
        Digits.count += 1
        told = f"{len(self.said)} {self.said[-1]}" + (f" {Digits.count}" if self.fickle else "")
        done = len(self.said) == self.turns
        reward = self.said.count("red") / self.turns
        return Step(told, reward, done, reward > 0.5)

    def close(self):
        pass


def draw_words(renderer, thinks=True):
    """A script: each request's seed decides word and log-probabilities."""

    def script(request, turn):
        rng = np.random.default_rng(request.seed)
        word = WORDS[rng.integers(4)]
        reasoning = "so" if thinks and rng.integers(2) else ""
        ids = turn_ids(renderer, ("say", {"word": word}), reasoning=reasoning)
        nats = tuple(float(x) for x in -rng.uniform(0.01, 3.0) * rng.uniform(size=len(ids)))
        return completion(request, ids, logprobs=nats)

    return script


def grow(tasks=("a", "b"), *, make=Digits, config=None, done=(), stop=None, seed=0, **settings):
    """The rollouts of trees and the sampler that served them."""
    renderer = word_renderer()
    sampler = ScriptedSampler(draw_words(renderer))
    limits = RolloutConfig(max_turns=8, max_tokens=4000, **settings)
    runner = Runner(sampler, renderer, LocalHost(make), limits, keep=True)
    config = config or ForkConfig(first=2, forks=6)
    found = list(grow_trees(runner, "digits", list(tasks), config, seed, done=done, stop=stop))
    return found, sampler


def trees(**settings):
    return rebuild(grow(**settings)[0])
