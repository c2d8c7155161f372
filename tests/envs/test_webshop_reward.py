import dataclasses
import sys
import types

import pytest

from race_jax.envs import webshop_reward
from race_jax.envs.webshop_catalogue import Product
from race_jax.envs.webshop_goals import Goal
from race_jax.envs.webshop_reward import kind_score, plain_colour, score, spacy_nouns, title_words

CUP = Product(
    asin="Z1",
    title="Acme Travel Cup Steel",
    category="garden",
    query="cups",
    product_category="Home › Kitchen › Cups",
    description="Keeps TEA hot all day",
    bullets=("Leak proof lid", "Dishwasher safe"),
    prices=(20.0,),
    price_tag="$20.0",
    options={"color": ("midnight blue", "rose"), "size": ("12 oz", "16 oz")},
    attributes=("double wall", "easy to clean"),
)
GOAL = Goal(CUP, "", ("double walls", "leak proof", "gluten free"), ("sky blue", "16 oz"), 20.0)


def other(title, query="plates", categories="Home › Dining › Plates"):
    return dataclasses.replace(CUP, title=title, query=query, product_category=categories)


def test_a_purchase_worked_by_hand():
    # double walls ~ double wall; leak proof stands in a feature; gluten free nowhere: 2 of 3.
    # midnight blue and sky blue are both blue, 12 oz is not 16 oz: 1 of 2. 20 dollars fit 20.
    chosen = {"color": "midnight blue", "size": "12 oz"}
    got = score(CUP, 20.0, chosen, GOAL, title_words)
    assert got == ((2 + 1 + 1) / (3 + 2 + 1), 1.0, 2, 1, True)
    dear = score(CUP, 20.01, chosen, GOAL, title_words)
    assert dear == ((2 + 1 + 0) / 6, 1.0, 2, 1, False)


def test_all_that_is_asked_for_gives_exactly_one():
    goal = Goal(CUP, "", ("double wall", "tea"), ("rose", "16 oz"), 1e6)
    assert score(CUP, 20.0, {"size": "16 oz", "color": "rose"}, goal, title_words).reward == 1.0


def test_a_goal_without_options_counts_no_options():
    goal = Goal(CUP, "", ("tea",), (), 10.0)
    assert score(CUP, 20.0, {"size": "16 oz"}, goal, title_words).reward == 1 / 2


def test_one_chosen_value_can_serve_two_wanted_ones_but_none_counts_twice():
    goal = Goal(CUP, "", ("tea",), ("blue", "dark blue"), 10.0)
    got = score(CUP, 20.0, {"a": "light blue", "b": "navy blue"}, goal, title_words)
    assert got.options == 2


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ("", ""),
        ("midnight forest", "midnight"),
        ("violet lavender", "lavender"),  # The first in the list, not in the value.
        ("12ivory", "ivory"),
        ("16 oz", "16 oz"),
    ],
)
def test_colours_are_reduced_to_the_first_word_of_the_list(value, plain):
    assert plain_colour(value) == plain


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("essential oil", "essential oils", True),  # 2 * 13 of 27 letters: 96.
        ("oils essential", "essential oils", True),
        ("cool powder snow", "powder snow", True),  # A subset of the words.
        ("Tea-Tree!", "tea tree", True),
        ("café", "caf", True),  # Latin-1 letters beyond ASCII are dropped.
        ("abcdef", "abcdxx", False),  # 67.
        ("", "", False),
        ("?!", "?!", False),
    ],
)
def test_likeness_is_that_of_thefuzz(first, second, alike):
    assert webshop_reward._alike(first, second) is alike


def test_the_kind_of_thing():
    # The wanted title has the words acme, travel, cup, steel.
    assert kind_score(other("Green Tea Bags"), CUP, title_words) == 0.0
    assert kind_score(other("Brass Cup"), CUP, title_words) == 1.0  # 1 of 4 is over 0.2.
    five = other("Acme Travel Cup Steel Lid")
    assert kind_score(other("Brass Cup"), five, title_words) == 1.0  # Same query, plates.
    far = dataclasses.replace(five, query="cups", product_category="Office › Desk")
    assert kind_score(other("Brass Cup"), far, title_words) == 0.5  # 1 of 5 is not over 0.2.
    near = dataclasses.replace(far, product_category="Home › Dining › Sets")
    assert kind_score(other("Brass Cup"), near, title_words) == 1.0  # Two shared categories.
    ten = dataclasses.replace(
        far, title="cup " + " ".join(f"word{'abcdefghij'[i]}" for i in range(10))
    )
    assert kind_score(other("Brass Cup", "cups"), ten, title_words) == 0.1  # 1 of 11, query or not.


def test_a_title_without_nouns_counts_as_a_fifth():
    bare = dataclasses.replace(CUP, title="12 of 34", query="x", product_category="y")
    assert kind_score(other("Brass Cup"), bare, title_words) == 0.5
    same = dataclasses.replace(bare, query="plates")
    assert kind_score(other("Brass Cup"), same, title_words) == 1.0


def test_repeated_nouns_of_the_wanted_title_count_each_time():
    assert title_words("Bar 3.1 Bar 2.1 for the BAR, new") == ["bar", "bar", "bar"]
    wanted = dataclasses.replace(CUP, title="bar bar bar bar cup", query="x", product_category="y")
    assert kind_score(other("Brass Cup"), wanted, title_words) == 0.5  # 1 of 5, not 1 of 2.


def test_nouns_are_injected():
    assert kind_score(CUP, CUP, lambda title: []) == 1.0
    assert score(CUP, 1.0, {}, GOAL, lambda title: [title[:1]]).kind == 1.0


def test_spacy_is_used_when_asked_for(monkeypatch):
    class Word:
        def __init__(self, text, pos_):
            self.text, self.pos_ = text, pos_

    calls = []

    def load(name):
        if name != "tiny":
            raise OSError("no such pipeline")
        return lambda text: (
            calls.append(text) or [Word("Big", "ADJ"), Word("Cup", "NOUN"), Word("ACME", "PROPN")]
        )

    monkeypatch.setitem(sys.modules, "spacy", types.SimpleNamespace(load=load))
    nouns = spacy_nouns("tiny")
    assert nouns("Big Cup ACME") == nouns("Big Cup ACME") == ("cup", "acme")
    assert calls == ["Big Cup ACME"]  # A title is tagged once.
    with pytest.raises(ValueError, match=r"spacy download other"):
        spacy_nouns("other")
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(ValueError, match=r"pip install spacy.*nouns: words"):
        spacy_nouns()


CABLE = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo"
CORD = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"


@pytest.mark.parametrize(
    ("wanted", "bought", "tagged"),
    [
        (
            "adidas Unisex-Adult D.o.n. Issue 2 Basketball Shoe",
            "adidas Unisex-Adult D.o.n. Issue 2 Indoor Court Shoe",
            0.85,
        ),
        (
            f"{CORD} Home Theater System Subwoofer",
            f"{CABLE} Home Theater System",
            0.31,
        ),
        (CORD, f"{CABLE} Home Theater System", 0.17),
        ("Rusticware 921ORB Kitchen and Bath Cabinet Knob", "Minkissy 2pcs Steel Tweezers", 0.0),
    ],
)
def test_words_come_near_to_what_a_tagger_finds(wanted, bought, tagged):
    """The titles and shares stand in WebShop's own tests, which use spaCy's large pipeline."""
    words = title_words(wanted)
    share = len(set(words) & set(title_words(bought))) / len(words)
    assert share == pytest.approx(tagged, abs=0.02)
