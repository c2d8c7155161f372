"""The agents around one model: advice, closed reasoning, drafts that agree, and split tasks."""

import dataclasses
import json

import pytest
from rollout_samples import Echo, ScriptedSampler, completion, turn_ids, word_renderer

from race_jax.envs.base import Step
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.hosts import LocalHost
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import Runner
from race_jax.rollout.manners import agreed, canonical
from race_jax.rollout.measures import measure
from race_jax.rollout.results import Rollout
from race_jax.tokenizer import END_THINK, IM_END
from race_jax.toolcalls import ParsedCall
from race_jax.trajectories import from_json

JOB = Job("echo", "a", 0)


@pytest.fixture(scope="module")
def words():
    return word_renderer()


def play(renderer, script, env=Echo, agent=None, **settings):
    sampler = ScriptedSampler(script)
    config = RolloutConfig(**settings)
    runner = Runner(sampler, renderer, LocalHost(env), config, agent=agent)
    (rollout,) = runner.run([JOB])
    rollout = dataclasses.replace(rollout, seconds=0.0)
    used = {request.conversation for request in sampler.requests}
    assert set(sampler.forgotten) == used
    record = rollout.record()
    assert Rollout.from_record(json.loads(json.dumps(record))) == rollout
    assert from_json(record).tokens == rollout.tokens
    return rollout, sampler


def action(renderer, *calls):
    """A turn without its block, as it is sampled behind a closed one."""
    ids = turn_ids(renderer, *calls)
    assert ids[: len(renderer.skip_ids)] == renderer.skip_ids
    return ids[len(renderer.skip_ids) :]


def say(word):
    return ("say", {"word": word})


@pytest.mark.parametrize("kind", ["react", "sparse_react"])
def test_advice_stands_at_the_end_of_the_system_prompt(words, kind):
    rollout, _ = play(words, lambda r, t: turn_ids(words, say("end")), agent=AgentConfig(kind))
    system = rollout.messages[0]["content"]
    assert system.startswith("Say words.\n\n") and "eason" in system
    plain, _ = play(words, lambda r, t: turn_ids(words, say("end")))
    assert plain.messages[0]["content"] == "Say words."


def test_the_think_tool_takes_thoughts_and_reasoning_stays_closed(words):
    thought = ("think", {"thought": "First a, then end."})
    turns = [action(words, thought), action(words, say("a")), action(words, say("end"))]
    agent = AgentConfig("think_tool")
    rollout, sampler = play(words, lambda r, t: turns[t], agent=agent)
    assert (rollout.stop, rollout.reward) == ("done", 0.5)
    for request in sampler.requests:
        assert request.prompt[-len(words.skip_ids) :] == words.skip_ids
    for turn, note, ids in zip(rollout.tokens.turns, rollout.notes, turns, strict=True):
        assert (turn.reasoning, turn.skip, turn.action) == ((), words.skip_ids, ids)
        # The closing was given, so no log-prob belongs to it.
        assert (note.forced, len(note.logprobs)) == (len(words.skip_ids), len(ids))
    assert [note.reasoning_tokens for note in rollout.notes] == [len(turns[0]), 0, 0]
    assert [note.carried_out for note in rollout.notes] == [1, 1, 1]
    assert [tool["function"]["name"] for tool in rollout.tools] == ["say", "think"]
    assert "reasoning_content" in rollout.messages[2]
    found = measure([rollout])
    assert (found.skip_ratio, found.thinking_tokens) == (2 / 3, len(turns[0]))


def test_a_direct_agent_acts_at_once(words):
    turns = [action(words, say("a")), action(words, say("end"))]
    rollout, sampler = play(words, lambda r, t: turns[t], agent=AgentConfig("direct"))
    assert (rollout.stop, rollout.messages[0]["content"]) == ("done", "Say words.")
    assert [turn.action for turn in rollout.tokens.turns] == turns
    assert [(note.forced, note.reasoning_tokens) for note in rollout.notes] == [(2, 0)] * 2
    whole = rollout.tokens.assemble().tokens.tolist()
    for request in sampler.requests:
        assert whole[: len(request.prompt)] == list(request.prompt)


