import json
import os
import random
import subprocess
import sys

import pytest

from race_jax.envs.webshop_catalogue import load_products
from race_jax.envs.webshop_goals import NO_LIMIT, build_goals

ENTRY = {
    "asin": "B000000001",
    "name": "Tin Cup",
    "category": "garden",
    "query": "  Cups ",
    "product_category": "Home › Cups",
    "full_description": "A cup.",
    "small_description": ["Light", "Loud"],
    "pricing": "$9.99",
    "customization_options": {
        "Color": [{"value": " Red/White ", "image": None}, {"value": "BLUE"}],
        "size": None,
    },
    "images": ["x"],
}
KNOWN = {
    "B000000001": {
        "attributes": ["easy clean", "bpa free"],
        "instruction": "Find me easy clean cups",
        "instruction_attributes": ["easy clean"],
    }
}
HUMAN = {
    "B000000001": [
        {
            "instruction": "i want a tin cup.",
            "instruction_attributes": ["bpa free"],
            "instruction_options": ["red | white"],
        },
        {"instruction": "skip", "instruction_attributes": [], "instruction_options": []},
    ]
}


def write(folder, products=None, known=None, human=None):
    paths = []
    for name, value in (
        ("p", [ENTRY] if products is None else products),
        ("a", KNOWN if known is None else known),
        ("h", HUMAN if human is None else human),
    ):
        paths.append(folder / f"{name}.json")
        text = value if isinstance(value, str) else json.dumps(value)
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def test_a_product_is_read_as_webshop_reads_it(tmp_path):
    (cup,) = load_products(*write(tmp_path))
    assert cup.query == "cups"
    assert cup.options == {"color": ("red | white", "blue")}
    assert (cup.prices, cup.price_tag) == ((9.99,), "$9.99")
    assert cup.bullets == ("Light", "Loud")
    assert cup.attributes == ("easy clean", "bpa free")
    assert [asked.text for asked in cup.human] == ["i want a tin cup.", "skip"]


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        (None, (100.0,), "$100.0"),
        ("", (100.0,), "$100.0"),
        ("$1,299.00", (1299.0,), "$1299.0"),
        ("$5.00 to $20.00", (5.0, 20.0), "$5.0 to $20.0"),
        ("$9.00 $8.00 $7.00", (9.0, 8.0), "$9.0 to $8.0"),
    ],
)
def test_prices(tmp_path, pricing, prices, tag):
    (cup,) = load_products(*write(tmp_path, [{**ENTRY, "pricing": pricing}]))
    assert (cup.prices, cup.price_tag) == (prices, tag)


def test_what_webshop_passes_over_is_passed_over(tmp_path):
    entries = [
        {**ENTRY, "asin": "nan"},
        {**ENTRY, "asin": "B0000000012"},
        ENTRY,
        {**ENTRY, "name": "Again"},
        {**ENTRY, "asin": "B2", "small_description": "One text", "full_description": None},
        {**ENTRY, "asin": "B3", "small_description": None, "customization_options": {}},
    ]
    files = write(tmp_path, entries)
    got = load_products(*files)
    assert [(p.asin, p.title, p.bullets) for p in got] == [
        ("B000000001", "Tin Cup", ("Light", "Loud")),
        ("B2", "Tin Cup", ("One text",)),
        ("B3", "Tin Cup", ()),
    ]
    assert (got[1].description, got[1].attributes, got[1].human) == ("", (), ())
    assert len(load_products(*files, limit=3)) == 1


def broken(**changes):
    return [ENTRY, {**ENTRY, "asin": "B7", **changes}]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"products": '[{"asin":\n "x",}]'}, r"p\.json, line 2, column \d+: not valid JSON"),
        ({"products": {}}, r"p\.json holds a dict; it must be a list of products"),
        ({"known": []}, r"a\.json holds a list; it must be an object whose keys are asins"),
        ({"products": []}, r"p\.json holds no product"),
        ({"products": [ENTRY, 3]}, r"p\.json, entry 2: a product is an object, not 3"),
        ({"products": broken(query=None)}, r"entry 2 \(asin 'B7'\): `query` is None; every"),
        ({"products": broken(pricing="9.99")}, r"'B7'.*`pricing` is '9\.99'; a price is"),
        ({"products": broken(pricing="$9.9.9")}, r"'B7'.*`pricing`"),
        ({"products": broken(pricing=9.99)}, r"'B7'.*`pricing`"),
        ({"products": broken(customization_options=["red"])}, r"'B7'.*customization_options"),
        ({"products": broken(customization_options={"c": ["red"]})}, r"'B7'.*option 'c'"),
        ({"known": {"B000000001": []}}, r"a\.json, asin 'B000000001': the entry is \[\]"),
        ({"known": {"B000000001": {"attributes": "x"}}}, r"`attributes` is 'x'; it must be a list"),
        (
            {"known": {"B000000001": {"instruction": "x", "instruction_attributes": []}}},
            r"`instruction_attributes` is empty; an instruction needs at least one",
        ),
        ({"human": {"B000000001": [{"instruction": 1, "instruction_attributes": []}]}}, r"h\.json"),
        ({"human": {"B000000001": {}}}, r"h\.json, asin 'B000000001'.*list of objects"),
    ],
)
def test_bad_files_are_named_with_place_and_rule(tmp_path, files, said):
    with pytest.raises(ValueError, match=said):
        load_products(*write(tmp_path, **files))


