import json
import re

import pytest

from race_jax.chat import renderer_for
from race_jax.envs import potion_text, potions
from race_jax.envs.potions import (
    PotionShop,
    PotionShopConfig,
    oracle_trajectory,
)
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.tokenizer import spell

SEEDS = range(40)


def parse(task):
    """The facts and the order, read off the task text by a reader of its own."""
    stated, order = task.split("\nOrder: ")
    facts = stated.removeprefix("Facts: ").split(" ")
    chain = dict(fact.split(":") for fact in facts if ":" in fact)
    substitute = dict(fact.split("~") for fact in facts if "~" in fact)
    return facts, chain, substitute, order


def calls(trajectory):
    for message in trajectory.messages:
        if message["role"] == "assistant":
            function = message["tool_calls"][0]["function"]
            yield function["name"], json.loads(function["arguments"])


def solve(world, task):
    """Solve an episode from its text and replies alone; returns the calls and the reward."""
    _, chain, substitute, potion = parse(task)
    herb, made, plan = chain[potion], [], []
    reward, done = 0.0, False

    def act(name, argument):
        nonlocal reward, done
        call = {"name": name, "arguments": {potion_text.ARGUMENTS[name]: argument}}
        made.append(call)
        reply, reward, done, _ = world.step(call)
        return reply

    while not done:
        plan = [("go", chain[chain[herb]]), ("take", herb)]
        for name, argument in plan:
            reply = act(name, argument)
        if "empty" in reply:
            herb = substitute[herb]
            continue
        act("brew", potion)
        reply = act("serve", potion)
        if not done:
            potion = reply.split(": ")[1]
            herb = chain[potion]
    return made, reward


@pytest.mark.parametrize("seed", SEEDS)
def test_a_task_states_every_fact_once_and_they_are_permutations(seed):
    facts, chain, substitute, order = parse(PotionShop().reset(str(seed)))
    assert len(facts) == len(set(facts)) == 20
    for kind, onto in ("ph", "hs", "sr"):
        sources = [a for a in chain if a[0] == kind]
        assert sorted(sources) == [f"{kind}{i}" for i in range(1, 6)]
        assert sorted(chain[a] for a in sources) == [f"{onto}{i}" for i in range(1, 6)]
    assert sorted(substitute) == sorted(substitute.values()) == [f"h{i}" for i in range(1, 6)]
    assert all(herb != other for herb, other in substitute.items())
    assert order in chain and order[0] == "p"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_text_alone_is_enough_to_solve_it_and_the_oracle_does_the_same(seed):
    world = PotionShop()
    made, reward = solve(world, world.reset(str(seed)))
    assert reward == 1.0
    trajectory = oracle_trajectory(seed)
    assert trajectory.success and trajectory.reward == 1.0
    assert [(call["name"], call["arguments"]) for call in made] == list(calls(trajectory))


@pytest.mark.parametrize("seed", SEEDS)
def test_needed_turns_are_those_that_choose_a_room_by_a_look_up_nothing_else_answers(seed):
    trajectory = oracle_trajectory(seed)
    needed = trajectory.extra["needed"]
    assert needed == [name == "go" for name, _ in calls(trajectory)]
    assert len(needed) in (8, 10) and needed[0]
    # No look-up of one turn is stated in the reasoning of another.
    looked_up = []
    for message in trajectory.messages:
        looked_up += re.findall(r"h\d:s\d", message.get("reasoning_content", ""))
    assert len(looked_up) == len(set(looked_up)) == sum(needed)


def test_the_messages_read_as_the_world_tells_them():
    trajectory = oracle_trajectory(3)
    _, chain, _, potion = parse(trajectory.messages[1]["content"])
    herb = chain[potion]
    shelf = chain[herb]
    room = chain[shelf]
    first, reply = trajectory.messages[2:4]
    assert first["reasoning_content"] == f"Look up {potion}:{herb} {herb}:{shelf} {shelf}:{room}"
    assert first["content"] == ""
    assert first["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "go", "arguments": f'{{"room": "{room}"}}'},
        }
    ]
    assert reply == {
        "role": "tool",
        "tool_call_id": "call_1",
        "name": "go",
        "content": f"You are in {room}, at the shelf of {herb}",
    }
    assert trajectory.messages[-1]["content"] == "Served. All orders are done."


def test_how_often_a_shelf_is_empty_follows_the_setting():
    def share(p):
        config = PotionShopConfig(empty_shelf=p)
        turns = [len(oracle_trajectory(seed, config).extra["needed"]) for seed in range(300)]
        return sum(n == 10 for n in turns) / 300

    assert share(0.0) == 0.0
    assert share(1.0) == 1.0
    # Binomial standard error at 0.6 and 300 draws: sqrt(0.24 / 300) = 0.028.
    assert abs(share(0.6) - 0.6) < 4 * 0.028


def test_equal_seeds_give_equal_trajectories_and_others_differ():
    assert oracle_trajectory(7) == oracle_trajectory(7)
    tasks = {PotionShop().reset(str(seed)) for seed in range(200)}
    assert len(tasks) == 200


