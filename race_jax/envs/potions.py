"""A potion shop: a text world small enough for a model that is trained in minutes on a CPU.

Each task draws fresh facts: `p4:h1` (potion p4 needs herb h1), `h1:s1` (herb h1 lies on shelf s1),
`s1:r2` (shelf s1 stands in room r2) and `h1~h4` (h4 can stand in for h1). An order names a potion;
the agent goes to the room of the shelf of its herb, takes the herb, brews the potion and serves it.
A second order follows, and now and then a shelf is empty: then the substitute must be looked up.

Choosing a room takes several look-ups in a row, more than a shallow network does in one pass, so
reasoning is needed there. All other actions follow from what stands in the context already. That
makes the right cover known by construction.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from race_jax.envs.base import Call, Step, check_split
from race_jax.envs.potion_text import ARGUMENTS, DONE, SYSTEM, TOOLS, WRONG
from race_jax.types import Message, TokenTrajectory, TokenTurn, Trajectory

if TYPE_CHECKING:
    from race_jax.chat import Renderer


@dataclasses.dataclass(frozen=True)
class PotionShopConfig:
    """Size and difficulty of the world.

    Attributes:
        size: How many potions, herbs, shelves and rooms there are; at least `2 * orders`.
        orders: Orders per episode, at least 1.
        empty_shelf: Probability that one shelf of the episode is found empty, in [0, 1].
    """

    size: int = 5
    orders: int = 2
    empty_shelf: float = 0.6

    def __post_init__(self):
        if self.orders < 1:
            raise ValueError(f"orders is {self.orders}; an episode needs at least 1 order")
        if self.size < max(3, 2 * self.orders):
            raise ValueError(
                f"size is {self.size}; with orders={self.orders} it must be at least "
                f"{max(3, 2 * self.orders)}, so that no two look-ups meet"
            )
        if not 0.0 <= self.empty_shelf <= 1.0:
            raise ValueError(f"empty_shelf is {self.empty_shelf}; it is a probability in [0, 1]")


SPLITS = {
    "train": range(0, 100_000),
    "dev": range(100_000, 101_000),
    "test": range(101_000, 102_000),
}
"""The seeds of each split."""


class _Turn(NamedTuple):
    """One right action: what to think, call and read, and whether the thought is needed."""

    reasoning: str
    name: str
    argument: str
    observation: str
    needed: bool


class PotionShop:
    """The world as an environment: `reset` draws a task, `step` takes a tool call.

    Args:
        config: Size and difficulty.
    """

    name = "potions"
    system = "".join(SYSTEM)
    reward_range = (0.0, 1.0)
    tools = TOOLS

    def __init__(self, config: PotionShopConfig | None = None):
        self.config = config or PotionShopConfig()
        self._script: list[_Turn] = []
        self._turn = 0
        self._done = True

    def tasks(self, split: str) -> Sequence[str]:
        """Names of a split's tasks, which are seeds.

        Raises:
            ValueError: There is no such split.
        """
        check_split(split, SPLITS, "potions")
        return [str(seed) for seed in SPLITS[split]]

    def reset(self, task: str) -> str:
        """Start an episode and return its task text.

        Args:
            task: An integer as text; equal ones give equal tasks.

        Raises:
            ValueError: `task` is no integer.
        """
        try:
            seed = int(task)
        except ValueError:
            raise ValueError(f"there is no task {task!r}; potions takes an integer") from None
        text, self._script = _draw(random.Random(f"potions {seed}"), self.config)
        self._turn = 0
        self._done = False
        return text

    def step(self, call: Call) -> Step:
        """Carry out one tool call.

        Args:
            call: `{"name": str, "arguments": mapping}`. Any call but the right one, malformed ones
                included, ends the episode with reward 0.

        Raises:
            ValueError: The episode is over or was never started.
        """
        if self._done:
            raise ValueError("the episode is over; call reset(task) before the next step")
        right = self._script[self._turn]
        expected = {ARGUMENTS[right.name]: right.argument}
        if call.get("name") != right.name or call.get("arguments") != expected:
            self._done = True
            return Step(WRONG, 0.0, True)
        self._turn += 1
        self._done = self._turn == len(self._script)
        return Step(right.observation, float(self._done), self._done, self._done)

    def close(self) -> None:
        """There is nothing to free."""

    def oracle(self) -> tuple[str, str, dict[str, str], bool]:
        """The right next turn: reasoning, tool name, arguments, and whether reasoning is needed.

        Raises:
            ValueError: The episode is over or was never started.
        """
        if self._done:
            raise ValueError("the episode is over; call reset(task) before oracle()")
        turn = self._script[self._turn]
        return turn.reasoning, turn.name, {ARGUMENTS[turn.name]: turn.argument}, turn.needed


def oracle_trajectory(seed: int, config: PotionShopConfig | None = None) -> Trajectory:
    """Solve the task of `seed` with full reasoning at every turn.

    Args:
        seed: Any integer; equal seeds give equal trajectories.
        config: Size and difficulty.

    Returns:
        A successful trajectory. `extra["needed"]` holds one bool per turn: whether that turn's
        reasoning is needed by construction.
    """
    world = PotionShop(config)
    messages = _opening(world.reset(str(seed)))
    needed: list[bool] = []
    done, reward, success = False, 0.0, False
    while not done:
        reasoning, name, arguments, need = world.oracle()
        needed.append(need)
        observation, reward, done, success = world.step({"name": name, "arguments": arguments})
        messages += _exchange(len(needed), reasoning, name, arguments, observation)
    return Trajectory(
        id=f"potions/{seed}",
        messages=tuple(messages),
        tools=world.tools,
        reward=reward,
        success=success,
        extra={"env": "potions", "seed": seed, "needed": needed},
    )


def drill(
    seed: int, renderer: Renderer, lookups: int = 10, config: PotionShopConfig | None = None
) -> TokenTrajectory:
    """An exercise in look-ups: a chat whose one block of reasoning goes from each to the next.

    This is no episode of the world, but a much denser lesson, to begin a training with: each turn
    is a look-up without an action, and its observation names the next thing to look up.

    Args:
        seed: Any integer; equal seeds give equal drills.
        renderer: Of the tokenizer that is trained for.
        lookups: From 1 to twice the world's size. Each looks up another potion or substitute.
        config: Size of the world.

    Raises:
        ValueError: `lookups` is out of range.
    """
    size = (config or PotionShopConfig()).size
    if not 1 <= lookups <= 2 * size:
        raise ValueError(f"lookups is {lookups}; with size={size} it can be 1 to {2 * size}")
    rng = random.Random(f"potions drill {seed}")
    shop = _draw_shop(rng, size)
    first, *potions = rng.sample(sorted(shop.herb), size)
    items = [first, *rng.sample(potions + sorted(shop.substitute), 2 * size - 1)][:lookups]
    encode = renderer.codec.encode
    turns = []
    for n, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True)):
        turn = shop.go(item) if item in shop.herb else shop.go_for_substitute(item)
        if following is None:
            observation = ()
        elif n % 3 == 2:
            # Now and then as in an episode, where the template stands between order and look-up.
            reply = _served(following) if following in shop.herb else _missing(following)
            observation = renderer.observation_ids([{"role": "tool", "content": reply}])
        else:
            order = f"\nOrder: {following}"
            observation = encode(order if following in shop.herb else _missing(following))
        turns.append(TokenTurn(encode(turn.reasoning), (), (), observation))
    prompt = renderer.prompt_ids(_opening(_task(rng, shop, first)), TOOLS)
    return TokenTrajectory(f"potions/drill/{seed}", prompt, tuple(turns))


def _opening(task: str) -> list[Message]:
    return [{"role": "system", "content": PotionShop.system}, {"role": "user", "content": task}]


def _exchange(
    number: int, reasoning: str, name: str, arguments: dict[str, str], observation: str
) -> list[Message]:
    """A turn and the reply to it."""
    call_id = f"call_{number}"
    function = {"name": name, "arguments": json.dumps(arguments)}
    turn: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": reasoning,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    return [
        turn,
        {"role": "tool", "tool_call_id": call_id, "name": name, "content": observation},
    ]


class _Shop(NamedTuple):
    """The facts of one task, as mappings."""

    herb: dict[str, str]
    shelf: dict[str, str]
    room: dict[str, str]
    substitute: dict[str, str]

    def facts(self) -> list[str]:
        chains = (*self.herb.items(), *self.shelf.items(), *self.room.items())
        return [f" {a}:{b}" for a, b in chains] + [f" {a}~{b}" for a, b in self.substitute.items()]

    def go(self, potion: str) -> _Turn:
        """The turn that answers an order."""
        herb = self.herb[potion]
        return self._go(f"Look up {potion}:{herb}", herb)

    def go_for_substitute(self, herb: str) -> _Turn:
        """The turn that answers an empty shelf."""
        other = self.substitute[herb]
        return self._go(f"Look up the substitute {herb}~{other}", other)

    def _go(self, thought: str, herb: str) -> _Turn:
        shelf = self.shelf[herb]
        room = self.room[shelf]
        way = f"{thought} {herb}:{shelf} {shelf}:{room}"
        return _Turn(way, "go", room, f"You are in {room}, at the shelf of {herb}", needed=True)


def _draw(rng: random.Random, config: PotionShopConfig) -> tuple[str, list[_Turn]]:
    """A task's text and the right actions in order."""
    shop = _draw_shop(rng, config.size)
    orders, empty = _draw_orders(rng, shop, config)
    task = _task(rng, shop, orders[0])
    script: list[_Turn] = []
    for k, potion in enumerate(orders):
        last = k + 1 == len(orders)
        reply = DONE if last else _served(orders[k + 1])
        script += _serve_order(shop, potion, k == empty, reply)
    return task, script


