"""WebShop's reward: how well a purchase fits a request."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rapidfuzz import fuzz, utils

from race_jax.envs.webshop_catalogue import Product
from race_jax.envs.webshop_goals import Goal

Nouns = Callable[[str], Sequence[str]]
"""The nouns of a title in lower case, in order, with repetitions."""

_THRESHOLD = 85
_LATIN = dict.fromkeys(range(128, 256))

# WebShop's colour words: the first of them that a value contains stands for the value.
_COLOUR_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
_COLOURS = tuple(_COLOUR_WORDS.split())

_WORD = re.compile(r"[a-z]+(?:[.'’][a-z]+)*")
_FUNCTION_WORDS = """
about above after against all along also and another any are around because been before behind
below between both but can could does down during each easy even ever every extra few for from
good great had has have her here him his how into its just large less like little long many
more most much must new not off one only onto other our out over own per perfect please same
several shall she should small soft some such than that the their them then there these they
this those through too under until upon use used using very was were what when where which
while who whose will with within without would you your an as at be by do he if in is it me my
no of on or so to up us we
"""
_NO_NOUNS = frozenset(_FUNCTION_WORDS.split())


class Score(NamedTuple):
    """A purchase's reward and what it is made of.

    Attributes:
        reward: In [0, 1].
        kind: Whether it is the right kind of thing: 1, 0.5, 0.1 or 0; it multiplies the rest.
        attributes: How many of the goal's attributes it has.
        options: How many of the goal's options were chosen.
        price: Whether it costs no more than the goal allows.
    """

    reward: float
    kind: float
    attributes: int
    options: int
    price: bool


def score(
    product: Product, price: float, chosen: Mapping[str, str], goal: Goal, nouns: Nouns
) -> Score:
    """Reward of a purchase.

    `r = kind * (attributes + options + [price <= limit]) / (n_attributes + n_options + 1)`

    Args:
        product: What was bought.
        price: What it costs, in dollars.
        chosen: The options' chosen values by name.
        goal: What was asked for.
        nouns: Finds the nouns of titles.
    """
    attributes = sum(_has(product, wanted) for wanted in goal.attributes)
    values = [plain_colour(value) for value in chosen.values()]
    options = sum(
        any(_alike(value, plain_colour(wanted)) for value in values) for wanted in goal.options
    )
    cheap = price <= goal.price_limit
    kind = kind_score(product, goal.product, nouns)
    share = (attributes + options + cheap) / (len(goal.attributes) + len(goal.options) + 1)
    return Score(kind * share, kind, attributes, options, cheap)


def kind_score(bought: Product, wanted: Product, nouns: Nouns) -> float:
    """How much the bought product is the kind of thing that was wanted: 1, 0.5, 0.1 or 0.

    The share of the wanted title's nouns that the bought title has decides: none at all gives 0 and
    less than a tenth 0.1. At most a fifth gives 0.5, unless both were found by the same query or
    share two categories.
    """
    needed = nouns(wanted.title)
    overlap = len(set(needed) & set(nouns(bought.title))) / len(needed) if needed else 0.2
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    shared = _categories(bought) & _categories(wanted)
    alike = bought.query == wanted.query or len(shared) >= 2 or overlap > 0.2
    return 1.0 if alike else 0.5


def plain_colour(value: str) -> str:
    """The first of WebShop's colour words in `value`; without one, `value` itself."""
    return next((colour for colour in _COLOURS if colour in value), value)


def title_words(title: str) -> Sequence[str]:
    """A title's words without function words and a few plain adjectives, in place of its nouns.

    It needs no model. Unlike a tagger it takes most adjectives, verbs and brand names for nouns;
    in titles, which are rows of names, that changes the shares by some hundredths.
    """
    words = _WORD.findall(title.lower())
    return [word for word in words if len(word) > 1 and word not in _NO_NOUNS]


def spacy_nouns(model: str = "en_core_web_sm") -> Nouns:
    """Nouns and proper nouns as spaCy tags them, which is what WebShop does.

    Args:
        model: An installed spaCy pipeline. WebShop's text names `en_core_web_sm`, its code at times
            `en_core_web_lg`.

    Raises:
        ValueError: spaCy or the pipeline is not installed.
    """
    try:
        import spacy  # pyright: ignore[reportMissingImports]

        tag = spacy.load(model)
    except (ImportError, OSError) as error:
        raise ValueError(
            f"nouns by spaCy need it and its pipeline {model!r} ({error}); install both with "
            f"`pip install spacy` and `python -m spacy download {model}`, or set `nouns: words`"
        ) from None

    @functools.lru_cache(maxsize=100_000)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(word.text.lower() for word in tag(title) if word.pos_ in ("NOUN", "PROPN"))

    return nouns


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def _has(product: Product, wanted: str) -> bool:
    if any(_alike(attribute, wanted) for attribute in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(wanted in text.lower() for text in texts)


def _alike(first: str, second: str) -> bool:
    """Whether thefuzz's `token_set_ratio` is over 85; it drops Latin-1 letters and rounds."""
    first, second = (utils.default_process(text.translate(_LATIN)) for text in (first, second))
    return round(fuzz.token_set_ratio(first, second)) > _THRESHOLD
