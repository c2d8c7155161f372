"""WebShop's product, attribute and instruction files, read and checked."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NOT_DIGITS = re.compile(r"[^\d.]")
_DEFAULT_PRICE = 100.0
_TEXTS = ("asin", "name", "category", "query", "product_category")
_PRICE_RULE = 'a price is "$9.99" or a range "$5.00 to $20.00"; write one of the two, or null'


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What someone asks for, and what of it counts.

    Attributes:
        text: The request in words.
        attributes: What the product must be, such as "easy clean".
        options: The values to choose, by option name; names are numbers where the file has none.
    """

    text: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of the shop.

    Attributes:
        asin: Its name in the shop, at most 10 characters.
        title: Its name in words.
        category: Department.
        query: The search under which it was found, in lower case.
        product_category: Path of categories, parted by " › ".
        description: One text; may be empty.
        bullets: Its features.
        prices: One price, or the least and the greatest, in dollars.
        price_tag: The price as the pages show it.
        options: What can be chosen: values by option name, all in lower case.
        attributes: What it is, such as "easy clean"; the pages do not tell.
        instruction: The machine-made request of the attribute file.
        human: The requests that people wrote.
    """

    asin: str
    title: str
    category: str
    query: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]
    price_tag: str
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    instruction: Instruction | None = None
    human: tuple[Instruction, ...] = ()


def load_products(
    products: str | Path,
    attributes: str | Path,
    human: str | Path | None = None,
    limit: int | None = None,
) -> tuple[Product, ...]:
    """Read WebShop's files.

    As in WebShop, an asin of more than 10 characters, "nan", or one that came before is passed
    over, and "/" in an option's value becomes " | ".

    Args:
        products: A JSON list, such as `items_shuffle_1000.json`.
        attributes: A JSON object by asin, such as `items_ins_v2_1000.json`.
        human: A JSON object by asin, such as `items_human_ins.json`.
        limit: How many of the first entries to read; None for all.

    Raises:
        ValueError: A file or an entry is not as it must be; the message names file and asin.
        OSError: A file cannot be read.
    """
    entries = _read(products, list)
    machine = _read(attributes, dict)
    people = {} if human is None else _read(human, dict)
    found: dict[str, Product] = {}
    for n, entry in enumerate(entries[:limit], 1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"{products}, entry {n}: a product is an object, not {entry!r:.80}")
        where = f"{products}, entry {n} (asin {entry.get('asin')!r})"
        asin = _texts(entry, where)["asin"]
        if asin == "nan" or len(asin) > 10 or asin in found:
            continue
        known = _attributes(machine.get(asin, {}), f"{attributes}, asin {asin!r}")
        asked = _human(people.get(asin, []), f"{human}, asin {asin!r}")
        found[asin] = _product(entry, where, *known, asked)
    if not found:
        raise ValueError(f"{products} holds no product; give a JSON list of WebShop products")
    return tuple(found.values())


def _read(path: str | Path, kind: type) -> Any:
    try:
        value = json.loads(Path(path).read_bytes())
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(
            f"{path}, {place}: not valid JSON: {error.msg}; the file must be one "
            f"whole JSON value, perhaps it was cut short"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start + 1} is not UTF-8; save it as such") from None
    if not isinstance(value, kind):
        shape = "a list of products" if kind is list else "an object whose keys are asins"
        raise ValueError(f"{path} holds a {type(value).__name__}; it must be {shape}")
    return value


def _texts(entry: Mapping[str, Any], where: str) -> dict[str, str]:
    for name in _TEXTS:
        if not isinstance(entry.get(name), str):
            raise ValueError(
                f"{where}: `{name}` is {entry.get(name)!r:.80}; every product has the texts "
                f"{', '.join(_TEXTS)}"
            )
    return {name: entry[name] for name in _TEXTS}


def _product(
    entry: Mapping[str, Any],
    where: str,
    attributes: tuple[str, ...],
    instruction: Instruction | None,
    human: tuple[Instruction, ...],
) -> Product:
    texts = _texts(entry, where)
    bullets = entry.get("small_description") or ()
    prices, tag = _prices(entry.get("pricing"), where)
    return Product(
        asin=texts["asin"],
        title=texts["name"],
        category=texts["category"],
        query=texts["query"].lower().strip(),
        product_category=texts["product_category"],
        description=str(entry.get("full_description") or ""),
        bullets=tuple(map(str, [bullets] if isinstance(bullets, str) else bullets)),
        prices=prices,
        price_tag=tag,
        options=_options(entry.get("customization_options"), where),
        attributes=attributes,
        instruction=instruction,
        human=human,
    )


def _prices(pricing: Any, where: str) -> tuple[tuple[float, ...], str]:
    if not pricing:
        return (_DEFAULT_PRICE,), f"${_DEFAULT_PRICE}"
    try:
        prices = [float(_NOT_DIGITS.sub("", part)) for part in pricing.split("$")[1:]]
    except (AttributeError, ValueError):
        prices = []
    if not prices:
        raise ValueError(f"{where}: `pricing` is {pricing!r:.80}; {_PRICE_RULE}")
    low, high = prices[0], prices[:2][-1]
    return (low,) if len(prices) == 1 else (low, high), (
        f"${low}" if len(prices) == 1 else f"${low} to ${high}"
    )


def _options(given: Any, where: str) -> dict[str, tuple[str, ...]]:
    rule = 'it must be an object of lists, {name: [{"value": text}, ...]}'
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{where}: `customization_options` is {given!r:.80}; {rule}")
    options: dict[str, tuple[str, ...]] = {}
    for name, contents in (given or {}).items():
        if contents is None:
            continue
        try:
            values = [content["value"].strip().replace("/", " | ") for content in contents]
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"{where}: option {name!r} is {contents!r:.80}; {rule}") from None
        options[name.lower()] = tuple(value.lower() for value in values)
    return options


def _attributes(entry: Any, where: str) -> tuple[tuple[str, ...], Instruction | None]:
    """What a product is, and its machine-made request."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: the entry is {entry!r:.80}; it must be an object")
    attributes = _strings(entry.get("attributes", []), "attributes", where)
    if entry.get("instruction") is None:
        return attributes, None
    asked = _strings(entry.get("instruction_attributes"), "instruction_attributes", where)
    if not asked:
        raise ValueError(
            f"{where}: `instruction_attributes` is empty; an instruction needs at least one "
            f"attribute, or leave the instruction out"
        )
    return attributes, Instruction(_instruction(entry, where), asked)


def _human(entries: Any, where: str) -> tuple[Instruction, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{where}: the entry is {entries!r:.80}; it must be a list of objects")
    found = []
    for entry in entries:
        attributes = _strings(entry.get("instruction_attributes"), "instruction_attributes", where)
        options = entry.get("instruction_options", [])
        if not isinstance(options, Mapping):
            options = dict(enumerate(_strings(options, "instruction_options", where)))
        named = {str(name): str(value) for name, value in options.items()}
        found.append(Instruction(_instruction(entry, where), attributes, named))
    return tuple(found)


def _instruction(entry: Mapping[str, Any], where: str) -> str:
    if not isinstance(entry.get("instruction"), str):
        raise ValueError(f"{where}: `instruction` is {entry.get('instruction')!r:.80}, not a text")
    return entry["instruction"]


def _strings(value: Any, name: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{where}: `{name}` is {value!r:.80}; it must be a list of texts")
    return tuple(value)
