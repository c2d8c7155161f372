"""Rewards of answers: exact match, F1 and format, as the field computes them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_TO_SPACE = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HAN = re.compile("([\u3400-\u4dbf\u4e00-\u9fff])")


def normalize_answer(text: str) -> str:
    """An answer without what does not count: lower case, no ASCII punctuation, no articles.

    Punctuation goes without leaving a space (`U.S.` is `us`), articles go as whole words, and runs
    of white space become one space.

    Reference: the exact match of SQuAD and of Search-R1.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(prediction: str, golden: Sequence[str]) -> float:
    """1 if the normalised prediction equals a normalised golden answer, else 0.

    Departure from Search-R1: where nothing is left of an answer ("The The", "!"), both are compared
    as written but for case and outer spaces; otherwise an empty prediction would match.

    Args:
        prediction: The answer, without tags around it.
        golden: The right answers, at least one.

    Raises:
        ValueError: `golden` is empty, or is a string and no sequence of strings.
    """
    return float(any(_kept(prediction) == _kept(gold) for gold in _answers(golden)))


def f1(prediction: str, golden: Sequence[str]) -> float:
    """The best F1 of words over the golden answers, in [0, 1].

    F1 = 2 p r / (p + r), with p and r the shares of the prediction's and the golden answer's words,
    counted as often as they occur, that the other one has too. Words are those of the normalised
    texts.

    Args:
        prediction: The answer, without tags around it.
        golden: The right answers, at least one.

    Raises:
        ValueError: `golden` is empty, or is a string and no sequence of strings.

    Reference: the F1 of SQuAD and HotpotQA.
    """
    words = Counter(_kept(prediction).split())
    return max(_overlap(words, Counter(_kept(gold).split())) for gold in _answers(golden))


def set_f1(prediction: str, golden: Sequence[str]) -> float:
    """The best F1 of sets of words over the golden answers, in [0, 1].

    Unlike `f1`, a word counts once, articles count, punctuation separates words, Chinese is taken
    by character, and `true` and `false` read `yes` and `no`.

    Args:
        prediction: The answer, without tags around it.
        golden: The right answers, at least one.

    Raises:
        ValueError: `golden` is empty, or is a string and no sequence of strings.

    Reference: the reward of ASearcher.
    """
    words = Counter(_word_set(prediction))
    return max(_overlap(words, Counter(_word_set(gold))) for gold in _answers(golden))


def extract_answer(response: str) -> str | None:
    """The text of the last whole `<answer>` block, or None.

    Args:
        response: What the policy wrote, and nothing else: instructions often hold an example of
            such a block, which is no answer.
    """
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def format_reward(
    generations: Sequence[str], actions: Sequence[str] = ("search", "access", "answer")
) -> float:
    """1 if every generation of an episode keeps the format, else 0.

    A generation keeps it if each action's opening and closing tags are equally many, all actions
    together open at most once, `</think>` stands there at most once, and neither `Assistant` nor
    `assistant` does, which a model writes that plays the dialogue on by itself. An episode's reward
    is the product of this and its answer's.

    Args:
        generations: What the policy wrote in each turn, reasoning included, and nothing else.
        actions: Names of the tags that hold actions.

    Reference: the format reward of ASearcher, with which CARL trains.
    """
    return float(all(_keeps_format(text, actions) for text in generations))


def _keeps_format(text: str, actions: Sequence[str]) -> bool:
    opened = [text.count(f"<{name}>") for name in actions]
    closed = [text.count(f"</{name}>") for name in actions]
    spoken = "Assistant" in text or "assistant" in text
    return opened == closed and sum(opened) <= 1 and text.count("</think>") <= 1 and not spoken


def _answers(golden: Sequence[str]) -> Sequence[str]:
    if isinstance(golden, str):
        raise ValueError(f"golden is the text {golden!r:.80}; give a list of answers")
    if not golden:
        raise ValueError("golden is empty; a question needs at least one right answer")
    return golden


def _kept(text: str) -> str:
    return normalize_answer(text) or text.strip().lower()


def _word_set(text: str) -> set[str]:
    spaced = _HAN.sub(r" \1 ", text.lower().translate(_PUNCTUATION_TO_SPACE))
    renamed = {"true": "yes", "false": "no"}
    return {renamed.get(word, word) for word in spaced.split()}


def _overlap(left: Counter[str], right: Counter[str]) -> float:
    common = (left & right).total()
    # 2 p r / (p + r) with p = common / left and r = common / right.
    return 2 * common / (left.total() + right.total()) if common else 0.0
