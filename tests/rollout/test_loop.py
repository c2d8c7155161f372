"""Many episodes in flight: the potion shop in this process, and environments in workers."""

import itertools
import os
import threading

import pytest
from rollout_samples import (
    Broken,
    Echo,
    ScriptedSampler,
    completion,
    potion_oracle,
    tool,
    turn_ids,
    word_renderer,
)

from race_jax.envs.base import EnvironmentFault, Step
from race_jax.envs.potions import PotionShop, oracle_trajectory
from race_jax.jsonl import dumps
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.hosts import LocalHost
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import RunFailed, Runner
from race_jax.rollout.results import RolloutFile, gather, read_rollouts
from race_jax.rollout.workers import WorkerHost

POTIONS = [Job("potions", str(task), sample) for task in range(3) for sample in range(2)]


@pytest.fixture(scope="module")
def words():
    return word_renderer()


def run(sampler, renderer, host, jobs, stop=None, in_flight=64, **settings):
    runner = Runner(sampler, renderer, host, RolloutConfig(**settings), in_flight=in_flight)
    return list(runner.run(jobs, stop))


def steady(rollouts):
    """By name, without what the clock says."""
    return {r.id: (r.messages, r.tokens, r.notes, r.reward, r.stop) for r in rollouts}


def test_an_oracle_solves_the_potion_shop_with_the_ids_of_its_own_trajectories(words):
    sampler = ScriptedSampler(potion_oracle(words))
    rollouts = run(sampler, words, LocalHost(PotionShop), POTIONS)
    assert len(rollouts) == 6
    for rollout in rollouts:
        assert (rollout.stop, rollout.reward, rollout.success) == ("done", 1.0, True)
        wanted = words.encode(oracle_trajectory(int(rollout.task)))
        assert rollout.tokens.prompt == wanted.prompt
        assert rollout.tokens.turns == wanted.turns
    assert sorted(sampler.forgotten) == sorted(job.id for job in POTIONS)


def test_requests_only_ever_extend_what_went_before(words):
    sampler = ScriptedSampler(potion_oracle(words))
    run(sampler, words, LocalHost(PotionShop), POTIONS)
    for job in POTIONS:
        prompts = [request.prompt for request in sampler.of(job.id)]
        assert len(prompts) >= 8
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before


def test_what_else_runs_changes_nothing(words):
    def script():
        return potion_oracle(words, lambda turn: turn % 2, lambda name, turn: turn == 5)

    runs = []
    for sampler, many in [
        (ScriptedSampler(script()), 64),
        (ScriptedSampler(script(), backwards=True), 64),
        (ScriptedSampler(script()), 1),
    ]:
        rollouts = run(sampler, words, LocalHost(PotionShop), POTIONS, in_flight=many)
        seeds = {(r.conversation, len(r.prompt)): r.seed for r in sampler.requests}
        runs.append((steady(rollouts), seeds))
    assert runs[0] == runs[1] == runs[2]
    assert {stop for *_, stop in runs[0][0].values()} == {"done"}
    assert {reward for *_, reward, _ in runs[0][0].values()} == {0.0}


def test_a_failed_request_leaves_the_others_alone_and_the_group_finishes(words):
    oracle = potion_oracle(words)

    def script(request, turn):
        ids = oracle(request, turn)
        if request.conversation == "potions/1/0" and turn == 2:
            return completion(request, (), reason="error", error="HTTP 500")
        return ids

    rollouts = run(ScriptedSampler(script), words, LocalHost(PotionShop), POTIONS)
    groups = {group.task: group for group in gather(rollouts, 2)}
    assert {task: len(group.usable) for task, group in groups.items()} == {"0": 2, "1": 1, "2": 2}
    spoilt = groups["1"].rollouts[0]
    assert (spoilt.stop, spoilt.error, len(spoilt.notes)) == ("sampler_error", "HTTP 500", 2)