@pytest.mark.parametrize(
    "call",
    [
        {"name": "go", "arguments": {"room": "r9"}},
        {"name": "take", "arguments": {"herb": "h1"}},
        {"name": "go", "arguments": {}},
        {"name": "go", "arguments": None},
        {"name": "go"},
        {},
    ],
)
def test_a_wrong_call_ends_the_episode_without_reward(call):
    world = PotionShop()
    world.reset("0")
    assert world.step(call) == ("That was wrong.", 0.0, True, False)
    with pytest.raises(ValueError, match=r"call reset\(task\)"):
        world.step(call)
    with pytest.raises(ValueError, match=r"call reset\(task\)"):
        world.oracle()


def test_a_world_that_was_never_reset_refuses_to_step():
    with pytest.raises(ValueError, match=r"call reset\(task\)"):
        PotionShop().step({"name": "go", "arguments": {"room": "r1"}})


@pytest.mark.parametrize(("size", "orders"), [(3, 1), (4, 2), (8, 3), (12, 2)])
def test_other_sizes_are_solvable(size, orders):
    config = PotionShopConfig(size=size, orders=orders, empty_shelf=0.5)
    world = PotionShop(config)
    for seed in range(20):
        made, reward = solve(world, world.reset(str(seed)))
        assert reward == 1.0
        assert len(made) in (4 * orders, 4 * orders + 2)


@pytest.fixture(scope="module")
def renderer():
    return renderer_for(word_tokenizer(potion_text.words(5)), "qwen3")


@pytest.mark.parametrize("lookups", [1, 5, 10])
def test_a_drill_looks_up_as_the_facts_say(renderer, lookups):
    decode = renderer.codec.decode
    for seed in range(20):
        drill = potions.drill(seed, renderer, lookups)
        task = spell(decode(drill.prompt)).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        _, chain, substitute, asked = parse(task)
        assert len(drill.turns) == lookups
        seen = set()
        for turn in drill.turns:
            herb = chain[asked] if asked[0] == "p" else substitute[asked]
            mark = f"up {asked}:" if asked[0] == "p" else f"substitute {asked}~"
            shelf = chain[herb]
            way = f"{mark}{herb} {herb}:{shelf} {shelf}:{chain[shelf]}"
            assert decode(turn.reasoning).endswith(way)
            assert turn.action == turn.skip == ()
            seen.add(asked)
            *_, asked = re.findall(r"[ph]\d", decode(turn.observation)) or [None]
        assert asked is None and len(seen) == lookups


def test_a_drill_begins_as_an_episode_does(renderer):
    episode = renderer.encode(oracle_trajectory(0))
    drill = potions.drill(0, renderer)
    assert len(drill.prompt) == len(episode.prompt)
    assert drill.prompt[:22] == episode.prompt[:22] and drill.prompt[-4:] == episode.prompt[-4:]
    assert drill.turns[0].reasoning[0] == episode.turns[0].reasoning[0]
    assert potions.drill(0, renderer) == drill != potions.drill(1, renderer)


def test_a_drill_that_the_world_has_no_room_for_is_refused(renderer):
    for lookups in (0, 11):
        with pytest.raises(ValueError, match=f"lookups is {lookups}; with size=5 it can be 1 to"):
            potions.drill(0, renderer, lookups)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 3}, "size is 3; with orders=2 it must be at least 4"),
        ({"size": 2, "orders": 1}, "size is 2; with orders=1 it must be at least 3"),
        ({"orders": 0}, "orders is 0"),
        ({"empty_shelf": 1.5}, "empty_shelf is 1.5"),
        ({"empty_shelf": float("nan")}, "empty_shelf is nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PotionShopConfig(**settings)


def test_everything_that_is_said_is_in_the_lists_of_words():
    """What the words of the world do not cover would fall back to bytes in the tokenizer."""
    size = 5
    texts = []
    for seed in range(60):
        messages = oracle_trajectory(seed).messages
        texts += [m["content"] for m in messages[1:] if m["content"]]
        texts += [m["reasoning_content"] for m in messages if m["role"] == "assistant"]
    named = [" " + name for name in potion_text.names(size)]
    pieces = sorted((*potion_text.PHRASES, *potion_text.facts(size), *named), key=len, reverse=True)
    whole = re.compile(f"(?:{'|'.join(map(re.escape, pieces))})+")
    assert all(whole.fullmatch(text) for text in [*texts, "That was wrong."])
    assert "".join(potion_text.SYSTEM) == PotionShop.system


def test_splits_share_no_task_and_others_are_refused():
    world = PotionShop()
    splits = [world.tasks(split) for split in ("train", "dev", "test")]
    assert sum(len(tasks) for tasks in splits) == len(set().union(*splits)) == 102_000
    with pytest.raises(ValueError, match="no split 'all'; potions has train, dev, test"):
        world.tasks("all")
    with pytest.raises(ValueError, match="no task 'x'; potions takes an integer"):
        world.reset("x")
