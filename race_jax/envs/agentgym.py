"""AgentGym's environment servers: webshop, searchqa and sciworld by their HTTP routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from race_jax.envs import scienceworld_text, webshop
from race_jax.envs.agentgym_base import SPLITS, AgentGym
from race_jax.envs.base import Step
from race_jax.envs.service import ServiceFault


class AgentGymWebShop(AgentGym):
    """AgentGym's `webshop` server: WebShop's text environment with 1,000 products.

    Its goals differ from world to world in prices and price limits, for the server draws them by
    the clock; an episode can therefore not be copied by replay. The native `WebShop` has no such
    trouble.
    """

    name = "agentgym-webshop"
    system = webshop.SYSTEM
    tools = webshop.TOOLS
    command = "webshop"
    splits: ClassVar[Mapping[str, Sequence[int]]] = {
        "train": range(500, 6910),
        "dev": range(0),
        "test": range(500),
    }

    def _create(self, item: int) -> int:
        return self.checked(
            self.service.post("/create", {}), "whole number", "the new world's number"
        )

    def _reset(self, item: int) -> str:
        reply = self.service.post("/reset", self.body(session_id=item), again=True)
        pair = self.checked(reply, "list", "the reply to /reset")
        return self.checked(pair[0] if pair else None, "text", "the first page")

    def _step(self, name: str, arguments: Mapping[str, Any]) -> Step:
        argument = arguments.get("keywords" if name == "search" else "item", "")
        # The server's grammar ends at a line's end.
        action = f"{name}[{' '.join(str(argument).splitlines())}]"
        reply = self.service.post("/step", self.body(action=action))
        reward = self.part(reply, "reward", "number")
        done = self.part(reply, "done", "truth value")
        return Step(self.part(reply, "state", "text"), reward, done, done and reward == 1.0)


class AgentGymSearchQA(AgentGym):
    """AgentGym's `searchqa` server: questions over a Wikipedia index.

    The server takes tagged text; a call becomes its tag. Of the server's opening only the question
    is kept, since the rest explains the tags.
    """

    name = "agentgym-searchqa"
    system = (
        "You answer a question. Search an encyclopedia as often as you need, one short query at a"
        " time, then answer with the shortest phrase that is right."
    )
    tools = (
        webshop.tool("search", "Search the encyclopedia.", "query", "What to look for."),
        webshop.tool(
            "answer", "Give the final answer.", "answer", "The answer, without a sentence."
        ),
    )
    command = "searchqa"
    splits: ClassVar[Mapping[str, Sequence[int]]] = {
        "train": range(51_713, 221_328),
        "dev": range(0),
        "test": range(51_713),
    }
    _tags = re.compile(r"</?(?:search|answer|information|think)>")
    _question = re.compile(r"\n\s*Question: ")

    def _create(self, item: int) -> int:
        reply = self.service.post("/create", {"id": item})
        return self.checked(reply, "whole number", "the new world's number")

    def _reset(self, item: int) -> str:
        prompt = self.service.post("/reset", self.body(id=item), again=True)
        if not isinstance(prompt, str):
            prompt = self.service.get("/observation", **self.body())
        text = self.checked(prompt, "text", "the prompt")
        found = self._question.search(text)
        return text[found.end() :].strip() if found else text

    def _step(self, name: str, arguments: Mapping[str, Any]) -> Step:
        tag: Literal["search", "answer"] = "answer" if name == "answer" else "search"
        value = str(arguments.get("answer" if tag == "answer" else "query", ""))
        action = f"<{tag}>{self._tags.sub('', value)}</{tag}>"
        reply = self.service.post("/step", self.body(action=action))
        reward = self.part(reply, "reward", "number")
        done = self.part(reply, "done", "truth value") or (
            tag == "answer" and self.config.one_answer
        )
        return Step(self.part(reply, "observation", "text"), reward, done, reward == 1.0)


def _sciworld_items() -> list[tuple[str, int, str]]:
    """The server's items in order: task, variation and split.

    It leaves out the tasks of topics 5, 9 and 10: growing, inclined planes and genetics.
    """
    left_out = ("grow-", "inclined-plane-", "mendelian-genetics-")
    return [
        (name, variation, split)
        for name, counts in scienceworld_text.VARIATIONS.items()
        if not name.startswith(left_out)
        for variation, split in enumerate(
            split for split, count in zip(SPLITS, counts, strict=True) for _ in range(count)
        )
    ]


def _by_split(items: Sequence[tuple[str, int, str]]) -> dict[str, tuple[int, ...]]:
    numbered = list(enumerate(items))
    return {want: tuple(n for n, (_, _, split) in numbered if split == want) for want in SPLITS}


class AgentGymSciWorld(AgentGym):
    """AgentGym's `sciworld` server: 23 of ScienceWorld's tasks, without simplifications.

    Tasks, tools and reward are those of `ScienceWorld`: the score over 100, which is -1 after a
    focus on the wrong object. The server begins differently: the task's text and the view of the
    room, without the simulator's own reset.
    """

    name = "agentgym-sciworld"
    system = scienceworld_text.SYSTEM
    tools = scienceworld_text.TOOLS
    reward_range = (-1.0, 1.0)
    key = "id"
    command = "sciworld"
    # Each world holds a Java machine that grows with every episode.
    renew_after = 40
    _items = tuple(_sciworld_items())
    _numbers: ClassVar[Mapping[str, int]] = {
        f"{name}/{variation}": number for number, (name, variation, _) in enumerate(_items)
    }
    splits: ClassVar[Mapping[str, Sequence[int]]] = _by_split(_items)

    def _name(self, item: int) -> str:
        if item >= len(self._items):
            raise ValueError(f"there is no item {item}; {self.command} has {len(self._items)}")
        name, variation, _ = self._items[item]
        return f"{name}/{variation}"

    def _item(self, task: str) -> int:
        if task not in self._numbers:
            raise ValueError(
                f"there is no task {task!r}; {self.name} takes a task and a variation, such as "
                f"melt/3, of the {len(self._items)} that `tasks` names"
            )
        return self._numbers[task]

    def _create(self, item: int) -> int:
        return self.part(self.service.post("/create", {}), "id", "whole number")

    def _reset(self, item: int) -> str:
        reply = self.service.post("/reset", self.body(data_idx=item), again=True)
        got = f"{self.part(reply, 'task_name', 'text')}/{reply.get('var_num')}"
        if got != self._name(item):
            raise ServiceFault(
                f"{self.service.address}: item {item} is {got} there, but {self._name(item)} by "
                f"ScienceWorld 1.2.3; run the server with that version"
            )
        description = self.part(reply, "task_description", "text")
        return f"{description}\n{self.part(reply, 'observation', 'text')}"

    def _step(self, name: str, arguments: Mapping[str, Any]) -> Step:
        line = scienceworld_text.command({"name": name, "arguments": arguments})
        reply = self.service.post("/step", self.body(action=line))
        # The server's reward is the difference to the step before.
        score = min(max(self.part(reply, "score", "number"), -100), 100)
        done = self.part(reply, "done", "truth value") or score < 0
        return Step(self.part(reply, "observation", "text"), score / 100, done, score == 100)