def test_a_sampler_that_never_answers_is_given_up_and_the_group_goes_on(words):
    oracle, clock = potion_oracle(words), [0.0]

    def script(request, turn):
        clock[0] += 1.0
        stuck = request.conversation == "potions/0/1" and turn == 1
        return None if stuck else oracle(request, turn)

    sampler = ScriptedSampler(script)

    def tick():
        clock[0] += 20
        return clock[0]

    runner = Runner(
        sampler, words, LocalHost(PotionShop), RolloutConfig(episode_timeout=1000), clock=tick
    )
    jobs = [job for job in POTIONS if job.task == "0"]
    (group,) = gather(runner.run(jobs), 2)
    assert [r.stop for r in group.rollouts] == ["done", "timeout"]
    assert "waiting for the sampler" in group.rollouts[1].error
    assert len(group.rollouts[1].notes) == 1
    assert "potions/0/1" in sampler.forgotten


class Flaky(Echo):
    """Answers the first word, then fails."""

    def step(self, call):
        if self.said:
            raise EnvironmentFault("the server answered with HTML")
        return super().step(call)


def echo_script(words, plan):
    """Says the words that `plan[task]` lists."""

    def script(request, turn):
        word = plan[request.conversation.split("/")[1]][turn]
        return turn_ids(words, ("say", {"word": word}))

    return script


def test_a_failing_environment_is_a_status_of_its_episode(words):
    sampler = ScriptedSampler(echo_script(words, {"a": "xy"}))
    (rollout,) = run(sampler, words, LocalHost(Flaky), [Job("echo", "a", 0)])
    assert (rollout.stop, rollout.reward, rollout.success) == ("env_error", 0.25, False)
    assert "'word': 'y'" in rollout.error and "answered with HTML" in rollout.error
    assert len(rollout.tokens.turns) == 2 and rollout.tokens.turns[1].observation == ()


ODD = {
    "its system prompt is 5": {"system": 5},
    "its reward range is None": {"reward_range": None},
    "its reward range is (nan, 1)": {"reward_range": (float("nan"), 1)},
    "its reward range is (1, 0)": {"reward_range": (1, 0)},
    "'NoneType' object is not iterable": {"tools": None},
    "its parameters are of the type 'string'": {"tools": (tool("say", type="string"),)},
    "cannot be written as JSON: Out of range": {"tools": (tool("say", minimum=float("nan")),)},
    "cannot be written as JSON: '<' not": {"tools": ({**tool("say"), 5: 6},)},
    "its step returned ('a', 0.0, False)": {"step": lambda call: ("a", 0.0, False)},
    "its step returned None": {"step": lambda call: None},
    "the environment's reply is at fault": {"step": lambda call: Step("a", 10**400, False)},
}


@pytest.mark.parametrize("agent", ["plain", "adapt"])
@pytest.mark.parametrize("message", ODD)
def test_an_environment_that_breaks_its_protocol_spoils_its_own_episode_alone(
    words, message, agent
):
    class Odd(Echo):
        def __init__(self):
            super().__init__()
            vars(self).update(ODD[message])

        def close(self):
            raise OSError("it is broken for good")

    sampler = ScriptedSampler(echo_script(words, {"a": "xy"}))
    host = LocalHost(Odd)
    runner = Runner(sampler, words, host, RolloutConfig(), agent=AgentConfig(agent))
    (rollout,) = runner.run([Job("echo", "a", 0)])
    host.close()
    assert rollout.stop == "env_error" and message in rollout.error
    dumps(rollout.record())


def test_a_run_ends_when_everything_fails(words):
    sampler = ScriptedSampler(lambda request, turn: completion(request, (), "error", error="down"))
    runner = Runner(sampler, words, LocalHost(PotionShop), RolloutConfig(max_faults=4), in_flight=1)
    jobs = [Job("potions", str(task), 0) for task in range(50)]
    seen = []
    with pytest.raises(RunFailed, match=r"4 episodes failed in a row.*sampler_error: down"):
        seen.extend(rollout.id for rollout in runner.run(jobs))
    assert len(sampler.requests) == 4


