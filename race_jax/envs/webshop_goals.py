"""WebShop's tasks: which requests there are, what they may cost, and their order."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from race_jax.envs.webshop_catalogue import Instruction, Product

GoalKind = Literal["human", "synthetic"]

NO_LIMIT = 1_000_000.0
"""The most that may be spent where the request names no price."""

_LIMITS = [10.0 * n for n in range(1, 100)]
_SHUFFLE_SEED = 233


@dataclasses.dataclass(frozen=True)
class Goal:
    """One task.

    Attributes:
        product: What was in mind; others that fit are as good.
        text: The request as the pages show it.
        attributes: What the purchase must be.
        options: Values that must be chosen.
        price_limit: The most it may cost, in dollars.
    """

    product: Product
    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_limit: float


def build_goals(
    products: Sequence[Product], kind: GoalKind, seed: int
) -> tuple[dict[str, float], tuple[Goal, ...]]:
    """Draw prices and price limits, and put the tasks in WebShop's order.

    WebShop draws both before it seeds, so that texts and limits differ from process to process.
    Here they follow from `seed`, while the order is WebShop's own: task 17 asks for the same
    product, attributes and options.

    Args:
        products: The shop.
        kind: `human` takes each request that a person wrote, `synthetic` the machine-made ones,
            once for each combination of the product's options.
        seed: Of prices and price limits.

    Returns:
        The price of each product by asin, within its range, and the tasks.

    Raises:
        ValueError: No product has a request of this kind.
    """
    rng = random.Random(seed)
    prices = {
        product.asin: rng.uniform(*product.prices)
        if len(product.prices) == 2
        else product.prices[0]
        for product in products
    }
    requests = _human if kind == "human" else _synthetic
    goals = [goal for product in products for goal in requests(product, prices, rng)]
    if not goals:
        remedy = "goals: synthetic" if kind == "human" else "goals: human"
        raise ValueError(
            f"no product has a {kind} instruction with attributes; give the file that has them, "
            f"or set `{remedy}`"
        )
    random.Random(_SHUFFLE_SEED).shuffle(goals)
    return prices, tuple(goals)


def _human(product: Product, prices: Mapping[str, float], rng: random.Random) -> Iterator[Goal]:
    for asked in product.human:
        if asked.attributes:
            yield _goal(product, asked, asked.text.strip("."), _limit(prices[product.asin], rng))


def _synthetic(product: Product, prices: Mapping[str, float], rng: random.Random) -> Iterator[Goal]:
    if product.instruction is None:
        return
    limit = _limit(prices[product.asin], rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        listed = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = product.instruction.text + (f" with {listed}" if listed else "")
        yield _goal(product, dataclasses.replace(product.instruction, options=options), text, limit)


def _limit(price: float, rng: random.Random) -> float:
    above = [limit for limit in _LIMITS if limit > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def _goal(product: Product, asked: Instruction, text: str, limit: float) -> Goal:
    said = "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"
    options = tuple(asked.options.values())
    return Goal(product, text + said, asked.attributes, options, limit)
