"""Turns of text without a call, and the form of turns, where an environment makes them count."""

import pytest
from env_servers import serving
from rollout_samples import completion, tool, turn_ids, word_renderer

from race_jax.envs.base import Step
from race_jax.envs.potions import PotionShop
from race_jax.envs.search import DeepSearch, DeepSearchConfig
from race_jax.rollout.episode import Episode
from race_jax.rollout.hosts import opening_of
from race_jax.rollout.jobs import Action, Job, Opening
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.manners import Manner
from race_jax.rollout.protocol import Request
from race_jax.rollout.results import Rollout

TOOLS = (tool("search", "query"), tool("answer", "text"), tool("both", "a", "b"))
TEXT = Opening("", TOOLS, (0.0, 1.0), "Where?", answer_tool="answer")
FORM = Opening("", TOOLS, (0.0, 1.0), "Where?", format_reward=True)


@pytest.fixture(scope="module")
def words():
    return word_renderer()


def play(renderer, opening, *turns, manner=None, **settings):
    """The rollout, and the calls that reached the environment; an answer is worth 0.5."""
    config = RolloutConfig(**settings)
    episode = Episode(Job("toy", "t", 0), renderer, config, 100_000, manner or Manner())
    following, calls, waiting = episode.begin(opening), [], list(turns)
    while not isinstance(following, Rollout):
        if isinstance(following, Request):
            following = episode.sampled(completion(following, waiting.pop(0)))
        else:
            assert isinstance(following, Action)
            calls.append(following.call)
            over = following.call["name"] == "answer"
            following = episode.stepped(Step("It was received.", 0.5, over, over))
    return following, calls


def test_text_without_a_call_goes_to_the_tool_that_the_environment_names(words):
    search = turn_ids(words, ("search", {"query": "x"}))
    rollout, calls = play(words, TEXT, search, turn_ids(words, content=" Paris. ", reasoning="so"))
    assert calls == [
        {"name": "search", "arguments": {"query": "x"}},
        {"name": "answer", "arguments": {"text": "Paris."}},
    ]
    assert (rollout.stop, rollout.reward, rollout.success) == ("done", 0.5, True)
    assert (rollout.notes[1].carried_out, rollout.notes[1].errors) == (1, ())
    # The message stays what the policy wrote: there is no call, so the reply answers none.
    assert "tool_calls" not in rollout.messages[-2]
    assert rollout.messages[-1] == {"role": "user", "content": "It was received."}


def test_text_is_no_call_where_no_tool_takes_it_or_it_was_cut_off_or_is_none(words):
    text = turn_ids(words, content="Paris.")
    for opening, turn, why in (
        (TEXT._replace(answer_tool=""), text, "no tool was called"),
        (TEXT, text[:-1], "cut off"),
        (TEXT, turn_ids(words, content="  "), "neither text nor a tool call"),
    ):
        rollout, calls = play(words, opening, turn, max_turn_tokens=len(turn), max_invalid=1)
        assert (rollout.stop, calls) == ("invalid_calls", [])
        assert why in rollout.notes[0].errors[0]


def test_drafts_that_answer_alike_agree(words):
    text = turn_ids(words, content="Paris.")
    own = text[len(words.skip_ids) :]
    rollout, calls = play(words, TEXT, own, own, manner=Manner(drafts=2))
    assert (len(calls), rollout.notes[0].drafted, rollout.stop) == (1, len(own), "done")


@pytest.mark.parametrize(
    ("name", "said"), [("gone", "there is no tool 'gone'"), ("both", "require one argument")]
)
def test_a_tool_that_cannot_take_text_is_a_fault(words, name, said):
    rollout, _ = play(words, TEXT._replace(answer_tool=name))
    assert rollout.stop == "env_error" and said in rollout.error


def test_the_reward_is_multiplied_by_that_of_the_form(words):
    def reward(*turns, **settings):
        rollout, calls = play(words, FORM, *turns, **settings)
        assert rollout.success and calls[-1]["name"] == "answer"
        return rollout.reward

    answer = turn_ids(words, ("answer", {"text": "Paris"}))
    assert reward(turn_ids(words, ("search", {"query": "x"}), reasoning="well"), answer) == 0.5
    assert reward(turn_ids(words, content="no call"), answer) == 0.5
    two = turn_ids(words, ("search", {"query": "x"}), ("search", {"query": "y"}))
    assert reward(two, answer, calls_per_turn="several") == 0.0
    assert reward(turn_ids(words, content="</think>"), answer) == 0.0
    assert reward(turn_ids(words, ("answer", {"text": "a shop assistant"}))) == 0.0
    rollout, _ = play(words, FORM._replace(format_reward=False), two, answer)
    assert rollout.reward == 0.5


def test_environments_say_so_in_their_opening():
    assert (opening_of(PotionShop(), "0").answer_tool) == ""
    with serving(lambda *_: {"result": [[]]}) as server:
        for settings in ({}, {"text_answers": True}, {"format_reward": True}):
            env = DeepSearch(DeepSearchConfig(server.address, **settings))
            opening = opening_of(env, "search_test/test_0")
            assert opening.answer_tool == ("answer" if "text_answers" in settings else "")
            assert opening.format_reward == ("format_reward" in settings)
            env.close()