def test_bytes_that_are_no_utf8(tmp_path):
    files = write(tmp_path)
    files[0].write_bytes(b'["caf\xe9"]')
    with pytest.raises(ValueError, match=r"p\.json: byte 6 is not UTF-8"):
        load_products(*files)


def test_human_goals_worked_by_hand(tmp_path):
    products = load_products(*write(tmp_path))
    prices, (goal,) = build_goals(products, "human", 5)
    assert prices == {"B000000001": 9.99}
    limit = max(random.Random(5).sample([10.0, 20.0, 30.0, 40.0], 2))
    assert goal.price_limit == limit
    assert goal.text == f"i want a tin cup, and price lower than {limit:.2f} dollars"
    assert (goal.attributes, goal.options) == (("bpa free",), ("red | white",))


def test_synthetic_goals_take_every_combination_of_options(tmp_path):
    options = {"size": [{"value": "s"}, {"value": "l"}], "color": [{"value": "red"}]}
    files = write(tmp_path, [{**ENTRY, "customization_options": options}])
    _, goals = build_goals(load_products(*files), "synthetic", 5)
    assert {goal.options for goal in goals} == {("red", "s"), ("red", "l")}
    end = f", and price lower than {goals[0].price_limit:.2f} dollars"
    assert {goal.text for goal in goals} == {
        f"Find me easy clean cups with color: red, and size: s{end}",
        f"Find me easy clean cups with color: red, and size: l{end}",
    }


@pytest.mark.parametrize(("price", "limited"), [(969.0, True), (970.0, True), (980.0, False)])
def test_no_limit_where_prices_end(tmp_path, price, limited):
    files = write(tmp_path, [{**ENTRY, "pricing": f"${price}"}])
    _, (goal,) = build_goals(load_products(*files), "human", 0)
    assert (goal.price_limit < NO_LIMIT) is limited
    assert ("price lower" in goal.text) is limited


def test_the_order_is_webshops_whatever_the_seed_of_prices(tmp_path):
    entries = [{**ENTRY, "asin": f"B{n}", "pricing": "$5.00 to $20.00"} for n in range(30)]
    human = {f"B{n}": [{**HUMAN["B000000001"][0], "instruction": f"cup {n}"}] for n in range(30)}
    products = load_products(*write(tmp_path, entries, {}, human))
    expected = list(range(30))
    rng = random.Random()
    rng.seed(233)
    rng.shuffle(expected)
    limits = set()
    for seed in (1, 2):
        prices, goals = build_goals(products, "human", seed)
        assert [goal.product.asin for goal in goals] == [f"B{n}" for n in expected]
        assert all(5 <= price <= 20 for price in prices.values())
        limits.add(tuple(goal.price_limit for goal in goals))
    assert len(limits) == 2


def test_goals_that_are_not_there(tmp_path):
    products = load_products(*write(tmp_path)[:2])
    with pytest.raises(ValueError, match=r"no product has a human instruction.*goals: synthetic"):
        build_goals(products, "human", 0)


SHOW = """
from race_jax.envs.webshop import WebShopConfig, load_world
import hashlib
for kind in ("human", "synthetic"):
    world = load_world(WebShopConfig(goals=kind))
    told = [(g.text, g.attributes, g.options, g.price_limit) for g in world.goals]
    found = [p.asin for p in world.engine.search("easy to clean soft blue shoes")]
    print(hashlib.sha256(repr((told, world.prices, found)).encode()).hexdigest())
"""


def test_two_processes_have_the_same_goals_prices_and_results():
    def run(hash_seed):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", SHOW]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    first = run("1")
    assert len(first.split()) == 2
    assert first == run("2")