def test_the_think_tool_is_checked_like_any_other(words):
    turns = [action(words, ("think", {})), action(words, say("end"))]
    rollout, _ = play(words, lambda r, t: turns[t], agent=AgentConfig("think_tool"))
    assert rollout.notes[0].carried_out == 0 and "'thought'" in rollout.notes[0].errors[0]


def test_a_tool_of_the_environment_with_the_same_name_is_told(words):
    class Thinker(Echo):
        tools = (*Echo.tools, {"type": "function", "function": {"name": "think"}})

    def never(request, turn):
        raise AssertionError("nothing is asked")

    sampler = ScriptedSampler(never)
    host = LocalHost(Thinker)
    runner = Runner(sampler, words, host, RolloutConfig(), agent=AgentConfig("think_tool"))
    (rollout,) = runner.run([JOB])
    assert rollout.stop == "env_error" and "two tools have the name 'think'" in rollout.error


def drafts_script(renderer, plan):
    """`plan[turn]` lists the drafts of a turn, and last what it does after thinking, or None."""
    state = {"turn": 0, "draft": 0}

    def script(request, count):
        *drafts, after = plan[state["turn"]]
        if request.conversation.endswith("#draft"):
            found = drafts[state["draft"]]
            state["draft"] += 1
            if state["draft"] == len(drafts) and after is None:
                state["turn"], state["draft"] = state["turn"] + 1, 0
            return action(renderer, found) if isinstance(found[0], str) else found
        state["turn"], state["draft"] = state["turn"] + 1, 0
        return turn_ids(renderer, after, reasoning="Let me see.")

    return script


def test_drafts_that_agree_are_taken_and_others_make_it_think(words):
    plan = [
        [say("a"), say(" A"), say("a"), None],
        [say("b"), say("c"), say("b"), say("b")],
        [say("end"), say("END "), say("end"), None],
    ]
    rollout, sampler = play(words, drafts_script(words, plan), agent=AgentConfig("dart"))
    assert (rollout.stop, rollout.reward) == ("done", 0.75)
    first, second, third = rollout.tokens.turns
    assert (first.reasoning, first.skip, first.action) == (
        *((), words.skip_ids),
        action(words, say("a")),
    )
    assert second.reasoning and second.action == action(words, say("b"))
    assert third.action == action(words, say("end"))
    sizes = [[len(action(words, draft)) for draft in turn[:3]] for turn in plan]
    # What was taken is no draft any more; where it thinks, all of them are thrown away.
    assert [note.drafted for note in rollout.notes] == [
        *(sum(sizes[0][1:]), sum(sizes[1]), sum(sizes[2][1:])),
    ]
    assert [note.forced for note in rollout.notes] == [2, 0, 2]
    assert [note.reasoning_tokens > 0 for note in rollout.notes] == [False, True, False]
    thinking = [r for r in sampler.requests if r.conversation == JOB.id]
    drafting = [r for r in sampler.requests if r.conversation == f"{JOB.id}#draft"]
    assert (len(thinking), len(drafting)) == (1, 9)
    assert len({request.seed for request in sampler.requests}) == 10
    # Drafts and thinking continue one and the same context.
    assert {r.prompt for r in drafting[3:6]} == {thinking[0].prompt + words.skip_ids}
    begin = rollout.tokens.prompt + words.skip_ids + first.action + first.observation
    assert thinking[0].prompt == begin
    assert measure([rollout]).sampled_tokens == sum(
        len(note.logprobs) + note.drafted for note in rollout.notes
    )


def test_a_majority_may_be_enough_and_invalid_drafts_never_are(words):
    plan = [[say("b"), say("end"), say("end"), None]]
    agent = AgentConfig("dart", agreement=2 / 3)
    rollout, _ = play(words, drafts_script(words, plan), agent=agent)
    assert rollout.success and rollout.notes[0].reasoning_tokens == 0
    bad = words.codec.encode("no call at all" + IM_END)
    plan = [[bad, bad, bad, say("end")]]
    rollout, _ = play(words, drafts_script(words, plan), agent=AgentConfig("dart"))
    assert rollout.success and rollout.notes[0].reasoning_tokens > 0
    assert rollout.notes[0].errors == ()