def test_an_environment_that_cannot_be_built_fails_at_once(words):
    sampler = ScriptedSampler(lambda request, turn: None)
    with pytest.raises(ValueError, match="Java is missing; install it"):
        run(sampler, words, LocalHost(Broken), [Job("echo", "a", 0)])
    host = WorkerHost(Broken, 1)
    with pytest.raises(ValueError, match=r"cannot be built.*Java is missing; install it"):
        run(sampler, words, host, [Job("echo", "a", 0)])
    host.close()


def test_stopping_gives_up_what_is_in_flight_and_a_second_run_does_the_rest(words, tmp_path):
    path, stop = tmp_path / "rollouts.jsonl", threading.Event()
    settings = {"env": "potions"}

    def go(stop=None):
        sampler = ScriptedSampler(potion_oracle(words))
        with RolloutFile(path, settings) as file:
            runner = Runner(sampler, words, LocalHost(PotionShop), RolloutConfig(), in_flight=2)
            for rollout in runner.run([j for j in POTIONS if j.id not in file.done], stop):
                file.append(rollout)
                if stop is not None and len(file.done) == 3:
                    stop.set()
        return sampler

    first = go(stop)
    begun = {request.conversation for request in first.requests}
    done = {rollout.id for rollout in read_rollouts(path)}
    assert 3 <= len(done) < 6 and begun <= set(first.forgotten)
    second = go()
    assert {request.conversation for request in second.requests} == {
        job.id for job in POTIONS
    } - done
    everything = list(read_rollouts(path))
    assert sorted(r.id for r in everything) == sorted(job.id for job in POTIONS)
    whole = run(ScriptedSampler(potion_oracle(words)), words, LocalHost(PotionShop), POTIONS)
    assert steady(everything) == steady(whole)


def test_two_jobs_of_one_name_are_refused(words):
    sampler = ScriptedSampler(potion_oracle(words))
    with pytest.raises(ValueError, match="two jobs have the name 'potions/0/0'"):
        run(sampler, words, LocalHost(PotionShop), [POTIONS[0]] * 2)


PLAN = {
    "good": ["one", "two", "end"],
    "hang": ["one", "hang"],
    "die": ["one", "die"],
    "raise": ["raise"],
    "fault": [],
}


@pytest.fixture(scope="module")
def in_workers(words):
    """One run over two workers, in which environments hang, die and fail."""
    host = WorkerHost(Echo, 2, step_timeout=3.0)
    sampler = ScriptedSampler(echo_script(words, PLAN))
    jobs = [Job("echo", task, sample) for task in PLAN for sample in range(2)]
    jobs += [Job("echo", "good", 2)]
    rollouts = run(sampler, words, host, jobs)
    alive = [worker.process.pid for worker in host._workers]
    host.close()
    return {r.id: r for r in rollouts}, alive


def test_good_episodes_run_in_workers_beside_bad_ones(in_workers):
    rollouts, _ = in_workers
    for sample in range(3):
        rollout = rollouts[f"echo/good/{sample}"]
        assert (rollout.stop, rollout.reward, rollout.success) == ("done", 0.75, True)
        assert rollout.messages[1]["content"] != f"pid {os.getpid()}"
    assert len(rollouts) == 11


def test_a_hung_worker_is_killed_and_reported_with_its_last_call(in_workers):
    rollout = in_workers[0]["echo/hang/0"]
    assert (rollout.stop, rollout.reward, len(rollout.notes)) == ("timeout", 0.25, 2)
    assert "environment worker" in rollout.error and "'word': 'hang'" in rollout.error
    pid = int(rollout.messages[1]["content"].split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_dead_worker_is_reported_with_its_last_call(in_workers):
    rollout = in_workers[0]["echo/die/1"]
    assert (rollout.stop, rollout.reward) == ("env_error", 0.25)
    assert "died with exit code 7" in rollout.error and "'word': 'die'" in rollout.error


def test_what_a_worker_raises_is_its_environments_fault(in_workers):
    accident, down = in_workers[0]["echo/raise/0"], in_workers[0]["echo/fault/0"]
    assert accident.stop == "env_error" and "ZeroDivisionError: an accident" in accident.error
    assert down.stop == "env_error" and "task 'fault' began" in down.error
    assert down.tokens is None


def test_closing_leaves_no_process(in_workers):
    for pid in in_workers[1]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
