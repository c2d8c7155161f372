import itertools
import json

import pytest

from race_jax.envs.base import replay
from race_jax.envs.webshop import TOOLS, WebShop, WebShopConfig, load_world
from race_jax.toolcalls import check_tools

TITLE = "Blue Tin Cup"


def entry(asin, name, **changes):
    return {
        "asin": asin,
        "name": name,
        "category": "garden",
        "query": "cups",
        "product_category": "Home › Cups",
        "full_description": "Holds tea.",
        "small_description": ["Light as a leaf", "Loud"],
        "pricing": "$9.99",
        "customization_options": {
            "color": [{"value": "Sky Blue"}, {"value": "Red"}],
            "size": [{"value": "12 oz"}],
        },
        "images": [""],
        **changes,
    }


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Twelve cups in a small shop, and one product that no search for cups finds."""
    folder = tmp_path_factory.mktemp("shop")
    plain = {"full_description": "", "small_description": [], "customization_options": None}
    products = [entry("B00000000A", TITLE)]
    products += [entry(f"B0000000{n}", f"Cup number {n}", **plain) for n in range(10, 21)]
    products += [entry("B0LAMP", "Desk Lamp", **plain, query="lamps", product_category="Light")]
    human = {
        "B00000000A": [
            {
                "instruction": "a blue cup for tea",
                "instruction_attributes": ["light as a leaf"],
                "instruction_options": ["sky blue", "12 oz"],
            }
        ]
    }
    files = {"products": products, "attributes": {}, "human": human}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    paths = {name: str(folder / f"{name}.json") for name in files}
    return load_world(WebShopConfig(**paths, test_goals=1, dev_goals=0))


@pytest.fixture
def world(shop):
    env = WebShop(world=shop)
    env.reset("0")
    return env


def said(world, *parts):
    goal = world.world.goals[0].text
    return " [SEP] ".join(["Instruction:", goal, *parts])


def test_the_first_page(shop):
    env = WebShop(world=shop)
    goal = shop.goals[0].text
    assert goal.startswith("a blue cup for tea, and price lower than ")
    assert env.reset("0") == f"WebShop [SEP] Instruction: [SEP] {goal} [SEP] Search"
    assert env.clickables == ("search",)


def test_results_and_their_pages(world):
    step = world.act("search[blue cup]")
    assert (step.reward, step.done, step.success) == (0.0, False, False)
    listed = [part for n in range(10, 19) for part in (f"B0000000{n}", f"Cup number {n}", "$9.99")]
    first = ["B00000000A", TITLE, "$9.99"]
    head = ["Back to Search", "Page 1 (Total results: 12)", "Next >"]
    assert step.observation == said(world, *head, *first, *listed)
    assert world.clickables[:3] == ("back to search", "next >", "b00000000a")
    last = [part for n in (19, 20) for part in (f"B0000000{n}", f"Cup number {n}", "$9.99")]
    second = said(world, "Back to Search", "Page 2 (Total results: 12)", "< Prev", *last)
    assert world.act("click[Next >]").observation == second
    assert world.act("click[next >]").observation == second  # It is not on this page.
    assert world.act("click[< Prev]").observation == step.observation
    nothing = said(world, "Back to Search", "Page 1 (Total results: 0)")
    assert world.act("search[zzz]").observation == nothing
    assert world.act("search[the]").observation == nothing  # A stop word alone.


def test_a_product_and_its_details(world):
    world.act("search[blue cup]")
    item = world.act("click[b00000000A]").observation
    options = ["color", "sky blue", "red", "size", "12 oz"]
    facts = [TITLE, "Price: $9.99", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now"]
    assert item == said(world, "Back to Search", "< Prev", *options, *facts)
    back = ("Back to Search", "< Prev")
    assert world.act("click[description]").observation == said(world, *back, "Holds tea.")
    assert world.clickables == ("back to search", "< prev")
    assert world.act("click[< prev]").observation == item
    features = said(world, *back, "Light as a leaf", "Loud")
    assert world.act("click[Features]").observation == features
    assert world.act("click[buy now]").observation == features
    assert world.act("click[< prev]").observation == item
    assert world.act("click[reviews]").observation == said(world, *back, "No Reviews")
    assert world.act("search[lamp]").observation.endswith("B0LAMP [SEP] Desk Lamp [SEP] $9.99")
    world.act("click[b0lamp]")
    assert world.act("click[description]").observation == said(world, *back, "No Description")
    world.act("click[< prev]")
    assert world.act("click[features]").observation == said(world, *back, "No Features")


def test_the_way_back_leads_to_the_page_one_came_from(world):
    world.act("search[cup]")
    second = world.act("click[next >]").observation
    world.act(f"click[{world.clickables[2]}]")
    assert world.act("click[< prev]").observation == second
    start = world.act("click[back to search]").observation
    assert start.startswith("WebShop [SEP]")
    assert world.act("click[next >]").observation == start


def test_buying_with_every_option_right(world):
    world.act("search[blue cup]")
    world.act("click[b00000000a]")
    page = world.act("click[sky blue]")
    assert "Buy Now" in page.observation
    world.act("click[red]")
    world.act("click[SKY BLUE]")  # The last choice of an option counts.
    world.act("click[12 oz]")
    world.act("click[description]")
    world.act("click[< prev]")
    step = world.act("click[Buy Now]")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    parts = step.observation.split(" [SEP] ")
    assert parts[0] == "Thank you for shopping with us!"
    assert parts[6:9] == ["B00000000A", "options", '{"color": "sky blue", "size": "12 oz"}']
    assert parts[-4:-2] == ["Your score (min 0.0, max 1.0)", "1.0"]
    assert world.clickables == ()
    with pytest.raises(ValueError, match="over; call reset"):
        world.act("search[cup]")
    assert world.reset("0").startswith("WebShop")
    assert world.score is None


def test_choices_are_forgotten_with_the_page_of_results(world):
    world.act("search[blue cup]")
    world.act("click[b00000000a]")
    world.act("click[sky blue]")
    world.act("click[12 oz]")
    world.act("click[< prev]")
    world.act("click[b00000000a]")
    step = world.act("click[buy now]")
    # The attribute and the price fit, the two options are not chosen.
    assert (step.reward, step.success) == (2 / 4, False)


def test_the_wrong_kind_of_thing_is_worth_nothing(world):
    world.act("search[lamp]")
    world.act("click[b0lamp]")
    step = world.act("click[buy now]")
    assert (step.reward, step.done, step.success) == (0.0, True, False)
    assert world.score.price is True


@pytest.mark.parametrize(
    "action",
    [
        "",
        "search",
        "search[]",
        "click[search]",
        "click[b00000000a]",
        "click[buy now]",
        "look[around]",
        "Search[cup]",
        " search[cup]",
        "search[a] click[b]",  # The last bracket opens the argument: the name is "search[a] click".
        "think[then] search[cup]",
        "search\n[cup]",
        "search[cup",
    ],
)
def test_what_is_no_action_here_changes_nothing(world, action):
    before = world.reset("0")
    step = world.act(action)
    assert step == (before, 0.0, False, False)


@pytest.mark.parametrize("action", ["search[cup]", "search[cup] please", "search[CUP]\nthen more"])
def test_text_after_the_last_bracket_is_not_read(world, action):
    assert "Total results: 12" in world.act(action).observation


def test_a_search_goes_out_from_any_page(world):
    world.act("search[cup]")
    world.act("click[b00000000a]")
    assert "Total results: 1)" in world.act("search[lamp]").observation


def test_tool_calls_do_the_same(world):
    check_tools(TOOLS)
    texts, calls = WebShop(world=world.world), world
    assert texts.reset("0") == calls.reset("0")
    for name, argument, value in [
        ("search", "keywords", "Blue Cup"),
        ("click", "item", "B00000000A"),
        ("click", "item", "Sky Blue"),
        ("click", "item", "Buy Now"),
    ]:
        call = {"name": name, "arguments": {argument: value}}
        assert calls.step(call) == texts.act(f"{name}[{value}]")
    assert calls.score == texts.score


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"name": "search", "arguments": {}},
        {"name": "search", "arguments": None},
        {"name": "click", "arguments": {"keywords": "search"}},
        {"name": "buy", "arguments": {"item": "x"}},
        {"name": "click", "arguments": {"item": ["a"]}},
    ],
)
def test_a_call_that_is_none_changes_nothing(world, call):
    assert world.step(call).observation == world.reset("0")


def test_an_option_named_like_a_button_leaves_the_button(tmp_path):
    cup = entry(
        "B1", "Cup", customization_options={"do": [{"value": "Buy Now"}, {"value": "x[y]"}]}
    )
    asked = {"instruction": "a", "instruction_attributes": ["cup"], "instruction_options": ["x[y]"]}
    names = {"products": [cup], "attributes": {}, "human": {"B1": [asked]}}
    for name, value in names.items():
        (tmp_path / name).write_text(json.dumps(value))
    paths = {name: str(tmp_path / name) for name in names}
    world = WebShop(WebShopConfig(**paths, test_goals=1, dev_goals=0))
    world.reset("0")
    world.act("search[cup]")
    world.act("click[b1]")
    world.step({"name": "click", "arguments": {"item": "x[y]"}})  # No text action can name it.
    assert world.act("click[buy now]").reward == 1.0


def test_the_shop_that_ships():
    env = WebShop()
    world = env.world
    assert len(world.products) == 60
    numbers = [int(task) for split in ("test", "dev", "train") for task in env.tasks(split)]
    assert numbers == list(range(len(world.goals)))
    assert (len(env.tasks("test")), len(env.tasks("dev"))) == (20, 20)
    assert WebShop().world is world


def test_every_task_that_ships_can_be_solved_by_searching_and_clicking():
    env = WebShop()
    for number, goal in enumerate(env.world.goals):
        env.reset(str(number))
        env.act(f"search[{goal.product.title}]")
        assert env.clickables[1:3] and goal.product.asin.lower() in env.clickables
        env.act(f"click[{goal.product.asin}]")
        for option in goal.options:
            env.act(f"click[{option}]")
        step = env.act("click[buy now]")
        assert step.success and step.reward == 1.0, goal


def test_rewards_stay_in_their_range():
    env = WebShop()
    products = list(env.world.products.values())[::7]
    for number, product in itertools.product(range(0, 120, 10), products):
        env.reset(str(number))
        env.act(f"search[{product.title}]")
        env.act(f"click[{product.asin}]")
        for values in product.options.values():
            env.act(f"click[{values[0]}]")
        assert 0.0 <= env.act("click[buy now]").reward <= 1.0


def test_an_episode_is_copied_by_replay(world):
    calls = [
        {"name": "search", "arguments": {"keywords": "cup"}},
        {"name": "click", "arguments": {"item": "next >"}},
    ]
    observations = [world.reset("0"), *(world.step(call).observation for call in calls)]
    copy = replay(lambda: WebShop(world=world.world), "0", calls, observations)
    assert copy.step(calls[0]) == world.step(calls[0])


def test_many_results_are_cut_to_fifty(tmp_path):
    products = [entry(f"B{n:03}", f"Cup {n}") for n in range(70)]
    asked = {"instruction": "a", "instruction_attributes": ["cup"], "instruction_options": []}
    names = {"products": products, "attributes": {}, "human": {"B000": [asked]}}
    for name, value in names.items():
        (tmp_path / name).write_text(json.dumps(value))
    paths = {name: str(tmp_path / name) for name in names}
    world = WebShop(WebShopConfig(**paths, test_goals=1, dev_goals=0))
    world.reset("0")
    step = world.act("search[cup]")
    assert "Page 1 (Total results: 50)" in step.observation
    # Equal scores keep the order of the file.
    assert [item for item in world.clickables if item[0] == "b" and item != "back to search"] == [
        f"b{n:03}" for n in range(10)
    ]
    for _ in range(4):
        step = world.act("click[next >]")
    assert "Page 5 (Total results: 50) [SEP] < Prev [SEP] B040" in step.observation


def test_tasks_and_splits_that_are_not_there(world):
    with pytest.raises(ValueError, match=r"no split 'all'; webshop has train, dev, test"):
        world.tasks("all")
    for task in ("1", "-1", "x", "", "²"):
        with pytest.raises(ValueError, match="webshop takes 0 to 0"):
            world.reset(task)
    with pytest.raises(ValueError, match="call reset"):
        WebShop(world=world.world).act("search[cup]")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attributes": "a"}, "without products"),
        ({"products": "p"}, "name the attribute file too"),
        ({"products": "p", "attributes": "a"}, "human goals need the file"),
        ({"goals": "mine"}, "human or synthetic"),
        ({"nouns": "guess"}, "words or spacy"),
        ({"num_products": 0}, "at least 1"),
        ({"test_goals": -1}, "test_goals is -1"),
        ({"dev_goals": -1}, "dev_goals is -1"),
    ],
)
def test_settings_that_do_not_fit(settings, said):
    with pytest.raises(ValueError, match=said):
        WebShopConfig(**settings)


def test_splits_that_need_more_tasks_than_there_are():
    with pytest.raises(ValueError, match=r"need 121 tasks, but the files hold 120; lower them"):
        load_world(WebShopConfig(test_goals=100, dev_goals=21))
