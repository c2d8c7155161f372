"""WebShop as a native world: its files, grammar, pages, search and reward, without its server."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from race_jax.envs import webshop_pages as pages
from race_jax.envs.base import Call, Step, check_split
from race_jax.envs.webshop_catalogue import Product, load_products
from race_jax.envs.webshop_goals import Goal, GoalKind, build_goals
from race_jax.envs.webshop_reward import Nouns, Score, score, spacy_nouns, title_words
from race_jax.envs.webshop_search import ProductIndex

SYSTEM = (
    "You buy a product in a web shop for someone who tells what it must be, which options it must"
    " have and how much it may cost. Search for products, open one by clicking its code, choose"
    " each option by clicking its value, look at the description and features when in doubt, and"
    " click Buy Now once all fits: that ends the task, and only the first purchase counts."
    " Pages are rows of texts parted by [SEP]. Click only what stands on the current page; any"
    " other action leaves the page as it is."
)

_ACTION = re.compile(r"(.+)\[(.+)\]")
_FULL_TEST, _FULL_DEV = 500, 1000
_OWN_TEST, _OWN_DEV = 20, 20


def tool(name: str, purpose: str, argument: str, meaning: str) -> dict[str, Any]:
    """Schema of a tool with one text argument."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    function = {"name": name, "description": purpose, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    tool("search", "Search the shop for products.", "keywords", "Words to search for."),
    tool(
        "click",
        "Click on a button, a product's code or an option's value of the current page.",
        "item",
        "The text to click on, as it stands on the page.",
    ),
)
"""Schemas of the two actions."""


@dataclasses.dataclass(frozen=True)
class WebShopConfig:
    """Which shop, and which tasks.

    Attributes:
        products: WebShop's product file; None takes the package's own small shop, whose files the
            next two name then.
        attributes: WebShop's attribute file.
        human: WebShop's file of requests that people wrote; needed for human goals.
        goals: `human` or `synthetic` requests.
        num_products: How many products to read, at least 1; None for all.
        seed: Of prices and price limits.
        test_goals: How many tasks, the first ones, are the test split.
        dev_goals: How many tasks after those are the dev split; the rest are for training. WebShop
            has 500 and 1000 with all products, which is the default, and papers on the file of
            1000 products have 500 and 0. The package's own shop has 20 and 20.
        nouns: How the reward finds the nouns of titles: `words`, which needs no download, or
            `spacy`, as WebShop does.
    """

    products: str | None = None
    attributes: str | None = None
    human: str | None = None
    goals: GoalKind = "human"
    num_products: int | None = None
    seed: int = 233
    test_goals: int | None = None
    dev_goals: int | None = None
    nouns: Literal["words", "spacy"] = "words"

    def __post_init__(self):
        if self.products is None and (self.attributes or self.human):
            raise ValueError("attributes or human is set without products; name all of the files")
        if self.products is not None and self.attributes is None:
            raise ValueError(
                "products is set without attributes; name the attribute file too, such as "
                "items_ins_v2_1000.json"
            )
        if self.goals not in ("human", "synthetic"):
            raise ValueError(f"goals is {self.goals!r}; it is human or synthetic")
        if self.products is not None and self.goals == "human" and self.human is None:
            raise ValueError(
                "human goals need the file of human instructions; set human, such as "
                "items_human_ins.json, or goals: synthetic"
            )
        if self.nouns not in ("words", "spacy"):
            raise ValueError(f"nouns is {self.nouns!r}; it is words or spacy")
        if self.num_products is not None and self.num_products < 1:
            raise ValueError(f"num_products is {self.num_products}; it must be at least 1")
        for name in ("test_goals", "dev_goals"):
            count = {"test_goals": self.test_goals, "dev_goals": self.dev_goals}[name]
            if count is not None and count < 0:
                raise ValueError(f"{name} is {count}; it must be at least 0")


class WebShopWorld(NamedTuple):
    """What all episodes of a shop share; building it takes minutes for all of WebShop's products.

    Attributes:
        products: By asin.
        prices: By asin, in dollars.
        goals: The tasks in order.
        engine: The search engine.
        nouns: Finds the nouns of titles.
        splits: The tasks of train, dev and test.
    """

    products: Mapping[str, Product]
    prices: Mapping[str, float]
    goals: tuple[Goal, ...]
    engine: ProductIndex
    nouns: Nouns
    splits: Mapping[str, range]


@functools.lru_cache(maxsize=4)
def load_world(config: WebShopConfig) -> WebShopWorld:
    """Read a shop's files, draw its tasks and build its search engine.

    Worlds of equal settings are the same object within a process, and equal in any other.

    Raises:
        ValueError: A file or an entry is not as it must be, or the splits do not fit the goals.
        OSError: A file cannot be read.
    """
    nouns = spacy_nouns() if config.nouns == "spacy" else title_words
    files = _files(config)
    products = load_products(*files, limit=config.num_products)
    prices, goals = build_goals(products, config.goals, config.seed)
    return WebShopWorld(
        products={product.asin: product for product in products},
        prices=prices,
        goals=goals,
        engine=ProductIndex(products),
        nouns=nouns,
        splits=_splits(config, len(goals)),
    )


def _files(config: WebShopConfig) -> tuple[str | Path, str | Path, str | Path | None]:
    if config.products is None or config.attributes is None:
        own = Path(str(resources.files("race_jax.envs")))
        names = ("webshop_products.json", "webshop_attributes.json", "webshop_human.json")
        return own / names[0], own / names[1], own / names[2]
    human = config.human if config.goals == "human" else None
    return config.products, config.attributes, human


