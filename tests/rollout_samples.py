"""Samplers that say what a test wants, and an environment that fails as a test wants."""

import os
import subprocess
import time

from race_jax.chat import renderer_for
from race_jax.envs.base import EnvironmentFault, Step
from race_jax.envs.potion_text import words
from race_jax.envs.potions import PotionShop, PotionShopConfig
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.rollout.protocol import Completion
from race_jax.tokenizer import END_THINK, IM_END
from race_jax.toolcalls import render_call


def tool(name, *arguments, **schema):
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments), **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def word_renderer(**settings):
    """A renderer over the potion shop's words; all other text is spelt in bytes."""
    return renderer_for(word_tokenizer(words(PotionShopConfig().size)), "qwen3", **settings)


def action_text(renderer, *calls, content=""):
    form = renderer.family.call_form
    written = "\n".join(render_call(name, arguments, form) for name, arguments in calls)
    return content + (renderer.family.call_gap if content and calls else "") + written


def turn_ids(renderer, *calls, reasoning="", content="", end=IM_END):
    """The ids of a turn as a policy would sample them."""
    thought = f"{reasoning}\n{END_THINK}\n\n" if reasoning else f"{END_THINK}\n\n"
    action = action_text(renderer, *calls, content=content) + end
    return renderer.codec.encode(thought) + renderer.codec.encode(action)


def completion(request, ids, reason=None, **changes):
    """A completion of these ids, cut at the request's budget."""
    ids = tuple(ids)[: request.max_tokens]
    reason = reason or ("stop" if ids and ids[-1] in request.stop else "length")
    logprobs = tuple(-(1 + n % 7) / 8 for n in range(len(ids)))
    given = {"tokens": ids, "logprobs": logprobs, "reason": reason, **changes}
    return Completion(conversation=request.conversation, **given)


class ScriptedSampler:
    """Answers each request with what `script(request, turn)` returns: a completion, ids or None.

    None leaves the request unanswered. `backwards` answers the last request first.
    """

    def __init__(self, script, context_length=100_000, backwards=False):
        self.script, self.context_length, self.backwards = script, context_length, backwards
        self.requests, self.queue, self.forgotten = [], [], []
        self.turns = {}

    def submit(self, request):
        assert all(waiting.conversation != request.conversation for waiting in self.queue)
        self.requests.append(request)
        self.queue.append(request)

    def poll(self, timeout=None):
        queue = self.queue[::-1] if self.backwards else self.queue
        self.queue = []
        answers = []
        for request in queue[:1] if self.backwards else queue:
            turn = self.turns[request.conversation] = self.turns.get(request.conversation, -1) + 1
            answer = self.script(request, turn)
            if answer is not None:
                answers.append(
                    answer if isinstance(answer, Completion) else completion(request, answer)
                )
        self.queue += queue[1:][::-1] if self.backwards else []
        if not answers and timeout:
            time.sleep(min(timeout, 0.01))
        return answers

    def forget(self, conversation):
        self.forgotten.append(conversation)
        self.queue = [r for r in self.queue if r.conversation != conversation]

    def close(self):
        pass

    def of(self, conversation):
        return [r for r in self.requests if r.conversation == conversation]


def potion_oracle(renderer, thinks=lambda turn: True, wrong=lambda conversation, turn: False):
    """A script that plays the potion shop rightly, with reasoning where `thinks` says so."""
    worlds = {}

    def script(request, turn):
        name = request.conversation
        if turn == 0:
            worlds[name] = PotionShop()
            worlds[name].reset(name.split("/")[1])
        reasoning, tool_name, arguments, _ = worlds[name].oracle()
        worlds[name].step({"name": tool_name, "arguments": arguments})
        if wrong(name, turn):
            arguments = {key: "h0" for key in arguments}
        said = reasoning if thinks(turn) else ""
        return turn_ids(renderer, (tool_name, arguments), reasoning=said)

    return script


class Echo:
    """Repeats what it is told; tasks and words make it fail in ways of their own."""

    name = "echo"
    system = "Say words."
    reward_range = (0.0, 1.0)
    tools = (tool("say", "word"),)

    def __init__(self):
        self.said = []

    def tasks(self, split):
        return ["a", "b"]

    def reset(self, task):
        if task == "slow start":
            time.sleep(60)
        if task == "fault":
            raise EnvironmentFault("the server is down")
        self.said = []
        return f"pid {os.getpid()}"

    def step(self, call):
        word = call["arguments"]["word"]
        if word == "hang":
            time.sleep(60)
        if word == "die":
            os._exit(7)
        if word == "raise":
            raise ZeroDivisionError("an accident")
        self.said.append(word)
        return Step(" ".join(self.said), len(self.said) / 4, word == "end", word == "end")

    def close(self):
        pass


class Parent(Echo):
    """Starts a process of its own, as an environment in Java does."""

    def reset(self, task):
        self.child = subprocess.Popen(["sleep", "600"])
        return str(self.child.pid)


class Broken(Echo):
    """Cannot be built."""

    def __init__(self):
        raise ValueError("Java is missing; install it")
