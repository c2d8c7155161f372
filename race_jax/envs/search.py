"""DeepSearch: questions that are answered by searching a collection of documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from race_jax.envs.base import Call, EnvironmentFault, Step, check_split
from race_jax.envs.search_index import read_rows
from race_jax.envs.service import Service
from race_jax.rewards import exact_match, f1, set_f1

SYSTEM = (
    "You answer questions with the help of a collection of documents. Call search with a short "
    "query to find documents; one search seldom tells everything, so search again with what you "
    "have learned. When you know the answer, call answer once with the answer alone: a name, a "
    "number, a date or a few words, without a sentence around it."
)

FAILED = "The search failed and brought nothing. Try again, or answer with what you know."
NOTHING = "The search found no documents. Try other words."
ANSWERED = "The answer was received."

SPLITS = ("train", "dev", "test")

REWARDS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "f1": f1,
    "set_f1": set_f1,
    "em": exact_match,
}


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: tuple[Mapping[str, Any], ...] = (
    _tool("search", "Find documents that match a query.", "query"),
    _tool("answer", "Give the final answer, as short as it can be.", "text"),
)


def _sample(split: str) -> str:
    return str(resources.files("race_jax.envs").joinpath(f"search_{split}.jsonl"))


@dataclasses.dataclass(frozen=True)
class DeepSearchConfig:
    """Which questions are asked, and where is searched.

    Each split is a JSONL file or a list of them, one question a line: `{"id": ..., "question": ...,
    "golden_answers": [...]}`. `answer`, a text or a list, can stand in for `golden_answers`; a line
    without `id` gets its place in the file, from 0. By default: 12 questions on an invented
    country, which go with the corpus that ships with the package.

    Attributes:
        address: Of a server with Search-R1's route `/retrieve`.
        train: Questions to train on.
        dev: Questions to choose by.
        test: Questions to test on.
        reward: `f1`, `set_f1` (ASearcher's) or `em`; see `race_jax.rewards`.
        format_reward: Whether the reward counts only if every turn keeps the format: at most one
            call, whole, and at most one `</think>`.
        text_answers: Whether a turn of text without a call is the answer.
        topk: Documents per search, at least 1.
        max_chars: The longest observation, in characters, at least 100; each document may take an
            equal share.
        timeout: Seconds for one reply of the server, above 0.
        attempts: How often a search is sent at most, at least 1.
        pause: Seconds before the second attempt; each later pause is twice as long.
    """

    address: str = "http://127.0.0.1:8000"
    train: str | Sequence[str] = _sample("train")
    dev: str | Sequence[str] = _sample("dev")
    test: str | Sequence[str] = _sample("test")
    reward: str = "f1"
    format_reward: bool = False
    text_answers: bool = False
    topk: int = 3
    max_chars: int = 4000
    timeout: float = 30.0
    attempts: int = 4
    pause: float = 0.5

    def __post_init__(self):
        if self.reward not in REWARDS:
            raise ValueError(f"reward is {self.reward!r}; it can be {', '.join(REWARDS)}")
        if self.topk < 1:
            raise ValueError(f"topk is {self.topk}; it must be at least 1")
        if self.max_chars < 100:
            raise ValueError(f"max_chars is {self.max_chars}; it must be at least 100")


class Question(NamedTuple):
    """A question and its right answers, of which any counts."""

    text: str
    golden: tuple[str, ...]


class DeepSearch:
    """Question answering with search: any number of searches, then one answer.

    The reward is that of the answer by `config.reward`, or 0 where a turn breaks the format that
    `config.format_reward` asks for; success is an exact match whatever the reward. A search that
    fails, after retries, is told to the agent, and the episode goes on.

    Args:
        config: Questions, server and limits.

    Attributes:
        searches: Searches of this episode, failed ones included.
        failed_searches: Those of them that failed.
        last_fault: What went wrong in the last failed search; empty if none has failed.

    Raises:
        ValueError: A setting is out of range.
        EnvironmentFault: No server answers at the address, or it does not search.
    """

    name = "search"
    system = SYSTEM
    reward_range = (0.0, 1.0)
    tools = TOOLS

    def __init__(self, config: DeepSearchConfig | None = None):
        self.config = config or DeepSearchConfig()
        self.format_reward = self.config.format_reward
        self.answer_tool = "answer" if self.config.text_answers else ""
        self._splits: dict[str, dict[str, Question]] = {}
        self._question: Question | None = None
        self.searches = self.failed_searches = 0
        self.last_fault = ""
        self._service = Service(
            self.config.address,
            self.config.timeout,
            self.config.attempts,
            self.config.pause,
            start="start one with: race-jax search-server --corpus FILE --port N",
        )
        self._service.check()
        # Of a server that never searches, agents alone would hear, at every step.
        self._find("word")

    def tasks(self, split: str) -> Sequence[str]:
        """Names of a split's questions: the file's name without its ending, and the id.

        Raises:
            ValueError: There is no such split, or its files are faulty.
        """
        return list(self._questions(split))

    def reset(self, task: str) -> str:
        """Start an episode and return the question.

        Raises:
            ValueError: There is no such task.
        """
        found = {
            split: self._questions(split)[task]
            for split in SPLITS
            # Files of other names are not read: training questions are many.
            if any(task.startswith(f"{Path(file).stem}/") for file in self._files(split))
            and task in self._questions(split)
        }
        if not found:
            raise ValueError(f"there is no task {task!r}; tasks(split) names those that there are")
        if len(set(found.values())) > 1:
            raise ValueError(
                f"task {task!r} is one question in {' and another in '.join(found)}; rename a file"
            )
        (self._question, *_) = found.values()
        self.searches = self.failed_searches = 0
        self.last_fault = ""
        return self._question.text

    def step(self, call: Call) -> Step:
        """Search or answer.

        Raises:
            ValueError: There is no episode, it is over, or there is no such tool.
        """
        if self._question is None:
            raise ValueError("the episode is over; call reset(task) before the next step")
        name, arguments = call["name"], call["arguments"]
        if name == "search":
            return Step(self._search(str(arguments["query"])), 0.0, False)
        if name != "answer":
            raise ValueError(f"DeepSearch has no tool {name!r}; it has search and answer")
        text, golden = str(arguments["text"]), self._question.golden
        self._question = None
        reward = REWARDS[self.config.reward](text, golden)
        return Step(ANSWERED, reward, True, exact_match(text, golden) == 1.0)

    def close(self) -> None:
        """Close the connections."""
        self._question = None
        self._service.close()

    def _find(self, query: str) -> list[str]:
        """Texts of the best documents; raises EnvironmentFault."""
        topk = self.config.topk
        request = {"queries": [query], "topk": topk, "return_scores": True}
        reply = self._service.post("/retrieve", request, again=True)
        return _contents(reply, f"{self._service.address}/retrieve")[:topk]

    def _search(self, query: str) -> str:
        self.searches += 1
        try:
            texts = self._find(query)
        except EnvironmentFault as fault:
            self.failed_searches += 1
            self.last_fault = str(fault)
            return FAILED
        if not texts:
            return NOTHING
        share = (self.config.max_chars + 1) // len(texts) - 1
        return "\n".join(_cut(_shown(n, text), share) for n, text in enumerate(texts, 1))

    def _questions(self, split: str) -> dict[str, Question]:
        check_split(split, SPLITS, "DeepSearch")
        if split not in self._splits:
            self._splits[split] = _read_questions(self._files(split))
        return self._splits[split]

    def _files(self, split: str) -> list[str]:
        given = getattr(self.config, split)
        return [given] if isinstance(given, str) else list(given)


def _read_questions(files: Sequence[str]) -> dict[str, Question]:
    """Questions by name; ValueError names file, line and rule of the first fault."""
    questions: dict[str, Question] = {}
    for file in files:
        for place, (number, row) in enumerate(read_rows(file, "questions")):
            where = f"{file}, line {number}"
            text = row.get("question")
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{where}: there is no `question`; it must be a text")
            golden = row.get("golden_answers", row.get("answer"))
            golden = [golden] if isinstance(golden, str) else golden
            if (
                not isinstance(golden, list)
                or not golden
                or not all(isinstance(answer, str) and answer.strip() for answer in golden)
            ):
                raise ValueError(
                    f"{where}: there is no right answer; `golden_answers` must be a list of texts"
                )
            name = f"{Path(file).stem}/{row.get('id', place)}"
            if name in questions:
                raise ValueError(f"{where}: a second question is named {name!r}; names must differ")
            text = text.strip()
            mark = "" if text.endswith("?") else "?"
            questions[name] = Question(text + mark, tuple(golden))
    return questions


def _contents(reply: Any, where: str) -> list[str]:
    """The documents' texts in a reply to one query, with scores or without."""
    result = reply.get("result") if isinstance(reply, Mapping) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise EnvironmentFault(
            f"{where}: one query was asked, but the server answered {reply!r:.300}"
        )
    texts = []
    for item in result[0]:
        document = item.get("document", item) if isinstance(item, Mapping) else None
        contents = document.get("contents") if isinstance(document, Mapping) else None
        if not isinstance(contents, str):
            raise EnvironmentFault(
                f"{where}: the server found something without `contents`: {item!r:.300}"
            )
        texts.append(contents)
    return texts


def _shown(number: int, contents: str) -> str:
    title, _, body = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {body}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