def _splits(config: WebShopConfig, count: int) -> dict[str, range]:
    own = config.products is None
    test, dev = config.test_goals, config.dev_goals
    test = (_OWN_TEST if own else _FULL_TEST) if test is None else test
    dev = (_OWN_DEV if own else _FULL_DEV) if dev is None else dev
    if test + dev > count:
        raise ValueError(
            f"test_goals={test} and dev_goals={dev} need {test + dev} tasks, but the files hold "
            f"{count}; lower them, such as test_goals: 500 and dev_goals: 0 for WebShop's file of "
            f"1000 products"
        )
    return {
        "train": range(test + dev, count),
        "dev": range(test, test + dev),
        "test": range(test),
    }


class WebShop:
    """The shop as an environment.

    A tool call does what WebShop's action of the same name does; `act` takes the actions as text.
    Pages are those of its "text" mode. Search and clicks go by WebShop's rules: a search is carried
    out from any page, a click only on what the page offers, and all else changes nothing. The
    reward comes with the purchase.

    Args:
        config: Which shop, and which tasks.
        world: A shop that is built already; `config` is not read then.

    Attributes:
        world: The shop, its tasks and its search engine.
        score: What the purchase was worth, part by part; None before it.
    """

    name = "webshop"
    system = SYSTEM
    reward_range = (0.0, 1.0)
    tools = TOOLS

    def __init__(self, config: WebShopConfig | None = None, world: WebShopWorld | None = None):
        self.world = world or load_world(config or WebShopConfig())
        self.score: Score | None = None
        self._goal: Goal | None = None
        self._page = pages.Page("", {})
        self._found: tuple[Product, ...] = ()
        self._number = 1
        self._product: Product | None = None
        self._where: Literal["search", "results", "item", "detail"] = "search"
        self._chosen: dict[str, str] = {}

    @property
    def clickables(self) -> tuple[str, ...]:
        """What can be clicked on the current page, in lower case."""
        return tuple(self._page.clicks)

    def tasks(self, split: str) -> Sequence[str]:
        """Names of a split's tasks, which are WebShop's goal numbers.

        Raises:
            ValueError: There is no such split.
        """
        check_split(split, self.world.splits, "webshop")
        return [str(number) for number in self.world.splits[split]]

    def reset(self, task: str) -> str:
        """Start an episode and return its first page.

        Raises:
            ValueError: There is no such task.
        """
        count = len(self.world.goals)
        if not (task.isascii() and task.isdigit() and int(task) < count):
            raise ValueError(f"there is no task {task!r}; webshop takes 0 to {count - 1}")
        self.score = None
        self._goal = self.world.goals[int(task)]
        self._start()
        return self._page.text

    def step(self, call: Call) -> Step:
        """Carry out one call of `search` or `click`; any other changes nothing.

        Raises:
            ValueError: There is no episode, or it is over.
        """
        arguments = call.get("arguments") or {}
        argument = arguments.get("keywords" if call.get("name") == "search" else "item", "")
        return self._do(str(call.get("name")), str(argument))

    def act(self, action: str) -> Step:
        """Carry out an action in WebShop's words, `search[words]` or `click[text]`.

        As in WebShop the text counts up to its last bracket, and the argument begins at the last
        opening one.

        Raises:
            ValueError: There is no episode, or it is over.
        """
        found = _ACTION.match(action)
        return self._do(*found.groups()) if found else self._do("", "")

    def close(self) -> None:
        """There is nothing to free."""

    def _do(self, name: str, argument: str) -> Step:
        if self._goal is None or self.score is not None:
            raise ValueError("there is no episode, or it is over; call reset(task) first")
        argument = argument.lower()
        if name == "search" and argument:
            self._search(argument)
        elif name == "click" and argument in self._page.clicks:
            self._click(argument)
        bought = self.score
        if bought is None:
            return Step(self._page.text, 0.0, False)
        return Step(self._page.text, bought.reward, True, bought.reward == 1.0)

    @property
    def _text(self) -> str:
        assert self._goal is not None
        return self._goal.text

    def _start(self) -> None:
        self._where, self._found, self._product, self._chosen = "search", (), None, {}
        self._page = pages.search_page(self._text)

    def _search(self, words: str) -> None:
        self._found = self.world.engine.search(words)
        self._results(1)

    def _results(self, number: int) -> None:
        self._where, self._number, self._product, self._chosen = "results", number, None, {}
        self._page = pages.results_page(self._text, self._found, number)

    def _open(self, product: Product) -> None:
        self._where, self._product = "item", product
        self._page = pages.item_page(self._text, product)

    def _click(self, item: str) -> None:
        kind, value = self._page.clicks[item]
        if kind == "product":
            self._open(self.world.products[value])
        elif value == pages.BACK:
            self._start()
        elif self._product is None:
            turn = {pages.NEXT: 1, pages.PREVIOUS: -1}.get(value)
            if turn is not None:
                self._results(self._number + turn)
        elif kind == "option":
            self._chosen[value] = item
            self._open(self._product)
        elif value == pages.PREVIOUS and self._where == "item":
            self._results(self._number)
        elif value == pages.PREVIOUS:
            self._open(self._product)
        elif value == pages.BUY:
            self._buy(self._product)
        else:
            self._where = "detail"
            self._page = pages.detail_page(self._text, self._product, value)

    def _buy(self, product: Product) -> None:
        assert self._goal is not None
        price = self.world.prices[product.asin]
        self.score = score(product, price, self._chosen, self._goal, self.world.nouns)
        self._page = pages.done_page(product.asin, self._chosen, self.score.reward)