def test_a_draft_that_fails_ends_the_episode(words):
    def script(request, turn):
        return completion(request, (), "error", error="down")

    sampler = ScriptedSampler(script)
    runner = Runner(sampler, words, LocalHost(Echo), RolloutConfig(), agent=AgentConfig("dart"))
    (rollout,) = runner.run([JOB])
    assert (rollout.stop, rollout.tokens) == ("sampler_error", None)


def call(name, **arguments):
    return ParsedCall("call_1", name, arguments, "")


SAME = [
    (call("go", a=1, b="X y"), call("go", b=" x  Y", a="1.0")),
    (call("go", a=[1, {"k": True}]), call("go", a=["1", {"k": "true"}])),
    (call("go", n=1e3), call("go", n="1000")),
    (call("go", n=-0.5), call("go", n="-.5")),
]
DIFFERENT = [
    (call("go", a=1), call("Go", a=1)),
    (call("go", a=1), call("go", a=2)),
    (call("go", a=1), call("go", b=1)),
    (call("go", a=[1, 2]), call("go", a=[2, 1])),
    (call("go", a="ab"), call("go", a="a b")),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_calls_that_differ_in_spelling_are_equal(left, right):
    assert canonical([left]) == canonical([right])


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_calls_that_differ_in_meaning_are_not(left, right):
    assert canonical([left]) != canonical([right])
    assert canonical([left, right]) != canonical([right, left])


def test_agreement_counts_what_cannot_be_carried_out_against_it():
    actions = {1: "a", 2: "b", 3: "a", 4: None}
    assert agreed([2, 1, 3], actions.get, 2 / 3) == 1
    assert agreed([2, 1, 3], actions.get, 1.0) is None
    assert agreed([4, 1, 3], actions.get, 1.0) is None
    assert agreed([4, 4], actions.get, 0.1) is None


class Words(Echo):
    """Wants a, b and c in a row; the rest is as in Echo."""

    def step(self, call):
        self.said.append(call["arguments"]["word"])
        done = self.said[-3:] == ["a", "b", "c"]
        return Step(f"said {len(self.said)}", 1.0 if done else 0.1, done, done)


def adapt_script(renderer, plan):
    """Answers by conversation: `plan[n]` lists the calls of conversation n, from 1."""
    state = {}

    def script(request, count):
        name = request.conversation.split("/")[1]
        number = int(name.partition("#")[2] or 1)
        turn = state[number] = state.get(number, -1) + 1
        return turn_ids(renderer, plan[number][turn], reasoning="So.")

    return script


def finish(success, summary="as told"):
    return ("finish", {"success": success, "summary": summary})


def steps(*texts, logic="and"):
    return ("plan", {"steps": list(texts), "logic": logic})


def test_a_task_is_split_only_where_the_executor_fails(words):
    plan = {
        1: [say("b"), finish(False, "I said b too early")],
        2: [steps("say a", "say b and c")],
        3: [say("a"), finish(True)],
        4: [finish(False, "b is hard")],
        5: [steps("shout", "say them", logic="or")],
        6: [finish(False)],
        7: [say("b"), say("c")],
    }
    agent = AgentConfig("adapt", depth=3)
    rollout, sampler = play(words, adapt_script(words, plan), Words, agent)
    assert (rollout.stop, rollout.success, rollout.reward) == ("done", True, 1.0)
    assert len(rollout.parts) == 6
    assert [len(part.notes) for part in (rollout, *rollout.parts)] == [2, 1, 2, 1, 1, 1, 2]
    told = [part.messages[1]["content"] for part in (rollout, *rollout.parts)]
    assert told[0].startswith("pid")
    assert "I said b too early" in told[1] and "say" in told[1]
    assert "Your part of it:\nsay a" in told[2] and "said 1" in told[2]
    assert "Your part of it:\nsay b and c" in told[3] and "said 2" in told[3]
    assert "b is hard" in told[4] and "The part:\nsay b and c" in told[4]
    assert "Your part of it:\nsay them" in told[6]
    names = [tool["function"]["name"] for tool in rollout.parts[0].tools]
    assert names == ["plan"]
    # A conversation that is over leaves the sampler's cache before the next one comes.
    assert sampler.forgotten == [JOB.id, *(f"echo/a#{n}/0" for n in range(2, 8))]
    found = measure([rollout])
    assert (found.episodes, found.turns, found.successes) == (1, 10.0, 1)
    assert len({request.seed for request in sampler.requests}) == len(sampler.requests)


def test_the_last_level_is_not_split_and_failure_goes_up(words):
    plan = {
        1: [finish(False)],
        2: [steps("one", "two")],
        3: [finish(False)],
    }
    agent = AgentConfig("adapt", depth=2)
    rollout, _ = play(words, adapt_script(words, plan), Words, agent)
    # Step one failed at the last level, and `and` needs every step.
    assert (rollout.stop, rollout.success, len(rollout.parts)) == ("done", False, 2)


def test_an_or_goes_on_until_a_step_works(words):
    plan = {
        1: [finish(False)],
        2: [steps("one", "two", "three", logic="or")],
        3: [finish(False)],
        4: [say("a"), finish(True)],
    }
    rollout, _ = play(words, adapt_script(words, plan), Words, AgentConfig("adapt", depth=2))
    assert (rollout.stop, len(rollout.parts), rollout.reward) == ("done", 3, 0.1)


def test_attempts_and_the_whole_are_bounded(words):
    plan = {
        1: [say("x")] * 9,
        2: [steps("one", "two")],
        3: [say("x")] * 9,
    }
    agent = AgentConfig("adapt", depth=2, attempt_turns=3)
    rollout, _ = play(words, adapt_script(words, plan), Words, agent, max_turns=6)
    # 3 turns, then a plan, then what is left.
    assert [len(part.notes) for part in (rollout, *rollout.parts)] == [3, 1, 2]
    assert rollout.stop == "max_turns"


def test_a_plan_that_never_comes_is_a_failure(words):
    plan = {1: [finish(False)], 2: [say("a"), steps(), ("plan", {"steps": ["x"]})]}
    rollout, _ = play(words, adapt_script(words, plan), Words, AgentConfig("adapt"))
    assert (rollout.stop, rollout.success) == ("done", False)
    assert [len(note.errors) for note in rollout.parts[0].notes] == [1, 1, 1]


def test_faults_end_a_split_episode_with_what_there_is(words):
    class Flaky(Words):
        def step(self, call):
            if self.said:
                raise ConnectionError("gone")
            return super().step(call)

    plan = {1: [say("a"), finish(False)], 2: [steps("one")], 3: [say("b")]}
    rollout, _ = play(words, adapt_script(words, plan), Flaky, AgentConfig("adapt"))
    assert (rollout.stop, rollout.reward, len(rollout.parts)) == ("env_error", 0.1, 2)
    assert "gone" in rollout.error

    def script(request, count):
        if "#2" in request.conversation:
            return completion(request, (), "error", error="HTTP 500")
        return turn_ids(words, finish(False))

    rollout, _ = play(words, script, Words, AgentConfig("adapt"))
    assert (rollout.stop, rollout.error, rollout.parts) == ("sampler_error", "HTTP 500", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "reflexion"}, "there is no agent 'reflexion'"),
        ({"drafts": 1}, "drafts is 1"),
        ({"agreement": 0}, "agreement is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"attempt_turns": 0}, "attempt_turns is 0"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        AgentConfig(**changes)


def test_a_block_opened_again_behind_a_closed_one_is_read_as_reasoning(words):
    ids = words.codec.encode("\ud802\nHm.\n" + END_THINK + "\n\n") + action(words, say("end"))
    rollout, _ = play(words, lambda r, t: ids, agent=AgentConfig("think_tool"))
    (turn,) = rollout.tokens.turns
    assert rollout.success and turn.action == ids