def _task(rng: random.Random, shop: _Shop, order: str) -> str:
    """The task text: all facts in random order, and the first order."""
    stated = shop.facts()
    rng.shuffle(stated)
    return f"Facts:{''.join(stated)}\nOrder: {order}"


def _draw_shop(rng: random.Random, size: int) -> _Shop:
    def permuted(kind: str) -> list[str]:
        return rng.sample([f"{kind}{i}" for i in range(1, size + 1)], size)

    herbs = permuted("h")
    # Each herb's substitute is the next one in a random cycle, so none stands in for itself.
    ring = permuted("h")
    return _Shop(
        herb=dict(zip(permuted("p"), herbs, strict=True)),
        shelf=dict(zip(herbs, permuted("s"), strict=True)),
        room=dict(zip(permuted("s"), permuted("r"), strict=True)),
        substitute=dict(zip(ring, ring[1:] + ring[:1], strict=True)),
    )


def _draw_orders(
    rng: random.Random, shop: _Shop, config: PotionShopConfig
) -> tuple[list[str], int | None]:
    """The ordered potions, and which order meets an empty shelf.

    No herb is looked up twice in an episode: otherwise earlier reasoning would answer a later
    look-up, and what a turn needs would depend on the draw.
    """
    empty = rng.randrange(config.orders) if rng.random() < config.empty_shelf else None
    while True:
        orders = rng.sample(sorted(shop.herb), config.orders)
        herbs = [shop.herb[potion] for potion in orders]
        if empty is None or shop.substitute[herbs[empty]] not in herbs:
            return orders, empty


def _serve_order(shop: _Shop, potion: str, empty: bool, reply: str) -> list[_Turn]:
    """The right turns from an order to its serving; `reply` is what serving brings."""
    herb = shop.herb[potion]
    turns = [shop.go(potion)]
    if empty:
        turns.append(_Turn(f"Now take {herb}", "take", herb, _missing(herb), needed=False))
        turns.append(shop.go_for_substitute(herb))
        herb = shop.substitute[herb]
    return [
        *turns,
        _Turn(f"Now take {herb}", "take", herb, f"You took {herb} for {potion}", needed=False),
        _Turn(f"Now brew {potion}", "brew", potion, f"You brewed {potion}", needed=False),
        _Turn(f"Now serve {potion}", "serve", potion, reply, needed=False),
    ]


def _served(following: str) -> str:
    return f"Served. Next order: {following}"


def _missing(herb: str) -> str:
    return f"The shelf is empty, there is no {herb}"
