"""WebShop's pages as its "text" mode shows them, and what can be clicked on each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from race_jax.envs.webshop_catalogue import Product

PER_PAGE = 10
"""Products on one page of results."""

SEARCH, BACK, NEXT, PREVIOUS, BUY = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
DETAILS = ("Description", "Features", "Reviews")


class Click(NamedTuple):
    """What a clickable text stands for.

    Attributes:
        kind: A button, a product's link or an option's value.
        value: The button's label, the product's asin, or the option's name.
    """

    kind: Literal["button", "product", "option"]
    value: str


class Page(NamedTuple):
    """One page.

    Attributes:
        text: What stands on it, parts joined by " [SEP] ".
        clicks: What can be clicked, by its text in lower case.
    """

    text: str
    clicks: Mapping[str, Click]


def search_page(instruction: str) -> Page:
    """The page that an episode begins on."""
    return _page(["WebShop", "Instruction:", instruction, SEARCH], _buttons(SEARCH))


def results_page(instruction: str, found: Sequence[Product], number: int) -> Page:
    """One page of what a search found.

    Args:
        instruction: The request.
        found: All that was found.
        number: Of the page, from 1.
    """
    shown = found[(number - 1) * PER_PAGE : number * PER_PAGE]
    turns = [PREVIOUS] if number > 1 else []
    turns += [NEXT] if number * PER_PAGE < len(found) else []
    listed = [part for p in shown for part in (p.asin, p.title, p.price_tag)]
    count = f"Page {number} (Total results: {len(found)})"
    clicks = _buttons(BACK, *turns)
    clicks |= {product.asin.lower(): Click("product", product.asin) for product in shown}
    return _page([*_head(instruction), count, *turns, *listed], clicks)


def item_page(instruction: str, product: Product) -> Page:
    """A product's own page."""
    options = [part for name, values in product.options.items() for part in (name, *values)]
    facts = [product.title, f"Price: {product.price_tag}", "Rating: N.A."]
    clicks = {v: Click("option", name) for name, values in product.options.items() for v in values}
    clicks |= _buttons(BACK, PREVIOUS, *DETAILS, BUY)
    parts = [*_head(instruction), PREVIOUS, *options, *facts, *DETAILS, BUY]
    return _page(parts, clicks)


def detail_page(instruction: str, product: Product, which: str) -> Page:
    """The description, the features or the reviews of a product; there are never reviews."""
    body = {
        "Description": [product.description or "No Description"],
        "Features": product.bullets or ["No Features"],
        "Reviews": ["No Reviews"],
    }[which]
    return _page([*_head(instruction), PREVIOUS, *body], _buttons(BACK, PREVIOUS))


def done_page(asin: str, options: Mapping[str, str], reward: float) -> Page:
    """What follows a purchase."""
    parts = ["Thank you for shopping with us!", "Your code:", "None"]
    parts += ["(Paste it in your MTurk interface.)", "Purchased", "asin", asin]
    parts += ["options", json.dumps(dict(options), sort_keys=True)]
    for name in ("attrs", "category", "query", "product category"):
        parts += [name, "None"]
    parts += ["Target", "asin", "options", "attrs", "price upper", "instuction text", "category"]
    parts += ["product category", "query", "Goal", "None", "Reward"]
    parts += ["Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return _page(parts, {})


def _head(instruction: str) -> list[str]:
    return ["Instruction:", instruction, BACK]


def _buttons(*labels: str) -> dict[str, Click]:
    return {label.lower(): Click("button", label) for label in labels}


def _page(parts: Sequence[str], clicks: Mapping[str, Click]) -> Page:
    stripped = (part.strip() for part in parts)
    return Page(" [SEP] ".join(part for part in stripped if part), clicks)
